"""What of the GPU benchmark needs no GPU: byte floors, capped tables, stacked batches."""

import subprocess
import sys

import numpy as np
import pytest

from benchmarks import gpu, harness, workloads
from jrec import ops

TINY = workloads.Workload(
    name="tiny", rows=(50, 7), dim=8, ids_per_bag=(3, 1), batch=4, num_dense=4, bottom=(16, 8), top=(16, 1)
)


def test_forward_floor_counts_each_row_once():
    floor = gpu.forward_floor(np.array([[5, 5], [6, -1]]), bags=2, dim=4, itemsize=2)
    assert floor == gpu.Floor(read=4 * 4 + 2 * 4 * 2, written=2 * 4 * 4)
    weighted = gpu.forward_floor(np.array([1]), bags=1, dim=4, itemsize=4, weighted=True)
    assert weighted.read == 8 + 16
    assert floor.seconds(8.0) == (floor.read + floor.written) / 8


@pytest.mark.parametrize(("optimizer", "slot_bytes"), [(ops.SGD, 0), (ops.RowWiseAdagrad, 4), (ops.Adam, 32)])
def test_update_floor_counts_rows_and_slots_in_and_out(optimizer, slot_bytes):
    floor = gpu.update_floor(np.array([5, 5, 6]), bags=3, dim=4, itemsize=4, optimizer=optimizer(learning_rate=1.0))
    touched = 2 * (16 + slot_bytes)
    assert floor == gpu.Floor(read=3 * 4 + 2 * 8 + 3 * 16 + touched, written=touched)


def test_tables_are_capped_to_the_memory():
    small = gpu.capped(TINY, limit=20 * 8 * 4)
    assert sum(small.rows) * 8 * 4 <= 20 * 8 * 4
    assert small.rows[1] == 7
    assert gpu.capped(TINY) == TINY
    for workload, _ in gpu.CASES.values():
        assert sum(gpu.capped(workload).rows) < 2**31 - 1


def test_batches_are_stacked_feature_major():
    ids, offsets = gpu.stacked_ids(TINY, seed=1), gpu.stacked_offsets(TINY)
    np.testing.assert_array_equal(offsets, [0, 3, 6, 9, 12, 13, 14, 15, 16])
    assert np.all(ids[:12] < 50)
    assert np.all((ids[12:] >= 50) & (ids[12:] < 57))
    one_hot = gpu.CASES["kaggle"][0].with_rows_capped(10)
    assert gpu.stacked_offsets(one_hot) is None
    assert gpu.stacked_ids(one_hot, seed=0).shape == (26 * gpu.BATCH, 1)


@pytest.mark.slow
def test_a_side_runs_its_programs():
    side = gpu.Side(TINY, ops.RowWiseAdagrad(learning_rate=0.1), "xla")
    assert side.forward().shape == (8, 8)
    before = np.asarray(side.table)
    after = np.asarray(side.update(0))
    touched = np.unique(np.asarray(side.ids[0]))
    assert np.all(np.any(after[touched] != before[touched], axis=1))
    again = side.cast_and_update()
    assert np.all(np.isfinite(again))
    assert harness.timed(side.forward)() > 0


def test_without_a_gpu_it_says_so():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu"], capture_output=True, text=True, check=True, timeout=120
    )
    assert "skipped: there is no NVIDIA GPU that JAX can use" in done.stderr
    assert done.stdout == ""
