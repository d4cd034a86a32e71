"""Time sparse kernels, keep the tables, print what pays: measuring, tables and the command line."""

MOST_SEED = 2**32 - 1
"""The largest seed that NumPy, torch, scikit-learn and the tables all take; the least is 0."""
