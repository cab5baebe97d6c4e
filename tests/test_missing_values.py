"""Values that are missing in requests and logs to predict, though no line of training may lack them."""

import dataclasses

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jrec.data import Encoder
from jrec.data.schema import DatasetError, Schema
from jrec.prepare.joined import csv_source
from jrec.prepare.prepare import prepare
from jrec.prepare.prepare_options import PrepareOptions
from jrec.prepare.readers import load_schema

SCHEMA = """
missing_values = ["", "NA"]
[label]
column = "y"
[time]
column = "t"
format = "iso"
""" + "".join(
    f'[[dense]]\ncolumn = "{name}"\ntransform = "{transform}"\n'
    for name, transform in (("none", "none"), ("log", "log1p"), ("signed", "signed_log1p"), ("standard", "standardize"))
) + """
[[dense]]
column = "stated"
missing = 7
[[categorical]]
column = "t"
part = "hour"
[[categorical]]
column = "c"
[[categorical]]
column = "q"
quantiles = 2
[[categorical]]
column = "l"
separator = "|"
max_length = 2
fixed_length = true
weights = "w"
[[join]]
file = "side.csv"
key = "c"
[[join.dense]]
column = "size"
[[join.categorical]]
column = "pair"
separator = "|"
max_length = 2
fixed_length = true
"""  # fmt: skip
NUMBERS = ("none", "log", "signed", "standard", "stated")
ROWS = 40


def columns_of(rows=ROWS, seed=1):
    rng = np.random.default_rng(seed)
    numbers = {name: rng.normal(3, 2, rows).round(3) for name in NUMBERS}
    numbers["log"] = np.abs(numbers["log"])
    lists = [[str(k), str(k + 1)] for k in rng.integers(0, 5, rows)]
    times = [f"2024-05-{1 + k // 24:02d} {k % 24:02d}:00" for k in range(rows)]
    return {
        "y": rng.integers(0, 2, rows), "t": times, **numbers, "c": [f"c{k}" for k in rng.integers(0, 4, rows)],
        "q": rng.normal(size=rows), "l": lists, "w": [[0.5, 2.0]] * rows,
    }  # fmt: skip


def write(path, columns):
    texts = {n: ["|".join(map(str, v)) if isinstance(v, list) else v for v in c] for n, c in columns.items()}
    lines = [",".join(texts), *(",".join(map(str, line)) for line in zip(*texts.values(), strict=True))]
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture
def dataset(tmp_path):
    write(tmp_path / "log", columns_of())
    sizes = "".join(f"c{k},{k},{k}|{k + 1}\n" for k in range(4))
    (tmp_path / "side.csv").write_text("c,size,pair\n" + sizes)
    (tmp_path / "schema.toml").write_text(SCHEMA)
    source = csv_source(load_schema(str(tmp_path / "schema.toml")))
    prepare(source, [str(tmp_path / "log")], tmp_path / "out", PrepareOptions(min_count=1, threads=1))
    return tmp_path / "out"


def raw(columns):
    return {**columns, "l:weight": columns["w"]} | {
        "size": [1.0] * len(columns["y"]),
        "pair": [["1", "2"]] * len(columns["y"]),
    }


def test_a_missing_number_becomes_the_mean_of_the_transformed_values_in_training(dataset):
    schema, columns = Schema.load(dataset), columns_of()
    train = {name: np.asarray(columns[name])[: int(0.8 * ROWS)] for name in NUMBERS}
    encoder = Encoder(schema)
    full, lacking = raw(columns_of(3, seed=2)), raw(columns_of(3, seed=2))
    for name in (*NUMBERS, "size"):
        lacking[name] = [None, *lacking[name][1:]]
    got, whole = encoder.columns(lacking), encoder.columns(full)
    np.testing.assert_array_equal(got.dense[1:], whole.dense[1:])
    signed = np.sign(train["signed"]) * np.log1p(np.abs(train["signed"]))
    wanted = [train["none"].mean(), np.log1p(train["log"]).mean(), signed.mean(), 0, 7]
    np.testing.assert_allclose(got.dense[0, :5], wanted, rtol=1e-6, atol=1e-7)
    side = [float(name[1:]) for name in columns["c"]][: int(0.8 * ROWS)]
    np.testing.assert_allclose(got.dense[0, 5], np.mean(side), rtol=1e-6)


def test_missing_times_values_and_lists(dataset):
    encoder = Encoder(Schema.load(dataset))
    columns = raw(columns_of(2, seed=2))
    for name in ("t", "c", "q", "l", "l:weight", "w", "pair"):
        columns[name] = [None, columns[name][1]]
    got = encoder.columns(columns)
    unknown = encoder.columns(
        raw(columns_of(2, seed=2)) | {"c": ["", "new"], "l": [["", ""]] * 2, "pair": [["", ""]] * 2}
    )
    for name in ("c", "l", "pair"):
        column = got.ids[name]
        first = column[:1] if isinstance(column, np.ndarray) else column.values[:2]
        other = unknown.ids[name]
        np.testing.assert_array_equal(first, other[:1] if isinstance(other, np.ndarray) else other.values[:2])
    assert got.ids["l"].offsets.tolist() == [0, 2, 4]
    assert got.weights["l"].tolist() == [0, 0, 0.5, 2]
    assert got.ids["t_hour"][0] == encoder.schema.table("t_hour").oov_row
    times = columns | {"t": np.array(["NaT", "2024-05-01T01:00"], "datetime64[us]")}
    np.testing.assert_array_equal(encoder.columns(times).ids["t_hour"], got.ids["t_hour"])
    with pytest.raises(DatasetError, match="column 'w' holds 'no value' in example 0, which is missing; give one"):
        encoder.columns(columns | {"w": [[None, 1.0], [1.0, 1.0]], "l": [["1", "2"]] * 2})


@pytest.mark.parametrize("parquet", [False, True])
def test_a_log_to_predict_may_lack_what_training_may_not(dataset, parquet):
    columns, folder = columns_of(4, seed=2), dataset.parent
    encoder = Encoder(Schema.load(dataset))
    lacking = {name: list(values) for name, values in columns.items()}
    for k, name in enumerate(("t", *NUMBERS, "q", "c")):
        lacking[name][k % 3] = None
    lacking["l"][2] = lacking["w"][2] = []
    lacking["c"][1] = "c2"
    (folder / "side.csv").write_text("c,size,pair\nc0,,\nc1,NA,1|2\nc3,3,3|4\n")
    if parquet:
        pq.write_table(pa.table(lacking), folder / "new")
    else:
        write(folder / "new", {n: ["" if v is None else v for v in c] for n, c in lacking.items()})
    (got,) = encoder.stream(str(folder / "new"), batch_size=10)
    size = {"c3": 3.0}
    pair = {"c1": ["1", "2"], "c3": ["3", "4"]}
    given = lacking | {"size": [size.get(c) for c in lacking["c"]], "pair": [pair.get(c, []) for c in lacking["c"]]}
    want = encoder.columns(given)
    np.testing.assert_array_equal(got.dense, want.dense)
    for name, column in want.by_name().items():
        for a, b in zip(got.by_name()[name], column, strict=True):
            np.testing.assert_array_equal(a, b)


def test_training_still_needs_them(dataset):
    folder, lacking = dataset.parent, columns_of()
    lacking["none"] = ["", *lacking["none"][1:]]
    write(folder / "log", lacking)
    source = csv_source(load_schema(str(folder / "schema.toml")))
    with pytest.raises(DatasetError, match="log:2: field 'none' is blank"):
        prepare(source, [str(folder / "log")], folder / "again", PrepareOptions(vocabulary_from=str(dataset)))


def test_a_later_dataset_keeps_what_the_earlier_one_learnt(dataset):
    folder = dataset.parent
    write(folder / "log", columns_of(seed=3))
    source = csv_source(load_schema(str(folder / "schema.toml")))
    prepare(source, [str(folder / "log")], folder / "later", PrepareOptions(vocabulary_from=str(dataset), threads=1))
    earlier, later = Schema.load(dataset), Schema.load(folder / "later")
    assert [f.missing for f in later.dense] == [f.missing for f in earlier.dense]
    assert later.identity.rows == earlier.identity.rows
    forgotten = tuple(dataclasses.replace(f, missing=None) for f in earlier.dense)  # as of datasets from before
    assert dataclasses.replace(earlier, dense=forgotten).identity.rows == earlier.identity.rows
