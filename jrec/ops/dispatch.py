"""Which implementation of an op runs: XLA everywhere, native kernels on CPU, Pallas kernels on GPU.

``None`` takes the fastest one measured for the platform the program is *lowered* for, so a program compiled on a CPU
machine for a GPU holds the GPU's choice. An explicit name never falls back silently.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax

Implementation = Literal["xla", "native", "pallas"]
IMPLEMENTATIONS: tuple[str, ...] = get_args(Implementation)


@functools.cache
def native_unavailable() -> str | None:
    """Why the native CPU kernels cannot run here, or None where they can; warns once, since defaults lean on them."""
    try:
        from jrec.native import xla
    except ImportError as error:
        reason = f"they cannot be imported: {error}"
    else:
        reason = xla.unavailable()
    if reason is not None:
        warnings.warn(f"jrec's native CPU kernels are off ({reason}); XLA's slower ones are used", stacklevel=3)
    return reason


def dispatch(
    op: str,
    implementation: Implementation | None,
    args: tuple[Any, ...],
    *,
    xla: Callable[..., Any],
    native: Callable[..., Any] | None = None,
    pallas: Callable[..., Any] | None = None,
) -> Any:
    """Calls the implementation of ``op`` that ``implementation`` names, or the default of the lowering platform.

    Raises:
      ValueError: for an unknown name.
      NotImplementedError: where the named implementation does not cover this op or cannot run here.
    """
    if implementation is None:
        if native is None or native_unavailable() is not None:
            return xla(*args)
        return jax.lax.platform_dependent(*args, cpu=native, default=xla)
    if implementation == "xla":
        return xla(*args)
    if implementation == "native":
        if native is None:
            raise NotImplementedError(f"{op} has no native implementation for these arguments; use 'xla' or None")
        if (reason := native_unavailable()) is not None:
            raise NotImplementedError(f"{op}: native kernels cannot run here ({reason}); use 'xla' or None")
        return native(*args)
    if implementation == "pallas":
        if pallas is None:
            raise NotImplementedError(f"{op} has no Pallas implementation for these arguments; use 'xla' or None")
        return pallas(*args)
    raise ValueError(
        f"implementation={implementation!r} is unknown; choose None or one of {', '.join(IMPLEMENTATIONS)}"
    )
