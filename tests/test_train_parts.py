"""Runs whose tables have whole frequent rows before tensor-train cores: on one device and several, planned or not."""

import dataclasses
import json

import numpy as np
import pytest
from checkpoint_state import final_arrays
from run_cases import CONFIG, configuring

from jrec import cli
from jrec.access.count import exact_profile
from jrec.app.build import build_layout
from jrec.app.config import load_config
from jrec.app.evaluate import evaluate_checkpoint, restore_run
from jrec.app.loop import train
from jrec.app.report import summary
from jrec.app.run_plan import PlannedTrain, planned_trains, run_plan
from jrec.app.tables import describe_tables, on_devices
from jrec.data.schema import Schema
from jrec.errors import ConfigError
from jrec.metrics import evaluate
from jrec.ops.tt import tt_to_dense
from jrec.prepare.synth.generate import SynthOptions, synthesize
from jrec.prepare.synth.shapes import shape_like
from jrec.sharding import Problem, build_plan, load_plan, plan_placement, save_plan
from jrec.sharding.drift import describe
from jrec.sharding.hardware import grid
from jrec.sharding.of_layout import plan_tables_of
from jrec.sharding.pieces import TT
from jrec.sharding.planner import PlanOptions
from jrec.sharding.problem import tables_of
from jrec.sharding.tiers import tt_option

FROM = 40
PARTS = f"tables.overrides={{C7={{tier='tt', rank=3, whole_rows={FROM}}}}}"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "quickstart"
    synthesize(shape_like("quickstart"), folder, SynthOptions(rows=3000, seed=1))
    return folder


@pytest.fixture
def configure(tmp_path, dataset):
    return configuring(tmp_path, dataset, CONFIG)


def planned(dataset, *, first_row, table="C7", devices=2):
    """A plan for the configuration's rows with a table's rows from some on in cores."""
    schema = Schema.load(dataset)
    problem = Problem(
        tables=tables_of([(t.name, t.rows) for t in schema.tables], 8, slot_bytes=64),
        profile=exact_profile(dataset, schema),
        hardware=grid("any", devices=devices, memory=2**30, lookup=1e9, within=1e9, all_reduce=1e9),
        batch_size=256,
        extra_memory=0.2,
    )
    options = PlanOptions(tt=(tt_option(problem, table, 3, first_rank=first_row, required=True),))
    planned = plan_placement(problem, options)
    return build_plan(problem, planned.placement, describe(problem, options, planned))


def test_a_plan_says_which_rows_are_whole_and_where_they_live(configure, dataset, tmp_path):
    schema, path = Schema.load(dataset), str(tmp_path / "plan")
    whole = planned(dataset, first_row=FROM)
    save_plan(whole, path)
    assert planned_trains(load_plan(path)) == {"C7": PlannedTrain(rank=3, first_row=FROM)}
    config = configure("mesh.devices=2", f"plan={path!r}")
    layout = build_layout(config, schema, whole)
    (head,) = [t for t in layout.stacks["d8_float32"].tables if t.name == "C7"]
    assert (head.rows, layout.stacks["tt_C7"].tables[0].first_row) == (FROM, FROM)
    held = run_plan(whole, config, schema, layout, {"mu": "element", "nu": "element"})
    assert held.tables == plan_tables_of(layout, {"mu": "element", "nu": "element"})
    for table in held.tables:
        rows = np.arange(table.rows)
        of_run, of_plan = held.locate(table.name, rows), whole.locate(table.name, rows)
        np.testing.assert_array_equal(of_run.owner, of_plan.owner)
        np.testing.assert_array_equal(of_run.tier, of_plan.tier)
    assert not (held.tier == TT).any()
    total = held.shard_rows("d8_float32").sum() + held.replicated_rows("d8_float32")
    assert total == sum(t.rows for t in held.tables)
    alone = on_devices(config, schema, 1, whole)
    described = describe_tables(alone, schema)["C7"]
    assert (described["whole_rows"], described["ranks"]) == (FROM, [3, 3])
    assert build_layout(alone, schema).stacks["tt_C7"] == layout.stacks["tt_C7"]
    assert build_layout(configure("mesh.devices=2", f"plan={path!r}", PARTS), schema, whole) == layout


@pytest.mark.parametrize(
    ("first_row", "override", "says"),
    [
        (FROM, "{C7={tier='tt', rank=3, whole_rows=41}}", r"C7' rows 40 and on in cores, but .* first 41 rows"),
        (FROM, "{C7={tier='tt', rank=3}}", r"rows 40 and on in cores, but by \[tables\] its first 0 rows are whole"),
        (0, "{C7={tier='tt', rank=3, whole_rows=40}}", r"rows 0 and on in cores, but .* first 40 rows"),
        (FROM, "{C6={tier='tt', rank=3, whole_rows=40}}", r"table 'C6' no row in cores, but .* first 40 rows"),
        (FROM, "{C7={tier='sharded'}}", r"puts table 'C7' into .* cores, but tables.overrides.C7.tier says otherwise"),
    ],
)
def test_a_plan_and_a_configuration_that_disagree_are_refused(configure, dataset, tmp_path, first_row, override, says):
    schema, path = Schema.load(dataset), str(tmp_path / "plan")
    plan = planned(dataset, first_row=first_row)
    save_plan(plan, path)
    config = configure("mesh.devices=2", f"plan={path!r}", f"tables.overrides={override}")
    with pytest.raises(ConfigError, match=says):
        run_plan(plan, config, schema, build_layout(config, schema, plan), {})


def test_a_plan_with_cores_between_whole_rows_is_refused(dataset):
    plan = planned(dataset, first_row=FROM)
    tier = plan.tier.copy()
    tier[plan.first[plan.number("C7")]] = TT
    with pytest.raises(ConfigError, match="cores that are not all rows from 40 on"):
        planned_trains(dataclasses.replace(plan, tier=tier))


@pytest.mark.slow
def test_a_run_learns_resumes_to_the_same_bits_and_is_evaluated_and_reported(configure):
    """Whole rows on the device or in host memory, for the cast of the device and of the host."""
    rules = (PARTS, "evaluate.every_steps=0", "epochs=2")
    outcome = train(configure(*rules))
    auc = evaluate(outcome.scores["test"]).auc
    assert auc is not None
    assert auc > 0.55
    step, arrays, _ = final_arrays(outcome.folder)
    train(configure(*rules, "max_steps=7", out="again"))
    resumed = train(configure(*rules, out="again"), resume=True)
    again = final_arrays(resumed.folder)
    assert again[0] == step
    assert [name for name in arrays if arrays[name] != again[1][name]] == []
    np.testing.assert_array_equal(resumed.scores["test"].logits, outcome.scores["test"].logits)
    config = configure(*rules)
    evaluated = evaluate_checkpoint(outcome.folder, config.data.path, split="test")
    np.testing.assert_array_equal(evaluated.scores.logits, outcome.scores["test"].logits)
    for out, other in {"cast": "data.cast='device'", "hosted": "tables.tier='host'"}.items():
        scores = train(configure(*rules, other, out=out)).scores["test"]
        np.testing.assert_allclose(scores.logits, outcome.scores["test"].logits, rtol=1e-4, atol=1e-5)
    report = outcome.folder / "evaluated"
    assert cli.main(["eval", str(outcome.folder), str(config.data.path), "--out", str(report)]) == 0
    content = json.loads((report / "metrics.json").read_text())
    assert f"the first {FROM} whole, the others as a tensor train" in summary(content)
    assert content["tables"]["C7"]["whole_tier"] == "sharded"
    stored = sum(of["parameters"] for name, of in content["parameters"].items() if name not in ("dense", "total"))
    assert content["tables_total"]["parameters"] == stored


@pytest.mark.slow
def test_checkpoints_move_between_one_device_and_a_planned_mesh(configure, dataset, tmp_path):
    """`jrec plan --config` plans the configuration's own parts."""
    plan, config = str(tmp_path / "plan"), tmp_path / "tiny.toml"
    configure()
    config.write_text(f"{config.read_text()}\n[tables.overrides.C7]\ntier = 'tt'\nrank = 3\nwhole_rows = {FROM}\n")
    made = ["plan", str(dataset), "--hardware", "dgx-a100", "--devices", "2", "--config", str(config), "--out", plan]
    assert cli.main([*made, "--extra-memory", "0.2", "--figure", "none"]) == 0
    assert planned_trains(load_plan(plan)) == {"C7": PlannedTrain(rank=3, first_row=FROM)}
    mesh, rules = ("mesh.devices=2", f"plan={plan!r}"), ("evaluate.every_steps=0",)
    one = train(configure(*rules, PARTS, out="one"))
    two = train(configure(*rules, *mesh, out="two"))
    np.testing.assert_allclose(two.scores["test"].logits, one.scores["test"].logits, rtol=1e-4, atol=1e-5)
    assert cli.main(["replan", plan, two.sections["plan"]["profile"], "--out", str(tmp_path / "new")]) == 0
    assert planned_trains(load_plan(tmp_path / "new")) == {"C7": PlannedTrain(rank=3, first_row=FROM)}
    for out, begin, end in (
        ("there", (PARTS,), mesh),
        ("back", mesh, (PARTS,)),
        ("on", mesh, (PARTS, "mesh.devices=4")),
    ):
        train(configure(*rules, *begin, "max_steps=4", out=out))
        moved = train(configure(*rules, *end, out=out), resume=True)
        np.testing.assert_allclose(moved.scores["test"].logits, one.scores["test"].logits, rtol=1e-4, atol=1e-5)
    for devices in (1, 4):
        scores = evaluate_checkpoint(two.folder, dataset, split="test", devices=devices).scores
        np.testing.assert_allclose(scores.logits, two.scores["test"].logits, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["sharded", "host"])
def test_a_trained_table_is_compressed_behind_its_first_rows(configure, dataset, tmp_path, capsys, tier):
    source = train(configure("evaluate.every_steps=0", f"tables.tier='{tier}'", out="source")).folder
    old, out = restore_run(source), tmp_path / "compressed"
    compress = ["compress", str(source), "--rank", "3", "--whole-rows", str(FROM), "--quiet"]
    assert cli.main([*compress, "--tables", "C7", "--out", str(out)]) == 0
    new = restore_run(out)
    rows, table = {}, {}
    for run, found in ((old, rows), (new, table)):
        for name, record in run.saved.manifest.tables.items():
            saved, all_rows = run.saved.table(name), np.arange(record.shape.rows)
            found[name] = np.concatenate([saved.read(array, all_rows) for array in ("values", "nu")], axis=1)
    assert {t.tier for stack in new.layout.members for t in stack.tables} == {tier, "tt"}
    for name, found in table.items():
        np.testing.assert_array_equal(found, rows[name][: FROM if name == "C7" else None], err_msg=name)
    stack = new.model.embeddings.tt["tt_C7"]
    rebuilt, tail = tt_to_dense(stack.arrays(), stack.shape), rows["C7"][FROM:, :8]
    content = json.loads((out / "report" / "compression.json").read_text())["tables"]["C7"]
    error = np.linalg.norm(rebuilt - tail) / np.linalg.norm(tail)
    assert content["relative_error"] == pytest.approx(error, rel=1e-4)
    assert content["whole_rows"] == FROM
    assert content["parameters"] == describe_tables(new.config, new.schema)["C7"]["parameters"]
    outcome = train(load_config(out / "config.toml", ["epochs=2", "evaluate.every_steps=0"]), resume=True)
    assert outcome.finished
    assert cli.main([*compress, "--tables", "C5", "--whole-rows", "1000000", "--out", str(tmp_path / "x")]) == 2
    assert "none are left for cores" in capsys.readouterr().err
    again = ["compress", str(out), "--rank", "3", "--tables", "C7", "--out", str(tmp_path / "x")]
    assert cli.main(again) == 2
    assert "C7 is of tier 'tt'" in capsys.readouterr().err


@pytest.mark.slow
def test_whole_frequent_rows_learn_more_than_cores_alone_of_the_same_rank(configure, tmp_path):
    """On clicks by a teacher to whom every id is different, and examples enough to learn the frequent ones."""
    synthesize(shape_like("quickstart"), tmp_path / "data", SynthOptions(rows=40_000, seed=1))
    rules = (
        "tables.tt.largest=4",
        "tables.tt.rank=2",
        "evaluate.every_steps=0",
        f"data.path={str(tmp_path / 'data')!r}",
    )
    cores, parts = (
        evaluate(train(configure(*rules, f"tables.tt.whole_rows={rows}", out=f"{rows}")).scores["test"])
        for rows in (0, 200)
    )
    assert (parts.auc or 0) > (cores.auc or 1) + 0.003
    assert parts.log_loss < cores.log_loss - 0.003
