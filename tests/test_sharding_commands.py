"""``jrec plan`` and ``jrec replan`` from the shell, drift, and what importing the planner costs."""

import dataclasses
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

from jrec import cli
from jrec.access.count import exact_profile
from jrec.access.profile import AccessProfile, TableProfile
from jrec.data.schema import Schema
from jrec.sharding.drift import describe, measure_drift, moved, options_of_plan
from jrec.sharding.errors import PlanError
from jrec.sharding.explain import explain
from jrec.sharding.plan_file import load_plan, save_plan
from jrec.sharding.planner import PlanOptions, plan_placement
from jrec.sharding.plans import build_plan
from tests.sharding_problems import problem_of, zipf_counts


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("synth") / "data"
    command = ["synth", "--like", "criteo-kaggle", "--table-rows", "3000", "--rows", "6000", "--out", str(folder)]
    assert cli.main([*command, "--quiet"]) == 0
    return folder


def test_a_plan_is_made_explained_and_drawn(data, tmp_path, capsys):
    out = tmp_path / "plan"
    command = ["plan", str(data), "--hardware", "dgx-a100", "--dim", "16", "--batch-size", "2048", "--out", str(out)]
    assert cli.main(command) == 0
    printed = capsys.readouterr().out
    for name in ("oper", "memory-greedy", "access-greedy", "table-wise", "row-wise", "TorchRec-like"):
        assert re.search(rf"^{name} +\d+\.\d\d %", printed, re.MULTILINE), name
    oper = re.search(r"^oper +([\d.]+) % +([\d.]+) % +([\d.]+) %", printed, re.MULTILINE)
    assert oper is not None
    assert min(map(float, oper.groups())) >= 99
    assert "the next byte of memory" in printed or "more memory, 0.1 % of the tables, saves" in printed
    assert "<svg" in (tmp_path / "plan.svg").read_text()
    plan = load_plan(out, schema=Schema.load(data), devices=8)
    assert out.stat().st_size < 60_000
    capsys.readouterr()

    assert cli.main(["plan", "--out", str(out), "--explain", "C3"]) == 0
    assert re.match(r"table C3: 3,000 rows of 16 float32, \d+ ranges", capsys.readouterr().out)
    assert cli.main(["plan", str(data), "--out", str(out), "--explain", "C3:2999"]) == 0
    explained = capsys.readouterr().out
    found = plan.locate("C3", np.array([2999]))
    assert f"row {int(found.offset[0]):,} of device {int(found.owner[0])}'s shard" in explained
    assert "accesses a step of 2,048 examples" in explained
    for wrong, message in (("C99", "no table 'C99'"), ("C3:3000", "not all in table 'C3'"), ("C3:x", "'x' is no row")):
        assert cli.main(["plan", "--out", str(out), "--explain", wrong]) == 2
        assert message in capsys.readouterr().err
    assert cli.main([*command[:-1], str(tmp_path / "none"), "--explain", "C99"]) == 2
    assert not (tmp_path / "none").exists()  # nor is it made before the table is looked for


def test_inference_host_and_tensor_train_from_the_shell(data, tmp_path, capsys):
    out = str(tmp_path / "p")
    base = ["plan", str(data), "--hardware", "a100-4x4", "--dim", "8", "--out", out, "--figure", "none"]
    assert cli.main([*base, "--for", "inference", "--extra-memory", "0.3"]) == 0
    assert len(load_plan(out).copy_segment) > 0
    assert cli.main([*base, "--memory", "60kB", "--slot-bytes", "4", "--tt", "C3=4"]) == 0
    printed = capsys.readouterr().out
    assert "since the devices cannot hold all" in printed
    assert "saves up to" in printed
    assert load_plan(out).rows_in("host") > 0
    assert cli.main([*base, "--tt", "C3=4:100!"]) == 0
    assert load_plan(out).locate("C3", np.array([99, 100])).tier.tolist()[1] == 2
    assert cli.main([*base, "--memory", "20kB", "--no-host"]) == 2
    assert "the tables take" in capsys.readouterr().err


def test_some_devices_keep_the_tables_from_the_shell(data, tmp_path, capsys):
    out = str(tmp_path / "apart")
    base = ["plan", str(data), "--hardware", "dgx-a100", "--dim", "8", "--out", out, "--figure", "none"]
    assert cli.main([*base, "--tables-on", "4-7"]) == 0
    printed = capsys.readouterr().out
    for name in ("oper", "tables on all", "memory-greedy", "row-wise", "TorchRec-like"):
        assert re.search(rf"^{name} +\d+\.\d\d %", printed, re.MULTILINE), name
    assert "with --rule" not in printed
    assert "a step of 65,536 examples" in printed  # 16,384 of each of four
    assert "devices 0-3 compute and keep no rows, 4-7 keep the tables" in printed
    plan = load_plan(out, devices=8)
    assert set(plan.owner.tolist()) == {4, 5, 6, 7}
    assert cli.main([*base, "--tables-on", "0", "--explain", "C3"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"devices 1-7 compute and keep no rows, 0 keep the tables", printed)
    for wrong, says in (("8", "names device 8"), ("x", "--tables-on is 'x'"), ("0-7", "none would compute")):
        assert cli.main([*base, "--tables-on", wrong]) == 2
        assert says in capsys.readouterr().err
    assert cli.main([*base, "--tables-on", "4-7", "--dedup"]) == 2
    assert "leave --dedup out" in capsys.readouterr().err
    assert cli.main([*base, "--tables-on", "4", "--memory", "1kB", "--no-host"]) == 2
    assert "the tables take" in capsys.readouterr().err


def test_dim_slots_and_batch_come_from_a_configuration(data, tmp_path, capsys):
    config = tmp_path / "run.toml"
    config.write_text(
        '[data]\npath = "x"\nbatch_size = 512\n[model]\nembedding_dim = 32\nbottom_mlp = [32]\n'
        '[optimizer.embedding]\nname = "adam"\n'
    )
    base = ["plan", str(data), "--hardware", "h200x8", "--config", str(config), "--figure", "none"]
    for arguments, slots in (([], 2 * 32 * 4), (["--for", "inference"], 0), (["--slot-bytes", "7"], 7)):
        assert cli.main([*base, *arguments, "--out", str(tmp_path / "p")]) == 0
        plan = load_plan(tmp_path / "p")
        assert {(t.dim, t.slot_bytes) for t in plan.tables} == {(32, slots)}
        assert plan.info["batch_size"] == 512
    assert cli.main(["plan", str(data), "--hardware", "h200x8"]) == 2
    assert "--dim N, or --config" in capsys.readouterr().err
    assert cli.main(["plan", str(data), "--dim", "4"]) == 2
    assert "give DATA and --hardware" in capsys.readouterr().err
    for wrong in ("C3", "C3=x", "=4", "C3=4:y"):
        assert cli.main([*base, "--tt", wrong]) == 2
        assert "is not TABLE=RANK" in capsys.readouterr().err


def test_replan_tells_what_drift_costs_and_writes(data, tmp_path, capsys):
    exact = exact_profile(data)
    exact.save(tmp_path / "before")
    rng = np.random.default_rng(0)
    turned = [TableProfile.from_counts(t.name, rng.permutation(t.dense())) if t.rows > 100 else t for t in exact.tables]
    dataclasses.replace(exact, tables=tuple(turned)).save(tmp_path / "now")
    plan = str(tmp_path / "plan")
    assert (
        cli.main(["plan", str(data), "--hardware", "dgx-a100", "--dim", "16", "--out", plan, "--figure", "none"]) == 0
    )
    capsys.readouterr()
    new = str(tmp_path / "new")
    assert cli.main(["replan", plan, str(tmp_path / "now"), "--before", str(tmp_path / "before"), "--out", new]) == 0
    printed = capsys.readouterr().out
    links = [float(x) for x in re.findall(r"^(?:planned for|plan now|new plan) +\S+ % +\S+ % +(\S+) %", printed, re.M)]
    assert len(links) == 3
    assert links[0] > 99
    assert links[1] < links[2]
    assert "moves" in printed
    schema = Schema.load(data)
    load_plan(new, schema=schema, devices=8)
    assert cli.main(["replan", new, str(tmp_path / "now"), "--out", str(tmp_path / "no"), "--min-gain", "0.05"]) == 0
    assert "not written" in capsys.readouterr().out
    assert not (tmp_path / "no").exists()


def test_the_rule_is_told_and_older_plans_open(tmp_path):
    """Plans that were made before there was a choice name their rule among their options alone."""
    problem = problem_of([np.sort(zipf_counts(4000, total=200_000))[::-1]], extra_memory=0.02)
    rows = {rule: plan_placement(problem, PlanOptions(rule=rule)) for rule in ("oper", "per-device")}
    verdicts = {}
    for rule, planned in rows.items():
        options = PlanOptions(rule=rule)
        now = describe(problem, PlanOptions(), planned)
        for age, info in (("now", now), ("old", describe(problem, options, planned))):
            if age == "old":
                del info["rule"]
            save_plan(build_plan(problem, planned.placement, info), tmp_path / age)
            opened = load_plan(tmp_path / age)
            assert options_of_plan(opened) == (options if age == "old" else PlanOptions())
            assert measure_drift(opened, problem.profile).best.seconds <= planned.cost.seconds * (1 + 1e-9)
            (verdicts[age, rule],) = re.findall(r"fetching it (\S+) times a step", explain(opened, "t0:1", problem))
    assert verdicts["now", "oper"] == verdicts["old", "oper"] == "1.25"
    assert verdicts["now", "per-device"] == verdicts["old", "per-device"] == "5"


def test_drift_measures_the_plan_in_force():
    counts = np.sort(zipf_counts(4000, total=200_000))[::-1]
    problem = problem_of([counts], extra_memory=0.02)
    options = PlanOptions()
    planned = plan_placement(problem, options)
    plan = build_plan(problem, planned.placement, describe(problem, options, planned))
    same = measure_drift(plan, problem.profile, before=problem.profile)
    assert same.then is not None
    np.testing.assert_allclose(same.now.links, same.then.links)
    assert same.gain == pytest.approx(0, abs=1e-3 * same.now.seconds)
    rounded = dataclasses.replace(same.now, lookup=same.now.lookup * (1 - 1e-13))
    assert dataclasses.replace(same, best=rounded).gain == 0  # so that `jrec replan` writes no plan for it
    shifted = AccessProfile(tables=(TableProfile.from_counts("t0", np.roll(counts, 2000)),), examples=1000)
    found = measure_drift(plan, shifted)
    assert found.now.link_bytes.sum() > 1.5 * found.best.link_bytes.sum()
    assert found.gain > 0
    assert found.moved_rows > 0
    assert moved(plan, plan) == (0, 0)
    assert options_of_plan(found.plan) == options


@pytest.mark.parametrize("purpose", ["training", "inference"])
def test_a_new_plan_moves_few_rows_and_is_as_balanced(purpose):
    rng = np.random.default_rng(0)
    weights = [np.arange(1, rows + 1) ** -1.1 for rows in (6000, 800)]
    counts = [rng.poisson(300_000 * w / w.sum()) for w in weights]
    problem = problem_of(counts, devices=8, extra_memory=0.02, purpose=purpose, memory=10**5)
    options = PlanOptions()
    planned = plan_placement(problem, options)
    plan = build_plan(problem, planned.placement, describe(problem, options, planned))
    later = []
    for number, w in enumerate(weights):
        trend = w * rng.lognormal(0.0, 0.5, len(w))  # everything by half as much again, or as much less
        later.append(TableProfile.from_counts(f"t{number}", rng.poisson(300_000 * trend / trend.sum())))
    profile = AccessProfile(tables=tuple(later), examples=1000)
    kept, anew = measure_drift(plan, profile), measure_drift(plan, profile, anew=True)
    assert kept.now.balance < 0.95
    for name in ("memory_balance", "lookup_balance", "communication_balance"):
        assert getattr(kept.best, name) > getattr(anew.best, name) - 0.02, name
    assert kept.moved_rows < 0.25 * anew.moved_rows
    assert (kept.best.memory <= 10**5).all()
    for table in plan.tables:  # it is a whole plan: every row has an address
        kept.plan.locate(table.name, np.arange(table.rows))


def test_moved_rows_are_counted_one_by_one():
    problem = problem_of([zipf_counts(300), zipf_counts(40, 1)], dims=[8, 4], extra_memory=0.3)
    a = build_plan(problem, plan_placement(problem).placement)
    b = build_plan(problem, plan_placement(dataclasses.replace(problem, extra_memory=0.0)).placement)
    rows = size = 0
    for table in problem.tables:
        old, new = (p.locate(table.name, np.arange(table.rows)) for p in (a, b))
        other = int(((old.tier != new.tier) | (old.owner != new.owner)).sum())
        rows, size = rows + other, size + other * table.memory_bytes
    assert moved(a, b) == (rows, size)


def test_a_plan_without_its_origin_cannot_be_replanned():
    problem = problem_of([zipf_counts(30)])
    plan = build_plan(problem, plan_placement(problem).placement)
    with pytest.raises(PlanError, match="does not say what it was made for"):
        measure_drift(plan, problem.profile)
    with pytest.raises(PlanError, match="other tables"):
        plan.placement(problem_of([zipf_counts(31)]))
    with pytest.raises(PlanError, match="for 4 devices, not the 2"):
        plan.placement(problem_of([zipf_counts(30)], devices=2))


def test_planning_imports_no_jax():
    code = """
import sys
import jrec.access, jrec.sharding
from jrec.sharding import PRESETS, BASELINES, Problem, plan_placement, build_plan, load_plan, save_plan, measure_drift
from jrec.access import AccessMonitor, AccessProfile, exact_profile, power_law_profile
from jrec.sharding.problem import tables_of
import jrec.sharding.explain, jrec.sharding.figure, jrec.app.commands.plan
p = Problem(tables=tables_of([("a", 99)], 4), profile=power_law_profile({"a": 99}, examples=999),
            hardware=PRESETS["dgx-a100"], batch_size=8)
build_plan(p, plan_placement(p).placement)
print([m for m in ("jax", "numba", "scipy", "matplotlib", "pyarrow") if m in sys.modules])
"""
    root = pathlib.Path(__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("row", ["9" * 20, "1" + 400 * "0", "-1", "\u00b2", "3000"])
def test_explaining_no_row_is_one_line(row, data, tmp_path, capsys):
    out = tmp_path / "plan"
    command = ["plan", str(data), "--hardware", "dgx-a100", "--dim", "16", "--out", str(out), "--figure", "none"]
    assert cli.main(command) == 0
    capsys.readouterr()
    assert cli.main(["plan", "--out", str(out), "--explain", f"C3:{row}"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("jrec: error: ")
    assert message.count("\n") == 1
    assert len(message) < 300
