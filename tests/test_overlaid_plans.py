"""Some rows of a plan moved to another tier: those rows alone move, and every row still has one address."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
from mesh_plans import scattered
from whole_stacks import host_addresses

from jrec.ops.layout import EmbeddingLayout, FeatureConfig, TableConfig
from jrec.run.placement.plan import default_plan, overlaid, planned_part, ranges_of
from jrec.run.placement.rows import based
from jrec.sharding.contents import replicated_addresses, shard_addresses
from jrec.sharding.pieces import HOST, REPLICATED

ROWS = {"a": 40, "b": 1, "c": 25}


def layout():
    tables = [TableConfig(name=name, rows=rows, dim=4) for name, rows in ROWS.items()]
    return EmbeddingLayout.build(tables, [FeatureConfig(name=name, table=name) for name in ROWS], planned=True)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(st.integers(0, 2**31), st.integers(1, 4), st.sampled_from([HOST, REPLICATED]), st.floats(0, 1))
def test_rows_that_are_named_move_and_no_others(seed, devices, tier, share):
    rng = np.random.default_rng(seed)
    plan = scattered(default_plan(layout(), devices), seed=seed, replicate=0.2, host=0.3)
    moved = {name: np.flatnonzero(rng.random(rows) < share) for name, rows in ROWS.items() if name != "b"}
    found = planned_part(overlaid(plan, {name: ranges_of(rows) for name, rows in moved.items()}, tier), layout())
    for name, rows in ROWS.items():
        every = np.arange(rows)
        before, after = plan.locate(name, every), found.locate(name, every)
        here = np.isin(every, moved.get(name, []))
        np.testing.assert_array_equal(after.tier, np.where(here, tier, before.tier))
        np.testing.assert_array_equal(after.owner, np.where(here, -1, before.owner))
    (stack,) = layout().members
    arrays = [shard_addresses(found, based(stack), device) for device in range(devices)]
    arrays += [replicated_addresses(found, based(stack)), host_addresses(found, stack)]
    np.testing.assert_array_equal(np.sort(np.concatenate(arrays)), np.arange(stack.rows))


def test_ranges_of_rows():
    assert ranges_of(np.array([], np.uint32)).shape == (0, 2)
    assert ranges_of(np.array([0, 1, 2, 5, 7, 8], np.uint32)).tolist() == [[0, 3], [5, 6], [7, 9]]
