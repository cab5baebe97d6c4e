"""The tensor-train kernels inside jit on CPU; ``jrec.ops.tt.products`` calls them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrec.ops.types import Cast


def expand(below: jax.Array, core: jax.Array, parents: jax.Array, digits: jax.Array, count: jax.Array) -> jax.Array:
    """(P, A, R) by slices of (m, R, N): (capacity, A, N) float32, undefined from ``count`` on."""
    result = jax.ShapeDtypeStruct((parents.shape[0], below.shape[1], core.shape[2]), jnp.float32)
    return _call("tt_expand", [result])(below, core, parents, digits, count, threads=_threads())[0]


def expand_transpose(
    gradient: jax.Array,
    below: jax.Array,
    core: jax.Array,
    parents: jax.Array,
    digits: jax.Array,
    count: jax.Array,
    below_count: jax.Array,
    by_digit: Cast,
) -> tuple[jax.Array, jax.Array]:
    """Gradients (P, A, R), undefined from ``below_count`` on, and (m, R, N), from that of ``expand``'s output."""
    results = [jax.ShapeDtypeStruct(a.shape, jnp.float32) for a in (below, core)]
    lists = by_digit.rows, by_digit.offsets, by_digit.positions, by_digit.num_unique
    call = _call("tt_expand_transpose", results)
    of_below, of_core = call(
        gradient, below, core.swapaxes(1, 2), parents, digits, count, below_count, *lists, threads=_threads()
    )
    return of_below, of_core


def _call(name: str, results: Sequence[jax.ShapeDtypeStruct]) -> Callable[..., Any]:
    return jax.ffi.ffi_call(_registered(name), results, vmap_method="sequential", has_side_effect=False)


@functools.cache
def _registered(name: str) -> str:
    """Registers the handler of a call with XLA; its target name."""
    import ctypes

    from jrec.native import tt_handlers

    target = f"jrec_{name}"
    capsule = jax.ffi.pycapsule(ctypes.c_void_p(getattr(tt_handlers, f"{name}_handler").address))
    jax.ffi.register_ffi_target(target, capsule, platform="cpu", api_version=1)
    return target


def _threads() -> np.int64:
    from jrec.native.threads import num_threads

    return np.int64(num_threads())
