"""Permutation importance against plain NumPy: the same permutations of raw columns, scored by ``LoadedRun.logits``."""

import csv
import dataclasses
import json
import socket
import subprocess
import sys

import numpy as np
import pytest
from child_processes import with_devices
from train_command import train_command

import jrec
from jrec import cli
from jrec.app.config import DataConfig, TrainConfig
from jrec.app.importance import _SEED, _sample, permuted_features
from jrec.data.blocks import ShardReader
from jrec.data.packing_kernels import permutation
from jrec.data.schema import DatasetError, Schema
from jrec.errors import ConfigError

SCHEMA = """
[label]
column = "click"
[[dense]]
column = "price"
[[categorical]]
column = "decides"
[[categorical]]
column = "noise"
[[categorical]]
column = "tags"
separator = "|"
max_length = 3
weights = "strengths"
[[cross]]
of = ["decides", "noise"]
name = "pair"
"""
CONFIG = """
seed = 1
[data]
batch_size = 64
eval_batch_size = 128
[model]
embedding_dim = 4
bottom_mlp = [4]
top_mlp = [8, 1]
[optimizer.embedding]
learning_rate = 0.1
[evaluate]
every_steps = 0
baselines = "off"
[log]
tensorboard = false
"""
ROWS = 1600


def write_log(path):
    """A log by time whose clicks depend on ``decides``, and a little on ``price``; all else is drawn beside them."""
    random = np.random.default_rng(0)
    lines = []
    for _ in range(ROWS):
        decides, price = int(random.integers(4)), round(float(random.random()), 3)
        tags = [f"t{random.integers(6)}" for _ in range(random.integers(4))]
        rate = (0.05, 0.25, 0.65, 0.9)[decides] * (0.7 + 0.3 * price)
        lines.append(
            {
                "click": int(random.random() < rate),
                "price": price,
                "decides": f"d{decides}",
                "noise": f"n{random.integers(5)}",
                "tags": "|".join(tags),
                "strengths": "|".join(f"{random.random():.2f}" for _ in tags),
            }
        )
    with path.open("w") as file:
        writer = csv.DictWriter(file, lines[0])
        writer.writeheader()
        writer.writerows(lines)
    return lines


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("importance")
    lines = write_log(folder / "log.csv")
    (folder / "schema.toml").write_text(SCHEMA)
    arguments = ["--schema", str(folder / "schema.toml"), "--input", str(folder / "log.csv"), "--block-size", "96"]
    options = ["--split", "0.6,0.1,0.3", "--min-count", "1", "--quiet"]
    assert cli.main(["prepare", "csv", *arguments, "--out", str(folder / "data"), *options]) == 0
    run = train_command(folder, folder / "data", "epochs=4", "evaluate.importance=2", text=CONFIG)
    return folder, run, lines[-480:]


def examples_of(run, lines):
    """The lines as rows and numbers, by column one value or list an example; lists with their weights beside."""
    texts = {name: [line[name] for line in lines] for name in ("decides", "noise", "tags", "strengths")}
    lists = {name: [text.split("|") if text else [] for text in texts[name]] for name in ("tags", "strengths")}
    strengths = [[float(value) for value in values] for values in lists["strengths"]]
    raw = {**texts, "tags": lists["tags"], "strengths": strengths, "price": [line["price"] for line in lines]}
    encoded = run.encoder.columns(raw).by_name()
    return {name: _each(column) for name, column in encoded.items()}


def _each(column):
    if isinstance(column, np.ndarray):
        return column
    spans = zip(column.offsets[:-1], column.offsets[1:], strict=True)
    pieces = np.empty(len(column.offsets) - 1, object)
    pieces[:] = [column.values[i:j] for i, j in spans]
    return pieces


def measured(logits, labels):
    """Log loss and AUC, by their definitions in float64."""
    z = np.asarray(logits, np.float64)
    above = z[labels][:, None] - z[~labels][None, :]
    loss = np.mean(np.logaddexp(0, np.where(labels, -z, z)))
    return {"log_loss": loss, "auc": np.mean((above > 0) + 0.5 * (above == 0))}


def by_name(section):
    return {line["feature"]: line for line in section["features"]}


def changes(section):
    return {name: (line["log_loss"], line["auc"]) for name, line in by_name(section).items()}


def test_it_is_that_of_numpy(trained):
    _, run, lines = trained
    loaded, labels = jrec.load_run(run), np.array([line["click"] for line in lines]) == 1
    section = loaded.importance(repeats=3, groups=[["noise", "tags"]])
    assert (section["split"], section["examples"], section["drawn_from"], section["repeats"]) == ("test", 480, 480, 3)
    examples, restored = examples_of(loaded, lines), loaded.restored.run

    def scored(columns):
        lists = {name: list(column) for name, column in columns.items()}
        return measured(restored.predict(lists, dense=["price"], batch_size=128), labels)

    before = scored(examples)
    assert section["metrics"] == pytest.approx(before, rel=1e-6)
    units = {"price": ["price"], "decides": ["decides"], "pair": ["pair"]}
    for unit, names in {**units, "noise+tags": ["noise", "tags", "tags:weight"]}.items():
        falls = []
        for repeat in range(3):
            order = permutation(480, _SEED, repeat)
            after = scored({**examples, **{name: examples[name][order] for name in names}})
            falls.append([after["log_loss"] - before["log_loss"], before["auc"] - after["auc"]])
        line = by_name(section)[unit]
        for at, metric in enumerate(("log_loss", "auc")):
            values = [fall[at] for fall in falls]
            assert line[metric] == pytest.approx(np.mean(values), abs=1e-6)
            assert line[f"{metric}_deviation"] == pytest.approx(np.std(values, ddof=1), abs=1e-6)
    assert len(section["features"]) == 4
    kinds = {line["feature"]: line["kind"] for line in section["features"]}
    assert kinds == {"price": "number", "decides": "value", "pair": "cross", "noise+tags": "value + list"}


def test_the_feature_that_decides_comes_first_and_noise_matters_not(trained):
    loaded = jrec.load_run(trained[1])
    first, *rest = loaded.importance(groups=[["decides", "pair"]])["features"]
    assert first["feature"] == "decides+pair"
    assert first["log_loss"] > 0.1
    assert first["auc"] > 0.15
    noise = next(line for line in rest if line["feature"] == "noise")
    for metric in ("log_loss", "auc"):
        assert abs(noise[metric]) < max(3 * noise[f"{metric}_deviation"], 0.003)
    assert [line["log_loss"] for line in rest] == sorted((line["log_loss"] for line in rest), reverse=True)


def test_features_that_say_the_same_share_what_it_is_worth(trained):
    """A pair of values tells the one that decides: permuting both costs more than permuting each by itself."""
    loaded = jrec.load_run(trained[1])
    alone = by_name(loaded.importance())
    (together, *_) = loaded.importance(groups=[["decides", "pair"]])["features"]
    assert together["log_loss"] > alone["decides"]["log_loss"] + alone["pair"]["log_loss"]


@pytest.mark.parametrize("keys", [["data.eval_batch_size=100"], ["tables.tier=host"], ["mesh.devices=2"]])
def test_neither_batches_nor_places_of_rows_change_it(trained, keys, tmp_path, capsys):
    folder, run, _ = trained
    if keys == ["mesh.devices=2"]:
        assert cli.main(["eval", str(run), str(folder / "data"), "--importance", "--devices", "2", "--json"]) == 0
        section = json.loads(capsys.readouterr().out)["importance"]
    else:
        data = folder / "data"
        begun = [f"init_from={run}", "max_steps=1", "optimizer.learning_rate=0", "optimizer.embedding.learning_rate=0"]
        other = train_command(tmp_path, data, *begun, "evaluate.final_splits=[]", *keys, text=CONFIG)
        section = jrec.load_run(other).importance()
    expected = changes(jrec.load_run(run).importance())
    # Two examples whose scores are alike but for rounding may change places, which moves AUC by a pair of many.
    for name, (log_loss, auc) in expected.items():
        assert changes(section)[name] == (pytest.approx(log_loss, abs=1e-6), pytest.approx(auc, abs=1e-5))
    assert changes(section).keys() == expected.keys()


def test_a_sample_is_of_the_whole_split(trained):
    loaded = jrec.load_run(trained[1])
    section = loaded.importance("train", repeats=1, sample=150)
    assert (section["examples"], section["drawn_from"]) == (150, 960)
    whole = loaded.importance("train", repeats=1, sample=0)
    assert whole["examples"] == 960
    assert section["metrics"]["log_loss"] == pytest.approx(whole["metrics"]["log_loss"], abs=0.1)
    assert by_name(section)["decides"]["log_loss_deviation"] is None
    chosen, total = _sample(loaded.restored.schema, "train", 150, 0)
    assert (len(np.unique(chosen)), total) == (150, 960)
    assert np.bincount(chosen // 96, minlength=10).min() >= 5  # of each block about 15
    assert _sample(loaded.restored.schema, "train", 150, 100)[0].tolist() == [*range(100)]


def test_the_command_and_the_report_show_it(trained, tmp_path, capsys, monkeypatch):
    folder, run, _ = trained
    report = json.loads((run / "report" / "metrics.json").read_text())
    assert report["importance"]["repeats"] == 2
    section = jrec.load_run(run).importance(repeats=2)
    assert changes(report["importance"]) == changes(section)
    page = (run / "report" / "report.html").read_text()
    assert "Importance of features on test" in page
    assert "log loss rises by (nats per example)" in page
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    arguments = ["eval", str(run), str(folder / "data"), "--importance", "--repeats", "2", "--batches", "2"]
    assert cli.main([*arguments, "--sample", "200", "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out.splitlines()
    at = next(number for number, line in enumerate(shown) if line.startswith("importance on test: "))
    assert shown[at] == "importance on test: 200 of 256 examples, 2 permutations each, mean and standard deviation"
    assert shown[at + 1].split() == ["feature", "kind", "log", "loss", "rises", "by", "AUC", "falls", "by"]
    assert shown[at + 2].split() == ["nats", "per", "example", "0", "to", "1"]
    assert shown[at + 3].endswith(" " + "█" * 20)
    assert max(map(len, shown[at : at + 8])) <= 90
    written = json.loads((tmp_path / "out" / "metrics.json").read_text())["importance"]
    assert [line.split()[0] for line in shown[at + 3 : at + 8]] == [line["feature"] for line in written["features"]]


def test_an_evaluation_reads_its_blocks_once(trained, tmp_path, capsys, monkeypatch):
    """Scores and unknown values come of one reading, slices and groups of one more; a sample is read for importance."""
    folder, run, _ = trained
    read, opened = ShardReader.read, []

    def counted(reader, block):
        opened.append((reader.path.name, block))
        return read(reader, block)

    monkeypatch.setattr(ShardReader, "read", counted)
    both = ["--out", str(tmp_path / "out"), "--group", "decides"]
    for times, options in ((1, []), (1, ["--batches", "1"]), (2, both), (2, ["--importance", "--repeats", "1"])):
        opened.clear()
        assert cli.main(["eval", str(run), str(folder / "data"), *options]) == 0
        blocks = 2 if "--batches" in options else 5  # of 96 examples, 128 of 480
        assert len(set(opened)) == blocks
        assert len(opened) == times * blocks
        unknown = json.loads(capsys.readouterr().out)["unknown_values"]
        shown = trained[2][: 128 if blocks == 2 else 480]
        tags = sum(len(line["tags"].split("|")) for line in shown if line["tags"])
        assert {name: own["values"] for name, own in unknown.items()} == {
            "decides": len(shown), "noise": len(shown), "tags": tags,
        }  # fmt: skip


@pytest.mark.slow
def test_two_processes_say_what_one_does(trained, capsys):
    folder, run, _ = trained
    arguments = ["eval", str(run), str(folder / "data"), "--importance", "--repeats", "2", "--json"]
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    many = ["--devices", "2", "--coordinator", f"localhost:{port}", "--processes", "2"]
    command = [sys.executable, "-m", "jrec", *arguments, *many, "--process"]
    processes = [
        subprocess.Popen([*command, str(number)], env=with_devices(1), stdout=subprocess.PIPE, text=True)
        for number in range(2)
    ]
    said = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    (together,) = (json.loads(line) for text in said for line in text.splitlines() if line.startswith("{"))
    assert cli.main(arguments) == 0
    alone = json.loads(capsys.readouterr().out)
    assert together["unknown_values"] == alone["unknown_values"]
    assert changes(together["importance"]) == {
        name: pytest.approx(pair, abs=1e-6) for name, pair in changes(alone["importance"]).items()
    }


def test_what_cannot_be_permuted_is_refused(trained, capsys):
    folder, run, _ = trained
    config, schema = TrainConfig(data=DataConfig(path=str(folder / "data"))), Schema.load(folder / "data")
    assert list(permuted_features(config, schema, [("noise", "price")])) == ["noise+price", "decides", "tags", "pair"]
    with pytest.raises(ConfigError, match="the group of features noise, noise names one twice"):
        permuted_features(config, schema, [("noise", "noise")])
    restored = jrec.load_run(run).restored
    without = dataclasses.replace(restored, schema=dataclasses.replace(restored.schema, labels=False))
    with pytest.raises(DatasetError, match="has no labels; prepare it with them"):
        without.importance("test")
    with pytest.raises(DatasetError, match="has no 'later' split; it has train, valid, test"):
        restored.importance("later")
    arguments = ["eval", str(run), str(folder / "data")]
    assert cli.main([*arguments, "--importance", "--group-features", "noise,dcides"]) == 2
    said = capsys.readouterr().err
    assert "names 'dcides', but predictions read price, decides, noise, tags, pair; did you mean 'decides'?" in said
    assert cli.main([*arguments, "--repeats", "3"]) == 2
    assert "--repeats is given without --importance" in capsys.readouterr().err
