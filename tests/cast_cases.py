"""Lookups to cast, of all shapes and kinds, and what a cast of them must be."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import reference

from jrec import ops
from jrec.pallas.cast import Runs, cast_sorted

FIELDS = ("rows", "offsets", "sources", "positions", "num_unique")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """A static shape of lookups: ``length`` for padded bags, ``capacity`` for ragged ones."""

    bags: int
    length: int | None = None
    capacity: int = 0
    rows: int
    unique: int | None = None

    @property
    def size(self) -> int:
        return self.capacity if self.length is None else self.bags * self.length

    @property
    def unique_capacity(self) -> int:
        return min(self.size, self.rows) if self.unique is None else self.unique


SHAPES = (
    Shape(bags=37, length=5, rows=45),  # keys of 8 bits
    Shape(bags=20, capacity=301, rows=600, unique=50),  # of 16 bits
    Shape(bags=1, capacity=67, rows=70_000),  # of 32 bits
    Shape(bags=9, length=7, rows=300, unique=100),  # more than there are lookups
)


MORE_SHAPES = (
    Shape(bags=130, length=1, rows=1),
    Shape(bags=3, length=4, rows=2**31 - 1, unique=5),
    Shape(bags=5, length=3, rows=255, unique=0),
    Shape(bags=5, length=3, rows=256, unique=15),
    Shape(bags=40, capacity=1300, rows=65_536),
)


KINDS = ("uniform", "power law", "identical", "half padding", "all padding", "past")


def _draw(shape, rng, kind):
    ids = reference.draw_ids(rng, shape.rows, shape.size, kind)
    if kind == "past":
        wrong = rng.random(shape.size) < 0.4
        ids[wrong] = rng.choice([-(2**31), -1, shape.rows, 2**31 - 1], wrong.sum())
    if shape.length is not None:
        return ids.reshape(shape.bags, shape.length), None
    bounds = np.sort(rng.integers(0, shape.capacity + 1, shape.bags))
    bounds[: shape.bags // 4] = 0  # empty bags first
    return ids, np.concatenate([[0], bounds]).astype(np.int32)


@functools.partial(jax.jit, static_argnames=("num_rows", "unique_capacity", "implementation"))
def _cast(ids, offsets, **options):
    return ops.tensor_cast(ids, offsets, **options)


def _assert_identical(got, want):
    for name in FIELDS:
        field = np.asarray(getattr(got, name))
        assert field.dtype == np.int32
        np.testing.assert_array_equal(field, want[name], err_msg=name)


CUTS = (
    (Runs(blocks=3, trips=1, unroll=1), 39),
    (Runs(blocks=1, trips=3, unroll=1), 40),
    (Runs(blocks=9, trips=1, unroll=1), 41),
    (Runs(blocks=2, trips=1, unroll=2), 1),
)


MORE_CUTS = (
    (Runs(blocks=1, trips=2, unroll=4), 129),
    (Runs(blocks=2, trips=2, unroll=2), 200),
    (Runs(blocks=17, trips=2, unroll=1), 41),
)


def check_cut(runs, unique_capacity):
    """40 unique rows, one of them looked up by many warps; capacities below, at and above 40."""
    rng = np.random.default_rng(runs.blocks)
    rows = np.concatenate([np.arange(40), rng.choice(40, 130 - 40, p=[0.6, *[0.4 / 39] * 39])])
    ids = rng.permutation(np.concatenate([rows, np.full(11, -1)])).astype(np.int32)[:, None]
    want = reference.tensor_cast(ids, None, 50, unique_capacity)
    keys = np.where(ids[:, 0] < 0, 50, ids[:, 0])[want["positions"]].astype(np.int32)
    sorted_ = jnp.asarray(keys), jnp.asarray(want["positions"])
    got = cast_sorted(*sorted_, 1, num_bags=ids.size, num_rows=50, unique_capacity=unique_capacity, runs=runs)
    for field, name in zip(got, ("rows", "offsets", "sources", "num_unique"), strict=True):
        np.testing.assert_array_equal(field, want[name], err_msg=name)
