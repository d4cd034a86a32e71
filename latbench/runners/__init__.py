"""Where a point runs: a process of its own on this machine."""
