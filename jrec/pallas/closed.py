"""Kernels that write to a mutable array of their own, as one primitive from outside.

``jax.custom_jvp`` must not hold such arrays: JAX resolves them when it lowers a program, and has no rule for
``custom_jvp`` there. Inside a primitive's own lowering it resolves them first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir
from jaxtyping import PyTree


def closed[Result](function: Callable[..., Result], *args: PyTree) -> Result:
    """Calls ``function``, which is traced by itself, with pytrees of arrays; it has no derivative."""
    jaxpr, out = jax.make_jaxpr(function, return_shape=True)(*args)
    return jax.tree.unflatten(jax.tree.structure(out), _closed_p.bind(*jax.tree.leaves(args), jaxpr=jaxpr))


def _run(*operands: jax.Array, jaxpr: ClosedJaxpr) -> list[jax.Array]:
    return jaxpr_as_fun(jaxpr)(*operands)


def effects_outside(jaxpr: ClosedJaxpr) -> set[object]:
    """A program's effects without the one for its own mutable arrays, which the lowering of a primitive resolves."""
    internal = "InternalMutableArrayEffect"  # JAX exports no name for it
    return {effect for effect in jaxpr.effects if type(effect).__name__ != internal}


def _batched(
    operands: Sequence[jax.Array], axes: Sequence[int | None], *, jaxpr: ClosedJaxpr
) -> tuple[list[jax.Array], list[int]]:
    out = closed(jax.vmap(jaxpr_as_fun(jaxpr), in_axes=tuple(axes)), *operands)
    return out, [0] * len(out)


_closed_p = Primitive("jrec_kernels")
_closed_p.multiple_results = True
_closed_p.def_impl(lambda *operands, jaxpr: jax.jit(jaxpr_as_fun(jaxpr))(*operands))
_closed_p.def_effectful_abstract_eval(lambda *_, jaxpr: (jaxpr.out_avals, effects_outside(jaxpr)))
batching.primitive_batchers[_closed_p] = _batched
mlir.register_lowering(_closed_p, mlir.lower_fun(_run, multiple_results=True))
