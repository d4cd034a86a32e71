"""Tables of times: columns, storage, reading, writing, checks and comparisons."""
