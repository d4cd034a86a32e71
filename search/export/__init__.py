"""A pruned model that leaves Python: its steps, the C that runs them, and the folder that is deployed."""
