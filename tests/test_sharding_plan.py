"""Plans and plan files: every row has one address, and what does not belong together is refused."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from jrec.access.container import read_container, write_container
from jrec.data.schema import CategoricalFeature, Schema, Shard, Split, Table
from jrec.sharding.baselines import BASELINES
from jrec.sharding.cost import evaluate
from jrec.sharding.errors import PlanError
from jrec.sharding.pieces import REPLICATED, SHARDED, TIER_NAMES
from jrec.sharding.plan_file import KIND, VERSION, check_budget, load_plan, plan_memory, save_plan
from jrec.sharding.planner import PlanOptions, plan_placement
from jrec.sharding.plans import build_plan
from tests.sharding_problems import problem_of, problems, zipf_counts

FEW = hypothesis.settings(max_examples=15, deadline=None)


def brute_force_addresses(plan):
    """{(tier, stack, owner, offset)} of every row by a loop, failing on a second row at an address."""
    seen = {}
    for table in plan.tables:
        found = plan.locate(table.name, np.arange(table.rows))
        for row in range(table.rows):
            key = (int(found.tier[row]), table.stack, int(found.owner[row]), int(found.offset[row]))
            assert key not in seen, f"{table.name}:{row} lies where {seen[key]} lies"
            seen[key] = (table.name, row)
    return seen


@FEW
@hypothesis.given(problems())
def test_every_row_has_one_address_and_arrays_have_no_holes(problem):
    plan = build_plan(problem, plan_placement(problem).placement)
    seen = brute_force_addresses(plan)
    by_array = {}
    for tier, stack, owner, offset in seen:
        by_array.setdefault((tier, stack, owner), []).append(offset)
    for (tier, stack, owner), offsets in by_array.items():
        assert sorted(offsets) == list(range(len(offsets)))
        if tier == SHARDED:
            assert plan.shard_rows(stack)[owner] >= len(offsets)
        if tier == REPLICATED:
            assert plan.replicated_rows(stack) == len(offsets)


@FEW
@hypothesis.given(problems())
def test_routes_lead_to_holders_and_copies_have_their_own_addresses(problem):
    plan = build_plan(problem, plan_placement(problem).placement)
    taken = {}
    for table in plan.tables:
        rows = np.arange(table.rows)
        located = plan.locate(table.name, rows)
        for device in range(plan.devices):
            routed = plan.route(table.name, rows, device)
            own = routed.owner == located.owner
            np.testing.assert_array_equal(routed.offset[own], located.offset[own])
            at_source = [plan.route(table.name, rows, s) for s in range(plan.devices)]
            for row in rows[(routed.tier == SHARDED)]:
                source = int(routed.owner[row])
                assert at_source[source].owner[row] == source  # who is fetched from fetches from himself
                key = (table.stack, source, int(routed.offset[row]))
                assert taken.setdefault(key, (table.name, row)) == (table.name, row)
                assert routed.offset[row] < plan.shard_rows(table.stack)[source]


@FEW
@hypothesis.given(problems())
def test_a_plan_costs_what_its_placement_costs(problem):
    placement = plan_placement(problem).placement
    expected = evaluate(problem, placement)
    plan = build_plan(problem, placement)
    found = evaluate(problem, plan.placement(problem))
    for name in ("memory", "lookup", "links", "link_bytes"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=1e-9, atol=1e-18)
    for name in ("all_reduce", "host", "copies"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=1e-9, atol=1e-18)
    np.testing.assert_allclose(plan_memory(plan), expected.memory)


@pytest.mark.parametrize("name", BASELINES)
def test_baselines_make_whole_plans(name):
    problem = problem_of([zipf_counts(300), zipf_counts(40, 1), zipf_counts(3, 2)], dims=[8, 4, 8])
    placement = BASELINES[name](problem)
    plan = build_plan(problem, placement)
    assert len(brute_force_addresses(plan)) == 343
    assert evaluate(problem, placement).lookup.sum() > 0


def test_rows_in_frequency_order_make_few_ranges():
    problem = problem_of([np.sort(zipf_counts(20_000, total=10**6))[::-1]], extra_memory=0.05)
    planned = plan_placement(problem)
    plan = build_plan(problem, planned.placement)
    assert len(plan.start) <= len(planned.placement.pieces)


def test_unordered_accesses_still_give_every_row_its_due():
    counts = np.random.default_rng(0).permutation(zipf_counts(500))
    problem = problem_of([counts], extra_memory=0.2)
    plan = build_plan(problem, plan_placement(problem).placement)
    replicated = plan.locate("t0", np.arange(500)).tier == REPLICATED
    assert replicated.any()
    assert counts[replicated].min() >= counts[~replicated].max()


@FEW
@hypothesis.given(problems(max_rows=400), st.integers(1, 6))
def test_the_locator_is_the_plan(problem, buckets):
    from jrec.sharding import locator

    plan = build_plan(problem, plan_placement(problem).placement)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(locator, "_BUCKETS", buckets)
        found = locator.Locator(plan)
    for table in plan.tables:
        rows = np.random.default_rng(0).permutation(table.rows).astype(np.uint16)
        for a, b in zip(found.locate(table.name, rows), plan.locate(table.name, rows), strict=True):
            np.testing.assert_array_equal(a, b)
            assert a.dtype == b.dtype
        for bad in (-1, table.rows):
            with pytest.raises(PlanError, match=rf"row {bad:,}, at place 1, is not in table '{table.name}'"):
                found.locate(table.name, np.array([0, bad, -5]))
    with pytest.raises(PlanError, match="no table 'x'"):
        found.locate("x", np.array([0]))


def test_rows_outside_a_table_are_refused():
    plan = build_plan(problem := problem_of([zipf_counts(30)]), plan_placement(problem).placement)
    for rows in ([30], [-1], [0, 31]):
        with pytest.raises(PlanError, match=r"not all in table 't0' of 30 rows"):
            plan.locate("t0", np.array(rows))
    with pytest.raises(PlanError, match="no table 'x'; it has t0"):
        plan.locate("x", np.array([0]))
    with pytest.raises(PlanError, match="device 4 is not one of the plan's 4"):
        plan.route("t0", np.array([0]), 4)


# Files


def schema_of(problem, *, name="data", examples=1000):
    return Schema(
        name=name,
        block_size=1000,
        dense=(),
        categorical=tuple(CategoricalFeature(name=t.name, table=t.name, fixed_length=True) for t in problem.tables),
        tables=tuple(Table(name=t.name, rows=t.rows) for t in problem.tables),
        splits={"train": Split(shards=(Shard(file="x", blocks=1, examples=examples, bytes=1, digest=""),))},
        provenance={},
    )


@pytest.fixture
def saved(tmp_path):
    problem = problem_of([zipf_counts(200), zipf_counts(50, 1)], purpose="inference", extra_memory=0.3, nodes=2)
    schema = schema_of(problem)
    problem = dataclasses.replace(problem, profile=dataclasses.replace(problem.profile, dataset=schema.identity))
    plan = build_plan(problem, plan_placement(problem).placement, {"hardware": problem.hardware.to_json()})
    save_plan(plan, tmp_path / "plan")
    return problem, schema, plan, tmp_path / "plan"


def test_a_saved_plan_is_the_same(saved):
    _, schema, plan, path = saved
    found = load_plan(path, schema=schema, devices=4)
    assert found.tables == plan.tables
    assert found.info["hardware"]["name"] == "test"
    assert len(plan.copy_segment)
    for table in plan.tables:
        rows = np.arange(table.rows)
        for device in range(4):
            for a, b in zip(found.route(table.name, rows, device), plan.route(table.name, rows, device), strict=True):
                np.testing.assert_array_equal(a, b)
                assert a.dtype == b.dtype
    assert path.stat().st_size < 4000


def test_any_damage_to_a_file_is_found(saved, tmp_path):
    *_, path = saved
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    for size in [0, 5, 12, len(whole) // 2, len(whole) - 1]:
        (tmp_path / "cut").write_bytes(whole[:size])
        with pytest.raises(PlanError, match=r"truncated or damaged|no jrec-plan file"):
            load_plan(tmp_path / "cut")
    for at in rng.integers(0, len(whole), 60):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << rng.integers(8)
        (tmp_path / "bad").write_bytes(damaged)
        with pytest.raises(PlanError, match=r"damaged|no jrec-plan file|version") as caught:
            load_plan(tmp_path / "bad")
        assert "jrec plan" in str(caught.value)


def test_a_plan_from_before_stacks_were_split_is_read(saved):
    _, _, plan, path = saved
    header, arrays = read_container(path, kind=KIND, version=VERSION, error=PlanError, remedy="")
    for table in header["tables"]:
        assert table.pop("stack_number") == 1
    write_container(path, kind=KIND, version=VERSION, header=header, arrays=arrays)
    assert load_plan(path).tables == plan.tables


def test_a_plan_of_a_later_version_is_refused(saved):
    *_, path = saved
    path.write_bytes(path.read_bytes().replace(b"jrec-plan 3\n", b"jrec-plan 9\n"))
    with pytest.raises(PlanError, match="version 9, but this jrec reads version 3"):
        load_plan(path)


def test_another_dataset_mesh_or_budget_is_refused_with_the_reason(saved):
    problem, schema, plan, path = saved
    with pytest.raises(PlanError, match="is for 4 devices, but the mesh has 8"):
        load_plan(path, devices=8)
    larger = dataclasses.replace(schema, tables=(dataclasses.replace(schema.tables[0], rows=201), schema.tables[1]))
    with pytest.raises(PlanError, match="places 200 rows of table 't0', but dataset 'data' has 201"):
        load_plan(path, schema=larger)
    other = dataclasses.replace(schema.tables[0], numbering="other values")
    with pytest.raises(PlanError, match=r"plan is of dataset 'data' .*, not of 'data' .*: table t0;"):
        load_plan(path, schema=dataclasses.replace(schema, tables=(other, schema.tables[1])))
    assert load_plan(path, schema=schema_of(problem, examples=7)).tables == plan.tables  # rows mean the same
    fewer = dataclasses.replace(schema, tables=schema.tables[:1], categorical=schema.categorical[:1])
    with pytest.raises(PlanError, match=r"places table\(s\) t1, which dataset 'data' lacks"):
        load_plan(path, schema=fewer)
    more = dataclasses.replace(schema, tables=(*schema.tables, Table(name="new", rows=3)))
    with pytest.raises(PlanError, match="does not place table 'new'"):
        load_plan(path, schema=more)
    check_budget(plan, 10**9)
    worst = int(plan_memory(plan).argmax())
    with pytest.raises(PlanError, match=rf"device {worst} would hold [\d,]+ bytes .* but has 1,000"):
        check_budget(plan, 1000)


def test_ranges_that_make_no_plan_are_refused(saved):
    _, _, plan, path = saved
    for name, value in (
        ("owner", np.where(plan.tier == SHARDED, 4, -1).astype(np.int16)),
        ("tier", np.full_like(plan.tier, len(TIER_NAMES))),
        ("start", plan.start + 1),
        ("way", plan.way + len(plan.path)),
        ("offset", plan.offset[:-1]),
    ):
        save_plan(dataclasses.replace(plan, **{name: value}), path)
        with pytest.raises(PlanError, match="do not make a plan"):
            load_plan(path)


def test_tables_that_do_not_fit_are_refused_with_the_figures():
    problem = problem_of([zipf_counts(1000)], devices=2, memory=15_000)
    with pytest.raises(PlanError, match=r"take 32,000 bytes, but the 2 devices of 'test' offer 30,000 together"):
        plan_placement(problem, PlanOptions(host=False))
    with pytest.raises(PlanError, match="no host memory"):
        plan_placement(problem)
