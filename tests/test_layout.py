"""Stacks: tables grouped by tier, dim and dtype, and refused where they contradict themselves."""

import time

import jax
import pytest

from jrec.data.packing import Packer
from jrec.nn.embeddings import init_stack
from jrec.ops import TTShape
from jrec.ops.layout import EmbeddingLayout, FeatureConfig, TableConfig


def _table(name, rows, **options):
    return TableConfig(name=name, rows=rows, dim=8, **options)


def test_tables_of_every_tier_are_stacked_apart():
    tt = {"tier": "tt", "tt_shape": TTShape.search(1000, 8, ranks=4)}
    tables = [
        _table("a", 10),
        _table("b", 1000, **tt),
        _table("c", 20, tier="host"),
        _table("d", 30),
        _table("e", 1000, **tt),
        _table("f", 5, tier="host"),
    ]
    layout = EmbeddingLayout.build(tables, [FeatureConfig(name=t.name, table=t.name) for t in tables])
    found = {name: (stack.tier, stack.rows, stack.bases, stack.tt_shape) for name, stack in layout.stacks.items()}
    assert found == {
        "d8_float32": ("device", 40, (0, 10), None),
        "tt_b": ("tt", 1000, (0,), tt["tt_shape"]),
        "host_d8_float32": ("host", 25, (0, 20), None),
        "tt_e": ("tt", 1000, (0,), tt["tt_shape"]),
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tier": "disk"}, "tier 'disk'; choose one of device, tt, host"),
        ({"tier": "tt"}, "tier 'tt' has tt_shape None"),
        ({"tt_shape": TTShape.search(1000, 8, ranks=4)}, "tier 'device' has tt_shape"),
        ({"tier": "tt", "tt_shape": TTShape.search(999, 8, ranks=4)}, "is 1,000 x 8, but its tt_shape is of 999 x 8"),
        ({"tier": "tt", "tt_shape": TTShape.search(1000, 8, ranks=4), "dtype": "float16"}, "float32 or bfloat16"),
    ],
)
def test_a_table_that_contradicts_itself_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        _table("a", 1000, **options)


def test_thousands_of_tables_take_time_in_proportion():
    names = [f"t{i}" for i in range(4000)]
    begin = time.process_time()
    tables = [TableConfig(name=name, rows=3, dim=4) for name in names]
    layout = EmbeddingLayout.build(tables, [FeatureConfig(name=n, table=n, fixed_length=True) for n in names])
    Packer(layout)
    # 10 s where every feature looked at all features, 0.1 s without.
    assert time.process_time() - begin < 2


def test_hundreds_of_tables_are_made_by_one_small_program():
    names = [f"t{i}" for i in range(500)]
    tables = [TableConfig(name=name, rows=3, dim=4) for name in names]
    (stack,) = EmbeddingLayout.build(tables, [FeatureConfig(name=n, table=n) for n in names]).members
    # A program that grew with the tables took 56 s to compile for these.
    assert len(jax.jit(lambda key: init_stack(stack, key)).lower(jax.random.key(0)).as_text()) < 100_000
