"""What every part of latbench may use: files that are written whole, units, versions, the control group."""
