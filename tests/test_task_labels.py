"""Logs with several labels, each of which may be unknown: from the file to the loader's batches."""

import json
import shutil
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prepare_reference import read_dataset

import jrec
from jrec import cli
from jrec.data.loader import LoaderConfig, make_loader
from jrec.data.schema import DatasetError, Schema
from jrec.prepare.encoder import Encoder
from jrec.prepare.prepare import prepare
from jrec.prepare.prepare_options import PrepareOptions
from jrec.prepare.readers import Delimited, load_schema

FEATURES = '[[categorical]]\ncolumn = "user"\n[[categorical]]\ncolumn = "item"\n'
SCHEMA = (
    'missing_values = ["", "NA"]\n'
    '[[labels]]\ncolumn = "clicked"\nname = "click"\n'
    '[[labels]]\ncolumn = "paid"\npositive_at_least = 10\n'
    '[[labels]]\ncolumn = "verdict"\nname = "liked"\npositive_values = ["good", "great"]\n'
)
VALUES = {
    "clicked": {"1": 1, "0": 0, "yes": 1, "": -1, "NA": -1},
    "paid": {"10": 1, "9.99": 0, "250": 1, "": -1, "NA": -1},
    "verdict": {"good": 1, "great": 1, "bad": 0, "": -1, "NA": -1},
}
TASKS = {"clicked": "click", "paid": "paid", "verdict": "liked"}
OPTIONS: dict[str, Any] = {"min_count": 1, "threads": 1, "block_size": 16}


def rows(count=200, seed=0):
    """Texts by column."""
    rng = np.random.default_rng(seed)
    columns = {name: rng.choice(list(values), count).tolist() for name, values in VALUES.items()}
    return columns | {
        "user": [f"u{i}" for i in rng.integers(0, 20, count)],
        "item": [f"i{i % 7}" for i in range(count)],
    }


def expected(columns):
    """Labels by task: 1, 0, or -1 where one is unknown."""
    return {TASKS[name]: [values[text] for text in columns[name]] for name, values in VALUES.items()}


def write_csv(path, columns):
    lines = [",".join(columns), *(",".join(line) for line in zip(*columns.values(), strict=True))]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def write_parquet(path, columns):
    pq.write_table(pa.table({name: [text or None for text in texts] for name, texts in columns.items()}), path)
    return str(path)


def source(folder, text=SCHEMA + FEATURES):
    (folder / "columns.toml").write_text(text)
    return Delimited(load_schema(str(folder / "columns.toml")))


@pytest.fixture
def dataset(tmp_path):
    columns = rows()
    log = write_csv(tmp_path / "log.csv", columns)
    return tmp_path / "data", columns, prepare(source(tmp_path), log, tmp_path / "data", PrepareOptions(**OPTIONS))


@pytest.mark.parametrize("write", [write_csv, write_parquet])
@pytest.mark.parametrize("split_by", ["time", "random"])
def test_prepared_labels(tmp_path, write, split_by):
    columns = rows()
    log = write(tmp_path / f"log.{'csv' if write is write_csv else 'parquet'}", columns)
    prepare(source(tmp_path), log, tmp_path / "data", PrepareOptions(**OPTIONS, split_by=split_by))
    schema, found = read_dataset(tmp_path / "data")
    assert schema.tasks == ("click", "paid", "liked")
    labels = [found[name] for name in ("label", "paid", "liked")]
    if split_by == "time":
        assert labels == list(expected(columns).values())
    else:
        lines = zip(*expected(columns).values(), columns["user"], strict=True)
        assert sorted(zip(*labels, strict=True)) == sorted(line[:3] for line in lines)
    assert list(found)[:3] == ["label", "paid", "liked"]


def test_numbers_and_minus_one(tmp_path):
    """Of numbers in a Parquet file null is unknown, and -1 is a 0."""
    numbers = {"a": [1, -1, None, 1, -1] * 4, "b": [0.0, 1.0, 1.0, None, None] * 4}
    pq.write_table(pa.table(numbers | {"user": ["x", "y"] * 10}), tmp_path / "log.parquet")
    text = '[[labels]]\ncolumn = "a"\n[[labels]]\ncolumn = "b"\n[[categorical]]\ncolumn = "user"\n'
    prepare(source(tmp_path, text), str(tmp_path / "log.parquet"), tmp_path / "data", PrepareOptions(**OPTIONS))
    _, found = read_dataset(tmp_path / "data")
    assert found["label"] == [1, 0, -1, 1, 0] * 4
    assert found["b"] == [0, 1, 1, -1, -1] * 4


def test_zero_and_minus_one_of_different_tasks_are_no_contradiction(tmp_path):
    text = '[[labels]]\ncolumn = "a"\n[[labels]]\ncolumn = "b"\n[[categorical]]\ncolumn = "user"\n'
    log = write_csv(tmp_path / "log.csv", {"a": ["0", "1"] * 10, "b": ["-1", ""] * 10, "user": ["x"] * 20})
    prepare(source(tmp_path, text), log, tmp_path / "data", PrepareOptions(**OPTIONS))
    assert read_dataset(tmp_path / "data")[1]["b"] == [0, -1] * 10
    log = write_csv(tmp_path / "log.csv", {"a": ["0", "1"] * 10, "b": ["-1", "0"] * 10, "user": ["x"] * 20})
    with pytest.raises(DatasetError, match=r"column 'b' holds both 0 and -1 .* in \[\[labels\]\]"):
        prepare(source(tmp_path, text), log, tmp_path / "other", PrepareOptions(**OPTIONS))


def test_batches(dataset):
    folder, columns, schema = dataset
    layout = jrec.EmbeddingLayout.build(
        [jrec.TableConfig(name=t.name, rows=t.rows, dim=4) for t in schema.tables],
        [jrec.FeatureConfig(name=f.name, table=f.table, fixed_length=True) for f in schema.categorical],
    )
    config = LoaderConfig(batch_size=24, shuffle=False, workers=0)
    want = expected({name: texts[:160] for name, texts in columns.items()})
    with make_loader(folder, schema, layout, "train", config) as loader:
        batches = list(loader)
    real = np.concatenate([b.mask for b in batches]) == 1
    assert len(real) == 168
    assert np.concatenate([b.labels for b in batches])[real].tolist() == want["click"]
    for task in ("paid", "liked"):
        labels = np.concatenate([b.extras[task] for b in batches])
        assert labels.dtype == np.float32
        assert labels[real].tolist() == want[task]
        assert not labels[~real].any()


def test_a_log_to_predict_may_have_some_labels_or_none(dataset, tmp_path):
    folder, _, schema = dataset
    columns, encoder = rows(50, seed=1), Encoder(schema)
    want = expected(columns)
    for dropped, known in (([], TASKS.values()), (["clicked", "verdict"], ["paid"]), (list(TASKS), None)):
        log = write_csv(tmp_path / "new.csv", {n: texts for n, texts in columns.items() if n not in dropped})
        (encoded,) = encoder.stream(log, batch_size=64)
        if known is None:
            assert encoded.labels is None
            assert not encoded.tasks
            continue
        found = {"click": encoded.labels, **encoded.tasks}
        assert {task: labels.tolist() for task, labels in found.items()} == {
            task: labels if task in known else [-1] * 50 for task, labels in want.items()
        }
    assert folder.is_dir()


def test_a_log_to_predict_without_lines_has_the_labels_of_its_header(dataset, tmp_path):
    _, _, schema = dataset
    columns, encoder = rows(3, seed=1), Encoder(schema)
    for dropped in ([], list(TASKS)):
        kept = {name: texts[:0] for name, texts in columns.items() if name not in dropped}
        (encoded,) = encoder.stream(write_csv(tmp_path / "new.csv", kept), batch_size=64)
        assert encoded.examples == 0
        assert (encoded.labels is None) == bool(dropped)
        assert list(encoded.tasks) == ([] if dropped else list(schema.tasks[1:]))


def test_without_labels(dataset, tmp_path):
    folder, columns, _ = dataset
    log = write_csv(tmp_path / "bare.csv", {n: texts for n, texts in columns.items() if n not in TASKS})
    for path in (log, str(tmp_path / "log.csv")):
        options = PrepareOptions(block_size=16, labels=False, vocabulary_from=str(folder))
        prepare(source(tmp_path), path, tmp_path / "bare", options)
        schema, found = read_dataset(tmp_path / "bare")
        assert not schema.labels
        assert schema.tasks == ()
        assert list(found) == ["label", "user", "item"]
        shutil.rmtree(tmp_path / "bare")


def test_files_without_a_header(tmp_path):
    columns = rows(40)
    text = f"columns = {json.dumps(list(columns))}\n" + SCHEMA + FEATURES
    path = write_csv(tmp_path / "log.csv", columns)
    body = (tmp_path / "log.csv").read_text().split("\n", 1)[1]
    (tmp_path / "log.csv").write_text(body)
    schema = prepare(source(tmp_path, text), path, tmp_path / "data", PrepareOptions(**OPTIONS))
    assert read_dataset(tmp_path / "data")[1]["liked"] == expected(columns)["liked"]
    (tmp_path / "bare.csv").write_text("".join(line.split(",", 3)[3] + "\n" for line in body.splitlines()))
    (encoded,) = Encoder(schema).stream(str(tmp_path / "bare.csv"), batch_size=64)
    assert (encoded.examples, encoded.labels) == (40, None)


def test_other_meanings_of_a_label_are_refused_by_an_earlier_dataset(dataset, tmp_path):
    folder, _, _ = dataset
    other = source(tmp_path, (SCHEMA + FEATURES).replace("positive_at_least = 10", "positive_at_least = 11"))
    options = PrepareOptions(vocabulary_from=str(folder))
    with pytest.raises(DatasetError, match="the label 'paid' has positive_at_least 11"):
        prepare(other, str(tmp_path / "log.csv"), tmp_path / "later", options)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SCHEMA + '[label]\ncolumn = "a"\n', r"there are \[label\] and \[\[labels\]\]; make the first one"),
        ('[[labels]]\ncolumn = "a"\n', r"there is one \[\[labels\]\]; a log with one label has a \[label\] table"),
        ('[[labels]]\ncolumn = "a"\n[[labels]]\ncolumn = "b"\nname = "a"\n', r"name\(s\) a occur more than once"),
        ('[[labels]]\ncolumn = "a"\n[[labels]]\ncolumn = "b"\nname = "user"\n', r"name\(s\) user occur more than once"),
        ('[[labels]]\ncolumn = "a"\n[[labels]]\ncolumn = "b"\nname = "label"\n', r"name\(s\) label occur more than"),
        (
            '[[labels]]\ncolumn = "a"\n[[labels]]\ncolumn = "b"\npositive_at_least = 1\npositive_values = ["1"]\n',
            r"\[\[labels\]\] of column 'b' has positive_values and positive_at_least; give one",
        ),
    ],
)
def test_schema_files_that_are_refused(tmp_path, text, message):
    with pytest.raises(DatasetError, match=message):
        source(tmp_path, text + FEATURES)


def test_a_label_that_is_none(tmp_path, capsys):
    columns = rows(20) | {"clicked": ["1"] * 19 + ["maybe"]}
    write_csv(tmp_path / "log.csv", columns)
    (tmp_path / "columns.toml").write_text(SCHEMA + FEATURES)
    arguments = ["--schema", str(tmp_path / "columns.toml"), "--input", str(tmp_path / "log.csv")]
    assert cli.main(["prepare", "csv", *arguments, "--out", str(tmp_path / "data")]) == 2
    assert "log.csv:21: field 'clicked' holds 'maybe', which is neither 0 nor 1" in capsys.readouterr().err


def test_a_dataset_with_one_label_says_nothing_of_tasks(tmp_path):
    log = write_csv(tmp_path / "log.csv", {"y": ["0", "1"] * 20, "user": ["a", "b", "c", "d"] * 10})
    prepare(
        source(tmp_path, '[label]\ncolumn = "y"\n[[categorical]]\ncolumn = "user"\n'),
        log, tmp_path / "data", PrepareOptions(**OPTIONS),
    )  # fmt: skip
    stored = json.loads((tmp_path / "data" / "schema.json").read_text())
    assert "tasks" not in stored
    assert "labels" not in stored["provenance"]["format_options"]["schema"]
    assert stored["provenance"]["format_options"]["schema"]["label"].keys() == {
        "column", "positive_at_least", "positive_values",
    }  # fmt: skip
    assert Schema.load(tmp_path / "data").tasks == ()
