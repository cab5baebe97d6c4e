"""Checkpoints of a mesh go on under any plan, on any mesh and on one device, with the same bits."""

import shutil

import jax
import mesh_runs
import numpy as np
import pytest
from checkpoint_state import whole_stack_checkpoint
from jax.sharding import Mesh
from mesh_plans import some_plan
from mesh_run_cases import CONFIG
from mesh_runs import OPTIMIZERS
from whole_stacks import whole_stack

from jrec.checkpoint import Checkpoints, Saved
from jrec.data.synth.generate import SynthOptions, synthesize
from jrec.data.synth.shapes import shape_like
from jrec.errors import CheckpointError
from jrec.run.checkpoint import flatten
from jrec.run.mesh_checkpoint import MeshSource, saved_rows
from jrec.train.config import load_config
from jrec.train.evaluate import evaluate_checkpoint, restore_run
from jrec.train.loop import train

LAYOUT = mesh_runs.layout(tt=False)
STACK = LAYOUT.members[0]
OPTIMIZER = OPTIMIZERS["rowwise_adagrad"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of two devices, and its whole stack."""
    folder = tmp_path_factory.mktemp("run")
    rng = np.random.default_rng(0)
    whole = {
        "values": rng.normal(size=(STACK.rows, STACK.dim)).astype(np.float32),
        "sum": rng.uniform(size=STACK.rows).astype(np.float32),
    }
    one = whole_stack_checkpoint(folder / "one", STACK, OPTIMIZER, whole)
    return on_devices(folder / "two", one, some_plan(2, seed=1, replicate=0.3, tt=False)), whole


def on_devices(folder, source, plan):
    """The same rows as a plan places them, in a checkpoint."""
    mesh = Mesh(np.array(jax.devices()[: plan.devices]), ("devices",))
    rows = saved_rows(source, LAYOUT, plan, mesh, OPTIMIZER)
    checkpoints = Checkpoints(folder, chunk_bytes=1000)
    checkpoints.save(7, arrays={}, sources=[MeshSource(STACK, plan, mesh, OPTIMIZER, lambda: rows[STACK.name])])
    return checkpoints.open()


def test_rows_of_one_device_are_found_on_a_mesh_and_back(saved):
    source, whole = saved
    order = np.random.default_rng(1).permutation(STACK.rows).astype(np.int32)
    for array, expected in whole.items():
        np.testing.assert_array_equal(source.read(STACK, array, order), expected[order])


@pytest.mark.parametrize(("devices", "seed", "replicate"), [(2, 1, 0.3), (4, 2, 0.1), (3, 3, 0.0), (4, 4, 1.0)])
def test_rows_slots_and_replicas_go_from_any_plan_to_any_other(saved, tmp_path, devices, seed, replicate):
    source, whole = saved
    plan = some_plan(devices, seed=seed, replicate=replicate, tt=False)
    mesh = Mesh(np.array(jax.devices()[:devices]), ("devices",))
    rows = saved_rows(source, LAYOUT, plan, mesh, OPTIMIZER)
    values, slots = whole_stack(STACK, plan, rows[STACK.name])
    np.testing.assert_array_equal(values, whole["values"])
    np.testing.assert_array_equal(slots["sum"], whole["sum"])
    again = on_devices(tmp_path, source, plan)
    np.testing.assert_array_equal(again.read(STACK, "values", np.arange(STACK.rows)), whole["values"])


def test_a_damaged_or_missing_file_is_named(saved, tmp_path):
    shutil.copytree(saved[0].folder, tmp_path / "7")
    every = np.arange(STACK.rows)
    name = STACK.tables[0].name
    target = tmp_path / "7" / "tables" / name / "0000" / "sum" / "c.0"
    content = bytearray(target.read_bytes())
    content[5] ^= 1
    target.write_bytes(content)
    Saved(tmp_path / "7").read(STACK, "values", every)
    with pytest.raises(CheckpointError, match=r"0000/sum/c\.0 is damaged: its checksum differs"):
        Saved(tmp_path / "7").read(STACK, "sum", every)
    target.unlink()
    with pytest.raises(CheckpointError, match=r"0000/sum/c\.0 is damaged: No such file"):
        Saved(tmp_path / "7").read(STACK, "sum", every)
    (tmp_path / "7" / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        Saved(tmp_path / "7")
    with pytest.raises(CheckpointError, match="no complete checkpoint of step 8; steps there: 7"):
        Checkpoints(saved[0].folder.parent).open(8)


@pytest.mark.slow
def test_a_run_goes_on_with_other_numbers_of_devices(tmp_path):
    data = tmp_path / "data"
    synthesize(shape_like("quickstart"), data, SynthOptions(rows=800, seed=1))
    (tmp_path / "tiny.toml").write_text(CONFIG)

    def run(out, steps, devices, **kwargs):
        keys = [f"data.path={str(data)!r}", f"out={str(tmp_path / out)!r}", f"max_steps={steps}"]
        return train(load_config(tmp_path / "tiny.toml", [*keys, f"mesh.devices={devices}"]), **kwargs)

    whole = run("whole", 9, 1)
    for step, devices in ((2, 4), (4, 1), (6, 2), (8, 4), (9, 1)):
        last = run("moved", step, devices, resume=True)
    np.testing.assert_allclose(last.scores["test"].logits, whole.scores["test"].logits, rtol=1e-4, atol=1e-5)
    run("kept", 6, 4)
    found = restore_run(tmp_path / "kept", slots=True)
    assert found.saved.step == 6
    scores = [evaluate_checkpoint(tmp_path / "kept", data, split="test", devices=n).scores.logits for n in (1, 2, 3)]
    for other in scores[1:]:
        np.testing.assert_allclose(other, scores[0], rtol=1e-5, atol=1e-6)
    assert {path for path in flatten(found.state) if "d4_float32" in path} == {
        "0.embeddings.stacks.d4_float32.value",
        "1.slots.d4_float32.sum.value",
    }
