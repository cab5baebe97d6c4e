"""Logs that are no plain CSV: libsvm lines, printed lists, decimal commas, dates of other patterns."""

import concurrent.futures
import datetime
import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prepare_reference import read_dataset, read_vocabulary

from jrec.data import Encoder
from jrec.data.schema import DatasetError, Schema
from jrec.prepare.joined import csv_source
from jrec.prepare.prepare import prepare
from jrec.prepare.prepare_options import PrepareOptions
from jrec.prepare.readers import load_schema

LABEL = '[label]\ncolumn = "y"\n'
LIBSVM = 'layout = "libsvm"\n[label]\ncolumn = "label"\n[[categorical]]\ncolumn = "features"\n'
LISTS = LABEL + '[[categorical]]\ncolumn = "c"\nlists = true\n'


def made(folder, schema, text, *, workers=None, **options):
    """The dataset's columns and values by feature, of one log, text or a table's columns."""
    (folder / "schema.toml").write_text(schema)
    if isinstance(text, dict):
        pq.write_table(pa.table(text), folder / "log")
    else:
        (folder / "log").write_bytes(text.encode() if isinstance(text, str) else text)
    source = csv_source(load_schema(str(folder / "schema.toml")))
    options = {"split": (1, 0, 0), "min_count": 1, "threads": 1} | options
    prepare(source, [str(folder / "log")], folder / "out", PrepareOptions(**options), workers=workers)
    dataset, columns = read_dataset(folder / "out")
    values = {}
    for feature in dataset.categorical:
        names, _ = read_vocabulary(folder / "out", dataset.table(feature.table))
        rows = columns[feature.name]
        values[feature.name] = [[names[r] for r in row] if isinstance(row, list) else names[row] for row in rows]
    return columns, values


def test_libsvm_lines(tmp_path):
    text = "1 3:0.5 17:1\n-1 4:1.5e0\r\n+1 3:2 4:-1 90:7   # a comment 1:2\n1\n-1 # nothing\n"
    columns, values = made(tmp_path, LIBSVM + 'weights = "values"\n', text)
    assert values["features"] == [["3", "17"], ["4"], ["3", "4", "90"], [], []]
    assert columns["features:weight"] == [[0.5, 1], [1.5], [2, -1, 7], [], []]
    assert columns["label"] == [1, 0, 1, 1, 0]
    encoded = Encoder(Schema.load(tmp_path / "out")).columns({"features": [["90"], []], "values": [[0.5], []]})
    assert encoded.weights["features"].tolist() == [0.5]


@pytest.mark.parametrize("line", ["1 3", "1 3:", "1 :3", "1  3:1", "1 3:1 :", "1 qid:3 4:1", "1 3:1:2", "", "1:2 3:4"])
def test_lines_that_are_none_of_libsvm_s(tmp_path, line):
    with pytest.raises(DatasetError, match=r"log:2: (the line has 1 field.* a libsvm line is LABEL|the line is empty)"):
        made(tmp_path, LIBSVM, f"1 3:1\n{line}\n1 5:2\n")


def test_bad_libsvm_lines_are_kept_as_they_are(tmp_path):
    made(tmp_path, LIBSVM + 'weights = "values"\n', "1 3:1  # one\n1 3:x 4:1 \n7 3:1\n-1 5:2\n", on_bad_line="skip")
    kept = (tmp_path / "out/bad_lines.tsv").read_text()
    assert "1 3:x 4:1 \n" in kept
    assert "7 3:1\n" in kept
    with pytest.raises(DatasetError, match="layout = 'libsvm' has its own columns and delimiter"):
        made(tmp_path, 'columns = ["a", "b"]\n' + LIBSVM, "")


def test_lists_as_json_and_python_print_them(tmp_path):
    lists = [
        ["a", "b, c", 'say "x"', "it's", "back\\slash", "tab\t", "line\nend", "é", "漢字", "😀", "", "a longer text"],
        [], ["1", "2"], ["[x]"], ["~"],
    ]  # fmt: skip
    printed = (
        [json.dumps(one) for one in lists]
        + [json.dumps(one, ensure_ascii=False) for one in lists]
        + list(map(repr, lists))
    )
    more = {
        "[1, 2.5,  -3 ,true]": ["1", "2.5", "-3", "true"],
        "[null, None]": ["", ""],
        "": [],
        "null": [],
        " [ ] ": [],
        "[ 'a' ]": ["a"],
        r'["\/\u00e9\xe9\ud83d\ude00"]': ["/éé😀"],
    }
    quoted = ['"' + text.replace('"', '""') + '"' for text in [*printed, *more]]
    wanted = [*lists * 3, *more.values()]
    _, values = made(tmp_path, LISTS, "y,c\n" + "".join(f"{k % 2},{text}\n" for k, text in enumerate(quoted)))
    assert values["c"] == wanted
    for kind in (pa.large_string(), pa.dictionary(pa.int32(), pa.string())):
        pretty = ['[\n "a",\r\n 2\n]', None]
        table = {"y": [k % 2 for k in range(len(quoted) + 2)], "c": pa.array([*printed, *more, *pretty], kind)}
        _, values = made(tmp_path, LISTS, table, overwrite=True)
        assert values["c"] == [*wanted, ["a", "2"], []]
    encoder = Encoder(Schema.load(tmp_path / "out"))
    texts = [*printed, "", "null", "[1, null]"]
    ragged = [*lists * 3, [], [], ["1", None]]
    one, other = (encoder.columns({"c": column}).ids["c"] for column in (texts, ragged))
    np.testing.assert_array_equal(one.offsets, other.offsets)
    np.testing.assert_array_equal(one.values, other.values)
    with pytest.raises(DatasetError, match=r"column 'c' holds 'a\|b' in example 0, which is no list"):
        encoder.columns({"c": ["a|b"]})


@pytest.mark.parametrize(
    "text",
    [
        "a",
        "[",
        "]",
        "[a",
        "a]",
        "[[1]]",
        '[{"a": 1}]',
        "['a",
        "['a'] x",
        "['a' 'b']",
        "[1,]",
        "[,1]",
        r"['\q']",
        r"['\u12']",
    ],
)
def test_texts_that_are_no_lists(tmp_path, text):
    with pytest.raises(DatasetError, match=r"log:3: field 'c' holds .*, which is no list such as"):
        made(tmp_path, 'delimiter = "\\t"\nquoting = false\n' + LISTS, f"c\ty\n[1]\t0\n{text}\t1\n")
    with pytest.raises(DatasetError, match=r"log:2: field 'c' holds .*, which is no list such as"):
        made(tmp_path, LISTS, {"y": [0, 1, 0], "c": ["[1]", text, "[2]"]})
    _, values = made(tmp_path, LISTS, {"y": [0, 1, 1], "c": ["[1]", text, "[2]"]}, on_bad_line="skip")
    assert values["c"] == [["1"], ["2"]]


def test_printed_lists_of_weights(tmp_path):
    schema = LISTS + 'weights = "w"\n'
    columns, _ = made(tmp_path, schema, 'y,c,w\n1,"[1, 2]","[0.5, 0.1000000000000000055511151231257827]"\n0,[],[]\n')
    table = {"y": [1, 0], "c": ["[1, 2]", "[]"], "w": ["[0.5, 0.1000000000000000055511151231257827]", "null"]}
    of_table, _ = made(tmp_path, schema, table, overwrite=True)
    assert of_table["c:weight"] == columns["c:weight"] == [[0.5, np.float32(0.1)], []]
    with pytest.raises(DatasetError, match=r"log:2: field 'w' holds .*, which is not a number"):
        made(tmp_path, schema, "y,c,w\n1,[1],['x']\n", overwrite=True)
    with pytest.raises(DatasetError, match=r"log:1: field 'w' holds .*, which is not a number"):
        made(tmp_path, schema, {"y": [1], "c": ["[1]"], "w": ["['x']"]}, overwrite=True)
    with pytest.raises(DatasetError, match=r"column 'c' holds int64, but the schema says lists = true of it"):
        made(tmp_path, LISTS, {"y": [1], "c": [5]}, overwrite=True)


CAFES = 'encoding = "{}"\n[label]\ncolumn = "größe"\n[[categorical]]\ncolumn = "c"\n'


@pytest.mark.parametrize(("encoding", "texts"), [("latin-1", ["Café", "\x85", "ü", "a"]), ("cp1252", ["“Café”", "€"])])
def test_other_encodings(tmp_path, monkeypatch, encoding, texts):
    monkeypatch.setattr("jrec.prepare.readers.lines.BLOCK_BYTES", 9)
    lines = [f"{k % 2},{text}\n" for k, text in enumerate(texts * 9)]
    content = "".join(["größe,c\n", *lines]).encode(encoding)
    _, values = made(tmp_path, CAFES.format(encoding), content)
    assert values["c"] == texts * 9
    _, values = made(tmp_path, CAFES.format(encoding), gzip.compress(content), overwrite=True)
    assert values["c"] == texts * 9
    encoder = Encoder(Schema.load(tmp_path / "out"))
    (tmp_path / "new.csv").write_bytes(f"c\n{texts[0]}\nnew\n".encode(encoding))
    (piece,) = encoder.stream(str(tmp_path / "new.csv"), batch_size=8)
    assert piece.ids["c"].tolist() == encoder.columns({"c": [texts[0], "new"]}).ids["c"].tolist()
    schema = f'encoding = "{encoding}"\n' + LABEL + '[[categorical]]\ncolumn = "c"\n'
    with pytest.raises(
        DatasetError, match=rf"log:2: the text is UTF-8, but encoding is '{encoding}'; give files of one"
    ):
        made(tmp_path, schema, "y,c\n1,ü\n0,é\n", overwrite=True)


def test_encodings_that_do_not_fit(tmp_path):
    with pytest.raises(DatasetError, match=r"encoding is 'utf-16'; choose one of utf-8, latin-1, cp1252"):
        made(tmp_path, CAFES.format("utf-16"), "")
    with pytest.raises(DatasetError, match=r"log:3: byte 0x81 is no character of cp1252; .* latin-1"):
        made(tmp_path, CAFES.format("cp1252"), b"gr\xf6\xdfe,c\n1,a\n1,\x81\n")
    with pytest.raises(
        DatasetError, match=r"log:2: field 'c' holds 'Caf.*xe9', which is not UTF-8 .* encoding = \"latin"
    ):
        made(tmp_path, LABEL + '[[categorical]]\ncolumn = "c"\n', b"y,c\n1,Caf\xe9\n")
    with pytest.raises(DatasetError, match=r"log is UTF-16 text; convert it first: iconv -f UTF-16 -t UTF-8"):
        made(tmp_path, LISTS, "y,c\n1,a\n".encode("utf-16"))


COMMA = (
    'delimiter = ";"\ndecimal = ","\nmissing_values = ["", "k.A."]\n'
    + LABEL
    + ('[[dense]]\ncolumn = "x"\nmissing = 2.5\n[[categorical]]\ncolumn = "q"\nquantiles = 2\n')
)


def test_decimal_commas(tmp_path):
    long = "0,1000000000000000055511151231257827"
    columns, _ = made(tmp_path, COMMA, f"y;x;q\n1;3,25;0,5\n0;-7;1,5\n0;k.A.;1e1\n1;{long};\n")
    assert columns["x"] == [3.25, -7, 2.5, np.float32(0.1)]
    encoder = Encoder(Schema.load(tmp_path / "out"))
    np.testing.assert_array_equal(encoder.columns({"x": ["3,25", None], "q": [1, 1]}).dense[:, 0], [3.25, 2.5])
    np.testing.assert_array_equal(encoder.columns({"x": [3.25], "q": [1]}).dense[:, 0], [3.25])
    for wrong in ("3.25", "1.000,5", "1,5,5"):
        with pytest.raises(DatasetError, match=f"log:2: field 'x' holds '{wrong}', which is not a number"):
            made(tmp_path, COMMA, f"y;x;q\n1;{wrong};1\n", overwrite=True)
    with pytest.raises(DatasetError, match=r"decimal is ','; it must be '.' or ',', and not the delimiter"):
        made(tmp_path, COMMA.replace('";"', '","'), "")


@pytest.mark.parametrize(
    "pattern", ["%d.%m.%Y %H:%M", "%m/%d/%Y %I:%M:%S %p", "%d-%b-%Y %H:%M", "%Y%m%d%H%M", "%Y/%m/%d %H:%M"]
)
def test_dates_of_other_patterns(tmp_path, pattern):
    start = datetime.datetime(2014, 1, 30, 11, 30)
    times = [start + datetime.timedelta(hours=7 * k) for k in (3, 0, 40, 1, 2)]
    schema = (
        LABEL
        + f'[time]\ncolumn = "t"\nformat = "{pattern}"\n'
        + "".join(f'[[categorical]]\ncolumn = "t"\npart = "{part}"\n' for part in ("hour", "weekday"))
    )
    _, values = made(tmp_path, schema, "y,t\n" + "".join(f"{at.hour % 2},{at.strftime(pattern)}\n" for at in times))
    assert values["t_hour"] == [str(at.hour) for at in sorted(times)]
    assert values["t_weekday"] == [str(at.weekday()) for at in sorted(times)]
    encoded = Encoder(Schema.load(tmp_path / "out")).columns({"t": [times[0].strftime(pattern)]})
    assert len(encoded.ids["t_hour"]) == 1
    for wrong in ("x", times[0].strftime(pattern) + "x", ""):
        with pytest.raises(DatasetError, match=r"log:2: field 't' (is blank|holds .*, which does not fit the pattern)"):
            made(tmp_path, schema, f"y,t\n1,{wrong}\n", overwrite=True)


@pytest.mark.parametrize(
    ("pattern", "good", "wrong"),
    [
        ("%d.%m.%Y", "29.2.2024", "30.02.2024"),
        ("%d.%m.%Y", "01.03.2023", "29.02.2023"),
        ("%y%m%d%H", "14030100", "14022900"),
        ("%d-%b-%Y %H:%M", "1-May-2024 07:05", "31-Apr-2024 07:05"),
    ],
)
def test_days_that_no_month_has(tmp_path, pattern, good, wrong):
    """Arrow takes the 30th of February for the 1st of March."""
    schema = LABEL + f'[time]\ncolumn = "t"\nformat = "{pattern}"\n[[categorical]]\ncolumn = "t"\npart = "hour"\n'
    made(tmp_path, schema, f"y,t\n1,{good}\n0,{good}\n")
    with pytest.raises(DatasetError, match=f"log:3: field 't' holds '{wrong}', which does not fit the pattern"):
        made(tmp_path, schema, f"y,t\n1,{good}\n1,{wrong}\n", overwrite=True)


def test_a_joined_file_and_parts_in_encodings_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr("jrec.prepare.parts.PART_BYTES", 40)
    schema = 'encoding = "latin-1"\n' + LABEL + '[[categorical]]\ncolumn = "c"\n'
    join = '[[join]]\nfile = "side"\nkey = "c"\nencoding = "utf-8"\n[[join.categorical]]\ncolumn = "g"\n'
    content = ("y,c\n" + "0,Café\n1,Thé\n1,Eau\n" * 9).encode("latin-1")
    (tmp_path / "side").write_text("c,g\nCafé,é\nThé,à\n", encoding="utf-8")
    _, values = made(tmp_path, schema + join, content)
    assert values["g"] == ["é", "à", ""] * 9
    with concurrent.futures.ThreadPoolExecutor(2) as workers:
        _, values = made(tmp_path, schema, content, workers=workers, overwrite=True)
    assert values["c"] == ["Café", "Thé", "Eau"] * 9
