"""The start of a process: JAX, its devices, the other processes and the cache of compiled programs."""
