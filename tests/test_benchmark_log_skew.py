"""What benchmarks.log_skew counts, on logs that are counted by hand."""

import gzip
import types

import numpy as np
import pytest

from benchmarks import log_skew
from benchmarks.log_skew import Log

COLUMNS = {
    "user": np.array([b"a", b"b", b"a", b"a"]),
    "item": np.array([b"x", b"y", b"", b"y"]),
}


def test_rows_are_values_of_a_column_and_an_empty_text_is_none():
    log = Log.of(COLUMNS)
    assert log.lines == 4
    assert sorted(log.counts.tolist()) == [0, 1, 1, 2, 3]  # the empty text has a number, and no accesses
    assert log.least.tolist() == [1, 1, 3, 2]
    assert log_skew.distinct(log, 2) == pytest.approx((4 / 4 + 2 / 3) / 2)


def test_batches_of_hot_inputs_are_those_of_the_log_s_order():
    said = {}
    report = types.SimpleNamespace(add=lambda case, metric, value, unit, **more: said.update({(case, metric): value}))
    rows = np.array([[0, 0, 0, 0, 1, 0, 0, 0] * 8])
    log_skew.measure_batches(report, "log", Log(rows=rows, counts=np.array([56, 8])), 20)
    assert said["log, rows of 20 accesses", "hot inputs"] == 87.5
    assert said["log, rows of 20 accesses, batches of 16", "batches of hot inputs alone"] == 0
    ordered = np.sort(rows, axis=1)
    log_skew.measure_batches(report, "log", Log(rows=ordered, counts=np.array([56, 8])), 20)
    assert said["log, rows of 20 accesses, batches of 16", "batches of hot inputs alone"] == 75


def test_a_kaggle_log_has_26_columns(tmp_path):
    line = b"\t".join([b"1", *[b"3"] * 13, b"", *[b"%08x" % k for k in range(25)]])
    with gzip.open(tmp_path / "log.gz", "wb") as file:
        file.write(line + b"\n" + line + b"\n")
    log = Log.of(log_skew.read_kaggle(tmp_path / "log.gz"))
    assert (log.lines, np.count_nonzero(log.counts), int(log.counts.sum())) == (2, 25, 50)
