"""Runs kernels in Pallas' GPU interpreter and refuses data races."""

import contextlib

from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from jrec.pallas.interpret import interpreted


@contextlib.contextmanager
def race_free():
    """Interprets kernels; fails where two blocks touch the same memory without order, one of them writing."""
    with interpreted(detect_races=True):
        yield
    assert not gpu_callbacks.get_races().races_found
