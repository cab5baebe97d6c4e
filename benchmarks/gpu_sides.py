"""One implementation's programs over a case of the GPU benchmark, and the comparison of two implementations.

Only one side's tables are on the device at a time. They are the same for every side, made by a hash; what must agree is
kept as a ``Trace``: a sample of the outputs, a sample of the touched rows, and a checksum of all other rows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import gpu_cases
from benchmarks.gpu_cases import CAST_AND_UPDATE, FORWARD, Case
from benchmarks.gpu_timing import Loop
from jrec import ops
from jrec.ops.dispatch import Implementation
from jrec.ops.types import Bags, Cast

BATCHES = 3  # sets of ids in rotation
SAMPLE = 65_536  # bags and touched rows that are compared
TOLERANCE: Mapping[str, float] = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 4e-3}  # of the largest value


class SidesDifferError(RuntimeError):
    """Two implementations computed different numbers; neither's times mean anything."""


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def filled(rows: int, dim: int, dtype: str = "float32") -> jax.Array:
    """(rows, dim) values in [-1, 1) by a hash of their place, made in one pass without temporaries."""
    row, column = (jax.lax.broadcasted_iota(jnp.uint32, (rows, dim), axis) for axis in (0, 1))
    mixed = (row * jnp.uint32(0x9E3779B1) ^ column * jnp.uint32(0x85EBCA6B)) * jnp.uint32(0x27D4EB2F)
    values = (mixed >> 8).astype(jnp.float32) * jnp.float32(2.0**-23) - jnp.float32(1)
    return values.astype(dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batches:
    """The batches of a case, on the device once for all sides.

    Attributes:
      ids: By batch and stack, as ``stacked_ids`` gives them.
      bags: By batch, by stack: the ids without a cast.
      casts: By batch, by stack.
      gradients: By batch, by stack: (bags, dim) float32, the same values in each batch.
    """

    ids: list[list[np.ndarray]]
    bags: list[dict[str, Bags]]
    casts: list[dict[str, Cast]]
    gradients: list[dict[str, jax.Array]]

    @staticmethod
    def of(case: Case, count: int = BATCHES) -> Batches:
        """Draws ids, and casts them by XLA."""
        ids = [[gpu_cases.stacked_ids(stack, seed=seed) for stack in case.stacks] for seed in range(count)]
        names = [stack_name(number) for number in range(len(case.stacks))]
        offsets = [gpu_cases.stacked_offsets(stack) for stack in case.stacks]
        bags = [
            {
                name: Bags(ids=jnp.asarray(i), offsets=None if o is None else jnp.asarray(o), cast=_no_cast(i.size))
                for name, i, o in zip(names, batch, offsets, strict=True)
            }
            for batch in ids
        ]
        rows = {name: sum(stack.rows) for name, stack in zip(names, case.stacks, strict=True)}
        cast = jax.jit(functools.partial(_casts, rows=tuple(rows.items()), implementation="xla"))
        gradients = {
            name: filled(stack.batch * stack.num_tables, stack.dim)
            for name, stack in zip(names, case.stacks, strict=True)
        }
        needs_casts = case.metrics != (FORWARD,)
        return Batches(
            ids=ids, bags=bags, casts=[cast(b) for b in bags] if needs_casts else [], gradients=[gradients] * count
        )


def _no_cast(lookups: int) -> Cast:
    """A cast of zeros: without one, ``lookup`` makes its own, which is not what a forward pass is timed for."""
    none = jnp.zeros((0,), jnp.int32)
    zeros = jnp.zeros((lookups,), jnp.int32)
    return Cast(
        rows=none,
        offsets=jnp.zeros((1,), jnp.int32),
        sources=zeros,
        positions=zeros,
        num_unique=jnp.zeros((), jnp.int32),
    )


def stack_name(number: int) -> str:
    """The key of a stack in dictionaries."""
    return f"stack{number}"


def _casts(
    bags: Mapping[str, Bags], *, rows: tuple[tuple[str, int], ...], implementation: Implementation
) -> dict[str, Cast]:
    return {
        name: ops.tensor_cast(bags[name].ids, bags[name].offsets, num_rows=n, implementation=implementation)
        for name, n in rows
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """What a side computed from the first batch, on the host.

    Attributes:
      outputs: By stack, a sample of the forward pass's sums, float32.
      touched: By stack, a sample of the rows that one update touched, after it, as float32.
      untouched: By stack, the untouched rows' checksum before and after the update.
    """

    outputs: dict[str, np.ndarray]
    touched: dict[str, np.ndarray]
    untouched: dict[str, tuple[int, int]]


class Side:
    """The programs of one implementation over a case."""

    def __init__(self, case: Case, batches: Batches, name: Implementation) -> None:
        self.case, self.batches = case, batches
        self.name: Implementation = name
        self._rows = tuple((stack_name(number), sum(stack.rows)) for number, stack in enumerate(case.stacks))

    def tables(self) -> dict[str, jax.Array]:
        """New tables by stack, the same in every call."""
        return {
            stack_name(number): filled(sum(stack.rows), stack.dim, self.case.dtype)
            for number, stack in enumerate(self.case.stacks)
        }

    def slots(self, tables: dict[str, jax.Array]) -> dict[str, Any]:
        """New slots."""
        return ops.init_slots(self.case.optimizer, tables)

    def forward(self, tables: Any, state: Any, batch: dict[str, Bags]) -> tuple[Any, Any]:
        """A ``Step``: sums of every bag."""
        activations, _ = ops.lookup(tables, batch, implementation=self.name)
        return state, activations

    def update(self, fixed: Any, state: Any, batch: tuple[dict[str, Cast], dict[str, jax.Array]]) -> tuple[Any, Any]:
        """A ``Step``: one optimizer step along the bags' gradients, from a cast that was made before."""
        tables, slots = state
        casts, gradients = batch
        residuals = {name: ops.Residuals(cast=cast) for name, cast in casts.items()}
        return ops.apply_gradients(
            self.case.optimizer, tables, slots, residuals, gradients, implementation=self.name
        ), None

    def cast_and_update(
        self, fixed: Any, state: Any, batch: tuple[dict[str, Bags], dict[str, jax.Array]]
    ) -> tuple[Any, Any]:
        """A ``Step``: the same with the cast on the device."""
        bags, gradients = batch
        return self.update(fixed, state, (_casts(bags, rows=self._rows, implementation=self.name), gradients))

    def loop(self, metric: str, *, rounds: int) -> Loop:
        """The loop that times ``metric``, over tables of its own."""
        made = self.batches
        tables = self.tables()
        if metric == FORWARD:
            return Loop(self.forward, tables, None, made.bags, rounds=rounds)
        state = (tables, self.slots(tables))
        if metric == CAST_AND_UPDATE:
            inputs: list[Any] = list(zip(made.bags, made.gradients, strict=True))
            return Loop(self.cast_and_update, None, state, inputs, rounds=rounds)
        return Loop(self.update, None, state, list(zip(made.casts, made.gradients, strict=True)), rounds=rounds)

    def trace(self) -> Trace:
        """Runs forward and update once on the first batch, and takes samples inside jit: no second table anywhere."""
        tables = self.tables()
        outputs = jax.jit(lambda t, b: {n: _sample(x) for n, x in self.forward(t, None, b)[1].items()})
        sampled = {name: np.asarray(x) for name, x in outputs(tables, self.batches.bags[0]).items()}
        if not self.batches.casts:
            return Trace(outputs=sampled, touched={}, untouched={})
        slots = self.slots(tables)
        unique = {stack_name(n): np.unique(ids[ids >= 0]) for n, ids in enumerate(self.batches.ids[0])}
        masks = {name: _mask(len(tables[name]), jnp.asarray(rows)) for name, rows in unique.items()}
        before = {name: int(_checksum(table, masks[name])) for name, table in tables.items()}
        step = jax.jit(lambda state, batch: self.update(None, state, batch)[0], donate_argnums=0)
        tables, _ = step((tables, slots), (self.batches.casts[0], self.batches.gradients[0]))
        touched, untouched = {}, {}
        for name, table in tables.items():
            rows = unique[name]
            picked = jnp.asarray(_sample(rows))
            touched[name] = np.asarray(jnp.take(table, picked, axis=0).astype(jnp.float32))
            untouched[name] = before[name], int(_checksum(table, masks[name]))
        return Trace(outputs=sampled, touched=touched, untouched=untouched)


def _sample(values: Any) -> Any:
    """At most ``SAMPLE`` of an array's rows, evenly spread."""
    return values[:: max(1, -(-len(values) // SAMPLE))]


@functools.partial(jax.jit, static_argnums=0)
def _mask(rows: int, touched: jax.Array) -> jax.Array:
    return jnp.zeros(rows, jnp.bool).at[touched].set(True)


@jax.jit
def _checksum(table: jax.Array, touched: jax.Array) -> jax.Array:
    """() uint32 over the bits of untouched rows and their places, in one fused pass."""
    width = jnp.uint32 if table.dtype.itemsize == 4 else jnp.uint16
    bits = jax.lax.bitcast_convert_type(table, width).astype(jnp.uint32)
    row, column = (jax.lax.broadcasted_iota(jnp.uint32, table.shape, axis) for axis in (0, 1))
    mixed = (bits ^ (row * jnp.uint32(0x9E3779B1))) * jnp.uint32(0x85EBCA6B) ^ (column * jnp.uint32(0xC2B2AE35))
    return jnp.sum(jnp.where(touched[:, None], jnp.uint32(0), mixed), dtype=jnp.uint32)


def compare(case: Case, got: Trace, want: Trace) -> float:
    """The largest difference of two sides, as a fraction of the largest value.

    Raises:
      SidesDifferError: For more than rounding, for values that are not finite, and for rows that changed though no id
        named them.
    """
    worst = 0.0
    for compared, ours, theirs in (
        ("forward", got.outputs, want.outputs),
        ("update", got.touched, want.touched),
    ):
        for name, reference in theirs.items():
            error = float(np.max(np.abs(ours[name] - reference)) / np.max(np.abs(reference)))
            if not error < TOLERANCE[case.dtype if compared == "update" else "float32"]:  # NaN fails too
                raise SidesDifferError(f"{compared} of {name} differs by {error:.1e} of the largest value")
            worst = max(worst, error)
    for name, (before, after) in got.untouched.items():
        if before != after:
            raise SidesDifferError(f"the update changed rows of {name} that no id names: checksum {before} -> {after}")
    return worst
