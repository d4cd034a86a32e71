"""What is to be measured: layers of networks, and the points of a sweep."""
