"""Plans for devices of which some keep the tables and the others compute: placement, cost, files and drift."""

import dataclasses
import re

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from jrec.access.profile import AccessProfile, TableProfile
from jrec.errors import ConfigError
from jrec.sharding.cost import degree_of_balance, evaluate
from jrec.sharding.drift import describe, measure_drift
from jrec.sharding.errors import PlanError
from jrec.sharding.explain import explain, summary
from jrec.sharding.hardware import PRESETS, Hardware, load_hardware, parse_devices
from jrec.sharding.memory_centric import device_ranges
from jrec.sharding.modes import FLOAT32, INDEX, expected_traffic
from jrec.sharding.pieces import REPLICATED, SHARDED
from jrec.sharding.plan_file import check_budget, load_plan, save_plan
from jrec.sharding.planner import PlanOptions, plan_placement
from jrec.sharding.plans import build_plan
from tests.sharding_problems import problem_of, problems, zipf_counts

FEW = hypothesis.settings(max_examples=15, deadline=None)


def apart(problem, tables_on, **changes):
    hardware = dataclasses.replace(problem.hardware, tables_on=tables_on, **changes)
    return dataclasses.replace(problem, hardware=hardware)


@pytest.fixture(scope="module")
def problem():
    """Six devices, of which 1, 4 and 5 keep the tables, 5 with twice the memory of the others."""
    counts = [np.sort(zipf_counts(3000, total=200_000))[::-1], zipf_counts(50, 1, total=60_000)]
    made = problem_of(counts, devices=6, dims=[8, 16], batch=1200, slots=4)
    return apart(made, (1, 4, 5), memory=(10, 60_000, 10, 10, 60_000, 120_000))


@pytest.fixture(scope="module")
def planned(problem):
    return plan_placement(problem)


@pytest.fixture(scope="module")
def plan(problem, planned):
    return build_plan(problem, planned.placement, describe(problem, PlanOptions(), planned))


def test_rows_lie_balanced_on_the_chosen_devices_alone(problem, planned, plan):
    cost, keepers = planned.cost, [1, 4, 5]
    assert plan.computes == (True, False, True, True, False, False)
    assert plan.compute_devices == (0, 2, 3)
    assert set(plan.owner.tolist()) == set(keepers)
    assert (plan.tier == SHARDED).all()
    check_budget(plan, problem.hardware.memory)  # with 10 bytes on devices that compute
    assert not cost.memory[[0, 2, 3]].any()
    assert not cost.lookup[[0, 2, 3]].any()
    assert (cost.memory_balance, cost.lookup_balance) > (0.99, 0.99)
    assert cost.memory_balance == degree_of_balance(cost.memory[keepers] / cost.budget[keepers])
    assert cost.remote_bytes.shape == (9,)
    assert cost.all_reduce == cost.copies == 0


def test_cost_is_that_of_sent_sums(problem, planned):
    """By a loop over rows: the lookups of each device that computes, at each that keeps tables."""
    lookups, placement = np.zeros((2, 6, 6)), planned.placement
    pieces = placement.pieces
    for p in range(len(pieces)):
        t = pieces.table[p]
        ranks = np.arange(pieces.start[p], pieces.stop[p])
        counts = problem.ranked[t].access_at(ranks)  # a third of the batch each
        lookups[t, [0, 2, 3], placement.owner[p]] += counts.sum()
    np.testing.assert_allclose(lookups[:, 0].sum(axis=1), np.array([200.0, 60.0]) * 1200 / 3)
    L = np.diag(problem.hardware.L)
    expected = np.einsum("tij,t,j->j", lookups, problem.row_bytes.astype(float), L)
    np.testing.assert_allclose(planned.cost.lookup, expected, rtol=1e-9)
    examples, sent = 400, 0.0
    for of, length, dim in zip(lookups, (200.0, 60.0), (8, 16), strict=True):
        bags = np.minimum(examples * (1 - (1 - of / (examples * length)) ** length), of)
        sent = sent + INDEX * of + bags * (INDEX + 2 * FLOAT32 * dim)
    np.testing.assert_allclose(2 * planned.cost.link_bytes, sent, rtol=1e-9)
    seconds = planned.cost.link_bytes * problem.hardware.L
    assert planned.cost.communication == pytest.approx(2 * max(seconds.sum(axis=0).max(), seconds.sum(axis=1).max()))


@FEW
@hypothesis.given(problems(), st.integers(0, 2**31))
def test_any_problem_is_planned_for_any_choice_of_devices(problem, seed):
    hypothesis.assume(problem.devices > 1)
    rng = np.random.default_rng(seed)
    chosen = rng.permutation(problem.devices)[: rng.integers(1, problem.devices)]
    problem = apart(problem, tuple(chosen.tolist()))
    placement = plan_placement(problem).placement
    plan = build_plan(problem, placement)
    for table in plan.tables:
        found = plan.locate(table.name, np.arange(table.rows))
        assert np.isin(found.owner, chosen).all()
        for device in range(problem.devices):
            np.testing.assert_array_equal(plan.route(table.name, np.arange(table.rows), device).owner, found.owner)
    again = evaluate(problem, plan.placement(problem))
    np.testing.assert_allclose(again.link_bytes, plan_placement(problem).cost.link_bytes, rtol=1e-9)
    traffic = expected_traffic(problem, plan)
    passes = 2 if problem.purpose == "training" else 1
    np.testing.assert_allclose(traffic.send, passes * again.link_bytes, rtol=1e-9)


def test_files_say_who_computes(plan, tmp_path):
    path = tmp_path / "plan"
    save_plan(plan, path)
    found = load_plan(path)
    assert found.computes == plan.computes
    ordinary = build_plan(problem_of([zipf_counts(30)]), plan_placement(problem_of([zipf_counts(30)])).placement)
    save_plan(ordinary, path)
    assert load_plan(path).computes is None


@pytest.mark.parametrize(
    "change",
    [
        {"computes": (True, False, True)},
        {"computes": (True,) * 6},
        {"computes": (False,) * 6},
        {"computes": (1, 0, 1, 1, 0, 0)},
        {"computes": (True, True, True, True, False, False)},  # of which device 1 keeps rows
        {"tier": lambda plan: np.full_like(plan.tier, REPLICATED), "owner": lambda plan: np.full_like(plan.owner, -1)},
        {"path": lambda plan: np.where(np.arange(6) == 0, plan.path[::-1], plan.path).astype(np.int16)},
        {
            "copy_segment": lambda plan: np.zeros(1, np.int32),
            "copy_device": lambda plan: np.zeros(1, np.int16),
            "copy_offset": lambda plan: np.zeros(1, np.int64),
        },
    ],
)
def test_contradictions_are_refused(plan, tmp_path, change):
    changed = {k: v(plan) if callable(v) else v for k, v in change.items()}
    save_plan(dataclasses.replace(plan, **changed), tmp_path / "plan")
    with pytest.raises(PlanError, match=r"do not make a plan|computes\[0\] must be true or false, but is 1"):
        load_plan(tmp_path / "plan")


def test_a_new_plan_keeps_rows_where_they_are_and_devices_apart(problem, plan):
    rng = np.random.default_rng(0)
    later = [t.dense() * rng.lognormal(0.0, 0.5, t.rows) for t in problem.profile.tables]
    tables = tuple(TableProfile.from_counts(f"t{i}", counts.round()) for i, counts in enumerate(later))
    profile = AccessProfile(tables=tables, examples=1000)
    kept, anew = measure_drift(plan, profile), measure_drift(plan, profile, anew=True)
    for found in (kept, anew):
        assert found.plan.computes == plan.computes
        assert set(found.plan.owner.tolist()) == {1, 4, 5}
        assert found.best.lookup_balance > 0.98
    assert kept.moved_rows < 0.5 * anew.moved_rows
    with pytest.raises(PlanError, match="gives the tables to other devices than the hardware"):
        measure_drift(dataclasses.replace(plan, computes=None), profile)


def test_a_plan_from_devices_that_all_keep_rows_can_be_left_for_one_apart(problem):
    ordinary = apart(problem, (), memory=(10**6,) * 6)
    old = build_plan(ordinary, plan_placement(ordinary).placement)
    new = plan_placement(problem, previous=old)
    assert set(new.placement.owner.tolist()) == {1, 4, 5}
    assert (new.cost.memory <= new.cost.budget).all()


def test_people_are_told(problem, planned, plan):
    text = summary(problem, planned, plan)
    assert text.startswith("devices 0, 2-3 compute and keep no rows, 1, 4-5 keep the tables")
    traffic = expected_traffic(problem, plan)
    assert re.search(r"between devices in a step: [\d.]+ [kM]B if rows are retrieved, [\d.]+ [kM]B if sums", text)
    of_tables = [expected_traffic(problem, plan, table=t.name) for t in plan.tables]
    np.testing.assert_allclose(sum(t.send for t in of_tables), traffic.send)
    table, row = explain(plan, "t1", problem), explain(plan, "t0:0", problem)
    assert "devices 0, 2-3 compute" in table
    assert "between devices in a step" in table
    assert "replica" not in row
    access = problem.by_row[0].access_at(np.array(0)) * 3
    assert f"{access:.4g} accesses a step of 1,200 examples over all devices" in row


def test_devices_are_named_in_ranges():
    assert parse_devices("0, 2,4-7", "x") == parse_devices([0, 2, "4-7"], "x") == (0, 2, 4, 5, 6, 7)
    assert device_ranges((0, 2, 4, 5, 6, 7)) == "0, 2, 4-7"
    for wrong in ("", "7-4", "a", "1;2", "-1"):
        with pytest.raises(ConfigError, match="give numbers of devices like 4-7"):
            parse_devices(wrong, "--tables-on")


def test_hardware_says_which_devices_keep_tables(tmp_path):
    base = PRESETS["h200x8"]
    found = dataclasses.replace(base, tables_on=(7, 6))
    assert found.tables_on == (6, 7)
    assert found.computes == (True,) * 6 + (False,) * 2
    assert Hardware(**found.to_json()) == found
    assert base.computes is None
    for wrong, says in (((8,), "names device 8.*has 8"), ((1, 1), "device 1 twice"), (range(8), "none would compute")):
        with pytest.raises(ConfigError, match=says):
            dataclasses.replace(base, tables_on=tuple(wrong))
    file = tmp_path / "pool.toml"
    lines = ['memory = "1GB"', 'all_reduce = "1GB/s"', "devices = 4", 'lookup = "1GB/s"', 'within = "1GB/s"']
    for value in ('"2-3"', "[2, 3]"):
        file.write_text("\n".join([*lines, f"tables_on = {value}"]))
        assert load_hardware(file).tables_on == (2, 3)
    file.write_text('memory = ["1GB", "2GB"]\nall_reduce = "1GB/s"\nfetch = [[1.0, 2.0], [2.0, 1.0]]\ntables_on = "1"')
    assert load_hardware(file).tables_on == (1,)
    file.write_text("\n".join([*lines, 'tables_on = "2-3"']))
    with pytest.raises(ConfigError, match="tables_on names device 3"):
        load_hardware(file, devices=3)


def test_unique_rows_do_not_count(problem):
    with pytest.raises(ConfigError, match="leave --dedup out"):
        dataclasses.replace(problem, dedup=True)
