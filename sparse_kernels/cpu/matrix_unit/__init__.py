"""Products by the matrix unit that some processors have (AMX): of float32 in thirds of bfloat16, and of bytes."""
