"""Native CPU kernels: on NumPy arrays (``host``) and inside jit (``xla``)."""
