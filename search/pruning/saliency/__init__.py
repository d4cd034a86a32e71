"""Which weights matter: scores by magnitude, Fisher information and M-FAC."""
