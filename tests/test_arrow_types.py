"""Columns of every Arrow type in every role, of a Parquet file and in memory: read right, or refused in one line."""

import contextlib
import datetime
import decimal
import uuid
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jrec.app.predict import LoadedRun
from jrec.data.column_forms import form_of
from jrec.data.keys import buckets, text_key
from jrec.data.packing_columns import prepare_columns, read_columns
from jrec.data.schema import DatasetError
from jrec.data.value_rows import ValueRows, vocabulary_of
from jrec.ops.layout import FeatureConfig
from jrec.prepare.ingest import BadLines, Log
from jrec.prepare.raw_columns import parsed_columns
from jrec.prepare.readers import Delimited, load_schema
from jrec.prepare.readers.streams import Input
from jrec.prepare.readers.tables import sample

# The values 1 and 0 and a missing one in each type that numbers have; their text as a category where it is not "1".
NUMBERS = {
    **{str(t): pa.array([1, 0, None], t) for t in (pa.int8(), pa.int16(), pa.int32(), pa.int64())},
    **{str(t): pa.array([1, 0, None], t) for t in (pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())},
    **{str(t): pa.array([1, 0, None], pa.float32()).cast(t) for t in (pa.float16(), pa.float32(), pa.float64())},
    **{
        str(t): pa.array([decimal.Decimal(1), decimal.Decimal(0), None], t)
        for t in (pa.decimal32(5, 2), pa.decimal64(5, 2), pa.decimal128(10, 3), pa.decimal256(60, 2), pa.decimal128(9))
    },
    "bool": pa.array([True, False, None]),
    "bool8": pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1, 0, None], pa.int8())),
    **{str(t): pa.array(["1", "0", None], t) for t in (pa.string(), pa.large_string(), pa.string_view())},
    **{str(t): pa.array([b"1", b"0", None], t) for t in (pa.binary(), pa.large_binary(), pa.binary_view())},
    "fixed_size_binary": pa.array([b"1", b"0", None], pa.binary(1)),
    "json": pa.ExtensionArray.from_storage(pa.json_(), pa.array(["1", "0", None])),
    "opaque": pa.ExtensionArray.from_storage(pa.opaque(pa.int8(), "x", "y"), pa.array([1, 0, None], pa.int8())),
    "dictionary of texts": pa.array(["1", "0", None]).dictionary_encode(),
    "dictionary of floats": pa.array([1.0, 0.0, None]).dictionary_encode(),
    "dictionary of views": pa.DictionaryArray.from_arrays([1, 0, None], pa.array(["0", "1"], pa.string_view())),
    "runs": pa.RunEndEncodedArray.from_arrays([1, 2, 3], pa.array([1, 0, None])),
}
DAY, AT = datetime.date(2024, 5, 1), datetime.datetime(2024, 5, 1, 12, 30)
ZONED = AT.replace(tzinfo=datetime.UTC)
MICROSECONDS = 1_714_566_600_000_000
ID = uuid.UUID("550e8400-e29b-41d4-a716-446655440000")
TIMES = {  # and their texts as categories of a Parquet file
    "date32": (pa.array([DAY, None], pa.date32()), "2024-05-01"),
    "date64": (pa.array([DAY, None], pa.date64()), "2024-05-01"),
    **{f"timestamp {u}": (pa.array([AT, None], pa.timestamp(u)), None) for u in ("s", "ms", "us", "ns")},
    **{f"zoned {u}": (pa.array([ZONED, None], pa.timestamp(u, "Europe/Berlin")), None) for u in ("s", "us")},
}
CATEGORIES = {  # types that are nothing but categories
    "time32": (pa.array([datetime.time(1, 2, 3), None], pa.time32("ms")), "01:02:03"),
    "time64": (pa.array([datetime.time(1, 2, 3), None], pa.time64("us")), "01:02:03"),
    "uuid": (pa.array([ID.bytes, None], pa.uuid()), str(ID)),
    "bytes": (pa.array([b"\xc8\x01", None], pa.binary(2)), "0xc801"),
    "bytes of a varying number": (pa.array([b"\xc8", None], pa.binary()), "0xc8"),
    "bytes of a view": (pa.array([b"a\nb", None], pa.binary_view()), "0x610a62"),
}
REFUSED = {
    "duration": pa.array([5, None], pa.duration("ms")),
    "interval": pa.array([(1, 2, 3), None], pa.month_day_nano_interval()),
    "struct": pa.array([{"a": 1}, None]),
    "map": pa.array([[("a", 1)], None], pa.map_(pa.string(), pa.int64())),
    "union": pa.UnionArray.from_dense(pa.array([0, 0], pa.int8()), pa.array([0, 1], pa.int32()), [pa.array([1, 2])]),
    "lists of lists": pa.array([[[1]], None]),
}
LISTS = {
    "list": lambda t: pa.list_(t),
    "large_list": lambda t: pa.large_list(t),
    "fixed_size_list": lambda t: pa.list_(t, 1),
    "list_view": lambda t: pa.list_view(t),
    "large_list_view": lambda t: pa.large_list_view(t),
}
LABEL, OTHER = '[label]\ncolumn = "y"\n', '[[categorical]]\ncolumn = "k"\nlists = true\n'
TIME = '[time]\ncolumn = "c"\nformat = '
SCHEMAS = {
    "category": LABEL + '[[categorical]]\ncolumn = "c"\n',
    "categories": LABEL + '[[categorical]]\ncolumn = "c"\nlists = true\n',
    "weights": LABEL + OTHER + 'weights = "c"\n',
    "number": LABEL + '[[dense]]\ncolumn = "c"\nmissing = -1\n' + OTHER,
    "label": '[label]\ncolumn = "c"\n' + OTHER,
    "seconds": LABEL + TIME + '"seconds"\n' + OTHER,
    "time": LABEL + TIME + '"iso"\n[[categorical]]\ncolumn = "c"\nname = "h"\npart = "hour"\n',
}


@pytest.fixture(scope="module")
def formats(tmp_path_factory):
    folder = tmp_path_factory.mktemp("formats")
    for role, schema in SCHEMAS.items():
        (folder / role).write_text(schema)
    return {role: Delimited(load_schema(str(folder / role))) for role in SCHEMAS}


def table_of(column):
    rows = len(column)
    return {"y": pa.array(np.arange(rows) % 2), "k": pa.array([["a"]] * rows), "c": column}


def from_file(source, column, folder):
    """What the column becomes of a Parquet file; None if Arrow itself cannot write it."""
    path = folder / "log.parquet"
    try:
        pq.write_table(pa.table(table_of(column)), path)
    except pa.ArrowNotImplementedError:
        return None
    sample(str(path), 10)  # what guesses a schema reads every column
    log = Log(source, [Input(name=str(path), file=str(path))], key_seed=0, threads=1)
    (chunk,) = log.converted(lambda _: None, BadLines(folder / "bad", skip=False))
    return chunk


def from_memory(source, column):
    return source.convert(parsed_columns(source.raw_fields(), table_of(column), 0))


def lists_of(kind, column):
    """Lists of one value each."""
    dtype = LISTS[kind](column.type)
    if kind == "fixed_size_list":
        return pa.FixedSizeListArray.from_arrays(column, type=dtype)
    rows = len(column)
    size = pa.int64() if kind.startswith("large") else pa.int32()
    starts, ones = pa.array(np.arange(rows + 1), size), pa.array(np.ones(rows), size)
    if "view" not in kind:
        return (pa.ListArray if kind == "list" else pa.LargeListArray).from_arrays(starts, column, type=dtype)
    return (pa.ListViewArray if kind == "list_view" else pa.LargeListViewArray).from_arrays(starts[:-1], ones, column)


def keys(*texts):
    return [text_key(text) for text in texts]


def outcomes(source, column, folder):
    yield from_file(source, column, folder)
    yield from_memory(source, column)


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers(tmp_path, formats, name):
    column = NUMBERS[name]
    for chunk in outcomes(formats["number"], column, tmp_path):
        if chunk is not None:
            assert chunk.dense["c"].tolist() == [1, 0, -1]
    chunk = from_file(formats["label"], column[:2], tmp_path)
    assert chunk is None or chunk.labels.tolist() == [1, 0]
    for kind in LISTS:
        for chunk in outcomes(formats["weights"], lists_of(kind, column[:2]), tmp_path):
            if chunk is not None:
                assert chunk.weights["k"].values.tolist() == [1, 0]
    if "bool" in name:
        with pytest.raises(
            DatasetError, match=r"log.parquet: column 'c' holds .*bool.*, which cannot be a time; cast it"
        ):
            from_file(formats["seconds"], column[:2], tmp_path)
    else:
        chunk = from_file(formats["seconds"], column[:2], tmp_path)
        assert chunk is None or chunk.times.tolist() == [1_000_000, 0]
    texts = ("true", "false", "") if "bool" in name else ("1", "0", "")
    chunk = from_file(formats["category"], column, tmp_path)
    assert chunk is None or chunk.keys["c"].tolist() == keys(*texts)
    assert from_memory(formats["category"], column).keys["c"].tolist() == keys(*texts)
    for kind in LISTS:
        made = lists_of(kind, column[:2])
        chunk = from_file(formats["categories"], made, tmp_path)
        assert chunk is None or chunk.keys["c"].values.tolist() == keys(*texts[:2])
        assert from_memory(formats["categories"], made).keys["c"].values.tolist() == keys(*texts[:2])


@pytest.mark.parametrize("name", TIMES)
def test_times(tmp_path, formats, name):
    column, text = TIMES[name]
    expected = MICROSECONDS - (0 if text is None else 45_000_000_000)
    for chunk in outcomes(formats["time"], column[:1], tmp_path):
        assert chunk.times.tolist() == [expected]
    if text is not None:
        assert from_file(formats["category"], column, tmp_path).keys["c"].tolist() == keys(text, "")
    for role in ("number", "label"):
        with pytest.raises(DatasetError, match=r"log.parquet: column 'c' holds .* cast it to numbers"):
            from_file(formats[role], column, tmp_path)
    text = text or ("2024-05-01 12:30:00" if "zoned" not in name else "2024-05-01 14:30:00+0200")
    for chunk in outcomes(formats["category"], column, tmp_path):
        assert chunk.keys["c"].tolist() == keys(text, "")
    with pytest.raises(DatasetError, match=r"column 'c' holds datetime64.*cast it"):
        from_memory(formats["number"], column)


@pytest.mark.parametrize("name", CATEGORIES)
def test_categories(tmp_path, formats, name):
    column, text = CATEGORIES[name]
    assert from_file(formats["category"], column, tmp_path).keys["c"].tolist() == keys(text, "")
    assert from_memory(formats["category"], column).keys["c"].tolist() == keys(text, "")
    for kind in LISTS:
        made = lists_of(kind, column[:1])
        chunk = from_file(formats["categories"], made, tmp_path)
        assert chunk is None or chunk.keys["c"].values.tolist() == keys(text)
    for role in ("number", "label", "time"):
        with pytest.raises(DatasetError, match=r"log.parquet:.* 'c' holds"):
            from_file(formats[role], column, tmp_path)


@pytest.mark.parametrize("name", REFUSED)
def test_types_without_a_value(tmp_path, formats, name):
    for role in ("number", "label", "time", "category", "categories", "weights"):
        column = REFUSED[name]
        try:
            assert from_file(formats[role], column, tmp_path) is None
        except DatasetError as error:
            assert "log.parquet: column 'c' holds" in str(error)  # noqa: PT017 (Arrow may not write it at all)
        if role != "label":
            with pytest.raises((DatasetError, ValueError), match="column 'c'"):
                from_memory(formats[role], column)


def test_nulls_without_a_type(tmp_path, formats):
    for chunk in outcomes(formats["category"], pa.nulls(2), tmp_path):
        assert chunk.keys["c"].tolist() == keys("", "")
    for chunk in outcomes(formats["categories"], pa.nulls(2), tmp_path):
        assert chunk.keys["c"].offsets.tolist() == [0, 0, 0]
    for chunk in outcomes(formats["number"], pa.nulls(2), tmp_path):
        assert chunk.dense["c"].tolist() == [-1, -1]


def test_times_that_do_not_fit_are_refused(tmp_path, formats):
    """Arrow converts 2^62 seconds to microseconds without a word, and wraps around."""
    column = pa.array([2**60], pa.timestamp("ms"))
    with pytest.raises(DatasetError, match=r"log.parquet: column 'c' of timestamp\[ms\] cannot be read .* rows 1 to 1"):
        from_file(formats["time"], column, tmp_path)
    with pytest.raises(DatasetError, match="column 'c' holds times in"):
        from_memory(formats["time"], column)


def test_lists_that_are_none_need_a_separator(tmp_path, formats):
    with pytest.raises(DatasetError, match=r"parquet:1: field 'c' holds 'a\|b', which is no list .* separator"):
        from_file(formats["categories"], pa.array(["a|b", "c"]), tmp_path)
    with pytest.raises(DatasetError, match=r"column 'c' holds int64, but the schema says lists = true of it"):
        from_file(formats["categories"], pa.array([1, 2]), tmp_path)


@pytest.mark.parametrize("name", [*NUMBERS, *TIMES, *CATEGORIES, *REFUSED])
def test_columns_of_a_batch(name):
    """Each is packed, or refused by an error that names it; the ids of texts and bytes are those of their keys."""
    rows = ValueRows(vocabularies={"t": vocabulary_of("t", "hash", 1 << 20)})
    column = {**NUMBERS, **REFUSED}.get(name)
    texts = ("1", "0", "")
    if column is None:
        column, text = (TIMES | CATEGORIES)[name]
        texts = (text, "")
    ids = FeatureConfig(name="c", table="t", max_length=1)
    weighted = FeatureConfig(name="k", table="t", max_length=1, weighted=True)
    weights = {"k": [[1]] * len(column), "k:weight": column}
    roles = (
        ({"c": column}, {"numbers": ["c"], "features": []}),
        ({"c": column}, {"numbers": [], "features": [], "extras": ["c"]}),
        (weights, {"numbers": [], "features": [weighted]}),
    )
    for columns, options in roles:
        with contextlib.suppress(DatasetError, ValueError):
            prepare_columns(read_columns(columns, **options), values=rows, **options)
    try:
        read = read_columns({"c": column}, numbers=[], features=[ids])
        packed = prepare_columns(read, numbers=[], features=[ids], values=rows)
    except ValueError as error:
        assert "'c'" in str(error)  # noqa: PT017 (which types are packed is said below)
        assert name in {*TIMES, *REFUSED, "time32", "time64"} or any(
            w in name for w in ("float", "double", "dec", "bool")
        )
    else:
        expected = buckets(np.array(keys(*texts[:-1]), np.uint64), 1 << 20)
        np.testing.assert_array_equal(packed.ids["c"].values, expected)


def test_predictions_of_a_format_that_is_text_name_the_file(tmp_path):
    pq.write_table(pa.table({"c": [{"a": 1}]}), tmp_path / "log.parquet")
    encoder = SimpleNamespace(raw_columns=("c",), columns=lambda batch, unknown: form_of("c", batch.column("c")))
    run: Any = SimpleNamespace(encoder=encoder, batch_size=5)
    with pytest.raises(DatasetError, match=r"log.parquet: column 'c' holds struct<a: int64>, which"):
        next(LoadedRun._encoded_parquet(run, [str(tmp_path / "log.parquet")], run.encoder, None))
