"""GAUC and log loss, or XGAUC and RMSE, by group against scores of each group by itself, and in a run's report."""

import itertools
import json

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from prepared_logs import prepared
from train_command import train_command

from jrec import metrics, regression
from jrec.app.report.groups import describe_groups, ends, score_groups
from jrec.cli import main
from jrec.concordance import ordered_pairs
from jrec.metrics import Scores
from jrec.regression import NumberScores

TEXT = """
[data]
batch_size = 64
[model]
embedding_dim = 4
bottom_mlp = []
top_mlp = [1]
[evaluate]
group = "a"
baselines = "off"
[log]
tensorboard = false
"""


@st.composite
def grouped(draw):
    size = draw(st.integers(0, 60))
    logits = draw(hnp.arrays(np.float32, size, elements=st.sampled_from([-3.0, -0.5, 0.0, 0.5, 2.0, 80.0])))
    groups = draw(hnp.arrays(np.int64, size, elements=st.integers(0, 5)))
    return Scores(logits=logits, labels=draw(hnp.arrays(np.bool_, size))), groups


@given(grouped())
def test_every_group_is_scored_as_if_it_stood_alone(data):
    scores, groups = data
    found = score_groups(scores, groups)
    np.testing.assert_array_equal(found.groups, np.unique(groups))
    total = weight = 0.0
    for at, group in enumerate(found.groups):
        own = groups == group
        auc = metrics.auc(scores.logits[own], scores.labels[own])
        assert found.examples[at] == own.sum()
        assert found.level[at] == scores.labels[own].sum()
        assert found.error[at] == pytest.approx(metrics.log_loss(scores.logits[own], scores.labels[own]))
        assert found.defined[at] == (auc is not None)
        if auc is not None:
            assert found.ranking[at] == auc
            total, weight = total + auc * own.sum(), weight + own.sum()
    assert found.mean == (pytest.approx(total / weight) if weight else None)


@st.composite
def grouped_numbers(draw):
    size, few = draw(st.integers(0, 60)), st.sampled_from([-2.5, -1.0, 0.0, 1.0, 2.0, 3.0, 7.5])
    predictions, labels = (draw(hnp.arrays(np.float32, size, elements=few)) for _ in range(2))
    weights = draw(st.none() | hnp.arrays(np.float32, size, elements=st.sampled_from([0.5, 1.0, 3.0])))
    scores = NumberScores(predictions=predictions, labels=labels, weights=weights)
    return scores, draw(hnp.arrays(np.int64, size, elements=st.integers(0, 5)))


def xauc_by_pairs(scores):
    """XAUC of all pairs of examples, one by one; None where no labels differ."""
    ordered = total = 0.0
    weights = np.ones(scores.labels.size) if scores.weights is None else scores.weights
    for (p, y, w), (q, z, v) in itertools.permutations(zip(scores.predictions, scores.labels, weights, strict=True), 2):
        if y > z:
            total += w * v
            ordered += w * v * (1.0 if p > q else 0.5 if p == q else 0.0)
    return ordered / total if total else None


@given(grouped_numbers())
def test_every_group_of_numbers_is_scored_as_if_it_stood_alone(data):
    scores, groups = data
    found = score_groups(scores, groups)
    total = weight = 0.0
    for at, group in enumerate(found.groups):
        own = scores.cut(groups == group)
        alone, xauc = regression.evaluate_numbers(own), xauc_by_pairs(own)
        assert alone.xauc == (None if xauc is None else pytest.approx(xauc))
        assert found.examples[at] == alone.examples
        assert found.level[at] == pytest.approx(alone.mean_label)
        assert found.error[at] == pytest.approx(alone.rmse)
        assert found.defined[at] == (xauc is not None)
        if xauc is not None:
            assert found.ranking[at] == pytest.approx(xauc)
            total, weight = total + xauc * found.weights[at], weight + found.weights[at]
    assert found.mean == (pytest.approx(total / weight) if weight else None)


def test_pairs_are_counted_exactly_among_many_distinct_labels():
    random = np.random.default_rng(0)
    labels, predictions = random.permutation(3_000), random.permutation(3_000).astype(np.float64)
    later = np.triu(np.ones((3_000, 3_000), bool), 1)
    by_label = predictions[np.argsort(labels)]
    ordered = int(np.count_nonzero((by_label[:, None] < by_label) & later))
    (twice,), (pairs,) = ordered_pairs(predictions, labels, np.zeros(3_000, int), np.ones(3_000, int))
    assert (twice, pairs) == (2 * ordered, 3_000 * 2_999 // 2)


def test_what_is_reported_of_a_split():
    groups = np.repeat([0, 1, 2, 9], [10, 20, 5, 65])
    labels = np.zeros(100, bool)
    labels[[3, 12, 30]] = True
    logits = np.arange(100, dtype=np.float32) % 10
    named = []

    def names(rows):
        named.append(rows)
        return [f"user {row}" for row in rows]

    found = describe_groups(Scores(logits=logits, labels=labels), groups, names, none=9)
    assert (found["groups"], found["groups_of_one_label"], found["coverage"]) == (3, 0, 0.35)
    alone = [metrics.auc(logits[groups == g], labels[groups == g]) for g in (0, 1, 2)]
    assert found["gauc"] == pytest.approx((10 * alone[0] + 20 * alone[1] + 5 * alone[2]) / 35)
    assert found["mean_auc"] == pytest.approx(np.mean(alone))
    assert sum(found["histogram"]) == 35
    assert [row["group"] for row in found["worst"]] == [f"user {g}" for g in np.argsort(alone[:2])]  # of 10 or more
    assert [row["group"] for row in found["best"]] == [row["group"] for row in reversed(found["worst"])]
    assert ends(found) == {"only": found["best"]}
    assert ends({"best": [1, 2], "worst": [3]}) == {"best": [1, 2], "worst": [3]}
    assert json.dumps(found, allow_nan=False)
    empty = describe_groups(Scores(logits=logits[:5], labels=labels[5:10]), groups[:5], names)
    assert (empty["gauc"], empty["groups"], empty["best"], ends(empty)) == (None, 0, [], {})
    with pytest.raises(ValueError, match=r"groups have shape \(3,\), but there are 5 scores"):
        score_groups(Scores(logits=logits[:5], labels=labels[:5]), groups[:3])


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    random, folder = np.random.default_rng(0), tmp_path_factory.mktemp("grouped")
    lines = [f"{int(random.random() < 0.4)},{'xyz'[i % 3]},{random.integers(5)}\n" for i in range(600)]
    schema = prepared(folder, "label,a,b\n" + "".join(lines), "log")
    return folder / "log", schema


def test_a_run_reports_the_groups_of_a_feature_by_name(tmp_path, log, capsys, monkeypatch):
    data, _ = log
    run = train_command(tmp_path, data, text=TEXT)
    report = json.loads((run / "report" / "metrics.json").read_text())
    printed = capsys.readouterr().out
    test = report["groups"]["splits"]["test"]
    assert report["groups"]["feature"] == "a"
    assert (test["groups"], test["coverage"]) == (3, 1.0)
    assert {row["group"] for row in test["best"]} == {"x", "y", "z"}
    assert sum(row["examples"] for row in test["best"]) == report["splits"]["test"]["examples"] == 60
    assert "AUC within groups by a" in (run / "report" / "report.html").read_text()
    assert f"test, by a: GAUC {test['gauc']:.4f} of 3 groups" in printed
    slices = {one["slice"]: one["examples"] for one in report["slices"]["slices"] if one["feature"] == "a"}
    assert slices == {row["group"]: row["examples"] for row in test["best"]}  # a value has its name
    assert main(["eval", str(run), str(data), "--group", "b", "--batches", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["groups"]["feature"] == "b"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert main(["eval", str(run), str(data)]) == 0
    shown = capsys.readouterr().out
    assert f"\ntest{report['splits']['test']['auc']:>13.4f}" in shown
    assert f"test, by a: GAUC {test['gauc']:.4f} of 3 groups" in shown
    assert shown.endswith(f" of {run}, 60 examples of {data}\n")
    assert main(["eval", str(run), str(data), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["auc"] == report["splits"]["test"]["auc"]


def test_an_evaluation_writes_the_same_page_with_the_runs_learning_curves(tmp_path, log, capsys):
    data, _ = log
    run = train_command(tmp_path, data, "evaluate.every_steps=1", text=TEXT)
    capsys.readouterr()
    assert main(["eval", str(run), str(data), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr()
    report = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert "slices" not in json.loads(said.out)  # too long for a line
    assert report["slices"]["split"] == "test"
    assert said.err.splitlines()[-1] == f"report: {tmp_path / 'out' / 'report.html'}"
    assert [line for line in said.err.splitlines() if line.startswith("warning: ")] == [
        f"warning: {text}" for text in report["judgement"]["warnings"]
    ]
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Log loss by step" in page
    assert "AUC within groups by a" in page


def test_a_group_that_the_dataset_lacks_is_refused_with_the_nearest(tmp_path, log, capsys):
    (tmp_path / "tiny.toml").write_text(TEXT)
    run = [str(tmp_path / "tiny.toml"), f"data.path={log[0]}", f"out={tmp_path / 'run'}"]
    assert main(["train", *run, "evaluate.group=aa"]) == 2
    said = capsys.readouterr().err
    assert "evaluate.group is 'aa', but the dataset's categorical features with one id an example are a, b" in said
    assert "did you mean 'a'?" in said
