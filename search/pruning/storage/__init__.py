"""Pruned models on disk: a folder for training and deployment, and one packed file."""
