"""The report folder: its numbers, undefined metrics, and what an interrupted write leaves."""

import hashlib
import json

import numpy as np
import pytest

from jrec.app.config import DataConfig, TrainConfig
from jrec.app.report import summary, writing
from jrec.app.report.logs import METRICS_FILE, MetricLog
from jrec.data.schema import CategoricalFeature, DatasetError, DenseFeature, Schema, Shard, Split, Table
from jrec.errors import DivergedError, OutputError
from jrec.metrics import Scores, auc, evaluate, reliability_bins, sigmoid

CONFIG = TrainConfig(name="trial", data=DataConfig(path="data/x", batch_size=64))
PARAMETERS = {"dense": {"parameters": 10, "bytes": 40}, "d16_float32": {"parameters": 160, "bytes": 640, "rows": 10}}


def make_schema(**ceiling):
    shard = Shard(file="test.array_record", blocks=1, examples=500, bytes=1, digest="")
    return Schema(
        name="synthetic",
        block_size=8192,
        dense=(DenseFeature(name="I1"),),
        categorical=(CategoricalFeature(name="C1", table="C1", fixed_length=True),),
        tables=(Table(name="C1", rows=10),),
        splits={"test": Split(shards=(shard,))},
        provenance={"command": "jrec synth"},
        ceiling=ceiling,
    )


def make_scores(seed=0, base=-1.0, size=500):
    random = np.random.default_rng(seed)
    logits = random.normal(size=size) + base
    labels = random.random(size) < 1 / (1 + np.exp(-logits))
    return Scores(logits=logits.astype(np.float32), labels=labels)


def make_history(folder, steps=60):
    with MetricLog(folder, tensorboard=False) as log:
        for step in range(1, steps + 1):
            log.write(step, {"loss": 0.5 + 1 / step})
            if step % 20 == 0:
                log.write(step, {"log_loss": 0.5 + 1 / step, "auc": 0.7}, split="valid")
    return folder / METRICS_FILE


def write(folder, scores, schema=None, **options):
    schema = make_schema() if schema is None else schema
    return writing.write_report(
        folder, config=CONFIG, schema=schema, scores=scores, parameters=PARAMETERS, steps=60, **options
    )


def test_a_full_report(tmp_path):
    schema = make_schema(test={"auc": 0.8, "log_loss": 0.51})
    scores = {"valid": make_scores(1), "test": make_scores(2)}
    history = make_history(tmp_path)
    content = write(tmp_path / "report", scores, schema, seconds=2.0, examples=1000, history=history)
    assert {p.name for p in (tmp_path / "report").iterdir()} == {"metrics.json", "report.html"}
    assert json.loads((tmp_path / "report" / "metrics.json").read_text()) == content
    assert content["splits"]["test"] == evaluate(scores["test"]).to_dict()
    assert content["splits"]["test"]["auc"] == auc(scores["test"].logits, scores["test"].labels)
    assert content["ceiling"] == {"test": {"auc": 0.8, "log_loss": 0.51}}
    assert content["training"] == {"steps": 60, "seconds": 2.0, "examples": 1000, "examples_per_second": 500.0}
    assert content["parameters"]["total"] == {"parameters": 170, "bytes": 680}
    assert content["parameters"]["d16_float32"]["rows"] == 10
    assert content["data"]["examples"] == {"test": 500}
    assert content["data"]["rows"] == 10
    assert content["config"]["data"]["batch_size"] == 64
    assert content["device"]["count"] == 4
    assert content["versions"]["jax"].startswith("0.")
    measured = {*content["splits"]["test"], *content["training"], *content["parameters"]["d16_float32"]}
    assert measured <= set(content["units"])
    bins = reliability_bins(sigmoid(scores["test"].logits), scores["test"].labels)
    assert content["reliability"]["test"]["observed"] == bins.observed.tolist()
    assert content["judgement"] == {"warnings": [], "advice": []}


def test_summary_puts_the_auc_beside_the_ceiling(tmp_path):
    schema = make_schema(test={"auc": 0.8123})
    content = write(tmp_path, {"valid": make_scores(1), "test": make_scores(2)}, schema)
    header, valid, test = summary(content).splitlines()
    assert header.split()[:3] == ["split", "AUC", "ceiling"]
    assert valid.split()[:3] == ["valid", f"{content['splits']['valid']['auc']:.4f}", "-"]
    assert test.split()[:3] == ["test", f"{content['splits']['test']['auc']:.4f}", "0.8123"]
    assert len({len(line) for line in (header, valid, test)}) == 1


def test_hits_of_caches_are_reported(tmp_path):
    hits = {"hits": 250, "lookups": 1000, "hit_rate": 0.25}
    content = write(tmp_path, {"test": make_scores(2)}, sections={"caches": {"C1": hits}})
    assert content["caches"] == {"C1": hits}
    content["tables"]["C1"]["cache_rows"] = 5
    assert summary(content).splitlines()[-1] == "table C1: 25.0 % of 1,000 lookups hit the cache of 5 rows"


def test_a_section_has_one_source(tmp_path):
    with pytest.raises(ValueError, match="section 'training' is given twice"):
        write(tmp_path, {"test": make_scores(2)}, sections={"training": {}})


@pytest.mark.parametrize("label", [False, True])
def test_one_class(tmp_path, label):
    one = Scores(logits=np.array([-4, -3, -3.5], np.float32), labels=np.full(3, label))
    content = write(tmp_path, {"test": one})
    text = (tmp_path / "metrics.json").read_text()
    assert "NaN" not in text
    assert json.loads(text)["splits"]["test"]["auc"] is None
    undefined = "auc, normalized entropy" if label else "auc, normalized entropy, calibration, average precision"
    assert f"warning: {undefined} of test: undefined, since all labels are {int(label)}" in summary(content)


def test_without_training_there_are_no_learning_curves_nor_throughput(tmp_path):
    content = write(tmp_path, {"test": make_scores()})
    assert content["training"] == {"steps": 60}
    page = (tmp_path / "report.html").read_text()
    assert "Calibration on test" in page
    assert "Log loss by step" not in page
    assert "examples/s" not in page


def test_bad_scores_leave_an_earlier_report_as_it_was(tmp_path):
    write(tmp_path, {"test": make_scores()})
    before = {p.name: hashlib.sha256(p.read_bytes()).digest() for p in tmp_path.iterdir()}
    bad = Scores(logits=np.array([np.nan], np.float32), labels=np.array([True]))
    with pytest.raises(DivergedError):
        write(tmp_path, {"test": bad})
    empty = Scores(logits=np.empty(0, np.float32), labels=np.empty(0, bool))
    with pytest.raises(DatasetError, match=r"no examples"):
        write(tmp_path, {"test": empty})
    assert {p.name: hashlib.sha256(p.read_bytes()).digest() for p in tmp_path.iterdir()} == before


def test_a_failing_write_leaves_the_earlier_file(tmp_path, monkeypatch):
    write(tmp_path, {"test": make_scores(0)})
    before = (tmp_path / "metrics.json").read_bytes()

    def full(file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OutputError, match=r"no room left to write .*report\.html"):
        write(tmp_path, {"test": make_scores(1)})
    assert (tmp_path / "metrics.json").read_bytes() == before
    assert (tmp_path / "report.html").read_text().endswith("</html>\n")
