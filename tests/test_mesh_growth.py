"""Static sizes of a mesh's batches grow where a batch needs it, and change no bit."""

import json

import numpy as np
import pytest
from checkpoint_state import flatten
from run_cases import configuring
from skewed_log import skewed_dataset

from jrec.train.evaluate import restore_run
from jrec.train.loop import train
from jrec.train.report.logs import SIZES, read_records

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


def growth(folder):
    return [r for r in read_records(folder / "timing.jsonl") if r["split"] == SIZES]


def assert_same(folder, other):
    assert (folder / "metrics.jsonl").read_bytes() == (other / "metrics.jsonl").read_bytes()
    found, expected = arrays(folder), arrays(other)
    assert found.keys() == expected.keys()
    for path, leaf in expected.items():
        np.testing.assert_array_equal(found[path], leaf, err_msg=path)


@pytest.mark.parametrize("form", ["retrieve", "send"])
def test_sizes_grow_at_the_step_that_needs_it_with_the_bits_of_a_run_that_had_them(configure, capsys, form):
    large = train(configure(f"mesh.form={form}", "mesh.headroom=50", out="large"))
    assert not growth(large.folder)
    grown = train(configure(f"mesh.form={form}", out="grown"))
    assert_same(grown.folder, large.folder)
    records = growth(grown.folder)
    assert 5 <= records[0]["step"] <= 7  # the first 256 of 384 examples read few rows
    assert len(records) <= 3
    (kinds,) = records[0]["stacks"].values()
    assert all(after > before for before, after in kinds.values())
    assert f"step {records[0]['step']} needs larger buffers between devices" in capsys.readouterr().err
    assert json.loads((grown.folder / "timing.jsonl").read_text().splitlines()[0])["step"] == 1
