"""`python -m latbench`: the command line, for an interpreter whose scripts are not on the path."""

from latbench.cli.main import main

main()
