"""Lookups that are sent and those that are not: together the batch, each once, in the forms that a step takes."""

import functools
from typing import Any

import mesh_runs
import numpy as np
import pytest
from mesh_plans import some_plan

from jrec.batch import Batch
from jrec.data.packing import pack_batch
from jrec.data.regroup import gathered
from jrec.native import host
from jrec.ops.layout import EmbeddingLayout, FeatureConfig, TableConfig
from jrec.run.lookup_modes import LookupModes
from jrec.run.mesh_arrays import Shapes, stacked
from jrec.run.mesh_plan import default_plan
from jrec.run.mesh_rows import based
from jrec.run.partitioned_batch import BatchPartitioner, plan_routers, routed_batch, sending_bags, sending_features
from jrec.sharding.contents import shard_addresses


def padded_case(rng) -> tuple[EmbeddingLayout, Batch]:
    """Three one-hot features of two tables, some ids absent."""
    tables = [TableConfig(name=n, rows=30, dim=4, dtype="bfloat16") for n in "ab"]
    layout = EmbeddingLayout.build(tables, [FeatureConfig(name=n, table=n[0]) for n in ("a", "b", "b2")], planned=True)
    columns = {n: np.minimum(rng.zipf(1.3, 24) - 1, 29) for n in ("a", "b", "b2")}
    batch = pack_batch(layout, {"label": np.zeros(20), **{n: c[:20] for n, c in columns.items()}}, batch_size=24)
    return layout, batch


def ragged_case(rng) -> tuple[EmbeddingLayout, Batch]:
    """Bags of all kinds, weighted, empty, and unpooled; ``rng`` numbers the batch."""
    layout = mesh_runs.layout(dtype="bfloat16", tt=False)
    return layout, mesh_runs.batches(layout, 4)[int(rng.integers(4))]


def lookups_of(bags, bag_count):
    """(bag, id, weight) of every lookup that is not padding, sorted."""
    ids = np.asarray(bags.ids)
    if bags.offsets is None:
        bag = np.repeat(np.arange(bag_count), ids.shape[1])
    else:
        bag = np.repeat(np.arange(bag_count), np.diff(bags.offsets))
        ids = ids[: bag.size]
    weights = (
        np.ones(ids.size, np.float32) if bags.weights is None else np.asarray(bags.weights).reshape(-1)[: ids.size]
    )
    found = zip(bag.tolist(), ids.reshape(-1).tolist(), weights.tolist(), strict=True)
    return sorted(entry for entry in found if entry[1] >= 0)


@pytest.mark.parametrize("make", [padded_case, ragged_case])
@pytest.mark.parametrize("sends", ["all", "some"])
@pytest.mark.parametrize("seed", range(3))
def test_every_lookup_is_sent_or_read_once(make, sends, seed):
    layout, batch = make(np.random.default_rng(seed))
    (stack,) = layout.planned_stacks
    forms = LookupModes(layout, "send")
    names = sorted(forms.send)
    send = forms.send if sends == "all" else frozenset(names[1:])
    plan = default_plan(layout, 3)
    for device in range(3):
        piece = gathered(layout, [(batch, 8 * device, 8 * device + 8)])
        part = routed_batch(layout, piece, plan_routers(layout, plan), device, {stack.name}, send)
        bags: Any = part.batch.bags[stack.name]
        sent, routed = part.sends[stack.name], part.routes[stack.name]
        # The cast is that of the lookups that are left.
        expected = host.tensor_cast(
            bags.ids, bags.offsets, num_rows=stack.rows, unique_capacity=bags.cast.rows.size, threads=1
        )
        count = int(expected.num_unique)
        assert count == int(bags.cast.num_unique) == routed.addresses.size
        for name in ("offsets", "sources", "positions"):
            np.testing.assert_array_equal(getattr(bags.cast, name), getattr(expected, name), err_msg=name)
        np.testing.assert_array_equal(bags.cast.rows[:count], routed.addresses)
        # Both kinds together are the part's lookups, and only features that send have sent ones.
        left = [(bag, int(routed.addresses[i]), w) for bag, i, w in lookups_of(bags, bags.num_bags)]
        away, flags = [], sending_bags(stack, send, 8)
        assert flags is not None
        assert sent.addresses is not None
        for other in range(3):
            line, own = sent.line(other), shard_addresses(plan, based(stack), other)
            np.testing.assert_array_equal(own[sent.rows[line]], sent.addresses[line])
            of = sent.bags_of(other)
            ends = np.append(sent.firsts[of], line.stop - line.start)
            bag = np.repeat(sent.bags[of], np.diff(ends))
            assert flags[bag].all()
            assert (np.diff(sent.bags[of]) > 0).all()
            assert other != device or not line.stop - line.start
            weights = np.ones(bag.size, np.float32) if sent.weights is None else sent.weights[line]
            away += zip(bag.tolist(), sent.addresses[line].tolist(), weights.tolist(), strict=True)
        assert sorted(left + away) == lookups_of(piece.bags[stack.name], bags.num_bags)
        # What sends reads no row of another device.
        others = {f.config.name for f in stack.features} - send
        assert sum(routed.counts[other] for other in range(3) if other != device) == 0 or others


def test_sizes_of_what_is_sent_grow():
    layout = mesh_runs.layout(tt=False)
    (stack,) = layout.planned_stacks
    plan, forms = some_plan(2, seed=0, replicate=0.2, tt=False), LookupModes(layout, "send")
    made = BatchPartitioner(layout, plan, devices=range(2), first=0, count=2, cast=True, sending=lambda: forms.send)
    partitioned = made(mesh_runs.batches(layout, 2)[0])
    shapes = Shapes(layout, plan, examples=12, headroom=1.0, send=forms.send)
    needed = shapes.needed(partitioned, range(2))
    shapes.fix(needed)
    shapes.fit(partitioned, range(2))
    made = stacked(partitioned.parts, range(2), shapes)
    assert made.routes[stack.name].remote is not None  # "seen" is unpooled, so it retrieves
    assert made.routes[stack.name].send.rows.shape == (2, 2, shapes.sizes[stack.name].lookups)
    for kind in ("lookups", "pooled"):
        shapes.fix(needed)
        shapes.sizes[stack.name] = shapes.sizes[stack.name]._replace(**{kind: 1})
        with pytest.raises(RuntimeError, match=rf"there is room for .*{kind}=1"):
            shapes.check(needed)
        shapes.grow(needed)
        shapes.check(needed)


def test_only_what_a_step_needs_is_in_its_batch():
    """No sent lookups where all features retrieve; no requests where all of them send."""
    layout, batch = padded_case(np.random.default_rng(0))
    (stack,) = layout.planned_stacks
    plan = default_plan(layout, 2)
    for form in ("retrieve", "send"):
        forms = LookupModes(layout, form)
        cut = BatchPartitioner(
            layout,
            plan,
            devices=range(2),
            first=0,
            count=2,
            cast=True,
            sending=functools.partial(getattr, forms, "send"),
        )
        batch_parts = cut(batch)
        shapes = Shapes(layout, plan, examples=12, headroom=1.0, send=forms.send)
        shapes.fit(batch_parts, range(2))
        made = stacked(batch_parts.parts, range(2), shapes)
        assert (
            (made.routes[stack.name].remote is None) == (made.routes[stack.name].send is not None) == (form == "send")
        )
        assert len(sending_features(stack, forms.send)) == (3 if form == "send" else 0)
