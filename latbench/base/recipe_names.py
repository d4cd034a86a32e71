"""Names of training recipes that commands and training share."""

AUTO_RECIPE = "auto"
"""The recipe that is chosen for a model and a time budget."""
