"""What a search leaves on disk: the database of pruned layers, the profile, the ONNX model."""
