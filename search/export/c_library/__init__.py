"""Exports to a library with a C interface."""
