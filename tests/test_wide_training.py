"""Runs on tables of three billion rows in host memory: the bits of small tables with the same rows, resumed too."""

import numpy as np
import pytest
from checkpoint_state import latest
from wide_data import ROWS, numbers_of, widened

from jrec.app.compress import Selection, compress_run
from jrec.app.config import load_config
from jrec.app.evaluate import evaluate_checkpoint
from jrec.app.loop import train
from jrec.app.recorder import Recorder
from jrec.errors import ConfigError
from jrec.host import HostTable
from jrec.ops import SGD
from jrec.ops.layout import EmbeddingLayout, FeatureConfig, TableConfig
from jrec.prepare.synth.generate import SynthOptions, synthesize
from jrec.prepare.synth.shapes import shape_like

CONFIG = """
seed = 3
max_steps = 14
[data]
batch_size = 128
eval_batch_size = 256
window_blocks = 2
[model]
embedding_dim = 4
bottom_mlp = [8, 4]
top_mlp = [8, 1]
[tables]
tier = "host"
[tables.host]
queue = 3
[optimizer.embedding]
name = "adam"
learning_rate = 0.01
[evaluate]
every_steps = 8
batches = 2
[checkpoint]
every_steps = 4
[log]
every_steps = 1
tensorboard = false
progress = "off"
"""
SYNTHETIC = {"C8": 2_000, "C10": 10_000}
NUMBERS = {name: numbers_of(rows, seed=rows) for name, rows in SYNTHETIC.items()}


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    """The small dataset and its wide twin."""
    folder = tmp_path_factory.mktemp("data")
    synthesize(shape_like("quickstart"), folder / "small", SynthOptions(rows=3000, seed=1))
    schema = widened(folder / "small", folder / "wide", NUMBERS)
    assert {t.name: t.rows for t in schema.tables if t.rows > 10_000} == dict.fromkeys(NUMBERS, ROWS)
    return {"small": folder / "small", "wide": folder / "wide"}


@pytest.fixture
def configure(tmp_path, datasets):
    def load(which, *overrides, out):
        path = tmp_path / "config.toml"
        path.write_text(CONFIG)
        places = [f"data.path={str(datasets[which])!r}", f"out={str(tmp_path / out)!r}"]
        return load_config(path, [*places, *overrides])

    return load


def wide_rows(name, key, dtype):
    """The first values that the rows of a small table have in the wide one."""
    tables = [TableConfig(name=name, rows=ROWS, dim=4, tier="host", dtype=dtype)]
    [stack] = EmbeddingLayout.build(tables, [FeatureConfig(name=name, table=name)]).members
    return HostTable(stack, SGD(learning_rate=0.0), key).read(NUMBERS[name])


@pytest.fixture
def small_run(configure, monkeypatch):
    """The reference: a run on small tables that begin with the rows of the wide ones."""

    def run(*overrides):
        real = HostTable.__init__

        def begin(self, stack, optimizer, key, **options):
            real(self, stack, optimizer, key, **options)
            for table, base in zip(stack.tables, stack.bases, strict=True):
                if table.name in NUMBERS and table.rows < ROWS:  # and not in ``wide_rows``
                    rows = base + np.arange(table.rows)
                    self.store(rows, wide_rows(table.name, key, stack.dtype), self.fetch(rows)[1])

        with monkeypatch.context() as patched:
            patched.setattr(HostTable, "__init__", begin)
            return train(configure("small", *overrides, out="small"))

    return run


def rows_of(folder):
    """Bits of all rows and slots by table, those of wide tables at the numbers that the examples have; and dense."""
    saved = latest(folder)
    found = {path: array.tobytes() for path, array in saved.arrays().items()}
    for name, record in saved.manifest.tables.items():
        rows = NUMBERS[name] if record.shape.rows == ROWS else np.arange(record.shape.rows)
        for array in ("values", *record.shape.slots):
            found[f"{name}/{array}"] = saved.table(name).read(array, rows).tobytes()
    return found


def check_same(wide, small):
    assert (wide.folder / "metrics.jsonl").read_bytes() == (small.folder / "metrics.jsonl").read_bytes()
    for split, scores in small.scores.items():
        np.testing.assert_array_equal(wide.scores[split].logits, scores.logits)
    ours, theirs = rows_of(wide.folder), rows_of(small.folder)
    assert ours.keys() == theirs.keys()
    assert [name for name, array in ours.items() if theirs[name] != array] == []


@pytest.mark.slow
def test_a_run_on_wide_tables_is_the_run_on_small_ones_and_resumes_to_its_bits(configure, small_run, monkeypatch):
    small, wide = small_run(), train(configure("wide", out="wide"))
    check_same(wide, small)
    again = evaluate_checkpoint(wide.folder, configure("wide", out="wide").data.path, split="test")
    np.testing.assert_array_equal(again.scores.logits, small.scores["test"].logits)

    out, ours = wide.folder.with_name("compressed"), rows_of(wide.folder)
    for choice in ({"largest": 2}, {"tables": ("C10",)}):
        with pytest.raises(ConfigError, match=r"C10.* has 3,000,000,000 rows to compress, but .* up to 2,147,483,647"):
            compress_run(wide.folder, out, Selection(rank=2, **choice))
    compress_run(wide.folder, out, Selection(rank=2, tables=("C7",)), splits=())
    kept = {name: array for name, array in rows_of(out).items() if name.split("/")[0] in ("C8", "C10")}
    assert len(kept) == 6
    assert [name for name, array in kept.items() if ours[name] != array] == []

    class Killed(BaseException):
        """As sudden as a kill: nothing in the loop handles it."""

    absorb = Recorder.absorb

    def dies(self, *results):
        if self.absorbed < 13 <= self.absorbed + len(results):
            raise Killed
        absorb(self, *results)

    config = configure("wide", "tables.host.queue=1", out="killed")
    monkeypatch.setattr(Recorder, "absorb", dies)
    with pytest.raises(Killed):
        train(config)
    monkeypatch.undo()
    assert latest(wide.folder.with_name("killed")).step in (4, 8, 12)
    check_same(train(configure("wide", out="killed"), resume=True), small)
