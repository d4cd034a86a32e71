"""CPUs and GPUs: names, environments, clocks, performance ceilings, sources of noise."""
