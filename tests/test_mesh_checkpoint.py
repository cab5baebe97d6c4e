"""Checkpoints of a mesh go on under any plan, on any mesh and on one device, with the same bits."""

import shutil
import time

import jax
import mesh_runs
import numpy as np
import optax
import pytest
from checkpoint_state import contents, flatten, whole_stack_checkpoint
from distribute_cases import DENSE, ROWS, columns, layout_of, mesh_of, three_tiers
from flax import nnx
from grids import some_of
from jax.sharding import Mesh
from mesh_plans import some_plan
from mesh_run_cases import CONFIG
from mesh_runs import OPTIMIZERS
from whole_stacks import whole_stack

import jrec
from jrec import nn
from jrec.app.config import load_config
from jrec.app.evaluate import evaluate_checkpoint, restore_run
from jrec.app.loop import train
from jrec.checkpoint import Checkpoints, Saved
from jrec.checkpoint.writer import Writer
from jrec.errors import CheckpointError
from jrec.prepare.synth.generate import SynthOptions, synthesize
from jrec.prepare.synth.shapes import shape_like
from jrec.run.checkpoint import dense_arrays
from jrec.run.placement.checkpoint import MeshSource, saved_stack

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
    rows = {STACK.name: saved_stack(source, STACK, plan, mesh, OPTIMIZER)}
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
    values, slots = whole_stack(STACK, plan, saved_stack(source, STACK, plan, mesh, OPTIMIZER))
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


# Checkpoints of a run on a mesh, while its steps go on.


def run_of(place, row, rows=ROWS):
    """A run of the small model: on one device, or on 4 by a plan of rows on all devices, on one, and in host memory."""
    layout = layout_of(rows=rows)
    config = nn.DLRMConfig(num_dense=2, bottom_mlp=(16, 8), top_mlp=(16, 1))
    model = nn.DLRM(config, layout, rngs=nnx.Rngs(0))
    optimizer = nn.SparseOptimizer(model, dense=optax.sgd(0.05, momentum=0.9), embedding=row)
    if place == "device":
        return jrec.distribute(model, optimizer)
    plan = three_tiers(4, layout) if place == "plan" else None
    return jrec.distribute(model, optimizer, mesh=mesh_of(4), plan=plan)


def copied(run):
    """Bits of the rows, slots and dense arrays of a run on a mesh, as ``contents`` names them."""
    run.flush()
    state = run._state
    found = {path: np.asarray(a).tobytes() for path, a in dense_arrays(state.state, {}, run.layout).items()}
    for stack in run.layout.planned_stacks:
        values, slots = whole_stack(stack, run.plan, state.rows[stack.name], state.tables.get(stack.name))
        for table, base in zip(stack.tables, stack.bases, strict=True):
            for name, array in {"values": values, **slots}.items():
                found[f"{table.name}/{name}"] = array[base : base + table.rows].tobytes()
    return found


def slowly(written):
    def write(self, *args):
        time.sleep(0.01)
        written(self, *args)

    return write


@pytest.mark.parametrize("name", some_of(OPTIMIZERS, "adam"))
def test_checkpoints_are_of_their_steps_while_a_mesh_takes_others(name, tmp_path, monkeypatch):
    """And increments go on in any place, from what any place wrote."""
    monkeypatch.setattr(Writer, "_write", slowly(Writer._write))
    monkeypatch.setattr("jrec.checkpoint.writer._READ_BYTES", 1000)
    row, taken, during, pieces = OPTIMIZERS[name], {}, 0, set()
    for place in ("plan", "mesh", "device", "plan"):
        with run_of(place, row) as run:
            if taken:
                run.restore(tmp_path)
                assert run.steps == max(taken)
            step, first = run.compile(), run.steps
            for batch in run.feed((columns(n) for n in range(first, first + 8)), dense=DENSE):
                step(batch)
                if (writing := run._checkpoints._checkpoints) is not None and writing.saving:
                    during += 1
                else:
                    taken[run.steps] = copied(run) if run.mesh is not None else {}
                    run.save(tmp_path, keep=99, wait=False)
    assert during > 8
    for step, expected in taken.items():
        saved = Saved(tmp_path / str(step))
        pieces |= {len(table.pieces) for table in saved.manifest.tables.values()}
        for place in ("plan", "mesh"):
            with run_of(place, row) as run:
                run.restore(tmp_path, step=step)
                assert copied(run) == (expected or contents(saved)), (step, place)
        with run_of("device", row) as run:
            run.restore(tmp_path, step=step)
            run.save(tmp_path / "whole")
        assert contents(Saved(tmp_path / "whole" / str(step))) == contents(saved)
    assert max(pieces) > 4


def test_a_mesh_writes_only_rows_that_changed(tmp_path):
    """Also where another place wrote the checkpoint before."""
    rows, written = ROWS | {"user": 40_000}, {}
    for number, place in enumerate(("plan", "mesh", "device", "plan")):
        with run_of(place, OPTIMIZERS["adagrad"], rows) as run:
            if number:
                run.restore(tmp_path)
            step, first = run.compile(), run.steps
            for batch in run.feed(map(columns, range(first, first + 2)), dense=DENSE):
                step(batch)
                run.save(tmp_path)
                written[run.steps] = run.written()
    first, *later = written.values()
    assert first.full
    for saved in later:
        assert not saved.full
        assert 16 < saved.rows < 200
        assert saved.bytes < 0.05 * first.bytes
