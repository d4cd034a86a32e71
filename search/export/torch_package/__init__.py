"""Exports to a package of torch, compiled ahead of time."""
