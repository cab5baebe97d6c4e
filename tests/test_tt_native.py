"""The tensor-train kernels for CPUs, one by one, against XLA's and NumPy's."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grids import some_of
from tt_kernel_cases import make_level

from jrec import ops
from jrec.native import tt as native
from jrec.ops import tensor_cast
from jrec.ops.tt import TTShape, products
from jrec.ops.tt.cache_index import split_cast
from jrec.ops.tt.core_update import step_core, touched_slices, tt_init_slots
from jrec.ops.tt.index import Level, tt_index
from jrec.ops.types import Cast

_of = functools.partial
_last = _of(make_level, right_rank=1)
_middle = _of(make_level, right_rank=16)
LEVELS = {
    "last, few": _of(_last, height=4, rank=5, columns=3),
    "last, many pieces": _of(_last, height=3, rank=16, columns=4, parents=300, slices=5, capacity=1300, real=1200),
    "last, long parents": _of(_last, height=2, rank=8, columns=4, parents=2, slices=900, capacity=1700, real=1600),
    "last, empty parents": _of(_last, height=2, rank=8, columns=4, parents=400, slices=3, capacity=100, real=60),
    "last, nothing real": _of(_last, height=2, rank=8, columns=4, real=0),
    "last, tiles": _of(_last, height=4, rank=24, columns=4, parents=300, slices=5, capacity=1300, real=1200),
    "last, tall tiles": _of(_last, height=8, rank=8, columns=4, parents=2, slices=900, capacity=1700, real=1600),
    "last, tiles, empty parents": _of(_last, height=4, rank=40, columns=4, parents=400, capacity=100, real=60),
    "last, tiles, nothing real": _of(_last, height=4, rank=16, columns=4, real=0),
    "middle, few": _of(make_level, height=2, rank=7, columns=3, right_rank=5),
    "middle, narrow": _of(make_level, height=2, rank=9, columns=2, right_rank=3, parents=30, slices=4, capacity=100),
    "middle, long digits": _of(_middle, height=4, rank=16, columns=2, parents=300, slices=3, capacity=900),
    "middle, hardly repeated": _of(_middle, height=2, rank=8, columns=2, parents=40, slices=50, capacity=60),
    "middle, nothing real": _of(_middle, height=2, rank=8, columns=2, real=0),
}


def _level(case):
    arrays = case.parents, case.digits, np.int32(case.real)
    return Level(**dict(zip(("parents", "digits", "count"), map(jnp.asarray, arrays), strict=True)))


@jax.jit
def _both(below, core, level, gradient):
    ways = {"method": "grouped", "implementation": "native"}
    out = products.expand(below, core, level, **ways)
    return out, *products.expand_transpose(gradient, below, core, level, below_count=jnp.int32(len(below)), **ways)


def _run(case):
    out, *gradients = _both(case.below, case.core, _level(case), case.gradient)
    return [np.asarray(out)[: case.real], *map(np.asarray, gradients)]


@pytest.mark.parametrize("name", LEVELS)
def test_products_and_their_transposes(name):
    case = LEVELS[name](np.random.default_rng(3))
    for got, want in zip(_run(case), (case.products()[: case.real], *case.gradients()), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max(initial=1e-6))


OPTIMIZERS = {
    "sgd": ops.SGD(learning_rate=0.1),
    "momentum": ops.Momentum(learning_rate=0.1, momentum=0.9),
    "adagrad": ops.Adagrad(learning_rate=0.1, initial_accumulator=0.1, weight_decay=0.01),
    "rowwise": ops.RowWiseAdagrad(learning_rate=0.1, initial_accumulator=0.1, max_row_norm=1.0),
    "rmsprop": ops.RMSProp(learning_rate=0.1, eps=0.01),
    "adam": ops.Adam(learning_rate=0.1, eps=0.01),
}


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
def _stepped(optimizer, core, slots, below, level, gradient):
    scalars = jnp.int32(2), jnp.float32(0.5)
    of = products.native_level(core, level, jnp.int32(len(below)))
    return native.expand_transpose_step(gradient, below, of, optimizer, core, slots, *scalars)


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        *((name, "adagrad") for name in LEVELS),
        *itertools.product(("last, tiles", "middle, hardly repeated"), sorted(OPTIMIZERS.keys() - {"adagrad"})),
    ],
)
def test_a_core_stepped_with_its_gradient_is_as_stepped_after_it(name, optimizer):
    case, optimizer = LEVELS[name](np.random.default_rng(3)), OPTIMIZERS[optimizer]
    m, level = len(case.core), _level(case)
    slots = tt_init_slots(optimizer, (jnp.asarray(case.core),))[0]
    _, of_below, of_core = _both(case.below, case.core, level, case.gradient)
    touched = jnp.zeros(m, bool).at[case.digits[: case.real]].set(True)
    options = {"step": jnp.int32(2), "gradient_scale": jnp.float32(0.5), "rounding_key": None}
    core = jnp.asarray(case.core)
    want = step_core(optimizer, core, slots, of_core, touched, **options, implementation="xla")
    given, kept = jnp.array(core), jax.tree.map(jnp.array, slots)
    below, got = _stepped(optimizer, given, kept, case.below, level, case.gradient)
    np.testing.assert_array_equal(below, of_below)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, want)
    np.testing.assert_array_equal(got[0][~touched], core[~touched])
    assert given.is_deleted()


@pytest.mark.parametrize("right_rank", [1, 16])
def test_threads_do_not_change_a_bit(right_rank, monkeypatch):
    size = {"parents": 900, "slices": 7, "capacity": 6000, "real": 5500}
    case = make_level(np.random.default_rng(0), height=4, rank=16, columns=4, right_rank=right_rank, **size)
    runs = []
    for threads in ("1", "2"):
        monkeypatch.setenv("JREC_NUM_THREADS", threads)
        _both.clear_cache()
        _stepped.clear_cache()
        optimizer, core = OPTIMIZERS["adagrad"], jnp.array(case.core)
        slots = tt_init_slots(optimizer, (core,))[0]
        _, stepped = _stepped(optimizer, core, slots, case.below, _level(case), case.gradient)
        runs.append([*_run(case), *jax.tree.leaves(stepped)])
    _both.clear_cache()
    _stepped.clear_cache()
    for one, two in zip(*runs, strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("factor", [1, 3, 49, 250, 46341, 2**31 - 1])
def test_prefixes_and_digits_of_any_entry(factor):
    near = np.arange(0, 2**31, max(factor, 2**22))[:, None] + np.arange(-2, 3)  # where quotients change
    entries = np.unique(np.clip(near, 0, 2**31 - 1)).astype(np.int32)
    count, places = len(entries), jnp.arange(len(entries) + 1, dtype=jnp.int32)
    cast = Cast(
        rows=jnp.asarray(entries), offsets=places, sources=places[:-1], positions=places[:-1], num_unique=places[-1]
    )
    of_core, of_prefixes = native.index(cast, places[-1], cast.rows, (factor, 1), (count, 1))[0]
    (parents, digits, _), (prefixes, _, found) = of_core, of_prefixes
    np.testing.assert_array_equal(np.asarray(prefixes)[np.asarray(parents)], entries // factor)
    np.testing.assert_array_equal(digits, entries % factor)
    assert found == len(np.unique(entries // factor))


@pytest.mark.parametrize("count", [0, 1, 57])
def test_entries_by_digit_are_a_stable_sort(count):
    digits = np.random.default_rng(1).integers(0, 9, 60).astype(np.int32)
    order = native.digit_order(jnp.asarray(digits), jnp.int32(count), 11)
    np.testing.assert_array_equal(order.entries[:count], np.argsort(digits[:count], kind="stable"))
    np.testing.assert_array_equal(order.offsets, np.searchsorted(np.sort(digits[:count]), np.arange(12)))


def _ids(rng, ragged):
    ids = rng.integers(-1, 990, (40, 3)).astype(np.int32)
    ids[3, 1] = 1005  # past the table
    if not ragged:
        return jnp.asarray(ids), None
    return jnp.asarray(np.abs(ids.ravel())), jnp.asarray(np.arange(0, 111, 11, np.int32))


FORMS = some_of(itertools.product((False, True), (None, 20)), (False, 20), (True, None))


@pytest.mark.parametrize(("ragged", "capacity"), FORMS)
@pytest.mark.parametrize("factors", [(10, 10, 10), (25, 40), (5, 5, 5, 8)])
def test_the_index_is_that_of_xla(factors, ragged, capacity):
    dims = (2,) * len(factors)
    shape = TTShape(rows=1000, dim=2 ** len(dims), row_factors=factors, dim_factors=dims, ranks=(3,) * (len(dims) - 1))
    ids, offsets = _ids(np.random.default_rng(2), ragged)
    got, want = (
        jax.jit(functools.partial(tt_index, shape, unique_capacity=capacity, implementation=way))(ids, offsets)
        for way in ("native", "xla")
    )
    jax.tree.map(np.testing.assert_array_equal, (got.sources, got.levels), (want.sources, want.levels))


@pytest.mark.parametrize("capacity", [None, 300])
@pytest.mark.parametrize("lookups", [4096, 20_000])
def test_the_index_of_many_lookups_is_that_of_xla(lookups, capacity):
    rng = np.random.default_rng(lookups)
    ids = np.where(rng.random(lookups) < 0.3, 7, rng.integers(-50, 1005, lookups))  # one row in several parts
    shape = TTShape(rows=1000, dim=8, row_factors=(10, 10, 10), dim_factors=(2, 2, 2), ranks=(3, 3))
    got, want = (
        jax.jit(functools.partial(tt_index, shape, unique_capacity=capacity, implementation=way))(
            jnp.asarray(ids, jnp.int32)[:, None]
        )
        for way in ("native", "xla")
    )
    jax.tree.map(np.testing.assert_array_equal, (got.sources, got.levels), (want.sources, want.levels))


@pytest.mark.parametrize("position", [-1, 40, 2**31 - 1])
def test_positions_of_no_lookup_are_an_error(position):
    shape = TTShape(rows=1000, dim=8, row_factors=(10, 10, 10), dim_factors=(2, 2, 2), ranks=(3, 3))
    ids = jnp.arange(40, dtype=jnp.int32)[:, None]
    cast = tensor_cast(ids, num_rows=1000)
    strange = dataclasses.replace(cast, positions=cast.positions.at[11].set(position))
    with pytest.raises(jax.errors.JaxRuntimeError, match="positions must be those of its lookups"):
        jax.block_until_ready(tt_index(shape, ids, cast=strange, implementation="native").sources)


@pytest.mark.parametrize("cached", [[], [4], range(0, 1000, 3), range(1000)], ids=len)
@pytest.mark.parametrize(("ragged", "capacity"), FORMS)
def test_a_cast_is_split_as_by_xla(ragged, capacity, cached):
    ids, offsets = _ids(np.random.default_rng(4), ragged)
    bags = len(ids) if offsets is None else len(offsets) - 1
    cast = tensor_cast(ids, offsets, num_rows=1000, unique_capacity=capacity)
    held = jnp.asarray([*cached, 1000], jnp.int32)
    got, want = (split_cast(cast, held, ids, rows=1000, num_bags=bags, implementation=way) for way in ("native", "xla"))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    hit = np.isin(np.asarray(cast.rows), list(cached))
    assert int(got.hits.num_unique) == hit.sum()
    np.testing.assert_array_equal(held[got.hits.rows[: hit.sum()]], cast.rows[hit])
    for side in (got.hits, got.misses):
        assert sorted(side.positions.tolist()) == list(range(ids.size))


@pytest.mark.parametrize(
    ("field", "place", "value"),
    [
        ("offsets", 3, -1),
        ("offsets", 3, 2**31 - 1),
        ("offsets", 3, 0),  # below the one before
        ("offsets", 0, -5),
        ("offsets", 40, 41),
        ("positions", 11, -1),
        ("positions", 11, 40),
    ],
)
def test_a_cast_of_no_lookups_is_not_split(field, place, value):
    ids = jnp.arange(40, dtype=jnp.int32)[:, None]
    cast = tensor_cast(ids, num_rows=1000)
    strange = dataclasses.replace(cast, **{field: getattr(cast, field).at[place].set(value)})
    held = jnp.asarray([4, 7, 1000], jnp.int32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="offsets and positions must be those of its lookups"):
        jax.block_until_ready(split_cast(strange, held, ids, rows=1000, num_bags=40, implementation="native").places)


@pytest.mark.parametrize("core", [0, 1, 2])
@pytest.mark.parametrize("ids", [[[-1, -1]], [[0, 999], [5, -1]], [[7, 7], [401, 403]]])
def test_touched_slices_are_those_of_xla(ids, core):
    shape = TTShape(rows=1000, dim=8, row_factors=(10, 10, 10), dim_factors=(2, 2, 2), ranks=(3, 3))
    index = tt_index(shape, jnp.asarray(ids, jnp.int32))
    got, want = (touched_slices(index, core, 10, way) for way in ("native", "xla"))
    assert got.dtype == bool
    np.testing.assert_array_equal(got, want)
    chosen = {i // 10 ** (2 - core) % 10 for i in np.ravel(ids) if i >= 0}
    assert set(np.flatnonzero(got)) == chosen
