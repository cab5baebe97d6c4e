"""Optimizer, learning rate and "frozen" by table: in code, in a layout's stacks, in TOML and in whole runs."""

import dataclasses
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoint_state import final_arrays
from flax import nnx

import jrec
from jrec import ops
from jrec.app.config import TrainConfig, load_config
from jrec.app.config.optimizer import EmbeddingOptimizerConfig, TableOptimizerConfig
from jrec.app.evaluate import evaluate_checkpoint
from jrec.app.loop import train
from jrec.errors import ConfigError
from jrec.nn import DLRM, DLRMConfig, SparseOptimizer, train_step
from jrec.prepare.synth.generate import SynthOptions, synthesize
from jrec.prepare.synth.shapes import shape_like
from jrec.sharding import PlanTable

ROWS = {"a": 30, "b": 20, "c": 10, "t": 200}
SCHEDULE = optax.linear_schedule(0.5, 0.0, 10)
ADAM, SGD = ops.Adam(learning_rate=0.02), ops.SGD(learning_rate=SCHEDULE)
DATA = {"data": {"path": "d"}}


def layout_of(groups):
    """Tables of ``ROWS`` in these groups, the last in tensor-train cores."""
    tt = {"t": {"tier": "tt", "tt_shape": ops.TTShape.search(ROWS["t"], 8, ranks=4)}}
    tables = [
        jrec.TableConfig(name=name, rows=rows, dim=8, group=groups.get(name, ""), **tt.get(name, {}))
        for name, rows in ROWS.items()
    ]
    return jrec.EmbeddingLayout.build(tables, [jrec.FeatureConfig(name=name, table=name) for name in ROWS])


def model_of(layout):
    config = DLRMConfig(num_dense=2, bottom_mlp=(8,), top_mlp=(8, 1))
    return DLRM(config, layout, rngs=nnx.Rngs(0))


def batches_of(layout, count):
    rng = np.random.default_rng(0)
    for _ in range(count):
        columns = {name: rng.integers(0, rows, 16) for name, rows in ROWS.items()}
        columns |= {"x": rng.random(16, np.float32), "y": rng.random(16, np.float32)}
        yield jrec.data.pack_batch(layout, {**columns, "label": rng.random(16) < 0.5}, dense=["x", "y"])


def tables_of(model):
    """Rows, or cores, by table."""
    found = {table: [np.asarray(core) for core in stack.arrays()] for table, stack in model.embeddings.tt.items()}
    for name, array in model.embeddings.arrays().items():
        stack = model.embeddings.layout.stacks[name]
        for table, base in zip(stack.tables, stack.bases, strict=True):
            found[table.name] = [np.asarray(array)[base : base + table.rows]]
    return found


def stepped(groups, steps=1, **optimizer):
    """Tables after steps, and the optimizer."""
    layout = layout_of(groups)
    model = model_of(layout)
    sparse = SparseOptimizer(model, dense=optax.sgd(0.1), **optimizer)
    step = nnx.jit(train_step)
    for batch in batches_of(layout, steps):
        step(model, sparse, batch)
    return tables_of(model), sparse


def same(one, other):
    return all(np.array_equal(x, y) for x, y in zip(one, other, strict=True))


def test_tables_of_another_group_are_in_a_stack_of_their_own():
    layout = layout_of({"b": "slow", "c": "slow"})
    assert {name: [t.name for t in stack.tables] for name, stack in layout.stacks.items()} == {
        "d8_float32": ["a"], "d8_float32@slow": ["b", "c"], "tt_t": ["t"]
    }  # fmt: skip
    assert layout.order == tuple(ROWS)
    assert PlanTable(name="b", rows=20, dim=8, group="slow").stack == "d8_float32@slow"


def test_groups_change_no_bits():
    whole, _ = stepped({}, 3, embedding=ADAM)
    apart, _ = stepped({"a": "x", "c": "y"}, 3, embedding=ADAM)
    assert all(same(whole[name], apart[name]) for name in whole)


def test_every_table_takes_the_step_of_its_own_optimizer():
    """The first step of a model whose tables differ is, table by table, that of models whose tables are alike."""
    initial = tables_of(model_of(layout_of({})))
    mixed, sparse = stepped({"b": "b", "c": "c"}, embedding=ADAM, tables={"b": SGD, "c": None, "t": SGD})
    by_adam, _ = stepped({}, embedding=ADAM)
    by_sgd, _ = stepped({}, embedding=SGD)
    assert same(mixed["a"], by_adam["a"])
    assert not same(mixed["a"], by_sgd["a"])
    assert same(mixed["b"], by_sgd["b"])
    assert same(mixed["tt_t"], by_sgd["tt_t"])
    assert same(mixed["c"], initial["c"])
    assert not same(by_sgd["c"], initial["c"])
    slots = {name: sorted(of) for name, of in sparse.slots.items()}
    assert slots == {"d8_float32": ["mu", "nu"], "d8_float32@b": [], "d8_float32@c": [], "tt_t": []}
    assert sparse.of("d8_float32") is ADAM
    assert sparse.of("d8_float32@c") is None
    assert sparse.cores_of("tt_t") is SGD


def test_cores_have_an_optimizer_by_table():
    one, _ = stepped({}, embedding=ADAM, cores=SGD)
    named, _ = stepped({}, embedding=ADAM, cores={"t": SGD})
    own, _ = stepped({}, embedding=ADAM, cores=ADAM, tables={"t": SGD})
    frozen, sparse = stepped({}, embedding=ADAM, cores=SGD, tables={"t": None})
    assert same(one["tt_t"], named["tt_t"])
    assert same(one["tt_t"], own["tt_t"])
    assert same(frozen["tt_t"], tables_of(model_of(layout_of({})))["tt_t"])
    assert not same(frozen["tt_t"], one["tt_t"])
    assert sparse.cores_of("tt_t") is None


def test_every_table_follows_its_own_schedule():
    """With one schedule at 0 from the second step on, only the others move then."""
    ends = ops.SGD(learning_rate=optax.piecewise_constant_schedule(0.5, {1: 0.0}))
    groups = {"b": "b"}
    first, _ = stepped(groups, 1, embedding=SGD, tables={"b": ends})
    third, _ = stepped(groups, 3, embedding=SGD, tables={"b": ends})
    assert same(first["b"], third["b"])
    assert not same(first["a"], third["a"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tables": {"z": None}}, "tables name z, but there are only a, b, c, t"),
        ({"cores": {"a": SGD}}, "cores name a, but there are only t"),
        ({"tables": {"b": SGD}}, "tables 'a' and 'b' are in one stack, d8_float32, .* TableConfig.group of their own"),
        ({"tables": {"c": None}}, "tables 'a' and 'c' are in one stack"),
    ],
)
def test_what_stacks_cannot_do_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        stepped({}, 0, embedding=ADAM, **options)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"embedding": optax.adagrad(0.1)}, "embedding"),
        ({"embedding": ops.SGD}, "embedding"),
        ({"tables": {"b": optax.adagrad(0.1)}}, r"tables\['b'\]"),
        ({"cores": optax.sgd(0.1)}, "cores"),
        ({"cores": {"t": optax.sgd(0.1)}}, r"cores\['t'\]"),
    ],
)
def test_optimizers_of_optax_train_no_rows_and_row_optimizers_nothing_else(options, name):
    model = model_of(layout_of({}))
    with pytest.raises(TypeError, match=rf"^{name} is .*, but rows and cores are trained by .* jrec\.ops"):
        SparseOptimizer(model, **{"dense": optax.sgd(0.1), "embedding": ADAM, **options})
    with pytest.raises(TypeError, match=r"^dense is .*SGD.*, but dense parameters are trained by .* optax"):
        SparseOptimizer(model, dense=SGD, embedding=ADAM)


@pytest.mark.parametrize("implementation", ["xla", "native"])
def test_gradients_are_applied_by_an_optimizer_a_table(implementation):
    rng = np.random.default_rng(1)
    tables = {name: jnp.asarray(rng.normal(size=(9, 4)), jnp.float32) for name in "abc"}
    own = {"a": ADAM, "b": SGD, "c": None}
    slots = ops.init_slots(own.get, tables)
    bags = {name: jrec.Bags(ids=jnp.asarray(rng.integers(0, 9, (6, 2)), jnp.int32)) for name in tables}
    activations, residuals = ops.lookup(tables, bags)
    args = residuals, jax.tree.map(jnp.ones_like, activations)
    new, new_slots = ops.apply_gradients(own.get, tables, slots, *args, step=4, implementation=implementation)
    assert new["c"] is tables["c"]
    assert new_slots["c"] == {}
    for name in "ab":
        one = [{name: of[name]} for of in (tables, slots, *args)]
        want, want_slots = ops.apply_gradients(own[name], *one, step=4, implementation=implementation)
        np.testing.assert_array_equal(new[name], want[name])
        assert new_slots[name].keys() == want_slots[name].keys()
        for slot, values in want_slots[name].items():
            np.testing.assert_array_equal(new_slots[name][slot], values)
    nothing, none = ops.apply_gradients(lambda _: None, tables, {name: {} for name in tables}, *args)
    assert all(nothing[name] is tables[name] for name in tables)
    assert none == {name: {} for name in tables}


def embedding_config(tables, **values):
    return EmbeddingOptimizerConfig(
        tables={name: TableOptimizerConfig(**own) for name, own in tables.items()}, **values
    )


def test_a_table_inherits_what_it_does_not_set():
    config = embedding_config(
        {
            "rate": {"learning_rate": 0.5},
            "other": {"name": "adam", "b1": 0.5},
            "same": {"name": "adagrad", "eps": 0.25},
            "frozen": {"frozen": True},
            "nothing": {},
        },
        name="adagrad", learning_rate=0.1, weight_decay=0.2, max_row_norm=3.0, initial_accumulator=0.5,
    )  # fmt: skip
    base = {"learning_rate": 0.1, "weight_decay": 0.2, "max_row_norm": 3.0}
    assert config.of("rate").hyperparameters() == {
        **base, "learning_rate": 0.5, "initial_accumulator": 0.5, "eps": 1e-14
    }  # fmt: skip
    assert config.of("other").hyperparameters() == {**base, "b1": 0.5, "b2": 0.999, "eps": 1e-8}
    assert config.of("same").hyperparameters() == {**base, "initial_accumulator": 0.5, "eps": 0.25}
    assert config.of("frozen") is None
    assert config.of("nothing").hyperparameters() == config.of("unnamed").hyperparameters() == config.hyperparameters()
    assert config.slots("other") == ops.Adam.slots
    assert config.slots("frozen") == {}
    assert config.slots("unnamed") == ops.Adagrad.slots


def test_tables_that_are_trained_alike_are_one_group():
    schedule = {"kind": "warmup_linear", "decay_steps": 5}
    own = {"d": {"frozen": True}, "c": {"frozen": True}, "b": {"learning_rate": 0.5}, "a": {"learning_rate": 0.01}}
    config = TrainConfig.from_dict(
        {**DATA, "optimizer": {"embedding": {"tables": {**own, "s": {"lr_schedule": schedule}}}}}
    ).optimizer.embedding
    groups = {name: config.group(name) for name in ("a", "b", "c", "d", "s", "unnamed")}
    assert groups == {"a": "", "b": "b", "c": "c", "d": "c", "s": "s", "unnamed": ""}


def test_a_configuration_with_tables_reads_back_equal():
    own = {"C 1": {"name": "adam", "lr_schedule": {"warmup_steps": 3}}, "C2": {"frozen": True}}
    config = TrainConfig.from_dict({**DATA, "optimizer": {"embedding": {"tables": own}}})
    assert TrainConfig.from_dict(tomllib.loads(config.to_toml())) == config
    assert config.flatten()['optimizer.embedding.tables."C 1".b2'] == 0.999


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "quickstart"
    synthesize(shape_like("quickstart"), folder, SynthOptions(rows=3000, seed=1))
    return folder


CONFIG = """
seed = 3
[data]
batch_size = 256
[model]
embedding_dim = 8
bottom_mlp = [8]
top_mlp = [8, 1]
[optimizer.embedding]
learning_rate = 0.05
[checkpoint]
every_steps = 3
[log]
tensorboard = false
progress = "off"
"""
OWN = (
    "optimizer.embedding.tables.C3.frozen=true",
    "optimizer.embedding.tables.C5.name=adam",
    "optimizer.embedding.tables.C7.learning_rate=0.2",
    "optimizer.embedding.tables.C7.lr_schedule={kind='warmup_linear', decay_steps=20}",
    "optimizer.embedding.tables.C9.learning_rate=0.05",
    "optimizer.embedding.tables.C10.learning_rate=0.01",
    "tables.overrides.C10.tier=tt",
    "tables.overrides.C10.rank=4",
)


@pytest.fixture
def configure(tmp_path, dataset):
    path = tmp_path / "tiny.toml"
    path.write_text(CONFIG)

    def load(*overrides, out="run"):
        return load_config(path, [f"data.path={str(dataset)!r}", f"out={str(tmp_path / out)!r}", *overrides])

    return load


def test_a_run_trains_every_table_by_its_own_and_resumes_to_the_same_bits(configure):
    whole = train(configure(*OWN, "max_steps=8"))
    train(configure(*OWN, "max_steps=5", out="stopped"))
    resumed = train(configure(*OWN, "max_steps=8", out="stopped"), resume=True)
    (_, one, _), (_, other, _) = final_arrays(whole.folder), final_arrays(resumed.folder)
    assert one.keys() == other.keys()
    assert [name for name in one if one[name] != other[name]] == []
    scores = evaluate_checkpoint(whole.folder, None, split="valid").scores
    np.testing.assert_array_equal(scores.logits, whole.scores["valid"].logits)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("C99.frozen=true", ["optimizer.embedding.tables.C99", "no table of that name", "C1"]),
        ("C1.momentum=0.5", ["optimizer.embedding.tables.C1.momentum is 0.5", "'rowwise_adagrad'", "takes"]),
        ("C1.name=lion", ["optimizer.embedding.tables.C1.name must be one of", "'lion'"]),
        ("C1={frozen=true, learning_rate=1}", ["tables.C1.learning_rate is set", "frozen is true"]),
        ("C1.rate=1", ["unknown key optimizer.embedding.tables.C1.rate"]),
        (
            "C1.lr_schedule={kind='warmup_linear', warmup_steps=50}",
            ["optimizer.embedding.tables.C1.lr_schedule.kind is 'warmup_linear'", "step 50 of a run of 8 steps"],
        ),
    ],
)
def test_mistakes_are_named(configure, override, words):
    with pytest.raises(ConfigError) as caught:
        train(configure(f"optimizer.embedding.tables.{override}", "max_steps=8"))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_rows_elsewhere_take_the_steps_of_rows_on_the_device(configure):
    here = final_arrays(train(configure(*OWN, "max_steps=3", out="here")).folder)[1]
    for place in ("tables.tier=host", "mesh.devices=2"):
        there = final_arrays(train(configure(*OWN, place, "max_steps=3", out=place)).folder)[1]
        assert {name for name in here if "/" in name} == {name for name in there if "/" in name}
        assert here["C3/values"] == there["C3/values"]
        for name in ("C5/values", "C5/mu", "C7/values", "C7/sum", "C1/values"):
            one, other = (np.frombuffer(of[name], np.float32) for of in (here, there))
            if place == "tables.tier=host":
                np.testing.assert_array_equal(one, other, err_msg=name)
            np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5, err_msg=f"{place} {name}")


def test_the_same_rate_said_again_changes_nothing(configure):
    said = configure(*(f"optimizer.embedding.tables.C{n}.learning_rate=0.05" for n in (1, 2)), "max_steps=4")
    one, other = (train(config).folder for config in (said, configure("max_steps=4", out="plain")))
    assert final_arrays(one)[1] == final_arrays(other)[1]
    assert dataclasses.replace(said.optimizer.embedding, tables={}) == configure().optimizer.embedding
