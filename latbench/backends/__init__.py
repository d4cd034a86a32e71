"""Engines that multiply one layer: a file each, imported only in the process that runs it."""
