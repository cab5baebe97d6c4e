"""The tensor-train benchmark: its variants compute the same, its figures hold, and every part runs."""

import json

import jax
import numpy as np
import pytest

from benchmarks import (
    harness,
    tt_breakdown,
    tt_cache,
    tt_floor,
    tt_footprints,
    tt_memory,
    workloads,
)
from benchmarks import tt as benchmark
from benchmarks.peers import client
from benchmarks.tt_side import KAGGLE_ROWS, Side, shape_of
from jrec.ops import tt
from jrec.ops.tt.cost import Machine, contraction_seconds

INFINITE = float("inf")
MULTIPLY_ADDS = Machine(
    name="", gemm=1, grouped=1, gathered=INFINITE, written=INFINITE, scattered=INFINITE
)  # whose seconds count them


def _side(lookups=64):
    return Side(tt.TTShape.search(997, 16, ranks=(6, 9)), lookups)


@pytest.mark.slow
@pytest.mark.parametrize(
    "variants",
    [tt_breakdown.forwards_of, tt_breakdown.lookups_of, tt_breakdown.backwards_of, tt_breakdown.steps_of],
)
def test_every_variant_of_the_breakdown_computes_the_same(variants):
    tt_breakdown.check(variants(_side()), 1e-3)


def test_a_plan_of_lookups_shares_nothing():
    shape = tt.TTShape.search(997, 16, ranks=4)
    ids = np.array([[5], [900], [5], [6]], np.int32)
    plan = jax.jit(lambda ids: tt_breakdown.index_of_lookups(shape, ids))(ids)
    assert [int(level.count) for level in plan.levels] == [4, 4]
    assert sorted(plan.sources.ravel().tolist()) == [0, 1, 2, 3]
    rows = plan.cast.rows[plan.sources.ravel()]
    np.testing.assert_array_equal(rows, ids.ravel())


@pytest.mark.parametrize(
    "wanted", [pytest.param(0.0, marks=pytest.mark.slow), 0.5, pytest.param(1.0, marks=pytest.mark.slow)]
)
def test_the_cache_is_hit_as_often_as_wanted(wanted):
    side = _side(128)
    step, rate = tt_cache.cached_step(side, wanted)
    assert abs(rate - wanted) < 0.1
    hits, lookups = step()
    assert int(hits) / int(lookups) == rate


def test_footprints_follow_the_shapes():
    largest = shape_of(KAGGLE_ROWS, 16, 32)
    assert largest.num_parameters == 495_360
    small = sum(n for n in workloads.CRITEO_KAGGLE_ROWS if n <= 1_000_000) * 16
    above = [n for n in workloads.CRITEO_KAGGLE_ROWS if n > 1_000_000]
    cores = sum(shape_of(n, 16, 32).num_parameters for n in above)
    assert tt_footprints.model_bytes(workloads.CRITEO_KAGGLE_ROWS, 16, 32) == 4 * (small + cores)
    assert round(4 * 64 * sum(workloads.CRITEO_TERABYTE_HASHED_ROWS) / 1e9, 1) == 12.6  # TT-Rec's baseline: 12.57 GB


@pytest.mark.slow
def test_parameters_are_those_of_the_paper():
    for rows, slices, parameters in tt_footprints.TABLE2:
        shapes = [tt_footprints.table2_shape(rows, slices, rank) for rank in tt_footprints.RANKS]
        assert tuple(shape.num_parameters for shape in shapes) == parameters


def test_memory_of_a_step_grows_with_the_table_only_where_it_is_uncompressed():
    small, large = (shape_of(rows, 16, 8) for rows in (200_000, 400_000))
    plain = [tt_memory.plain_step_bytes(shape, 64) for shape in (small, large)]
    assert plain[1] - plain[0] == 200_000 * 17 * 4
    assert tt_memory.tt_step_bytes(large, 64) < plain[0] / 4


def test_tensorly_torch_computes_what_jrec_does():
    with client.start_or_skip("tltorch_tt") as peer:
        if peer is None:
            pytest.skip("the peers' environment lacks tensorly-torch")
        side = _side()
        arrays = {f"core{k}": np.asarray(core) for k, core in enumerate(side.cores)}
        arrays |= {"ids": np.asarray(side.ids[:, 0]), "gradient": np.asarray(side.gradient)}
        peer.setup("blocktt", arrays)
        benchmark._compare(side, peer, "tiny")


@pytest.mark.slow
@pytest.mark.parametrize("part", ["sweep", "crossover", "breakdown", "memory", "choices", "pooling", "cache"])
def test_a_part_runs_quickly(part, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["tt", "--quick", "--parts", part])
    monkeypatch.setattr(benchmark, "SECONDS", 0.1)
    monkeypatch.setattr(benchmark, "SWEEP", ((20_000, 16, 8),))
    for module in (benchmark, tt_cache, tt_memory):
        monkeypatch.setattr(module, "KAGGLE_ROWS", 20_000)
    monkeypatch.setattr(tt_memory, "ROWS", (20_000,))
    monkeypatch.setattr(tt_breakdown, "ROWS", (20_000,))
    benchmark.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines
    assert all(line["value"] > 0 for line in lines)


def test_the_floor_counts_what_a_step_does():
    shape = tt.TTShape(rows=8, dim=8, row_factors=(2, 2, 2), dim_factors=(2, 2, 2), ranks=(4, 4))
    traffic = tt.TTTraffic(lookups=6, entries=(3, 5), pairs=6)
    work = tt_floor.work_of(shape, traffic)
    choice = contraction_seconds(shape, traffic, MULTIPLY_ADDS)
    assert sum(each.products for each in work["products"] + work["rows"]) == choice[0]["unique"]
    assert sum(each.products for each in work["backward"]) == choice[1]["unique"]
    products, rows, first = 3 * 4 * 4, 5 * 8, 2 * 2 * 4
    floats = 6 * 8 + 6 + 2 * rows + 3 * products + 4 * shape.num_parameters + first
    assert sum(each.bytes for each in work["backward"]) == 4 * floats
    assert tt_floor.floats_of(shape, traffic) == 2 * shape.num_parameters + 2 * (products + rows) + 3 * 6 * 8
    assert tt_floor.Work(products=6, bytes=8).seconds(tt_floor.Rates(products=2, bandwidth=4)) == 3
    assert tt_floor.Work(products=6, bytes=16).seconds(tt_floor.Rates(products=2, bandwidth=4)) == 4


@pytest.mark.slow
def test_the_floor_is_printed_beside_every_phase(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["tt_floor", "--quick", "--lookups", "128", "--ranks", "4"])
    monkeypatch.setattr(tt_floor, "KAGGLE_ROWS", 20_000)
    monkeypatch.setattr(harness, "QUICK_SECONDS", 0.1)
    tt_floor.main()
    lines = {line["metric"]: line for line in map(json.loads, capsys.readouterr().out.splitlines())}
    names = [*tt_floor.PHASES, "step", "step, cast ahead"]
    assert all(lines[f"{name}, floor"]["value"] > 0 for name in names)
    assert lines["step"]["value"] > 0
    assert lines["step"]["ratio"] > 0


def test_a_step_is_compared_with_the_floor_of_its_own_turn():
    rates = tt_floor.Rates(products=1, bandwidth=1)
    seconds = {"cast": 1.0, "rows": 3.0}
    turns = [
        tt_floor.Turn(
            seconds={phase: slow * each for phase, each in seconds.items()},
            floors={"cast": slow, "rows": slow},
            rates=rates,
        )
        for slow in (1, 1, 2, 1, 2)
    ]
    assert tt_floor.beside_floor(turns, ["cast", "rows"]) == (4, 2, 0.5)
    none = tt_floor.Turn(seconds={"cast": 1.0, "rows": 0.0}, floors={"cast": 1.0, "rows": 1.0}, rates=rates)
    assert tt_floor.beside_floor([*turns, none], ["rows"]) == (3, 1, None)
