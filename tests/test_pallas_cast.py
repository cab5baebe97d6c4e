"""The cast's kernels in interpret mode: bit for bit the casts of plain Python, of XLA and of the native kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from cast_cases import CUTS, FIELDS, KINDS, MORE_CUTS, MORE_SHAPES, SHAPES, _assert_identical, _cast, _draw, check_cut
from grids import some_of
from hypothesis import given, settings
from hypothesis import strategies as st
from pallas_interpreter import race_free

from jrec import ops
from jrec.pallas.cast import Runs
from jrec.pallas.interpret import interpreted


def _check(shape, kind, seed):
    ids, offsets = _draw(shape, np.random.default_rng(seed), kind)
    with race_free():
        got = _cast(ids, offsets, num_rows=shape.rows, unique_capacity=shape.unique_capacity, implementation="pallas")
    _assert_identical(got, reference.tensor_cast(ids, offsets, shape.rows, shape.unique_capacity))


@pytest.mark.parametrize("shape", some_of(SHAPES, *SHAPES[1:]), ids=str)
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


@pytest.mark.parametrize(
    ("runs", "unique_capacity"), [*CUTS, *(pytest.param(*cut, marks=pytest.mark.slow) for cut in MORE_CUTS)]
)
def test_every_cut_gives_the_same_cast(runs, unique_capacity):
    with race_free():
        check_cut(runs, unique_capacity)


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
