"""The cast's kernels in interpret mode: bit for bit the casts of plain Python, of XLA and of the native kernels."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from pallas_interpreter import race_free

from jrec import ops
from jrec.pallas.cast import Runs, cast_sorted
from jrec.pallas.interpret import interpreted

pytestmark = pytest.mark.usefixtures("quick_compilation")

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


def _check(shape, kind, seed):
    ids, offsets = _draw(shape, np.random.default_rng(seed), kind)
    with race_free():
        got = _cast(ids, offsets, num_rows=shape.rows, unique_capacity=shape.unique_capacity, implementation="pallas")
    _assert_identical(got, reference.tensor_cast(ids, offsets, shape.rows, shape.unique_capacity))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@given(kind=st.sampled_from(KINDS), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=3)
def test_equals_reference(shape, kind, seed):
    _check(shape, kind, seed)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES + MORE_SHAPES, ids=str)
@given(kind=st.sampled_from(KINDS), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=25)
def test_more_shapes_equal_reference(shape, kind, seed):
    _check(shape, kind, seed)


@pytest.mark.parametrize("other", ["xla", "native"])
def test_equals_the_other_implementations(other):
    shape = SHAPES[1]
    ids, offsets = _draw(shape, np.random.default_rng(3), "past")
    options = {"num_rows": shape.rows, "unique_capacity": shape.unique_capacity}
    with interpreted():
        got = _cast(ids, offsets, **options, implementation="pallas")
    want = _cast(ids, offsets, **options, implementation=other)
    _assert_identical(got, {name: np.asarray(getattr(want, name)) for name in FIELDS})


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


@pytest.mark.parametrize(
    ("runs", "unique_capacity"), [*CUTS, *(pytest.param(*cut, marks=pytest.mark.slow) for cut in MORE_CUTS)]
)
def test_every_cut_gives_the_same_cast(runs, unique_capacity):
    with race_free():
        check_cut(runs, unique_capacity)


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


@given(places=st.integers(1, 2**31 - 1))
@settings(max_examples=200)
def test_runs_cover_every_place_and_are_few(places):
    runs = Runs.of(places)
    assert runs.count * runs.trips * runs.unroll * 32 >= places
    assert runs.count <= 2048
    assert runs.blocks == 1 or (runs.blocks - 1) * runs.trips * runs.unroll * 128 < places


def test_a_cut_that_no_kernel_can_follow_is_refused():
    with pytest.raises(ValueError, match="unroll=3 must be a power of two"):
        Runs(blocks=1, trips=1, unroll=3)
    with pytest.raises(ValueError, match="must be at least 1"):
        Runs(blocks=0, trips=1, unroll=1)


def test_no_lookups_and_no_bags():
    none = np.zeros(0, np.int32)
    cases = (
        (np.zeros((0, 3), np.int32), None),
        (np.zeros((4, 0), np.int32), None),
        (none, np.zeros(1, np.int32)),
        (none, np.zeros(4, np.int32)),
        (np.arange(5, dtype=np.int32), np.zeros(1, np.int32)),
    )
    for ids, offsets in cases:
        with interpreted():
            got = _cast(ids, offsets, num_rows=9, unique_capacity=2, implementation="pallas")
        _assert_identical(got, reference.tensor_cast(ids, offsets, 9, 2))


def test_vmap():
    rng = np.random.default_rng(4)
    ids = jnp.asarray(rng.integers(-1, 12, (3, 5, 2)), jnp.int32)
    with interpreted():
        got = jax.vmap(lambda i: _cast(i, None, num_rows=10, unique_capacity=8, implementation="pallas"))(ids)
    want = jax.vmap(lambda i: _cast(i, None, num_rows=10, unique_capacity=8, implementation="xla"))(ids)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_shard_map_that_tracks_varying_axes_is_refused():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    spec = jax.sharding.PartitionSpec("d")
    cast = functools.partial(ops.tensor_cast, num_rows=9, implementation="pallas")
    mapped = jax.shard_map(cast, mesh=mesh, in_specs=spec, out_specs=spec)
    with pytest.raises(NotImplementedError, match=r"check_vma=False\): their operands vary over d"):
        mapped(jnp.zeros((4, 1), jnp.int32))
