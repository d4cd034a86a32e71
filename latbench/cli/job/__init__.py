"""The steps of `latbench run`, and their progress."""
