"""DIN against plain NumPy, by the command from a log to a served score; and a kind of model that is one file."""

import json
import random
import sys

import jax
import numpy as np
import pytest
from flax import nnx
from test_importance_kinds import prepared
from test_serve import ask, running

import jrec
from jrec import cli
from jrec.app.config import ModelConfig, load_config
from jrec.app.models import kind as kinds
from jrec.data.columns import ListColumn
from jrec.data.packing import pack_batch
from jrec.data.schema import DatasetError
from jrec.errors import ConfigError
from jrec.nn import DIN
from jrec.ops.layout import EmbeddingLayout, FeatureConfig

ROWS, DIM, LENGTH = 11, 4, 5
HISTORIES = {"item": "items", "kind": "kinds"}


TWO_HISTORIES = """
[label]
column = "click"
[time]
column = "at"
format = "seconds"
[[categorical]]
column = "user"
[[categorical]]
column = "item"
[[categorical]]
column = "kind"
[[categorical]]
column = "past"
history = {by = "user", of = "item", length = 5}
[[categorical]]
column = "past_kinds"
history = {by = "user", of = "kind", length = 5}
"""


MODEL = """
data.batch_size = 16
[model]
kind = "din"
embedding_dim = 4
bottom_mlp = []
top_mlp = [4, 1]
[model.din]
histories = {item = "past", kind = "past_kinds"}
"""


def layout():
    features = [FeatureConfig(name="user", table="user")]
    for name, history in HISTORIES.items():
        features += [
            FeatureConfig(name=name, table=name),
            FeatureConfig(name=history, table=name, max_length=LENGTH, pooling="none"),
        ]
    tables = [jrec.TableConfig(name=name, rows=ROWS, dim=DIM) for name in ("user", *HISTORIES)]
    return EmbeddingLayout.build(tables, features)


def model(**options):
    made = DIN(
        layout(), histories=HISTORIES, num_dense=2, bottom_mlp=(6,), attention_mlp=(7,), top_mlp=(9, 1),
        rngs=nnx.Rngs(0), **options,
    )  # fmt: skip
    made.eval()
    return made


def batch_of(lists, seed=0):
    rng, count = np.random.default_rng(seed), len(lists)
    offsets = np.cumsum([0, *map(len, lists)])
    columns = {"a": rng.normal(size=count).astype(np.float32), "b": rng.normal(size=count).astype(np.float32)}
    columns |= {name: rng.integers(0, ROWS, count) for name in ("user", *HISTORIES)}
    for name in HISTORIES.values():
        values = np.concatenate([np.array(one, np.int64) for one in lists])
        columns[name] = jrec.data.columns.ListColumn(offsets, ((values * 3 + len(name)) % ROWS).astype(np.uint32))
    return columns, pack_batch(layout(), columns, dense=["a", "b"], label=None)


def dense(layers, x, *, last):
    for number, layer in enumerate(layers):
        x = x @ np.asarray(layer.kernel[...], np.float64) + np.asarray(layer.bias[...], np.float64)
        x = np.maximum(x, 0) if last or number + 1 < len(layers) else x
    return x


def reference(made, columns, lists, *, normalized):
    """Logits in float64, example by example."""
    every = np.arange(ROWS)
    tables = {n: np.asarray(made.embeddings.lookup_feature(n, every), np.float64) for n in ("user", *HISTORIES)}
    logits = []
    for line, own in enumerate(lists):
        target = np.concatenate([tables[name][columns[name][line]] for name in HISTORIES])
        begin = columns["items"].offsets[line]
        interest, weights, steps = np.zeros(2 * DIM), [], []
        for place in range(begin, begin + len(own)):
            step = np.concatenate([tables[n][columns[h].values[place]] for n, h in HISTORIES.items()])
            pair = np.concatenate([step, target, step - target, step * target])
            weights.append(dense(made.attention.mlp.layers, pair, last=False)[0])
            steps.append(step)
        if normalized and weights:
            weights = np.exp(weights) / np.exp(weights).sum()
        for weight, step in zip(weights, steps, strict=True):
            interest += weight * step
        others = [tables["user"][columns["user"][line]], target, interest]
        bottom = dense(made.bottom.layers, np.array([columns["a"][line], columns["b"][line]]), last=True)
        logits.append(dense(made.top.layers, np.concatenate([*others, bottom]), last=False)[0])
    return np.array(logits)


def histories(seed, count=17):
    draw = random.Random(seed)
    return [[], *([draw.randrange(ROWS) for _ in range(draw.randrange(LENGTH + 1))] for _ in range(count))]


@pytest.mark.parametrize("normalized", [False, True])
def test_logits_are_those_of_numpy(normalized):
    made, lists = model(normalized=normalized), histories(1)
    columns, batch = batch_of(lists)
    expected = reference(made, columns, lists, normalized=normalized)
    np.testing.assert_allclose(made(batch), expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("normalized", [False, True])
def test_gradients_are_finite_and_reach_the_weights(normalized):
    made, (_, batch) = model(normalized=normalized), batch_of(histories(2))
    activations, _ = made.embeddings.lookup(batch.bags)

    def loss(module, activations):
        return module.logits(batch.dense, activations, batch.bags, mask=batch.mask).sum()

    of_weights, of_rows = nnx.grad(loss, argnums=(0, 1))(made, activations)
    leaves = jax.tree.leaves((nnx.state(of_weights, nnx.Param), of_rows))
    assert all(np.isfinite(leaf).all() for leaf in leaves)
    assert np.abs(np.asarray(of_weights["attention"]["mlp"]["layers"][0]["kernel"][...])).max() > 0


@pytest.mark.parametrize("section", ["din", "tbsm"])
def test_histories_of_unlike_steps_are_refused(section):
    kind = ModelConfig.from_dict({"kind": section, section: {"histories": HISTORIES}, "bottom_mlp": [16]})
    watch = kind.of_kind.watch(kind)
    items = ListColumn(np.array([0, 0, 2, 5]), np.zeros(5, np.uint32))
    watch(3, {"items": items, "kinds": items})
    # The kind of one line was blank, and is in no history: all kinds after it are those of other items.
    kinds = ListColumn(np.array([0, 0, 2, 4]), np.zeros(4, np.uint32))
    with pytest.raises(
        DatasetError, match=rf"3 and 2 values in example 2 of training block 3.* model.{section}.histories"
    ):
        watch(3, {"items": items, "kinds": kinds})


def test_a_blank_in_one_of_two_histories_ends_the_run_on_a_dataset_of_an_earlier_version(tmp_path, capsys, monkeypatch):
    lines = [f"u{k % 3},i{k % 5},{'' if k == 11 else f'k{k % 2}'},{k},{k % 2}" for k in range(60)]
    (tmp_path / "log.csv").write_text("user,item,kind,at,click\n" + "\n".join(lines) + "\n")
    monkeypatch.setattr("jrec.prepare.readers.delimited._steps", lambda histories: ())
    prepared(tmp_path, TWO_HISTORIES, tmp_path / "log.csv")
    (tmp_path / "run.toml").write_text(MODEL)
    places = [f"data.path={tmp_path / 'data'}", f"out={tmp_path / 'run'}"]
    assert cli.main(["train", str(tmp_path / "run.toml"), *places, "log.progress=off"]) == 2
    said = capsys.readouterr().err
    assert "'past' and 'past_kinds' have" in said
    assert "prepare the log again" in said


def test_histories_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="histories is empty"):
        DIN(layout(), histories={}, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="names feature 'brand', but the features are"):
        DIN(layout(), histories={"brand": "items"}, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="'item' reads table 'item' and its history 'kinds' table 'kind'"):
        DIN(layout(), histories={"item": "kinds"}, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="the history 'item' needs pooling 'none'"):
        DIN(layout(), histories={"items": "item"}, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "model.kind is 'din', but model.din.histories is empty"),
        ({"din": {"histories": {"item": "past"}, "attention_mlp": []}}, "attention_mlp is"),
        ({"wide": True, "interaction": "dcn"}, "model.interaction, model.wide are set, but model.kind is 'din'"),
        ({"kind": "dlrm", "din": {"normalized": True}}, "model.din is set, but model.kind is 'dlrm'; .* 'din'"),
        ({"din": {"histories": {"item": "past"}}, "features": {"past": {"pooling": "sum"}}}, "past is pooled, but"),
        ({"factory": "my:model"}, "model.kind is set, but model.factory is my:model"),
    ],
)
def test_configurations_that_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict({"kind": "din", **change})


SCHEMA = """
[label]
column = "click"
[time]
column = "at"
format = "seconds"
[[dense]]
column = "price"
[[categorical]]
column = "user"
[[categorical]]
column = "item"
[[categorical]]
column = "past"
history = {by = "user", of = "item", length = 4}
"""
CONFIG = """
epochs = 12
[data]
path = "{data}"
batch_size = 128
eval_batch_size = 256
workers = 0
[model]
kind = "din"
embedding_dim = 8
bottom_mlp = [4]
top_mlp = [16, 1]
[model.din]
histories = {{item = "past"}}
attention_mlp = [16]
[optimizer]
name = "adam"
learning_rate = 0.01
[optimizer.embedding]
name = "adam"
learning_rate = 0.02
[evaluate]
baselines = "off"
[log]
tensorboard = false
progress = "off"
"""
ITEMS, USERS = 24, 60


def write_log(path, lines=4000):
    """A user clicks what is of the group of an item that was shown shortly before."""
    draw, seen = random.Random(0), [[] for _ in range(USERS)]
    rows = ["user,item,price,at,click"]
    for at in range(lines):
        user, item = draw.randrange(USERS), draw.randrange(ITEMS)
        alike = any(item % 6 == other % 6 for other in seen[user][-4:])
        click = int(draw.random() < (0.9 if alike else 0.1))
        seen[user].append(item)
        rows.append(f"u{user},i{item},{item % 5},{at},{click}")
    path.write_text("\n".join(rows) + "\n")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("din")
    write_log(folder / "log.csv")
    (folder / "log.toml").write_text(SCHEMA)
    (folder / "run.toml").write_text(CONFIG.format(data=folder / "data"))
    arguments = ["--schema", str(folder / "log.toml"), "--input", str(folder / "log.csv"), "--quiet"]
    assert cli.main(["prepare", "csv", *arguments, "--out", str(folder / "data")]) == 0
    assert cli.main(["train", str(folder / "run.toml"), f"out={folder / 'run'}"]) == 0
    return folder


def test_it_learns_what_a_sum_of_the_history_does_not(trained):
    content = json.loads((trained / "run" / "report" / "metrics.json").read_text())
    din = content["splits"]["test"]["auc"]
    begin, end = (trained / "run.toml").read_text().split("[model.din]")
    (trained / "dlrm.toml").write_text(begin.replace('"din"', '"dlrm"') + end[end.index("[optimizer]") :])
    keys = ["model.interaction=concat", f"out={trained / 'dlrm'}"]
    assert cli.main(["train", str(trained / "dlrm.toml"), *keys]) == 0
    dlrm = json.loads((trained / "dlrm" / "report" / "metrics.json").read_text())["splits"]["test"]["auc"]
    assert din > 0.8
    assert din > dlrm + 0.03


def test_scores_are_the_same_in_python_in_a_file_and_served(trained, tmp_path):
    columns = {"user": ["u1", "u2", "new"], "item": ["i3", "i9", "i4"], "price": [1.0, 2.0, 0.5]}
    columns["past"] = [["i9", "i15"], [], ["i4", "unseen"]]
    expected = jrec.load_run(trained / "run").predict(columns)
    assert cli.main(["export", str(trained / "run"), "--out", str(tmp_path / "export"), "--quiet"]) == 0
    np.testing.assert_allclose(jrec.serving.load(tmp_path / "export")(columns), expected, rtol=1e-6)
    rows = [{name: values[line] for name, values in columns.items()} for line in range(3)]
    with running(tmp_path / "export") as served:
        status, _, body = ask(served.port, content={"rows": rows})
    assert status == 200
    np.testing.assert_allclose(json.loads(body)["scores"], expected, rtol=1e-6)
    out = tmp_path / "scores.csv"
    words = ["predict", str(trained / "run"), str(trained / "data"), "--split", "test", "--out", str(out), "--quiet"]
    assert cli.main(words) == 0
    assert len(out.read_text().splitlines()) == 1 + jrec.data.Schema.load(trained / "data").splits["test"].examples


KIND = '''
"""Logits that are sums of a weight for every id: a kind that is one file."""
import dataclasses
from flax import nnx
import jax.numpy as jnp
from jrec.app.config.typed_toml import Section
from jrec.app.models.clicks import ClickKind
from jrec.nn import EmbeddingCollection

@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightsSection(Section):
    """``[model.weights]``."""
    bias: bool = True

class Weights(nnx.Module):
    def __init__(self, layout, bias, *, rngs, **options):
        self.embeddings = EmbeddingCollection(layout, rngs=rngs, **options)
        self.bias = nnx.Param(jnp.zeros((1,))) if bias else None

    def logits(self, dense, activations, bags):
        vectors = self.embeddings.vectors(activations, bags)
        total = sum(v.sum(axis=(1, 2)) for v in vectors)
        return total if self.bias is None else total + self.bias[0]

class WeightsKind(ClickKind):
    section, section_name, keys = WeightsSection, "weights", ("embedding_dim", "pooling", "table_dtype", "multi_task")

    def network(self, model, schema, layout, embeddings):
        return Weights(layout, self.own(model).bias, **embeddings)

KIND = WeightsKind("weights")
'''


@pytest.fixture
def weights_kind(tmp_path, monkeypatch):
    """The file above among the kinds."""
    (tmp_path / "weights.py").write_text(KIND)
    monkeypatch.setattr(kinds.kinds, "__path__", [*kinds.kinds.__path__, str(tmp_path)])
    for cached in (kinds.names, kinds.kind_named):
        cached.cache_clear()
    yield
    sys.modules.pop("jrec.app.models.kinds.weights", None)
    for cached in (kinds.names, kinds.kind_named):
        cached.cache_clear()


def test_a_new_kind_is_one_file(trained, tmp_path, weights_kind):
    """A file in the folder of kinds is trained, evaluated and served; nothing else names it."""
    text, run = (trained / "run.toml").read_text(), str(tmp_path / "run")
    begin, end = text.split("[model]")[0], text[text.index("[optimizer]") :]
    (tmp_path / "run.toml").write_text(f"{begin}[model]\nkind = 'weights'\n[model.weights]\nbias = false\n{end}")
    assert load_config(tmp_path / "run.toml").to_dict()["model"]["weights"] == {"bias": False}
    assert cli.main(["train", str(tmp_path / "run.toml"), f"out={run}", "epochs=2", "evaluate.every_steps=10"]) == 0
    assert cli.main(["eval", run, str(trained / "data"), "--split", "test"]) == 0
    assert cli.main(["export", run, "--out", str(tmp_path / "export"), "--quiet"]) == 0
    columns = {"user": ["u1"], "item": ["i3"], "price": [1.0], "past": [["i9"]]}
    expected = jrec.load_run(run).predict(columns)
    np.testing.assert_allclose(jrec.serving.load(tmp_path / "export")(columns), expected, rtol=1e-6)
    with pytest.raises(ConfigError, match=r"model.wide is set, but model.kind is 'weights'"):
        load_config(tmp_path / "run.toml", ["model.wide=true"])
    with pytest.raises(ConfigError, match=r"unknown key model.weights.bais; the nearest valid key is .*weights.bias"):
        load_config(tmp_path / "run.toml", ["model.weights.bais=true"])
