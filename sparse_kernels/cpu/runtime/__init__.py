"""What kernels share while they run: the cache of compiled code, threads, scratch memory."""
