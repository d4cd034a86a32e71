"""Algorithms that search a profile of low loss, one in each file."""
