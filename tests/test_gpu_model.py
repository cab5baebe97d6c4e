"""The arithmetic of ``benchmarks.gpu_model``: occupancy, steps, caches, scheduling and floors."""

import dataclasses
import json

import numpy as np
import pytest

from benchmarks import gpu_cases, gpu_chip, gpu_facts, gpu_model, gpu_predict, gpu_trips
from benchmarks.gpu_caches import misses, misses_of_each
from benchmarks.gpu_chip import CHIPS, resident_blocks
from benchmarks.gpu_model_cases import CASES
from benchmarks.gpu_trips import Segments
from benchmarks.workloads import hashed_ids
from jrec import ops
from jrec.pallas.tile import Tile
from jrec.pallas.tuning import TuningConfig


@pytest.mark.parametrize(
    ("registers", "shared_bytes", "warps", "blocks"),
    [  # as CUDA's occupancy calculator says for compute capability 9.0
        (32, 0, 4, 16), (40, 0, 4, 12), (48, 0, 4, 10), (64, 0, 4, 8), (72, 0, 4, 7), (80, 0, 4, 6), (96, 0, 4, 5),
        (128, 0, 4, 4), (168, 0, 4, 3), (255, 0, 4, 2), (32, 0, 1, 32), (32, 0, 32, 2), (41, 0, 4, 10),
        (32, 49_152, 4, 4), (32, 100_000, 4, 2),
    ],
)  # fmt: skip
def test_occupancy(registers, shared_bytes, warps, blocks):
    assert resident_blocks(registers=registers, shared_bytes=shared_bytes, warps=warps) == blocks


def test_every_constant_has_its_source():
    fields = {field.name for field in dataclasses.fields(gpu_chip.Chip)} - {"name"}
    assert fields == set(gpu_chip.SOURCES)


def _segments(rng, *, tables=2, lookups=300, rows=60):
    ids = np.minimum(rng.geometric(0.08, (tables, lookups)) - 1, rows - 1)
    return Segments.of(hashed_ids(ids.astype(np.int32), rows) + rows * np.arange(tables)[:, None])


CONFIG = TuningConfig(chunks=2, unroll=2, long_unroll=2, split=4)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dim", [16, 64, 256])
def test_steps_of_short_segments(dim, seed):
    """Against a loop over every thread of every block."""
    found, tile = _segments(np.random.default_rng(seed)), Tile.of(dim, 4, chunks=2)
    offsets = found.offsets
    got = gpu_trips.short_trips(found, tile, CONFIG)
    want = np.zeros_like(got)
    for row in range(offsets.size - 1):
        low, high = int(offsets[row]), int(offsets[row + 1])
        full = [n for n in range(high // 4 + 1) if low <= 4 * n and 4 * n + 4 <= high]
        assert found.short(4)[row] == (not full)
        steps = 0 if full else -(-(high - low) // 2)
        for lane in range(tile.lanes):
            thread = (row % tile.rows * tile.lanes + lane) % 128
            place = row // tile.rows, thread // 32
            want[place] = max(want[place], steps)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("seed", range(3))
def test_long_segments_are_covered_by_nodes_of_all_levels(seed):
    found = _segments(np.random.default_rng(seed), lookups=4000)
    config = dataclasses.replace(CONFIG, long_unroll=1, top=16)  # a step a node
    nodes = gpu_trips.full_nodes(found, config)
    assert len(nodes) >= 3
    first, steps = gpu_trips.long_steps(found, len(nodes), config)
    long = np.flatnonzero(~found.short(4))
    assert first.size == long.size
    for number, row in enumerate(long):
        low, high, expected = int(found.offsets[row]), int(found.offsets[row + 1]), []
        assert first[number] == -(-low // 4)
        for _ in nodes:
            inside = [n for n in range(low // 4, high // 4 + 1) if low <= 4 * n and 4 * n + 4 <= high]
            if not inside:
                expected += [high - low, 0]
                low = high = 0
                continue
            expected += [4 * inside[0] - low, high - 4 * inside[-1] - 4]
            low, high = inside[0], inside[-1] + 1
        np.testing.assert_array_equal(steps[number], [*expected, high - low])


def test_every_full_node_lies_within_its_segment():
    found = _segments(np.random.default_rng(5), lookups=4000)
    for level, of_node in enumerate(gpu_trips.full_nodes(found, CONFIG)):
        size = 4 ** (level + 1)
        for node, segment in enumerate(of_node):
            owners = {
                int(np.searchsorted(found.offsets, p, side="right")) for p in range(node * size, (node + 1) * size)
            }
            assert (segment >= 0) == (len(owners) == 1)


def test_warps_of_the_long_kernel_visit_each_long_segment_once():
    found, tile = _segments(np.random.default_rng(1), lookups=4000), Tile.of(64, 4)
    steps, visits, width = gpu_trips.long_walk(found, tile, CONFIG)
    first, each = gpu_trips.long_steps(found, len(gpu_trips.full_nodes(found, CONFIG)), CONFIG)
    assert steps.shape == visits.shape
    in_tile = np.bincount(first // width, minlength=visits.shape[0])
    for of_tile, count in zip(visits, in_tile, strict=True):
        dealt = [sum(row // 2 % 4 == warp for row in range(0, count, 2)) for warp in range(4)]  # 2 rows a warp
        np.testing.assert_array_equal(of_tile, dealt)
    assert each.sum(axis=1).max() <= steps.max()
    assert steps.sum() <= each.sum()  # rows of a warp walk together


def test_a_cache_that_holds_everything_misses_each_row_once():
    counts = np.array([5, 1, 3])
    assert misses(counts, capacity=3) == 3
    assert misses(counts, capacity=2) > 3
    assert misses_of_each(np.full(1000, 1), caches=8, capacity=1000) == pytest.approx(1000)
    assert misses_of_each(np.full(1000, 10_000), caches=8, capacity=1000) == pytest.approx(8000)


@pytest.mark.parametrize("capacity", [20, 100])
def test_misses_of_a_small_cache(capacity):
    """Against a cache that replaces the least recently used row."""
    rng = np.random.default_rng(0)
    counts = np.maximum(1, 4000 // np.arange(1, 400))
    order = rng.permutation(np.repeat(np.arange(counts.size), counts))
    kept, missed = {}, 0
    for row in order.tolist():
        missed += row not in kept
        kept.pop(row, None)
        kept[row] = True
        if len(kept) > capacity:
            kept.pop(next(iter(kept)))
    assert misses(counts, capacity=capacity) == pytest.approx(missed, rel=0.05)


def test_blocks_go_to_the_first_free_slot():
    assert gpu_predict.makespan(np.array([3.0, 1, 1, 1, 5]), 2) == 8
    assert gpu_predict.makespan(np.array([1.0, 2]), 4) == 2
    assert gpu_predict.makespan(np.array([]), 4) == 0


def test_the_floor_of_distinct_bytes_is_that_of_the_gpu_benchmark():
    case, chip = CASES["kaggle"], CHIPS["h100"]
    found = gpu_model.segments_of("kaggle")
    ids, sizes = case.ids, {"bags": case.bags, "dim": case.dim, "itemsize": 4}
    floors = gpu_predict.floors(case, found, chip)
    forward = gpu_cases.forward_traffic(ids, **sizes)
    update = gpu_cases.update_traffic(ids, **sizes, optimizer=ops.RowWiseAdagrad(learning_rate=0.01))
    assert floors["forward"].distinct == pytest.approx(forward.seconds(chip.hbm))
    assert floors["update"].distinct == pytest.approx(update.seconds(chip.hbm))
    assert floors["cast"].distinct == pytest.approx((12 * ids.size + 8 * min(ids.size, case.rows)) / chip.hbm, rel=1e-5)
    assert floors["update"].levels >= floors["update"].distinct


PTX = """
.visible .entry kernel(.param .u64 p)
{
  .reg .b32 %r<4>;
  mov.u32 %r1, 0;
$L__BB0_1:
  add.s32 %r1, %r1, 1;
$L__BB0_2:
  @%p1 ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%rd1];
  @%p2 bra $L__BB0_2;
  ld.global.b32 %r2, [%rd2];
  bra.uni $L__BB0_2;
  @%p3 bra $L__BB0_1;
  @%p4 bra $L__BB0_4;
$L__BB0_4:
  ret;
}
"""


def test_innermost_loops_are_found():
    assert gpu_facts.loops_of(PTX) == (9, (gpu_facts.Loop(instructions=4, row_loads=1),))


def test_xlas_own_kernels_are_counted():
    hlo = """HloModule m
ENTRY %main (a: f32[10,4]) -> f32[10,4] {
  %a = f32[10,4]{1,0} parameter(0)
  %f = (f32[10]{0}, s32[2]{0}) fusion(%a), kind=kLoop
  %g = f32[10]{0} get-tuple-element(%f), index=0
  ROOT %c = f32[10,4]{1,0} custom-call(%a, %g), custom_call_target="mosaic_gpu_v2"
}
"""
    assert gpu_facts.other_kernels(hlo) == [("fusion", 160, 48)]


def test_predictions_are_printed_from_the_facts_that_are_kept(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["gpu_model", "--case", "kaggle", "--gpu", "h200", "--json"])
    gpu_model.main()
    printed = capsys.readouterr()
    assert "PREDICTIONS" in printed.err
    lines = [json.loads(line) for line in printed.out.splitlines()]
    totals = {line["what"]: line for line in lines if "launch" not in line}
    assert set(totals) == {"forward", "update", "cast"}
    for what in ("forward", "update"):
        launches = [line["seconds"] for line in lines if line["what"] == what and "launch" in line]
        assert totals[what]["seconds"] == pytest.approx(sum(launches))
        assert totals[what]["seconds"] >= 0.999 * totals[what]["floor_distinct"] > 0


def test_facts_that_are_missing_name_their_command(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"python -m benchmarks\.gpu_facts writes it"):
        gpu_facts.load(tmp_path / "none.json")
