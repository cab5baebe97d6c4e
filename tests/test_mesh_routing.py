"""Batches cut for devices: every example once, every unique row from where the plan keeps it, nothing dropped."""

import dataclasses

import mesh_runs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mesh_plans import scattered, some_plan

from jrec.data.regroup import gathered
from jrec.ops.layout import EmbeddingLayout, FeatureConfig, TableConfig
from jrec.run.mesh_arrays import Shapes, counts, stacked
from jrec.run.mesh_plan import default_plan, planned_part
from jrec.run.mesh_rows import based
from jrec.run.partitioned_batch import BatchPartitioner
from jrec.sharding import PRESETS, PlanError, Problem, build_plan, plan_placement
from jrec.sharding.contents import replicated_addresses, shard_addresses
from jrec.sharding.of_layout import plan_tables_of
from jrec.sharding.pieces import REPLICATED, SHARDED
from jrec.sharding.router import Router

LAYOUT = mesh_runs.layout(tt=False)
STACK = LAYOUT.members[0]


def found_by(routed):
    """(array, row) of every address."""
    array, row = np.empty((2, routed.addresses.size), np.int64)
    array[routed.at] = np.repeat(np.arange(routed.starts.size - 1), routed.counts)
    row[routed.at] = routed.rows
    return array, row


@settings(max_examples=25)
@given(st.integers(1, 5), st.integers(0, 100), st.floats(0, 1), st.data())
def test_rows_are_routed_to_where_the_plan_keeps_them(devices, seed, replicate, data):
    plan = some_plan(devices, seed=seed, replicate=replicate, tt=False)
    addresses = np.array(sorted(data.draw(st.sets(st.integers(0, STACK.rows - 1)))), np.int32)
    device = data.draw(st.integers(0, devices - 1))
    routed = Router(plan, based(STACK)).route(addresses, device)
    array, row = found_by(routed)
    for name, base in based(STACK):
        rows = plan.tables[plan.number(name)].rows
        of = (addresses >= base) & (addresses < base + rows)
        tier, owner, offset = plan.locate(name, addresses[of] - base)
        np.testing.assert_array_equal(array[of], np.where(tier == REPLICATED, devices, owner))
        np.testing.assert_array_equal(row[of], offset)
    for number in range(devices):
        held = shard_addresses(plan, based(STACK), number)
        np.testing.assert_array_equal(held[routed.shard(number).rows], addresses[routed.shard(number).at])
    held = replicated_addresses(plan, based(STACK))
    np.testing.assert_array_equal(held[routed.replicated.rows], addresses[routed.replicated.at])


def test_plans_for_inference_are_routed_to_the_nearest_copy():
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
    router, every = Router(plan, based(STACK)), np.arange(STACK.rows, dtype=np.int32)
    for device in range(8):
        array, row = found_by(router.route(every, device))
        for name, base in based(STACK):
            rows = np.arange(plan.tables[plan.number(name)].rows)
            _, source, offset = plan.route(name, rows, device)
            np.testing.assert_array_equal(array[base : base + rows.size], source)
            np.testing.assert_array_equal(row[base : base + rows.size], offset)
        held = shard_addresses(plan, based(STACK), device)
        own = array == device
        np.testing.assert_array_equal(held[row[own]], every[own])


def test_a_router_keeps_what_its_own_devices_need_and_shares_what_they_have_in_common():
    devices, plan = 64, scattered(default_plan(LAYOUT, 64), seed=1, replicate=0.1)
    segments = len(plan.start)
    every = np.arange(STACK.rows, dtype=np.int32)
    whole = Router(plan, based(STACK))
    arrays = {id(a): a for of in (whole._source, whole._shift) for a in of.values()}
    assert sum(a.nbytes for a in arrays.values()) <= 10 * segments  # and not of each device
    few = Router(plan, based(STACK), [3, 63])
    assert sorted(few._source) == [3, 63]
    for device in (3, 63):
        for one, other in zip(*(dataclasses.astuple(r.route(every, device)) for r in (whole, few)), strict=True):
            np.testing.assert_array_equal(one, other)
    assert whole.devices == few.devices == devices


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


@pytest.mark.parametrize("addresses", [[-1], [STACK.rows], [3, 3], [5, 4]])
def test_addresses_that_are_no_ascending_rows_are_refused(addresses):
    with pytest.raises(PlanError, match="does not ascend or is not in a stack of 435 rows"):
        Router(some_plan(2, tt=False), based(STACK)).route(np.array(addresses, np.int32), 0)


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


def dealt_batch(devices, seed=0, number=0):
    plan = some_plan(devices, seed=seed, replicate=0.2, tt=False)
    parts = BatchPartitioner(LAYOUT, plan, devices=range(devices), first=0, count=devices, cast=True)
    return plan, parts(mesh_runs.batches(LAYOUT, 3)[number])


def test_a_route_reads_every_unique_row_once():
    plan, partitioned = dealt_batch(3)
    shapes = Shapes(LAYOUT, plan, examples=8, headroom=1.0)
    shapes.fit(partitioned, range(3))
    for device, (part, lines) in enumerate(zip(partitioned.parts, range(3), strict=True)):
        route = stacked(partitioned.parts, range(3), shapes).routes[STACK.name]
        size = shapes.sizes[STACK.name].unique
        at = np.concatenate([np.ravel(getattr(route, n).at[lines]) for n in ("own", "remote", "replicated")])
        unique = part.routes[STACK.name].addresses.size
        np.testing.assert_array_equal(np.sort(at[at < size]), np.arange(unique))
        assert (route.remote.at[lines, device] == size).all()


def test_sizes_grow_with_the_batches_and_never_shrink():
    plan, partitioned = dealt_batch(2)
    shapes = Shapes(LAYOUT, plan, examples=12, headroom=1.0)
    before = shapes.sizes[STACK.name]
    shapes.fit(partitioned, range(2))
    grown = shapes.sizes[STACK.name]
    assert grown.most(before) == grown
    assert grown.most(counts(partitioned.parts[0].routes[STACK.name], 0)) == grown
    shapes.fit(dealt_batch(2, number=2)[1], range(2))  # a short batch
    assert shapes.sizes[STACK.name] == grown


def test_what_does_not_fit_is_never_dropped():
    plan, partitioned = dealt_batch(2)
    shapes = Shapes(LAYOUT, plan, examples=12, headroom=1.25)
    needed = shapes.needed(partitioned, range(2))
    shapes.fix(needed)
    shapes.check(needed)
    assert not shapes.grow(needed)
    before = shapes.sizes[STACK.name] = needed[STACK.name]._replace(remote=1)
    with pytest.raises(RuntimeError, match=r"a batch needs .* of stack .*, but there is room for .*remote=1"):
        shapes.check(needed)
    assert shapes.grow(needed) == {STACK.name: (before, shapes.sizes[STACK.name])}
    shapes.check(needed)


def test_devices_that_cannot_share_a_batch_are_refused():
    parts = BatchPartitioner(LAYOUT, some_plan(5, tt=False), devices=range(5), first=0, count=5, cast=True)
    with pytest.raises(ValueError, match="24 examples cannot be shared equally by 5 devices"):
        parts(mesh_runs.batches(LAYOUT, 2)[0])


def test_every_row_lies_somewhere_once():
    plan = some_plan(4, seed=9, replicate=0.3, tt=False)
    held = [shard_addresses(plan, based(STACK), d) for d in range(4)] + [replicated_addresses(plan, based(STACK))]
    np.testing.assert_array_equal(np.sort(np.concatenate(held)), np.arange(STACK.rows))
    assert (plan.tier == SHARDED).any()
