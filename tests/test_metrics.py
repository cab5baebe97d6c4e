"""Metrics against scikit-learn and hand counts, undefined cases, and the running AUC's bound and restoration."""

import dataclasses
import fractions
import json

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.metrics
from hypothesis import given, settings

from jrec import metrics
from jrec.app.report.running_auc import RunningAuc
from jrec.data.schema import DatasetError
from jrec.errors import DivergedError
from jrec.metrics import ScoreAccumulator, Scores, evaluate


@st.composite
def scored_labels(draw, max_size=60):
    """Logits and labels, with many ties, tiny differences and both zeros."""
    size = draw(st.integers(1, max_size))
    coarse = st.sampled_from([-3.0, -0.5, -0.0, 0.0, 1e-30, 0.5, 2.0, 80.0])
    fine = st.floats(-100, 100, width=32)
    logits = draw(hnp.arrays(np.float32, size, elements=draw(st.sampled_from([coarse, fine]))))
    labels = draw(hnp.arrays(np.bool_, size))
    return logits, labels


def pairwise_auc(scores, labels):
    """The definition, in rational numbers."""
    positives, negatives = scores[labels], scores[~labels]
    wins = sum(2 * int(np.sum(negatives < p)) + int(np.sum(negatives == p)) for p in positives)
    return fractions.Fraction(wins, 2 * len(positives) * len(negatives))


@given(scored_labels())
@settings(max_examples=300)
def test_auc_is_exact_and_sklearns(data):
    logits, labels = data
    result = metrics.auc(logits, labels)
    if labels.all() or not labels.any():
        assert result is None
        return
    assert result == float(pairwise_auc(logits, labels))
    assert result == pytest.approx(sklearn.metrics.roc_auc_score(labels, logits), abs=1e-12)


@given(scored_labels())
@settings(max_examples=200)
def test_average_precision_is_sklearns(data):
    logits, labels = data
    result = metrics.average_precision(logits, labels)
    if not labels.any():
        assert result is None
        return
    assert result == pytest.approx(sklearn.metrics.average_precision_score(labels, logits), abs=1e-12)


@given(scored_labels())
def test_log_loss_and_accuracy_are_sklearns(data):
    logits, labels = data
    logits = np.clip(logits, -12, 12)  # scikit-learn takes the logarithm of 1 - p, which rounds
    probabilities = metrics.sigmoid(logits)
    expected = sklearn.metrics.log_loss(labels, probabilities, labels=[False, True])
    assert metrics.log_loss(logits, labels) == pytest.approx(expected, rel=1e-8)
    result = evaluate(Scores(logits=logits, labels=labels))
    assert result.log_loss == metrics.log_loss(logits, labels)
    assert result.accuracy == sklearn.metrics.accuracy_score(labels, logits >= 0)
    assert result.base_rate == labels.mean()
    assert result.mean_prediction == pytest.approx(probabilities.mean(), rel=1e-12)


def test_log_loss_of_extreme_logits():
    logits = np.array([1000.0, -1000.0, 3e38, -3e38], np.float32)
    assert metrics.log_loss(logits, [1, 0, 1, 0]) == 0.0
    assert metrics.log_loss(logits[:2], [0, 1]) == 1000.0
    assert np.isfinite(metrics.log_loss(logits, [0, 1, 0, 1]))
    np.testing.assert_array_equal(metrics.sigmoid(logits), [1, 0, 1, 0])
    assert metrics.sigmoid(np.array([-700.0]))[0] == pytest.approx(np.exp(-700), rel=1e-12)


def test_normalized_entropy():
    labels = np.arange(1000) % 50 == 0
    base = np.full(1000, np.log(0.02 / 0.98))
    assert metrics.normalized_entropy(base, labels) == pytest.approx(1.0, rel=1e-12)
    perfect = np.where(labels, 50.0, -50.0)
    assert metrics.normalized_entropy(perfect, labels) == pytest.approx(0.0, abs=1e-12)
    assert metrics.normalized_entropy(np.zeros(1000), labels) == pytest.approx(np.log(2) / 0.098039, rel=1e-4)
    assert metrics.normalized_entropy(base, np.zeros(1000)) is None


@given(scored_labels(max_size=300), st.integers(1, 30))
def test_reliability_bins_partition_the_examples(data, bins):
    logits, labels = data
    p = metrics.sigmoid(logits)
    result = metrics.reliability_bins(p, labels, bins)
    assert len(result.counts) <= bins
    assert (result.counts > 0).all()
    assert result.counts.sum() == len(p)
    assert np.sum(result.counts * result.mean_predicted) == pytest.approx(p.sum(), rel=1e-9)
    assert np.sum(result.counts * result.observed) == pytest.approx(labels.sum(), abs=1e-9)
    assert (np.diff(result.mean_predicted) > 0).all()
    assert 0 <= result.error <= 1


def test_reliability_bins_are_of_equal_count_and_measure_the_error():
    p = np.repeat([0.1, 0.2, 0.6], [500, 300, 200])
    labels = np.concatenate([np.arange(500) < 50, np.arange(300) < 90, np.arange(200) < 80])
    result = metrics.reliability_bins(p, labels, bins=10)
    np.testing.assert_array_equal(result.counts, [500, 300, 200])
    np.testing.assert_allclose(result.mean_predicted, [0.1, 0.2, 0.6])
    np.testing.assert_allclose(result.observed, [0.1, 0.3, 0.4])
    assert result.error == pytest.approx(0.3 * 0.1 + 0.2 * 0.2)
    spread = metrics.reliability_bins(np.random.default_rng(0).random(1000), np.zeros(1000))
    np.testing.assert_array_equal(spread.counts, np.full(20, 50))


@pytest.mark.parametrize(
    ("labels", "undefined"),
    [
        ([0, 0, 0], {"auc", "average_precision", "normalized_entropy", "calibration"}),
        ([1, 1, 1], {"auc", "normalized_entropy"}),
    ],
)
def test_one_class_is_null_with_a_reason(labels, undefined):
    result = evaluate(Scores(logits=np.array([0.0, 1.0, 2.0], np.float32), labels=np.array(labels)))
    content = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert {k for k, v in content.items() if v is None} == undefined == set(content["undefined"])
    assert content["undefined"]["auc"] == f"all labels are {labels[0]}"


def test_a_full_evaluation_has_no_undefined_and_every_metric_has_a_unit():
    evaluation = evaluate(Scores(logits=np.array([0.0, 1.0], np.float32), labels=np.array([False, True])))
    assert evaluation.auc == 1.0
    assert set(evaluation.to_dict()) == set(metrics.UNITS) - {"refinement", "weight"}
    assert set(dataclasses.replace(evaluation, refinement=0.0, weight=2.0).to_dict()) == set(metrics.UNITS)


def test_bad_scores_and_labels():
    with pytest.raises(DatasetError, match=r"no examples"):
        evaluate(ScoreAccumulator().scores())
    with pytest.raises(DivergedError, match=r"2 of 3 logits are NaN or infinite \(the first is inf\)"):
        evaluate(Scores(logits=np.array([0, np.inf, np.nan], np.float32), labels=np.zeros(3, bool)))
    with pytest.raises(DivergedError, match=r"1 of 2 logits"):
        ScoreAccumulator().update([0.0, np.nan], [0, 1])
    with pytest.raises(ValueError, match=r"label 1 is .*0.5"):
        ScoreAccumulator().update([0.0, 1.0], [0, 0.5])
    with pytest.raises(ValueError, match=r"\(2,\) and \(3,\)"):
        ScoreAccumulator().update([0.0, 1.0], [0, 1, 1])
    with pytest.raises(ValueError, match=r"mask has shape \(3,\)"):
        ScoreAccumulator().update([0.0, 1.0], [0, 1], [1, 1, 0])
    with pytest.raises(ValueError, match=r"1 of 3 scores are NaN"):
        metrics.auc([0.0, np.nan, 1.0], [0, 1, 1])
    assert metrics.auc([-np.inf, np.inf, np.inf], [0, 1, 0]) == 0.75
    assert metrics.auc([], []) is None


@given(scored_labels(), st.integers(1, 7), st.sampled_from([np.float32, jnp.float32, jnp.bfloat16]))
def test_accumulated_batches_equal_the_whole_and_padding_is_left_out(data, batch, dtype):
    logits, labels = data
    logits = np.asarray(jnp.asarray(logits).astype(dtype), np.float32)
    accumulator = ScoreAccumulator()
    for start in range(0, len(logits), batch):
        part = slice(start, start + batch)
        padding = batch - len(logits[part])
        padded = np.concatenate([logits[part], np.full(padding, np.nan)])  # padding may hold anything
        accumulator.update(
            jnp.asarray(padded, dtype),
            jnp.asarray(np.pad(labels[part].astype(np.float32), (0, padding))),
            jnp.asarray(np.pad(np.ones(len(logits[part]), np.float32), (0, padding))),
        )
    scores = accumulator.scores()
    np.testing.assert_array_equal(scores.logits, logits)
    np.testing.assert_array_equal(scores.labels, labels)
    assert scores.logits.dtype == np.float32


def test_accumulator_keeps_no_view_of_a_reused_buffer():
    buffer, accumulator = np.zeros(2, np.float32), ScoreAccumulator()
    accumulator.update(buffer, [0, 1])
    buffer[:] = 5
    np.testing.assert_array_equal(accumulator.scores().logits, [0, 0])


@given(scored_labels(max_size=200), st.sampled_from([1, 2, 64, 8192]))
def test_running_auc_is_within_its_bound(data, bins):
    logits, labels = data
    running = RunningAuc.empty(bins=bins, decay=1.0)
    for half in (slice(0, None, 2), slice(1, None, 2)):
        count = len(labels[half])
        padding = (0, 100 - count)  # one program for batches of every size
        weights = np.pad(np.ones(count), padding)
        running = running.updated(np.pad(logits[half], padding), np.pad(labels[half], padding), weights)
    exact = metrics.auc(logits, labels)
    if exact is None:
        assert running.value() is None
        assert running.error_bound() is None
        return
    value, bound = running.value(), running.error_bound()
    assert value is not None
    assert bound is not None
    assert abs(value - exact) <= bound + 1e-12
    assert 0 <= bound <= 0.5


def test_running_auc_on_normal_logits_is_as_close_as_documented():
    random = np.random.default_rng(3)
    labels = random.random(20_000) < 0.25
    logits = random.normal(size=20_000) + labels
    running = RunningAuc.empty(decay=1.0).updated(logits, labels, np.ones(20_000))
    assert running.error_bound() < 0.0006
    assert running.value() == pytest.approx(metrics.auc(logits, labels), abs=1e-4)


def test_running_auc_forgets_by_its_decay():
    running, weighted = RunningAuc.empty(decay=0.5), []
    random = np.random.default_rng(0)
    for age in reversed(range(4)):
        labels, logits = np.arange(64) % 2 == 0, np.round(random.normal(size=64), 1)
        running = running.updated(logits, labels, np.ones(64))
        weighted.append((logits, labels, np.full(64, 0.5**age)))
    logits, labels, weights = (np.concatenate(parts) for parts in zip(*weighted, strict=True))
    expected = sklearn.metrics.roc_auc_score(labels, logits, sample_weight=weights)
    assert running.value() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("devices", [None, 2])
def test_running_auc_goes_on_bit_identically_after_a_restore(devices):
    random = np.random.default_rng(1)
    update = jax.jit(RunningAuc.updated if devices is None else jax.vmap(RunningAuc.updated))
    shape = (32,) if devices is None else (devices, 32)
    batches = [
        (random.normal(size=shape).astype(np.float32), random.random(shape) < 0.3, np.ones(shape, np.float32))
        for _ in range(50)
    ]
    through, stored = RunningAuc.empty(bins=100, devices=devices), None
    for i, batch in enumerate(batches):
        through = update(through, *batch)
        stored = through.state() if i == 24 else stored
    assert stored is not None
    resumed = RunningAuc.empty(bins=100, devices=devices).restored(stored)
    for batch in batches[25:]:
        resumed = update(resumed, *batch)
    np.testing.assert_array_equal(resumed.state()["histograms"], through.state()["histograms"])
    assert resumed.value() == through.value()
    with pytest.raises(ValueError, match=r"2, 100\), but this one is float32 of \(1, 2, 8192\)"):
        RunningAuc.empty().restored(stored)
    other = RunningAuc.empty(bins=100, devices=3).restored(stored)  # on another number of devices
    assert other.value() == pytest.approx(
        RunningAuc.empty(bins=100, devices=devices).restored(stored).value(), abs=1e-7
    )


def test_running_auc_of_an_earlier_version_goes_on():
    histograms = np.array([[3.0, 1.5, 0.0], [0.0, 0.25, 2.0]])
    running = RunningAuc.empty(bins=3).restored({"histograms": histograms.view(np.uint32)})
    np.testing.assert_array_equal(running.state()["histograms"][0], histograms.astype(np.float32))


def test_running_auc_leaves_padding_and_nan_out():
    running = RunningAuc.empty()
    assert running.value() is None
    running = running.updated([5.0, 1.0, np.nan], [1, 0, 0], [1, 1, 0])
    assert running.value() == 1.0
    np.testing.assert_array_equal(running.updated([np.nan], [1], [1]).histograms.sum(), 2 * np.float32(0.99))
    running = running.updated([np.inf, -np.inf, 1e30], [1, 0, 1], [1, 1, 1])
    assert running.value() == pytest.approx(1.0, abs=1e-12)
    with pytest.raises(ValueError, match=r"decay=0"):
        RunningAuc.empty(decay=0)
