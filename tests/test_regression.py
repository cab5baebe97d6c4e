"""Labels that are numbers: losses against NumPy, metrics against scikit-learn, and a run by the library."""

import distribute_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.metrics
from distribute_cases import DENSE, layout_of, mesh_of, three_tiers

import jrec
from jrec import regression
from jrec.batch import Batch
from jrec.data.schema import DatasetError
from jrec.errors import DivergedError
from jrec.nn import huber, of_numbers, poisson, squared_error
from jrec.regression import Numbers, NumberScores, evaluate_numbers, residual_bins

OUTPUTS, LABELS = np.array([0.3, -1.0, 2.0, 0.5, 9.0]), np.array([1.0, 3.5, 0.0, 0.5, 7.0])
WEIGHTS = np.array([2.0, 0.5, 1.0, 1.0, 0.0])


def batch_of(labels=LABELS, mask=WEIGHTS):
    return Batch(
        dense=jnp.zeros((len(labels), 0)), labels=jnp.asarray(labels, jnp.float32),
        mask=jnp.asarray(mask, jnp.float32), bags={},
    )  # fmt: skip


@pytest.mark.parametrize(("loss", "value", "slope"), [
    (squared_error, lambda z, y: (z - y) ** 2, lambda z, y: 2 * (z - y)),
    (huber(delta=1.5), lambda z, y: np.where(np.abs(z - y) <= 1.5, (z - y) ** 2 / 2, 1.5 * (np.abs(z - y) - 0.75)),
     lambda z, y: np.clip(z - y, -1.5, 1.5)),
    (poisson, lambda z, y: np.exp(z) - y * z, lambda z, y: np.exp(z) - y),
])  # fmt: skip
def test_losses_and_gradients(loss, value, slope):
    z = jnp.asarray(OUTPUTS, jnp.float32)
    found, gradient = jax.value_and_grad(loss)(z, batch_of())
    assert float(found) == pytest.approx(np.average(value(OUTPUTS, LABELS), weights=WEIGHTS), rel=1e-6)
    np.testing.assert_allclose(gradient, slope(OUTPUTS, LABELS) * WEIGHTS / WEIGHTS.sum(), rtol=1e-5, atol=1e-7)
    members = jnp.stack([z, z], axis=1)
    assert float(loss(members, batch_of())) == pytest.approx(float(found), rel=1e-6)
    numbers = Numbers(location=2.0, scale=4.0)
    shifted = of_numbers(loss, numbers)(z, batch_of(4 * LABELS + 2))
    assert float(shifted) == pytest.approx(float(found), rel=1e-5)
    with pytest.raises(ValueError, match="must be above 0"):
        huber(delta=0.0)


def test_numbers_of_outputs():
    np.testing.assert_allclose(Numbers(location=3.0, scale=2.0).predictions(OUTPUTS), 3 + 2 * OUTPUTS, rtol=1e-6)
    np.testing.assert_allclose(Numbers(link="log", scale=2.0).predictions(OUTPUTS), 2 * np.exp(OUTPUTS), rtol=1e-6)
    assert Numbers().predictions([1.5]).dtype == np.float32
    for wrong in ({"scale": 0.0}, {"location": np.nan}, {"link": "logit"}):
        with pytest.raises(ValueError, match=r"must be 'identity' or 'log'"):
            Numbers(**wrong)


@pytest.mark.parametrize("weighted", [False, True])
def test_metrics_are_scikit_learns(weighted):
    rng = np.random.default_rng(0)
    labels, predictions = rng.poisson(2.0, 300).astype(np.float32), rng.gamma(2.0, 1.0, 300).astype(np.float32)
    weights = rng.exponential(size=300).astype(np.float32) if weighted else None
    found = evaluate_numbers(NumberScores(predictions=predictions, labels=labels, weights=weights))
    w = {"sample_weight": weights}
    p, y = predictions.astype(np.float64), labels.astype(np.float64)
    assert found.rmse == pytest.approx(sklearn.metrics.root_mean_squared_error(y, p, **w))
    assert found.mae == pytest.approx(sklearn.metrics.mean_absolute_error(y, p, **w))
    assert found.r2 == pytest.approx(sklearn.metrics.r2_score(y, p, **w))
    assert found.poisson_deviance == pytest.approx(sklearn.metrics.mean_poisson_deviance(y, p, **w))
    assert found.mean_label == pytest.approx(np.average(y, weights=weights))
    assert found.mean_prediction == pytest.approx(np.average(p, weights=weights))
    assert ("weight" in found.to_dict()) == weighted
    assert "undefined" not in found.to_dict()


def test_weights_are_repeated_examples():
    rng = np.random.default_rng(1)
    labels, predictions = rng.normal(size=200), rng.normal(size=200).round(1)
    weights = rng.integers(1, 4, 200)
    one = NumberScores(predictions=predictions, labels=labels, weights=weights)
    other = NumberScores(predictions=np.repeat(predictions, weights), labels=np.repeat(labels, weights))
    found, expected = evaluate_numbers(one).to_dict(), evaluate_numbers(other).to_dict()
    for key in ("examples", "weight", "undefined"):
        found.pop(key), expected.pop(key, None)
    assert found == pytest.approx(expected)
    bins_of = residual_bins(one).to_dict()
    assert sum(bins_of.pop("counts")) == 200
    for name, bins in bins_of.items():
        assert bins == pytest.approx(residual_bins(other).to_dict()[name]), name


def test_residual_bins():
    p, y = np.array([1.0, 1.0, 2.0, 2.0]), np.array([0.0, 2.0, 5.0, 5.0])
    bins = residual_bins(NumberScores(predictions=p, labels=y), bins=2)
    assert bins.to_dict() == {
        "counts": [2.0, 2.0], "weights": [2.0, 2.0], "mean_predicted": [1.0, 2.0], "mean_label": [1.0, 5.0],
        "deviation": [1.0, 0.0],
    }  # fmt: skip


def test_undefined_metrics_and_bad_scores():
    one = evaluate_numbers(NumberScores(predictions=np.array([1.0, 0.0]), labels=np.array([2.0, 2.0])))
    assert (one.r2, one.xauc, one.poisson_deviance) == (None, None, None)
    alike = dict.fromkeys(("r2", "xauc"), "all labels are 2")
    assert one.undefined == {**alike, "poisson_deviance": "a prediction is 0, and rates are above 0"}
    below = evaluate_numbers(NumberScores(predictions=np.array([1.0, 3.0]), labels=np.array([-2.0, 2.0])))
    assert below.undefined == {"poisson_deviance": "a label is -2, and counts are at least 0"}
    with pytest.raises(DatasetError, match="no examples"):
        evaluate_numbers(NumberScores(predictions=np.zeros(0), labels=np.zeros(0)))
    with pytest.raises(DivergedError, match="1 of 2 predictions are NaN or infinite"):
        evaluate_numbers(NumberScores(predictions=np.array([1.0, np.inf]), labels=np.zeros(2)))
    with pytest.raises(ValueError, match=r"one shape \(n,\), but are \(2,\) and \(3,\)"):
        regression.rmse(np.zeros(2), np.zeros(3))
    with pytest.raises(ValueError, match="labels of at least 0"):
        regression.mean_poisson_deviance([1.0], [-1.0])


@pytest.mark.parametrize("place", ["device", "three tiers"])
def test_a_run_learns_numbers(place):
    numbers, layout = Numbers(location=100.0, scale=30.0), layout_of()
    options = {} if place == "device" else {"mesh": mesh_of(4), "plan": three_tiers(4, layout)}

    def columns(step, size=32):
        item = distribute_cases.columns(step, size)
        return {**item, "label": (100 + 30 * item["price"] + 20 * (item["item"] % 2)).astype(np.float32)}

    with jrec.distribute(*distribute_cases.modules(layout), **options) as run:
        test = [columns(step, 40) for step in range(100, 103)]
        before = run.evaluate(test, dense=DENSE, numbers=numbers)
        step = run.compile(loss=of_numbers(squared_error, numbers))
        for batch in run.feed(map(columns, range(60)), dense=DENSE, batch_size=32):
            step(batch)
        after = run.evaluate(test, dense=DENSE, numbers=numbers)
        assert isinstance(before, regression.NumberEvaluation)
        assert isinstance(after, regression.NumberEvaluation)
        assert after.rmse < before.rmse / 2
        outputs = np.concatenate([run.predict(part, dense=DENSE) for part in test])
        labels = np.concatenate([part["label"] for part in test])
        expected = evaluate_numbers(NumberScores(predictions=numbers.predictions(outputs), labels=labels))
        assert after.to_dict() == pytest.approx(expected.to_dict(), rel=1e-5)
