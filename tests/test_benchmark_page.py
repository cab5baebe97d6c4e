"""The page of measurements: every figure from the lines of a run, and the committed page from the committed lines."""

import json

from benchmarks import page
from benchmarks.harness import ROOT

LINE = {"case": "c", "metric": "step, median", "value": 12.5, "unit": "ms", "peer": "torch 2", "ratio": 1.5}
MORE = {"device": "a machine", "versions": {}, "commit": "abc"}


def _write(folder, name, *lines):
    text = "".join(json.dumps({**LINE, **MORE, **line}) + "\n" for line in lines)
    (folder / f"{name}.jsonl").write_text(text)


def test_a_section_has_a_row_a_case_and_says_commit_and_machine(tmp_path):
    other = {"case": "d", "value": 1234.5, "peer": None, "ratio": None}
    _write(tmp_path, "train_kaggle", {}, {"metric": "step, cast in loader, median", "value": 0.5}, other)
    text = page.render(tmp_path)
    assert "that share their hosts (a machine)" in text
    assert "| c | 12.50 ms (1.50x torch 2) | 0.5 ms (1.50x torch 2) |" in text
    assert "| d | 1,234 ms |  |" in text
    assert "Measured at commit abc." in text
    assert text.count("\n## ") == 1


def test_a_section_without_columns_lists_every_line(tmp_path):
    _write(
        tmp_path, "prepare", {"metric": "speed", "unit": "rows/s"}, {"metric": "memory", "unit": "MiB", "value": 0.25}
    )
    text = page.render(tmp_path)
    assert "| c | speed | 12.50 rows/s (1.50x torch 2) |" in text
    assert "| c | memory | 0.25 MiB (1.50x torch 2) |" in text


def test_the_committed_page_is_that_of_the_committed_results():
    assert page.PAGE.read_text() == page.render(ROOT / "benchmarks" / "results" / "cpu-2-cores")
