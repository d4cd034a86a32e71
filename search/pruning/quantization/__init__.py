"""Eight bits: how layers read their inputs, and weights that make up for their rounding."""
