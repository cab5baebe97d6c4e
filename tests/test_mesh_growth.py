"""Batches that need more than their static sizes: devices take windows, and no result changes."""

import jax
import numpy as np
import pytest
from checkpoint_state import flatten
from distribute_cases import DENSE, ROWS, columns, layout_of, mesh_of, modules
from jax import monitoring
from run_cases import configuring
from skewed_log import skewed_dataset

import jrec
from jrec.app.evaluate import restore_run
from jrec.app.loop import train
from jrec.app.report.logs import read_records
from jrec.run.options import MeshOptions
from jrec.run.placement import sizes

CONFIG = """
[data]
batch_size = 64
eval_batch_size = 64
window_blocks = 0
[model]
embedding_dim = 4
bottom_mlp = [4]
top_mlp = [1]
[optimizer.embedding]
name = "adagrad"
[mesh]
devices = 2
headroom = 1
[log]
every_steps = 1
tensorboard = false
progress = "off"
"""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return skewed_dataset(tmp_path_factory.mktemp("skewed"))


@pytest.fixture
def configure(tmp_path, dataset):
    return configuring(tmp_path, dataset, CONFIG)


@pytest.fixture(autouse=True)
def no_room_beyond_what_was_needed(monkeypatch):
    """Of stacks as small as these a step has room for all that a batch can read."""
    monkeypatch.setattr(sizes, "_WHOLE_BYTES", 0)


def arrays(folder):
    return {path: np.asarray(leaf) for path, leaf in flatten(restore_run(folder, slots=True).state).items()}


@pytest.mark.parametrize("form", ["retrieve", "send"])
def test_windows_take_what_the_first_batches_had_no_room_for_without_a_new_program(configure, form):
    large = train(configure(f"mesh.form={form}", "mesh.headroom=50", out="large"))
    found = train(configure(f"mesh.form={form}", out="found"))
    losses = [[r["loss"] for r in read_records(run.folder / "metrics.jsonl") if "loss" in r] for run in (found, large)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)
    found, expected = arrays(found.folder), arrays(large.folder)
    for path, leaf in expected.items():
        np.testing.assert_allclose(found[path], leaf, rtol=1e-5, atol=1e-6, err_msg=path)


def test_dispatches_of_which_some_need_windows_have_the_bits_of_steps_one_by_one():
    def items():
        for number in range(12):
            made = columns(number, 4 * 64)
            # Room is made for the first batches' few rows, and in the second of three dispatches one batch reads many.
            few = {name: np.minimum(made[name], 1) for name in ("user", "item", "tags")}
            yield made if number == 6 else made | few

    def trained(steps):
        with jrec.distribute(*modules(layout_of()), mesh=mesh_of(4), mesh_options=MeshOptions(headroom=1)) as run:
            step, losses = run.compile(), []
            for batch in run.feed(items(), dense=DENSE, steps=steps):
                places = list(batch.ready.prepared.places.values())
                assert not any(place.fits for place in places)
                assert max(place.room.unique for place in places) < np.unique(columns(6, 4 * 64)["user"][:64]).size
                losses.append(np.atleast_1d(step(batch)[0]))
            return np.concatenate(losses), {name: run.table(name) for name in ROWS}

    jax.tree.map(np.testing.assert_array_equal, trained(4), trained(1))


@pytest.mark.slow
def test_a_thousand_steps_of_drifting_ids_have_one_program_and_one_devices_losses():
    def drifting():
        for number in range(1000):
            made, rng = columns(number, 64), np.random.default_rng(number)
            made["user"] = rng.zipf(3 - 1.95 * number / 1000, 64) % ROWS["user"]  # few rows at first
            yield made

    def losses(**where):
        with jrec.distribute(*modules(layout_of()), **where) as run:
            step, found = run.compile(), []
            for number, batch in enumerate(run.feed(drifting(), dense=DENSE)):
                if number == 5:
                    compiled.clear()
                found.append(float(step(batch)[0]))
            return found

    compiled = []
    monitoring.register_event_duration_secs_listener(lambda name, *_, **__: compiled.append(name))
    on_mesh = losses(mesh=mesh_of(4), mesh_options=MeshOptions(headroom=1))
    assert not [name for name in compiled if "compile" in name]
    np.testing.assert_allclose(on_mesh, losses(), rtol=1e-4)
