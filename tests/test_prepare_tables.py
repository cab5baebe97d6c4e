"""Tables, Parquet and Arrow, as inputs of the csv format: datasets as of text, and clear errors."""

import bz2
import datetime
import decimal
import json
import os
import pathlib
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prepare_reference import read_dataset, read_vocabulary
from shop_logs import SCHEMA, write_log

from jrec.data.schema import DatasetError, Schema
from jrec.prepare.encoder import Encoder
from jrec.prepare.prepare import prepare
from jrec.prepare.prepare_options import PrepareOptions
from jrec.prepare.readers import Criteo, Delimited, load_schema, places
from jrec.prepare.readers.columnar import _decimals, _floats


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
    monkeypatch.setattr("jrec.prepare.readers.lines.BLOCK_BYTES", 4000)  # many pieces of a row group
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
        (["a", "b\0c"], r"log:2: field 'c' holds 'b\\x00c', which holds a NUL byte"),
        ([["a"], ["b"]], "column 'c' holds lists, but the schema reads one value a row; .* set lists = true"),
        ([{"d": 1}, {"d": 2}], "column 'c' holds struct<d: int64>, which cannot be a category; cast it"),
        ([[[1]], [[2]]], "column 'c' holds lists of lists; flatten them first"),
    ],
)
def test_columns_that_cannot_be_read(tmp_path, column, message):
    pq.write_table(pa.table({"y": [0, 1], "c": column}), tmp_path / "log")
    with pytest.raises(DatasetError, match=message):
        made(tmp_path, "out", SMALL, tmp_path / "log", split=(1, 0, 0))


def text_of(value):
    """A value as a careful program writes it to a CSV file: whole numbers without a fraction, nothing for null."""
    if value is None or value != value:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "|".join(map(text_of, value))
    if isinstance(value, float | np.float32 | decimal.Decimal) and value == int(value):
        return str(int(value))
    return str(value)


def random_columns(seed, rows):
    """Columns of every type that text has, with nulls, by name."""
    rng = np.random.default_rng(seed)
    words = ["", "a", "Zürich", "deadbeef", "DEADBEEF", "12345678", "0123456789", "99999999999999999", "x" * 40, "-7"]
    words += [f"user {k}" for k in range(30)]

    def of(dtype, values, nulls=0.2):
        return pa.array(values.tolist(), dtype, mask=rng.random(rows) < nulls)

    def ints(low, high):
        return rng.integers(low, high, rows)

    singles = rng.integers(0, 2**32, rows, np.uint32).view(np.float32)
    singles[~np.isfinite(singles)] = 0
    near = (rng.integers(-(10**6), 10**6, rows) / 10.0 ** rng.integers(0, 7, rows)).astype(np.float32)
    lists = np.empty(rows, object)
    lists[:] = [[int(v) for v in rng.integers(0, 9, n)] for n in rng.integers(0, 4, rows)]
    few = pa.array(rng.choice(words, rows).tolist()).dictionary_encode()
    return {
        "y": of(pa.int8(), ints(0, 2), 0),
        "t": of(pa.timestamp("us"), ints(0, 2**50), 0),
        "d_i64": of(pa.int64(), ints(-(2**62), 2**62)),
        "d_u8": of(pa.uint8(), ints(0, 256)),
        "d_f64": of(pa.float64(), rng.standard_normal(rows) * 10.0 ** ints(-9, 9)),
        "d_f32": pa.array(near, pa.float32(), mask=rng.random(rows) < 0.2),
        "d_bits": pa.array(singles, pa.float32()),
        "d_text": of(pa.string(), np.array([repr(float(v)) for v in rng.standard_normal(rows)])),
        "q_f32": pa.array(near[::-1].copy(), pa.float32()),
        "c_i32": of(pa.int32(), ints(-(10**6), 10**6)),
        "c_i64": of(pa.int64(), ints(-(2**40), 2**62)),
        "c_u64": of(pa.uint64(), ints(0, 40)),
        "c_f64": of(pa.float64(), ints(0, 30) / 2),
        "c_whole": of(pa.float32(), ints(0, 30)),
        "c_bool": of(pa.bool_(), ints(0, 2) > 0),
        "c_text": of(pa.string(), rng.choice(words, rows)),
        "c_few": few,
        "c_view": of(pa.string_view(), rng.choice(words, rows)),
        "c_day": of(pa.date32(), ints(0, 99)),
        "c_decimal": of(pa.decimal128(9, 2), np.array([decimal.Decimal(int(v)) for v in ints(0, 20)])),
        "l_int": pa.array(lists.tolist(), pa.list_(pa.int16()), mask=rng.random(rows) < 0.2),
    }


def schema_of(columns, lists, missing):
    parts = [f'missing_values = {missing}\n[label]\ncolumn = "y"\n[time]\ncolumn = "t"\nformat = "iso"\n']
    for number, name in enumerate(columns):
        if name.startswith("d_"):
            transform = ("none", "signed_log1p", "log1p", "standardize")[number % 4] if name != "d_bits" else "none"
            parts.append(f'[[dense]]\ncolumn = "{name}"\ntransform = "{transform}"\nmissing = 0.5\n')
        elif name[:2] in ("c_", "l_", "q_"):
            more = {"l_": lists + "\n", "q_": "quantiles = 7\n"}.get(name[:2], "")
            parts.append(f'[[categorical]]\ncolumn = "{name}"\n{more}')
    return "".join(parts)


def write_csv(path, columns):
    values = []
    for column in columns.values():
        number = np.float32 if pa.types.is_float32(column.type) else lambda value: value
        values.append([text_of(None if v is None else number(v)) for v in column.to_pylist()])
    path.write_text("\n".join([",".join(columns), *map(",".join, zip(*values, strict=True))]) + "\n")


class Stream:
    """What any library's table is: batches by Arrow's C interface, nothing else."""

    def __init__(self, table):
        self._table = table

    def __arrow_c_stream__(self, requested_schema=None):
        return self._table.__arrow_c_stream__(requested_schema)


@pytest.mark.parametrize("seed", range(3))
def test_the_same_table_in_every_form_makes_the_same_dataset(tmp_path, monkeypatch, seed):
    monkeypatch.setattr("jrec.prepare.readers.lines.BLOCK_BYTES", 20_000)  # several pieces
    columns = random_columns(seed, 1500)
    table = pa.table(columns)
    write_csv(tmp_path / "log.csv", columns)
    pq.write_table(table, tmp_path / "log.parquet", row_group_size=700)
    with pa.ipc.new_file(tmp_path / "log.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=400)
    with pa.ipc.new_stream(tmp_path / "log.arrows", table.schema) as file:
        file.write_table(table, max_chunksize=400)
    options = {"min_count": 1, "block_size": 256}
    missing = ['[""]', '["", "-7", "3"]'][seed % 2]
    of_text = shards(
        made(tmp_path, "csv", schema_of(columns, 'separator = "|"', missing), tmp_path / "log.csv", **options)
    )
    of_lists = schema_of(columns, "lists = true", missing)
    for name in ("parquet", "arrow", "arrows"):
        assert shards(made(tmp_path, name, of_lists, tmp_path / f"log.{name}", **options)) == of_text
    prepare(source(tmp_path, of_lists), Stream(table), tmp_path / "memory", PrepareOptions(**options))
    assert shards(tmp_path / "memory") == of_text
    provenance = Schema.load(tmp_path / "memory").provenance["inputs"]
    assert provenance[0]["file"] == "table 1 (test_prepare_tables.Stream)"


def test_a_list_of_one_blank_is_empty_as_in_text(tmp_path):
    lists = [["a", "b"], [""], [None], [], None, ["b", ""]] * 4
    pq.write_table(pa.table({"y": [0, 1] * 12, "l": pa.array(lists, pa.list_(pa.string()))}), tmp_path / "log.parquet")
    texts = ["|".join(one or "" for one in of) if of else "" for of in lists]
    (tmp_path / "log.csv").write_text("y,l\n" + "".join(f"{i % 2},{text}\n" for i, text in enumerate(texts)))
    schema = '[label]\ncolumn = "y"\n[[categorical]]\ncolumn = "l"\nmax_length = 3\n'
    of_text = made(tmp_path, "of_text", schema + 'separator = "|"\n', tmp_path / "log.csv", min_count=1)
    of_lists = made(tmp_path, "of_lists", schema + "lists = true\n", tmp_path / "log.parquet", min_count=1)
    assert shards(of_lists) == shards(of_text)
    printed = ["" if one is None else json.dumps(one).replace('"', "'") for one in lists]
    (tmp_path / "printed.csv").write_text("y,l\n" + "".join(f'{i % 2},"{text}"\n' for i, text in enumerate(printed)))
    of_printed = made(tmp_path, "of_printed", schema + "lists = true\n", tmp_path / "printed.csv", min_count=1)
    assert shards(of_printed) == shards(of_text)


def test_printed_weights_of_one_blank_are_none_as_in_a_table(tmp_path):
    rows = {"y": [0, 1, 0, 1], "l": [["a", "b"], [None], ["a"], [""]], "w": [[1.0, 2.0], [None], [0.5], []]}
    pq.write_table(pa.table(rows), tmp_path / "log.parquet")
    printed = zip(rows["y"], map(json.dumps, rows["l"]), map(json.dumps, rows["w"]), strict=True)
    (tmp_path / "log.tsv").write_text("y\tl\tw\n" + "".join(f"{y}\t{x}\t{w}\n" for y, x, w in printed))
    schema = '[label]\ncolumn = "y"\n[[categorical]]\ncolumn = "l"\nlists = true\nweights = "w"\n'
    of_table = made(tmp_path, "of_table", schema, tmp_path / "log.parquet", min_count=1)
    tabs = 'quoting = false\ndelimiter = "\\t"\n'
    of_text = made(tmp_path, "of_text", tabs + schema, tmp_path / "log.tsv", min_count=1)
    assert shards(of_text) == shards(of_table)


def test_floats_of_32_bits_are_read_as_their_shortest_decimals():
    rng = np.random.default_rng(0)
    values = rng.integers(0, 2**32, 200_000, np.uint32).view(np.float32)
    prices = (rng.integers(0, 10**7, 200_000) / 100).astype(np.float32)
    halves = np.float32(2) ** np.arange(-30, 31) + np.float32(2) ** np.arange(-53, 8)
    halves = halves.astype(np.float32)
    values = np.concatenate([values[np.isfinite(values)], prices, rng.random(200_000, np.float32), halves])
    expected = np.array([float(str(value)) for value in values])
    np.testing.assert_array_equal(_floats(pa.array(values)), expected)
    assert np.mean(_decimals(prices)[1]) < 0.01  # few are left to the way by their texts


def test_texts_that_no_line_can_hold_are_values(tmp_path):
    pq.write_table(pa.table({"y": [0, 1, 1], "c": [["a"], ["b\x1ec"], ["d\ne", "e"]]}), tmp_path / "log")
    folder = made(tmp_path, "out", SMALL + "lists = true\n", tmp_path / "log", split=(1, 0, 0), min_count=1)
    dataset, read = read_dataset(folder)
    values = read_vocabulary(folder, dataset.table("c"))[0]
    assert [[values[i] for i in one] for one in read["c"]] == [["a"], ["b\x1ec"], ["d\ne", "e"]]


FAULTS = {
    "y": (["1", "maybe", None, "0"], "string"),
    "t": (["2024-05-01", "yesterday", None, "2024-02-30"], "string"),
    "d": (["1", "x", "nan", None], "string"),
    "e": ([1.0, float("inf"), float("nan"), None], "double"),
    "c": (["a", "b\0", "c", "d"], "string"),
    "w": (["1|2", "1|x", "1", "inf|2"], "string"),
}


def test_bad_rows_are_reported_as_bad_lines_are(tmp_path):
    """One fault a row: the same line, reason and value as of text."""
    good = {name: values[0] for name, (values, _) in FAULTS.items()} | {"k": "a|b"}
    rows = [good] + [good | {name: value} for name, (values, _) in FAULTS.items() for value in values[1:]] + [good]
    columns = {name: pa.array([r[name] for r in rows], FAULTS.get(name, ("", "string"))[1]) for name in good}
    schema = (
        '[label]\ncolumn = "y"\n[time]\ncolumn = "t"\nformat = "iso"\n[[dense]]\ncolumn = "d"\n'
        '[[dense]]\ncolumn = "e"\n[[categorical]]\ncolumn = "c"\n'
        '[[categorical]]\ncolumn = "k"\nseparator = "|"\nweights = "w"\n'
    )
    header = ",".join(good)
    lines = [
        ",".join(str(r[name]) if r[name] == r[name] and r[name] is not None else "" for name in good) for r in rows
    ]
    (tmp_path / "log.csv").write_text("\n".join([header, *lines]) + "\n")
    pq.write_table(pa.table(columns), tmp_path / "log.parquet")
    reported = []
    for name in ("csv", "parquet"):
        options = {"on_bad_line": "skip", "min_count": 1, "split": (1, 0, 0)}
        folder = made(tmp_path, f"of_{name}", schema, tmp_path / f"log.{name}", **options)
        rest = (folder / "bad_lines.tsv").read_text().splitlines()[1:]
        first = 2 if name == "csv" else 1  # a file's header is its first line
        reported.append([(int(line.split("\t")[1]) - first, line.split("\t")[2].replace("1.0", "1")) for line in rest])
    assert reported[0] == reported[1]
    assert len(reported[0]) >= len(rows) - 5
    assert (1, "field 'y' holds 'maybe', which is neither 0 nor 1 (nor -1, true, false, yes, no, t, f, y, n); set "
            "positive_values or positive_at_least in [label]") in reported[1]  # fmt: skip
    text = (tmp_path / "of_parquet" / "bad_lines.tsv").read_text().splitlines()[1].split("\t")[3]
    assert text.split("\x1f")[:2] == ["maybe", "2024-05-01"]


def test_folders_patterns_and_what_their_names_say(tmp_path, monkeypatch):
    for part in ("day=03/site=a%20b", "day=03/site=c", "day=10/site=__HIVE_DEFAULT_PARTITION__", "_log", ".tmp"):
        (tmp_path / "log" / part).mkdir(parents=True)
    rows = {"day=03/site=a%20b": ("03", "a b"), "day=03/site=c": ("03", "c")}
    rows |= {"day=10/site=__HIVE_DEFAULT_PARTITION__": ("10", "")}
    columns = {"y": [], "c": [], "day": [], "site": []}
    for number, (part, (day, site)) in enumerate(rows.items()):
        for piece in (2, 10):
            labels, values = [0, 1] * 5, [f"v{number}", f"w{piece}"] * 5
            pq.write_table(pa.table({"y": labels, "c": values}), tmp_path / "log" / part / f"part-{piece}.parquet")
            for name, column in zip(columns, (labels, values, [day] * 10, [site] * 10), strict=True):
                columns[name] += column
    for name in ("_log/part-1.parquet", "_SUCCESS", ".tmp/part-1.parquet"):
        (tmp_path / "log" / name).write_text("no table")
    write_csv(tmp_path / "log.csv", {name: pa.array(values) for name, values in columns.items()})
    schema = SMALL + '[[categorical]]\ncolumn = "day"\n[[categorical]]\ncolumn = "site"\n'
    expected = shards(made(tmp_path, "of_text", schema, tmp_path / "log.csv"))
    assert shards(made(tmp_path, "of_folder", schema, tmp_path / "log")) == expected
    assert shards(made(tmp_path, "of_uri", schema, f"file://{tmp_path}/log")) == expected
    files = [one["file"] for one in Schema.load(tmp_path / "of_uri").provenance["inputs"]]
    assert files[:2] == [f"file://{tmp_path}/log/day%3D03/site%3Da%2520b/part-{piece}.parquet" for piece in (2, 10)]
    for pattern in ("log/**/*.parquet", "log/*/*/part-*.parquet", "l?g/**/part-*"):
        assert (
            shards(made(tmp_path, f"of_{pattern.count('*')}_{len(pattern)}", schema, f"{tmp_path}/{pattern}"))
            == expected
        )
    assert shards(made(tmp_path, "of_uris", schema, f"file://{tmp_path}/log/**/part-*.parquet")) == expected
    monkeypatch.chdir(tmp_path)
    assert places.expand("*.csv") == ["./log.csv"]
    with pytest.raises(DatasetError, match=r"input log/\*\.parquet names no file: .* this pattern in log"):
        places.expand("log/*.parquet")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DatasetError, match="empty is a folder without files"):
        made(tmp_path, "out", schema, tmp_path / "empty")
    with pytest.raises(DatasetError, match=r"input file://.*gone does not exist"):
        made(tmp_path, "out", schema, f"file://{tmp_path}/gone")
    with pytest.raises(DatasetError, match=r"input nowhere://x cannot be reached: .* give files, s3://"):
        made(tmp_path, "out", schema, "nowhere://x")
    with pytest.raises(DatasetError, match="an input at logs holds a password") as refused:
        made(tmp_path, "out", schema, "s3://key:hushed@logs/clicks")
    assert "hushed" not in str(refused.value)


def test_compressed_text(tmp_path):
    lines = write_log(tmp_path / "log.csv", 300)
    expected = shards(made(tmp_path, "plain", SCHEMA, tmp_path / "log.csv"))
    content = (tmp_path / "log.csv").read_bytes()
    half = len(content) // 2
    packed = [pa.compress(part, "zstd", asbytes=True) for part in (content[:half], content[half:])]
    (tmp_path / "log.csv.zst").write_bytes(b"".join(packed))  # two frames, as programs that work in parallel write
    (tmp_path / "log.csv.bz2").write_bytes(bz2.compress(content))
    for name in ("log.csv.zst", "log.csv.bz2"):
        assert shards(made(tmp_path, name + "-out", SCHEMA, tmp_path / name)) == expected
        assert shards(made(tmp_path, name + "-uri", SCHEMA, f"file://{tmp_path / name}")) == expected
    assert len(lines) == 300
    (tmp_path / "cut.zst").write_bytes(packed[0][:-9])
    with pytest.raises(DatasetError, match=r"cut.zst is damaged: .*download or copy it again"):
        made(tmp_path, "out", SCHEMA, tmp_path / "cut.zst")


def test_damaged_arrow_files(tmp_path):
    table = pa.table({"y": [0, 1] * 50, "c": ["a", "b"] * 50})
    with pa.ipc.new_file(tmp_path / "log", table.schema) as file:
        file.write_table(table)
    with pytest.raises(DatasetError, match="is an Arrow file, which only the format csv reads"):
        prepare(Criteo("criteo-kaggle"), [str(tmp_path / "log")], tmp_path / "out")
    content = bytearray((tmp_path / "log").read_bytes())
    (tmp_path / "cut").write_bytes(content[:-20])
    offsets = content.index(np.arange(101, dtype=np.int32).tobytes())
    content[offsets + 43] = 127  # the end of a text far outside
    (tmp_path / "flipped").write_bytes(content)
    named = pa.table({"y": [0, 1], "column": ["a", "b"]})
    with pa.ipc.new_file(tmp_path / "named", named.schema) as file:
        file.write_table(named)
    (tmp_path / "named").write_bytes((tmp_path / "named").read_bytes().replace(b"column", b"colum\xe6"))
    for name in ("cut", "flipped", "named"):
        with pytest.raises(DatasetError, match=rf"{name} is a damaged Arrow file: .*; download or copy it again"):
            made(tmp_path, "out", SMALL, tmp_path / name)


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
