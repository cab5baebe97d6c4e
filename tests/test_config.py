"""Typed configuration: what a TOML file and overrides may say, and what each mistake is answered with."""

import dataclasses
import pathlib
import re
import tomllib

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given

from jrec import ops
from jrec.app import config as configs
from jrec.app.config import TrainConfig, differences, load_config, save_config
from jrec.app.config.synonyms import SYNONYMS
from jrec.app.config.typed_toml import describe, keys, toml_value
from jrec.errors import ConfigError, value_errors_are_config_errors
from jrec.row_optimizers import ROW_OPTIMIZERS, Exact

SHIPPED = sorted((pathlib.Path(__file__).parents[1] / "configs").glob("*.toml"))

FULL = """
name = "trial"
seed = 7
epochs = 2
max_steps = 100
out = "elsewhere"

[data]
path = "d"
batch_size = 128

[model]
embedding_dim = 8
bottom_mlp = [32, 8]
top_mlp = [16, 1]

[model.features."C 1"]
pooling = "max"

[optimizer]
name = "adam"
learning_rate = 1
b1 = 0.5

[optimizer.embedding]
name = "sgd"

[lr_schedule]
kind = "warmup_cosine"
warmup_steps = 10
"""


@pytest.fixture
def full(tmp_path):
    path = tmp_path / "full.toml"
    path.write_text(FULL)
    return path


def error_of(path, *overrides):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


@pytest.mark.parametrize("name", ["criteo-kaggle", "criteo_kaggle"])
def test_a_configuration_that_comes_with_jrec_is_found_by_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config(name, ["data.path=d"])
    assert config == load_config(next(path for path in SHIPPED if path.stem == "criteo_kaggle"), ["data.path=d"])
    assert (config.name, config.out) == ("criteo_kaggle", "runs/criteo_kaggle")
    assert sorted(configs.shipped_configs().values()) == SHIPPED
    (tmp_path / name).write_text("[data]\npath = 'own'\n")  # a file of this name goes first
    assert load_config(name).data.path == "own"


def test_an_unknown_name_is_answered_with_the_nearest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "none of this name comes with jrec; did you mean 'criteo-kaggle'? jrec has avazu," in error_of(
        "critio-kagle"
    )
    assert "there is no such configuration file" in error_of("critio-kagle.toml")


def test_auto_is_a_default_that_can_be_written(full):
    assert load_config(full).evaluate.every_steps is None
    assert load_config(full, ["evaluate.every_steps=auto"]) == load_config(full)
    assert "every_steps" not in load_config(full).to_dict()["evaluate"]
    assert load_config(full, ["evaluate.every_steps=0"]).evaluate.every_steps == 0
    message = error_of(full, "evaluate.every_steps=often")
    assert "evaluate.every_steps must be an integer at least 0 or \"auto\", but is 'often'" in message
    assert 'evaluate.every_steps = "auto"' in configs.key_help()


def test_file_and_defaults(full):
    config = load_config(full)
    assert (config.name, config.seed, config.epochs, config.max_steps, config.out) == ("trial", 7, 2, 100, "elsewhere")
    assert config.data.batch_size == 128
    assert config.data.on_bad_id == "raise"
    assert config.model.bottom_mlp == (32, 8)
    assert config.model.features["C 1"].pooling == "max"
    assert config.optimizer.learning_rate == 1.0
    assert isinstance(config.optimizer.learning_rate, float)
    assert config.optimizer.hyperparameters() == {
        "learning_rate": 1.0, "weight_decay": 0.0, "b1": 0.5, "b2": 0.999, "eps": 1e-8
    }  # fmt: skip
    assert config.optimizer.momentum is None


def test_a_short_file_is_enough(tmp_path):
    path = tmp_path / "tiny run.toml"
    path.write_text('data.path = "d"')
    config = load_config(path)
    assert config.name == "tiny_run"
    assert config.out == "runs/tiny_run"
    assert load_config(path, ["name=other"]).out == "runs/other"


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("data.batch_size=4096", "data.batch_size", 4096),
        ("seed=3", "seed", 3),
        ("data.path=some/folder", "data.path", "some/folder"),
        ("data.path=/a=b, c", "data.path", "/a=b, c"),
        ("data.path='quoted'", "data.path", "quoted"),
        ("data.path=2024-01-01", "data.path", "2024-01-01"),
        ("data.path=12", "data.path", "12"),
        ("data.path=true", "data.path", "true"),
        ('data.path=C:\\x"y', "data.path", 'C:\\x"y'),
        ("name=007", "name", "007"),
        ("log.tensorboard=false", "log.tensorboard", False),
        ("model.top_mlp=[8, 4, 1]", "model.top_mlp", [8, 4, 1]),
        ("optimizer.learning_rate=2", "optimizer.learning_rate", 2.0),
        ("optimizer.learning_rate=1e-3", "optimizer.learning_rate", 0.001),
        ("optimizer.embedding.name=adam", "optimizer.embedding.name", "adam"),
        ('optimizer.embedding={name="adagrad", eps=0.5}', "optimizer.embedding.eps", 0.5),
        ("model.features.C2.pooling=mean", "model.features.C2.pooling", "mean"),
        ('model.features."C 1".pooling=mean', 'model.features."C 1".pooling', "mean"),
        (" data.workers = 2 ", "data.workers", 2),
    ],
)
def test_overrides(full, override, key, value):
    assert load_config(full, [override]).flatten()[key] == value


def test_the_last_override_wins_and_tables_merge(full):
    config = load_config(full, ["seed=1", "seed=2", 'data={path="x"}'])
    assert config.seed == 2
    assert (config.data.path, config.data.batch_size) == ("x", 128)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.batchsize=4", ["override 'data.batchsize=4'", "data.batchsize", "nearest valid key is data.batch_size"]),
        ("batch_size=4", ["unknown key batch_size", "nearest valid key is data.batch_size"]),
        ("data.embedding_dim=4", ["nearest valid key is model.embedding_dim"]),
        ("modle.embedding_dim=4", ["unknown key modle", "nearest valid key is model"]),
        ("zzz=1", ["unknown key zzz", "nearest valid key is "]),
        ("lr=1", ["unknown key lr", "nearest valid key is optimizer.learning_rate."]),
        ("optimizer.embedding.lr=1", ["nearest valid key is optimizer.embedding.learning_rate."]),
        ("optimizer.wd=1", ["nearest valid key is optimizer.weight_decay."]),
        ("BS=64", ["unknown key BS", "nearest valid key is data.batch_size."]),
        ("model.dim=64", ["nearest valid key is model.embedding_dim."]),
        ("batch-size=64", ["nearest valid key is data.batch_size."]),
        ("data=data/shop", ["data must be a table, but is 'data/shop', a TOML string; did you mean data.path?"]),
        ("optimizer=adam", ["did you mean optimizer.name?"]),
        ("model=din", ["did you mean model.kind?"]),
        (
            "model.features.C1.poling=max",
            ["model.features.C1.poling", "nearest valid key is model.features.C1.pooling"],
        ),
        ("optimizer.embedding.learning_rat=1", ["is optimizer.embedding.learning_rate"]),
        ("data.batch_size=big", ["data.batch_size must be an integer at least 1", "'big'", "a TOML string"]),
        ("data.micro_batches=3", ["data.batch_size is 128", "data.micro_batches = 3 do not divide"]),
        ("model.dropout=1.0", ["model.dropout", "below 1"]),
        ("data.batch_size=1.5", ["must be an integer", "1.5", "a TOML float"]),
        ("data.batch_size=true", ["must be an integer", "True", "a TOML boolean"]),
        ("data.batch_size=[1]", ["must be an integer", "a TOML array"]),
        ("data.batch_size=0", ["data.batch_size is 0", "at least 1"]),
        ("data.batch_size=4611686018427387904", ["data.batch_size is 4611686018427387904", "at most 16777216"]),
        ("epochs=4294967296", ["epochs is 4294967296", "at most 2147483647"]),
        ("seed=" + "[" * 5000, ["seed must be an integer", "a TOML string"]),
        (".".join("a" * 5000) + "=1", ["is not a dotted TOML key"]),
        ("data.batch_size.x=0", ["override 'data.batch_size.x=0'", "data.batch_size is 128 in the file, not a table"]),
        ("data=3", ["override 'data=3'", "data must be a table", "but is 3"]),
        ("model.bottom_mlp=512", ["model.bottom_mlp must be an array, each element an integer", "512"]),
        ("model.bottom_mlp=[512, 0, 8]", ["model.bottom_mlp is 0", "at least 1"]),
        ('model.bottom_mlp=[512, "8"]', ["model.bottom_mlp must be an integer", "'8'"]),
        ("model.bottom_mlp=[512, 256]", ["full.toml", "[512, 256]", "model.embedding_dim = 8"]),
        ("model.top_mlp=[512, 2]", ["model.top_mlp", "[512, 2]", "must be 1"]),
        ("model.top_mlp=[]", ["model.top_mlp is []"]),
        ("model.interaction=dott", ['"dot", "concat"', "'dott'", 'did you mean "dot"?']),
        ("model.kind=gru", ['model.kind must be one of "', '"dlrm", "hstu"', "'gru'"]),
        ("tables.tier=hots", ['tables.tier must be one of "sharded"', "'hots'", 'mean "host"']),
        ("log.tensorboard=yes", ["log.tensorboard must be true or false", "'yes'"]),
        ("optimizer.learning_rate=-1", ["optimizer.learning_rate is -1.0", "at least 0"]),
        ("optimizer.learning_rate=nan", ["optimizer.learning_rate must be a number", "nan"]),
        ("optimizer.learning_rate=inf", ["optimizer.learning_rate must be a number", "inf"]),
        ("optimizer.b1=1.0", ["optimizer.b1 is 1.0", "below 1"]),
        ("optimizer.momentum=0.5", ["optimizer.momentum is 0.5", "'adam'", "takes learning_rate, weight_decay, b1"]),
        ("optimizer.name=sgd", ["optimizer.b1 is 0.5", "'sgd'"]),
        ("optimizer.name=rowwise_adagrad", ["optimizer.name must be one of"]),
        ("optimizer.embedding.eps=0", ["optimizer.embedding.eps is 0.0", "above 0"]),
        ("lr_schedule.decay_start=5", ["lr_schedule.decay_start is 5", "lr_schedule.warmup_steps = 10"]),
        ("schedule.kind=constant", ["override 'schedule.kind=constant'", "[schedule] is called [lr_schedule]"]),
        ("schedule=fea", ['schedule must be one of "plain", "fae"', 'did you mean "fae"?']),
        ("fae.least_rate=60", ["fae.initial_rate is 50", "fae.least_rate = 60"]),
        ("evaluate.splits=[]", ["evaluate.every_steps is 5", "evaluate.splits is empty"]),
        ("evaluate.splits=test", ["evaluate.splits must be an array", "'test'"]),
        ('evaluate.final_splits=["test","test"]', ["evaluate.final_splits", "once"]),
        ("name=a/b", ["name is 'a/b'"]),
        ("data.path=", ["data.path is empty"]),
        ("data.path='a\nb'\nseed=3", ["data.path must"]),
        ("seed=-1", ["seed is -1"]),
        ("seed=4294967296", ["seed is 4294967296", "at most 4294967295"]),
        ("nonsense", ["'nonsense'", "section.key=value"]),
        ("=3", ["section.key=value"]),
        ("data..path=3", ["'data..path'", "dotted"]),
        ("a b=3", ["'a b'", "dotted"]),
    ],
)
def test_bad_overrides(full, override, words):
    message = error_of(full, "evaluate.every_steps=5", override) if "data.path='" not in override else ""
    if not message:  # a line break cannot smuggle in a second key: the whole text is the value
        assert load_config(full, [override]).data.path == "'a\nb'\nseed=3"
        return
    for word in words:
        assert word in message
    assert "\n" not in message


def test_mistakes_in_the_file_name_the_file(tmp_path):
    path = tmp_path / "bad.toml"
    cases = {
        '[data]\npath = "d"\nworkrs = 1': ["bad.toml", "unknown key data.workrs", "nearest valid key is data.workers"],
        '[data]\npath = "d"\nworkers = "two"': [
            "bad.toml",
            "data.workers must be an integer at least 0 and at most 1024 or \"auto\", but is 'two'",
        ],
        "seed = 1": ["bad.toml", "data.path is missing", "a string", "data.path=VALUE"],
        "[data]\nworkers = 1": ["bad.toml", "data.path is missing"],
        "seed = \nname = 1": ["bad.toml", "not valid TOML", "line 1"],
        "seed = " + "[" * 5000: ["bad.toml", "not valid TOML", "recursion"],
        "seed = " + "1" * 5000: ["bad.toml", "not valid TOML", "digits"],
        '[model.features.C1]\n[data]\npath="d"': ["model.features.C1.pooling is missing"],
    }
    for text, words in cases.items():
        path.write_text(text)
        message = error_of(path)
        assert all(word in message for word in words), message
    path.write_bytes(b'name = "\xff"')
    assert "not UTF-8" in error_of(path)


def test_an_absent_file_names_its_neighbour(full):
    assert "did you mean" in error_of(full.with_name("ful.toml"))
    assert str(full) in error_of(full.with_name("full"))
    assert "no such configuration" in error_of(full.parent / "nowhere" / "x.toml")


def test_values_made_in_python_are_checked_too():
    with pytest.raises(ConfigError, match=r"DataConfig.batch_size is 0"):
        configs.DataConfig(path="d", batch_size=0)
    with pytest.raises(ConfigError, match=r"ModelConfig.interaction must be one of"):
        configs.ModelConfig(interaction="sum")  # pyright: ignore[reportArgumentType]
    assert configs.ModelConfig(top_mlp=[4, 1]).top_mlp == (4, 1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(dataclasses.FrozenInstanceError):
        configs.DataConfig(path="d").path = "e"  # pyright: ignore[reportAttributeAccessIssue]


def test_values_of_numpy_and_paths_are_written_as_what_they_are():
    values = {"int": np.int64(3), "float": np.float64(0.5), "bool": np.bool_(1), "path": pathlib.Path("a/b")}
    values |= {"array": np.array([1, 2]), "list": [np.float32(0.25), "x"]}
    assert tomllib.loads("\n".join(f"{key} = {toml_value(value)}" for key, value in values.items())) == {
        "int": 3, "float": 0.5, "bool": True, "path": "a/b", "array": [1, 2], "list": [0.25, "x"],
    }  # fmt: skip


def test_a_number_of_too_many_digits_is_refused(full):
    with pytest.raises(ConfigError, match="learning_rate must be a number"):
        load_config(full, [f"optimizer.learning_rate={10**400}"])


def test_saved_configuration_reads_back_equal(full, tmp_path):
    config = load_config(full)
    save_config(config, tmp_path / "config.toml")
    assert load_config(tmp_path / "config.toml") == config
    assert not list(tmp_path.glob("*.partial"))
    assert TrainConfig.from_dict(config.to_dict()) == config


text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)


@given(
    path=text,
    features=st.dictionaries(text, st.sampled_from(["sum", "mean", "sqrtn", "max", "none"]), max_size=3),
    rate=st.floats(0, 1e30, allow_nan=False),
    top=st.lists(st.integers(1, 65536), max_size=4),
    seed=st.integers(0, 2**32 - 1),
    name=st.sampled_from(sorted(ROW_OPTIMIZERS)),
)
def test_round_trip_of_anything(path, features, rate, top, seed, name):
    config = TrainConfig(
        data=configs.DataConfig(path=path),
        seed=seed,
        model=configs.ModelConfig(
            top_mlp=(*top, 1), features={k: configs.FeatureOverride(pooling=v) for k, v in features.items()}
        ),
        optimizer=configs.OptimizerConfig(
            learning_rate=rate, embedding=configs.EmbeddingOptimizerConfig(name=name, learning_rate=rate)
        ),
    )
    assert TrainConfig.from_dict(tomllib.loads(config.to_toml())) == config


def test_differences(full):
    old, new = (
        load_config(full),
        load_config(full, ["model.embedding_dim=16", "model.bottom_mlp=[16]", "optimizer.b1=0"]),
    )
    assert differences(old, new) == {
        "model.embedding_dim": (8, 16),
        "model.bottom_mlp": ([32, 8], [16]),
        "optimizer.b1": (0.5, 0.0),
    }
    assert differences(old, old) == {}


def test_describe_lists_every_key_with_its_default():
    rows = {key: (kind, default) for key, kind, default in describe(TrainConfig)}
    assert list(rows) == list(keys(TrainConfig))
    assert rows["data.batch_size"] == ("an integer at least 1 and at most 16777216", "2048")
    assert rows["epochs"] == ("an integer at least 1", "1")
    assert rows["data.path"] == ("a string", "")
    assert rows["model.bottom_mlp"][1] == "[64, 16]"
    assert len(configs.key_help().splitlines()) == len(rows)
    assert rows["model.features.NAME.pooling"][0] == 'one of "sum", "mean", "sqrtn", "max", "none"'


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_shipped_configurations_load_and_say_where_they_are_from(path):
    config = load_config(path)
    assert config.name == path.stem
    assert path.read_text().startswith("#")
    config.lr_schedule.build(total_steps=10**6)
    assert TrainConfig.from_dict(tomllib.loads(config.to_toml())) == config


def test_papers_architectures():
    shipped = {p.stem: load_config(p).model for p in SHIPPED}
    expected = {  # Tensor Casting, Table II; FAE, Table I (the input width is the data's); OPER, Table 1
        "rm1": (64, (256, 128, 64), (256, 64, 1)),
        "rm2": (64, (256, 128, 64), (512, 128, 1)),
        "rm3": (64, (2560, 512, 64), (512, 128, 1)),
        "rm4": (64, (2560, 1024, 64), (2048, 2048, 1024, 1)),
        "criteo_kaggle": (16, (512, 256, 64, 16), (512, 256, 1)),
        "criteo_terabyte": (64, (512, 256, 64), (512, 512, 256, 1)),
        "avazu": (16, (512, 256, 64, 16), (512, 256, 1)),
        "tbsm_taobao": (16, (16,), (60, 1)),
    }
    for name, architecture in expected.items():
        model = shipped[name]
        assert (model.embedding_dim, model.bottom_mlp, model.top_mlp) == architecture
    assert shipped["tbsm_taobao"].to_dict()["tbsm"]["tower_mlp"] == [15, 15]
    assert {"quickstart", "movielens", "taobao", "tbsm_taobao_sample"} <= set(shipped)


@pytest.mark.parametrize("name", ROW_OPTIMIZERS)
def test_a_configuration_has_every_hyperparameter_of_the_row_optimizer_and_its_defaults(name):
    kind = ROW_OPTIMIZERS[name]
    decay = 0.0 if issubclass(kind, Exact) and kind.takes_schedule else 0.1
    config = configs.EmbeddingOptimizerConfig(name=name, learning_rate=0.5, weight_decay=decay, max_row_norm=2.0)
    if kind.takes_schedule:
        optimizer = config.build(lambda step: step + 1)
        assert optimizer.learning_rate(3) == 2.0
    else:
        with pytest.raises(ConfigError, match=f"name is '{name}', which takes no schedule of learning rates"):
            config.build(configs.LRScheduleConfig(warmup_steps=2).build(10))
        optimizer = config.build(configs.LRScheduleConfig().build(10))
        assert optimizer.learning_rate == 0.5
    assert optimizer == kind(learning_rate=optimizer.learning_rate, weight_decay=decay, max_row_norm=2.0)


def test_exact_optimizers_refuse_a_decay_of_touched_rows_only():
    with pytest.raises(ConfigError, match=r"optimizer.embedding: weight_decay of ExactAdam is 0.1.*ExactAdamW"):
        configs.EmbeddingOptimizerConfig(name="exact_adam", weight_decay=0.1)


def test_the_defaults_that_configured_runs_have_always_had():
    own = {
        name: {field.name: field.default for field in kind.hyperparameters()} for name, kind in ROW_OPTIMIZERS.items()
    }
    assert own == {
        "sgd": {},
        "momentum": {"momentum": 0.9, "nesterov": False},
        "adagrad": {"initial_accumulator": 0.0, "eps": 1e-14},
        "rowwise_adagrad": {"initial_accumulator": 0.0, "eps": 1e-14},
        "rmsprop": {"decay": 0.9, "eps": 1e-14},
        "adam": {"b1": 0.9, "b2": 0.999, "eps": 1e-8},
        "rowwise_rmsprop": {"decay": 0.9, "eps": 1e-14},
        "rowwise_adam": {"b1": 0.9, "b2": 0.999, "eps": 1e-8},
        "exact_momentum": {"momentum": 0.9, "nesterov": False},
        "exact_rmsprop": {"decay": 0.9, "eps": 1e-14},
        "exact_adam": {"b1": 0.9, "b2": 0.999, "eps": 1e-8},
        "exact_adamw": {"b1": 0.9, "b2": 0.999, "eps": 1e-8},
    }


@pytest.mark.parametrize("name", [n for n, kind in ROW_OPTIMIZERS.items() if kind.optax_name is not None])
def test_dense_optimizer_equals_the_row_optimizer_of_its_name(name):
    factor = configs.LRScheduleConfig(warmup_steps=3).build(10)
    dense = configs.OptimizerConfig(name=name, learning_rate=0.1, weight_decay=0.01)
    optimizer = dense.build(factor)
    values = {**dense.hyperparameters(), "learning_rate": lambda step: 0.1 * factor(step)}
    rows_optimizer = ROW_OPTIMIZERS[name](**values)
    random = np.random.default_rng(0)
    parameters = rows = jnp.asarray(random.normal(size=(5, 4)), jnp.float32)
    state, slots = optimizer.init(parameters), rows_optimizer.init(rows)
    for step in range(4):
        gradients = jnp.asarray(random.normal(size=(5, 4)), jnp.float32)
        updates, state = optimizer.update(gradients, state, parameters)
        parameters = optax.apply_updates(parameters, updates)
        every = jnp.arange(5, dtype=jnp.int32)
        rows, slots = ops.row_update(rows_optimizer, rows, slots, every, gradients, step=step, implementation="xla")
    np.testing.assert_allclose(parameters, rows, rtol=1e-5, atol=1e-6)


def mlperf_factor(step_count, warmup, start, length):
    """The rule of the MLPerf reference implementation, which counts steps from 1."""
    if step_count < warmup:
        return 1 - (warmup - step_count) / warmup
    if start <= step_count < start + length:
        return ((length - (step_count - start)) / length) ** 2
    return None if step_count >= start + length else 1.0


def test_poly_decay_is_mlperfs():
    schedule = configs.LRScheduleConfig(kind="warmup_poly_decay", warmup_steps=10, decay_start=20, decay_steps=30)
    factors = np.asarray(jax.vmap(schedule.build(100))(jnp.arange(100)))
    for step, factor in enumerate(factors):
        expected = mlperf_factor(step + 1, 10, 20, 30)
        assert factor == pytest.approx(0.0 if expected is None else expected, abs=1e-6)


def test_other_schedules():
    total = 110
    steps = np.arange(total)

    def factors(**values):
        return np.asarray(jax.vmap(configs.LRScheduleConfig(**values).build(total))(jnp.arange(total)))

    up = np.minimum((steps + 1) / 10, 1)
    np.testing.assert_allclose(factors(warmup_steps=10), up, atol=1e-6)
    np.testing.assert_array_equal(factors(), np.ones(total))
    progress = np.clip((steps + 1 - 10) / 100, 0, 1)  # no decay_steps: down to the end of training
    linear = up * (0.1 + 0.9 * (1 - progress))
    np.testing.assert_allclose(factors(kind="warmup_linear", warmup_steps=10, end_factor=0.1), linear, atol=1e-6)
    cosine = up * (1 + np.cos(np.pi * progress)) / 2
    np.testing.assert_allclose(factors(kind="warmup_cosine", warmup_steps=10), cosine, atol=1e-6)
    assert configs.LRScheduleConfig(kind="warmup_cosine").build(total)(7).dtype == jnp.float32


def test_a_decay_after_the_end_is_an_error():
    schedule = configs.LRScheduleConfig(kind="warmup_linear", warmup_steps=100)
    with pytest.raises(ConfigError, match=r"step 100 of a run of 100 steps"):
        schedule.build(total_steps=100)


def test_value_errors_of_the_library_become_config_errors_where_asked():
    with pytest.raises(ConfigError, match=r"^the model: 3 is odd$"), value_errors_are_config_errors("the model"):
        raise ValueError("3 is odd")
    with pytest.raises(ConfigError, match=r"^plain$"), value_errors_are_config_errors("the model"):
        raise ConfigError("plain")


def test_older_names_of_tiers_are_read(tmp_path):
    path = tmp_path / "older.toml"
    path.write_text('[data]\npath = "d"\n[tables]\ntier = "device"\n[tables.overrides.C1]\ntier = "device"\n')
    config = load_config(path)
    assert (config.tables.tier, config.tables.overrides["C1"].tier) == ("sharded", "sharded")
    save_config(config, path)
    assert '"device"' not in path.read_text().replace('cast = "device"', "")


def test_other_words_mean_keys_that_there_are():
    known = set(keys(TrainConfig))
    assert set(SYNONYMS.values()) <= known
    assert not {word for word in SYNONYMS if word in known}


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        (
            "data/shop",
            "a dataset: `jrec init data/shop --out shop.toml` writes one for it, which `jrec train shop.toml` trains",
        ),
        ("runs/a b", "a run: `jrec train 'runs/a b/config.toml' --resume` goes on with it"),
        ("empty", "a folder that is neither a dataset nor a run"),
        ("clicks.csv", "a log: `jrec prepare csv --input clicks.csv --out DATASET` makes a dataset"),
    ],
)
def test_what_is_no_configuration_is_named(tmp_path, monkeypatch, path, advice):
    monkeypatch.chdir(tmp_path)
    for file in ("data/shop/schema.json", "runs/a b/config.toml", "empty/x", "clicks.csv"):
        pathlib.Path(file).parent.mkdir(parents=True, exist_ok=True)
        pathlib.Path(file).touch()
    with pytest.raises(ConfigError, match=re.escape(f"{path} is no configuration, but {advice}")):
        load_config(path)
