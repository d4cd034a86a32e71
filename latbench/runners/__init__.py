"""Where points run: worker processes on this machine, nodes of a cluster; and the lock of a device."""
