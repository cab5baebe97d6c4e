"""FAE on tables of three billion rows: hot and cold batches give the bits of small tables with the same rows."""

import numpy as np
import pytest
from checkpoint_state import latest
from wide_data import ROWS, numbers_of, widened

from jrec.app.config import load_config
from jrec.app.loop import train
from jrec.data.fae.manifest import HotSet
from jrec.data.schema import Schema
from jrec.ops import row_init
from jrec.prepare.fae_pack import pack
from jrec.prepare.synth.generate import SynthOptions, synthesize
from jrec.prepare.synth.shapes import shape_like

CONFIG = """
seed = 3
epochs = 1
schedule = "fae"
[data]
batch_size = 32
eval_batch_size = 64
[model]
embedding_dim = 4
bottom_mlp = [8, 4]
top_mlp = [8, 1]
[tables]
tier = "host"
[optimizer.embedding]
name = "adagrad"
learning_rate = 0.05
[fae]
initial_rate = 30
batches = 1
[evaluate]
every_steps = 0
final_splits = ["test"]
[checkpoint]
every_steps = 0
[log]
every_steps = 1
tensorboard = false
progress = "off"
"""
SYNTHETIC = {"C3": 50, "C10": 10_000}
NUMBERS = {name: numbers_of(rows, seed=rows) for name, rows in SYNTHETIC.items()}


@pytest.fixture
def packed(tmp_path):
    """FAE's folders of the small and of the wide dataset, by the same hot rows."""
    synthesize(shape_like("quickstart"), tmp_path / "small", SynthOptions(rows=1500, seed=1))
    widened(tmp_path / "small", tmp_path / "wide", NUMBERS)
    folders = {}
    for which in ("small", "wide"):
        schema = Schema.load(tmp_path / which)
        rows = {}
        for table in schema.tables:
            count = SYNTHETIC.get(table.name, table.rows)
            hot = np.arange(count if count < 1000 else count // 5)
            rows[table.name] = (NUMBERS[table.name][hot] if table.rows == ROWS else hot).astype(np.uint32)
        folders[which] = pack(tmp_path / which, tmp_path / f"fae_{which}", HotSet(rows=rows)).folder
    return folders


@pytest.mark.slow
def test_hot_and_cold_batches_of_wide_tables(packed, tmp_path, monkeypatch):
    monkeypatch.setattr(row_init, "_scale", lambda table: 0.0)  # all rows begin as zeros, in tables of any size
    (tmp_path / "config.toml").write_text(CONFIG)
    runs = {
        which: train(
            load_config(
                tmp_path / "config.toml", [f"data.path={str(folder)!r}", f"out={str(tmp_path / f'run_{which}')!r}"]
            )
        )
        for which, folder in packed.items()
    }
    small, wide = runs["small"], runs["wide"]
    assert (wide.folder / "metrics.jsonl").read_bytes() == (small.folder / "metrics.jsonl").read_bytes()
    assert all(wide.sections["fae"]["steps"][kind] > 1 for kind in ("hot", "cold"))
    np.testing.assert_array_equal(wide.scores["test"].logits, small.scores["test"].logits)
    saved = {which: latest(run.folder) for which, run in runs.items()}
    for name, numbers in NUMBERS.items():
        for array in ("values", "sum"):
            ours, theirs = saved["wide"].table(name).read(array, numbers), saved["small"].table(name)
            np.testing.assert_array_equal(ours, theirs.read(array, np.arange(numbers.size)), err_msg=name)
        assert (saved["wide"].table(name).read("values", numbers) != 0).any()
