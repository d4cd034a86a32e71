"""Packed sparse weights, one file a format."""
