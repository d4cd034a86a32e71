"""Sweeps: what is measured in which order, on this machine or on many, and what of it is kept."""
