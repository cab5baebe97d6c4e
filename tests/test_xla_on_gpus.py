"""What XLA runs on GPUs, run on the CPU: sums of segments, bags and row updates equal those of the CPU's programs."""

import functools
import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grids import some_of
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jrec.ops.platforms
from jrec import ops
from jrec.ops.segment_sums import level_sizes, segment_sums

OPTIMIZERS = (ops.SGD, ops.Momentum, ops.Adagrad, ops.RowWiseAdagrad, ops.RMSProp, ops.Adam)


@pytest.fixture
def rng():
    return np.random.default_rng(5)


@pytest.fixture
def as_on_gpus():
    """Runs a function as it is lowered for a GPU, as far as XLA's implementations go."""

    def run(function, *args):
        def other(args, *, cpu, other):
            del cpu
            return other(*args)

        with (
            mock.patch.multiple("jrec.ops.gather_reduce_xla", cpu_or_other=other),
            mock.patch.multiple("jrec.ops.row_update_xla", cpu_or_other=other),
        ):
            return jax.jit(lambda *args: function(*args))(*args)

    return run


def _offsets(rng, capacity, segments):
    return np.sort(np.concatenate([[0], rng.integers(0, capacity + 1, segments)])).astype(np.int32)


@pytest.mark.parametrize("capacity", [1, 31, 32, 241, pytest.param(4097, marks=pytest.mark.slow), 8000])
def test_segment_sums_of_any_length(capacity, rng):
    """Integers, whose float32 sums are exact: a row left out, or taken twice, shows."""
    values = rng.integers(-9, 10, (capacity, 3)).astype(np.float32)
    for segments in (3, capacity // 4):
        offsets = _offsets(rng, capacity, segments)
        got = jax.jit(lambda v, o: segment_sums(_rows(v), capacity, o))(values, offsets)
        sums = np.concatenate([np.zeros((1, 3)), np.cumsum(values, axis=0)])
        np.testing.assert_array_equal(got, sums[offsets[1:]] - sums[offsets[:-1]])


def test_one_segment_of_everything_and_many_of_nothing(rng):
    values = rng.integers(-9, 10, (5000, 2)).astype(np.float32)
    offsets = np.array([0, 0, 0, 5000, 5000], np.int32)
    got = segment_sums(_rows(jnp.asarray(values)), 5000, jnp.asarray(offsets))
    np.testing.assert_array_equal(got, [[0, 0], [0, 0], values.sum(0), [0, 0]])


def test_levels_shrink_to_what_one_kernel_walks():
    assert level_sizes(31) == []
    assert level_sizes(327_680) == [40_960, 2560, 160, 10]


def _rows(values):
    return lambda at: jnp.where((at >= 0)[..., None], values.at[at].get(mode="clip"), 0.0)


@pytest.mark.parametrize(
    ("dtype", "weighted"),
    some_of(itertools.product(("float32", "bfloat16"), (False, True)), ("float32", True), ("bfloat16", False)),
)
@pytest.mark.parametrize(
    "length", [0, 1, 5, 32, 33, 80, 301, None], ids=lambda n: "ragged" if n is None else f"{n} ids"
)
def test_gather_reduce(length, dtype, weighted, rng, as_on_gpus):
    table = jnp.asarray(rng.normal(size=(40, 6)), dtype)
    if length is None:
        ids, offsets = rng.integers(-3, 40, 700).astype(np.int32), jnp.asarray(_offsets(rng, 650, 30))
        ids[offsets[-1] :] = 99  # not read
    else:
        ids, offsets = rng.integers(-3, 40, (9, length)).astype(np.int32), None
    ids = jnp.asarray(ids)
    weights = jnp.asarray(rng.normal(size=ids.shape), jnp.float32) if weighted else None
    run = functools.partial(ops.gather_reduce, implementation="xla")
    got = as_on_gpus(lambda t, i, o, w: run(t, i, o, weights=w), table, ids, offsets, weights)
    np.testing.assert_allclose(got, run(table, ids, offsets, weights=weights), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ragged", [False, True])
def test_an_id_past_the_table_makes_its_segment_nan_and_no_other(ragged, as_on_gpus):
    table, ids = jnp.ones((4, 2)), np.zeros((5, 40), np.int32)
    ids[2, 17], ids[3, 3] = 4, 2**31 - 1
    flat, offsets = (ids.reshape(-1), jnp.arange(0, 201, 40, dtype=jnp.int32)) if ragged else (ids, None)
    flat = jnp.asarray(flat)
    got = as_on_gpus(lambda t, i, o: ops.gather_reduce(t, i, o, implementation="xla"), table, flat, offsets)
    np.testing.assert_array_equal(np.isnan(got), np.array([[0, 0, 1, 1, 0]] * 2, bool).T)
    np.testing.assert_array_equal(got[0], [40.0, 40.0])


@pytest.mark.parametrize("offsets", [None, jnp.array([0, 3, 3, 90], jnp.int32)], ids=["padded", "ragged"])
def test_gradients_and_vmap(offsets, rng, as_on_gpus):
    tables = jnp.asarray(rng.normal(size=(2, 20, 3)), jnp.float32)
    ids = jnp.asarray(rng.integers(-1, 20, (2, 3, 30)), jnp.int32)
    ids = ids if offsets is None else ids.reshape(2, 90)

    def gradients(tables, ids):
        def loss(table, ids):
            return jnp.sum(jnp.sin(ops.gather_reduce(table, ids, offsets, implementation="xla")))

        return jax.vmap(jax.grad(loss))(tables, ids)

    np.testing.assert_allclose(as_on_gpus(gradients, tables, ids), gradients(tables, ids), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("check_vma", [False, True])
def test_shard_map(check_vma, rng, as_on_gpus):
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    table = jnp.asarray(rng.normal(size=(80, 4)), jnp.float32)
    ids = jnp.asarray(rng.integers(0, 20, (160, 5)), jnp.int32)
    gradients = jnp.asarray(rng.normal(size=(160, 4)), jnp.float32)

    def step(table, ids, gradients):
        optimizer = ops.Adam(learning_rate=0.1)
        cast = ops.tensor_cast(ids, num_rows=20, implementation="xla")
        out = ops.gather_reduce(table, ids, implementation="xla")
        new, _ = ops.casted_update(optimizer, table, optimizer.init(table), cast, gradients, implementation="xla")
        return out, new

    sharded = jax.shard_map(step, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=check_vma)
    got = as_on_gpus(sharded, table, ids, gradients)
    for device in range(4):
        want = step(table[20 * device :][:20], ids[40 * device :][:40], gradients[40 * device :][:40])
        np.testing.assert_allclose(got[0][40 * device :][:40], want[0], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(got[1][20 * device :][:20], want[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "decayed"),
    some_of([("float32", False), ("float32", True), ("bfloat16", True)], ("float32", False), ("bfloat16", True)),
)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_row_update(kind, dtype, decayed, rng, as_on_gpus):
    """Table and slots, with padding rows, padded columns, a gradient scale, and stochastic rounding of 16 bits."""
    change = {"weight_decay": 0.1, "max_row_norm": 0.7} if decayed else {}
    optimizer, dim, width = kind(learning_rate=0.1, **change), 5, 8
    table = jnp.asarray(rng.normal(size=(30, width)), dtype)
    slots = {n: jnp.asarray(rng.uniform(0.1, 1, s.shape), jnp.float32) for n, s in optimizer.init(table).items()}
    rows = jnp.array([0, 3, 4, 29, 30, 30, 30], jnp.int32)
    gradients = jnp.asarray(rng.normal(size=(7, dim)), jnp.float32)
    key = None if dtype == "float32" else jax.random.key_data(jax.random.key(1))

    def update(table, slots, rows, gradients):
        return ops.row_update(
            optimizer, table, slots, rows, gradients, step=3, gradient_scale=0.5, rounding_key=key, dim=dim,
            implementation="xla",
        )  # fmt: skip

    got, want = as_on_gpus(update, table, slots, rows, gradients), update(table, slots, rows, gradients)
    ulp = {"float32": 1e-6, "bfloat16": 2**-7}[dtype]
    np.testing.assert_allclose(*(x[0].astype(jnp.float32) for x in (got, want)), rtol=ulp, atol=1e-6)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6), got[1], want[1])
    untouched = np.setdiff1d(np.arange(30), rows)
    for new, old in zip(jax.tree.leaves(got), jax.tree.leaves((table, slots)), strict=True):
        np.testing.assert_array_equal(new[untouched], old[untouched])
        if old.ndim == 2:
            np.testing.assert_array_equal(new[:, dim:], old[:, dim:])


def test_vmap_of_an_update(rng, as_on_gpus):
    optimizer = ops.Adam(learning_rate=0.1)
    tables, rows = jnp.asarray(rng.normal(size=(2, 9, 3)), jnp.float32), jnp.array([[1, 4], [0, 8]], jnp.int32)
    gradients = jnp.asarray(rng.normal(size=(2, 2, 3)), jnp.float32)

    def update(table, rows, gradients):
        return ops.row_update(optimizer, table, optimizer.init(table), rows, gradients, implementation="xla")

    got, want = as_on_gpus(jax.vmap(update), tables, rows, gradients), jax.vmap(update)(tables, rows, gradients)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6), got, want)


def test_outside_jit_the_platform_of_the_arrays_decides():
    name = functools.partial(jrec.ops.platforms.cpu_or_other, cpu=lambda x: "cpu", other=lambda x: "other")
    assert name((jnp.ones(1),)) == name((np.ones(1),)) == "cpu"
    with mock.patch("jax.default_backend", return_value="gpu"):
        assert name((np.ones(1),)) == "other"
        assert name((jnp.ones(1),)) == "cpu"
