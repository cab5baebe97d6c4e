"""What a report warns of and advises: by ranking, log loss, calibration and slices, and never what is set already."""

import numpy as np
import pytest

from jrec.app.config import DataConfig, TrainConfig
from jrec.app.config.train import CheckpointConfig, EarlyStoppingSection, EvaluateConfig
from jrec.app.report.judgement import judge
from jrec.metrics import Scores, evaluate

INIT = {
    "evaluate": EvaluateConfig(early_stopping=EarlyStoppingSection(metric="auc", patience=3)),
    "checkpoint": CheckpointConfig(keep_best=True),
}
"""The keys that `jrec init` writes."""


def make_scores(sharpness=1.0, shift=0.0, size=20_000, seed=0, rate=-1.0):
    """Scores whose logits are the true ones, times a factor and moved."""
    random = np.random.default_rng(seed)
    truth = random.normal(size=size) + rate
    labels = random.random(size) < 1 / (1 + np.exp(-truth))
    return Scores(logits=(sharpness * (truth - rate) + rate + shift).astype(np.float32), labels=labels)


def judged(model, logistic=None, *, valid=None, losses=(), scored=None, config=(), **sections):
    """The judgement on a model's scores, each as ``make_scores`` takes them, beside a baseline's metrics."""
    splits = {"valid": valid, "test": model} if valid is not None else {"test": model}
    content = {
        "splits": {split: evaluate(make_scores(**one)).to_dict() for split, one in splits.items()},
        "training": {"steps": len(losses)} | ({"scored_step": scored} if scored else {}),
        "config": TrainConfig(data=DataConfig(path="data/x"), **dict(config)).to_dict(),
        **sections,
    }
    if logistic is not None:
        content["baselines"] = {"logistic_regression": {"splits": {"test": content["splits"]["test"] | logistic}}}
    records = [{"step": n, "split": "valid", "log_loss": loss, "auc": 0.7} for n, loss in enumerate(losses, 1)]
    judgement = judge(content, records)
    return judgement["warnings"], judgement["advice"]


def test_a_model_that_is_better_in_everything_is_not_warned_of():
    assert judged({}, {"auc": 0.6, "log_loss": 0.6, "calibration_error": 0.01}, valid={}) == ([], [])
    assert judged({}) == ([], [])


def test_a_baseline_that_ranks_better():
    warnings, advice = judged({}, {"auc": 0.9}, losses=[0.6, 0.5, 0.45])
    (line,) = warnings
    assert line.endswith("is below logistic regression's 0.9000: a linear model of the same features ranks better")
    assert "train for longer, if the losses still fall: epochs=3 (now 1)" in advice
    assert any("optimizer.name=adam (now adagrad)" in one for one in advice)


def test_a_baseline_with_better_probabilities_although_the_model_ranks_better():
    """The case of Frappe: AUC 0.945 against 0.928, log loss 0.351 against 0.311."""
    warnings, advice = judged(
        {"sharpness": 2.0},
        {"auc": 0.6, "log_loss": 0.45, "calibration_error": 0.004},
        losses=[0.5, 0.42, 0.6],
        config=INIT,
    )
    loss, error, mean, course = warnings
    assert "is above logistic regression's 0.4500: it ranks better, but its probabilities are worse" in loss
    assert "calibration error 0." in error
    assert "is above logistic regression's 0.0040" in error
    assert "16.7 % more clicks" in mean
    assert "best, 0.4200 nats, at step 2; at the last evaluation of what is scored, step 3, it was 0.6000" in course
    assert advice[0] == "score the step whose log loss is best: evaluate.early_stopping.metric=log_loss (now auc)"
    assert "optimizer.embedding.weight_decay=1e-05 (now 0.0), model.dropout=0.1 (now 0.0)" in advice[1]
    assert not any("patience" in one or "keep_best" in one for one in advice)  # the configuration has them


def test_without_early_stopping_all_of_it_is_advised():
    _, advice = judged({}, losses=[0.5, 0.42, 0.6])
    assert advice == [
        "score the step whose log loss is best: evaluate.early_stopping.metric=log_loss (now auc),"
        " checkpoint.keep_best=true (now false), evaluate.early_stopping.patience=3 (now 0)"
    ]
    by_refinement = EvaluateConfig(early_stopping=EarlyStoppingSection(metric="refinement", patience=3))
    _, advice = judged({}, losses=[0.5, 0.42, 0.6], config={"evaluate": by_refinement})
    assert advice == ["score the step whose log loss is best: checkpoint.keep_best=true (now false)"]


def test_what_is_scored_counts_not_the_last_step():
    assert judged({}, losses=[0.5, 0.42, 0.6], scored=2) == ([], [])
    (line,), _ = judged({}, losses=[0.5, 0.42, 0.6], scored=1)
    assert "at step 2" in line


def test_advice_against_overfitting_leaves_out_what_is_set():
    config = TrainConfig(data=DataConfig(path="x"))
    model = {"model": type(config.model)(dropout=0.2, embedding_dim=4, bottom_mlp=(8, 4))}
    _, advice = judged({}, {"log_loss": 0.1}, losses=[0.5, 0.6], scored=1, config=model)
    (line,) = advice
    assert line.endswith("by heart, so regularize it: optimizer.embedding.weight_decay=1e-05 (now 0.0)")


def test_worse_than_the_click_rate():
    warnings, _ = judged({"sharpness": -1.0})
    assert any("no better than 0." in line and "that of predicting the click rate" in line for line in warnings)


@pytest.mark.parametrize(
    ("valid", "says"),
    [
        ({"shift": 0.5}, "add -0."),
        ({}, "valid's mean prediction, 0."),
    ],
)
def test_predictions_that_are_too_high(valid, says):
    warnings, advice = judged({"shift": 0.5, "seed": 1}, valid=valid)
    (line,) = warnings
    assert "% more clicks than there are on test: mean prediction 0." in line
    (one,) = advice
    assert one.startswith(says)
    fewer, _ = judged({"shift": -0.5})
    assert "% fewer clicks" in fewer[0]


def test_chance_is_no_warning():
    """Of few examples, gaps of this size are nothing."""
    for seed in range(20):
        assert judged({"size": 400, "seed": seed}, {"calibration_error": 0.0}) == ([], [])


def test_the_slice_that_is_most_surely_off_is_named():
    def one(name, rate, mean, deviations):
        return {"feature": "site", "slice": name, "examples": 900, "base_rate": rate, "mean_prediction": mean,
                "deviations": deviations}  # fmt: skip

    some = [one("a", 0.2, 0.2, 0.1), one("b", 0.2, 0.3, 6.0), one("c", 0.2, 0.3, 7.0), one("d", 0.2, 0.21, 9.0)]
    (line,), advice = judged({}, slices={"split": "test", "slices": some})
    assert line.startswith("in 2 of 4 slices of test the mean prediction is off by more than 10 %")
    assert "where site is c: mean prediction 0.3000, click rate 0.2000, 900 examples" in line
    assert advice == []
