"""Rows of a table as a cost model sees them: training rows, keys and layer shapes."""
