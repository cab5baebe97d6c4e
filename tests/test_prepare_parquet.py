"""Parquet files as inputs of the csv format: the datasets that the same data make as text, and clear errors."""

import csv
import datetime
import os
import pathlib
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prepare_reference import read_dataset, read_vocabulary
from shop_logs import SCHEMA, write_log

from jrec.data.encoder import Encoder
from jrec.data.prepare import prepare
from jrec.data.prepare_options import PrepareOptions
from jrec.data.readers import Criteo, Delimited, load_schema
from jrec.data.schema import DatasetError, Schema


def source(folder, schema):
    (folder / "schema.toml").write_text(schema)
    return Delimited(load_schema(str(folder / "schema.toml")))


def made(folder, name, schema, *files, **options):
    prepare(source(folder, schema), list(map(str, files)), folder / name, PrepareOptions(**options))
    return folder / name


def shards(folder):
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in pathlib.Path(folder).rglob("*")
        if p.is_file() and p.name != "schema.json"
    }


def arrow_table(lines):
    """The lines of the shop's log in the types that a writer of Parquet would choose."""
    texts = {name: [line[name] for line in lines] for name in lines[0]}
    lists = {name: [one.split("|") if one else [] for one in texts[name]] for name in ("history", "strengths")}
    return pa.table({
        "click": pa.array(list(map(int, texts["click"])), pa.int8()),
        "price": pa.array([float(p) if p else None for p in texts["price"]]),
        "left_out": pa.array([{"any": "thing"}] * len(lines)),
        "user": pa.array(texts["user"]).dictionary_encode(),
        "item": pa.array(texts["item"], pa.large_string()),
        "history": pa.array([one or None for one in lists["history"]], pa.list_(pa.string())),
        "strengths": pa.array([list(map(float, one)) for one in lists["strengths"]], pa.large_list(pa.float64())),
    })  # fmt: skip


def test_the_dataset_is_that_of_the_text(tmp_path, monkeypatch):
    lines = write_log(tmp_path / "log.csv", 700)
    table = arrow_table(lines)
    pq.write_table(table[:400], tmp_path / "1.parquet", row_group_size=150)
    pq.write_table(table[400:], tmp_path / "2.parquet", compression="zstd")
    options = {"block_size": 64, "shard_examples": 256}
    of_text = made(tmp_path, "of_text", SCHEMA, tmp_path / "log.csv", **options)
    monkeypatch.setattr("jrec.data.readers.lines.BLOCK_BYTES", 4000)  # many pieces of a row group
    files = tmp_path / "1.parquet", tmp_path / "2.parquet"
    of_parquet = made(tmp_path, "of_parquet", SCHEMA.replace('separator = "|"', "lists = true"), *files, **options)
    assert shards(of_parquet) == shards(of_text)
    encoded = list(Encoder(Schema.load(of_text)).stream([str(files[0])], batch_size=1000))
    np.testing.assert_array_equal(encoded[0].labels, [float(line["click"]) for line in lines[:400]])


def test_a_pipe_of_a_file(tmp_path):
    pq.write_table(pa.table({"y": [0, 1] * 5, "c": ["a", "b"] * 5}), tmp_path / "log")
    os.mkfifo(tmp_path / "pipe")
    pq.write_table(
        pa.table({"y": [0, 1] * 50, "c": ["a"] * 100}), tmp_path / "sums", row_group_size=60, write_page_checksum=True
    )
    content = bytearray((tmp_path / "sums").read_bytes())
    content[pq.read_metadata(tmp_path / "sums").row_group(1).column(1).data_page_offset + 40] ^= 1
    (tmp_path / "sums").write_bytes(content)
    with pytest.raises(
        DatasetError, match=r"sums is a damaged .*: .*CRC.* \(row group 2, column 'c'\); download or copy"
    ):
        made(tmp_path, "out", SMALL, tmp_path / "sums")
    content = (tmp_path / "log").read_bytes()
    threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(content,), daemon=True).start()
    assert shards(made(tmp_path, "out", SMALL, tmp_path / "pipe")) == shards(
        made(tmp_path, "o", SMALL, tmp_path / "log")
    )


def test_types_of_values(tmp_path):
    columns = {
        "y": pa.array([True, False, True, False]),
        "x": pa.array([np.nan, 0.1, None, 3.0], pa.float32()),
        "flag": pa.array([True, None, False, True]),
        "gaps": pa.array([7.0, np.nan, 2.5, 123456789012.0]),
        "day": pa.array([datetime.date(2024, 5, 1)] * 4),
        "bytes": pa.array([b"ab", b"", None, b"c"]),
        "few": pa.array([[1, 2], [], None, [None, 3]], pa.list_(pa.int64())),
    }
    pq.write_table(pa.table(columns), tmp_path / "log.parquet")
    categorical = "".join(f'[[categorical]]\ncolumn = "{c}"\n' for c in ("flag", "gaps", "day", "bytes", "few"))
    schema = '[label]\ncolumn = "y"\n[[dense]]\ncolumn = "x"\nmissing = -1\n' + categorical + "lists = true\n"
    folder = made(tmp_path, "out", schema, tmp_path / "log.parquet", min_count=1, split=(1, 0, 0))
    dataset, read = read_dataset(folder)
    assert read["label"] == [1, 0, 1, 0]
    assert read["x"] == [-1, np.float32(0.1), -1, 3]
    values = {name: read_vocabulary(folder, dataset.table(name))[0] for name in ("flag", "gaps", "day", "bytes", "few")}
    assert [values["flag"][i] for i in read["flag"]] == ["true", "", "false", "true"]
    assert [values["gaps"][i] for i in read["gaps"]] == ["7", "", "2.5", "123456789012"]
    assert [values["day"][i] for i in read["day"]] == ["2024-05-01"] * 4
    assert [values["bytes"][i] for i in read["bytes"]] == ["ab", "", "", "c"]
    assert [[values["few"][i] for i in one] for one in read["few"]] == [["1", "2"], [], [], ["", "3"]]


SMALL = '[label]\ncolumn = "y"\n[[categorical]]\ncolumn = "c"\n'


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (["a", "b\nc"], r"log:2: the line has 4 field\(s\) where 3 are expected, since a text in it holds a line end"),
        (["a", "b\x1fc"], "log:2: the line has 4 field"),
        ([["a"], ["b"]], "column 'c' holds lists, but the schema reads one value a row; .* set lists = true"),
        ([{"d": 1}, {"d": 2}], "column 'c' holds struct<d: int64>, which cannot be a category; cast it"),
        ([[[1]], [[2]]], "column 'c' holds lists of lists; flatten them first"),
    ],
)
def test_columns_that_cannot_be_read(tmp_path, column, message):
    pq.write_table(pa.table({"y": [0, 1], "c": column}), tmp_path / "log")
    with pytest.raises(DatasetError, match=message):
        made(tmp_path, "out", SMALL, tmp_path / "log", split=(1, 0, 0))


def test_a_list_whose_value_holds_the_mark_is_a_bad_row(tmp_path):
    pq.write_table(pa.table({"y": [0, 1, 1], "c": [["a"], ["b\x1ec"], ["d", "e"]]}), tmp_path / "log")
    folder = made(
        tmp_path, "out", SMALL + "lists = true\n", tmp_path / "log", split=(1, 0, 0), on_bad_line="skip", min_count=1
    )
    assert [len(one) for one in read_dataset(folder)[1]["c"]] == [1, 2]
    rows = list(csv.reader((folder / "bad_lines.tsv").read_text().split("\n"), delimiter="\t"))
    assert rows[1][:2] == [str(tmp_path / "log"), "2"]


def test_files_that_cannot_be_read(tmp_path):
    pq.write_table(pa.table({"y": [0.5], "d": ["a"]}), tmp_path / "log")
    with pytest.raises(DatasetError, match=r"log: the file lacks column\(s\) c; it has y"):
        made(tmp_path, "out", SMALL, tmp_path / "log")
    with pytest.raises(DatasetError, match=r"log:1: field 'y' holds '0\.5', which is neither 0 nor 1"):
        made(tmp_path, "out", SMALL.replace('"c"', '"d"'), tmp_path / "log", split=(1, 0, 0))
    with pytest.raises(DatasetError, match="is a Parquet file, which only the format csv reads"):
        prepare(Criteo("criteo-kaggle"), [str(tmp_path / "log")], tmp_path / "out")
    content = (tmp_path / "log").read_bytes()
    (tmp_path / "log").write_bytes(content[:-20])
    with pytest.raises(DatasetError, match=r"log is a damaged Parquet file: .*; download or copy it again"):
        made(tmp_path, "out", SMALL, tmp_path / "log")
    (tmp_path / "log").write_text("y,c\n1,a\n")
    with pytest.raises(DatasetError, match=r"log:2: field 'c' holds 'a', which is no list such as \["):
        made(tmp_path, "out", SMALL + "lists = true\n", tmp_path / "log")
