"""Rows that a model holds on one device, read by the addresses of a plan's layout."""

import numpy as np
import pytest

from jrec.ops.layout import EmbeddingLayout, FeatureConfig, TableConfig
from jrec.run.placement import model_rows
from jrec.run.placement.model_rows import ModelRows

ROWS = {"a": 7, "b": 5, "c": 11, "d": 3}


def layout_of(names, tiers):
    return EmbeddingLayout.build(
        [TableConfig(name=name, rows=ROWS[name], dim=4, tier=tiers.get(name, "sharded")) for name in names],
        [FeatureConfig(name=name, table=name) for name in names],
    )


@pytest.fixture
def gathers(monkeypatch):
    """The shapes of what was read from the devices."""
    shapes, gathered = [], model_rows._gathered

    def recorded(array, rows):
        shapes.append((array.shape, rows.size))
        return gathered(array, rows)

    monkeypatch.setattr(model_rows, "_gathered", recorded)
    return shapes


@pytest.mark.parametrize("array", ["values", "accumulator"])
def test_rows_of_several_arrays_are_read_in_any_order_each_array_once(gathers, array):
    layout, rng = layout_of("dbca", {"a": "host"}), np.random.default_rng(0)
    (stack,) = layout_of("abcd", {}).members
    shape = (4,) if array == "values" else ()
    # Columns past the tables' dim are padding.
    stored = {
        name: {array: rng.normal(size=(own.rows, *(n + 2 for n in shape))).astype(np.float32)}
        for name, own in layout.stacks.items()
    }
    assert len(stored) == 2
    expected = np.zeros((stack.rows, *shape), np.float32)
    for name, own in layout.stacks.items():
        for table, base in zip(own.tables, own.bases, strict=True):
            at = stack.bases[[t.name for t in stack.tables].index(table.name)]
            rows = stored[name][array][base : base + table.rows]
            expected[at : at + table.rows] = rows[:, :4] if shape else rows
    addresses = rng.permutation(stack.rows)
    np.testing.assert_array_equal(ModelRows(layout, stored).read(stack, array, addresses), expected[addresses])
    assert len(gathers) == 2  # not one for each table: each size would be a compiled program


def test_tables_that_are_not_here_are_zeros():
    layout, (stack,) = layout_of("bc", {}), layout_of("abcd", {}).members
    (name,) = layout.stacks
    rows = ModelRows(layout, {name: {"values": np.ones((ROWS["b"] + ROWS["c"], 4), np.float32)}})
    got = rows.read(stack, "values", np.arange(stack.rows))
    here = np.isin(np.arange(stack.rows), np.arange(ROWS["a"], ROWS["a"] + ROWS["b"] + ROWS["c"]))
    np.testing.assert_array_equal(got, np.repeat(here[:, None], 4, axis=1).astype(np.float32))
    assert not rows.has_table("a")
