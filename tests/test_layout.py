"""Stacks: tables grouped by tier, dim and dtype, and refused where they contradict themselves."""

import time

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from jrec.data.packing import Packer, pack_batch
from jrec.nn import DLRM, DLRMConfig, SparseOptimizer, train_step
from jrec.nn.embeddings import init_stack
from jrec.ops import Adagrad, TTShape
from jrec.ops import layout as layouts
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
    found = {name: (stack.rows, stack.bases, stack.tt_shape) for name, stack in layout.stacks.items()}
    assert found == {
        "d8_float32": (40, (0, 10), None),
        "tt_b": (1000, (0,), tt["tt_shape"]),
        "host_d8_float32": (25, (0, 20), None),
        "tt_e": (1000, (0,), tt["tt_shape"]),
    }


def test_a_plan_keeps_tables_of_all_tiers_in_one_stack():
    tables = [_table("a", 10), _table("b", 20, tier="host"), _table("c", 30, tier="replicated")]
    features = [FeatureConfig(name=t.name, table=t.name) for t in tables]
    alone, planned = (EmbeddingLayout.build(tables, features, planned=planned) for planned in (False, True))
    assert {s.name: s.rows for s in alone.device_stacks} == {"d8_float32": 40}  # one device: no difference
    assert {s.name: s.rows for s in alone.host_stacks} == {"host_d8_float32": 20}
    assert {s.name: s.rows for s in planned.planned_stacks} == {"d8_float32": 60}
    assert not alone.planned_stacks
    assert not (*planned.device_stacks, *planned.host_stacks)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tier": "disk"}, "tier 'disk'; choose one of sharded, replicated, host, tt"),
        ({"tier": "tt"}, "tier 'tt' has tt_shape None"),
        ({"tt_shape": TTShape.search(1000, 8, ranks=4)}, "tier 'sharded' has tt_shape"),
        ({"tier": "tt", "tt_shape": TTShape.search(999, 8, ranks=4)}, "is 1,000 x 8, but its tt_shape is of 999 x 8"),
        ({"tier": "tt", "tt_shape": TTShape.search(1000, 8, ranks=4), "dtype": "float16"}, "float32 or bfloat16"),
    ],
)
def test_a_table_that_contradicts_itself_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        _table("a", 1000, **options)


def test_thousands_of_tables_take_time_in_proportion():
    def pack(count):
        names = [f"t{i}" for i in range(count)]
        tables = [TableConfig(name=name, rows=3, dim=4) for name in names]
        Packer(EmbeddingLayout.build(tables, [FeatureConfig(name=n, table=n, fixed_length=True) for n in names]))

    pack(2)  # compiles
    begin = time.process_time()
    pack(4000)
    # 10 s where every feature looked at all features, 0.1 s without.
    assert time.process_time() - begin < 2


def test_hundreds_of_tables_are_made_by_one_small_program():
    names = [f"t{i}" for i in range(500)]
    tables = [TableConfig(name=name, rows=3, dim=4) for name in names]
    (stack,) = EmbeddingLayout.build(tables, [FeatureConfig(name=n, table=n) for n in names]).members
    # A program that grew with the tables took 56 s to compile for these.
    assert len(jax.jit(lambda key: init_stack(stack, key)).lower(jax.random.key(0)).as_text()) < 100_000


def test_a_stack_that_int32_cannot_address_is_several():
    rows = {"a": 2**30, "b": 2**30 - 2, "c": 5, "d": 2**31 - 2, "e": 7}
    tables = [_table(name, n) for name, n in rows.items()]
    layout = EmbeddingLayout.build(tables, [FeatureConfig(name=f"f_{n}", table=n) for n in rows])
    found = {name: ([t.name for t in stack.tables], stack.bases) for name, stack in layout.stacks.items()}
    assert found == {
        "d8_float32": (["a", "b"], (0, 2**30)),
        "d8_float32_2": (["c"], (0,)),
        "d8_float32_3": (["d"], (0,)),
        "d8_float32_4": (["e"], (0,)),
    }
    assert layout.order == ("f_a", "f_b", "f_c", "f_d", "f_e")


def test_a_model_of_several_stacks_of_a_kind_computes_what_one_stack_does(monkeypatch):
    names = ("a", "b", "c", "d")
    tables = [_table(name, 30) for name in names]
    features = [FeatureConfig(name=name, table=name) for name in names]
    ids = {name: np.random.default_rng(i).integers(0, 30, 16) for i, name in enumerate(names)}

    def trained():
        layout = EmbeddingLayout.build(tables, features)
        model = DLRM(DLRMConfig(num_dense=0, bottom_mlp=(), top_mlp=(4, 1)), layout, rngs=nnx.Rngs(params=0))
        optimizer = SparseOptimizer(model, dense=optax.sgd(0.1), embedding=Adagrad(learning_rate=0.1))
        batch = pack_batch(layout, {"label": np.arange(16) % 2, **ids}, cast="host")
        losses = [float(nnx.jit(train_step)(model, optimizer, batch)[0]) for _ in range(3)]
        return losses, np.concatenate([np.asarray(rows) for rows in model.embeddings.arrays().values()])

    losses, rows = trained()
    monkeypatch.setattr(layouts, "MAX_ROWS", 70)
    assert len(EmbeddingLayout.build(tables, features).members) == 2
    split_losses, split_rows = trained()
    assert losses == split_losses
    np.testing.assert_array_equal(rows, split_rows)


def test_one_table_beyond_int32_is_not_for_one_device():
    table = _table("a", 2**31 - 1)
    remedy = r"keep it in host memory \(tier 'host'\), or spread its rows over several devices \(mesh.devices"
    with pytest.raises(ValueError, match=f"table 'a' of tier 'sharded' has 2,147,483,647 rows, .* {remedy}"):
        EmbeddingLayout.build([table], [FeatureConfig(name="f", table="a")])


def test_a_table_beyond_int32_is_a_stack_of_its_own():
    tables = [_table("a", 3_000_000_000, tier="host"), _table("b", 10, tier="host")]
    layout = EmbeddingLayout.build(tables, [FeatureConfig(name=t.name, table=t.name) for t in tables])
    assert list(layout.stacks) == ["host_d8_float32", "host_d8_float32_2"]
    assert [stack.address_dtype.name for stack in layout.members] == ["int64", "int32"]
