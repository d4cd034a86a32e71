"""Numbers that describe a layer: its work, its pattern and how far it lies outside the measured ranges."""
