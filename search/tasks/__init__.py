"""Bundled tasks: a model, its data, its loss and its score."""
