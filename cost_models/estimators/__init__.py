"""Cost models as scikit-learn estimators: a look-up, a roofline, boosted trees, both together, and a transfer."""
