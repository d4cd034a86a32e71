"""Helpers for every part of latbench: atomic files, number formats, environments, control groups, YAML."""
