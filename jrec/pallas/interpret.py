"""Interpret mode: the kernels' arithmetic on a machine without a GPU, for tests.

    with interpreted(detect_races=True):
        out = gather_reduce(source, indices, offsets, implementation="pallas")

The choice is made while a function is traced, so a function that was jitted outside keeps its compiled kernels.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

from jax.experimental.pallas import mosaic_gpu as plgpu

_params: contextvars.ContextVar[plgpu.InterpretGPUParams | None] = contextvars.ContextVar(
    "jrec_pallas_interpret", default=None
)


@contextlib.contextmanager
def interpreted(*, detect_races: bool = False) -> Iterator[plgpu.InterpretGPUParams]:
    """Runs kernels that are traced inside in interpret mode, on the CPU; memory that nobody wrote reads as NaN."""
    params = plgpu.InterpretGPUParams(detect_races=detect_races, uninitialized_memory="nan")
    token = _params.set(params)
    try:
        yield params
    finally:
        _params.reset(token)


def interpret_params() -> plgpu.InterpretGPUParams | None:
    """The parameters of the surrounding ``interpreted``, or None to compile for the GPU."""
    return _params.get()
