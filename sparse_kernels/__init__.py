"""What a sparse weight is, and how it multiplies."""
