"""Training under masks: the pruners, their schedules, recipes and checkpoints."""
