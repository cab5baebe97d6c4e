"""The parser against Python's own int, float, csv and str."""

import csv
import io
import itertools
import math
import re

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from jrec.data import scan
from jrec.data.keys import buckets, decode_keys, hash_texts, integer_keys, is_text, short_key, text_key
from jrec.prepare.readers.columnar import parse_rows, rows_of_lines
from jrec.prepare.readers.lines import Block
from jrec.prepare.readers.parse import Dialect, Field, bad_quote

PLAIN_CHARACTERS = st.characters(blacklist_characters='\n\r\0,"', blacklist_categories=("Cs",))
PLAIN_TEXT = st.text(PLAIN_CHARACTERS, max_size=20)


def parse(text, *fields, **dialect):
    content = text.encode() if isinstance(text, str) else text
    block = Block(path="log", line=1, text=content, bytes_read=len(content))
    described = Dialect(fields=fields, **dialect)
    return parse_rows(rows_of_lines(block, described), described, 0)


def shown(parsed, name):
    """A key column as texts."""
    keys = parsed.columns[name]
    long = parsed.long_texts
    texts = []
    for key in keys:
        if is_text(np.array([key]))[0]:
            i = int(np.flatnonzero(long.keys == key)[0])
            texts.append(bytes(long.buffer[long.starts[i] : long.ends[i]]).decode())
        else:
            _offsets, content = decode_keys(np.array([key]), np.empty(0, np.int64), np.empty(0, np.uint8))
            texts.append(bytes(content).decode())
    return texts


def test_numbers_are_those_of_python():
    texts = ["0", "-0", "+7", "1382", "-2", "0.1", ".5", "5.", "1e3", "1E-3", "-2.5e+07", "9007199254740993", "1e22"]
    texts += [
        "1e23",
        "123456789012345678901234567890",
        "0.30000000000000004",
        "4.35",
        "2.2250738585072014e-308",
        "0e500",
    ]
    parsed = parse("".join(f"{t}\n" for t in texts), Field(name="x", kind="number"))
    assert not parsed.bad
    assert parsed.columns["x"].tolist() == [float(t) for t in texts]


@hypothesis.given(st.lists(st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.integers(-(10**25), 10**25))))
def test_any_number_is_correctly_rounded(values):
    hypothesis.assume(values)
    parsed = parse("".join(f"{v!r}\n" for v in values), Field(name="x", kind="number"))
    assert not parsed.bad
    assert parsed.columns["x"].tolist() == [float(v) for v in values]


@pytest.mark.parametrize(
    "text", ["x", "1x", "--1", "1e", "1e+", ".", "-", "1 ", " 1", "0x1", "1_0", "1.2.3", "e5", "infx"]
)
def test_what_is_no_number(text):
    (bad,) = parse(f"1\n{text}\n2\n", Field(name="x", kind="number")).bad
    assert (bad.line, bad.text) == (2, text.encode())
    assert bad.reason == f"field 'x' holds {text!r}, which is not a number"


@pytest.mark.parametrize("text", ["nan", "NaN", "inf", "-inf", "+Infinity", "1e999", "-1e400"])
def test_numbers_that_are_not_finite(text):
    parsed = parse(f"1\n{text}\n2\n", Field(name="x", kind="number"))
    assert parsed.columns["x"].tolist() == [1, 2]
    assert "is not a finite number" in parsed.bad[0].reason
    assert text in parsed.bad[0].reason


def test_blanks():
    parsed = parse(
        "\t1\n2\t\n", Field(name="a", kind="number"), Field(name="b", kind="integer", blank=False), delimiter="\t"
    )
    assert math.isnan(parsed.columns["a"][0])
    assert parsed.rows == 1
    assert (parsed.bad[0].line, parsed.bad[0].reason) == (2, "field 'b' is blank")


@pytest.mark.parametrize(("text", "value"), [("0", 0), ("-17", -17), ("+5", 5), ("1511658000", 1511658000), ("007", 7)])
def test_integers(text, value):
    assert parse(f"{text}\n", Field(name="x", kind="integer")).columns["x"].tolist() == [value]


@pytest.mark.parametrize("text", ["-", "1.0", "12a", "9" * 19])
def test_what_is_no_integer(text):
    parsed = parse(f"1\n{text}\n", Field(name="x", kind="integer"))
    assert parsed.rows == 1
    assert "is not an integer" in parsed.bad[0].reason


def test_no_integer_is_blank():
    assert parse("1\n\n", Field(name="x", kind="integer")).bad[0].reason == "field 'x' is blank"


def test_hexadecimals_are_compared_as_numbers_of_8_digits():
    parsed = parse("0a1B2c3D\n0A1b2c3d\n\n00000000\n", Field(name="x", kind="hex"))
    assert shown(parsed, "x") == ["0a1b2c3d", "0a1b2c3d", "", "00000000"]
    for text in ("123", "0000000g", "123456789"):
        assert "is not 8 hexadecimal digits" in parse(f"{text}\n", Field(name="x", kind="hex")).bad[0].reason


@hypothesis.given(st.lists(PLAIN_TEXT, min_size=1, max_size=8))
def test_texts_keep_their_text(texts):
    parsed = parse("".join(f"{t},\n" for t in texts), Field(name="x", kind="text"), Field(name="y", kind="skip"))
    assert not parsed.bad
    assert shown(parsed, "x") == texts
    for i, text in enumerate(texts):
        assert int(parsed.columns["x"][i]) == text_key(text)
        for j, other in enumerate(texts):
            assert (parsed.columns["x"][i] == parsed.columns["x"][j]) == (text == other)


KEY_TEXTS = ["", "a", "1234567", "12345678", "0123456789", "123456789012345", "72057594037927935", "72057594037927936"]
KEY_TEXTS += [
    "deadbeef",
    "DEADBEEF",
    "deadbee",
    "deadbeef0",
    "-999999",
    "99999999999999999",
    "ünïcödé",
    "00000001",
    "1",
]


def test_keys_are_exact_and_reversible_or_marked_as_hashes():
    keys = np.array([text_key(t) for t in KEY_TEXTS], np.uint64)
    assert len(set(keys.tolist())) == len(KEY_TEXTS)
    long = is_text(keys)
    assert [t for t, is_long in zip(KEY_TEXTS, long, strict=True) if is_long] == [
        "0123456789", "72057594037927936", "DEADBEEF", "deadbeef0", "99999999999999999", "ünïcödé",
    ]  # fmt: skip
    stored = [t.encode() for t, is_long in zip(KEY_TEXTS, long, strict=True) if is_long]
    ends = np.cumsum([len(t) for t in stored])
    offsets, content = decode_keys(keys, ends, np.frombuffer(b"".join(stored), np.uint8))
    assert [bytes(content[a:b]).decode() for a, b in itertools.pairwise(offsets)] == KEY_TEXTS


def test_integer_keys_are_those_of_their_texts():
    values = np.array([0, 9, 10, 1234567, 12345678, 2**56 - 1, -1, -999999], np.int64)
    assert integer_keys(values).tolist() == [text_key(str(v)) for v in values]
    with pytest.raises(ValueError, match="outside"):
        integer_keys(np.array([2**56]))


MASK = 2**64 - 1


def mix64(x):
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def plain_hash(text, seed):
    """The key of a long text, from its definition."""
    golden = 0x9E3779B97F4A7C15
    content = text.encode()
    key = mix64(golden ^ len(content) ^ mix64(seed))
    for start in range(0, len(content), 8):
        key = (mix64(key ^ int.from_bytes(content[start : start + 8], "big")) + golden) & MASK
    return mix64(key) | 1 << 63


@hypothesis.given(st.text(PLAIN_CHARACTERS, min_size=18, max_size=40), st.integers(0, 2**63))
def test_hashes_are_what_the_definition_says(text, seed):
    assert text_key(text, seed) == plain_hash(text, seed)


def test_hashes_and_buckets_are_stable():
    """These figures are part of the dataset format: a change would break every dataset with hashed tables."""
    assert text_key("a long text") == 17379751234226046840
    assert text_key("a long text", seed=1) != text_key("a long text")
    keys = [0, text_key("a"), text_key("deadbeef"), text_key("a long text")]
    assert buckets(np.array(keys, np.uint64), 1000).tolist() == [0, *(1 + mix64(k) % 999 for k in keys[1:])]
    assert buckets(np.array(keys, np.uint64), 1000).tolist() == [0, 212, 13, 494]
    assert buckets(np.array(keys, np.uint64), 2).tolist() == [0, 1, 1, 1]


def test_fingerprints_differ_from_keys():
    texts = [f"some long text {i}".encode() for i in range(1000)]
    ends = np.cumsum([0, *map(len, texts)])
    keys, fingerprints = hash_texts(np.frombuffer(b"".join(texts), np.uint8), ends[:-1], ends[1:], np.uint64(0))
    assert len(np.unique(keys)) == len(np.unique(fingerprints)) == 1000
    assert not np.isin(keys, fingerprints).any()
    assert not short_key(np.frombuffer(texts[0], np.uint8), 0, len(texts[0]))[0]


@hypothesis.given(st.binary(max_size=12))
def test_utf8_is_what_python_says(content):
    content = content.replace(b"\n", b"x")
    try:
        content.decode()
        valid = scan.HAS_NUL if b"\0" in content else scan.OK
    except UnicodeDecodeError:
        valid = None
    code = scan.check_text(np.frombuffer(content + b"\n", np.uint8), 0, len(content))
    if valid is None:
        assert code in (scan.NOT_UTF8, scan.HAS_NUL)
    else:
        assert code == valid


@hypothesis.given(st.lists(st.text("ab,\"'é ", max_size=8), min_size=1, max_size=4).map(tuple), st.booleans())
def test_quoting_is_that_of_the_csv_module(row, carriage_return):
    file = io.StringIO()
    csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator="\r\n" if carriage_return else "\n").writerow(row)
    fields = [Field(name=str(i), kind="text") for i in range(len(row))]
    parsed = parse(file.getvalue(), *fields, quoting=True)
    assert not parsed.bad
    assert [shown(parsed, f.name)[0] for f in fields] == list(row)


@pytest.mark.parametrize("line", ['"open,1', '"a"b,1', '"a""b,1', '"'])
def test_bad_quotes(line):
    fields = (Field(name="x", kind="text"), Field(name="y", kind="number"))
    parsed = parse(f"a,1\n{line}\nb,2\n", *fields, quoting=True)
    assert parsed.columns["y"].tolist() == [1, 2]
    assert (parsed.bad[0].line, parsed.bad[0].text) == (2, line.encode())
    assert "quote" in parsed.bad[0].reason


def test_a_line_without_quoting_takes_quotes_as_they_are():
    assert shown(parse('"a",1\n', Field(name="x", kind="text"), Field(name="y", kind="skip")), "x") == ['"a"']


def test_long_delimiters_and_carriage_returns():
    parsed = parse("1::a:b::3\r\n2::::4\r\n", Field(name="x", kind="integer"), Field(name="y", kind="text"),
                   Field(name="z", kind="integer"), delimiter="::")  # fmt: skip
    assert shown(parsed, "y") == ["a:b", ""]
    assert parsed.columns["z"].tolist() == [3, 4]


def test_wrong_number_of_fields():
    fields = (Field(name="x", kind="integer"), Field(name="y", kind="integer"))
    parsed = parse("1,2\n3\n4,5,6\n\nbad\n7,8\n", *fields, hint=" (x, y)")
    assert parsed.columns["x"].tolist() == [1, 7]
    assert sorted((b.line, b.reason) for b in parsed.bad) == [
        (2, "the line has 1 field(s) where 2 are expected (x, y)"),
        (3, "the line has 3 field(s) where 2 are expected (x, y)"),
        (4, "the line is empty"),
        (5, "the line has 1 field(s) where 2 are expected (x, y)"),
    ]


@hypothesis.given(st.lists(st.lists(st.text("abc", min_size=1, max_size=12), max_size=5), min_size=1, max_size=6))
def test_lists_and_weights(rows):
    text = "".join(f"{'|'.join(r)};{'|'.join(str(i + 0.5) for i in range(len(r)))}\n" for r in rows)
    fields = (Field(name="x", kind="texts"), Field(name="w", kind="weights"))
    parsed = parse(text, *fields, delimiter=";")
    assert not parsed.bad
    keys, weights = parsed.lists("x"), parsed.lists("w")
    for i, row in enumerate(rows):
        a, b = keys.offsets[i], keys.offsets[i + 1]
        assert keys.values[a:b].tolist() == [text_key(t) for t in row]
        assert weights.values[weights.offsets[i] : weights.offsets[i + 1]].tolist() == [
            j + 0.5 for j in range(len(row))
        ]


def test_a_bad_line_leaves_nothing_behind():
    """The list and the slow number before the bad field must not show up in the next row."""
    fields = (Field(name="l", kind="texts"), Field(name="n", kind="number"), Field(name="i", kind="integer"))
    parsed = parse("a long element|b,1e99,x\nc,2,3\n", *fields)
    assert len(parsed.bad) == 1
    assert parsed.lists("l").values.tolist() == [text_key("c")]
    assert parsed.lists("l").offsets.tolist() == [0, 1]
    assert parsed.columns["n"].tolist() == [2]


def test_empty_list_elements_are_missing_values():
    lists = parse("a||b|\n\n|\n", Field(name="l", kind="texts")).lists("l")
    assert np.diff(lists.offsets).tolist() == [4, 0, 2]
    assert lists.values.tolist() == [text_key("a"), 0, text_key("b"), 0, 0, 0]


def test_reject_names_the_value_and_removes_the_row():
    parsed = parse("5,a\n9,b\n7,c\n", Field(name="x", kind="integer"), Field(name="y", kind="text"))
    parsed.reject(parsed.columns["x"] == 9, "x", "is nine")
    assert parsed.columns["x"].tolist() == [5, 7]
    assert shown(parsed, "y") == ["a", "c"]
    assert [(b.line, b.reason, b.text) for b in parsed.bad] == [(2, "field 'x' holds '9', which is nine", b"9,b")]


def fields_of(line, delimiter, quoting):
    """The values of a line; None where its quotes are wrong."""
    line, values = line.removesuffix(b"\r"), []
    while True:
        quoted = re.match(rb'"((?:[^"]|"")*)"', line) if quoting else None
        if quoted is not None:
            value, line = quoted[1].replace(b'""', b'"'), line[quoted.end() :]
        else:
            value, mark, rest = line.partition(delimiter)
            line = mark + rest
            if quoting and value.startswith(b'"'):
                return None
        values.append(value)
        if not line:
            return values
        if not line.startswith(delimiter):
            return None
        line = line[len(delimiter) :]


PIECES = [b"a", b"7", b'"', b'""', b",", b"::", b":", b"\x1f", b"\r", b"\n", b"\r\n", b"\0", b"\xff", b"\xc3\xa9"]
PIECES += [b"\xef\xbb\xbf", b'"x","y"\n', b"x::y\n", b"longer than a key"]


@hypothesis.settings(max_examples=300)
@hypothesis.given(st.lists(st.sampled_from(PIECES), max_size=12), st.sampled_from([",", "::", ";"]), st.booleans())
def test_every_line_is_its_own(pieces, delimiter, quoting):
    """Whatever is in one line, others are read as they would be alone, and a bad one is named as it stands there."""
    content = b"".join(pieces) + b"\n"
    for names in (("x", "y"), ("x",)):
        fields = tuple(Field(name=name, kind="text") for name in names)
        parsed = parse(content, *fields, delimiter=delimiter, quoting=quoting)
        good = dict(zip(parsed.lines.tolist(), zip(*(shown(parsed, name) for name in names), strict=True), strict=True))
        bad = {line.line - 1: line.text for line in parsed.bad}
        for number, line in enumerate(content.removesuffix(b"\n").split(b"\n")):
            values = fields_of(line, delimiter.encode(), quoting)
            if values is None or len(values) != len(names) or not all(is_utf8(v) and b"\0" not in v for v in values):
                assert bad.pop(number) == line
            else:
                assert [v.encode() for v in good.pop(number)] == values
        assert not bad
        assert not good


def is_utf8(text):
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_why_lines_cannot_be_split():
    fields = (Field(name="x", kind="text"), Field(name="y", kind="text"))
    text = 'a,b\n"a,b\n"a,b"c\na,"b"c,d\na\rb,c\na,b,"c\n"a\rb",c\r\n\r\n'
    parsed = parse(text, *fields, quoting=True)
    assert shown(parsed, "x") == ["a", "a\rb", "a\rb"]
    reasons = {bad.line: bad.reason for bad in parsed.bad}
    assert sorted(reasons) == [2, 3, 4, 6, 8]
    for line, name in ((2, "'x'"), (3, "'x'"), (4, "'y'"), (6, "number 3")):
        assert reasons[line].startswith(f"field {name} opens a quote that is not closed before the next delimiter")
    assert reasons[8] == "the line is empty"


@pytest.mark.parametrize(
    ("dialect", "options"),
    [
        ({"skip_lines": 1}, ""),
        ({"delimiter": ";", "encoding": "cp1252"}, ", sep=';', encoding='cp1252', names=['x', 'y']"),
    ],
)
def test_the_command_for_files_with_line_ends_in_quotes_reads_the_file_as_the_schema_says(dialect, options):
    described = Dialect(fields=(Field(name="x", kind="text"), Field(name="y", kind="text")), quoting=True, **dialect)
    assert f"pandas.read_csv('FILE'{options}, dtype=str, keep_default_na=False)" in bad_quote(described, 0)


def test_the_value_of_a_rejected_line_has_its_quoted_delimiter():
    parsed = parse('"a, b",1\n', Field(name="x", kind="text"), Field(name="y", kind="integer"), quoting=True)
    parsed.reject(parsed.columns["y"] == 1, "x", "is not wanted")
    assert parsed.bad[0].reason == "field 'x' holds 'a, b', which is not wanted"


def test_messages_show_values_as_they_are_written():
    fields = (Field(name="x", kind="text", canonical=True), Field(name="y", kind="text", canonical=True))
    parsed = parse('2024-05-06T07:08:09.000,"a ""long"" text"\n', *fields, quoting=True)
    assert shown(parsed, "x") == ["2024-05-06 07:08:09"]
    assert parsed.field_texts(np.array([0]), "x") == ["'2024-05-06T07:08:09.000'"]
    assert parsed.field_texts(np.array([0]), "y") == ["'a \"long\" text'"]


def test_a_line_that_cannot_be_split_leaves_nothing_behind():
    fields = (Field(name="x", kind="text"), Field(name="y", kind="text"))
    parsed = parse('a text of a line,with,three\na text of another,"open\nb,c\n', *fields, quoting=True)
    assert shown(parsed, "x") == ["b"]
    assert parsed.long_texts is None
