import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import tt_reference
from tt_cache_reference import CachedTable

from jrec.ops import SGD, Adagrad, Adam, Bags, Momentum, RowWiseAdagrad, tensor_cast
from jrec.ops.tt import (
    TTCacheConfig,
    TTShape,
    tt_apply_gradients,
    tt_cache_init,
    tt_cache_refresh,
    tt_cache_step,
    tt_cached_apply_gradients,
    tt_cached_lookup,
    tt_init,
    tt_init_slots,
    tt_lookup,
)
from jrec.ops.tt import cache_index as trackers

# One program each, where calls one by one would compile every operation in them.
_lookup = jax.jit(tt_cached_lookup, static_argnums=2, static_argnames=("unique_capacity", "implementation"))
_plain_lookup = jax.jit(tt_lookup, static_argnums=1, static_argnames=("contraction", "implementation"))
_apply = jax.jit(tt_cached_apply_gradients, static_argnums=(0, 4), static_argnames="implementation")
_plain_apply = jax.jit(tt_apply_gradients, static_argnums=(0, 3), static_argnames="implementation")
_refresh = jax.jit(tt_cache_refresh, static_argnums=(0, 3), static_argnames="implementation")
_step = jax.jit(tt_cache_step, static_argnums=(0, 1, 4), static_argnames="implementation")
_track = jax.jit(trackers.track, static_argnums=2)
XLA = {"implementation": "xla"}

SMALL = TTShape.search(60, 8, ranks=(3, 4))
TWO_CORES = TTShape.search(56, 6, num_cores=2, ranks=3)
SHAPE = TTShape.search(997, 16, ranks=(6, 9))


def _draw(rng, shape, form, bags=48):
    """One batch of Zipf-like ids: (Bags, bags as lists, gradients)."""
    kind = rng.choice(["power law", "power law", "half padding", "uniform", "all padding"])
    length, capacity = (None, 2 * bags) if "ragged" in form else (2, None)
    fields = reference.Shape(
        rows=1, dim=shape.dim, bags=bags, length=length, capacity=capacity, weighted="weighted" in form
    )
    case = reference.make_case(fields, rng, kind="uniform")
    ids = reference.draw_ids(rng, shape.rows, case.ids.size, kind).reshape(case.ids.shape)
    if "past" in form:
        ids.reshape(-1)[rng.random(ids.size) < 0.02] = shape.rows + int(rng.integers(5))
    case = dataclasses.replace(case, ids=ids)
    device = Bags(
        ids=jnp.asarray(ids),
        offsets=None if case.offsets is None else jnp.asarray(case.offsets),
        weights=None if case.weights is None else jnp.asarray(case.weights),
    )
    if "cast" in form:
        cast = tensor_cast(device.ids, device.offsets, num_rows=shape.rows)
        device = dataclasses.replace(device, cast=cast)
    return device, case.bags(), case.bag_gradients / 8


def _train_step(config, shape, optimizer, core_optimizer=None, implementation=None):
    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def train(cores, slots, cache, bags, gradients, step, scale):
        out, residuals = tt_cached_lookup(cores, cache, shape, bags, implementation=implementation)
        cores, slots, cache = tt_cached_apply_gradients(
            optimizer, cores, slots, cache, shape, residuals, gradients,
            step=step, gradient_scale=scale, core_optimizer=core_optimizer, implementation=implementation,
        )  # fmt: skip
        cache = tt_cache_step(
            config, optimizer, cores, cache, shape, residuals.cast, step=step, implementation=implementation
        )
        return cores, slots, cache, out, residuals.hits, residuals.lookups

    return train


def _compare(table, cores, slots, cache, tolerance=2e-4):
    """Every array of the state with the reference's."""
    rows = table.shape.rows
    tracked = sorted(table.counts)
    padding = np.full(table.capacity - len(tracked), rows)
    np.testing.assert_array_equal(cache.tracker.ids, [*tracked, *padding])
    np.testing.assert_array_equal(cache.tracker.counts, [*(table.counts[row] for row in tracked), *(0 * padding)])
    assert int(cache.tracker.floor) == table.floor
    cached = sorted(table.cache)
    np.testing.assert_array_equal(cache.ids, [*cached, *[rows] * (table.config.cache_rows - len(cached))])
    for place, row in enumerate(cached):
        values, row_slots = table.cache[row]
        np.testing.assert_allclose(cache.rows[place], values, rtol=tolerance, atol=tolerance)
        for name, slot in row_slots.items():
            np.testing.assert_allclose(cache.slots[name][place], slot, rtol=tolerance, atol=tolerance)
    for k, core in enumerate(table.cores):
        np.testing.assert_allclose(cores[k], core, rtol=tolerance, atol=tolerance)
        for name, slot in table.slots[k].items():
            got = np.asarray(slots[k][name])
            np.testing.assert_allclose(got, slot, rtol=tolerance, atol=tolerance * max(1, np.abs(slot).max()))


CLIPPED = SGD(learning_rate=0.02, weight_decay=0.01, max_row_norm=0.5)
EXACT = TTCacheConfig(cache_rows=12, tracked_rows=997, warmup_steps=4, refresh_every=3)
BOUNDED = TTCacheConfig(cache_rows=12, tracked_rows=20, warmup_steps=3, refresh_every=2)
SMALLER = TTCacheConfig(cache_rows=5, tracked_rows=20, warmup_steps=2, refresh_every=3)


@pytest.mark.parametrize(
    ("config", "shape", "optimizers", "form", "implementation"),
    [
        (EXACT, SHAPE, (RowWiseAdagrad(learning_rate=0.05), None), "padded past", None),
        (
            BOUNDED,
            SHAPE,
            (SGD(learning_rate=0.02, weight_decay=0.01, max_row_norm=0.5), None),
            "ragged weighted",
            "xla",
        ),
        (SMALLER, TWO_CORES, (Adagrad(learning_rate=0.05), SGD(learning_rate=0.03)), "padded cast", "xla"),
        (
            dataclasses.replace(BOUNDED, track_every=2),
            SHAPE,
            (Momentum(learning_rate=lambda step: 0.02 / (1 + step)), None),
            "ragged cast weighted past",
            None,
        ),
        pytest.param(
            dataclasses.replace(EXACT, refresh_every=None),
            SHAPE,
            (Adam(learning_rate=0.01), None),
            "padded weighted",
            "native",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["exact", "bounded", "two cores", "every second", "once"],
)
def test_every_step_equals_the_reference(config, shape, optimizers, form, implementation):
    """Outputs, hits, cores, rows, slots, ids and counts, step after step."""
    rng = np.random.default_rng(7)
    optimizer, core_optimizer = optimizers
    cores = tt_init(shape, jax.random.key(1), variance=1.0)
    slots, cache = tt_init_slots(core_optimizer or optimizer, cores), tt_cache_init(config, shape, optimizer)
    table = CachedTable(config, shape, optimizer, cores, core_optimizer)
    train, scale = _train_step(config, shape, optimizer, core_optimizer, implementation), 0.5
    hit_steps = evictions = 0
    for step in range(14):
        bags, lookups, gradients = _draw(rng, shape, form)
        before = set(table.cache)
        want, want_hits, want_lookups = table.step(lookups, gradients, step=step, scale=scale)
        cores, slots, cache, out, hits, total = train(
            cores, slots, cache, bags, gradients, jnp.int32(step), jnp.float32(scale)
        )
        np.testing.assert_allclose(out, want, rtol=5e-4, atol=5e-4)
        assert (int(hits), int(total)) == (want_hits, want_lookups)
        _compare(table, cores, slots, cache)
        hit_steps += want_hits > 0
        evictions += len(before - set(table.cache)) > 0
    assert hit_steps >= 5
    assert (evictions > 0) == (config.refresh_every is not None)


def test_rows_enter_at_the_end_of_the_warm_up_and_change_on_schedule():
    config = TTCacheConfig(cache_rows=2, warmup_steps=3, refresh_every=2)
    optimizer = SGD(learning_rate=0.1)
    cores = tt_init(SMALL, jax.random.key(0))
    cache = tt_cache_init(config, SMALL, optimizer)
    batches = [[3, 3, 7], [7, 7, 7], [9, 9, 2], [9, 9, 9], [5, 9, 9], [5, 5, 5], [5, 5, 5], [1, 1, 1]]
    seen = []
    for step, ids in enumerate(batches):
        cast = tensor_cast(jnp.asarray(ids, jnp.int32)[:, None], num_rows=SMALL.rows)
        cache = _step(config, optimizer, cores, cache, SMALL, cast, step=jnp.int32(step), **XLA)
        seen.append([int(i) for i in cache.ids])
    # After step 2: 7 four times, 3 and 9 twice. After step 4: 9 seven times. After step 6: 5 and 9 seven times.
    assert seen == [[60, 60], [60, 60], [3, 7], [3, 7], [7, 9], [7, 9], [5, 9], [5, 9]]


def test_the_last_step_of_the_warm_up_counts():
    config = TTCacheConfig(cache_rows=1, tracked_rows=4, warmup_steps=2, refresh_every=None)
    cores, optimizer = tt_init(SMALL, jax.random.key(0)), SGD(learning_rate=0.1)
    cache = tt_cache_init(config, SMALL, optimizer)
    for step, ids in enumerate(([[3, -1]], [[7, 7]])):
        cast = tensor_cast(jnp.array(ids, jnp.int32), num_rows=SMALL.rows)
        cache = _step(config, optimizer, cores, cache, SMALL, cast, step=step, **XLA)
    assert cache.ids.tolist() == [7]
    assert cache.tracker.counts[:2].tolist() == [1, 2]


def test_of_equally_frequent_rows_the_lowest_numbers_are_cached():
    config, optimizer = TTCacheConfig(cache_rows=3, tracked_rows=6), SGD(learning_rate=0.1)
    cache = tt_cache_init(config, SMALL, optimizer)
    ids = jnp.asarray([[40], [8], [8], [50], [2], [31], [17], [59]], jnp.int32)
    tracker = _track(cache.tracker, tensor_cast(ids, num_rows=SMALL.rows), SMALL.rows)
    np.testing.assert_array_equal(tracker.ids, [2, 8, 17, 31, 40, 50])
    assert int(tracker.floor) == 1
    cores = tt_init(SMALL, jax.random.key(0))
    cache = _refresh(optimizer, cores, dataclasses.replace(cache, tracker=tracker), SMALL, **XLA)
    np.testing.assert_array_equal(cache.ids, [2, 8, 17])
    want = [tt_reference.row_of([np.asarray(c) for c in cores], row) for row in (2, 8, 17)]
    np.testing.assert_allclose(cache.rows, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("capacity", [16, 64])
def test_tracked_counts_keep_their_bounds_whatever_the_order(capacity):
    rng, rows, tracker, truth = np.random.default_rng(3), 500, trackers.empty_tracker(capacity, 500), np.zeros(500, int)
    update = jax.jit(lambda tracker, ids: trackers.track(tracker, tensor_cast(ids, num_rows=rows), rows))
    for _ in range(40):
        ids = np.where(rng.random(96) < 0.5, rng.integers(0, rows, 96), 499 - np.minimum(rng.zipf(1.2, 96), rows) + 1)
        truth += np.bincount(ids, minlength=rows)
        tracker = update(tracker, jnp.asarray(ids, jnp.int32)[:, None])
        found, counts = np.asarray(tracker.ids), np.asarray(tracker.counts)
        assert (np.diff(found[found < rows]) > 0).all()
        floor = int(tracker.floor)
        assert floor <= truth.sum() / capacity
        real = found < rows
        assert (counts[real] >= truth[found[real]]).all()
        assert (counts[real] - floor <= truth[found[real]]).all()
        assert truth[np.setdiff1d(np.arange(rows), found)].max() <= floor
    assert floor > 0


def test_counts_are_halved_before_int32_ends():
    tracker = trackers.TTTracker(
        ids=jnp.asarray([1, 5, 9], jnp.int32), counts=jnp.asarray([7, 2**30 - 2, 1], jnp.int32), floor=jnp.int32(1)
    )
    cast = tensor_cast(jnp.asarray([[5], [5], [1]], jnp.int32), num_rows=9)
    tracker = _track(tracker, cast, 9)
    np.testing.assert_array_equal(tracker.counts, [4, 2**29, 1])
    assert int(tracker.floor) == 1


def test_long_lists_are_searched_from_either_side():
    rng = np.random.default_rng(0)
    for n, q in ((3, 400), (400, 3)):
        keys = np.sort(rng.choice(1000, n, replace=False)).astype(np.int32)
        queries = np.sort(rng.choice(1000, q, replace=False)).astype(np.int32)
        got = trackers.count_below(jnp.asarray(keys), jnp.asarray(queries))
        np.testing.assert_array_equal(got, np.searchsorted(keys, queries))
        places = np.asarray(trackers.find(jnp.asarray(keys), jnp.asarray(queries), 900))
        for query, place in zip(queries, places, strict=True):
            assert (place < n and keys[place] == query) if query in keys and query < 900 else place == n


def _filled(config, shape, optimizer, cores, ids):
    """A cache of these rows, moved away from what the cores have."""
    cache = tt_cache_init(config, shape, optimizer)
    cast = tensor_cast(jnp.asarray(ids, jnp.int32)[:, None], num_rows=shape.rows)
    cache = dataclasses.replace(cache, tracker=_track(cache.tracker, cast, shape.rows))
    cache = _refresh(optimizer, cores, cache, shape, **XLA)
    return dataclasses.replace(cache, rows=cache.rows + jnp.float32(0.25))


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_without_a_hit_a_cached_table_is_a_plain_one(dtype):
    optimizer, config = Adagrad(learning_rate=0.1), TTCacheConfig(cache_rows=4)
    cores = tt_init(SHAPE, jax.random.key(0), variance=1.0, dtype=dtype)
    slots = tt_init_slots(optimizer, cores)
    rng = np.random.default_rng(0)
    ids = jnp.asarray(rng.integers(10, SHAPE.rows, (40, 3)), jnp.int32)
    gradients = jnp.asarray(rng.normal(size=(40, 16)), jnp.float32)
    cache = _filled(config, SHAPE, optimizer, cores, [0, 1, 2, 3])
    key = jnp.asarray([1, 2], jnp.uint32)
    out, residuals = _lookup(cores, cache, SHAPE, Bags(ids=ids))
    plain, plain_residuals = _plain_lookup(cores, SHAPE, Bags(ids=ids), contraction="unique")
    assert int(residuals.hits) == 0
    np.testing.assert_array_equal(out, plain)
    got = _apply(optimizer, cores, slots, cache, SHAPE, residuals, gradients, step=2, rounding_key=key)
    want = _plain_apply(optimizer, cores, slots, SHAPE, plain_residuals, gradients, step=2, rounding_key=key)
    for one, two in zip(jax.tree.leaves(got), jax.tree.leaves((*want, cache)), strict=True):
        np.testing.assert_array_equal(one, two)


def test_when_all_lookups_hit_the_cores_keep_their_bits_and_past_ids_are_nan():
    optimizer, config = RowWiseAdagrad(learning_rate=0.1), TTCacheConfig(cache_rows=5)
    cores = tt_init(SHAPE, jax.random.key(0), variance=1.0)
    slots = tt_init_slots(optimizer, cores)
    cache = _filled(config, SHAPE, optimizer, cores, [4, 900, 7, 31, 996])
    ids = jnp.asarray([[4, 900], [996, -1], [-1, -1], [4, 4], [31, SHAPE.rows], [2**31 - 1, 7]], jnp.int32)
    out, residuals = _lookup(cores, cache, SHAPE, Bags(ids=ids))
    assert (int(residuals.hits), int(residuals.lookups)) == (7, 7)
    assert np.isnan(out).any(axis=1).tolist() == [False, False, False, False, True, True]
    places = {int(row): k for k, row in enumerate(cache.ids)}
    np.testing.assert_array_equal(out[0], cache.rows[places[4]] + cache.rows[places[900]])
    np.testing.assert_array_equal(out[1], cache.rows[places[996]])
    np.testing.assert_array_equal(out[2], np.zeros(16))
    ones = jnp.ones((6, 16), jnp.float32)
    new_cores, new_slots, new = _apply(optimizer, cores, slots, cache, SHAPE, residuals, ones)
    for one, two in zip(jax.tree.leaves((new_cores, new_slots)), jax.tree.leaves((cores, slots)), strict=True):
        np.testing.assert_array_equal(one, two)
    assert (np.asarray(new.rows) < np.asarray(cache.rows)).all()


def test_no_lookups_no_bags_and_too_small_a_unique_capacity():
    optimizer, config = SGD(learning_rate=0.1), TTCacheConfig(cache_rows=3)
    cores = tt_init(SHAPE, jax.random.key(0))
    slots, cache = tt_init_slots(optimizer, cores), _filled(config, SHAPE, optimizer, cores, [4, 900, 31])
    for ids in (jnp.zeros((3, 0), jnp.int32), jnp.zeros((0, 1), jnp.int32)):
        out, residuals = _lookup(cores, cache, SHAPE, Bags(ids=ids), **XLA)
        np.testing.assert_array_equal(out, np.zeros((ids.shape[0], 16)))
        assert int(residuals.lookups) == 0
        cores, slots, same = _apply(optimizer, cores, slots, cache, SHAPE, residuals, out, **XLA)
        same = _step(config, optimizer, cores, same, SHAPE, residuals.cast, step=0, **XLA)
        for one, two in zip(jax.tree.leaves(same), jax.tree.leaves(cache), strict=True):
            np.testing.assert_array_equal(one, two)
    ids = jnp.asarray([[5], [900], [5], [31]], jnp.int32)
    out, residuals = _lookup(cores, cache, SHAPE, Bags(ids=ids), unique_capacity=2, **XLA)
    assert np.isnan(out).all(axis=1).tolist() == [False, True, False, False]
    assert int(residuals.cast.num_unique) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cache_rows": 0}, "cache_rows is 0; it must be an integer of at least 1; a table without a cache uses"),
        ({"cache_rows": 2.5}, r"cache_rows is 2.5; it must be an integer"),
        ({"tracked_rows": 3}, "tracked_rows is 3, but 4 cache_rows are chosen from the tracked ones"),
        ({"warmup_steps": 0}, "warmup_steps is 0"),
        ({"refresh_every": 0}, "refresh_every is 0"),
        ({"track_every": -1}, "track_every is -1"),
    ],
)
def test_bad_configs_raise(change, message):
    with pytest.raises(ValueError, match=message):
        TTCacheConfig(**{"cache_rows": 4, **change})


def test_what_does_not_fit_the_table_raises():
    optimizer, config = SGD(learning_rate=0.1), TTCacheConfig(cache_rows=4)
    with pytest.raises(ValueError, match="cache_rows is 61, but the table has 60 rows"):
        tt_cache_init(TTCacheConfig(cache_rows=61), SMALL, optimizer)
    cores, cache = tt_init(SMALL, jax.random.key(0)), tt_cache_init(config, SMALL, optimizer)
    bags = Bags(ids=jnp.zeros((3, 1), jnp.int32))
    with pytest.raises(ValueError, match="contraction 'sample' sums slices bag by bag"):
        tt_cached_lookup(cores, cache, SMALL, bags, contraction="sample")
    with pytest.raises(ValueError, match="cached rows must be float32 of shape"):
        tt_cached_lookup(cores, tt_cache_init(config, SHAPE, optimizer), SMALL, bags)
    with pytest.raises(ValueError, match="cache ids must be"):
        tt_cached_lookup(cores, dataclasses.replace(cache, ids=cache.ids[:, None]), SMALL, bags)
    _, residuals = _lookup(cores, cache, SMALL, bags, **XLA)
    with pytest.raises(ValueError, match="gradients must be float32 or bfloat16 of shape"):
        tt_cached_apply_gradients(
            optimizer, cores, tt_init_slots(optimizer, cores), cache, SMALL, residuals, jnp.zeros((3, 4), jnp.float32)
        )
