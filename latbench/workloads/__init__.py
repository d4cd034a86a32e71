"""What to measure: layers of networks, and the points of a sweep."""
