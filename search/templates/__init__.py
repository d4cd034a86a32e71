"""Templates of task files, which `latbench new` copies."""
