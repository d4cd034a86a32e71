"""Exports to OpenVINO."""
