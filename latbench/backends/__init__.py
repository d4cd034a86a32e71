"""How a point is prepared and run: one file an engine."""
