"""Calls of native handlers from jitted programs; a handler is compiled, or found in the cache, when first called."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import NoReturn

import jax
import numpy as np

from jrec.ops.varying import varying_like


def custom_call(
    module: str, name: str, results: Sequence[jax.ShapeDtypeStruct], aliases: dict[int, int] | None = None
) -> Callable[..., Sequence[jax.Array]]:
    """The call of ``jrec.native.MODULE.NAME_handler``, whose ``aliases`` are results by operands in their place."""
    run = jax.ffi.ffi_call(
        _registered(module, name),
        results,
        # The handlers know no batch axis: a mapped call becomes a loop of calls.
        vmap_method="sequential",
        input_output_aliases=aliases,
        # What is written in place are results, too (aliases): XLA may drop a call whose results nobody reads.
        has_side_effect=False,
    )

    def call(*operands: jax.Array, **attributes: object) -> Sequence[jax.Array]:
        def varying(
            *operands: jax.Array,
        ) -> Sequence[jax.Array]:  # JAX does not know over which axes of a mesh results vary
            return varying_like(run(*operands, **attributes), operands)

        return without_derivative(name, varying)(*operands)

    return call


def without_derivative[R](name: str, run: Callable[..., R]) -> Callable[..., R]:
    """The function, whose differentiation raises a TypeError that says what to use instead."""
    refusing = jax.custom_jvp(lambda *operands: run(*operands))
    refusing.defjvp(functools.partial(_refuse_derivative, name))
    return refusing


def _refuse_derivative(name: str, primals: object, tangents: object) -> NoReturn:
    raise TypeError(
        f"jrec's native kernel {name!r} has no derivative. Differentiate embedding_bag, gather_reduce, lookup or"
        " tt_embedding_bag, which have all derivatives by tables, cores and weights, or name implementation='xla'"
    )


@functools.cache
def _registered(module: str, name: str) -> str:
    """Registers a handler with XLA; its target name."""
    import ctypes

    handler = getattr(importlib.import_module(f"jrec.native.{module}"), f"{name}_handler")
    target = f"jrec_{name}"
    jax.ffi.register_ffi_target(
        target, jax.ffi.pycapsule(ctypes.c_void_p(handler.address)), platform="cpu", api_version=1
    )
    return target


def threads_attribute() -> np.int64:
    """How many threads a call may use."""
    from jrec.native.threads import num_threads

    return np.int64(num_threads())
