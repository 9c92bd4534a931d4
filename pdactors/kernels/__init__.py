"""CPU kernels in numba: they read weights and the arena in place. `forward.py` puts them together."""
