"""What a csv schema can say of values: missing ones, labels in words, dates, hours and weekdays."""

import datetime
import fractions
import math

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prepare_reference import read_dataset, read_vocabulary

from jrec.data import spans
from jrec.data.schema import DatasetError, Schema
from jrec.prepare.encoder import Encoder
from jrec.prepare.prepare import prepare
from jrec.prepare.prepare_options import PrepareOptions
from jrec.prepare.readers import Delimited, load_schema


def made(folder, schema, content, **options):
    """The dataset of a log, and its columns; ids as their values."""
    (folder / "schema.toml").write_text(schema)
    if isinstance(content, str):
        (folder / "log").write_text(content)
    else:
        pq.write_table(pa.table(content), folder / "log")
    source = Delimited(load_schema(str(folder / "schema.toml")))
    settings = PrepareOptions(**{"split": (1, 0, 0), "min_count": 1, "overwrite": True, **options})
    prepare(source, [str(folder / "log")], folder / "out", settings)
    dataset, columns = read_dataset(folder / "out")
    for feature in dataset.categorical:
        values = read_vocabulary(folder / "out", dataset.table(feature.table))[0]
        ids = columns[feature.name]
        columns[feature.name] = [[values[i] for i in one] if isinstance(one, list) else values[one] for one in ids]
    return columns


LABEL = '[label]\ncolumn = "y"\n'
MISSING = 'missing_values = ["NA", "\\\\N", "nan", "a missing one", "-1"]\n' + LABEL
FEATURES = """
[[dense]]
column = "x"
missing = -7
[[categorical]]
column = "c"
[[categorical]]
column = "l"
separator = "|"
"""
ROWS = (
    "y,x,c,l\n1,NA,NA,a|NA|b\n0,\\N,a missing one,NA\n1,nan,\\N,\n0,,,a\n1,1e400,x,x\n0,-1,-1,-1|-1\n1,1e-30,nano,y\n"
)


def test_missing_values(tmp_path):
    good = ROWS.replace("1e400", "2.5e3")
    columns = made(tmp_path, MISSING + FEATURES, good)
    np.testing.assert_allclose(columns["x"], [-7, -7, -7, -7, 2500, -7, 1e-30])
    assert columns["c"] == ["", "", "", "", "x", "", "nano"]
    assert columns["l"] == [["a", "", "b"], [], [], ["a"], ["x"], ["", ""], ["y"]]
    raw = {"x": ["NA", "3"], "c": ["a missing one", "x"], "l": [["NA"], ["a", "\\N"]]}
    encoded = Encoder(Schema.load(tmp_path / "out")).columns(raw)
    assert encoded.dense[:, 0].tolist() == [-7, 3]
    values = read_vocabulary(tmp_path / "out", Schema.load(tmp_path / "out").table("c"))[0]
    assert [values[i] for i in encoded.ids["c"]] == ["", "x"]
    assert encoded.ids["l"].offsets.tolist() == [0, 0, 2]


def test_texts_are_values_where_the_schema_does_not_name_them(tmp_path):
    columns = made(tmp_path, LABEL + '[[categorical]]\ncolumn = "c"\n', "y,c\n1,NA\n0,nan\n")
    assert columns["c"] == ["NA", "nan"]


@pytest.mark.parametrize(
    ("schema", "content", "message"),
    [
        (MISSING + FEATURES, ROWS, "log:6: field 'x' holds '1e400', which is not a finite number"),
        (MISSING + FEATURES, ROWS.replace("1e400", "two"), "log:6: field 'x' holds 'two', which is not a number"),
        (
            MISSING + FEATURES.replace("missing = -7", ""),
            ROWS.split("\n1,1e400")[0],
            "log:2: field 'x' holds 'NA', which is a missing value; set missing for it",
        ),
        (
            LABEL + FEATURES,
            ROWS,
            "log:2: field 'x' holds 'NA', which is not a number; if it stands for a missing value, add it to"
            " missing_values in the schema",
        ),
        (LABEL + FEATURES, ROWS.replace("NA", "two"), r"which is not a number\. "),
        (MISSING + FEATURES, ROWS.replace("0,", "maybe,", 1), "log:3: field 'y' holds 'maybe', which is neither 0"),
        (LABEL + FEATURES, "y,x,c,l\n0,1,a,a\n-1,1,a,a\n", "column 'y' holds both 0 and -1"),
    ],
)  # fmt: skip
def test_errors(tmp_path, schema, content, message):
    with pytest.raises(DatasetError, match=message):
        made(tmp_path, schema, content)


@pytest.mark.parametrize(
    ("texts", "labels"),
    [
        ("1 0 1.0 0e0 +1 1.00000000000000000000", [1, 0, 1, 0, 1, 1]),
        ("1 -1 +1 -1.0", [1, 0, 1, 0]),
        ("yes no YES No y N", [1, 0, 1, 0, 1, 0]),
        ("true FALSE t F", [1, 0, 1, 0]),
    ],
)
def test_labels(tmp_path, texts, labels):
    lines = "".join(f"{text},a\n" for text in texts.split())
    assert made(tmp_path, LABEL + '[[categorical]]\ncolumn = "c"\n', "y,c\n" + lines)["label"] == labels


def test_labels_of_any_text(tmp_path):
    schema = LABEL + 'positive_values = ["buy", "add to cart"]\n[[categorical]]\ncolumn = "c"\n'
    columns = made(tmp_path, schema, 'y,c\nbuy,a\nview,a\n"add to cart",a\nBuy,a\n')
    assert columns["label"] == [1, 0, 1, 0]
    schema = schema.replace('["buy", "add to cart"]', '["true", "2"]')
    assert made(tmp_path, schema, {"y": [True, False], "c": ["a", "b"]})["label"] == [1, 0]
    assert made(tmp_path, schema, {"y": [1.0, 2.0], "c": ["a", "b"]})["label"] == [0, 1]


TIMES = '[time]\ncolumn = "at"\nformat = "iso"\n[[categorical]]\ncolumn = "c"\n'
PARTS = (
    '[[categorical]]\ncolumn = "at"\npart = "hour"\n[[categorical]]\ncolumn = "at"\npart = "weekday"\nname = "day"\n'
)


def test_dates_order_examples(tmp_path):
    rows = [
        ("2024-05-01", "b", "0", "2"),
        ("2024-05-01T01:00:00+02:00", "a", "23", "1"),
        ("2024-05-01 12:00:00.25", "d", "12", "2"),
        ("2024-05-01T12:00:00.2z", "c", "12", "2"),
        ("2025-02-28 23:59:60 UTC", "e", "0", "5"),
    ]
    log = "y,c,at\n" + "".join(f"{value > 'b':d},{value},{at}\n" for at, value, _, _ in rows)
    columns = made(tmp_path, LABEL + TIMES + PARTS, log)
    by_value = sorted(rows, key=lambda row: row[1])
    assert columns["c"] == list("abcde")
    assert columns["at_hour"] == [row[2] for row in by_value]
    assert columns["day"] == [row[3] for row in by_value]
    encoder = Encoder(Schema.load(tmp_path / "out"))
    at = [row[0] for row in by_value]
    of_texts = encoder.columns({"c": list("abcde"), "at": at})
    moments = ["2024-04-30T23:00", "2024-05-01", "2024-05-01T12", "2024-05-01T12", "2025-03-01"]
    of_moments = encoder.columns({"c": list("abcde"), "at": np.array(moments, "M8[s]")})
    for encoded in (of_texts, of_moments):
        values = read_vocabulary(tmp_path / "out", encoder.schema.table("at_hour"))[0]
        assert [values[i] for i in encoded.ids["at_hour"]] == columns["at_hour"]


def test_timestamps_of_parquet_order_examples(tmp_path):
    moments = pa.array([3_000_000_000_000, 1_000, 2_000_000_000], pa.timestamp("ns", "Europe/Berlin"))
    table = {"y": [0, 1, 1], "c": ["z", "x", "y"], "at": moments}
    assert made(tmp_path, LABEL + TIMES + PARTS, table)["c"] == ["x", "y", "z"]
    with pytest.raises(DatasetError, match=r"column 'at' holds timestamp.*; set format = \"iso\" in .time."):
        made(tmp_path, LABEL + TIMES.replace('format = "iso"', ""), table)


@pytest.mark.parametrize(("unit", "each"), [("seconds", 1e6), ("milliseconds", 1e3), ("microseconds", 1)])
def test_numbers_of_time_are_cut_toward_the_past(unit, each):
    texts = ["-1.5", "-1.0000000", "-1.00000019", "1.00000019", "-0.0000001", "1.7e9", "-1.7000000001e9", "1.9e-6"]
    texts += ["123456789.123456789", "12345678912.3456e-2", "-9e-7", "-1e-999999", "1"]
    content, bounds = spans.joined([*texts, "1e999999", "3e18"])
    codes, values = spans.times_of(content, bounds[:-1], bounds[1:], unit)
    assert codes.tolist() == [spans.OK] * len(texts) + [spans.NOT_TIME, spans.NOT_TIME if each > 1 else spans.OK]
    exact = [math.floor(fractions.Fraction(text) * int(each)) for text in texts if text != "-1e-999999"]
    assert [v for v, text in zip(values.tolist(), texts, strict=False) if text != "-1e-999999"] == exact


def test_nanoseconds_are_cut_toward_the_past():
    texts = ["-1", "-1000", "-1000.0", "-1000.5", "1999.9", "1.7e+18", "82792995e-3"]
    content, bounds = spans.joined(texts)
    _, values = spans.times_of(content, bounds[:-1], bounds[1:], "nanoseconds")
    assert values.tolist() == [math.floor(fractions.Fraction(text) / 1000) for text in texts]


def test_fractions_of_seconds_order_examples(tmp_path):
    schema = LABEL + TIMES.replace("iso", "seconds")
    log = "y,c,at\n1,c,1.25\n1,b,1.2499999\n0,a,-1e0\n0,d,1714521600.000001\n"
    assert made(tmp_path, schema, log)["c"] == list("abcd")
    with pytest.raises(DatasetError, match=r"log:2: field 'at' holds '1\.25', which is not an integer; for dates set"):
        made(tmp_path, schema.replace('format = "seconds"', ""), log)
    with pytest.raises(DatasetError, match=r"holds '1\.25', which is not an ISO date or datetime, such as 2024-05-01"):
        made(tmp_path, LABEL + TIMES, log)


@pytest.mark.parametrize(
    "text",
    ["2023-02-29", "2024-13-01", "2024-00-01", "2024-1-01", "2024-05-01T24:00", "2024-05-01T12", "2024-05-01T12:00:00.",
     "2024-05-01 12:00 ", "2024-05-01T12:00+1", "2024-05-01x", "20240501", "2024-05-01T12:00:00+02:60"],
)  # fmt: skip
def test_dates_that_are_none(text):
    content, bounds = spans.joined([text, "2024-02-29"])
    codes, _ = spans.times_of(content, bounds[:-1], bounds[1:], "iso")
    assert codes.tolist() == [spans.NOT_TIME, 0]


MINUTE, DAY = datetime.timedelta(minutes=1), datetime.timedelta(minutes=1439)


@hypothesis.given(
    st.datetimes(timezones=st.none() | st.timedeltas(-DAY, DAY).map(lambda d: datetime.timezone(d // MINUTE * MINUTE))),
    st.sampled_from("T "),
)
def test_dates_are_those_of_python(moment, mark):
    content, bounds = spans.joined([moment.isoformat(mark)])
    codes, values = spans.times_of(content, bounds[:-1], bounds[1:], "iso")
    utc = moment.replace(tzinfo=moment.tzinfo or datetime.UTC)
    since = utc - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    assert (codes[0], values[0]) == (0, since // datetime.timedelta(microseconds=1))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ('positive_values = ["a"]\npositive_at_least = 3\n' + TIMES, "has positive_values and positive_at_least"),
        (TIMES.replace("iso", "days"), "format of .time. is 'days'; choose one of integer, iso, seconds"),
        (TIMES.replace("iso", "integer") + PARTS, "part = 'hour' is of the column of .time., whose format must say"),
        (TIMES + PARTS.replace('"hour"', '"minute"'), "part is 'minute'; choose one of hour, weekday"),
    ],
)
def test_bad_schemas(tmp_path, schema, message):
    (tmp_path / "schema.toml").write_text(LABEL + schema)
    with pytest.raises(DatasetError, match=message):
        load_schema(str(tmp_path / "schema.toml"))


@pytest.mark.parametrize(
    ("schema", "value", "label"),
    [(LABEL, 1, 1), (LABEL, "no", 0), (LABEL + 'positive_values = ["Click"]\n', "click", 0),
     (LABEL + "positive_at_least = 3\n", 5, 1)],
)  # fmt: skip
def test_a_label_of_one_value_is_refused(tmp_path, monkeypatch, schema, value, label):
    monkeypatch.setattr("jrec.prepare.splits._READ_ROWS", 4)
    lines = "".join(f"{value},{'ab'[k % 2]}\n" for k in range(10))
    schema += '[[categorical]]\ncolumn = "c"\n'
    with pytest.raises(
        DatasetError, match=rf"column 'y': the label of all 10 training examples is {label}, .* \[label\]"
    ):
        made(tmp_path, schema, f"y,c\n{lines}")
    assert not (tmp_path / "out").exists()
    made(tmp_path, schema, f"y,c\n{lines}", labels=False)
    two = {"0": "1", "1": "0", "no": "yes", "click": "Click", "5": "2"}[str(value)]
    made(tmp_path, schema, f"y,c\n{lines}{two},a\n", overwrite=True)
    with pytest.raises(DatasetError, match="in the order of its labels, pass --split-by random"):
        made(tmp_path, schema, f"y,c\n{lines}{two},a\n", overwrite=True, split=(0.8, 0.1, 0.1))
    later = tmp_path / "later"
    later.mkdir()
    made(later, schema, f"y,c\n{lines}", vocabulary_from=str(tmp_path / "out"), min_count=2)


def test_one_of_several_labels_may_have_one_value(tmp_path):
    schema = '[[labels]]\ncolumn = "y"\n[[labels]]\ncolumn = "z"\n[[categorical]]\ncolumn = "c"\n'
    columns = made(tmp_path, schema, "y,z,c\n1,1,a\n1,0,b\n1,1,a\n")
    assert columns["label"] == [1, 1, 1]


@pytest.mark.parametrize(
    ("pattern", "texts", "good"),
    [
        ("%Y-%m-%d", ["24-05-06", "2024-05-06", "999-1-1", "1969-12-31"], [False, True, False, True]),
        ("%d/%m/%Y", ["1/5/24", "1/5/2024"], [False, True]),
        ("%d/%m/%y", ["1/5/24"], [True]),
        ("%H:%M", ["12:05", "1205"], [True, False]),
    ],
)
def test_a_year_has_as_many_digits_as_the_pattern_says(pattern, texts, good):
    """The C library's %Y takes two, and the year 24 would be before all others."""
    content, bounds = spans.joined(texts)
    codes, _ = spans.times_of(content, bounds[:-1], bounds[1:], pattern)
    assert (codes == 0).tolist() == good
