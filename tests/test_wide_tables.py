"""Tables of 2^31 rows and more, whose ids are int64 on the host: everything equals a small table, renumbered."""

import dataclasses

import jax
import numpy as np
import pytest
from host_runs import HostRun, batches, device_snapshots
from hypothesis import given, settings
from hypothesis import strategies as st
from wide_data import ROWS, numbers_of

from jrec import ops
from jrec.data.blocks import ListColumn
from jrec.data.packing import Packer, pack_batch
from jrec.data.regroup import blank, gathered
from jrec.data.schema import DatasetError
from jrec.host import HostTable
from jrec.host.pipeline_batch import localized
from jrec.host.ring import RingIndex
from jrec.native import host
from jrec.ops import layout as layouts
from jrec.ops.layout import MAX_TABLE_ROWS, EmbeddingLayout, FeatureConfig, TableConfig
from jrec.ops.rounding import stochastic_round
from jrec.ops.rounding_rows import rounding_rows
from jrec.ops.tt import TTShape
from jrec.ops.types import Bags

KEY = jax.random.key(7, impl="threefry2x32")
SMALL = 300
NUMBERS = numbers_of(SMALL, seed=0)
FEATURES = [
    FeatureConfig(name="one", table="t"),
    FeatureConfig(name="many", table="t", max_length=5, pooling="mean"),
    FeatureConfig(name="padded", table="t", max_length=3, weighted=True, fixed_length=True),
]


def layout_of(rows, features=FEATURES, dtype="float32", tier="host"):
    return EmbeddingLayout.build([TableConfig(name="t", rows=rows, dim=4, tier=tier, dtype=dtype)], features)


def stack_of(rows, dtype="float32"):
    return layout_of(rows, dtype=dtype).members[0]


def renumbered(array, numbers=NUMBERS):
    """Small row numbers as those of the wide table; -1 and other padding stays outside of it."""
    return np.where((array >= 0) & (array < len(numbers)), numbers[np.clip(array, 0, len(numbers) - 1)], -1)


def equal(a, b):
    """Bit-identical arrays."""
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(np.ascontiguousarray(a).view(np.uint8), np.ascontiguousarray(b).view(np.uint8))


def check_cast(wide, small):
    count = int(small.num_unique)
    assert wide.rows.dtype == np.int64
    np.testing.assert_array_equal(wide.rows[:count], renumbered(small.rows[:count]))
    assert (wide.rows[count:] == ROWS).all()
    for field in ("offsets", "sources", "positions", "num_unique"):
        np.testing.assert_array_equal(getattr(wide, field), getattr(small, field), err_msg=field)


@given(seed=st.integers(0, 2**32 - 1), threads=st.sampled_from([1, 2]), size=st.sampled_from([1, 50, 9_000, 40_000]))
@settings(max_examples=30)
def test_casts_of_wide_ids(seed, threads, size):
    rng = np.random.default_rng(seed)
    ids = rng.integers(-1, SMALL, size).astype(np.int32)
    offsets = None
    shape = (size, 1) if seed % 2 else (size,)
    if len(shape) == 1:
        offsets = np.append(0, np.sort(rng.integers(0, size + 1, 7))).astype(np.int32)
    wide_ids = renumbered(ids)
    wide_ids[wide_ids < 0] = rng.choice([-1, -(2**40), ROWS, 2**32 - 1, 2**32, 2**40], (wide_ids < 0).sum())
    capacity = {"unique_capacity": min(size, SMALL), "threads": threads}
    small = host.tensor_cast(ids.reshape(shape), offsets, num_rows=SMALL, **capacity)
    check_cast(host.tensor_cast(wide_ids.reshape(shape), offsets, num_rows=ROWS, **capacity), small)


def test_the_largest_table_of_all():
    ids = np.array([[MAX_TABLE_ROWS - 1], [MAX_TABLE_ROWS], [0], [MAX_TABLE_ROWS - 1]])
    cast = host.tensor_cast(ids, num_rows=MAX_TABLE_ROWS)
    assert cast.rows.tolist() == [0, MAX_TABLE_ROWS - 1, MAX_TABLE_ROWS, MAX_TABLE_ROWS]
    assert cast.positions.tolist() == [2, 0, 3, 1]
    with pytest.raises(ValueError, match=r"num_rows is 4294967296; row numbers are uint32 .* 1\.\.2\*\*32 - 1"):
        host.tensor_cast(ids, num_rows=2**32)
    with pytest.raises(ValueError, match="table 't' has 4,294,967,296 rows; a table has at most 4,294,967,295"):
        TableConfig(name="t", rows=2**32, dim=4, tier="host")


def columns(rng, examples, numbers=None):
    """Of ``FEATURES``, small ids or renumbered ones."""
    ends = np.append(0, np.cumsum(rng.integers(0, 6, examples)))
    found = {
        "label": rng.integers(0, 2, examples).astype(np.float32),
        "one": rng.integers(0, SMALL, examples),
        "many": ListColumn(ends, rng.integers(0, SMALL, ends[-1])),
        "padded": rng.integers(0, SMALL, (examples, 3)),
        "padded:weight": rng.random((examples, 3)).astype(np.float32),
    }
    if numbers is not None:
        found |= {name: numbers[found[name]] for name in ("one", "padded")}
        found["many"] = ListColumn(ends, numbers[found["many"].values].astype(np.uint32))
    return found


@pytest.mark.parametrize("features", [FEATURES, FEATURES[:1], FEATURES[2:]], ids=["ragged", "one-hot", "padded"])
def test_batches_carry_wide_ids(features):
    small, wide = (
        pack_batch(
            layout_of(rows, features), columns(np.random.default_rng(1), 20, numbers), batch_size=24, cast="host"
        )
        for rows, numbers in ((SMALL, None), (ROWS, NUMBERS))
    )
    [few], [many] = small.bags.values(), wide.bags.values()
    assert many.ids.dtype == np.int64
    np.testing.assert_array_equal(many.ids, renumbered(few.ids))
    for field in ("offsets", "weights"):
        np.testing.assert_array_equal(getattr(many, field), getattr(few, field))
    check_cast(many.cast, few.cast)


def test_batches_regrouped():
    layouts = layout_of(SMALL), layout_of(ROWS)
    batches = [
        pack_batch(layout, columns(np.random.default_rng(1), 20, numbers))
        for layout, numbers in zip(layouts, (None, NUMBERS), strict=True)
    ]
    small, wide = (
        gathered(layout, [(batch, 3, 9), (blank(layout, batch, 2), 0, 2), (batch, 15, 20)])
        for layout, batch in zip(layouts, batches, strict=True)
    )
    [few], [many] = small.bags.values(), wide.bags.values()
    assert many.ids.dtype == np.int64
    np.testing.assert_array_equal(many.ids, renumbered(few.ids))


def test_bad_ids_of_a_wide_table():
    layout = layout_of(ROWS, FEATURES[:1])
    given = {"one": np.array([5, ROWS, -2, 2**40])}
    with pytest.raises(DatasetError, match=r"id 3000000000 of feature 'one' in example 1 .* has 3,000,000,000 rows"):
        pack_batch(layout, given, label=None)
    for options, expected in (
        ({"on_bad_id": "clip"}, [5, ROWS - 1, 0, ROWS - 1]),
        ({"on_bad_id": "oov", "oov_rows": {"t": 2**31 + 1}}, [5, 2**31 + 1, 2**31 + 1, 2**31 + 1]),
    ):
        [bags] = pack_batch(layout, given, label=None, **options).bags.values()
        assert bags.ids[:, 0].tolist() == expected


@pytest.mark.parametrize("lengths", [1, 4])
def test_a_wide_table_in_two_parts(lengths):
    """Each part has rows that int32 numbers, but the ids before the split are beyond it."""
    first = 1_900_000_000
    shape = TTShape.search(ROWS - first, 4, ranks=2)
    parts = [
        TableConfig(name="t", rows=first, dim=4, tier="host", of_rows=ROWS),
        TableConfig(name="t", rows=shape.rows, dim=4, tier="tt", tt_shape=shape, first_row=first, of_rows=ROWS),
    ]
    layout = EmbeddingLayout.build(parts, [FeatureConfig(name="f", table="t", max_length=lengths)])
    ids = np.array([3, 2**31 + 5, first - 1, first, ROWS - 1, 2**31])
    column = ids if lengths == 1 else ListColumn(np.array([0, 2, 3, 6]), ids)
    head, tail = pack_batch(layout, {"f": column}, label=None).bags.values()
    assert head.ids.dtype == tail.ids.dtype == np.int32
    assert sorted(head.ids[head.ids >= 0]) == [3, first - 1]
    assert sorted(tail.ids[tail.ids >= 0]) == sorted(i - first for i in ids if i >= first)
    if lengths > 1:
        assert head.offsets.tolist() == [0, 1, 2, 2]
        assert tail.offsets.tolist() == [0, 1, 1, 4]


def test_the_ring_finds_wide_rows_as_it_finds_others():
    rng, plans = np.random.default_rng(2), [RingIndex(length=2, most=80) for _ in range(2)]
    hits = 0
    for batch in range(9):
        rows = np.unique(rng.zipf(1.3, 80).clip(1, SMALL) - 1).astype(np.int32)
        small, missing = plans[0].next(batch, rows, 80)
        wide, wide_missing = plans[1].next(batch, renumbered(rows), 80)
        np.testing.assert_array_equal(wide, small)
        assert wide_missing.dtype == np.int64
        np.testing.assert_array_equal(wide_missing, renumbered(missing))
        hits += rows.size - missing.size
    assert hits > 20


def bags_of(ids, numbers=None):
    """Six ragged bags of 40 ids, the last four of them in none."""
    offsets = np.array([0, 3, 3, 9, 20, 30, 36], np.int32)
    weights = np.random.default_rng(3).random(40).astype(np.float32)
    return Bags(ids=ids.astype(np.int32) if numbers is None else renumbered(ids), offsets=offsets, weights=weights)


@pytest.mark.parametrize("make", [False, True])
@pytest.mark.parametrize("with_cast", [False, True])
def test_lookups_and_updates_in_host_memory(make, with_cast):
    small, wide = (HostTable(stack_of(rows), ops.Adam(learning_rate=0.1), KEY, threads=2) for rows in (SMALL, ROWS))
    small.store(np.arange(SMALL), *wide.fetch(NUMBERS))
    rng = np.random.default_rng(4)
    for step in range(4):
        ids = rng.zipf(1.2, 40).clip(1, SMALL) - 1
        bags = [bags_of(ids), bags_of(ids, NUMBERS)]
        casts = [host.tensor_cast(b.ids, b.offsets, num_rows=rows) for b, rows in zip(bags, (SMALL, ROWS), strict=True)]
        if with_cast:
            bags = [dataclasses.replace(b, cast=cast) for b, cast in zip(bags, casts, strict=True)]
        few, many = (table.gather_reduce(b, make=make) for table, b in zip((small, wide), bags, strict=True))
        equal(many, few)
        gradients = rng.normal(size=(6, 4)).astype(np.float32)
        for table, cast, b in zip((small, wide), casts, bags, strict=True):
            table.casted_update(cast, gradients, weights=b.weights, step=step)
    touched = wide.dirty_rows()
    assert touched.dtype == np.int64
    assert touched.min() < 2**31 < touched.max()
    (rows, slots), (other, other_slots) = small.fetch(np.searchsorted(NUMBERS, touched)), wide.fetch(touched)
    equal(other, rows)
    for name, slot in slots.items():
        equal(other_slots[name], slot)
    assert wide.num_made == touched.size


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_wide_rows_are_rounded_by_table_and_row_modulo_2_to_the_32(dtype):
    exact, rounded = (HostTable(stack_of(ROWS, kind), ops.SGD(learning_rate=0.1), KEY) for kind in ("float32", dtype))
    exact.store(NUMBERS, rounded.read(NUMBERS).astype(np.float32), {})
    ids = NUMBERS[3::3].reshape(-1, 1)  # of whole examples
    cast = host.tensor_cast(ids, num_rows=ROWS)
    gradients = np.random.default_rng(5).normal(size=(len(ids), 4)).astype(np.float32)
    key = np.array([11, 12], np.uint32)
    for table in (exact, rounded):
        table.casted_update(cast, gradients, rounding_key=key)
    # What a device rounds by follows from the rows of the cast that goes there.
    [bags] = [localized(Bags(ids=ids), rounded.stack)[0]]
    assert bags.cast.rows.dtype == np.int32
    assert (bags.cast.rows < 0).any()
    numbers = rounding_rows(rounded.stack, jax.numpy.asarray(bags.cast.rows[: len(ids)]))
    wanted = stochastic_round(exact.read(ids[:, 0]), np.dtype(rounded.dtype), jax.numpy.asarray(key), numbers)
    equal(rounded.read(ids[:, 0]), np.asarray(wanted))
    nearest = exact.read(ids[:, 0]).astype(rounded.dtype)
    assert (nearest != rounded.read(ids[:, 0])).any()


def test_the_pipeline_of_16_bit_rows_gives_the_devices_bits_by_int64_addresses(monkeypatch):
    expected = device_snapshots()
    monkeypatch.setattr(layouts, "MAX_ROWS", 300)  # so that table "item", of 300 rows, is a wide one
    run = HostRun()
    assert [s.address_dtype.name for s in run.layout.members] == ["int32", "int64"]

    def widened(bags):
        return dataclasses.replace(bags, ids=bags.ids.astype(np.int64))

    def source():
        for batch, position in batches(run.layout):
            bags = {**batch.bags, "host_d8_bfloat16": widened(batch.bags["host_d8_bfloat16"])}
            yield dataclasses.replace(batch, bags=bags), position

    with run.pipeline(source(), queue=3) as pipeline:
        for snapshot in expected[1:]:
            loss = run.step(pipeline)
            assert loss == snapshot.loss
        pipeline.flush()
        assert run.snapshot(loss) == expected[-1]


def test_small_tables_keep_int32():
    layout = layout_of(SMALL)
    batch = pack_batch(layout, columns(np.random.default_rng(1), 20), cast="host")
    [bags] = batch.bags.values()
    assert bags.ids.dtype == bags.cast.rows.dtype == np.int32
    local, rows, _ = localized(bags, layout.members[0])
    assert rows.dtype == np.int32
    assert local.cast is bags.cast


def test_a_packer_of_wide_tables_needs_no_memory_for_them():
    assert Packer(layout_of(ROWS), on_bad_id="oov", oov_rows={"t": ROWS - 1}).columns
