"""Latency cost models: scikit-learn estimators with intervals."""
