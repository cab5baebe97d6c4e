"""Runs on hot and cold batches by several devices: what one device computes, and the same bits on all of them.

Sums over devices are taken in another order than on one, so float32 results differ in their last bits: here by less
than 2e-4 of their size, or 2e-5.
"""

import dataclasses
import functools
import math
import re
import shutil
from typing import Any

import jax
import numpy as np
import pytest
from fae_cases import packed, records_of, rows_of
from flax import nnx
from host_runs import pipeline_threads

from jrec.app import loop
from jrec.app.config import load_config
from jrec.app.evaluate import evaluate_checkpoint
from jrec.prepare.synth.generate import SynthOptions, synthesize
from jrec.prepare.synth.shapes import shape_like
from jrec.run.state import RunState

close = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5)

CONFIG = """
seed = 3
schedule = "fae"
[data]
batch_size = 16
eval_batch_size = 16
window_blocks = 2
[model]
embedding_dim = 4
bottom_mlp = [4]
top_mlp = [1]
[optimizer]
learning_rate = 0.05
[optimizer.embedding]
name = "adagrad"
learning_rate = 0.05
[fae]
initial_rate = 20
batches = 1
[evaluate]
every_steps = 0
final_splits = ["test"]
[checkpoint]
every_steps = 6
[log]
every_steps = 1
tensorboard = false
"""


@pytest.fixture(autouse=True)
def no_thread_outlives_its_test():
    yield
    assert pipeline_threads() == []


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A run, what it learned as the last step left it, and the shapes of the arguments of its last hot step."""

    outcome: Any
    run: Any
    shapes: Any

    @property
    def losses(self):
        return [r["loss"] for r in records_of(self.outcome.folder) if r["split"] == "train"]

    @property
    def arrays(self):
        """Dense parameters with their slots; rows with theirs, hot and cold, of the last checkpoint."""
        leaves = jax.tree_util.tree_leaves_with_path(self.run.state)
        found = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
        dense = {name: leaf for name, leaf in found.items() if "'key'" not in name}  # only rows to be made need it
        assert len(dense) > 6
        return {**dense, **{name: np.frombuffer(raw, np.float32) for name, raw in rows_of(self.outcome.folder).items()}}


def train(config, *, resume=False):
    seen: dict[str, Any] = {"shapes": None}
    ends, steps = loop._Training.close, RunState.step

    def close(self):
        seen["run"] = self.run._state
        ends(self)

    def step(self, ready, step_on, metrics):
        if not any(places.room.own for places in ready.prepared.places.values()):  # a hot batch
            arguments = (self.state, self.rows, ready.host, ready.prepared)
            shape = functools.partial(
                jax.tree.map, lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding)
            )
            seen["shapes"] = shape(arguments)
        return steps(self, ready, step_on, metrics)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop._Training, "close", close)
        patch.setattr(RunState, "step", step)
        outcome = loop.train(config, resume=resume)
    return Run(outcome=outcome, **seen)


@pytest.fixture(scope="module")
def configure(tmp_path_factory):
    place = tmp_path_factory.mktemp("runs")
    whole = shape_like("quickstart")
    tables = list(whole.rows)[-3:]
    shape = dataclasses.replace(whole, rows={t: whole.rows[t] for t in tables}, features=whole.features[-3:])
    synthesize(shape, place / "data", SynthOptions(rows=320, seed=1))
    folder = packed(place / "data", place / "packed", lambda _: 0.01)
    (place / "tiny.toml").write_text(CONFIG)

    def load(out, *overrides):
        places = [f"data.path={str(folder)!r}", f"out={str(place / out)!r}"]
        return load_config(place / "tiny.toml", [*places, *overrides])

    return load


@pytest.fixture(scope="module")
def one(configure):
    return train(configure("one"))


@pytest.fixture(scope="module")
def four(configure):
    return train(configure("four", "mesh.devices=4"))


def check_equal(found, expected):
    """All that two runs leave is close; schedules, steps and bytes are the same."""
    close(found.losses, expected.losses)
    close(found.outcome.scores["test"].logits, expected.outcome.scores["test"].logits)
    arrays = expected.arrays
    assert found.arrays.keys() == arrays.keys()
    for name, array in found.arrays.items():
        close(array, arrays[name], err_msg=name)
    report = [dict(run.outcome.sections["fae"]) for run in (found, expected)]
    close(*(of.pop("test_losses") for of in report))
    assert report[0] == report[1]


def check_replicas(run, devices):
    """Every device has its own copy of all hot rows and dense parameters, equal to the bit."""
    of_rows = jax.tree.leaves([(rows.replicated, rows.replicated_slots) for rows in run.run.rows.values()])
    assert len(of_rows) > 1
    for array in (*of_rows, *jax.tree.leaves(run.run.state)):
        shards = array.addressable_shards
        assert len({shard.device for shard in shards}) == devices
        assert len({shard.data.unsafe_buffer_pointer() for shard in shards}) == devices
        assert len({np.asarray(shard.data).tobytes() for shard in shards}) == 1
        assert shards[0].data.shape == array.shape


def test_four_devices_train_as_one(one, four):
    assert one.outcome.sections["fae"]["steps"]["hot"] > 3 < one.outcome.sections["fae"]["steps"]["cold"]
    assert one.outcome.sections["fae"]["switches"] > 3
    check_equal(four, one)
    check_replicas(four, 4)


@pytest.mark.slow
def test_a_checkpoint_of_four_devices_goes_on_on_two(configure, four):
    run = resumed(configure, four, 2)
    check_equal_but_bytes(run, four)
    check_replicas(run, 2)
    data = configure("on2").data.path
    for devices in (1, 3):
        again = evaluate_checkpoint(run.outcome.folder, data, split="test", devices=devices).scores
        np.testing.assert_allclose(again.logits, run.outcome.scores["test"].logits, rtol=1e-5, atol=1e-6)


def resumed(configure, run, devices):
    config = configure(f"on{devices}", f"mesh.devices={devices}")
    shutil.copytree(run.outcome.folder, config.out)
    shutil.rmtree(f"{config.out}/checkpoints/{run.outcome.step}")
    return train(config, resume=True)


def check_equal_but_bytes(found, expected):
    close(found.losses, expected.losses)
    for name, array in found.arrays.items():
        close(array, expected.arrays[name], err_msg=name)
    for key in ("rates", "switches"):
        assert found.outcome.sections["fae"][key] == expected.outcome.sections["fae"][key]


def test_the_all_reduces_of_a_hot_step(four):
    """Dense gradients, those of the rows that any device touched, the loss, weight and number of examples; in place."""
    compiled = four.run.compiled.step_on.lower(*four.shapes).compile()
    state, rows, host, batch = four.shapes
    assert not host
    (name,) = rows
    model, _ = four.run.compiled.merge(four.run.state)
    dense = [leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))]
    hot, dim = rows[name].replicated.shape
    room = batch.places[name].room
    assert (room.own, room.remote, room.replicated) == (0, 0, room.unique)
    touched = min(hot, 4 * room.replicated)  # all devices' places for rows
    assert touched < hot
    reduced = [
        math.prod(map(int, filter(None, shape.split(","))))
        for result in re.findall(r"= (.*?) all-reduce(?:-start)?\(", compiled.as_text())
        for shape in re.findall(r"\w+\[([\d,]*)\]", result)
    ]
    assert sorted(reduced) == sorted([*dense, touched * dim, 1, 2])
    assert "all-to-all" not in compiled.as_text()
    of_device = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((state, rows))]
    assert compiled.memory_analysis().alias_size_in_bytes >= 0.9 * sum(of_device)
