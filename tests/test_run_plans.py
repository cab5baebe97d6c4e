"""Plans that a run is given: those that do not fit are refused, and the others are reported and served by."""

import dataclasses
import re

import jax
import mesh_runs
import numpy as np
import pytest
from mesh_plans import some_plan
from mesh_run_cases import CONFIG
from mesh_runs import OPTIMIZERS
from run_cases import configuring, quickstart

from jrec.app.build import build_layout
from jrec.app.evaluate import evaluate_checkpoint
from jrec.app.loop import train
from jrec.app.make_run import checked_mesh
from jrec.app.run_plan import run_plan
from jrec.data.identity import Identity
from jrec.data.schema import Schema
from jrec.errors import ConfigError, JrecError
from jrec.prepare.synth.generate import SynthOptions, synthesize
from jrec.prepare.synth.shapes import shape_like
from jrec.run.placement.plan import default_plan
from jrec.sharding import PlanError, save_plan
from jrec.sharding.hardware import grid


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return quickstart(tmp_path_factory.mktemp("data"), rows=800)


@pytest.fixture
def configure(tmp_path, dataset):
    return configuring(tmp_path, dataset, CONFIG)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("mesh.devices=3",), "data.batch_size is 64, which 3 devices.*use a multiple of 3"),
        (("mesh.devices=64",), "JAX sees 4 cpu device.*lower mesh.devices"),
    ],
)
def test_what_cannot_train_on_a_mesh_is_refused(configure, dataset, overrides, says):
    config = configure(*overrides)
    schema = Schema.load(dataset)
    with pytest.raises(ConfigError, match=says):
        checked_mesh(config, schema, build_layout(config, schema), None)


OTHER = Identity(name="other", path="", rows="f" * 64, examples="f" * 64, columns={})
SMALL = grid("small", devices=2, memory=100, lookup=1e9, within=1e9, all_reduce=1e9)


def changed_tables(plan, **changes):
    return dataclasses.replace(plan, tables=tuple(dataclasses.replace(t, **changes) for t in plan.tables))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda plan: dataclasses.replace(plan, dataset=OTHER), r"is of dataset 'other' \(rows ffffffff, .*\), not of"),
        (lambda plan: dealt_again(plan, 4), "for 4 devices, but the mesh has 2"),
        (lambda plan: changed_tables(plan, dim=8), "rows of dim 8.*model.embedding_dim is 4"),
        (lambda plan: changed_tables(plan, dtype="bfloat16"), "dtype bfloat16.*model.table_dtype is float32"),
        (lambda plan: dataclasses.replace(plan, purpose="inference"), "for inference.*--for training"),
        (lambda plan: dataclasses.replace(plan, info={"hardware": SMALL.to_json()}), "would hold .* bytes"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_with_the_reason(configure, dataset, tmp_path, change, says):
    schema = Schema.load(dataset)
    config = configure("mesh.devices=2", f"plan={str(tmp_path / 'plan')!r}")
    without = configure("mesh.devices=2")
    layout = build_layout(without, schema)
    plan = change(default_plan(layout, 2))
    save_plan(plan, tmp_path / "plan")
    with pytest.raises((PlanError, ConfigError), match=says) as caught:
        run_plan(plan, config, schema, build_layout(config, schema, plan), {})
    assert isinstance(caught.value, JrecError)


def test_the_shell_says_why_a_plan_is_refused(configure, dataset, tmp_path, capsys):
    """Of another dataset, of another number of devices, and of devices that the optimizer's slots overfill."""
    from jrec.cli import main

    configure()
    other, plan = tmp_path / "other", str(tmp_path / "plan")
    synthesize(shape_like("quickstart"), other, SynthOptions(rows=900, seed=1))

    def refused(data, *made, train=()):
        command = ["plan", str(data), "--hardware", "dgx-a100", "--devices", "2", "--dim", "4", "--out", plan]
        assert main([*command, "--figure", "none", *made]) == 0
        capsys.readouterr()
        keys = [f"data.path={dataset}", f"out={tmp_path / 'run'}", "mesh.devices=2", f"plan={plan}", *train]
        assert main(["train", str(tmp_path / "tiny.toml"), *keys, "--overwrite"]) == 2
        (said,) = capsys.readouterr().err.strip().splitlines()
        return said

    assert re.search(rf"{plan} is of dataset 'quickstart' at {other} .*, not of .* at {dataset}", refused(other))
    assert "is for 2 devices, but the mesh has 4; plan again" in refused(dataset, train=["mesh.devices=4"])
    tight = refused(
        dataset, "--memory", "180kB", "--slot-bytes", "0", "--no-host", train=["optimizer.embedding.name=adam"]
    )
    assert re.search(r"device \d would hold [\d,]+ bytes of embedding rows, slots and cores, but has 180,000;", tight)
    assert "plan again by the run's configuration (`jrec plan --config CONFIG.toml`)" in tight  # --memory was said
    assert not (tmp_path / "run" / "checkpoints").exists()


def dealt_again(plan, devices):
    from jrec.ops.layout import EmbeddingLayout, FeatureConfig, TableConfig

    tables = [TableConfig(name=t.name, rows=t.rows, dim=t.dim) for t in plan.tables]
    layout = EmbeddingLayout.build(tables, [FeatureConfig(name=t.name, table=t.name) for t in tables], planned=True)
    return default_plan(layout, devices)


def test_initial_rows_are_those_of_one_device():
    from flax import nnx
    from jax.sharding import Mesh
    from whole_stacks import whole_stack

    from jrec.nn.embeddings import init_stack
    from jrec.run.placement.rows import initial_stack

    layout, plan = mesh_runs.layout(), some_plan(4, seed=0, replicate=0.3)
    key = nnx.Rngs(params=0).params()
    mesh = Mesh(np.array(jax.devices()[:4]), ("devices",))
    for stack in layout.planned_stacks:
        values, slots = whole_stack(stack, plan, initial_stack(stack, plan, mesh, key, OPTIMIZERS["adam"]))
        np.testing.assert_array_equal(values, np.asarray(init_stack(stack, key)))
        assert not any(slot.any() for slot in slots.values())


@pytest.mark.slow
def test_a_planned_run_reports_what_its_plan_costs_now(configure, dataset, tmp_path):
    from jrec.cli import main

    plan, config = str(tmp_path / "plan"), str(tmp_path / "tiny.toml")
    made = ["plan", str(dataset), "--hardware", "dgx-a100", "--devices", "2", "--config", config, "--out", plan]
    configure()
    assert main([*made, "--extra-memory", "0.2", "--figure", "none"]) == 0
    one = train(configure(out="one"))
    two = train(configure("mesh.devices=2", f"plan={plan!r}", out="two"))
    np.testing.assert_allclose(two.scores["test"].logits, one.scores["test"].logits, rtol=1e-4, atol=1e-5)
    monitored = two.sections["plan"]
    assert monitored["examples"] == 64
    assert 0 < monitored["memory_balance"] <= 1
    assert monitored["includes_host_memory"]
    assert main(["replan", plan, monitored["profile"], "--out", str(tmp_path / "new")]) == 0
    machine, silent = tmp_path / "machine.toml", str(tmp_path / "silent")
    machine.write_text('devices = 2\nmemory = "1GB"\nlookup = "1TB/s"\nwithin = "100GB/s"\nall_reduce = "100GB/s"\n')
    made[made.index("dgx-a100")], made[-1] = str(machine), silent
    assert main([*made, "--figure", "none"]) == 0
    on_host = ("mesh.devices=2", f"plan={silent!r}", "tables.overrides.C3.tier=host", "max_steps=2")
    host = train(configure(*on_host, out="host"))
    assert not host.sections["plan"]["includes_host_memory"]  # the hardware does not say how fast that is
    assert host.sections["plan"]["step_seconds"] > 0


@pytest.mark.slow
def test_a_plan_for_inference_gives_the_scores_of_one_device(configure, dataset, tmp_path):
    from jrec.cli import main

    plan = str(tmp_path / "serving")
    made = ["plan", str(dataset), "--hardware", "dgx-a100", "--devices", "4", "--dim", "4", "--out", plan]
    assert main([*made, "--for", "inference", "--extra-memory", "0.5", "--figure", "none"]) == 0
    folder = train(configure("mesh.devices=2")).folder
    one = evaluate_checkpoint(folder, dataset, split="test").scores.logits
    planned = evaluate_checkpoint(folder, dataset, split="test", devices=4, plan=plan).scores.logits
    np.testing.assert_allclose(planned, one, rtol=1e-5, atol=1e-6)
