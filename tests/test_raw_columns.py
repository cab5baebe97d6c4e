"""Columns of raw values: those that are read as one give what each gives by itself."""

import dataclasses
import itertools

import hypothesis
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import strategies as st

from jrec.data.keys import text_key
from jrec.data.schema import DatasetError, Schema
from jrec.data.spans import NO_TIME
from jrec.prepare.encoder import Encoder
from jrec.prepare.joined import csv_source
from jrec.prepare.prepare import prepare
from jrec.prepare.prepare_options import PrepareOptions
from jrec.prepare.raw_columns import parsed_columns
from jrec.prepare.readers import load_schema
from jrec.prepare.readers.columnar import _numbers
from jrec.prepare.readers.parse import Field

TEXTS = st.sampled_from(["", "-", "ab12ef90", "AB12EF90", "1", "-2.5", "u17", "a long text of a value", "1e400", "nan"])
VALUES = (
    TEXTS,
    st.one_of(TEXTS, st.none()),
    st.none(),
    st.integers(-(2**63), 2**64 - 1),
    st.integers(-5, 5),
    st.floats(),
    st.booleans(),
    st.booleans().map(np.bool_),
    st.binary(max_size=3),
    st.one_of(TEXTS, st.integers(0, 3), st.floats(0, 1), st.booleans(), st.none()),
    st.lists(st.integers(0, 3), max_size=2),
)
FIELDS = [
    Field(name=f"{kind} {number}{mark}", kind=kind, missing=(mark,) if mark else (), blank=not number)
    for kind, number, mark in itertools.product(("number", "hex", "text"), (0, 1), ("", "-"))
]
FIELDS += [dataclasses.replace(field, name=f"{field.name}, again") for field in FIELDS]

LOG_SCHEMA = """
[label]
column = "y"
[time]
column = "t"
format = "seconds"
[[dense]]
column = "price"
transform = "log1p"
[[dense]]
column = "half"
transform = "log1p"
[[categorical]]
column = "bucket"
quantiles = 4
[[categorical]]
column = "tags"
lists = true
max_length = 2
weights = "strengths"
[[categorical]]
column = "t"
name = "hour"
part = "hour"
"""


def read(fields, columns):
    """What columns are read as, or what is said about them."""
    try:
        parsed = parsed_columns(fields, columns, 3)
    except (DatasetError, ValueError) as error:
        return str(error)
    return {name: (column.dtype, column.tobytes()) for name, column in parsed.columns.items()}


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=200)
def test_columns_that_are_read_as_one_are_as_each_by_itself(data):
    fields = data.draw(st.lists(st.sampled_from(FIELDS), min_size=2, max_size=5, unique=True))
    rows = data.draw(st.integers(0, 4))
    kinds = {f.name: data.draw(st.sampled_from(VALUES)) for f in fields}
    columns = {name: data.draw(st.lists(kind, min_size=rows, max_size=rows)) for name, kind in kinds.items()}
    alone = [read([f], {f.name: tuple(columns[f.name])}) for f in fields]  # tuples are not read as one
    if wrong := [said for said in alone if isinstance(said, str)]:
        assert read(fields, columns) in wrong
    else:
        assert read(fields, columns) == {name: column for one in alone for name, column in one.items()}


@pytest.mark.parametrize("beside", [1, None, 2.5, -5, "3"])
def test_a_number_past_64_bits_is_that_of_its_text(beside):
    """As JSON has it."""
    field, weights = Field(name="price", kind="number"), Field(name="weights", kind="weights")
    columns = {"price": [2**63, -(2**70), beside], "weights": [[2**64, 1.5], [], []]}
    read = parsed_columns([field, weights], columns, 0).columns
    np.testing.assert_array_equal(read["price"], [2.0**63, -(2.0**70), np.nan if beside is None else float(beside)])
    np.testing.assert_array_equal(read["weights"].values, [2.0**64, 1.5])


def test_booleans_beside_integers_are_no_integers():
    first, second = Field(name="first", kind="text"), Field(name="second", kind="text")
    columns = {"first": [np.True_], "second": [1]}
    wanted = {"first": text_key("true"), "second": text_key("1")}
    assert {n: int(k[0]) for n, k in parsed_columns([first, second], columns, 0).columns.items()} == wanted


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """A dataset of a table in memory, and the table."""
    folder = tmp_path_factory.mktemp("log")
    (folder / "schema.toml").write_text(LOG_SCHEMA)
    rng, rows = np.random.default_rng(0), 400
    table = pa.table({
        "y": rng.integers(0, 2, rows),
        "t": 1.7e9 + 3600.0 * np.arange(rows),
        "price": rng.random(rows, np.float32),
        "half": rng.random(rows).astype(np.float16),
        "bucket": (rng.integers(0, 10, rows) / 10).astype(np.float32),
        "tags": [(["a", None], [None], ["b", "a"], [], None, [""])[k % 6] for k in range(rows)],
        "strengths": [([1.0, 2.0], [None], [0.5, 1.0], [], None, [float("nan")])[k % 6] for k in range(rows)],
    })  # fmt: skip
    prepare(csv_source(load_schema(str(folder / "schema.toml"))), table, folder / "data", PrepareOptions(min_count=1))
    return Encoder(Schema.load(folder / "data")), table


def forms(table):
    texts = ("tags", "strengths")
    numpy = {name: table[name].to_pylist() if name in texts else table[name].to_numpy() for name in table.column_names}
    return {"arrow": table, "pandas": table.to_pandas(), "numpy": numpy}


@pytest.mark.parametrize("form", ["arrow", "pandas", "numpy"])
def test_columns_mean_what_preparation_read(log, form):
    """float32 is its shortest decimal, in buckets of quantiles above all, and a list of one missing value is empty."""
    encoder, table = log
    (prepared,) = encoder.stream(table, batch_size=table.num_rows)
    encoded = encoder.columns(forms(table)[form])
    assert encoder.schema.categorical[0].boundaries == (0.2, 0.5, 0.7)
    np.testing.assert_array_equal(encoded.dense, prepared.dense)
    for name, column in prepared.ids.items():
        for wanted, read_rows in zip(column, encoded.ids[name], strict=True):
            np.testing.assert_array_equal(read_rows, wanted, name)
    np.testing.assert_array_equal(encoded.weights["tags"], prepared.weights["tags"])
    assert np.diff(prepared.ids["tags"].offsets)[:6].tolist() == [2, 0, 2, 0, 0, 0]


@pytest.mark.parametrize(
    "times",
    [
        np.array([np.nan, 1.7e9]),
        pa.array([float("nan"), 1.7e9]),
        [None, 1.7e9],
        [pd.NaT, pd.Timestamp("2024-05-06", tz="UTC")],
    ],
)
def test_a_time_that_is_nan_is_missing(log, times):
    encoder, table = log
    columns = {**table.slice(0, 2).to_pydict(), "t": times}
    (missing, known) = encoder.columns(columns).ids["hour"]
    assert missing == encoder.schema.table("hour").oov_row != known


def test_nanoseconds_are_cut_downwards_before_1970_too():
    moments = np.array([-1, -1001, 1999, 0], np.int64)
    field = Field(name="t", kind="time", unit="iso")
    read, codes, absent = _numbers(field, pa.array(moments, pa.timestamp("ns"), mask=np.arange(4) == 3))
    assert read.tolist() == [-1, -2, 1, NO_TIME]
    assert (codes.tolist(), absent.tolist()) == ([0] * 4, [False] * 3 + [True])
    columns = {"t": moments[:3].view("datetime64[ns]")}
    assert parsed_columns([field], columns, 0).columns["t"].tolist() == [-1, -2, 1]
