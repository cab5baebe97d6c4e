"""Batches cut for devices: where a device reads a row, what parts need, and which rows the host brings."""

import dataclasses

import mesh_runs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mesh_plans import some_plan

from jrec.data.regroup import gathered
from jrec.data.schema import DatasetError
from jrec.mesh.routing import WindowCapacity
from jrec.ops.layout import EmbeddingLayout, FeatureConfig, TableConfig
from jrec.run.feeds.partitioned_batch import BatchPartitioner
from jrec.run.placement import sizes as sizes_module
from jrec.run.placement.lookup_modes import LookupModes
from jrec.run.placement.part_lookups import PartLookups
from jrec.run.placement.plan import default_plan, planned_part
from jrec.run.placement.rows import based
from jrec.run.placement.sizes import HostSizes, MeshSizes
from jrec.sharding import PRESETS, Problem, build_plan, plan_placement
from jrec.sharding.contents import host_ranges, replicated_addresses, shard_addresses
from jrec.sharding.of_layout import plan_tables_of
from jrec.sharding.pieces import HOST, REPLICATED, SHARDED
from jrec.sharding.stack_ranges import StackRanges, within

LAYOUT = mesh_runs.layout(tt=False)
STACK = LAYOUT.members[0]


@settings(max_examples=25)
@given(st.integers(1, 5), st.integers(0, 100), st.floats(0, 1), st.floats(0, 0.5))
def test_rows_are_read_where_the_plan_keeps_them(devices, seed, replicate, host):
    plan = some_plan(devices, seed=seed, replicate=replicate, host=host, tt=False)
    every, ranges = np.arange(STACK.rows, dtype=np.int32), StackRanges(plan, based(STACK))
    source, offset = ranges.located(every, seed % devices)
    for name, base in based(STACK):
        rows = np.arange(plan.tables[plan.number(name)].rows)
        tier, owner, expected = plan.locate(name, rows)
        of = slice(base, base + rows.size)
        where = np.where(tier == REPLICATED, devices, np.where(tier == HOST, devices + 1, owner))
        np.testing.assert_array_equal(source[of], where)
        np.testing.assert_array_equal(offset[of][tier != HOST], expected[tier != HOST])
    arrays = [shard_addresses(plan, based(STACK), d) for d in range(devices)] + [
        replicated_addresses(plan, based(STACK))
    ]
    for number, held in enumerate(arrays):
        np.testing.assert_array_equal(held[offset[source == number]], every[source == number])
    np.testing.assert_array_equal(within(every, host_ranges(plan, based(STACK))), source == devices + 1)
    begin, sources, shift = ranges.of_devices(range(devices))
    of = np.searchsorted(begin[0], every, side="right") - 1
    for device in range(devices):
        found = ranges.located(every, device)
        np.testing.assert_array_equal(sources[device][of], found[0])
        np.testing.assert_array_equal(every + shift[device][of], found[1])


def test_plans_for_inference_read_the_nearest_copy():
    from jrec.access.profile import AccessProfile, TableProfile

    tables = plan_tables_of(LAYOUT)
    profile = AccessProfile(
        tables=tuple(
            TableProfile(name=t.name, starts=np.arange(t.rows + 1), counts=1000 / np.arange(1.0, t.rows + 1))
            for t in tables
        ),
        examples=1000,
        source="test",
        dataset=None,
    )
    problem = Problem(
        tables=tables,
        profile=profile,
        hardware=dataclasses.replace(PRESETS["dgx-a100"], memory=(10**6,) * 8),
        batch_size=64,
        purpose="inference",
        extra_memory=0.5,
    )
    plan = planned_part(build_plan(problem, plan_placement(problem).placement), LAYOUT)
    assert len(plan.copy_segment)
    ranges, every = StackRanges(plan, based(STACK)), np.arange(STACK.rows, dtype=np.int32)
    for device in range(8):
        array, row = ranges.located(every, device)
        for name, base in based(STACK):
            rows = np.arange(plan.tables[plan.number(name)].rows)
            _, source, offset = plan.route(name, rows, device)
            np.testing.assert_array_equal(array[base : base + rows.size], source)
            np.testing.assert_array_equal(row[base : base + rows.size], offset)
        held = shard_addresses(plan, based(STACK), device)
        own = array == device
        np.testing.assert_array_equal(held[row[own]], every[own])


def test_a_part_of_a_plan_keeps_its_rows_without_gaps():
    tables = [TableConfig(name=n, rows=r, dim=8) for n, r in mesh_runs.SIZES.items()]
    whole = EmbeddingLayout.build(tables, [FeatureConfig(name=t.name, table=t.name) for t in tables], planned=True)
    fewer = EmbeddingLayout.build(
        tables[1:3], [FeatureConfig(name=t.name, table=t.name) for t in tables[1:3]], planned=True
    )
    plan = default_plan(whole, 3)
    part = planned_part(plan, fewer)
    assert part.shard_rows("d8_float32").sum() == sum(t.rows for t in tables[1:3])
    for table in tables[1:3]:
        rows = np.arange(table.rows)
        np.testing.assert_array_equal(part.locate(table.name, rows).owner, plan.locate(table.name, rows).owner)


def test_parts_put_together_are_the_batch():
    batch = mesh_runs.batches(LAYOUT, 2)[0]
    parts = [gathered(LAYOUT, [(batch, i, i + 8)]) for i in range(0, 24, 8)]
    again = gathered(LAYOUT, [(parts[0], 0, 8), (parts[1], 0, 3), (parts[1], 3, 8), (parts[2], 0, 8)])
    for name in ("dense", "labels", "mask"):
        np.testing.assert_array_equal(getattr(again, name), getattr(batch, name))
    for name, bags in batch.bags.items():
        np.testing.assert_array_equal(again.bags[name].offsets, bags.offsets)
        used = int(bags.offsets[-1])
        np.testing.assert_array_equal(again.bags[name].ids[:used], bags.ids[:used])
        np.testing.assert_array_equal(again.bags[name].weights[:used], bags.weights[:used])
        assert (again.bags[name].ids[used:] == -1).all()


def test_padded_bags_are_cut_and_joined():
    tables = [TableConfig(name=n, rows=50, dim=4) for n in "ab"]
    layout = EmbeddingLayout.build(tables, [FeatureConfig(name=n, table=n) for n in "ab"], planned=True)
    from jrec.data.packing import pack_batch

    ids = np.random.default_rng(0).integers(0, 50, (2, 12))
    batch = pack_batch(layout, {"label": np.zeros(12), "a": ids[0], "b": ids[1]})
    part = gathered(layout, [(batch, 4, 10), (batch, 0, 1)])
    chosen = [*range(4, 10), 0]
    expected = np.concatenate([ids[0, chosen], ids[1, chosen] + 50])
    np.testing.assert_array_equal(part.bags["d4_float32"].ids[:, 0], expected)


@pytest.mark.parametrize("form", ["retrieve", "send"])
@pytest.mark.parametrize("seed", range(3))
def test_what_a_part_needs_is_counted(form, seed):
    devices, plan = 3, some_plan(3, seed=seed, replicate=0.2, host=0.2, tt=False)
    cut = BatchPartitioner(LAYOUT, plan, devices=range(devices), first=0, count=devices, cast=True)
    partitioned = cut(mesh_runs.batches(LAYOUT, 3)[seed])
    sizes = MeshSizes(LAYOUT, plan, examples=8, headroom=1.0, send=LookupModes(LAYOUT, form).send)
    sending, ranges = sizes.sending(STACK.name), StackRanges(plan, based(STACK))
    assert (sending is None) == (form == "retrieve")
    read = partitioned.read[STACK.name]
    brought = np.arange(read.size) % devices
    every = set()
    for device, part in enumerate(partitioned.parts):
        bags = part.bags[STACK.name]
        retrieved, sent, pairs = [set() for _ in range(devices + 1)], np.zeros(devices, int), set()
        for bag in range(bags.num_bags):
            for row in bags.ids[bags.offsets[bag] : bags.offsets[bag + 1]].tolist():
                source = int(ranges.located(np.array([row]), device)[0][0])
                if sending is not None and sending[bag] and source < devices and source != device:
                    sent[source] += 1
                    pairs.add((source, bag))
                    continue
                if source == devices + 1:
                    every.add(row)
                    source = int(brought[read.tolist().index(row)])
                retrieved[source].add(row)
        counts = [len(of) for of in retrieved]
        lookups = PartLookups.of(bags, ranges, device=device, devices=devices)
        assert lookups.needs(sending, read, brought) == WindowCapacity(
            unique=sum(counts),
            own=counts[device],
            remote=max(n for other, n in enumerate(counts[:devices]) if other != device),
            replicated=counts[devices],
            lookups=sent.max(),
            bags=max(sum(source == other for source, _ in pairs) for other in range(devices)),
        )
    assert read.tolist() == sorted(every)


def test_room_is_made_for_what_was_needed_and_tells_whether_more_can_come(monkeypatch):
    monkeypatch.setattr(sizes_module, "_WHOLE_BYTES", 0)
    plan = some_plan(2, seed=0, replicate=0.2, tt=False)
    sizes = MeshSizes(LAYOUT, plan, examples=12, headroom=1.5)
    needed = WindowCapacity(unique=80, own=40, remote=9, replicated=0)
    sizes.make_room({STACK.name: needed})
    arrays = np.zeros((3, 2, 4), np.int32)
    places = sizes.places(STACK.name, tuple(arrays))
    assert places.room == WindowCapacity(unique=128, own=64, remote=32, replicated=32)
    assert not places.fits
    sizes.make_room({STACK.name: sizes.limits[STACK.name]})
    assert sizes.places(STACK.name, tuple(arrays)).fits


@pytest.mark.parametrize(("little", "fits"), [(1, True), (0, False)])
def test_room_is_made_for_all_that_a_batch_can_read_where_it_is_little(monkeypatch, little, fits):
    sizes = MeshSizes(LAYOUT, some_plan(2, seed=0, replicate=0.2, tt=False), examples=12, headroom=1)
    limits = sizes.limits[STACK.name]
    exchanged = 4 * 2 * max(limits.unique, limits.bags) * STACK.dim
    monkeypatch.setattr(sizes_module, "_WHOLE_BYTES", exchanged - 1 + little)
    sizes.make_room({STACK.name: WindowCapacity(unique=1)})
    places = sizes.places(STACK.name, tuple(np.zeros((3, 2, 4), np.int32)))
    assert places.fits == fits
    assert (places.room == limits) == fits


@pytest.mark.parametrize(("times", "fits"), [(2, True), (2.5, False)])
def test_room_is_made_for_all_that_a_batch_can_read_where_it_is_little_more_than_was_needed(monkeypatch, times, fits):
    monkeypatch.setattr(sizes_module, "_WHOLE_BYTES", 0)
    monkeypatch.setattr(sizes_module, "bucket", min)
    sizes = MeshSizes(LAYOUT, some_plan(2, seed=0, replicate=0.2, tt=False), examples=12, headroom=1)
    limits = sizes.limits[STACK.name]
    sizes.make_room({STACK.name: WindowCapacity(*(int(np.ceil(most / times)) for most in limits))})
    assert sizes.places(STACK.name, tuple(np.zeros((3, 2, 4), np.int32))).fits == fits


def test_hot_batches_have_no_room_for_rows_of_single_devices(monkeypatch):
    monkeypatch.setattr(sizes_module, "_WHOLE_BYTES", 0)
    plan = some_plan(2, seed=0, replicate=0.5, host=0.2, tt=False)
    sizes = MeshSizes(LAYOUT, plan, examples=12, headroom=1.5, send=LookupModes(LAYOUT, "send").send, hot=True)
    sizes.make_room({STACK.name: WindowCapacity(unique=40, replicated=40)})
    places = sizes.places(STACK.name, tuple(np.zeros((3, 2, 4), np.int32)))
    assert places.room == WindowCapacity(unique=64, replicated=64)
    assert not places.sends
    assert not sizes.host


def test_a_hot_batch_that_reads_another_row_names_it():
    plan = some_plan(2, seed=0, replicate=0.5, tt=False)
    cut = BatchPartitioner(LAYOUT, plan, devices=range(2), first=0, count=2, cast=True, hot=True)
    with pytest.raises(DatasetError, match=r"a hot batch reads row \d+ of table '\w+', which the plan does not put on"):
        cut(mesh_runs.batches(LAYOUT, 2)[0])
    everywhere = some_plan(2, seed=0, replicate=1.0, tt=False)
    cut = BatchPartitioner(LAYOUT, everywhere, devices=range(2), first=0, count=2, cast=True, hot=True)
    assert len(cut(mesh_runs.batches(LAYOUT, 2)[0]).parts) == 2


def test_sizes_of_host_rows_grow_with_the_batches_and_never_shrink():
    plan = some_plan(2, seed=0, host=0.6, tt=False)
    sizes = MeshSizes(LAYOUT, plan, examples=12, headroom=1.0)
    sizes.fit_host({STACK.name: HostSizes(read=70, lines=35)})
    grown = sizes.host[STACK.name]
    assert grown.most(HostSizes(70, 35)) == grown
    assert grown != sizes.host_limits[STACK.name]
    sizes.fit_host({STACK.name: HostSizes(read=3, lines=2)})
    assert sizes.host[STACK.name] == grown
    sizes.fit_host({STACK.name: sizes.host_limits[STACK.name]})
    assert sizes.host == sizes.host_limits


def test_devices_that_cannot_share_a_batch_are_refused():
    parts = BatchPartitioner(LAYOUT, some_plan(5, tt=False), devices=range(5), first=0, count=5, cast=True)
    with pytest.raises(ValueError, match="24 examples cannot be shared equally by 5 devices"):
        parts(mesh_runs.batches(LAYOUT, 2)[0])


def test_every_row_lies_somewhere_once():
    plan = some_plan(4, seed=9, replicate=0.3, tt=False)
    held = [shard_addresses(plan, based(STACK), d) for d in range(4)] + [replicated_addresses(plan, based(STACK))]
    np.testing.assert_array_equal(np.sort(np.concatenate(held)), np.arange(STACK.rows))
    assert (plan.tier == SHARDED).any()
