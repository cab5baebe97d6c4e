"""Predictions of a run on raw logs, Parquet files, columns and datasets: the scores of ``jrec eval``, to the bit."""

import contextlib
import dataclasses
import gzip
import json
import os
import re

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import shop_logs
from grids import some_of

import jrec
from jrec import cli, serving
from jrec.app.evaluate import restore_run
from jrec.app.export import export_run
from jrec.app.kept_columns import KeptColumns
from jrec.app.predict import write_pieces
from jrec.data.schema import DatasetError
from jrec.prepare.readers.parse import Dialect, Field

TIERS = {
    "device": (),
    "host": ("tables.tier='host'",),
    "tensor train": ("tables.tt.min_rows=20", "tables.tt.rank=2"),
}


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """Monday's dataset and Tuesday's log, with and without labels, and Tuesday's dataset on Monday's rows."""
    folder = tmp_path_factory.mktemp("shop")
    shop_logs.write_log(folder / "monday.csv")
    monday = shop_logs.prepare(folder, folder / "monday.csv", "monday")
    lines = shop_logs.write_log(folder / "tuesday.csv", 300, seed=1)
    shop_logs.write_log(folder / "unlabelled.csv", 300, seed=1, label=False)
    options = ("--vocabulary-from", str(monday), "--split", "0,0,1")
    tuesday = shop_logs.prepare(folder, folder / "tuesday.csv", "tuesday", *options)
    return folder, monday, tuesday, lines


def _predict(*arguments):
    return cli.main(["predict", *map(str, arguments), "--quiet"])


@pytest.mark.parametrize("tier", some_of(TIERS, "device", "tensor train"))
def test_all_inputs_have_the_scores_of_the_evaluation(tier, shop, tmp_path):
    folder, monday, tuesday, lines = shop
    run = shop_logs.trained(tmp_path, monday, *TIERS[tier])
    want = restore_run(run, tuesday).scores("test").logits
    assert len(want) == 300

    assert _predict(run, tuesday, "--out", tmp_path / "dataset.parquet") == 0
    table = pq.read_table(tmp_path / "dataset.parquet")
    np.testing.assert_array_equal(table["logit"], want)
    assert set(table["split"].to_pylist()) == {"test"}
    np.testing.assert_array_equal(table["label"], [float(line["click"]) for line in lines])

    (tmp_path / "log.csv.gz").write_bytes(gzip.compress((folder / "unlabelled.csv").read_bytes()))
    for log, labelled in ((folder / "tuesday.csv", True), (tmp_path / "log.csv.gz", False)):
        assert _predict(run, log, "--out", tmp_path / "log.csv", "--overwrite") == 0
        table = pyarrow.csv.read_csv(tmp_path / "log.csv")
        np.testing.assert_array_equal(np.float32(table["logit"]), want)
        assert table.column_names == ["row", *(["label"] if labelled else []), "score", "logit"]
        np.testing.assert_array_equal(table["row"], np.arange(300))

    columns = {name: [line[name] for line in lines] for name in lines[0] if name != "click"}
    pq.write_table(pa.table(columns), tmp_path / "columns.parquet")
    assert _predict(run, tmp_path / "columns.parquet", "--out", tmp_path / "columns.out.parquet") == 0
    np.testing.assert_array_equal(pq.read_table(tmp_path / "columns.out.parquet")["logit"], want)

    loaded = jrec.load_run(run)
    np.testing.assert_array_equal(loaded.logits(columns), want)
    scores = loaded.predict(columns)
    np.testing.assert_allclose(scores, 1 / (1 + np.exp(-want.astype(np.float64))), rtol=1e-6)
    lists = columns | {
        "history": [text.split("|") if text else [] for text in columns["history"]],
        "strengths": [[float(x) for x in text.split("|")] if text else [] for text in columns["strengths"]],
        "price": [float(text) if text else None for text in columns["price"]],
    }
    np.testing.assert_array_equal(loaded.logits(lists), want)

    export_run(run, tmp_path / "export")
    model = serving.load(tmp_path / "export")
    np.testing.assert_allclose(model.logits(columns), want, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(model(lists), scores, rtol=1e-5)


def test_a_reordered_dataset_keeps_its_rows(shop, tmp_path):
    folder, monday, _, lines = shop
    reorder = ["reorder", str(monday), "--tables", "item", "user", "--always", "--out", str(tmp_path / "reordered")]
    assert cli.main([*reorder, "--quiet"]) == 0
    run = shop_logs.trained(tmp_path, tmp_path / "reordered")
    options = ("--vocabulary-from", str(tmp_path / "reordered"), "--split", "0,0,1")
    tuesday = shop_logs.prepare(tmp_path, folder / "tuesday.csv", "tuesday", *options)
    want = restore_run(run, tuesday).scores("test").logits
    columns = {name: [line[name] for line in lines] for name in lines[0]}
    np.testing.assert_array_equal(jrec.load_run(run).logits(columns), want)
    export_run(run, tmp_path / "export")
    np.testing.assert_allclose(serving.load(tmp_path / "export").logits(columns), want, rtol=2e-5, atol=2e-6)


@pytest.mark.slow
def test_several_devices_give_the_evaluation_s_scores(shop, tmp_path):
    folder, monday, tuesday, _ = shop
    run = shop_logs.trained(tmp_path, monday)
    want = restore_run(run, tuesday, devices=4).scores("test").logits
    for source in (tuesday, folder / "unlabelled.csv"):
        out = tmp_path / "scores.parquet"
        assert _predict(run, source, "--out", out, "--devices", 4, "--overwrite") == 0
        np.testing.assert_array_equal(pq.read_table(out)["logit"], want)


def test_mistakes_are_one_line_and_leave_nothing(shop, tmp_path, capsys):
    folder, monday, tuesday, _ = shop
    run = shop_logs.trained(tmp_path, monday)

    def fails(words, *arguments):
        capsys.readouterr()
        assert _predict(*arguments) == 2
        error = capsys.readouterr().err.strip()
        assert error.count("\n") == 0
        assert words in error, error
        assert not (tmp_path / "x.parquet").exists()
        assert not (tmp_path / "x.parquet.partial").exists()

    out = ("--out", tmp_path / "x.parquet")
    fails(".parquet or .csv", run, tuesday, "--out", tmp_path / "x.txt")
    fails("no examples in split 'train'", run, tuesday, *out, "--split", "train")
    fails("--split is of datasets", run, folder / "tuesday.csv", *out, "--split", "test")
    other = shop_logs.prepare(tmp_path, folder / "tuesday.csv", "other")
    fails("--vocabulary-from", run, other, *out)
    (tmp_path / "bad.csv").write_text((folder / "tuesday.csv").read_text() + "1,abc,u1,i1,,\n")
    fails("bad.csv:302", run, tmp_path / "bad.csv", *out)
    fails("nothing.csv", run, tmp_path / "nothing.csv", *out)
    pq.write_table(pa.table({"user": ["u1"]}), tmp_path / "few.parquet")
    fails("item", run, tmp_path / "few.parquet", *out)
    (tmp_path / "no.parquet").write_bytes(b"PAR1 and no more")
    fails("no.parquet", run, tmp_path / "no.parquet", *out)
    (tmp_path / "x.parquet").write_bytes(b"mine")
    capsys.readouterr()
    assert _predict(run, tuesday, *out) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert (tmp_path / "x.parquet").read_bytes() == b"mine"
    with pytest.raises(DatasetError, match="item"):
        jrec.load_run(run).predict({"user": ["u1"], "price": [1.0]})


def test_no_examples_make_an_empty_file(shop, tmp_path):
    _, monday, _, lines = shop
    run = shop_logs.trained(tmp_path, monday)
    pq.write_table(pa.table({name: pa.array([], pa.string()) for name in lines[0]}), tmp_path / "empty.parquet")
    assert _predict(run, tmp_path / "empty.parquet", "--out", tmp_path / "out.parquet") == 0
    assert pq.read_table(tmp_path / "out.parquet").num_rows == 0
    assert json.dumps(jrec.load_run(run).predict({name: [] for name in lines[0]}).tolist()) == "[]"


def test_parquet_columns_of_a_log_that_is_text_otherwise(tmp_path):
    rng = np.random.default_rng(0)
    names = ["label", *(f"I{k}" for k in range(1, 14)), *(f"C{k}" for k in range(1, 27))]
    lines = [
        [
            str(rng.integers(0, 2)),
            *(str(rng.integers(0, 9)) for _ in range(13)),
            *(f"{rng.integers(0, 4):08x}" for _ in range(26)),
        ]
        for _ in range(300)
    ]
    (tmp_path / "train.txt").write_text("\n".join("\t".join(line) for line in lines) + "\n")
    prepare = ["prepare", "criteo-kaggle", "--input", str(tmp_path / "train.txt"), "--out", str(tmp_path / "data")]
    assert cli.main([*prepare, "--quiet"]) == 0
    run = shop_logs.trained(tmp_path, tmp_path / "data")
    pq.write_table(pa.table(dict(zip(names, zip(*lines, strict=True), strict=True))), tmp_path / "train.parquet")
    logits = []
    for source in ("train.txt", "train.parquet"):
        assert _predict(run, tmp_path / source, "--out", tmp_path / "scores.parquet", "--overwrite") == 0
        logits.append(pq.read_table(tmp_path / "scores.parquet")["logit"].to_numpy())
    np.testing.assert_array_equal(*logits)


@pytest.mark.parametrize(
    ("log", "keep", "message"),
    [
        ("tuesday.csv", "usr", "--keep names 'usr', but .*tuesday.csv has no such column; did you mean 'user'"),
        ("tuesday.csv", "qqq", "no such column; it has click, price, user"),
        ("scored.csv", "score", "but scores have a column of that name"),
        ("tuesday", "user", "--keep copies columns of raw logs, but .* is a dataset"),
        ("pipe", "user", "pipe can be read only once; give files"),
    ],
)
def test_columns_that_cannot_be_kept_are_refused(shop, tmp_path, capsys, log, keep, message):
    folder, monday, _, lines = shop
    run = shop_logs.trained(tmp_path, monday, "max_steps=1")
    own = {**lines[0], "score": "1"}
    (folder / "scored.csv").write_text("\n".join([",".join(own), ",".join(own.values())]) + "\n")
    with contextlib.suppress(FileExistsError):
        os.mkfifo(folder / "pipe")
    if log == "pipe":
        with pytest.raises(DatasetError, match=message):
            jrec.load_run(run).kept([folder / log], [keep])
        return
    assert _predict(run, folder / log, "--keep", keep, "--out", tmp_path / "scores.csv") == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "scores.csv").exists()


def test_lines_without_a_prediction_are_noticed(shop, tmp_path):
    """As where a file changes between both readings."""
    folder, monday, _, _ = shop
    loaded = jrec.load_run(shop_logs.trained(tmp_path, monday, "max_steps=1"))
    lines = (folder / "unlabelled.csv").read_text().splitlines(keepends=True)
    for count, message in ((200, "fewer lines than predictions"), (300, "")):
        (tmp_path / "log.csv").write_text("".join(lines[: count + 1]))
        kept = loaded.kept(tmp_path / "log.csv", ["user"])
        pieces = list(loaded.of_log(folder / "unlabelled.csv"))
        options = {"splits": False, "overwrite": True, "kept": kept}
        if message:
            with pytest.raises(DatasetError, match=message):
                write_pieces(tmp_path / "scores.csv", pieces, loaded.nothing(), **options)
            assert not (tmp_path / "scores.csv").exists()
        else:
            with pytest.raises(DatasetError, match="more lines than predictions"):
                write_pieces(tmp_path / "scores.csv", pieces[:1], loaded.nothing(), **options)


@pytest.mark.parametrize("quoting", [True, False])
def test_kept_columns_split_lines_as_predictions_do(tmp_path, quoting):
    """Blank lines of a file with one column are examples; fields may be long, and have returns within them."""
    mark = "," if quoting else "\t"
    dialect = Dialect(fields=(Field(name="user", kind="text"),), delimiter=mark, quoting=quoting)
    long, odd = "x" * 200_000, "a\rb"
    (tmp_path / "log").write_bytes("\n".join(["u1", "", long, odd, "u2\r", "é"]).encode("latin-1"))
    kept = KeptColumns([str(tmp_path / "log")], ["user"], lambda path: dataclasses.replace(dialect, encoding="latin-1"))
    assert pa.concat_tables(kept._read())["user"].to_pylist() == ["u1", "", long, odd, "u2", "é"]


def test_kept_columns_of_files_of_several_types(tmp_path):
    """Columns that files have in other types are texts, but for integers; lists are refused."""
    types = {"small": pa.int32(), "large": pa.int64(), "text": pa.string(), "list": pa.list_(pa.int64())}
    values = {"small": [1], "large": [2**60 + 1], "text": ["x"], "list": [[3]]}
    for name, dtype in types.items():
        pq.write_table(pa.table({"user": pa.array(values[name], dtype)}), tmp_path / f"{name}.parquet")
    dialect = Dialect(fields=(Field(name="user", kind="text"),))
    (tmp_path / "text.csv").write_text("7\n")

    def read(*names):
        kept = KeptColumns([str(tmp_path / name) for name in names], ["user"], lambda path: dialect)
        return pa.concat_tables(kept._read())["user"].to_pylist()

    assert read("small.parquet", "large.parquet") == [1, 2**60 + 1]
    assert read("large.parquet", "text.parquet", "text.csv") == [str(2**60 + 1), "x", "7"]
    with pytest.raises(DatasetError, match=r"files have as int64 and list<.*>; predict them one by one"):
        read("large.parquet", "list.parquet")


def test_columns_of_the_log_are_kept_beside_the_scores(shop, tmp_path):
    folder, monday, _, lines = shop
    run = shop_logs.trained(tmp_path, monday, "max_steps=1")
    (tmp_path / "log.csv.gz").write_bytes(gzip.compress((folder / "tuesday.csv").read_bytes()))
    kept = ("--keep", "item,user,strengths,click", "--out", tmp_path / "kept.parquet")
    assert _predict(run, tmp_path / "log.csv.gz", folder / "tuesday.csv", *kept) == 0
    table = pq.read_table(tmp_path / "kept.parquet")
    assert table.column_names == ["row", "item", "user", "strengths", "click", "label", "score", "logit"]
    for name in table.column_names[1:5]:
        assert table[name].to_pylist() == [line[name] for line in lines] * 2
    assert table["label"].to_pylist() == [float(text) for text in table["click"].to_pylist()]

    columns = {name: [line[name] for line in lines] for name in lines[0] if name != "click"}
    columns |= {"at": range(300), "kind": pa.array(["a", "b", None] * 100).dictionary_encode()}
    pq.write_table(pa.table(columns), tmp_path / "more.parquet", row_group_size=70)
    assert _predict(run, tmp_path / "more.parquet", "--keep", "at,kind", "--out", tmp_path / "kept.csv") == 0
    more = pyarrow.csv.read_csv(tmp_path / "kept.csv")
    assert more["at"].to_pylist() == list(range(300))
    assert more["kind"].to_pylist() == ["a", "b", ""] * 100
    np.testing.assert_array_equal(np.float32(more["logit"]), table["logit"].to_numpy()[:300])
