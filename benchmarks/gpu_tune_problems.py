"""What the tuning sweep times: one kernel each, with a config, on ids that show that kernel."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import workloads
from benchmarks.gpu_sides import filled
from benchmarks.gpu_timing import Loop
from jrec import ops
from jrec.ops.types import Cast
from jrec.pallas import casted_update, gather_reduce, rules
from jrec.pallas.tuning import TuningConfig, tune

OPTIMIZER = ops.RowWiseAdagrad(learning_rate=0.01)
EXPONENTS = {"forward": 1.05, "ragged": 1.2, "update, short": 0.0, "update, long": 1.2, "update, mixed": 1.05}
BATCHES = 2
SAMPLE = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """Rows of the table, bags of a batch, and ids of a bag."""

    rows: int
    bags: int
    length: int

    @staticmethod
    def of(dim: int) -> Size:
        """The design case, with rows so that the table exceeds the L2 cache at every dim."""
        return Size(rows=1_000_000 if dim >= 64 else 4_000_000, bags=16_384, length=20)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """A kernel and its inputs.

    Attributes:
      case: A key of ``EXPONENTS``.
      dim: Elements of a row.
      dtype: The table's dtype, and of the rows that "ragged" sums.
      size: Sizes.
    """

    case: str
    dim: int
    dtype: str
    size: Size

    @property
    def fused(self) -> bool:
        """Whether the kernel updates the table."""
        return self.case.startswith("update")

    @property
    def kind(self) -> str:
        """The kind of kernel, as ``jrec.pallas.measured`` has it."""
        return "update" if self.fused else "padded" if self.case == "forward" else "ragged"

    @property
    def itemsize(self) -> int:
        """Bytes of an element of what is gathered from, or updated."""
        return jnp.dtype(self.dtype).itemsize

    def describe(self) -> str:
        """One line, the same for the same problem."""
        size = self.size
        return (
            f"{self.case}: {size.bags:,} bags x {size.length} ids of {size.rows:,} rows x {self.dim} {self.dtype},"
            f" exponent {EXPONENTS[self.case]:g}"
        )

    def expected_seconds(self) -> float:
        """A guess of one call's time on an H100."""
        return max(1e-5, 2 * self.size.bags * self.size.length * self.dim * self.itemsize / 3e12)

    def default(self) -> TuningConfig:
        """What ``tune`` gives for this kernel, shape and GPU."""
        length = self.size.length if self.case == "forward" else None
        if not self.fused:
            return tune(dim=self.dim, itemsize=self.itemsize, length=length)
        slots = sum(kind == "element" for _, kind in rules.rule_of(OPTIMIZER, self.dim).slots)
        return tune(dim=self.dim, itemsize=self.itemsize, length=length, element_slots=slots)

    @functools.cached_property
    def ids(self) -> list[np.ndarray]:
        """Hashed ids of each batch, (bags, length) int32."""
        size, exponent = self.size, EXPONENTS[self.case]
        drawn = [
            workloads.zipf_ids(np.random.default_rng(seed), size.rows, size.bags * size.length, exponent)
            for seed in range(BATCHES)
        ]
        return [workloads.hashed_ids(ids, size.rows).reshape(size.bags, size.length) for ids in drawn]

    @functools.cached_property
    def batches(self) -> list[Any]:
        """The loop's batches."""
        ids = [jnp.asarray(i) for i in self.ids]
        if self.case == "forward":
            return ids
        cast = jax.jit(functools.partial(ops.tensor_cast, num_rows=self.size.rows, implementation="xla"))
        return [cast(i) for i in ids]

    def loop(self, config: TuningConfig | None, *, rounds: int) -> Loop:
        """The kernel's loop, over a new table; XLA's without a config."""
        table = filled(self.size.rows, self.dim, self.dtype)
        if self.case == "forward":
            return Loop(functools.partial(_forward, config), table, None, self.batches, rounds=rounds)
        if self.case == "ragged":
            rows = filled(self.size.bags, self.dim, self.dtype)
            return Loop(functools.partial(_ragged, config), rows, None, self.batches, rounds=rounds)
        gradients = filled(self.size.bags, self.dim)
        state = (table, OPTIMIZER.init(table))
        return Loop(functools.partial(_update, config), gradients, state, self.batches, rounds=rounds)

    def observe(self, loop: Loop) -> np.ndarray:
        """A sample of what a loop computed in its one dispatch."""
        if not self.fused:
            segments = self.size.bags if self.case == "forward" else np.unique(self.ids[0]).size  # the rest is padding
            sums = loop.outputs[0][:segments]
            return np.asarray(sums[:: max(1, segments // SAMPLE)])
        touched = np.unique(self.ids[0])
        rows = jnp.asarray(touched[:: max(1, touched.size // SAMPLE)])
        return np.asarray(jnp.take(loop.state[0], rows, axis=0).astype(jnp.float32))

    def reference(self, rounds: int) -> np.ndarray:
        """What XLA computes in one dispatch; kept, since every config is compared with it."""
        kept = self.__dict__.setdefault("_references", {})
        if rounds not in kept:
            loop = self.loop(None, rounds=rounds)
            loop.dispatch()
            kept[rounds] = self.observe(loop)
        return kept[rounds]


def _forward(config: TuningConfig | None, table: jax.Array, state: Any, ids: jax.Array) -> tuple[Any, jax.Array]:
    if config is None:
        return state, ops.gather_reduce(table, ids, implementation="xla")
    return state, gather_reduce.gather_reduce(table, ids, config=config)


def _ragged(config: TuningConfig | None, rows: jax.Array, state: Any, cast: Cast) -> tuple[Any, jax.Array]:
    if config is None:
        return state, ops.gather_reduce(rows, cast.sources, cast.offsets, implementation="xla")
    return state, gather_reduce.gather_reduce(rows, cast.sources, cast.offsets, config=config)


def _update(config: TuningConfig | None, gradients: jax.Array, state: Any, cast: Cast) -> tuple[Any, None]:
    table, slots = state
    if config is None:
        return ops.casted_update(OPTIMIZER, table, slots, cast, gradients, implementation="xla"), None
    request = casted_update.UpdateRequest(
        optimizer=OPTIMIZER,
        table=table,
        slots=slots,
        rows=cast.rows,
        offsets=cast.offsets,
        sources=cast.sources,
        num_unique=cast.num_unique,
        bag_gradients=gradients,
        weights=None,
        step=jnp.int32(0),
        gradient_scale=jnp.float32(1),
        config=config,
    )
    return casted_update.casted_update(request), None
