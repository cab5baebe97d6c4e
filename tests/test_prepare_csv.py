"""``jrec prepare csv``: any columns, described by a schema file."""

import csv
import dataclasses
import io
import json
import re

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from prepare_reference import bounds, check_table, read_dataset

from jrec.data.schema import DatasetError, Schema
from jrec.prepare.prepare import prepare
from jrec.prepare.prepare_options import PrepareOptions
from jrec.prepare.readers import Delimited, load_schema

SCHEMA = """
name = "shop"

[label]
column = "stars"
positive_at_least = 4

[time]
column = "at"

[[dense]]
column = "price"
transform = "log1p"
missing = 0

[[dense]]
column = "balance"
name = "account"
transform = "signed_log1p"

[[categorical]]
column = "item"

[[categorical]]
column = "history"
table = "item"
separator = "|"

[[categorical]]
column = "tags"
separator = ";"
weights = "strengths"
max_length = 2
too_long = "last"
"""
HEADER = ["at", "item", "history", "unused", "tags", "strengths", "price", "balance", "stars"]
ITEMS = st.sampled_from(["", "a", "b", "12345678", "an item with a long name", "ünï", 'quo"ted', "com,ma"])
TAGS = st.lists(
    st.tuples(st.sampled_from(["x", "y", "some long tag"]), st.integers(-8, 8).map(lambda i: i / 4)), max_size=4
)
ROW = st.fixed_dictionaries(
    {
        "at": st.integers(-3, 5),
        "item": ITEMS,
        "history": st.lists(ITEMS.filter(bool), max_size=3),
        "unused": st.text("abc, ", max_size=5),
        "tags": TAGS,
        "price": st.one_of(st.none(), st.floats(-10, 1e6)),
        "balance": st.floats(-1e30, 1e30),
        "stars": st.floats(0, 5),
    }
)


def write(path, rows):
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(HEADER)
    for row in rows:
        writer.writerow([
            row["at"], row["item"], "|".join(row["history"]), row["unused"], ";".join(t for t, _ in row["tags"]),
            ";".join(repr(w) for _, w in row["tags"]), "" if row["price"] is None else repr(row["price"]),
            repr(row["balance"]), repr(row["stars"]),
        ])  # fmt: skip
    path.write_text(file.getvalue(), encoding="utf-8")


@hypothesis.settings(max_examples=60)
@hypothesis.given(
    st.lists(ROW, min_size=2, max_size=30),
    st.integers(1, 3),
    st.integers(1, 7),
    st.integers(1, 4),
    st.integers(20, 500),
)
def test_random_logs(tmp_path_factory, rows, min_count, block_size, shard_blocks, block_bytes):
    folder = tmp_path_factory.mktemp("csv")
    half = len(rows) // 2
    for row, stars in zip(sorted(rows, key=lambda row: row["at"]), (0.0, 5.0), strict=False):
        row["stars"] = stars  # training needs both labels
    write(folder / "day_1.csv", rows[:half])
    write(folder / "day_2.csv", rows[half:])
    (folder / "schema.toml").write_text(SCHEMA)
    options = PrepareOptions(
        min_count=min_count, block_size=block_size, shard_examples=block_size * shard_blocks, split=(0.5, 0.2, 0.3)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jrec.prepare.readers.lines.BLOCK_BYTES", block_bytes)
        source = Delimited(load_schema(str(folder / "schema.toml")))
        files = [str(folder / "day_1.csv"), str(folder / "day_2.csv")]
        schema = prepare(source, files, folder / "out", options)
    _, columns = read_dataset(folder / "out")
    rows = sorted(rows, key=lambda row: row["at"])
    assert columns["label"] == [float(row["stars"] >= 4) for row in rows]
    prices = [np.log1p(max(row["price"] or 0, 0)) for row in rows]
    np.testing.assert_array_equal(columns["price"], np.array(prices).astype(np.float32))
    balances = np.array([row["balance"] for row in rows])
    expected = (np.sign(balances) * np.log1p(np.abs(balances))).astype(np.float32)
    np.testing.assert_array_equal(columns["account"], expected)
    train = bounds(len(rows), options.split)[0]
    items = {"item": [row["item"] for row in rows], "history": [row["history"] for row in rows]}
    check_table(folder / "out", schema, "item", items, columns, train, min_count)
    tags = {"tags": [[t for t, _ in row["tags"][-2:]] for row in rows]}
    check_table(folder / "out", schema, "tags", tags, columns, train, min_count)
    assert columns["tags:weight"] == [[w for _, w in row["tags"][-2:]] for row in rows]
    by_name = {f.name: f for f in schema.categorical}
    assert by_name["item"].one_hot
    assert by_name["history"].max_length == max(1, *(len(row["history"]) for row in rows))
    assert (by_name["tags"].max_length, by_name["tags"].weighted) == (2, True)
    for split in schema.splits.values():
        assert all(shard.examples == options.shard_examples for shard in split.shards[:-1])


def run(tmp_path, schema, content, **options):
    (tmp_path / "schema.toml").write_text(schema)
    (tmp_path / "log").write_bytes(content if isinstance(content, bytes) else content.encode())
    source = Delimited(load_schema(str(tmp_path / "schema.toml")))
    return prepare(source, [str(tmp_path / "log")], tmp_path / "out", PrepareOptions(split=(1, 0, 0), **options))


SMALL = """
columns = ["y", "x", "c"]
label.column = "y"
[[dense]]
column = "x"
[[categorical]]
column = "c"
"""
LISTS = """
delimiter = "\\t"
label.column = "y"
[[categorical]]
column = "c"
separator = ","
max_length = 2
weights = "w"
"""


def test_columns_of_a_file_without_header(tmp_path):
    schema = run(tmp_path, SMALL, "1,0.5,a\n0,-2,b\n1.0,1e3,a\n", min_count=1)
    _, columns = read_dataset(tmp_path / "out")
    assert columns == {"label": [1, 0, 1], "x": [0.5, -2, 1000], "c": [0, 1, 0]}
    assert schema.name == "csv"


def test_fixed_length(tmp_path):
    schema = LISTS.replace('weights = "w"', "fixed_length = true")
    made = run(tmp_path, schema, "y\tc\n1\ta,b\n0\tb,b\n", min_count=1)
    assert made.categorical[0].fixed_length
    assert read_dataset(tmp_path / "out")[1]["c"] == [[1, 0], [0, 0]]
    with pytest.raises(DatasetError, match="has fewer than 2 values, but fixed_length is set"):
        run(tmp_path, schema, "y\tc\n1\ta\n", overwrite=True)
    assert read_dataset(tmp_path / "out")[1]["c"] == [[1, 0], [0, 0]]


@pytest.mark.parametrize(
    ("schema", "content", "message"),
    [
        (SMALL, "1,,a\n", r"log:1: field 'x' is blank"),
        (SMALL, "1,2,a\n,2,a\n", r"log:2: field 'y' is blank"),
        (SMALL, "1,1e39,a\n", r"log:1: field 'x' holds '1e39', which is too large for float32"),
        (SMALL, "1,nan,a\n", r"log:1: field 'x' holds 'nan', which is not a finite number"),
        (SMALL, "0.5,1,a\n", r"log:1: field 'y' holds '0.5', which is neither 0 nor 1"),
        (SMALL, b"1,1,\xff\n", r"log:1: field 'c' holds '\\\\xff', which is not UTF-8 text"),
        (SMALL, b"1,1,a\0\n", r"log:1: field 'c' holds .*, which holds a NUL byte"),
        (SMALL, '1,1,"a\n', r"log:1: field 'c' opens a quote that is not closed"),
        (SMALL, "", "is empty"),
        (LISTS, "y\tc\tw\n", "no example in"),
        (LISTS, "y\tc\n1\ta\n", r"log:1: the header lacks column\(s\) w; it has y, c"),
        (LISTS, "y\tc\tw\ty\n1\ta\t1\t0\n", r"log:1: the header has column\(s\) y more than once"),
        (LISTS, "y\tc\tw\n1\ta,b,c\t1,2,3\n", "'c' holds 'a,b,c', which has more than max_length = 2 values"),
        (LISTS, "y\tc\tw\n1\ta,b\t1\n", "'w' holds '1', which is not one weight for each value of 'c'"),
        (LISTS, "y\tc\tw\n1\ta,b\t1,x\n", "'w' holds '1,x', which is not a number"),
        (LISTS, "y\tc\tw\n1\ta,b\t1,1e999\n", "'w' holds '1,1e999', which is not a finite number"),
        (LISTS, "y\tc\tw\n1\ta,b\t1,1e39\n", "'w' holds '1,1e39', which has a weight too large for float32"),
    ],
)
def test_bad_content(tmp_path, schema, content, message):
    with pytest.raises(DatasetError, match=message):
        run(tmp_path, schema, content)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log", "schema.toml"]


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("label = 3", "label must be a table or nothing, but is 3"),
        ("", r"there is no \[\[categorical\]\] feature, but jrec trains embedding tables"),
        ("[label]", "label.column is missing"),
        ("label.column = 1", "label.column must be a string, but is 1"),
        ("x = [", "not valid TOML"),
        ("label.colum = 'y'", "label.column is missing, but there is colum"),
        ("label.column = 'y'\n[[dense]]\ncolumn = 'x'", r"there is no \[\[categorical\]\] feature, .*quantiles"),
        ("label.column = 'y'\ndelimitr = ';'", "unknown key delimitr; did you mean delimiter"),
        ("label.column = 'y'\n[dense]\ncolumn = 'x'", "dense must be an array, but is a table"),
        ("label.column = 'y'\n[[dense]]\ncolumn = 'y'", r"column\(s\) y are used more than once"),
        ("label.column = 'y'\n[[dense]]\ncolumn = 'x'\ntransform = 'log'", "'log'; choose one of none, log1p"),
        ("label.column = 'y'\n[[dense]]\ncolumn = 'x'\nmissing = nan", r"dense\[0\].missing must be a finite number"),
        (
            "label.column = 'y'\n[[categorical]]\ncolumn = 'c'\nmax_length = 3",
            "max_length is for lists; give a separator",
        ),
        ("label.column = 'y'\n[[categorical]]\ncolumn = 'c'\ntable = '../c'", "'../c' cannot name a feature or table"),
        ("label.column = 'y'\n[[categorical]]\ncolumn = 'c'\nname = 'label'", r"feature name\(s\) label occur"),
        ("delimiter = ''\nlabel.column = 'y'\n[[dense]]\ncolumn = 'x'", "delimiter is ''; it must be non-empty"),
        ("columns = ['y']\nlabel.column = 'y'\n[[dense]]\ncolumn = 'x'", r"column\(s\) x are not among columns"),
        (
            "label.column = 'y'\n[[categorical]]\ncolumn = 'c'\nseparator = '|'\ntoo_long = 'last'",
            "too_long = 'last' needs a max_length",
        ),
    ],
)
def test_bad_schemas(tmp_path, schema, message):
    (tmp_path / "schema.toml").write_text(schema)
    with pytest.raises(DatasetError, match=message):
        load_schema(str(tmp_path / "schema.toml"))


def test_a_dataset_of_numbers_alone_is_refused_where_it_is_opened(tmp_path):
    """As an earlier jrec prepared it; training ended in a division by zero."""
    schema = run(tmp_path, LISTS, b"y\tc\tw\n" + b"1\ta\t1\n0\tb\t2\n" * 5)
    dataclasses.replace(schema, categorical=(), tables=()).save(tmp_path / "out")
    with pytest.raises(DatasetError, match=r"out has no categorical feature, but .*quantiles = 64\); then prepare it"):
        Schema.load(tmp_path / "out", check_files=False)


def test_json_says_the_same_as_toml(tmp_path):
    (tmp_path / "schema.toml").write_text(LISTS)
    tree = {"delimiter": "\t", "label": {"column": "y"}}
    tree["categorical"] = [{"column": "c", "separator": ",", "max_length": 2, "weights": "w"}]
    (tmp_path / "schema.json").write_text(json.dumps(tree))
    assert load_schema(str(tmp_path / "schema.json")) == load_schema(str(tmp_path / "schema.toml"))
    with pytest.raises(DatasetError, match="cannot be read: No such file"):
        load_schema(str(tmp_path / "absent.toml"))


@pytest.mark.parametrize("delimiter", [",", "::"])
@pytest.mark.parametrize(
    ("value", "shown"), [("2", "2"), ('"2{0}3"', "2{0}3"), ('"2""{0}3"', '2"{0}3'), ('"2"', "2"), ('"?"', "?")]
)
def test_messages_show_the_value_of_lines_with_quoted_delimiters(tmp_path, delimiter, value, shown):
    schema = f'delimiter = "{delimiter}"\n[label]\ncolumn = "y"\n[[categorical]]\ncolumn = "c"\n'
    value, shown = value.format(delimiter), repr(shown.format(delimiter))
    line = delimiter.join([f'"a{delimiter}""b"', value, f'"{delimiter}"'])
    with pytest.raises(DatasetError, match=re.escape(f"log:2: field 'y' holds {shown}, which is neither 0 nor 1")):
        run(tmp_path, schema, delimiter.join("cyz") + f"\n{line}\r\n")


@pytest.mark.parametrize("name", ["user", "a long name of a column"])
def test_a_header_in_the_middle_is_a_bad_line_whatever_its_columns_are(tmp_path, name):
    schema = f'[label]\ncolumn = "y"\npositive_values = ["buy"]\n[[categorical]]\ncolumn = "{name}"\n'
    header, rows = f'{name},"y"', f"{name},buy\nb,view\n"
    content = f"{header}\n{rows}{header}\n{rows}"
    with pytest.raises(DatasetError, match=f"log:4: field '{name}' holds '{name}', .*; the line repeats the header"):
        run(tmp_path, schema, content)
    run(tmp_path, schema, content, on_bad_line="skip", labels=False)
    kept = (tmp_path / "out" / "bad_lines.tsv").read_text()
    assert kept.count("\n") == 2
    assert kept.endswith(f"\t{header}\n")
