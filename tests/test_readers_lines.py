"""Blocks of whole lines from plain and gzip files, and what is wrong with files."""

import gzip
import os

import hypothesis
import hypothesis.strategies as st
import pytest

from jrec.data.schema import DatasetError
from jrec.prepare.readers import lines


def read(path, **options):
    return [(b.line, b.text) for b in lines.read_blocks(str(path), **options)]


@hypothesis.given(
    st.lists(st.binary(max_size=20).map(lambda b: b.replace(b"\n", b"")), min_size=1, max_size=10),
    st.integers(1, 50),
    st.booleans(),
    st.booleans(),
)
def test_every_line_once_whatever_the_block_size(tmp_path_factory, content, block_bytes, packed, ended):
    other_formats = (b"\xef", b"\x1f", b"\xff", b"\xfe", b"P", b"(", b"B", b"\xfd", b"7", b"ARROW1")
    hypothesis.assume(not content[0].startswith(other_formats))
    text = b"\n".join(content) + (b"\n" if ended else b"")
    path = tmp_path_factory.mktemp("lines") / "log"
    path.write_bytes(gzip.compress(text) if packed else text)
    blocks = read(path, block_bytes=block_bytes)
    whole = b"".join(t for _, t in blocks)
    assert whole == (text if text.endswith(b"\n") or not text else text + b"\n")
    line = 1
    for first, block in blocks:
        assert first == line
        assert block.endswith(b"\n")
        line += block.count(b"\n")
    if not packed:
        parts = [read(path, start=0, stop=block_bytes), read(path, start=block_bytes)]
        assert b"".join(t for part in parts for _, t in part) == whole


def test_header_is_left_out_but_counted(tmp_path):
    (tmp_path / "log").write_bytes(b"header\n1\n2\n")
    assert read(tmp_path / "log", skip_lines=1, block_bytes=3) == [(2, b"1\n"), (3, b"2\n")]
    assert lines.first_line(str(tmp_path / "log")) == b"header"


def test_byte_order_mark_and_several_gzip_members(tmp_path):
    (tmp_path / "log").write_bytes(gzip.compress(b"\xef\xbb\xbfa\n") + gzip.compress(b"b\n"))
    assert b"".join(t for _, t in read(tmp_path / "log")) == b"a\nb\n"


def test_truncated_gzip(tmp_path):
    whole = gzip.compress(os.urandom(5000).hex().encode() + b"\n")
    (tmp_path / "log.gz").write_bytes(whole[:-400])
    with pytest.raises(DatasetError, match=r"log\.gz is truncated: its gzip stream ends too early"):
        read(tmp_path / "log.gz")


def test_damaged_gzip(tmp_path):
    whole = bytearray(gzip.compress(os.urandom(5000).hex().encode() + b"\n"))
    whole[2000] ^= 0xFF
    (tmp_path / "log.gz").write_bytes(whole)
    with pytest.raises(DatasetError, match=r"log\.gz is damaged"):
        read(tmp_path / "log.gz")


@pytest.mark.parametrize(
    ("start", "remedy"),
    {b"PK\x03\x04": "unpack it first", b"\xfd7zXZ\0": "unpack it first", b"\xff\xfea\0": "iconv -f UTF-16"}.items(),
)
def test_other_formats_are_named(tmp_path, start, remedy):
    (tmp_path / "log").write_bytes(start + b"...\n")
    with pytest.raises(DatasetError, match=remedy):
        read(tmp_path / "log")


def test_a_line_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 100)
    (tmp_path / "log").write_bytes(b"ok\n" + b"x" * 300)
    with pytest.raises(DatasetError, match=r"log:2: a line of more than"):
        read(tmp_path / "log", block_bytes=10)


def test_inputs_are_checked(tmp_path):
    names = [str(tmp_path / f"day_{i}") for i in (1, 2, 10)]
    for name in names:
        (tmp_path / name).touch()
    lines.check_inputs(names, keep_order=False)
    with pytest.raises(DatasetError, match="not the order of the numbers in their names"):
        lines.check_inputs([names[0], names[2], names[1]], keep_order=False)
    lines.check_inputs([names[0], names[2], names[1]], keep_order=True)
    with pytest.raises(DatasetError, match="more than once"):
        lines.check_inputs([names[0], names[0]], keep_order=False)
    with pytest.raises(DatasetError, match="does not exist"):
        lines.check_inputs([str(tmp_path / "absent")], keep_order=False)
    with pytest.raises(DatasetError, match="is a folder"):
        lines.check_inputs([str(tmp_path)], keep_order=False)
