"""Which implementation of an op runs: native kernels on CPU, on NVIDIA GPUs what their verdicts say, XLA elsewhere.

``None`` decides by the platform the program is *lowered* for, so one program may hold all of them. On a GPU it takes a
Pallas kernel only where ``jrec.ops.verdicts`` has it as right and faster. An explicit name never falls back silently.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax

from jrec.ops.verdicts import KernelClass, gpu_choice

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
    kernel: KernelClass | None = None,
) -> Any:
    """Calls the implementation of ``op`` that ``implementation`` names, or the default of the lowering platform.

    Args:
      op: The op's name, for messages.
      implementation: A name, or None for the default.
      args: The arguments, pytrees of arrays.
      xla: The reference.
      native: The CPU's kernel, or None.
      pallas: The GPU's kernel, or None.
      kernel: Which verdict decides on ``pallas`` where nobody named it; None never takes it.

    Raises:
      ValueError: for an unknown name.
      NotImplementedError: where the named implementation does not cover this op or cannot run here.
    """
    if implementation is None:
        per_platform: dict[str, Callable[..., Any]] = {}
        if native is not None and native_unavailable() is None:
            per_platform["cpu"] = native
        if pallas is not None and kernel is not None and gpu_choice(kernel) == "pallas":
            per_platform["cuda"] = _where_it_serves(pallas, xla)
        return jax.lax.platform_dependent(*args, **per_platform, default=xla) if per_platform else xla(*args)
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


def _where_it_serves(pallas: Callable[..., Any], xla: Callable[..., Any]) -> Callable[..., Any]:
    """A chosen, not a named, kernel: XLA takes what it does not cover, such as rows too long for it.

    Under ``vmap`` XLA does all, since a kernel over a batch is other code than the one that was checked.
    """

    @jax.custom_batching.custom_vmap
    def run(*args: Any) -> Any:
        try:
            return jax.jit(pallas, inline=True)(*args)  # in a trace of its own, which vanishes where it is refused
        except NotImplementedError:
            return xla(*args)

    @run.def_vmap
    def batched(size: int, is_batched: Any, *args: Any) -> Any:
        axes = jax.tree.map(lambda one: 0 if one else None, tuple(is_batched))
        out = jax.vmap(xla, in_axes=axes, axis_size=size)(*args)
        return out, jax.tree.map(lambda _: True, out)

    return run
