"""Sweeps: what is measured in which order, on this machine or a cluster, and what is kept."""
