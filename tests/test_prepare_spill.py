"""Columns on disk, and their external sort by time."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from jrec.data.columns import ListColumn
from jrec.prepare.ingest import fill_spill, new_spill
from jrec.prepare.parts import _in_order
from jrec.prepare.readers.log_format import Chunk, LogFormat
from jrec.prepare.spill import Spill

RUNS = st.lists(st.lists(st.integers(-5, 30), min_size=1, max_size=25), min_size=1, max_size=6)


def filled(folder, runs):
    """A spill of sorted runs; column "n" numbers the rows, "l" lists each number as often as number mod 4."""
    spill = Spill(folder, {"time": np.dtype(np.int64), "n": np.dtype(np.uint32)}, {"l": np.dtype(np.uint64)})
    start = 0
    for run in runs:
        numbers = np.arange(start, start + len(run), dtype=np.uint32)
        lengths = numbers.astype(np.int64) % 4
        lists = ListColumn(np.concatenate([[0], np.cumsum(lengths)]), np.repeat(numbers, lengths).astype(np.uint64))
        spill.append({"time": np.array(sorted(run), np.int64), "n": numbers, "l": lists})
        start += len(run)
    spill.finish()
    return spill


@hypothesis.given(RUNS, st.integers(1, 40))
def test_sorting_is_a_stable_sort(tmp_path_factory, runs, bucket_rows):
    folder = tmp_path_factory.mktemp("spill")
    times = np.concatenate([sorted(run) for run in runs])
    order = np.argsort(times, kind="stable")
    merged = filled(folder / "in", runs).sorted_by_time(folder / "out", "time", bucket_rows)
    rows = len(times)
    assert merged.rows == rows
    assert merged.plain("time").read(0, rows).tolist() == times[order].tolist()
    assert merged.plain("n").read(0, rows).tolist() == order.tolist()
    lists = merged.columns["l"].read(0, rows)
    found = [lists.values[a:b].tolist() for a, b in zip(lists.offsets[:-1], lists.offsets[1:], strict=True)]
    assert found == [[i] * (i % 4) for i in order.tolist()]
    assert merged.columns["l"].longest == max(i % 4 for i in range(rows))
    assert not list((folder / "in").iterdir())


@hypothesis.given(RUNS, st.data())
def test_any_range_of_rows_can_be_read(tmp_path_factory, runs, data):
    spill = filled(tmp_path_factory.mktemp("spill") / "in", runs)
    start = data.draw(st.integers(0, spill.rows - 1))
    stop = data.draw(st.integers(start, spill.rows))
    assert spill.plain("n").read(start, stop).tolist() == list(range(start, stop))
    lists = spill.columns["l"].read(start, stop)
    assert lists.values.tolist() == [i for i in range(start, stop) for _ in range(i % 4)]
    assert np.diff(lists.offsets).tolist() == [i % 4 for i in range(start, stop)]


def test_one_moment_with_most_rows_is_not_sorted_in_memory(tmp_path):
    runs = [[7] * 400 + [9], [1] + [7] * 400, [7] * 100 + [8]]
    spill = filled(tmp_path / "in", runs)
    buckets = list(spill._time_buckets(spill.plain("time"), 50))
    alone = [b for b in buckets if spill._order("time", b) is None and sum(stop - start for start, stop in b) > 50]
    assert [sum(stop - start for start, stop in b) for b in alone] == [900]


@pytest.mark.parametrize(("times", "ordered"), [(([1, 5], [3, 9], [9]), False), (([1, 5], [5, 9], [9]), True)])
def test_a_log_is_in_order_where_no_block_and_no_part_begins_before_the_end_of_another(tmp_path, times, ordered):
    source = LogFormat()
    source.timed = True
    columns = [np.array(of_block) for of_block in times]
    chunks = (Chunk(labels=np.ones(of.size, np.float32), dense={}, keys={}, times=of) for of in columns)
    assert fill_spill(source, chunks, new_spill(source, tmp_path / "blocks"), {}) is ordered
    assert _in_order([filled(tmp_path / str(k), [of_part]) for k, of_part in enumerate(times)]) == ordered
