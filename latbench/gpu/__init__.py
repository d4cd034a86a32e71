"""Sweeps on an NVIDIA GPU: which it is, how it is timed, what is measured on it. What runs there is in `backends`."""
