"""Checkpoints of a mesh go on under any plan, on any mesh and on one device, with the same bits."""

import jax
import mesh_runs
import numpy as np
import pytest
from jax.sharding import Mesh
from mesh_runs import OPTIMIZERS
from test_train_mesh import CONFIG, some_plan

from jrec.data.synth.generate import SynthOptions, synthesize
from jrec.data.synth.shapes import shape_like
from jrec.errors import CheckpointError
from jrec.train.checkpoint import flatten
from jrec.train.config import load_config
from jrec.train.evaluate import evaluate_checkpoint, restore_run
from jrec.train.loop import train
from jrec.train.mesh_checkpoint import MeshCheckpoints, MeshRowSource, WholeStacks
from jrec.train.mesh_table import whole_stack

LAYOUT = mesh_runs.layout("planned", tt=False)
STACK = LAYOUT.members[0]
OPTIMIZER = OPTIMIZERS["rowwise_adagrad"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of two devices, its whole stack, and the plan it was made under."""
    folder = tmp_path_factory.mktemp("run") / "mesh_checkpoints"
    plan = some_plan(2, seed=1, replicate=0.3, tt=False)
    mesh = Mesh(np.array(jax.devices()[:2]), ("devices",))
    checkpoints = MeshCheckpoints(folder, LAYOUT, plan, mesh)
    rng = np.random.default_rng(0)
    whole = {
        "values": rng.normal(size=(STACK.rows, STACK.dim)).astype(np.float32),
        "sum": rng.uniform(size=STACK.rows).astype(np.float32),
    }
    rows = checkpoints.load(WholeStacks(stacks={"d8_float32": whole}), OPTIMIZER)
    checkpoints.save(7, rows)
    return folder, whole


def test_rows_of_one_device_are_found_on_a_mesh_and_back(saved):
    folder, whole = saved
    source = MeshRowSource(folder / "7")
    order = np.random.default_rng(1).permutation(STACK.rows).astype(np.int32)
    for array, expected in whole.items():
        np.testing.assert_array_equal(source.read(STACK, array, order), expected[order])


@pytest.mark.parametrize(("devices", "seed", "replicate"), [(2, 1, 0.3), (4, 2, 0.1), (3, 3, 0.0), (4, 4, 1.0)])
def test_rows_slots_and_replicas_go_from_any_plan_to_any_other(saved, tmp_path, devices, seed, replicate):
    folder, whole = saved
    plan = some_plan(devices, seed=seed, replicate=replicate, tt=False)
    mesh = Mesh(np.array(jax.devices()[:devices]), ("devices",))
    rows = MeshCheckpoints(tmp_path, LAYOUT, plan, mesh).load(MeshRowSource(folder / "7"), OPTIMIZER)
    values, slots = whole_stack(STACK, plan, rows[STACK.name])
    np.testing.assert_array_equal(values, whole["values"])
    np.testing.assert_array_equal(slots["sum"], whole["sum"])


def test_a_damaged_or_missing_file_is_named(saved, tmp_path):
    folder, _ = saved
    copy = tmp_path / "7"
    copy.mkdir()
    for file in (folder / "7").iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    every = np.arange(STACK.rows, dtype=np.int32)
    target = copy / "planned_d8_float32.sum.00001"
    content = bytearray(target.read_bytes())
    content[5] ^= 1
    target.write_bytes(content)
    MeshRowSource(copy).read(STACK, "values", every)
    with pytest.raises(CheckpointError, match=r"sum\.00001 is damaged: its checksum differs"):
        MeshRowSource(copy).read(STACK, "sum", every)
    target.unlink()
    with pytest.raises(CheckpointError, match=r"sum\.00001 is missing"):
        MeshRowSource(copy).read(STACK, "sum", every)
    (copy / "index-00000.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"index-00000\.json is damaged"):
        MeshRowSource(copy)
    with pytest.raises(CheckpointError, match="8 is missing: the rows of this checkpoint"):
        MeshRowSource(folder / "8")


def test_old_checkpoints_are_deleted(saved, tmp_path):
    plan = some_plan(2, seed=1, tt=False)
    mesh = Mesh(np.array(jax.devices()[:2]), ("devices",))
    checkpoints = MeshCheckpoints(tmp_path, LAYOUT, plan, mesh)
    rows = checkpoints.load(MeshRowSource(saved[0] / "7"), OPTIMIZER)
    for step in (1, 2, 3):
        checkpoints.save(step, rows)
    checkpoints.prune([2, 3])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["2", "3"]


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
    found = restore_run(tmp_path / "kept")
    assert found.checkpoint.step == 6
    scores = [evaluate_checkpoint(tmp_path / "kept", data, split="test", devices=n).scores.logits for n in (1, 2, 3)]
    for other in scores[1:]:
        np.testing.assert_allclose(other, scores[0], rtol=1e-5, atol=1e-6)
    assert {path for path in flatten(found.checkpoint.state) if "d4_float32" in path} == {
        "0.embeddings.stacks.d4_float32.value",
        "1.slots.d4_float32.sum.value",
    }
