"""What a user types: `latbench` and its verbs, and the command of a short visit to a GPU machine."""
