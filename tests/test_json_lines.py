"""JSON lines as a log: the dataset of the same CSV, whatever types and keys objects have; every bad line is named."""

import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jrec import cli
from jrec.data.schema import DatasetError, Schema
from jrec.prepare.prepare import prepare
from jrec.prepare.prepare_options import PrepareOptions
from jrec.prepare.readers import Delimited, json_lines, lines, load_schema
from jrec.prepare.readers.tables import column_types, is_table, read_batches

SCHEMA = """
[label]
column = "click"
[[dense]]
column = "price"
missing = 0.0
[[categorical]]
column = "user"
[[categorical]]
column = "tags"
lists = true
max_length = 3
"""


def objects(count=300):
    rng = np.random.default_rng(0)
    for k in range(count):
        row = {"click": k % 2, "user": [f"u{k % 7}", k % 5, True, None][k % 4], "tags": [f"t{k % 3}", k % 2][: k % 3]}
        yield row | ({"price": round(float(rng.normal()), 3)} if k % 9 else {}) | ({"odd": {"a": 1}} if k == 5 else {})


def made(folder, path, **options):
    (folder / "schema.toml").write_text(SCHEMA)
    source = Delimited(load_schema(str(folder / "schema.toml")))
    out = folder / f"of_{path.name}"
    prepare(source, [str(path)], out, PrepareOptions(min_count=1, **options))
    return out


def write(path, rows):
    text = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def csv_text(value):
    if value is None:
        return ""
    if isinstance(value, list):
        return '"' + json.dumps(value).replace('"', '""') + '"'
    return json.dumps(value) if not isinstance(value, str) else value


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz"])
def test_a_log_of_objects_is_the_dataset_of_its_csv(tmp_path, ending, monkeypatch):
    monkeypatch.setattr(lines, "BLOCK_BYTES", 2_000)  # types differ from block to block
    rows = list(objects())
    names = ("click", "user", "tags", "price")
    text = [",".join(names), *(",".join(csv_text(row.get(name)) for name in names) for row in rows)]
    one, other = write(tmp_path / f"log.{ending}", rows), write(tmp_path / "log.csv", text)
    one, other = made(tmp_path, one), made(tmp_path, other)
    for table in ("user", "tags"):
        vocabularies = [pq.read_table(folder / "vocabulary" / f"{table}.parquet") for folder in (one, other)]
        assert vocabularies[0].equals(vocabularies[1])
    of_one, of_other = Schema.load(one), Schema.load(other)
    assert {n: [shard.digest for shard in s.shards] for n, s in of_one.splits.items()} == {
        n: [shard.digest for shard in s.shards] for n, s in of_other.splits.items()
    }


BAD = {
    "not json": "the line is no JSON (",
    '{"click": 1, "user": NaN}': "the line is no JSON (",
    "[1, 2]": "the line is no JSON object",
    "": "the line is blank",
    '{"click": 1, "user": ' + "[" * 70 + "]" * 70 + "}": "more than 64 brackets",
    '{"click": 2, "user": "a", "tags": []}': "click",
    '{"click": 1, "user": "a", "price": "much", "tags": []}': "price",
}


@pytest.mark.parametrize("line", BAD)
def test_a_bad_line_is_named_or_skipped(tmp_path, line):
    rows = list(objects(40))
    path = write(tmp_path / "log.jsonl", [*rows[:20], line, *rows[20:]])
    with pytest.raises(DatasetError) as raised:
        made(tmp_path, path)
    assert "log.jsonl:21: " in str(raised.value)
    assert BAD[line] in str(raised.value)
    out = made(tmp_path, path, on_bad_line="skip")
    assert sum(split.examples for split in Schema.load(out).splits.values()) == 40
    assert (out / "bad_lines.tsv").read_text().splitlines()[1].split("\t")[1] == "21"
    if BAD[line].startswith("the line"):
        with pytest.raises(DatasetError, match=r"log.jsonl:21: the line"):
            list(read_batches(path, ["user"], 7))


def test_types_are_those_of_the_values(tmp_path):
    rows = [{"a": 1, "b": 2**70, "c": 1.5, "d": "x", "e": [1, 2], "f": [1, "x"], "g": True}, {"a": 2.5, "c": 7, "d": 7}]
    path = write(tmp_path / "log.ndjson", rows)
    assert is_table(str(path))
    types = {name: str(dtype) for name, dtype in column_types(str(path)).items()}
    assert types == {
        "a": "double", "b": "string", "c": "double", "d": "string", "e": "list<item: int64>",
        "f": "list<item: string>", "g": "bool",
    }  # fmt: skip
    (batch,) = read_batches(path, ["d", "b", "f"], 10)
    assert batch.to_pydict() == {"d": ["x", "7"], "b": [str(2**70), None], "f": [["1", "x"], None]}
    with pytest.raises(DatasetError, match="column 'e' has lists and other values"):
        column_types(str(write(tmp_path / "mixed.jsonl", [{"e": [1]}, {"e": 1}])))
    assert not json_lines.is_json_lines(str(write(tmp_path / "log.csv", ['{"a"', "b"])))


def test_the_command_prepares_trains_and_scores_them(tmp_path):
    path = write(tmp_path / "log.jsonl", objects())
    (tmp_path / "schema.toml").write_text(SCHEMA)
    arguments = ["--schema", str(tmp_path / "schema.toml"), "--input", str(path), "--quiet"]
    assert cli.main(["prepare", "csv", *arguments, "--out", str(tmp_path / "data")]) == 0
    text = f"[data]\npath = '{tmp_path / 'data'}'\n[model]\nbottom_mlp = [16]\n[log]\nprogress = 'off'\n"
    (tmp_path / "run.toml").write_text(f"{text}tensorboard = false\n")
    keys = [f"out={tmp_path / 'run'}", "max_steps=2", "data.batch_size=32"]
    assert cli.main(["train", str(tmp_path / "run.toml"), *keys]) == 0
    scores = []
    for name in ("jsonl", "parquet"):
        new = tmp_path / f"new.{name}"
        if name == "jsonl":
            write(new, objects(50))
        else:
            (batch,) = read_batches(tmp_path / "new.jsonl", ["click", "user", "tags", "price"], 100)
            pq.write_table(pa.Table.from_batches([batch]), new)
        out = tmp_path / f"scores_{name}.parquet"
        assert cli.main(["predict", str(tmp_path / "run"), str(new), "--out", str(out), "--quiet"]) == 0
        scores.append(pq.read_table(out)["score"].to_numpy())
    np.testing.assert_array_equal(*scores)


def test_columns_are_told_once_until_the_file_changes(tmp_path, monkeypatch):
    """Preparing opens a file several times, each of which would decode its first megabytes."""
    path, decoded = write(tmp_path / "log.jsonl", [{"a": 1}, {"a": 2}]), []
    objects_of = json_lines._objects
    monkeypatch.setattr(json_lines, "_objects", lambda block: decoded.append(block) or objects_of(block))
    for _ in range(3):
        assert column_types(str(path)) == {"a": pa.int64()}
    assert len(decoded) == 1
    write(path, [{"a": "x", "b": 0.5}])
    assert column_types(str(path)) == {"a": pa.string(), "b": pa.float64()}
    assert len(decoded) == 2


def test_a_file_that_is_not_there_is_named(tmp_path):
    for name in ("absent.jsonl", "absent.parquet"):
        with pytest.raises(DatasetError, match=name):
            column_types(str(tmp_path / name))
