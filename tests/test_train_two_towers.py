"""Two towers by the command, from a log to a served request."""

import dataclasses
import json
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prepare_reference import read_dataset, read_vocabulary
from serve_cases import stream
from test_serve import ARROW, ask, running

import jrec
from jrec import cli
from jrec.app.config import load_config
from jrec.app.export import export_run
from jrec.app.models.catalogue import read_catalogue
from jrec.data.columns import ListColumn
from jrec.data.schema import Schema
from jrec.errors import ConfigError
from jrec.serving.checks import faults, load_manifest
from jrec.serving.format import ExportError, save_manifest

SCHEMA = """
[label]
column = "click"

[time]
column = "at"
format = "seconds"

[[dense]]
column = "age"
transform = "standardize"

[[dense]]
column = "price"

[[categorical]]
column = "user"

[[categorical]]
column = "country"
name = "home"

[[categorical]]
column = "item"

[[categorical]]
column = "genres"
separator = "|"
max_length = 3

[[categorical]]
column = "past"
history = {by = "user", of = "item", length = 6}

[[categorical]]
column = "at"
part = "hour"
"""
CONFIG = """
epochs = 8
[data]
path = "{data}"
batch_size = 256
eval_batch_size = 256
workers = 0
[model]
kind = "two_tower"
embedding_dim = 16
pooling = "mean"
[model.two_tower]
user = ["user", "age", "home", "past"]
item = ["item", "genres", "price"]
id = "item"
history = "past"
user_mlp = [32, 16]
item_mlp = [16]
temperature = 0.1
[optimizer]
name = "adam"
learning_rate = 0.003
[optimizer.embedding]
name = "adam"
learning_rate = 0.01
[evaluate]
at = [5, 10]
every_steps = 100
[checkpoint]
keep_best = true
[log]
every_steps = 10
tensorboard = false
progress = "off"
"""
ITEMS, USERS, TASTES = 60, 200, 6


def write_log(path):
    """Users click new items of their taste, and are shown others, which they do not click."""
    draw, lines, seen = random.Random(0), [], [[] for _ in range(USERS)]
    for at in range(6000):
        user = draw.randrange(USERS)
        click = draw.random() < 0.6
        item = None
        while item is None or item in seen[user][-6:]:
            item = min(int(draw.expovariate(0.3)), ITEMS // TASTES - 1) * TASTES + user % TASTES
            item = item if click else draw.randrange(ITEMS)
        seen[user].append(item)
        genres = "|".join(f"g{taste}" for taste in {item % TASTES, item % 4})
        lines.append(
            (f"u{user}", "xyz"[user % 3], 20 + user % 40, f"item {item}", genres, item % 7 + at / 6000, at, int(click))
        )
    names = "user,country,age,item,genres,price,at,click\n"
    path.write_text(names + "".join(",".join(map(str, line)) + "\n" for line in lines))
    return lines


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("towers")
    write_log(folder / "log.csv")
    (folder / "log.toml").write_text(SCHEMA)
    arguments = ["prepare", "csv", "--schema", str(folder / "log.toml"), "--input", str(folder / "log.csv")]
    assert cli.main([*arguments, "--block-size", "512", "--out", str(folder / "data"), "--quiet"]) == 0
    return folder


def train(folder, name, *overrides, data="data"):
    """Trains; returns the report and the records of the log."""
    config = folder / "towers.toml"
    config.write_text(CONFIG.format(data=folder / data))
    out = folder / name
    assert cli.main(["train", str(config), f"out={out}", *overrides]) == 0
    report = json.loads((out / "report" / "metrics.json").read_text())
    return report, [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(prepared):
    return (*train(prepared, "run"), prepared)


@pytest.mark.slow
def test_a_trained_model_beats_popularity(trained, capsys):
    report, records, folder = trained
    test, popular = report["splits"]["test"], report["baselines"]["popularity"]["splits"]["test"]
    assert test["hr@5"] > popular["hr@5"] + 0.15
    assert test["ndcg@10"] > popular["ndcg@10"] + 0.1
    assert report["judgement"]["warnings"] == []
    assert report["ranking"] == {"at": [5, 10], "candidates": ITEMS, "history_left_out": True}
    _, columns = read_dataset(folder / "data")
    schema = Schema.load(folder / "data")
    own = schema.splits["test"].examples
    assert test["examples"] == popular["examples"] == sum(columns["label"][-own:])  # clicks alone
    assert [record["step"] for record in records if record["split"] == "valid"]
    capsys.readouterr()
    (folder / "run" / "catalogue").rename(folder / "kept")  # it is read anew, and is the same
    assert cli.main(["eval", str(folder / "run"), str(folder / "data")]) == 0
    (folder / "kept").rename(folder / "run" / "catalogue")
    assert cli.main(["eval", str(folder / "run"), str(folder / "data")]) == 0
    for line in capsys.readouterr().out.strip().splitlines():
        printed = json.loads(line)
        assert {key: printed[key] for key in test} == test


@pytest.mark.slow
def test_loss_and_recall_are_those_of_one_device_on_two_and_four(prepared):
    steps = ["max_steps=20", "evaluate.every_steps=0", "checkpoint.keep_best=false", "evaluate.baselines=off"]
    found = [train(prepared, f"on-{n}", *steps, f"mesh.devices={n}") for n in (1, 2, 4)]
    losses = [[record["loss"] for record in records if record["split"] == "train"] for _, records in found]
    assert len(losses[0]) == 2
    for (report, _), other in zip(found[1:], losses[1:], strict=True):
        np.testing.assert_allclose(other, losses[0], rtol=1e-5)
        for split, metrics in found[0][0]["splits"].items():
            assert report["splits"][split] == pytest.approx(metrics, abs=1e-5)


@pytest.mark.slow
def test_unknown_users_get_a_trained_row(prepared):
    rows = {}
    for name, rate, steps in (("first", 0, 1), ("plain", 0, 40), ("oov", 0.2, 40)):
        train(prepared, f"rows-{name}", f"data.oov_rate={rate}", f"max_steps={steps}", "evaluate.baselines=off")
        restored = jrec.load_run(prepared / f"rows-{name}").restored
        (oov,) = (table.oov_row for table in restored.schema.tables if table.name == "user")
        rows[name] = restored.run.table("user")[oov]
    np.testing.assert_array_equal(rows["plain"], rows["first"])  # as it was drawn
    assert np.abs(rows["oov"] - rows["first"]).max() > 0.01


@pytest.mark.slow
def test_a_resumed_run_computes_the_same(trained):
    report, records, folder = trained
    train(folder, "resumed", "max_steps=30", "evaluate.every_steps=100")
    again, of_again = train(folder, "resumed", "--resume", "max_steps=0")
    assert again["splits"] == report["splits"]
    losses = [[r["loss"] for r in of if r["split"] == "train"] for of in (records, of_again)]
    assert losses[0] == losses[1]


REQUEST = {"user": ["u7", "nobody"], "age": [27, None], "country": ["y", ""], "past": [["item 3", "item 9"], []]}


@pytest.mark.slow
def test_predictions_are_the_best_items(trained):
    report, _, folder = trained
    run, out = str(folder / "run"), folder / "best.parquet"
    arguments = ["predict", run, str(folder / "data"), "--split", "test", "--k", "10", "--out", str(out), "--quiet"]
    assert cli.main(arguments) == 0
    found = pq.read_table(out).to_pydict()
    _, columns = read_dataset(folder / "data")
    schema = Schema.load(folder / "data")
    count = schema.splits["test"].examples
    values, _ = read_vocabulary(folder / "data", schema.table("item"))
    best = [set(found["item"][10 * k : 10 * (k + 1)]) for k in range(count)]
    pasts = [{values[row] for row in one} for one in columns["past"][-count:]]
    assert not any(ten & past for ten, past in zip(best, pasts, strict=True))
    hits = [values[row] in ten for row, ten in zip(columns["item"][-count:], best, strict=True)]
    assert np.mean(np.array(hits)[np.array(columns["label"][-count:]) > 0]) == pytest.approx(
        report["splits"]["test"]["hr@10"]
    )

    loaded = jrec.load_run(run)
    scores, items = loaded.best(REQUEST, k=3)
    assert not {"item 3", "item 9"} & set(items[0])
    assert all(int(item.split()[1]) % TASTES == 7 % TASTES for item in items[0])
    pq.write_table(pa.table(REQUEST), folder / "users.parquet")
    (folder / "users.csv").write_text('user,age,country,past\nu7,27,y,"[""item 3"", ""item 9""]"\nnobody,,,\n')
    for given in ("users.parquet", "users.csv"):
        assert cli.main(["predict", run, str(folder / given), "--k", "3", "--out", str(folder / "few.parquet"),
                         "--overwrite", "--quiet"]) == 0  # fmt: skip
        few = pq.read_table(folder / "few.parquet").to_pydict()
        assert few["item"] == [*items[0], *items[1]]
        np.testing.assert_allclose(few["score"], np.concatenate(list(scores)), rtol=1e-4)
    with pytest.raises(ConfigError, match="k is 61, but must be between 1 and the 60 items"):
        loaded.best(REQUEST, k=ITEMS + 1)
    with pytest.raises(ConfigError, match="'two_tower', which has no probabilities"):
        loaded.predict(REQUEST)


@pytest.mark.slow
def test_a_trained_model_is_compressed(trained, tmp_path, capsys):
    report, _, folder = trained
    run, small = str(folder / "run"), tmp_path / "small"
    assert cli.main(["compress", run, "--rank", "4", "--tables", "user", "--out", str(small), "--quiet"]) == 0
    assert "NDCG@10 before" in capsys.readouterr().out
    content = json.loads((small / "report" / "compression.json").read_text())
    assert content["before"]["test"] == report["splits"]["test"]
    assert content["tables"]["user"]["compression"] > 1
    assert cli.main(["eval", str(small), str(folder / "data"), "--split", "test", "--json"]) == 0
    scored = json.loads(capsys.readouterr().out)
    assert {key: scored[key] for key in content["after"]["test"]} == content["after"]["test"]


@pytest.mark.slow
def test_an_edit_of_items_says_that_their_vectors_stay(trained, tmp_path):
    """Rows of the items' table are read for histories alone; those of its vectors are ranked."""
    _, _, folder = trained
    export_run(folder / "run", tmp_path / "whole")
    model = jrec.serving.load(tmp_path / "whole", batch_sizes=[2])
    request = {**REQUEST, "past": [[], []]}
    before = model.best(request, k=ITEMS)
    rows = np.ones((1, model.manifest.tables["item"][0].dim), np.float32)
    with pytest.warns(UserWarning, match=r"items are ranked by table 'item\.vectors', whose vectors this delta leaves"):
        jrec.serving.write_delta(tmp_path / "rows", {"item": ([3], rows)}, since=[tmp_path / "whole"])
    model.apply(tmp_path / "rows")
    assert model.best(request, k=ITEMS).items == before.items
    vectors = {"item.vectors": (np.arange(ITEMS), -np.stack(model.item_vectors()["vector"].to_numpy()))}
    jrec.serving.write_delta(tmp_path / "vectors", vectors, since=[tmp_path / "whole", tmp_path / "rows"])
    model.apply(tmp_path / "vectors")
    assert model.best(request, k=ITEMS).items == [line[::-1] for line in before.items]


@pytest.mark.slow
def test_an_export_serves_the_best_items(trained, tmp_path):
    _, _, folder = trained
    run, whole = folder / "run", tmp_path / "whole"
    assert cli.main(["export", str(run), "--out", str(whole), "--quiet"]) == 0
    model, loaded = jrec.serving.load(whole, batch_sizes=[1, 4]), jrec.load_run(run)
    scores, items = loaded.best(REQUEST, k=5)
    found = model.best(REQUEST, k=5)
    assert model.raw_columns == ("age", "user", "country", "past")
    assert found.items == items
    np.testing.assert_allclose(found.scores, scores, rtol=1e-4)
    assert [len(line) for line in model.best(REQUEST, k=ITEMS).items] == [ITEMS - 2, ITEMS]
    held = {path.name for path in (whole / "tables").iterdir()}
    assert held == {"user.npy", "home.npy", "item.npy", "item.vectors.npy"}
    with running(whole) as served:
        status, _, body = ask(served.port, "/predict?k=5", {"columns": REQUEST})
        assert (status, json.loads(body)["items"]) == (200, items)
        rows = [{name: column[n] for name, column in REQUEST.items()} for n in range(2)]
        predictions = json.loads(ask(served.port, "/predict?k=5", {"instances": rows})[2])["predictions"]
        assert [line["items"] for line in predictions] == items
        status, _, body = ask(served.port, "/predict?k=5", stream(pa.table(REQUEST)), ARROW)
        assert pa.ipc.open_stream(body).read_all()["item"].to_pylist() == items
    assert cli.main(["export", str(run), "--dtype", "int8", "--out", str(tmp_path / "small"), "--quiet"]) == 0
    small = jrec.serving.load(tmp_path / "small", batch_sizes=[4]).best(REQUEST, k=5)
    np.testing.assert_allclose(small.scores, scores, atol=0.05)
    with pytest.raises(ExportError, match="there is no delta"):
        export_run(run, tmp_path / "delta", since=[whole])
    with pytest.raises(ExportError, match="leave out --onnx"):
        export_run(run, tmp_path / "onnx", onnx=True)
    rows, manifest = np.load(whole / "items.npy"), load_manifest(whole)
    for bad in (rows[::-1], rows + 2, rows - 2):
        np.save(whole / "items.npy", bad)
        save_manifest(whole, manifest)
        with pytest.raises(ExportError, match=r"items\.npy does not hold ascending rows of table 'item' below 61"):
            jrec.serving.load(whole)
    assert manifest.retrieval is not None
    for change, message in (
        ({"history": "home"}, "has history 'home', which is no feature of table 'item'"),
        ({"table": "other"}, "table 'other' or items.npy is not there"),
        ({"items": ""}, "which is no feature of table 'item.vectors' with pooling 'none'"),
    ):
        other = dataclasses.replace(manifest, retrieval=dataclasses.replace(manifest.retrieval, **change))
        assert any(message in fault for fault in faults(whole, other))


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        ["tables.tier=host"],
        ["mesh.devices=2", "tables.tier=host"],
        ["tables.overrides.user.tier=tt", "tables.overrides.item.tier=tt", "tables.tt.rank=4"],
        ["model.table_dtype=bfloat16", "model.compute_dtype=bfloat16"],
    ],
)
def test_wherever_rows_live_an_export_ranks_as_the_run(prepared, keys, tmp_path):
    few = ["max_steps=10", "evaluate.every_steps=0", "checkpoint.keep_best=false", "evaluate.baselines=off"]
    train(prepared, tmp_path / "run", *few, *keys)
    assert cli.main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "export"), "--quiet"]) == 0
    scores, items = jrec.load_run(tmp_path / "run").best(REQUEST, k=4)
    found = jrec.serving.load(tmp_path / "export", batch_sizes=[2]).best(REQUEST, k=4)
    assert found.items == items
    np.testing.assert_allclose(found.scores, scores, atol=0.01 if "bfloat16" in keys[0] else 1e-5)


def test_the_catalogue_is_of_each_items_last_line(prepared):
    (prepared / "plain.toml").write_text(CONFIG.format(data=prepared / "data"))
    config = load_config(prepared / "plain.toml")
    schema = config.model.of_kind.schema(config.model, Schema.load(prepared / "data"))
    _, columns = read_dataset(prepared / "data")
    count = schema.splits["train"].examples
    last = {int(row): k for k, row in enumerate(columns["item"][:count])}
    found = read_catalogue(schema, config)
    assert found.rows.tolist() == sorted(last)
    lines = [last[row] for row in found.rows.tolist()]
    np.testing.assert_allclose(found.columns["price"], [columns["price"][k] for k in lines], rtol=1e-6)
    genres = found.columns["genres"]
    assert isinstance(genres, ListColumn)
    ends = zip(genres.offsets, genres.offsets[1:], strict=False)
    assert [genres.values[i:j].tolist() for i, j in ends] == [list(columns["genres"][k]) for k in lines]


@pytest.mark.slow
def test_a_network_by_a_factory_ranks_as_two_towers_do(prepared, tmp_path, capsys):
    """Of the kind it has features, loss, evaluation and predictions; its vectors are its own."""
    config = tmp_path / "own.toml"
    text = CONFIG.format(data=prepared / "data")
    keys = [line for line in text.splitlines() if line.split(" =")[0] not in ("user_mlp", "item_mlp")]
    config.write_text("\n".join(keys))
    own = ["model.factory=own_model:towers", 'model.options.user=["user","home","past"]', f"out={tmp_path / 'run'}"]
    assert cli.main(["train", str(config), *own]) == 0
    content = json.loads((tmp_path / "run" / "report" / "metrics.json").read_text())
    popular = content["baselines"]["popularity"]["splits"]["test"]
    assert content["splits"]["test"]["ndcg@10"] > 1.2 * popular["ndcg@10"]
    out = tmp_path / "best.parquet"
    words = ["predict", str(tmp_path / "run"), str(prepared / "data"), "--k", "3", "--split", "test", "--quiet"]
    assert cli.main([*words, "--out", str(out)]) == 0
    assert pq.read_table(out).num_rows == 3 * Schema.load(prepared / "data").splits["test"].examples
    capsys.readouterr()
    assert cli.main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "export")]) == 2
    assert "only jrec.nn.TwoTower can be exported" in capsys.readouterr().err
    wrong = ["train", str(config), "model.factory=own_model:make", f"out={tmp_path / 'wrong'}"]
    assert cli.main(wrong) == 2
    assert 'return a dictionary with "user" and "item"' in capsys.readouterr().err
