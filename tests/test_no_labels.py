"""Datasets of logs that have no labels, or whose labels are ignored: all but training and evaluation takes them."""

import gzip

import numpy as np
import pytest
from prepare_reference import read_dataset
from small_run import CONFIG

from jrec import cli
from jrec.data.fae.manifest import HotSet
from jrec.data.schema import DatasetError, Schema
from jrec.prepare.fae_pack import pack
from jrec.prepare.prepare import prepare
from jrec.prepare.prepare_options import PrepareOptions
from jrec.prepare.readers import Avazu, Criteo, Delimited, Taobao, load_schema

LABELLED, UNLABELLED = "label,a,b\n", "a,b\n"
COLUMNS = '[[categorical]]\ncolumn = "a"\n[[categorical]]\ncolumn = "b"\n'
ROWS = [(i % 2, "xyz"[i % 3], i % 5) for i in range(300)]
WITHOUT = PrepareOptions(labels=False, min_count=1, threads=1)


def delimited(folder, text):
    (folder / "columns.toml").write_text(text)
    return Delimited(load_schema(str(folder / "columns.toml")))


def assert_same_examples(one, other):
    """But for the labels, which the other lacks."""
    labelled, columns = read_dataset(one)
    schema, found = read_dataset(other)
    assert labelled.labels
    assert not schema.labels
    assert any(columns.pop("label"))
    assert not any(labels := found.pop("label"))
    assert len(labels) == sum(split.examples for split in labelled.splits.values())
    assert found == columns
    assert schema.identity.rows == labelled.identity.rows


LOGS = {
    "a header": (LABELLED, '[label]\ncolumn = "label"\n'),
    "a header without the column": (UNLABELLED, '[label]\ncolumn = "label"\n'),
    "a schema without it": (UNLABELLED, ""),
    "a schema that ignores it": (LABELLED, ""),
    "columns of the schema": ("", 'columns = ["label", "a", "b"]\nlabel.column = "label"\n'),
}


@pytest.mark.parametrize("kind", LOGS)
@pytest.mark.parametrize("has", [True, False])
def test_csv(tmp_path, kind, has):
    header, label = LOGS[kind]
    if header:
        has = header == LABELLED
    whole = "".join(f"{y},{a},{b}\n" for y, a, b in ROWS)
    (tmp_path / "whole.csv").write_text(LABELLED + whole)
    (tmp_path / "log.csv").write_text(header + (whole if has else "".join(f"{a},{b}\n" for _, a, b in ROWS)))
    source = delimited(tmp_path, '[label]\ncolumn = "label"\n' + COLUMNS)
    prepare(source, [str(tmp_path / "whole.csv")], tmp_path / "one", PrepareOptions(min_count=1, threads=1))
    prepare(delimited(tmp_path, label + COLUMNS), [str(tmp_path / "log.csv")], tmp_path / "other", WITHOUT)
    assert_same_examples(tmp_path / "one", tmp_path / "other")


@pytest.mark.parametrize(
    ("make", "file", "label"),
    [(lambda: Criteo("criteo-terabyte"), "criteo_terabyte_1k.tsv.gz", 0), (Avazu, "avazu_9k.csv.gz", 1)],
)
def test_published_test_files(tmp_path, shared_data, make, file, label):
    """Without the column of labels, and with it; refused unless it is said."""
    delimiter = "\t" if file.endswith("tsv.gz") else ","
    with gzip.open(shared_data / file, "rt") as text:
        lines = [line.split(delimiter) for line in text][:400]
    (tmp_path / "whole").write_text("".join(delimiter.join(line) for line in lines))
    test = "".join(delimiter.join(line[:label] + line[label + 1 :]) for line in lines)
    (tmp_path / "test").write_text(test)
    prepare(make(), [str(tmp_path / "whole")], tmp_path / "one", PrepareOptions(min_count=1))
    for name in ("whole", "test"):
        prepare(make(), [str(tmp_path / name)], tmp_path / f"{name}_out", WITHOUT)
        assert_same_examples(tmp_path / "one", tmp_path / f"{name}_out")
    with pytest.raises(DatasetError, match=r"needs? --no-labels"):
        prepare(make(), [str(tmp_path / "test")], tmp_path / "refused")
    later = PrepareOptions(labels=False, vocabulary_from=str(tmp_path / "one"), split=(0, 0, 1))
    schema = prepare(make(), [str(tmp_path / "test")], tmp_path / "later", later)
    assert not schema.labels
    assert schema.splits["test"].examples == len(lines) - (label == 1)


@pytest.fixture
def unlabelled(tmp_path):
    (tmp_path / "log.csv").write_text(UNLABELLED + "".join(f"{a},{b}\n" for _, a, b in ROWS))
    prepare(delimited(tmp_path, COLUMNS), [str(tmp_path / "log.csv")], tmp_path / "data", WITHOUT)
    return tmp_path / "data"


def test_what_needs_labels_refuses_in_one_line(tmp_path, unlabelled, capsys):
    (tmp_path / "tiny.toml").write_text(CONFIG)
    (tmp_path / "runs").mkdir()
    hot = HotSet(rows={table.name: np.arange(1, dtype=np.uint32) for table in Schema.load(unlabelled).tables})
    for command in (
        ("train", tmp_path / "tiny.toml", f"data.path={unlabelled}", f"out={tmp_path / 'runs' / 'run'}"),
        ("eval", tmp_path / "runs", unlabelled),
        ("fae", "calibrate", unlabelled, "--budget", "1MB"),
        ("fae", "pack", unlabelled, "--budget", "1MB", "--out", tmp_path / "packed"),
    ):
        assert cli.main([str(argument) for argument in command]) == 2
        said = capsys.readouterr().err
        assert said == f"jrec: error: {unlabelled} has no labels; prepare it with them, or use `jrec predict`\n"
    with pytest.raises(DatasetError, match="has no labels"):
        pack(unlabelled, tmp_path / "packed", hot)
    assert not any((tmp_path / "runs").iterdir())
    assert cli.main(["access", str(unlabelled), "--quiet"]) == 0


def test_labels_that_are_lacking_or_made_are_named(tmp_path, unlabelled):
    log, out = [str(tmp_path / "log.csv")], tmp_path / "out"
    with pytest.raises(DatasetError, match=r"the schema has no \[label\]; add one, or pass --no-labels"):
        prepare(delimited(tmp_path, COLUMNS), log, out)
    with pytest.raises(DatasetError, match=r"lacks column\(s\) label; .* a log without labels needs --no-labels"):
        prepare(delimited(tmp_path, '[label]\ncolumn = "label"\n' + COLUMNS), log, out)
    with pytest.raises(DatasetError, match="taobao makes labels of what every line says; leave --no-labels out"):
        prepare(Taobao(), log, out, WITHOUT)
    assert not out.exists()
