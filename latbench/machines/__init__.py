"""What is measured on: CPUs and GPUs, their names, ceilings and noise."""
