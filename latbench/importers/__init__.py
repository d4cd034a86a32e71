"""Import of times that others published, as rows of a table."""
