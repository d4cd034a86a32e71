"""The algorithms that look for a profile of low loss, one a file."""
