"""Calibrated logits: the scale that is fitted, where it applies, and runs that keep it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import shop_logs
from flax import nnx
from run_cases import CONFIG, configuring, quickstart

from jrec import serving
from jrec.app.calibration import bias_of, calibrated, fit_calibration, refinement
from jrec.app.evaluate import restore_run, score_split
from jrec.app.loop import train
from jrec.app.progress import TrainingProgress
from jrec.app.report.logs import METRICS_FILE, read_records
from jrec.data.blocks import ShardReader
from jrec.errors import ConfigError
from jrec.metrics import Scores, auc, entropy, log_loss, sigmoid
from jrec.nn import Calibration
from jrec.serving.encode import model_inputs

CALIBRATED = ("model.calibrate=true", "max_steps=16", "evaluate.early_stopping.metric=log_loss")


def drawn(scale, shift, size=40_000):
    """Scores whose logits are right once they are ``scale * logits + shift``."""
    random = np.random.default_rng(0)
    truth = random.normal(-1, 1.5, size)
    labels = random.random(size) < sigmoid(truth)
    return Scores(logits=((truth - shift) / scale).astype(np.float32), labels=labels)


@pytest.mark.parametrize("scale", [0.4, 1.0, 2.5])
def test_the_scale_of_logits_is_found_and_the_mean_prediction_kept(scale):
    scores = drawn(scale, 0.3)
    found, shift = fit_calibration(scores)
    after = calibrated(scores, found, shift)
    assert found == pytest.approx(scale, rel=0.05)
    assert sigmoid(after.logits).mean() == pytest.approx(sigmoid(scores.logits).mean(), abs=1e-4)
    assert auc(after.logits, after.labels) == pytest.approx(auc(scores.logits, scores.labels), abs=1e-6)


def test_too_extreme_logits_lose_no_more_than_the_click_rate_costs():
    scores = drawn(0.3, 0.0)
    after = calibrated(scores, *fit_calibration(scores))
    best = calibrated(scores, 0.3, 0.0)
    assert log_loss(scores.logits, scores.labels) > 1.3 * log_loss(best.logits, best.labels)
    assert log_loss(after.logits, after.labels) < 1.05 * log_loss(best.logits, best.labels)


def test_a_bias_of_training_is_taken_off_the_mean_prediction():
    scores, training = drawn(1.5, 0.3), drawn(1.0, 0.4)
    bias = bias_of(training)
    assert sigmoid(training.logits + bias).mean() == pytest.approx(training.labels.mean(), abs=1e-6)
    assert bias == pytest.approx(0.4, abs=0.05)
    after = calibrated(scores, *fit_calibration(scores, bias=bias))
    assert sigmoid(after.logits).mean() == pytest.approx(sigmoid(scores.logits + bias).mean(), abs=1e-6)
    for odd in (np.zeros_like(training.labels), np.ones_like(training.labels), np.zeros(0, bool)):
        assert bias_of(Scores(logits=training.logits[: odd.size], labels=odd)) == 0


@pytest.mark.parametrize("sign", [-1, 1])
def test_predictions_of_exactly_zero_or_one_are_calibrated_to_finite_numbers(sign):
    random = np.random.default_rng(0)
    logits = (sign * (800 + random.random(1000))).astype(np.float32)  # whose mean prediction is 0 or 1 to the last bit
    labels = random.random(1000) < 0.5 + 0.3 * (logits > np.median(logits))
    for bias in (0.0, bias_of(Scores(logits=logits, labels=labels))):
        scale, shift = fit_calibration(Scores(logits=logits, labels=labels), bias=bias)
        assert scale > 0
        assert np.isfinite([scale, shift]).all()


@pytest.mark.parametrize("scale", [0.4, 1.0, 2.5])
def test_refinement_is_the_loss_of_right_probabilities_whatever_scale_and_mean_are(scale):
    scores = drawn(scale, 0.7)
    right = calibrated(scores, scale, 0.7)
    best = min(
        log_loss(scale * right.logits + shift, right.labels) for scale in (0.98, 1, 1.02) for shift in (-0.02, 0, 0.02)
    )
    assert refinement(scores) == pytest.approx(best, abs=2e-4)
    assert refinement(scores) <= best
    assert log_loss(scores.logits, scores.labels) > refinement(scores) + 0.01


def test_refinement_of_what_ranks_nothing_is_the_entropy_of_the_click_rate():
    scores = drawn(1.0, 0.0, size=1000)
    constant = Scores(logits=np.full_like(scores.logits, 0.5), labels=scores.labels)
    reversed_ = Scores(logits=-scores.logits, labels=scores.labels)
    ones = Scores(logits=scores.logits, labels=np.ones_like(scores.labels))
    assert refinement(constant) == refinement(reversed_) == entropy(scores.labels.mean())
    assert refinement(ones) == 0


def test_what_no_scale_makes_better_stays_as_it_is():
    scores = drawn(1.0, 0.0, size=1000)
    ones = Scores(logits=scores.logits, labels=np.ones_like(scores.labels))
    constant = Scores(logits=np.full_like(scores.logits, 0.5), labels=scores.labels)
    nothing = Scores(logits=scores.logits[:0], labels=scores.labels[:0])
    reversed_ = Scores(logits=-scores.logits, labels=scores.labels)
    for odd in (ones, constant, nothing, reversed_):
        assert fit_calibration(odd) == (1.0, 0.0)
    separated = Scores(logits=np.where(scores.labels, 2, -2).astype(np.float32), labels=scores.labels)
    scale, shift = fit_calibration(separated)  # whose best scale is infinite
    assert np.isfinite([scale, shift]).all()
    assert scale > 1


def test_the_module_applies_in_eval_mode_only():
    module = Calibration()
    module.coefficients[...] = jnp.array([2.0, -1.0])
    logits = jnp.arange(3.0)
    assert jax.tree.leaves(nnx.state(module, nnx.Param)) == []
    np.testing.assert_array_equal(module(logits), logits)
    module.eval()
    np.testing.assert_array_equal(module(logits), 2 * logits - 1)
    module.train()
    np.testing.assert_array_equal(module(logits), logits)


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calibrated")
    return configuring(folder, quickstart(folder, rows=3000), CONFIG)


@pytest.fixture(scope="module")
def run(load):
    """A run that ends in the step of its last evaluation, and so do its checkpoints."""
    return train(load(*CALIBRATED, "evaluate.batches=0", "optimizer.embedding.learning_rate=0.2", out="run"))


def test_a_run_predicts_by_the_scale_that_its_last_evaluation_fitted(load, run):
    plain = train(load(*CALIBRATED[1:], "evaluate.batches=0", "optimizer.embedding.learning_rate=0.2", out="plain"))
    raw, found = plain.scores["valid"], run.scores["valid"]
    of_plain = restore_run(plain.folder)
    with TrainingProgress("off", total=0, start=0) as progress:
        options = {"limit": 1, "shuffle": True, "progress": progress}  # one batch holds more than the valid split
        training = score_split(of_plain.reading, "train", **options)
    scale, shift = fit_calibration(raw, bias=bias_of(training))
    assert scale < 0.9  # rows at this rate become too long
    assert abs(sigmoid(training.logits).mean() / training.labels.mean() - 1) > 0.1  # and predictions too great
    np.testing.assert_allclose(found.logits, scale * raw.logits + shift, rtol=1e-4, atol=1e-4)  # the same training
    np.testing.assert_array_equal(restore_run(run.folder).scores("valid").logits, found.logits)
    last = [record for record in read_records(run.folder / METRICS_FILE) if record["split"] == "valid"][-1]
    assert last["step"] == run.step
    assert last["log_loss"] == pytest.approx(log_loss(found.logits, found.labels), rel=1e-5)
    assert last["log_loss"] < log_loss(raw.logits, raw.labels)
    of_run = restore_run(run.folder)
    of_run.run.calibrate(1.0, bias_of(training))  # without the scale, which is of other examples
    by_training = of_run.scores("train")
    assert sigmoid(by_training.logits).mean() == pytest.approx(by_training.labels.mean(), rel=0.08)


def test_the_best_step_can_be_that_of_the_least_refinement(load):
    keys = ("evaluate.early_stopping.metric=refinement", "evaluate.every_steps=4", "evaluate.batches=0")
    rows = "optimizer.embedding.learning_rate=0.2"  # at which the model gets worse before the last step
    run = train(load(*keys, rows, "epochs=5", "checkpoint.keep_best=true", out="refined"))
    records = [record for record in read_records(run.folder / METRICS_FILE) if record["split"] == "valid"]
    best = min(records, key=lambda record: record["refinement"])
    assert best["step"] < run.step
    assert best["refinement"] == pytest.approx(refinement(run.scores["valid"]), rel=1e-6)
    assert all(record["refinement"] < record["log_loss"] for record in records)


@pytest.mark.parametrize("members", [1, 3])
def test_predictions_and_exports_take_the_scale(tmp_path, members):
    shop_logs.write_log(tmp_path / "monday.csv")
    dataset = shop_logs.prepare(tmp_path, tmp_path / "monday.csv", "monday")
    keys = ("model.calibrate=true", "evaluate.every_steps=4", f"model.members={members}")
    run = restore_run(shop_logs.trained(tmp_path, dataset, *keys))
    run.run.calibrate(1.0, 0.0)
    raw = run.scores("test").logits
    run.run.calibrate(2.0, 0.5)
    np.testing.assert_allclose(run.scores("test").logits, 2 * raw + 0.5, rtol=1e-5)
    run.run.export(tmp_path / "export", dense=[f.name for f in run.schema.dense], schema=run.schema)
    model = serving.load(tmp_path / "export")
    (shard,) = run.schema.splits["test"].shards
    columns = ShardReader(dataset, shard).read(0)
    got = model.logits_of(*model_inputs(columns, model.manifest))
    np.testing.assert_allclose(got, 2 * raw + 0.5, rtol=1e-4, atol=1e-5)


def test_numbers_that_are_no_calibration_are_refused(load, run):
    restored = restore_run(run.folder)
    for scale, shift in ((0.0, 1.0), (-1.0, 0.0), (np.nan, 0.0), (1.0, np.inf)):
        with pytest.raises(ValueError, match=r"scale is .* and shift .*; give a scale above 0"):
            restored.run.calibrate(scale, shift)
    plain = train(load("max_steps=1", out="without"))
    with pytest.raises(ValueError, match=r"has no calibration; make it with calibrated=True"):
        restore_run(plain.folder).run.calibrate(1.0, 0.0)


def test_a_run_that_evaluates_nothing_cannot_be_calibrated(load):
    for overrides in (["evaluate.every_steps=0"], ["evaluate.splits=[]", "evaluate.every_steps=auto"]):
        with pytest.raises(ConfigError, match=r"model\.calibrate is true, but .* nothing is evaluated in training"):
            load("model.calibrate=true", *overrides)
    with pytest.raises(ConfigError, match="nothing is evaluated"):
        load("model.calibrate=true", "schedule=fae", "evaluate.every_steps=auto")
