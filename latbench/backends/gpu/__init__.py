"""Engines on a GPU, what prepares a point for them, and which of them are installed and work."""
