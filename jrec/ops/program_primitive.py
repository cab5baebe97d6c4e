"""JAX primitives whose program is a parameter: functions that are closed under JAX's transformations.

A derivative rule of JAX's own decorators belongs to one direction and one order. A primitive may have a rule for
tangents and one for transposes, whose results are primitives again. Its program is traced where it is bound and kept
with it, so that JAX finds what is in it (partitioning rules need devices to be lowered) and knows the axes of a mesh
over which results vary. Under ``vmap`` the program is mapped, and the primitive remembers over which operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jaxtyping import PyTree

from jrec.ops.types import TreeStructure
from jrec.ops.varying import varying_like
from jrec.pallas.closed import effects_outside

Run = Callable[..., PyTree]
"""A function of arrays and static keywords to a pytree of arrays."""
Tangent = jax.Array | ad.Zero
Batch = tuple[tuple[bool, ...], ...]
"""For each vmap, the outermost first, which operands have a leading axis for it."""


class ProgramPrimitive:
    """A primitive that runs ``run(*operands, **params)``.

    Args:
      name: As programs show it.
      run: A function of arrays and static keywords to a pytree of arrays.

    Attributes:
      primitive: JAX's, whose results are the leaves, for derivative rules. Their parameters are ``params``, ``batch``,
        ``jaxpr``, and ``structure``, the results' tree structure.
    """

    def __init__(self, name: str, run: Run):
        self.primitive = Primitive(name)
        self.primitive.multiple_results = True
        self._run = run
        self.primitive.def_impl(_evaluated)
        # From jax 0.12 on a program may hold what is resolved after differentiation, as sums of gradients in place are.
        self.primitive.to_lojax = _evaluated
        self.primitive.def_effectful_abstract_eval(lambda *_, jaxpr, **__: (jaxpr.out_avals, effects_outside(jaxpr)))
        batching.primitive_batchers[self.primitive] = self._batched
        mlir.register_lowering(self.primitive, mlir.lower_fun(_evaluated, multiple_results=True))

    def __call__(self, *operands: jax.Array, batch: Batch = (), **params: object) -> PyTree:
        """The results; ``batch`` says which operands have axes that the program is mapped over."""
        # Inside shard_map loops need operands that vary alike; the transpose of what makes them so sums over devices.
        operands = tuple(varying_like(list(operands), list(operands)))
        # Traced here, where the mesh and its axes are known; the primitive then carries the program along.
        jaxpr, results = jax.make_jaxpr(mapped(self._run, batch, **params), return_shape=True)(*operands)
        structure = jax.tree.structure(results)
        leaves = self.primitive.bind(*operands, jaxpr=jaxpr, structure=structure, batch=batch, **params)
        return jax.tree.unflatten(structure, leaves)

    def differentiated_as(self, run: Run) -> None:
        """Has tangents computed by ``jax.jvp`` of another function with the same results, of plain JAX."""

        def rule(
            primals: Sequence[jax.Array],
            tangents: Sequence[Tangent],
            *,
            batch: Batch,
            jaxpr: ClosedJaxpr,
            structure: TreeStructure,
            **params: object,
        ) -> tuple[list[jax.Array], list[jax.Array]]:
            changing = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

            def of_changing(*chosen: jax.Array) -> PyTree:
                operands = exchanged(primals, changing, chosen)
                return mapped(run, batch, **params)(*varying_like(operands, operands))

            _, changes = jax.jvp(of_changing, [primals[i] for i in changing], [tangents[i] for i in changing])
            leaves = self.primitive.bind(*primals, jaxpr=jaxpr, structure=structure, batch=batch, **params)
            return leaves, jax.tree.leaves(changes)

        ad.primitive_jvps[self.primitive] = rule

    def _batched(
        self,
        operands: Sequence[jax.Array],
        axes: Sequence[int | None],
        *,
        batch: Batch,
        jaxpr: ClosedJaxpr,
        structure: TreeStructure,
        **params: object,
    ) -> tuple[list[jax.Array], list[int]]:
        del jaxpr, structure
        flags = tuple(axis is not None for axis in axes)
        moved = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(operands, axes, strict=True)]
        leaves = jax.tree.leaves(self(*moved, batch=(flags, *batch), **params))
        return leaves, [0] * len(leaves)


def mapped(run: Run, batch: Batch, **params: object) -> Run:
    """``run`` under the vmaps of ``batch``."""
    if not batch:
        return lambda *operands: run(*operands, **params)
    axes = tuple(0 if flag else None for flag in batch[0])
    return lambda *operands: jax.vmap(mapped(run, batch[1:], **params), in_axes=axes)(*operands)


def exchanged[T](operands: Sequence[T], which: Sequence[int], replacements: Sequence[T]) -> list[T]:
    """The operands, with ``replacements`` at the positions ``which``."""
    new = list(operands)
    for place, replacement in zip(which, replacements, strict=True):
        new[place] = replacement
    return new


def summed_over(array: jax.Array, batch: Batch, operand: int) -> jax.Array:
    """A cotangent with an axis for every vmap, summed over those that the operand has no axis for."""
    shared = tuple(level for level, flags in enumerate(batch) if not flags[operand])
    return jnp.sum(array, axis=shared) if shared else array


def no_tangent(value: jax.Array) -> ad.Zero:
    """The tangent of what does not change, or whose change nothing asks for."""
    return ad.Zero(jax.typeof(value).to_tangent_aval())


def _evaluated(*operands: jax.Array, jaxpr: ClosedJaxpr, **_: object) -> list[jax.Array]:
    return jaxpr_as_fun(jaxpr)(*operands)
