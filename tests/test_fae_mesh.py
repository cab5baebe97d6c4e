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
from fae_cases import on_host, packed, records_of
from host_runs import pipeline_threads

from jrec.data.synth.generate import SynthOptions, synthesize
from jrec.data.synth.shapes import shape_like
from jrec.train import loop, mesh_fae
from jrec.train.config import load_config
from jrec.train.evaluate import evaluate_checkpoint

pytestmark = pytest.mark.usefixtures("quick_compilation")

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
    """A run, its stepper as the last step left it, and the compiled hot step with the arguments it last had."""

    outcome: Any
    stepper: Any
    hot: Any
    shapes: Any

    @property
    def losses(self):
        return [r["loss"] for r in records_of(self.outcome.folder) if r["split"] == "train"]

    @property
    def arrays(self):
        """Dense parameters with their slots; rows with theirs, hot and cold, of the last checkpoint."""
        leaves = jax.tree_util.tree_leaves_with_path(self.stepper.state)
        dense = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
        assert len(dense) > 6
        return {**dense, **{name: np.frombuffer(raw, np.float32) for name, raw in on_host(self.outcome.folder).items()}}


def train(config, *, resume=False):
    seen: dict[str, Any] = {"hot": None, "shapes": None}
    ends, makes = loop._Run.close, mesh_fae.compile_hot

    def close(self):
        seen["stepper"] = self.stepper
        ends(self)

    def compile_hot(*args, **kwargs):
        seen["hot"] = makes(*args, **kwargs)

        def step(*args):
            seen["shapes"] = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), args)
            return seen["hot"](*args)

        return step

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop._Run, "close", close)
        patch.setattr(mesh_fae, "compile_hot", compile_hot)
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
def one(configure, quick_compilation):
    return train(configure("one"))


@pytest.fixture(scope="module")
def four(configure, quick_compilation):
    return train(configure("four", "mesh.devices=4"))


def check_equal(found, expected):
    """All that two runs leave is close; schedules, steps and bytes are the same."""
    close(found.losses, expected.losses)
    close(found.outcome.scores["test"].logits, expected.outcome.scores["test"].logits)
    arrays = expected.arrays
    assert found.arrays.keys() == arrays.keys()
    for name, array in found.arrays.items():
        close(array, arrays[name], err_msg=name)
    report = dict(found.outcome.fae), dict(expected.outcome.fae)
    close(*(of.pop("test_losses") for of in report))
    assert report[0] == report[1]


def check_replicas(run, devices):
    """Every device has its own copy of all resident rows and dense parameters, equal to the bit."""
    of_rows = jax.tree.leaves([rows.rows for rows in run.stepper._resident.values()])
    assert len(of_rows) > 1
    for array in (*of_rows, *jax.tree.leaves(run.stepper.state)):
        shards = array.addressable_shards
        assert len({shard.device for shard in shards}) == devices
        assert len({shard.data.unsafe_buffer_pointer() for shard in shards}) == devices
        assert len({np.asarray(shard.data).tobytes() for shard in shards}) == 1
        assert shards[0].data.shape == array.shape


def test_four_devices_train_as_one(one, four):
    assert one.outcome.fae["steps"]["hot"] > 3 < one.outcome.fae["steps"]["cold"]
    assert one.outcome.fae["switches"] > 3
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
        assert found.outcome.fae[key] == expected.outcome.fae[key]


def test_the_all_reduces_of_a_hot_step(four):
    """Dense gradients, those of the rows that any device touched, the loss and the number of examples; in place."""
    compiled = four.hot.lower(*four.shapes).compile()
    state, rows, batch = four.shapes
    (name,) = rows
    dense = [leaf.size for leaf in jax.tree.leaves(four.stepper._cold.mesh.compiled.merge(four.stepper.state)[0])]
    hot, dim = rows[name].values.shape
    touched = min(hot, batch.routes[name].host.rows.size)  # all devices' places for rows
    assert touched < hot
    reduced = [
        math.prod(map(int, filter(None, shape.split(","))))
        for result in re.findall(r"= (.*?) all-reduce(?:-start)?\(", compiled.as_text())
        for shape in re.findall(r"\w+\[([\d,]*)\]", result)
    ]
    assert sorted(reduced) == sorted([*dense, touched * dim, 1, 1])
    donated = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((state, rows)))
    assert compiled.memory_analysis().alias_size_in_bytes == donated
