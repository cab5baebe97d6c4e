"""Derivatives of weighted bag sums, of any order and in either direction, without a scatter-add.

With rows ``t``, weights ``w`` and a vector ``g`` for each bag, ``sum_b g_b . sum_j w_j t[ids_j]`` is linear in each of
the three. Its partial derivatives are the ops of an embedding: by ``g`` the bags' sums, by ``t`` the table's dense
gradient (a casted gather-reduce) and by ``w`` the weights' gradient. Each of them is linear in the other two, and its
transpose by one of these is the op of the third. So they are closed under differentiation: one JAX primitive, whose
tangents and transposes are calls of itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.interpreters import ad

from jrec.ops.dispatch import Implementation
from jrec.ops.gather_reduce import gather_reduce, segment_of_entries, take_rows
from jrec.ops.offsets import within_bags
from jrec.ops.program_primitive import Batch, ProgramPrimitive, Tangent, summed_over
from jrec.ops.row_update import casted_gather_reduce
from jrec.ops.row_update_xla import distinct
from jrec.ops.tensor_cast import tensor_cast
from jrec.ops.types import TreeStructure

Part = Literal["bags", "table", "weights"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BagSums:
    """Bag sums of one shape: what their derivatives must know besides arrays.

    Attributes:
      num_rows: Rows of the table.
      dtype: The table's dtype; the bags' sums and the weights are float32.
      weighted: Whether there are weights.
      ragged: Whether bags are ragged, so that offsets stand behind the ids.
      implementation: As for ``gather_reduce``.
    """

    num_rows: int
    dtype: np.dtype
    weighted: bool
    ragged: bool
    implementation: Implementation | None

    @staticmethod
    def of(
        table: jax.Array, offsets: jax.Array | None, weights: jax.Array | None, implementation: Implementation | None
    ) -> BagSums:
        """The description of the bag sums of these arguments of ``gather_reduce``."""
        return BagSums(
            num_rows=table.shape[0],
            dtype=table.dtype,
            weighted=weights is not None,
            ragged=offsets is not None,
            implementation=implementation,
        )

    def tangent(
        self,
        primals: tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None],
        of_table: jax.Array | None,
        of_weights: jax.Array | None,
    ) -> jax.Array | None:
        """The bags' tangent, (num_bags, dim) float32, or None where neither table nor weights change.

        Args:
          primals: Table, ids, offsets and weights.
          of_table: The tangent of the table, or None where it is zero.
          of_weights: Likewise.
        """
        table, ids, offsets, weights = primals
        places = (ids,) if offsets is None else (ids, offsets)
        terms = []
        if of_table is not None:
            terms.append(self._bind("bags", {"table": of_table, "weights": weights}, places))
        if of_weights is not None:
            terms.append(self._bind("bags", {"table": table, "weights": of_weights}, places))
        return sum(terms[1:], terms[0]) if terms else None

    def linear_in(self, part: Part) -> list[Part]:
        """The parts that ``part`` is linear in, in the order of its operands."""
        parts: tuple[Part, ...] = ("bags", "table", "weights")
        return [other for other in parts if other != part and (other != "weights" or self.weighted)]

    def run(self, part: Part, *operands: jax.Array) -> jax.Array:
        """``part`` from the parts that it is linear in, ids and, of ragged bags, offsets."""
        named = dict(zip(self.linear_in(part), operands, strict=False))
        ids, *rest = operands[len(named) :]
        offsets = rest[0] if rest else None
        if part == "bags":
            table, weights = named["table"], named.get("weights")
            return gather_reduce(table, ids, offsets, weights=weights, implementation=self.implementation)
        if part == "weights":
            return bag_weight_gradient(named["table"], ids, offsets, named["bags"])
        return self._table_part(named["bags"], ids, offsets, named.get("weights"))

    def _table_part(
        self, bags: jax.Array, ids: jax.Array, offsets: jax.Array | None, weights: jax.Array | None
    ) -> jax.Array:
        num_rows = self.num_rows
        cast = tensor_cast(ids, offsets, num_rows=num_rows, implementation=self.implementation)
        of_rows = casted_gather_reduce(cast, bags, weights, implementation=self.implementation)
        rows = distinct(cast.rows, num_rows)
        # float32 until every row is whole: a bfloat16 table's gradient is rounded once.
        dense = jnp.zeros((num_rows, bags.shape[1]), jnp.float32)
        dense = dense.at[rows].set(of_rows, mode="drop", unique_indices=True, indices_are_sorted=True)
        return dense.astype(self.dtype)

    def _bind(
        self, part: Part, named: Mapping[Part, Any], places: tuple[jax.Array, ...], batch: Batch = ()
    ) -> jax.Array:
        operands = [named[other] for other in self.linear_in(part)] + list(places)
        return _sums(*operands, batch=batch, sums=self, part=part)


def bag_weight_gradient(table: jax.Array, ids: jax.Array, offsets: jax.Array | None, gradient: jax.Array) -> jax.Array:
    """Gradient of a summing bag's weights, float32 of the shape of ``ids``: each id's row by its bag's gradient."""
    rows = take_rows(table, ids, None)
    if offsets is None:
        return jnp.sum(rows * gradient[:, None, :], axis=-1)
    segments = segment_of_entries(offsets, ids.shape[0])
    products = jnp.sum(rows * gradient.at[segments].get(mode="fill", fill_value=0), axis=-1)
    # A weight of a lookup in no bag, or in a malformed one, moves no sum.
    return jnp.where(within_bags(offsets, segments), products, jnp.float32(0))


def _run(*operands: jax.Array, sums: BagSums, part: Part) -> jax.Array:
    return sums.run(part, *operands)


_sums = ProgramPrimitive("jrec_bag_sums", _run)


def _jvp(
    primals: Sequence[jax.Array], tangents: Sequence[Tangent], *, sums: BagSums, part: Part, **params: object
) -> tuple[list[jax.Array], list[jax.Array]]:
    def bind(*operands: jax.Array) -> list[jax.Array]:
        return _sums.primitive.bind(*operands, sums=sums, part=part, **params)

    linear = enumerate(tangents[: len(sums.linear_in(part))])
    changes = [(i, tangent) for i, tangent in linear if not isinstance(tangent, ad.Zero)]
    # The product rule: linear in each part, the tangent is a sum with one part at a time exchanged.
    terms = [bind(*primals[:i], tangent, *primals[i + 1 :])[0] for i, tangent in changes]
    return bind(*primals), [sum(terms[1:], terms[0])]


def _transpose(
    cotangents: Sequence[Tangent],
    *operands: Any,
    sums: BagSums,
    part: Part,
    batch: Batch,
    jaxpr: ClosedJaxpr,
    structure: TreeStructure,
) -> list[Tangent | None]:
    del jaxpr, structure
    (cotangent,), names = cotangents, sums.linear_in(part)
    place = next(i for i, operand in enumerate(operands) if ad.is_undefined_primal(operand))
    none: list[Tangent | None] = [None] * len(operands)
    if isinstance(cotangent, ad.Zero):
        none[place] = ad.Zero(operands[place].aval)
        return none
    named: dict[Part, Any] = {**dict(zip(names, operands, strict=False)), part: cotangent}
    wanted, levels = names[place], []
    # Each vmap maps the operands of the transpose as it did the operands of the op; the cotangent has every axis.
    for flags in batch:
        mapped_parts = {**dict(zip(names, flags, strict=False)), part: True}
        levels.append((*(mapped_parts[other] for other in sums.linear_in(wanted)), *flags[len(names) :]))
    out = sums._bind(wanted, named, operands[len(names) :], tuple(levels))
    none[place] = summed_over(out, batch, place)
    return none


ad.primitive_jvps[_sums.primitive] = _jvp
ad.primitive_transposes[_sums.primitive] = _transpose
