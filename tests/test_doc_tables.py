"""Tables in docs/ come from committed lines."""

import json

import pytest

from benchmarks import doc_tables
from benchmarks.page_sections import Section

TABLES = {"speed": Section(title="Speed", files=("speed",), text="On a desk.", columns={"time": "took"})}
LINE = {"case": "a", "metric": "time", "value": 2.5, "unit": "ms", "peer": None, "ratio": None, "commit": "c0ffee"}


@pytest.mark.parametrize("path", doc_tables.pages(), ids=lambda path: path.name)
def test_pages_are_what_the_lines_say(path):
    assert doc_tables.filled(path) == path.read_text(encoding="utf-8"), "run: python -m benchmarks.doc_tables"


def page_of(folder, name):
    (folder / "speed.jsonl").write_text(json.dumps(LINE) + "\n")
    page = folder / "page.md"
    page.write_text(f"Before.\n\n<!-- lines: {name} -->\nold\n<!-- end -->\n\nAfter.\n")
    return page


def test_a_block_is_replaced_and_nothing_else(tmp_path):
    text = doc_tables.filled(page_of(tmp_path, "speed"), TABLES, tmp_path)
    assert text.startswith("Before.\n\n<!-- lines: speed -->\n| case | took |\n")
    assert "| a | 2.5 ms |\n\nOn a desk. Measured at commit c0ffee.\n<!-- end -->\n\nAfter.\n" in text
    assert "old" not in text
    assert doc_tables.filled(page_of(tmp_path, "speed"), TABLES, tmp_path) == text


def test_unknown_tables_and_absent_lines_are_named(tmp_path):
    with pytest.raises(SystemExit, match=r"no table is called 'sped'"):
        doc_tables.filled(page_of(tmp_path, "sped"), TABLES, tmp_path)
    page = page_of(tmp_path, "speed")
    (tmp_path / "speed.jsonl").unlink()
    with pytest.raises(SystemExit, match=r"table 'speed' finds no line of speed.jsonl"):
        doc_tables.filled(page, TABLES, tmp_path)
