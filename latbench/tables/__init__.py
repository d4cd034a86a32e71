"""Tables of times: their columns, how they are stored, read, compared and checked."""
