"""The gather-reduce kernel in interpret mode against float64 NumPy."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from grids import some_of
from hypothesis import given, settings
from pallas_interpreter import race_free

from benchmarks.workloads import zipf_ids
from jrec import ops
from jrec.pallas import launch as launching
from jrec.pallas import measured, segments
from jrec.pallas.gather_reduce import Request, gather_reduce, gather_reduce_many, make_pieces
from jrec.pallas.interpret import interpreted
from jrec.pallas.launch import launch_together
from jrec.pallas.segments import Gather
from jrec.pallas.tile import Tile
from jrec.pallas.tuning import TuningConfig, runs_a_block, tune

TINY_SPLIT = TuningConfig(chunks=1, unroll=2, long_unroll=1, split=4, top=16)
SHAPES = (
    reference.Shape(rows=50, dim=3, bags=9, length=5, weighted=True),
    reference.Shape(rows=300, dim=64, bags=20, length=1, dtype="float16"),
    reference.Shape(rows=90, dim=20, bags=12, capacity=77, dtype="bfloat16", weighted=True),
    reference.Shape(rows=11, dim=256, bags=5, capacity=40),
)


@given(case=reference.cases(shapes=SHAPES, past=True))
@settings(max_examples=25)
def test_equals_reference(case):
    with race_free():
        got = gather_reduce(case.table, case.ids, case.offsets, case.weights, config=TINY_SPLIT)
    np.testing.assert_allclose(got, reference.gather_reduce(case), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("exponent", [*(pytest.param(e, marks=pytest.mark.slow) for e in (1.05, 1.2, 2.0)), None])
def test_skewed_segments(exponent):
    """Backward segments of a power law, and of one row that owns every lookup."""
    rng = np.random.default_rng(5)
    lookups, dim = 3000, 8
    ids = np.zeros(lookups, np.int32) if exponent is None else zipf_ids(rng, 1000, lookups, exponent)
    cast = ops.tensor_cast(jnp.asarray(ids.reshape(-1, 2)), num_rows=1000, unique_capacity=1000, implementation="xla")
    gradients = rng.normal(size=(lookups // 2, dim)).astype(np.float32)
    exact = np.zeros((1000, dim))
    np.add.at(exact, ids, np.repeat(gradients.astype(np.float64), 2, axis=0))
    rows = np.unique(ids)
    config = TuningConfig(chunks=1, unroll=4, long_unroll=2, split=8, top=32, blocks=4)
    with interpreted():
        runs = [gather_reduce(gradients, cast.sources, cast.offsets, config=config) for _ in range(2)]
    np.testing.assert_array_equal(runs[0], runs[1])
    np.testing.assert_allclose(runs[0][: rows.size], exact[rows], rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(runs[0][rows.size :], 0)


@pytest.mark.parametrize(  # 1, 4 and 16 lanes a row search together
    ("split", "dim"), some_of(itertools.product((2, 8), (4, 12, 64)), (8, 4), (2, 12), (2, 64))
)
def test_pieces_lie_within_their_segments(split, dim):
    """Pieces of each level: which segment a node lies within, and the sum of the lookups below it."""
    rng = np.random.default_rng(dim * split)
    lengths = rng.permutation(np.r_[rng.integers(0, 9, 12), rng.integers(0, 200, 6), np.zeros(4, int)])
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    lookups = int(offsets[-1]) + 37  # some past the last segment
    gather = Gather(jnp.ones((1, dim)), jnp.zeros(lookups, jnp.int32))
    config = TuningConfig(chunks=1, unroll=2, long_unroll=1, split=split, top=16)
    with interpreted() as interpret:
        steps = make_pieces(dim, gather, jnp.asarray(offsets), config, interpret)
        ((levels, runs),) = launch_together([steps], interpret=interpret)
    assert len(levels) > 2
    for level, pieces in enumerate(levels[1:]):
        size = split ** (level + 1)
        for node, sums in enumerate(np.asarray(pieces.rows)):
            begins = [s for s, (a, b) in enumerate(itertools.pairwise(offsets)) if a <= node * size < b]
            within = bool(begins) and (node + 1) * size <= offsets[begins[0] + 1]
            if level == 0:
                assert runs[node] == (begins[0] if within else -1)
            np.testing.assert_array_equal(sums, size if within else np.nan)  # nobody writes the others


def test_levels_shrink_until_one_thread_can_walk_the_last():
    assert segments.level_sizes(63, 64) == ()
    assert segments.level_sizes(64, 64) == (1,)
    assert segments.level_sizes(1_000_000, 64) == (15_625, 244)
    assert segments.level_sizes(100_000_000, 64) == (1_562_500, 24_414, 381, 5)
    assert segments.level_sizes(1_000_000, 64, top=10) == (15_625, 244, 3)


def test_lanes_look_for_long_segments_where_runs_are_many(monkeypatch):
    monkeypatch.setattr("jrec.pallas.gather_reduce.runs_a_block", lambda runs, tile: 2 * tile.lanes)
    case = reference.make_case(
        reference.Shape(rows=11, dim=32, bags=9, capacity=150), np.random.default_rng(1), kind="power law"
    )
    with race_free():
        got = gather_reduce(case.table, case.ids, case.offsets, config=TINY_SPLIT)
    np.testing.assert_allclose(got, reference.gather_reduce(case), rtol=1e-4, atol=2e-5)
    tile = Tile.of(32, 4)
    assert [runs_a_block(n, tile) for n in (1, 2112, 2113, 30_000, 10**7)] == [8, 8, 16, 32, 32]


def test_what_was_measured_wins_where_it_applies(monkeypatch):
    chosen = {"chunks": 2, "unroll": 4, "split": 64}
    entries = {("GPU", 64, 4, kind): measured.Entry(config=chosen, evidence={}) for kind in ("padded", "update")}
    monkeypatch.setattr(measured, "entries", lambda: entries)
    assert tune(dim=64, itemsize=4, length=20, gpu="GPU") == TuningConfig(**chosen)
    assert tune(dim=64, itemsize=4, length=None, element_slots=1, gpu="GPU") == TuningConfig(**chosen)
    for other in ({"gpu": "another"}, {"itemsize": 2}, {"dim": 16}, {"length": None}, {"length": 1}):
        arguments = {"dim": 64, "itemsize": 4, "length": 20, "gpu": "GPU", **other}
        assert tune(**arguments) == tune(**{**arguments, "gpu": "another"})


def test_one_bag_of_everything_in_the_padded_form_is_split():
    rng = np.random.default_rng(2)
    source = rng.normal(size=(31, 8)).astype(np.float32)
    ids = rng.integers(0, 31, (1, 130)).astype(np.int32)
    with interpreted():
        got = gather_reduce(source, ids, config=dataclasses.replace(TINY_SPLIT, split=16))
    np.testing.assert_allclose(got[0], source.astype(np.float64)[ids[0]].sum(0), rtol=1e-5, atol=1e-5)


def test_an_empty_source_makes_lookups_nan_and_skips_stay_zero():
    with interpreted():
        got = gather_reduce(jnp.zeros((0, 4)), jnp.array([[0, -1], [-1, -1]], jnp.int32))
    np.testing.assert_array_equal(got, [[np.nan] * 4, [0] * 4])


def test_many_sources_in_the_launches_of_one():
    """Dims, dtypes and forms differ, one has nothing to sum; each source gets the sums that it gets alone."""
    cases = [reference.make_case(s, np.random.default_rng(s.dim), kind="power law", past=True) for s in SHAPES]
    requests = [
        Request(source=c.table, indices=c.ids, offsets=c.offsets, weights=c.weights, config=TINY_SPLIT) for c in cases
    ]
    requests.insert(1, Request(source=jnp.ones((3, 4)), indices=jnp.zeros((2, 0), jnp.int32)))
    with race_free():
        together = gather_reduce_many(requests)
        alone = [gather_reduce_many([request])[0] for request in requests]
    # Not the bits: in the interpreter XLA contracts multiplications and additions in one program, and not in the other.
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), together, alone)
    np.testing.assert_array_equal(together.pop(1), np.zeros((2, 4)))
    for got, case in zip(together, cases, strict=True):
        np.testing.assert_allclose(got, reference.gather_reduce(case), rtol=1e-4, atol=2e-5)


def test_more_sources_than_one_launch_takes(monkeypatch):
    monkeypatch.setattr(launching, "MOST_TOGETHER", 2)
    names, launch = [], launching.launch
    monkeypatch.setattr(launching, "launch", lambda jobs, **how: (names.append(len(jobs)), launch(jobs, **how))[1])
    ids = jnp.arange(7, dtype=jnp.int32)[:, None]
    with interpreted():
        sums = gather_reduce_many([Request(source=jnp.full((7, 4), float(i)), indices=ids) for i in range(5)])
    assert names == [2, 2, 1]
    for number, got in enumerate(sums):
        np.testing.assert_array_equal(got, np.full((7, 4), number))


def test_no_lookups_and_no_segments():
    for ids, offsets in (
        (jnp.zeros((3, 0), jnp.int32), None),
        (jnp.zeros((0, 3), jnp.int32), None),
        (jnp.zeros(0, jnp.int32), jnp.zeros(4, jnp.int32)),
        (jnp.zeros(5, jnp.int32), jnp.zeros(1, jnp.int32)),
    ):
        segments_ = ids.shape[0] if offsets is None else offsets.shape[0] - 1
        np.testing.assert_array_equal(gather_reduce(jnp.ones((5, 6)), ids, offsets), np.zeros((segments_, 6)))


def test_the_op_reaches_the_kernel_and_differentiates():
    rng = np.random.default_rng(3)
    table = jnp.asarray(rng.normal(size=(12, 4)), jnp.float32)
    ids = jnp.asarray(rng.integers(-1, 12, (6, 2)), jnp.int32)

    def loss(table, ids, implementation):
        return jnp.sum(jnp.square(ops.embedding_bag(table, ids, combiner="mean", implementation=implementation)))

    with interpreted():
        got = jax.jit(jax.value_and_grad(loss), static_argnums=2)(table, ids, "pallas")
    want = jax.value_and_grad(loss)(table, ids, "xla")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


def test_vmap():
    rng = np.random.default_rng(4)
    source = jnp.asarray(rng.normal(size=(3, 10, 4)), jnp.float32)
    ids = jnp.asarray(rng.integers(0, 10, (3, 5, 2)), jnp.int32)
    with interpreted():
        got = jax.vmap(gather_reduce)(source, ids)
    want = jnp.stack([source[i][ids[i]].sum(1) for i in range(3)])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_vmap_of_ragged_segments_and_updates():
    rng = np.random.default_rng(4)
    source = jnp.asarray(rng.normal(size=(2, 10, 4)), jnp.float32)
    ids = jnp.asarray(rng.integers(0, 10, (2, 150)), jnp.int32)
    offsets = jnp.array([[0, 5, 140, 150], [0, 0, 1, 150]], jnp.int32)
    optimizer = ops.RowWiseAdagrad(learning_rate=0.1)

    def both(source, ids, offsets, implementation):
        out = ops.gather_reduce(source, ids, offsets, implementation=implementation)
        cast = ops.tensor_cast(ids, offsets, num_rows=10, implementation="xla")
        slots = optimizer.init(source)
        return out, ops.casted_update(optimizer, source, slots, cast, out, implementation=implementation)

    with interpreted():
        got = jax.vmap(lambda *a: both(*a, "pallas"))(source, ids, offsets)
    want = jax.vmap(lambda *a: both(*a, "xla"))(source, ids, offsets)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, want)


def test_shard_map_that_tracks_varying_axes_is_refused():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    spec = jax.sharding.PartitionSpec("d")
    mapped = jax.shard_map(gather_reduce, mesh=mesh, in_specs=(spec, spec), out_specs=spec)
    with pytest.raises(NotImplementedError, match=r"check_vma=False\): their operands vary over d"):
        mapped(jnp.ones((4, 4)), jnp.zeros((4, 1), jnp.int32))


def test_too_long_rows_are_refused():
    with pytest.raises(NotImplementedError, match="dims from 1 to 1024, not 2048; use implementation='xla'"):
        ops.gather_reduce(jnp.ones((2, 2048)), jnp.zeros((1, 1), jnp.int32), implementation="pallas")


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("dim", [1, 3, 4, 6, 8, 16, 20, 64, 100, 128, 200, 256, 768, 1000, 1024])
def test_tiles_cover_each_element_once(dim, itemsize):
    tile = Tile.of(dim, itemsize, chunks=2)
    thread, chunk, block = np.meshgrid(*(np.arange(n) for n in (128, tile.chunks, tile.blocks)), indexing="ij")
    row = (chunk * 128 + thread) // tile.lanes
    first = block * tile.width + thread % tile.lanes * tile.vector
    places = (row[..., None] * 10_000 + first[..., None] + np.arange(tile.vector))[first < dim]
    want = np.arange(tile.rows)[:, None] * 10_000 + np.arange(dim)
    np.testing.assert_array_equal(np.sort(places.ravel()), want.ravel())
    assert tile.vector * itemsize <= 16


@pytest.mark.parametrize("element_slots", [None, 0, 1, 2])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_heuristics_stay_within_the_registers(element_slots, itemsize):
    for dim in (1, 4, 16, 20, 64, 128, 256, 1000, 1024):
        for length in (None, 1, 4, 100):
            config = tune(dim=dim, itemsize=itemsize, length=length, element_slots=element_slots)
            tile, single = Tile.of(dim, itemsize, chunks=config.chunks), Tile.of(dim, itemsize)
            old = 0 if element_slots is None else 1 + element_slots
            assert (1 + config.unroll + (old if config.prefetch else 0)) * tile.registers <= 160
            assert config.long_unroll == 1 or (1 + config.long_unroll + old) * single.registers <= 160
            assert tile.chunks * tile.blocks * config.unroll <= 32


def test_skewed_segments_load_many_rows_at_once():
    """Where lengths are unknown their mean says nothing: one row owns many lookups, and most rows one or two."""
    for dim, long_unroll in ((4, 4), (16, 8), (64, 8), (128, 8)):
        config = tune(dim=dim, itemsize=4, length=None, element_slots=0)
        assert (config.chunks, config.unroll, config.long_unroll) == (1, 8, long_unroll)


def test_a_config_that_no_kernel_can_follow_is_refused():
    with pytest.raises(ValueError, match="unroll=3 must be a power of two"):
        TuningConfig(chunks=1, unroll=3)
    with pytest.raises(ValueError, match="split=1 must be at least 2"):
        TuningConfig(chunks=1, unroll=1, split=1)
    with pytest.raises(ValueError, match="at least 1"):
        TuningConfig(chunks=0, unroll=1)
    with pytest.raises(ValueError, match="must be a power of two that divides"):
        Tile(dim=6, vector=4, lanes=2, blocks=1, rows=64)
