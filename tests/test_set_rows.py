"""``Run.set_rows``: rows get values where they live, and have no past from then on."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from distribute_cases import DENSE, ROWS, columns, layout_of, mesh_of, modules, three_tiers
from flax import nnx

import jrec
from jrec import nn, ops

IDS = {"user": np.array([250, 3, 120, 0, 299]), "tag": np.array([60, 1]), "item": np.array([7])}
PLACES = ("device", "host", "plan")
OPTIMIZERS = {
    "adagrad": ops.Adagrad(learning_rate=0.1, initial_accumulator=0.5),
    "sgd": ops.SGD(learning_rate=0.1),
    "rowwise adam": ops.RowWiseAdam(learning_rate=0.02),
    "exact adamw": ops.ExactAdamW(learning_rate=0.02, weight_decay=0.2),
}

# A plan has rows of every tier.
IN = {"adagrad": ("device", "host")}


def vectors(name):
    return np.random.default_rng(len(name)).normal(size=(IDS[name].size, 8)).astype(np.float32)


def made(layout, rule):
    model, _ = modules(layout)
    return model, nn.SparseOptimizer(model, dense=optax.sgd(0.05, momentum=0.9), embedding=rule)


def opened(place, rule, **options):
    layout = layout_of(tiers=dict.fromkeys(ROWS, "host") if place == "host" else ())
    if place == "plan":
        options |= {"mesh": mesh_of(4), "plan": three_tiers(4, layout)}
    return jrec.distribute(*made(layout, rule), **options)


def trained(run, steps):
    with run.feed(map(columns, steps), dense=DENSE) as feed:
        step = run.compile()
        return [float(step(batch)[0]) for batch in feed]


def set_all(run):
    for name, ids in IDS.items():
        run.set_rows(name, ids, vectors(name))


def tables(run):
    return {name: run.table(name) for name in ROWS}


def by_hand(rule):
    """Losses and tables where the arrays of a model are changed between two runs."""
    with jrec.distribute(*made(layout_of(), rule)) as run:
        losses = trained(run, range(3))
        model, optimizer = run.modules()
        arrays, layout = dict(model.embeddings.arrays()), model.embeddings.layout
        for stack in layout.stacks.values():
            for table, base in zip(stack.tables, stack.bases, strict=True):
                at = jnp.asarray(IDS[table.name] + base)
                arrays[stack.name] = arrays[stack.name].at[at, :8].set(vectors(table.name))
                fresh = rule.init(jnp.zeros((at.size, arrays[stack.name].shape[1])))
                for slot, held in optimizer.slots[stack.name].items():
                    rows = jnp.full(at.size, 3.0) if slot == "last" else fresh[slot]
                    held[...] = held[...].at[at].set(rows)
        model.embeddings.set_arrays(arrays)
        again = nnx.merge(*nnx.split((model, optimizer)))
    with jrec.distribute(*again) as run:
        return losses + trained(run, range(3, 6)), tables(run)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_begin_anew_in_every_place_as_if_arrays_were_changed_by_hand(name):
    rule = OPTIMIZERS[name]
    expected_losses, expected = by_hand(rule)
    for place in IN.get(name, ("plan",)):
        with opened(place, rule) as run:
            losses = trained(run, range(3))
            before = tables(run)
            set_all(run)
            for table, rows in before.items():
                rows[IDS[table]] = vectors(table)
                np.testing.assert_array_equal(run.table(table), rows)
            losses += trained(run, range(3, 6))
            np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
            for table, rows in tables(run).items():
                np.testing.assert_allclose(rows, expected[table], rtol=1e-4, atol=1e-5, err_msg=f"{place}, {table}")


@pytest.mark.parametrize("place", PLACES)
def test_a_checkpoint_has_the_rows_that_were_set_since_the_last_one(tmp_path, place):
    rule = OPTIMIZERS["adagrad"]
    with opened(place, rule) as run:
        trained(run, range(2))
        run.save(tmp_path / "saved")
        set_all(run)
        trained(run, range(2, 3))
        run.save(tmp_path / "saved")
        expected = tables(run)
    with opened("device", rule) as run:
        run.restore(tmp_path / "saved")
        for name, rows in expected.items():
            np.testing.assert_array_equal(run.table(name), rows)


def test_values_are_rounded_to_the_dtype_of_the_table():
    tables_of = [jrec.TableConfig(name="item", rows=40, dim=8, dtype="bfloat16")]
    layout = jrec.EmbeddingLayout.build(tables_of, [jrec.FeatureConfig(name="item", table="item")])
    model = nn.DLRM(nn.DLRMConfig(num_dense=0, bottom_mlp=(), top_mlp=(1,)), layout, rngs=nnx.Rngs(0))
    optimizer = nn.SparseOptimizer(model, dense=optax.sgd(0.1), embedding=ops.SGD(learning_rate=0.1))
    with jrec.distribute(model, optimizer) as run:
        run.set_rows("item", [5], [[1 / 3] * 8])
        np.testing.assert_array_equal(run.rows("item", [5]), np.full((1, 8), 1 / 3).astype(ml_dtypes.bfloat16))
        run.set_rows("item", [], np.zeros((0, 8)))


@pytest.mark.parametrize(
    ("name", "ids", "rows", "message"),
    [
        ("film", [1], np.zeros((1, 8)), "there is no table 'film'; the tables are item, tag, user"),
        ("item", [1, 40], np.zeros((2, 8)), "table 'item' has no row 40; its rows are 0 to 39"),
        ("item", [2, 7, 2], np.zeros((3, 8)), "row 2 of table 'item' is given twice"),
        ("item", [2, 7], np.zeros((2, 4)), r"float64 of shape \(2, 4\); give floats of shape \(2, 8\)"),
        ("item", [2, 7], [[0.0] * 8, [0.0] * 7 + [np.inf]], "the vector of row 7 of table 'item' is not finite"),
        ("item", [2], [[1e300] * 8], "the vector of row 2 of table 'item' is not finite"),
        ("item", [0.5], np.zeros((1, 8)), "ids must be integers"),
        ("item", [2], [["a"] * 8], "give floats of shape"),
    ],
)  # fmt: skip
def test_what_is_no_row_is_refused_and_nothing_is_written(name, ids, rows, message):
    with opened("device", OPTIMIZERS["sgd"]) as run:
        before = run.table("item")
        with pytest.raises(ValueError, match=message):
            run.set_rows(name, ids, rows)
        np.testing.assert_array_equal(run.table("item"), before)


def test_rows_are_set_while_no_feed_is_open_and_in_a_run_that_trains():
    with opened("device", OPTIMIZERS["sgd"]) as run:
        with run.feed(map(columns, range(3)), dense=DENSE), pytest.raises(RuntimeError, match="before rows are set"):
            run.set_rows("item", [1], np.zeros((1, 8)))
        run.set_rows("item", [1], np.zeros((1, 8)))
    with opened("device", OPTIMIZERS["sgd"], training=False) as run, pytest.raises(RuntimeError, match="only predicts"):
        run.set_rows("item", [1], np.zeros((1, 8)))


def test_rows_in_tensor_train_cores_cannot_be_set():
    table = jrec.TableConfig(name="item", rows=400, dim=8, tier="tt", tt_shape=ops.TTShape.search(400, 8, ranks=4))
    layout = jrec.EmbeddingLayout.build([table], [jrec.FeatureConfig(name="item", table="item")])
    model = nn.DLRM(nn.DLRMConfig(num_dense=0, bottom_mlp=(), top_mlp=(1,)), layout, rngs=nnx.Rngs(0))
    optimizer = nn.SparseOptimizer(model, dense=optax.sgd(0.1), embedding=ops.SGD(learning_rate=0.1))
    with (
        jrec.distribute(model, optimizer) as run,
        pytest.raises(ValueError, match="row 3 of table 'item' is in tensor"),
    ):
        run.set_rows("item", [3], np.zeros((1, 8)))
