"""One log has one meaning: a value has the same row whatever wrote it, and whatever door it comes through."""

import csv
import datetime as dt
import decimal
import json
import pathlib
import types
import uuid
import zoneinfo

import hypothesis
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import shop_logs
from export_cases import sealed
from hypothesis import strategies as st
from test_serve import ask, running

import jrec
from jrec import serving
from jrec.app.export import export_run
from jrec.data.arrow_values import texts_of
from jrec.data.canonical import canonical_text
from jrec.data.growing import GrowingVocabulary, Growth
from jrec.data.keys import text_key
from jrec.data.schema import DatasetError, Schema
from jrec.data.value_rows import load_vocabularies
from jrec.prepare.encoder import Encoder
from jrec.prepare.prepare import prepare
from jrec.prepare.prepare_options import PrepareOptions
from jrec.prepare.readers import Delimited, load_schema
from jrec.serving.http import bodies
from jrec.serving.http.app import Options

pandas = pytest.importorskip("pandas", reason="pandas, an optional way to give columns, is not installed")
LINES = 60
INDIA = zoneinfo.ZoneInfo("Asia/Kolkata")


def of(values, absent=False):
    """Values for all lines; where ``absent``, every seventh is missing."""
    return [None if absent and k % 7 == 3 else values[k % len(values)] for k in range(LINES)]


MOMENT = dt.datetime(2024, 5, 6, 7, 8, 9)
COLUMNS = {
    "bool": pandas.Series(of([True, False])),
    "bool and null": pandas.Series(of([True, False], absent=True)),
    "boolean": pandas.Series(of([True, False], absent=True), dtype="boolean"),
    "int": pandas.Series(of([0, 7, -3, 123456789012])),
    "int8": pandas.Series(of([0, 7, -3]), dtype="int8"),
    "int and null": pandas.Series(of([0, 7, -3, 2**40], absent=True)),  # floats
    "Int64 and null": pandas.Series(of([0, 7, -3, 2**50], absent=True), dtype="Int64"),
    "uint64": pandas.Series(of([1, 2**63 + 1, 2**64 - 1]), dtype="uint64"),
    "int of more than 64 bits": pandas.Series(of([2**64 + 1, 10**30, 5]), dtype=object),
    "whole float": pandas.Series(of([1.0, 20.0, -0.0, 2.0**52])),
    "float": pandas.Series(of([0.1, 1.5, -2.25, 123456789.125, 1234567890123456.5], absent=True)),
    "tiny float": pandas.Series(of([1e-5, 1.5e-7, -0.00012, 5e-324, 1.25e-100])),
    "huge float": pandas.Series(of([1e16, 1.5e20, -1e300, 12345678901234567890.0])),
    "float32": pandas.Series(of([0.1, 2.5, 7.0, 1e-8], absent=True), dtype="float32"),
    "decimal": pandas.Series(of([decimal.Decimal("7.50"), decimal.Decimal("0.25"), decimal.Decimal("9.00")])),
    "whole decimal": pandas.Series(of([decimal.Decimal(7), decimal.Decimal(-20)])),
    "text": pandas.Series(of(["a", "B", "a text of more than seven bytes"], absent=True)),
    "text of other letters": pandas.Series(of(["Ελένη", "日本語", "naïve"])),
    "text of digits": pandas.Series(of(["007", "1.0", "12.50", "1e3", "v1.0"])),
    "text of words": pandas.Series(of(["True", "TRUE", "tRue", "no"])),
    "texts as a category": pandas.Series(of(["red", "green"], absent=True), dtype="category"),
    "numbers as a category": pandas.Series(of([3, 1, 2]), dtype="category"),
    "date": pandas.Series(of([dt.date(2024, 1, 31), dt.date(1969, 12, 31)])),
    "midnight": pandas.Series(of([dt.datetime(2024, 1, 31), dt.datetime(2023, 6, 1)])),
    "time": pandas.Series(of([MOMENT, dt.datetime(2024, 1, 1)], absent=True)),
    "time of milliseconds": pandas.Series(of([MOMENT.replace(microsecond=120_000), MOMENT])),
    "time in UTC": pandas.Series(of([MOMENT.replace(tzinfo=dt.UTC)])),
    "time in India": pandas.Series(of([MOMENT.replace(tzinfo=INDIA), dt.datetime(2024, 5, 1, tzinfo=INDIA)])),
    "time of day": pandas.Series(of([dt.time(7, 8, 9), dt.time(0, 0, 0)])),
    "UUID": pandas.Series(of([str(uuid.UUID(int=5)), str(uuid.UUID(int=2**127))])),
    "list of int": pandas.Series(of([[1, 20], [], [3]])),
    "list of float": pandas.Series(of([[1.0, 0.5], [1e-5], [2.0, 3.0]])),
    "list of bool": pandas.Series(of([[True], [False, True]])),
    "list as printed": pandas.Series(of(['[1.0, "True", true, "ab", 1e3]', "[2]", "[]", "[7.50, null]"])),
    "list of text": pandas.Series(of([["x", "True", "7.0"], ["y"]])),
}
FRAME = pandas.DataFrame({"label": of([0, 1, 1]), **COLUMNS})
NAMES = list(COLUMNS)


def is_list(name):
    return name.startswith("list")


def schema_text(names=NAMES):
    lines = ["[label]", 'column = "label"']
    for name in names:
        lines += ["[[categorical]]", f"column = {json.dumps(name)}", *(["lists = true"] if is_list(name) else [])]
    return "\n".join(lines)


def csv_of(frame, path):
    """As pandas writes it, lists as Python prints them."""
    frame.to_csv(path, index=False)
    return str(path)


def plain(value):
    """A value as a program sends it in JSON: what JSON has no word for by its text."""
    if isinstance(value, list):
        return [plain(one) for one in value]
    if value is None or value is pandas.NA or value is pandas.NaT or value != value:
        return None
    if isinstance(value, dt.date | dt.datetime | dt.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return float(value) if value % 1 else int(value)
    return float(str(value)) if isinstance(value, np.floating) else value.item() if hasattr(value, "item") else value


ROWS = [{name: plain(FRAME[name].iloc[k]) for name in NAMES} for k in range(LINES)]


def arrow_table():
    return pa.table({name: pa.array(of_name, from_pandas=True) for name, of_name in arrow_columns().items()})


def arrow_columns():
    wide = {"int of more than 64 bits": [decimal.Decimal(one) for one in FRAME["int of more than 64 bits"]]}
    return {name: wide.get(name, FRAME[name]) for name in ["label", *NAMES]}


def parquet_of(path):
    pq.write_table(arrow_table(), path)
    return str(path)


def stream_of(table):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def of_body(content, kind):
    return bodies.rows_of(content, kind, max_rows=1_000, max_bytes=1 << 20).columns


ARROW = ("time of day",)  # which a request of Arrow's may not have, see jrec.serving.http.arrow
DOORS = {
    "DataFrame": lambda: FRAME,
    "Arrow": arrow_table,
    "Python lists": lambda: {name: [plain_or(FRAME[name].iloc[k]) for k in range(LINES)] for name in NAMES},
    "NumPy": lambda: {name: FRAME[name].to_numpy() for name in NAMES},
    "JSON rows": lambda: of_body(json.dumps({"rows": ROWS}).encode(), bodies.JSON),
    "JSON columns": lambda: of_body(
        json.dumps({"columns": {name: [row[name] for row in ROWS] for name in NAMES}}).encode(), bodies.JSON
    ),
    "Arrow stream": lambda: {**sent(), **{name: FRAME[name] for name in ARROW}},
}


def sent():
    table = of_body(stream_of(arrow_table().drop_columns([*ARROW, "label"])), bodies.ARROW)
    return dict(zip(table.column_names, table.columns, strict=True))


def plain_or(value):
    """A value of Python's own types where there is one."""
    missing = value is pandas.NA or value is pandas.NaT or (isinstance(value, float) and value != value)
    if missing:
        return None
    if isinstance(value, np.floating):
        return float(str(value))
    return value.item() if isinstance(value, np.generic) else value


def prepared(folder, inputs, text=None):
    folder.mkdir()
    (folder / "schema.toml").write_text(text or schema_text())
    source = Delimited(load_schema(str(folder / "schema.toml")))
    return prepare(source, inputs, folder / "data", PrepareOptions(min_count=1, split=(0.8, 0.1, 0.1)))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    rows = [json.dumps({"label": int(FRAME["label"][k]), **ROWS[k]}) for k in range(LINES)]
    (folder / "log.jsonl").write_text("\n".join(rows) + "\n")
    return {
        "csv": csv_of(FRAME, folder / "log.csv"),
        "parquet": parquet_of(folder / "log.parquet"),
        "json lines": str(folder / "log.jsonl"),
    }


@pytest.fixture(scope="module", params=["csv", "parquet", "json lines"])
def schema(request, written, tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("schema") / request.param.replace(" ", "_"), [written[request.param]])


def ids_of(encoded):
    """By column the rows of its values, and where its lists end."""
    return {name: np.concatenate([np.asarray(part) for part in (ids if isinstance(ids, tuple) else (ids,))])
            for name, ids in encoded.ids.items()}  # fmt: skip


@pytest.fixture(scope="module")
def expected(schema, written):
    """The rows of the log's own text."""
    (piece,) = Encoder(schema).stream([written["csv"]], batch_size=LINES)
    return ids_of(piece)


@pytest.mark.parametrize("door", ["parquet", "json lines"])
def test_a_log_of_parquet_or_json_has_the_rows_of_its_text(door, schema, expected, written):
    (piece,) = Encoder(schema).stream([written[door]], batch_size=LINES)
    for name, rows in ids_of(piece).items():
        np.testing.assert_array_equal(rows, expected[name], err_msg=name)


@pytest.mark.parametrize("door", DOORS)
def test_every_door_gives_a_value_the_row_that_training_gave_it(door, schema, expected):
    found = ids_of(Encoder(schema).columns(DOORS[door]()))
    for name, rows in found.items():
        np.testing.assert_array_equal(rows, expected[name], err_msg=name)


def test_values_are_told_apart(expected):
    """Nothing is equal because everything is unknown."""
    for name in NAMES:
        values = {str(plain(value)) for value in FRAME[name]} - {"None"}
        wanted = len(values) - {"text of words": 1, "list of int": 0}.get(name, 0)
        assert len(set(expected[name].tolist())) >= min(wanted, 3), name


def test_a_few_rows_at_a_time_are_those_of_all(schema, expected):
    """As requests come: nothing depends on what else is in a column."""
    encoder = Encoder(schema)
    for start in (0, 3, 10):
        rows = ROWS[start : start + 2]
        columns = of_body(json.dumps({"rows": rows}).encode(), bodies.JSON)
        want = encoder.columns(FRAME.iloc[start : start + 2].reset_index(drop=True))
        for name, ids in ids_of(encoder.columns(columns)).items():
            np.testing.assert_array_equal(ids, ids_of(want)[name], err_msg=name)


def test_values_of_several_types_stand_in_one_column(schema):
    encoder = Encoder(schema)
    mixed = {**DOORS["Python lists"](), "text of digits": [7, "7", 7.0, True, "True", None, *["x"] * (LINES - 6)]}
    mixed["list of text"] = [[7, "7.0", None], None, *[[True, "true"]] * (LINES - 2)]
    texts = {**mixed, "text of digits": ["7", "7", "7", "true", "true", "", *["x"] * (LINES - 6)]}
    texts["list of text"] = [["7", "7", ""], [], *[["true", "true"]] * (LINES - 2)]
    for name in ("text of digits", "list of text"):
        one, other = (ids_of(encoder.columns(columns))[name] for columns in (mixed, texts))
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("value", [{"a": 1}, [1], object()])
def test_what_is_no_value_is_refused(schema, value):
    columns = {**DOORS["Python lists"](), "text": ["a", value, *["b"] * (LINES - 2)]}
    with pytest.raises((DatasetError, ValueError), match="text"):
        Encoder(schema).columns(columns)


# Scores, by a model that was trained on these columns


SCORED = 64
"""Examples of a batch, equal everywhere: a program of another size may round differently."""


@pytest.fixture(scope="module")
def scored(written, tmp_path_factory):
    """A loaded run, its export, the port of a server of that; and the scores of the log's text by each of the two.

    An export looks rows up and pools them by another program than the run's, whose sums round otherwise.
    """
    folder = tmp_path_factory.mktemp("scored")
    schema = prepared(folder / "made", [written["csv"]])
    overrides = ["max_steps=4", "model.bottom_mlp=[]", f"data.eval_batch_size={SCORED}"]
    path = shop_logs.trained(folder, schema.folder, *overrides)
    export_run(path, folder / "export")
    load = lambda export: serving.load(export, batch_sizes=(SCORED,))  # noqa: E731
    run, export = jrec.load_run(path), load(folder / "export")
    with pathlib.Path(written["csv"]).open(newline="") as file:
        lines = list(csv.DictReader(file))
    texts = {name: [line[name] for line in lines] for name in NAMES}
    expected = {"run": of_log(run, written["csv"]), "export": export(texts)}
    options = Options(max_rows=100, max_bytes=1 << 20, poll=0)
    with running(folder / "export", load=load, options=options) as server:
        yield types.SimpleNamespace(run=run, export=export, port=server.port, written=written, expected=expected)


def of_log(run, path):
    (piece,) = run.of_log([path])
    return piece.predictions


def posted(scored, content, kind):
    status, _, body = ask(scored.port, content=content, kind=kind)
    assert status == 200, body
    if kind == bodies.ARROW:
        return pa.ipc.open_stream(body).read_all()["score"].to_numpy()
    return np.array(json.loads(body)["scores"], np.float32)


def as_text(table):
    """Without types that a request of Arrow's may not have."""
    for name in ARROW:
        texts = pa.array([None if value is None else value.isoformat() for value in table[name].to_pylist()])
        table = table.set_column(table.column_names.index(name), name, texts)
    return table.drop_columns(["label"])


SCORES = {
    "run, JSON lines": lambda scored: of_log(scored.run, scored.written["json lines"]),
    "run, Parquet": lambda scored: of_log(scored.run, scored.written["parquet"]),
    "run, DataFrame": lambda scored: scored.run.predict(FRAME),
    "run, columns": lambda scored: scored.run.predict(DOORS["Python lists"]()),
    "export, DataFrame": lambda scored: scored.export(FRAME),
    "export, columns": lambda scored: scored.export(DOORS["Python lists"]()),
    "export, HTTP JSON": lambda scored: posted(scored, {"rows": ROWS}, bodies.JSON),
    "export, HTTP Arrow": lambda scored: posted(scored, stream_of(as_text(arrow_table())), bodies.ARROW),
}


@pytest.mark.parametrize("door", SCORES)
def test_every_door_has_the_scores_of_the_log_s_text(door, scored):
    expected, scores = scored.expected[door.split(",")[0]], SCORES[door](scored)
    assert scores.dtype == expected.dtype == np.float32
    np.testing.assert_array_equal(scores, expected)


def test_the_scores_of_a_run_and_of_its_export_differ_by_rounding(scored):
    of_run, of_export = scored.expected["run"], scored.expected["export"]
    np.testing.assert_allclose(of_run, of_export, rtol=1e-5)
    assert len(set(of_run.tolist())) > LINES // 2  # or all would be alike


# Older datasets, and those that are to keep texts as they are


AS_WRITTEN = 'values = "as_written"\n'


def two_texts(tmp_path, text):
    log = tmp_path / "log.csv"
    log.write_text("label,v\n" + "".join(f"{k % 2},{('7.0', '7', 'True', 'true')[k % 4]}\n" for k in range(80)))
    return prepared(tmp_path / "made", [str(log)], text + schema_text(["v"]))


@pytest.mark.parametrize(("text", "values"), [("", 2), (AS_WRITTEN, 4)])
def test_a_schema_says_whether_texts_have_one_form(text, values, tmp_path):
    schema = two_texts(tmp_path, text)
    assert schema.canonical == (not text)
    rows = Encoder(schema).columns({"v": ["7.0", "7", "True", "true"]}).ids["v"]
    assert len(set(rows.tolist())) == values
    vocabulary = load_vocabularies(schema.folder)["v"]
    texts = pa.array(["7.0", "7", "True", "true"], pa.large_binary())
    np.testing.assert_array_equal(vocabulary.rows(texts), rows)


def test_an_older_dataset_keeps_its_meaning(tmp_path):
    schema = two_texts(tmp_path, AS_WRITTEN)
    path = schema.folder / "schema.json"
    content = json.loads(path.read_text())
    del content["provenance"]["format_options"]["schema"]["values"]
    path.write_text(json.dumps(sealed(content)))
    older = Schema.load(schema.folder)
    assert not older.canonical
    columns = {"v": ["7.0", "7", "True", "true"]}
    np.testing.assert_array_equal(Encoder(older).columns(columns).ids["v"], Encoder(schema).columns(columns).ids["v"])


def test_a_later_log_on_earlier_rows_needs_the_same_form(tmp_path):
    schema = two_texts(tmp_path, AS_WRITTEN)
    (tmp_path / "later.toml").write_text(schema_text(["v"]))
    source = Delimited(load_schema(str(tmp_path / "later.toml")))
    options = PrepareOptions(vocabulary_from=str(schema.folder))
    with pytest.raises(DatasetError, match="the schema has values 'canonical' in this log, but 'as_written' in"):
        prepare(source, [str(tmp_path / "log.csv")], tmp_path / "later", options)


def test_another_word_is_refused(tmp_path):
    with pytest.raises(DatasetError, match="values is 'raw'; choose 'canonical' or 'as_written'"):
        two_texts(tmp_path, 'values = "raw"\n')


def test_labels_are_compared_in_one_form(tmp_path):
    text = schema_text(["v"]).replace("[label]", '[label]\npositive_values = ["True"]')
    frame = pandas.DataFrame({"label": of([True, False, False]), "v": of(["a", "b"])})
    frame.to_csv(tmp_path / "log.csv", index=False)
    pq.write_table(pa.Table.from_pandas(frame), tmp_path / "log.parquet")
    for name in ("log.csv", "log.parquet"):
        schema = prepared(tmp_path / name.replace(".", "_"), [str(tmp_path / name)], text)
        for log in ("log.csv", "log.parquet"):
            (piece,) = Encoder(schema).stream([str(tmp_path / log)], batch_size=LINES)
            assert piece.labels.tolist() == of([1, 0, 0]), (name, log)


def test_tables_that_grow_look_texts_up_in_one_form():
    vocabulary = GrowingVocabulary(Growth(capacity=4), canonical=True)
    vocabulary.map(np.array([text_key("7")], np.uint64))
    assert vocabulary.rows(pa.array(["7.0", "7", "8"], pa.large_binary())).tolist() == [1, 1, 0]


# The form


@pytest.mark.parametrize(
    ("text", "form"),
    {
        "True": "true", "TRUE": "true", "tRue": "tRue", "False": "false", "7.0": "7", "7.50": "7.5", "-0.0": "0",
        "007": "007", "7.": "7.", ".5": ".5", "1.2.0": "1.2.0", "1e3": "1e3", "0.00001": "1e-5", "1.5e-07": "1.5e-7",
        "1.50E-07": "1.5e-7", "0.0001": "0.0001", "1.25e+1": "12.5", "1e+16": "1e+16", "2024-05-06": "2024-05-06",
        "2024-05-06T00:00": "2024-05-06", "2024-05-06 00:00:00.000": "2024-05-06",
        "2024-05-06T07:08:09.120+00:00": "2024-05-06 07:08:09.12Z", "2024-05-06 07:08:09+05:30":
        "2024-05-06 07:08:09+0530", "2024-05-06 07:08:09.": "2024-05-06 07:08:09.", "07:08:09.000": "07:08:09",
        "2024-05-06 00:00:00Z": "2024-05-06 00:00:00Z", "": "", "-": "-", "e-1": "e-1", "1e-": "1e-",
    }.items(),
)  # fmt: skip
def test_the_form_of_a_text(text, form):
    assert canonical_text(text) == form


@hypothesis.given(st.one_of(st.text(), st.text("0123456789.-+eE:TZ "), st.floats().map(str)))
def test_the_form_of_a_form_is_itself(text):
    form = canonical_text(text)
    assert canonical_text(form) == form
    assert len(form.encode()) <= len(text.encode())


@hypothesis.given(st.floats(allow_nan=False, allow_infinity=False))
def test_arrow_and_python_print_one_number(value):
    (text,) = texts_of(pa.array([value])).to_pylist()
    form = canonical_text(repr(value))
    assert canonical_text(text.decode()) == form
    assert float(form) == value


@hypothesis.given(
    st.datetimes(dt.datetime(1700, 1, 1), dt.datetime(2199, 1, 1)),
    st.sampled_from(["s", "ms", "us"]),
    st.sampled_from([None, "UTC", "Asia/Kolkata"]),
)
def test_arrow_and_python_print_one_time(value, unit, zone):
    digits = {"s": 0, "ms": 3, "us": 6}[unit]
    value = value.replace(microsecond=value.microsecond // 10 ** (6 - digits) * 10 ** (6 - digits))
    value = value.replace(tzinfo=zoneinfo.ZoneInfo(zone)) if zone else value
    hypothesis.assume(not zone or value.utcoffset().seconds % 60 == 0)
    (text,) = texts_of(pa.array([value], pa.timestamp(unit, zone))).to_pylist()
    assert canonical_text(text.decode()) == canonical_text(str(value)) == canonical_text(value.isoformat())
