"""Sizes that all processes of a run grow together; here by one process that behaves as one of several."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from run_cases import configuring
from skewed_log import skewed_dataset

from jrec.train import mesh_feed
from jrec.train.checkpoint import flatten
from jrec.train.evaluate import restore_run
from jrec.train.loop import train
from jrec.train.mesh_ahead import LEAD, BatchesAhead
from jrec.train.mesh_arrays import NONE, Sizes, from_table, table_of
from jrec.train.report.logs import SIZES, read_records
from jrec.train.run_state import RunState

COLLECTIVES = ("all_gather", "all_reduce", "all_to_all")

pytestmark = pytest.mark.usefixtures("quick_compilation")

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


def arrays(folder):
    return {path: np.asarray(leaf) for path, leaf in flatten(restore_run(folder, slots=True).state).items()}


def recorded(monkeypatch):
    """The first step's program of every run from here on."""
    programs, runs, step = [], [], RunState.step

    def recording(self, ready):
        if self not in runs:
            runs.append(self)
            programs.append(self.compiled.step_on.lower(self.state, self.rows, ready.host, ready.given).as_text())
        return step(self, ready)

    monkeypatch.setattr(RunState, "step", recording)
    return programs


def growth(folder):
    return [r for r in read_records(folder / "timing.jsonl") if r["split"] == SIZES]


def assert_same(folder, other):
    assert (folder / "metrics.jsonl").read_bytes() == (other / "metrics.jsonl").read_bytes()
    found, expected = arrays(folder), arrays(other)
    assert found.keys() == expected.keys()
    for path, leaf in expected.items():
        np.testing.assert_array_equal(found[path], leaf, err_msg=path)


@pytest.mark.parametrize("form", ["retrieve", "send"])
def test_sizes_grow_at_the_step_that_needs_it_with_the_bits_of_a_run_that_had_them(
    configure, monkeypatch, capsys, form
):
    programs = recorded(monkeypatch)
    large = train(configure(f"mesh.form={form}", "mesh.headroom=50", out="large"))
    assert not growth(large.folder)
    monkeypatch.setattr(mesh_feed, "several", lambda: True)
    grown = train(configure(f"mesh.form={form}", out="grown"))
    assert_same(grown.folder, large.folder)
    alone, together = ([text.count(f"stablehlo.{name}") for name in COLLECTIVES] for text in programs)
    assert alone == together  # agreeing costs none
    assert min(alone[:2]) > 0
    records = growth(grown.folder)
    assert 5 <= records[0]["step"] <= 7  # the first 256 of 384 examples read few rows
    assert len(records) <= 3
    (kinds,) = records[0]["stacks"].values()
    assert all(after > before for before, after in kinds.values())
    assert f"step {records[0]['step']} needs larger buffers between devices" in capsys.readouterr().err
    assert json.loads((grown.folder / "timing.jsonl").read_text().splitlines()[0])["step"] == 1


def test_a_run_that_stopped_amid_batches_read_ahead_resumes_to_the_same_bits(configure, monkeypatch):
    monkeypatch.setattr(mesh_feed, "several", lambda: True)
    whole = train(configure(out="whole"))
    for steps in (3, 6, 7):
        train(configure(f"max_steps={steps}", "evaluate.final_splits=[]", out="parts"), resume=True)
    parts = train(configure(out="parts"), resume=True)
    assert_same(parts.folder, whole.folder)


class Batches:
    """A loader of numbers."""

    def __init__(self, total):
        self.position, self.total = 0, total

    def __next__(self):
        self.position += 1
        return _Dealt(self.position - 1)

    def state(self):
        return {"position": self.position}


class _Dealt:
    def __init__(self, number):
        self.parts = number


class Grown:
    """``Shapes`` of one stack, whose batches need as many rows as their number."""

    def __init__(self, room):
        self.stacks, self.room, self.grown = {"stack": None}, room, []

    def needed(self, dealt, devices):
        del devices
        return {"stack": Sizes(unique=dealt.parts, own=0, remote=0, replicated=0)}

    def grow(self, needed):
        self.grown.append(needed["stack"].unique)
        self.room = max(self.room, needed["stack"].unique)
        return {}

    def check(self, needed):
        assert needed["stack"].unique <= self.room


@pytest.mark.parametrize("total", [1, 2, 3, 10])
def test_what_a_batch_needs_is_known_in_time_and_positions_are_those_of_batches_given_out(total):
    shapes, loader = Grown(LEAD - 1), Batches(total)
    ahead = BatchesAhead(loader, shapes, [0, 1, 2], total)  # pyright: ignore[reportArgumentType]
    assert ahead.position() == {"position": 0}
    for number in range(total):
        dealt, needs, _ = ahead.next()
        assert dealt.parts == number
        assert ahead.position() == {"position": number + 1}
        assert needs is not None
        assert needs.shape == (3, 1, 7)
        assert needs[2, 0, 0] == (number + LEAD if number + LEAD < total else 0)
        ahead.stepped(jnp.asarray(needs.max(axis=0)))
    assert loader.position == total
    assert shapes.grown == list(range(LEAD, total))
    with pytest.raises(RuntimeError, match="all steps"):
        ahead.next()


def test_sizes_as_a_table():
    needed = {"a": Sizes(unique=1, own=2, remote=3, replicated=4, lookups=6, pooled=7)}
    assert from_table(["a", "b"], table_of(["a", "b"], needed)) == {**needed, "b": NONE}
