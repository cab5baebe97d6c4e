"""The report folder: its figures' numbers, the plots, undefined metrics, and what an interrupted write leaves."""

import hashlib
import json

import matplotlib.image
import numpy as np
import pytest

from jrec.data.schema import CategoricalFeature, DatasetError, DenseFeature, Schema, Shard, Split, Table
from jrec.errors import DivergedError, OutputError
from jrec.train.config import DataConfig, TrainConfig
from jrec.train.report import plots, summary, writing
from jrec.train.report.logs import METRICS_FILE, MetricLog
from jrec.train.report.metrics import Scores, auc, evaluate

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
    names = {"metrics.json", "roc.png", "calibration.png", "loss.png"}
    assert {p.name for p in (tmp_path / "report").iterdir()} == names
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
    for name in names - {"metrics.json"}:
        image = matplotlib.image.imread(tmp_path / "report" / name)
        assert min(image.shape[:2]) > 500
        assert image.std() > 0.05  # something is drawn


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
    assert f"auc is undefined: all labels are {int(label)}" in summary(content)
    assert (tmp_path / "roc.png").stat().st_size > 1000


def test_without_training_there_is_no_loss_plot_nor_throughput(tmp_path):
    content = write(tmp_path, {"test": make_scores()})
    assert content["training"] == {"steps": 60}
    assert not (tmp_path / "loss.png").exists()


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
    with pytest.raises(OutputError, match=r"no room left to write .*roc\.png"):
        write(tmp_path, {"test": make_scores(1)})
    assert (tmp_path / "metrics.json").read_bytes() == before
    assert matplotlib.image.imread(tmp_path / "roc.png").size


def labels_of(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_loss_plot_shows_every_series():
    records = [{"step": s, "split": "train", "loss": 1 / s} for s in range(1, 101)]
    records += [{"step": s, "split": "valid", "log_loss": 2 / s} for s in (50, 100)]
    figure = plots.plot_loss(records, title="t", ceiling={"valid": {"log_loss": 0.01}}, batch_size=2048)
    (axes,) = figure.axes
    raw, _smooth, valid, _ceiling = axes.get_lines()
    np.testing.assert_allclose(raw.get_xydata(), [(s, 1 / s) for s in range(1, 101)])
    np.testing.assert_allclose(valid.get_xydata(), [(50, 0.04), (100, 0.02)])
    assert labels_of(axes)[1:] == ["valid (best 0.0200 at step 100)", "valid, teacher's own (0.0100)"]
    assert axes.get_xlabel() == "step of 2,048 examples"
    low, high = axes.get_ylim()
    assert low < 0.01
    assert 0.1 < high < 1  # the first steps do not squeeze the rest


def test_roc_plot_follows_the_exact_curve():
    scores = make_scores(size=30_000)
    figure = plots.plot_roc({"test": scores}, title="t", ceiling={"test": {"auc": 0.9}})
    line = figure.axes[0].get_lines()[-1]
    x, y = line.get_xdata(), line.get_ydata()
    exact = auc(scores.logits, scores.labels)
    assert len(x) <= plots.CURVE_POINTS
    assert (x[0], y[0], x[-1], y[-1]) == (0, 0, 1, 1)
    assert np.trapezoid(y, x) == pytest.approx(exact, abs=1e-3)
    assert labels_of(figure.axes[0])[-1] == f"test: AUC {exact:.4f} (teacher's ceiling 0.9000)"


@pytest.mark.parametrize(("base", "scale"), [(-1.0, "linear"), (-4.5, "log")])
def test_calibration_plot_suits_the_click_rate(base, scale):
    figure = plots.plot_calibration({"test": make_scores(base=base, size=20_000)}, title="t")
    top, bottom = figure.axes
    assert top.get_xscale() == top.get_yscale() == bottom.get_xscale() == scale
    low, high = top.get_xlim()
    assert 0 <= low < high <= 1
    heights = bottom.patches[0].get_xy()[:, 1]
    edges = np.unique(bottom.patches[0].get_xy()[:, 0])
    assert heights.max() <= 1
    assert len(edges) == 51
