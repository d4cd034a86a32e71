"""Files that a search leaves: the database of pruned layers, the profile, the ONNX model."""
