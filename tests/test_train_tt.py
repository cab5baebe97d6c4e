"""Runs with tensor-train tables: they learn, resume to the same bits, are evaluated and reported, and compressed."""

import json

import numpy as np
import pytest
from checkpoint_state import final_arrays
from run_cases import CONFIG, configuring, quickstart

from jrec import cli
from jrec.app.evaluate import evaluate_checkpoint
from jrec.app.loop import train
from jrec.app.recorder import Recorder
from jrec.app.report.logs import read_records
from jrec.errors import CheckpointError
from jrec.metrics import evaluate


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return quickstart(tmp_path_factory.mktemp("data"))


TT = """
[tables.tt]
largest = 1
rank = 4
[tables.tt.cache]
rows = 20
warmup_steps = 6
refresh_every = 4
"""


@pytest.fixture
def configure(tmp_path, dataset):
    return configuring(tmp_path, dataset, CONFIG + TT)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_compressed_run_learns_resumes_to_the_same_bits_and_is_evaluated(configure, monkeypatch, dtype):
    def configured(out):
        return configure("epochs=2", "evaluate.every_steps=0", f"tables.tt.dtype={dtype!r}", out=out)

    outcome = train(configured("whole"))
    assert evaluate(outcome.scores["test"]).auc > 0.55
    step, arrays, meta = final_arrays(outcome.folder)
    (cached,) = [np.frombuffer(bits, np.int32) for name, bits in arrays.items() if "cached.ids" in name]
    rows = max(t.rows for t in outcome.schema.tables)
    assert np.all(np.diff(cached) > 0)
    assert cached[-1] < rows

    class Killed(BaseException):
        """As sudden as a kill: nothing in the loop handles it."""

    absorb = Recorder.absorb

    def dies(self, *args):
        absorb(self, *args)
        if self.absorbed in (8, 22):
            raise Killed

    for deadly in (True, False):  # once in the cached rows' first life, then to the end
        monkeypatch.setattr(Recorder, "absorb", dies if deadly else absorb)
        if deadly:
            with pytest.raises(Killed):
                train(configured("killed"), resume=True)
        else:
            resumed = train(configured("killed"), resume=True)
    again = final_arrays(resumed.folder)
    assert (again[0], again[2]) == (step, meta)
    assert again[1].keys() == arrays.keys()
    assert [name for name in arrays if arrays[name] != again[1][name]] == []
    assert (resumed.folder / "metrics.jsonl").read_bytes() == (outcome.folder / "metrics.jsonl").read_bytes()
    assert resumed.sections["caches"] == outcome.sections["caches"]
    ((table, hits),) = outcome.sections["caches"].items()
    examples = configured("whole").data.batch_size * step
    assert 0 < hits["hits"] < hits["lookups"] <= examples
    rates = [r[f"cache_hit_rate.{table}"] for r in read_records(outcome.folder / "metrics.jsonl") if "loss" in r]
    assert 0 < max(rates) < 1

    evaluated = evaluate_checkpoint(resumed.folder, configured("killed").data.path, split="test")
    np.testing.assert_array_equal(evaluated.scores.logits, outcome.scores["test"].logits)


def test_the_report_shows_what_was_compressed_and_a_checkpoint_of_another_rank_is_refused(configure, capsys, tmp_path):
    overrides = [
        "epochs=1",
        "max_steps=4",
        "tables.tt.cache.rows=0",
        "checkpoint.every_steps=0",
        "evaluate.every_steps=0",
    ]
    config = configure(*overrides)
    path = tmp_path / "tiny.toml"
    assert cli.main(["train", str(path), f"data.path={config.data.path}", f"out={config.out}", *overrides]) == 0
    out = capsys.readouterr().out
    content = json.loads((tmp_path / "run" / "report" / "metrics.json").read_text())
    (name,) = [n for n, t in content["tables"].items() if t["tier"] == "tt"]
    table = content["tables"][name]
    assert table["rows"] == max(t["rows"] for t in content["tables"].values())
    assert table["ranks"] == [4, 4]
    assert f"table {name}: {table['rows']:,} rows as a tensor train" in out
    assert content["parameters"][f"tt_{name}"]["bytes"] == table["bytes"] == 4 * table["parameters"]
    assert content["tables_total"]["bytes"] < content["tables_total"]["uncompressed_bytes"]
    (tmp_path / "run" / "config.toml").write_text(configure(*overrides, "tables.tt.rank=5").to_toml())
    with pytest.raises(CheckpointError, match=r"ranks was \[4, 4\] and is \[5, 5\]"):
        evaluate_checkpoint(tmp_path / "run", config.data.path, split="test")
