"""Times that others have published, as rows of a table."""
