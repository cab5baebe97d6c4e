"""Tensor-train embedding bags in one phase, with derivatives of any order and in either direction.

A bag's sum is linear in each core and in the weights. So its tangent is a sum of lookups with one of them exchanged for
its change, and the transpose of that tangent is the backward pass of ``jrec.ops.tt.contract``: the gradients of all
cores at once, aggregated on unique rows and prefixes (EL-Rec), from what the forward pass left. Derivatives of these
two are rare (Hessians), and are taken by JAX itself of the contraction "naive", which gives the same numbers id by id.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.interpreters import ad

from jrec.ops.arrays import AnyBagged, AnyIds, AnyOffsets, AnyWeights
from jrec.ops.bag_sums import bag_weight_gradient
from jrec.ops.dispatch import Implementation
from jrec.ops.embedding_bag import Combiner, check_combiner, max_of_bags, normalized_weights
from jrec.ops.explicit_axes import auto_inside, like_bags
from jrec.ops.forms import formed
from jrec.ops.program_primitive import Batch, ProgramPrimitive, Tangent, exchanged, no_tangent, summed_over
from jrec.ops.tt.contract import TTResiduals, naive_bag
from jrec.ops.tt.cost import Contraction, TTTraffic
from jrec.ops.tt.init import Cores
from jrec.ops.tt.lookup import LookupConfig, checked_lookup, forward, tt_core_gradients
from jrec.ops.tt.products import expand
from jrec.ops.tt.shape import TTShape, check_shape
from jrec.ops.types import TreeStructure


@auto_inside(lambda cores, shape, ids, offsets=None, **_: like_bags(ids, offsets))
def tt_embedding_bag(
    cores: Cores,
    shape: TTShape,
    ids: AnyIds,
    offsets: AnyOffsets | None = None,
    *,
    weights: AnyWeights | None = None,
    combiner: Combiner = "sum",
    contraction: Contraction | None = None,
    traffic: TTTraffic | None = None,
    implementation: Implementation | None = None,
) -> AnyBagged:
    """Pools rows of a tensor-train table into bags, differentiable in ``cores`` and ``weights``.

    Derivatives are of any order, in either direction. The first gradient is EL-Rec's, aggregated on unique rows and
    prefixes; higher derivatives are taken id by id.

    Args:
      cores: float32 or bfloat16, ``shape.core_shapes`` each (``tt_init``, ``tt_svd``). Products and sums are float32.
      shape: The table's shape.
      ids: Integers of any type, in the forms of ``embedding_bag``: padded, where negative ids are absent, or ragged,
        (capacity,) with ``offsets``.
      offsets: (num_bags + 1,) integers, ascending from 0 and at most ``capacity``, or None.
      weights: float32 of the shape of ``ids``, or None.
      combiner: "sum"; "mean" divides by the number of ids in the bag, "sqrtn" by its square root; "max" is the
        elementwise maximum of ``weights * row``, for which the rows of all lookups are in memory. Empty bags are zero.
      contraction: "unique" makes the product of each unique prefix and row once; "dense" all products of the first two
        cores as one GEMM, the rest as "unique"; "sample" sums the last slices of a bag's rows with a common prefix
        first, the rest as "unique"; "naive" works id by id, as TT-Rec. None for what ``explain`` chooses.
      traffic: What a batch asks of the table, for the choice; None for ``TTTraffic.expected``.
      implementation: "xla", "native" (CPU), "pallas" (GPU), or None for the platform's fastest.

    Returns:
      (num_bags, dim) float32, or (batch, features, dim). A bag with an id past the table, or whose offsets descend, are
      negative or too large, is NaN, and other bags may be then; outside jit such ids and offsets raise.

    Raises:
      ValueError: On shapes or dtypes that do not fit, unknown names, or, outside jit, an id past the table or malformed
        offsets.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> shape = TTShape.search(1000, 8, ranks=4)
      >>> cores = jrec.ops.tt_init(shape, jax.random.key(0))
      >>> tt_embedding_bag(cores, shape, jnp.array([[0, 999], [5, -1]], jnp.int32)).shape
      (2, 8)
    """
    check_combiner(combiner)
    check_shape(shape)
    bags = formed(ids, offsets, weights, shape.rows)
    config, cores = checked_lookup(cores, shape, contraction, traffic, implementation)

    def pooled(ids: jax.Array, offsets: jax.Array | None, weights: jax.Array | None) -> jax.Array:
        if contraction == "naive":
            return naive_bag(cores, shape, ids, offsets, weights)
        return _pooled(config, cores, ids, offsets, weights)

    if combiner == "max":
        highest = max_of_bags(lambda one, column: pooled(one, None, column), bags.ids, bags.offsets, bags.weights)
        return bags.in_form(highest)
    scaled = bags.weights
    if combiner != "sum":
        scaled = normalized_weights(bags.ids, bags.offsets, scaled, combiner)
    return bags.in_form(pooled(bags.ids, bags.offsets, scaled))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Bag:
    """What the primitives know of a lookup besides arrays.

    Their operands are the cores and the weights, if there are any (all that a bag is linear in), then ids and, of
    ragged bags, offsets.
    """

    config: LookupConfig
    weighted: bool
    ragged: bool
    # The structure of what the forward pass left, whose arrays are the last operands.
    residuals: TreeStructure | None = None

    @property
    def linear(self) -> int:
        """The number of cores and weights."""
        return self.config.shape.num_cores + self.weighted

    @property
    def operands(self) -> int:
        """The number of operands."""
        return self.linear + 1 + self.ragged

    def split(self, operands: Sequence[jax.Array]) -> tuple[Cores, jax.Array, jax.Array | None, jax.Array | None]:
        """Cores, ids, offsets and weights."""
        ids, *offsets = operands[self.linear : self.operands]
        weights = operands[self.linear - 1] if self.weighted else None
        return tuple(operands[: self.config.shape.num_cores]), ids, offsets[0] if offsets else None, weights


def _pooled(
    config: LookupConfig, cores: Cores, ids: jax.Array, offsets: jax.Array | None, weights: jax.Array | None
) -> jax.Array:
    bag = _Bag(config=config, weighted=weights is not None, ragged=offsets is not None)
    return _sums(*cores, *(x for x in (weights, ids, offsets) if x is not None), bag=bag)[0]


def _forward(*operands: jax.Array, bag: _Bag) -> tuple[jax.Array, TTResiduals]:
    """The bags' sums, and what their gradients need."""
    cores, ids, offsets, weights = bag.split(operands)
    return forward(bag.config, cores, ids, offsets, weights, None)


def _tangent_run(*operands: jax.Array, bag: _Bag, which: tuple[int, ...]) -> jax.Array:
    """The tangent of the sums where the cores and weights of these numbers change; see ``_sums_jvp`` for operands."""
    changes, operands = operands[: len(which)], operands[len(which) :][: bag.operands]
    terms = [
        _forward(*exchanged(operands, [place], [change]), bag=bag)[0]
        for place, change in zip(which, changes, strict=True)
    ]
    return sum(terms[1:], terms[0])


def _gradients_run(gradient: jax.Array, *operands: jax.Array, bag: _Bag) -> list[jax.Array]:
    """The gradients of cores and weights, from the bags' gradient, the operands and the residuals."""
    config, (cores, _, offsets, weights) = bag.config, bag.split(operands)
    residuals: TTResiduals = jax.tree.unflatten(bag.residuals, operands[bag.operands :])
    shape, named = config.shape, config.implementation
    of_cores = tt_core_gradients(
        cores, shape, residuals, gradient, contraction=config.contraction, traffic=config.traffic, implementation=named
    )
    # float32 until here, where JAX wants the cores' own dtype.
    gradients = [g.astype(core.dtype) for g, core in zip(of_cores, cores, strict=True)]
    if weights is not None:
        index, last = residuals.index, cores[-1].astype(jnp.float32)
        below = residuals.products[-1] if residuals.products else cores[0].astype(jnp.float32)[:, 0]
        rows = expand(below, last, index.levels[-1], method="grouped", implementation=named).reshape(-1, shape.dim)
        gradients.append(bag_weight_gradient(rows, index.sources, offsets, gradient))
    return gradients


def _naive_tangent(*operands: jax.Array, bag: _Bag, which: tuple[int, ...]) -> jax.Array:
    changes, rest = operands[: len(which)], operands[len(which) :][: bag.operands]

    def sums(*changing: jax.Array) -> jax.Array:
        return _naive_sums(exchanged(rest, which, changing), bag)

    return jax.jvp(sums, [rest[place] for place in which], changes)[1]


def _naive_gradients(gradient: jax.Array, *operands: jax.Array, bag: _Bag) -> list[jax.Array]:
    which = range(bag.linear)

    def sums(*changing: jax.Array) -> jax.Array:
        return _naive_sums(exchanged(operands, which, changing), bag)

    return list(jax.vjp(sums, *operands[: bag.linear])[1](gradient))


def _naive_sums(operands: Sequence[jax.Array], bag: _Bag) -> jax.Array:
    cores, ids, offsets, weights = bag.split(operands)
    return naive_bag(cores, bag.config.shape, ids, offsets, weights)


_sums = ProgramPrimitive("jrec_tt_bags", _forward)
_tangent = ProgramPrimitive("jrec_tt_bags_tangent", _tangent_run)
_gradients = ProgramPrimitive("jrec_tt_bags_gradients", _gradients_run)
_tangent.differentiated_as(_naive_tangent)
_gradients.differentiated_as(_naive_gradients)


def _sums_jvp(
    primals: Sequence[jax.Array],
    tangents: Sequence[Tangent],
    *,
    bag: _Bag,
    batch: Batch,
    jaxpr: ClosedJaxpr,
    structure: TreeStructure,
) -> tuple[list[jax.Array], list[Tangent]]:
    """The tangent takes the changes, the operands, and the forward pass's residuals, which only its transpose reads."""
    results = _sums.primitive.bind(*primals, bag=bag, batch=batch, jaxpr=jaxpr, structure=structure)
    _, left = structure.children()
    moved = {i: x for i, x in enumerate(tangents[: bag.linear]) if not isinstance(x, ad.Zero)}
    which = tuple(moved)
    levels = tuple((*(flags[i] for i in which), *flags, *[True] * (len(results) - 1)) for flags in batch)
    bag = dataclasses.replace(bag, residuals=left)
    change = _tangent(*moved.values(), *primals, *results[1:], bag=bag, which=which, batch=levels)
    # Residuals are read by the transpose alone: nothing that is differentiated depends on them.
    return results, [change, *map(no_tangent, results[1:])]


def _tangent_transpose(
    cotangents: Sequence[Tangent],
    *operands: Any,
    bag: _Bag,
    which: tuple[int, ...],
    batch: Batch,
    jaxpr: ClosedJaxpr,
    structure: TreeStructure,
) -> list[Tangent | None]:
    del jaxpr, structure
    (gradient,), rest = cotangents, operands[len(which) :]
    none = [None] * len(rest)
    if isinstance(gradient, ad.Zero):
        return [*(ad.Zero(operand.aval) for operand in operands[: len(which)]), *none]
    levels = tuple((True, *flags[len(which) :]) for flags in batch)
    gradients = _gradients(gradient, *rest, bag=bag, batch=levels)
    return [*(summed_over(gradients[place], batch, i) for i, place in enumerate(which)), *none]


ad.primitive_jvps[_sums.primitive] = _sums_jvp
ad.primitive_transposes[_tangent.primitive] = _tangent_transpose
