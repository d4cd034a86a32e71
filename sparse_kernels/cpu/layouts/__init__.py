"""How panels of weights, vectors and padded images lie in memory."""
