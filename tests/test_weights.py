"""Weights of examples: a weight of 2 is an example twice, one of 0 is a line left out, in steps and in metrics."""

import distribute_cases
import growing_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.metrics
from checkpoint_state import latest
from distribute_cases import DENSE, layout_of, mesh_of, tables_apart, three_tiers
from grids import some_of

import jrec
from jrec import metrics
from jrec.app import calibration
from jrec.app.processes.mesh_processes import shared_scores
from jrec.app.report.groups import describe_groups, score_groups
from jrec.app.report.running_auc import RunningAuc
from jrec.data.packing import pack_batch
from jrec.data.schema import DatasetError
from jrec.metrics import ScoreAccumulator, Scores, evaluate
from jrec.nn import binary_cross_entropy
from jrec.run.evaluation import collected

EACH = [0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2]  # in all as many as there are examples
STEPS, SIZE = 3, 16


def repeated(columns, weights):
    """The same examples, each as often as it weighs."""
    return {
        name: [value for value, count in zip(column, weights, strict=True) for _ in range(count)]
        if isinstance(column, list)
        else np.repeat(column, weights, axis=0)
        for name, column in columns.items()
    }


def placed(name):
    """A run in a placement, and the columns of its batches."""
    if name == "growing":
        layout = growing_cases.layout_of()
        options = {"growing": growing_cases.growing(), "mesh": mesh_of(4), "plan": growing_cases.three_tiers(4, layout)}
        return jrec.distribute(*growing_cases.modules(layout), **options), growing_cases.columns
    options, tiers = {}, [("user", "host")] if name == "host" else []
    if name.startswith("mesh") or name == "tables apart":
        options["mesh"] = mesh_of(4)
    if name == "mesh, host rows":
        options["plan"] = three_tiers(4, layout_of())
    elif name == "tables apart":
        options["plan"] = tables_apart(layout_of())
    return jrec.distribute(*distribute_cases.modules(layout_of(tiers=tiers)), **options), distribute_cases.columns


def trained(name, folder, *, weighted, scale=1.0, steps=1, **options):
    """Losses of some steps, and what a checkpoint after them has: dense arrays, rows and slots."""
    run, columns = placed(name)
    rng, items = np.random.default_rng(7), []
    for number in range(STEPS):
        weights, item = rng.permutation(EACH), columns(number, len(EACH))
        items.append({**item, "w": scale * weights.astype(np.float32)} if weighted else repeated(item, weights))
    with run:
        step = run.compile(**options)
        feed = run.feed(items, dense=DENSE, batch_size=SIZE, steps=steps, **({"weight": "w"} if weighted else {}))
        losses = [np.atleast_1d(step(batch)[0]) for batch in feed]
        run.save(folder / "checkpoints")
    saved = latest(folder)
    arrays = dict(saved.arrays())
    for table, record in saved.manifest.tables.items():
        rows = np.arange(record.shape.rows)
        arrays |= {f"{table}/{n}": saved.table(table).read(n, rows) for n in ("values", *record.shape.slots)}
    return np.concatenate(losses), arrays


def check_same(one, other):
    np.testing.assert_allclose(one[0], other[0], rtol=2e-5)
    assert one[1].keys() == other[1].keys()
    for name, array in one[1].items():
        np.testing.assert_allclose(array, other[1][name], err_msg=name, rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize(
    "placement", some_of(("device", "host", "mesh", "mesh, host rows", "tables apart"), "device", "mesh, host rows")
)
def test_a_step_by_weights_is_that_of_repeated_examples(placement, tmp_path):
    weighted, expanded = (trained(placement, tmp_path / str(w), weighted=w) for w in (True, False))
    check_same(weighted, expanded)
    # A mean does not depend on the weights' scale, also where all of a batch sum to less than 1.
    check_same(trained(placement, tmp_path / "scaled", weighted=True, scale=0.01), expanded)


def test_growing_tables_give_rows_to_lines_of_weight_0_too(tmp_path):
    """So that rows' numbers differ, but not the losses."""
    weighted, expanded = (trained("growing", tmp_path / str(w), weighted=w) for w in (True, False))
    np.testing.assert_allclose(weighted[0], expanded[0], rtol=0.05)


@pytest.mark.parametrize(("placement", "options"), [
    ("device", {"micro_batches": 4}), ("mesh", {"micro_batches": 2}), ("device", {"steps": STEPS}),
    ("mesh", {"steps": STEPS}),
])  # fmt: skip
def test_slices_and_steps_in_one_dispatch_count_weights(placement, options, tmp_path):
    check_same(
        trained(placement, tmp_path / "w", weighted=True, **options), trained(placement, tmp_path, weighted=False)
    )


def drawn(size=200, seed=0):
    rng = np.random.default_rng(seed)
    logits = rng.choice([-3.0, -0.5, 0.0, 0.5, 2.0], size).astype(np.float32) + rng.normal(size=size).round(1)
    return logits.astype(np.float32), rng.random(size) < 0.3, rng.integers(0, 4, size)


def test_the_loss_is_a_mean_by_weights():
    logits, labels, weights = drawn(20)
    weights = weights * 0.01
    batch = jrec.Batch(
        dense=jnp.zeros((20, 0)),
        labels=jnp.asarray(labels, jnp.float32),
        mask=jnp.asarray(weights, jnp.float32),
        bags={},
    )
    value, gradient = jax.value_and_grad(binary_cross_entropy)(jnp.asarray(logits), batch)
    z = logits.astype(np.float64)
    assert float(value) == pytest.approx(np.average(np.logaddexp(0, z) - labels * z, weights=weights), rel=1e-6)
    expected = weights * (1 / (1 + np.exp(-z)) - labels) / weights.sum()
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-9)


def test_metrics_are_scikit_learns():
    logits, labels, _ = drawn()
    weights = np.random.default_rng(1).exponential(size=200)
    p = metrics.sigmoid(logits)
    found = evaluate(Scores(logits=logits, labels=labels, weights=weights.astype(np.float32)))
    weights = weights.astype(np.float32).astype(np.float64)
    for name, expected in {
        "auc": sklearn.metrics.roc_auc_score(labels, logits, sample_weight=weights),
        "average_precision": sklearn.metrics.average_precision_score(labels, logits, sample_weight=weights),
        "log_loss": sklearn.metrics.log_loss(labels, p, sample_weight=weights),
        "accuracy": sklearn.metrics.accuracy_score(labels, logits >= 0, sample_weight=weights),
        "mean_prediction": np.sum(p * weights) / np.sum(weights),
        "base_rate": np.sum(labels * weights) / np.sum(weights),
        "weight": np.sum(weights),
    }.items():
        assert getattr(found, name) == pytest.approx(expected, rel=1e-9), name
    assert (found.examples, found.positives) == (200, labels.sum())
    assert metrics.auc(logits, labels, weights=weights) == found.auc
    assert metrics.average_precision(logits, labels, weights=weights) == found.average_precision
    assert metrics.normalized_entropy(logits, labels, weights=weights) == pytest.approx(found.normalized_entropy)


def weighted_and_repeated():
    logits, labels, weights = drawn()
    accumulated = ScoreAccumulator()
    for begin in range(0, 200, 64):
        span = slice(begin, begin + 64)
        accumulated.update(logits[span], labels[span], weights[span])
    return accumulated.scores(), Scores(logits=np.repeat(logits, weights), labels=np.repeat(labels, weights))


def test_every_metric_is_that_of_repeated_examples():
    weighted, expanded = weighted_and_repeated()
    assert weighted.weights is not None
    assert (weighted.weights > 0).all()  # lines of weight 0 are left out
    found, expected = evaluate(weighted).to_dict(), evaluate(expanded).to_dict()
    for name in ("examples", "positives", "weight"):
        found.pop(name), expected.pop(name, None)
    assert found == pytest.approx(expected, rel=1e-9)
    for one, other in zip(
        (
            calibration.fit_calibration(weighted, bias=0.1),
            calibration.refinement(weighted),
            calibration.bias_of(weighted),
        ),
        (
            calibration.fit_calibration(expanded, bias=0.1),
            calibration.refinement(expanded),
            calibration.bias_of(expanded),
        ),
        strict=True,
    ):
        assert one == pytest.approx(other, rel=1e-6)
    assert calibration.calibrated(weighted, 2.0, 0.5).weights is weighted.weights
    shared = shared_scores(weighted)
    assert isinstance(shared, Scores)
    assert shared.weights is not None
    assert shared.weights.tolist() == weighted.weights.tolist()


def test_groups_are_those_of_repeated_examples():
    weighted, expanded = weighted_and_repeated()
    assert weighted.weights is not None
    groups = np.random.default_rng(2).integers(0, 9, weighted.labels.size)
    again = np.repeat(groups, weighted.weights.astype(int))
    one, other = score_groups(weighted, groups), score_groups(expanded, again)
    for name in ("groups", "level", "weights", "ranking", "error", "defined"):
        np.testing.assert_allclose(getattr(one, name), getattr(other, name), rtol=1e-12, err_msg=name)
    assert one.mean == pytest.approx(other.mean)
    described = [
        describe_groups(s, g, lambda rows: [str(r) for r in rows]) for s, g in ((weighted, groups), (expanded, again))
    ]
    for name in ("gauc", "mean_auc", "mean_log_loss", "coverage", "histogram"):
        assert described[0][name] == pytest.approx(described[1][name]), name


def test_the_running_auc_counts_weights():
    logits, labels, weights = drawn()
    found = RunningAuc.empty(decay=1.0).updated(logits, labels, weights)
    assert found.value() == pytest.approx(metrics.auc(logits, labels, weights=weights), abs=found.error_bound())


def test_weights_of_1_are_none():
    accumulated = ScoreAccumulator()
    accumulated.update([0.5, 1.0, 2.0], [0, 1, 1], [1, 1, 0])
    assert accumulated.scores().weights is None


def test_bad_weights():
    for bad in (-1.0, np.nan, np.inf):
        with pytest.raises(ValueError, match=r"weight 1 is (-1.0|nan|inf); weights must be finite and at least 0"):
            metrics.auc([0.0, 1.0], [0, 1], weights=[1.0, bad])
    with pytest.raises(ValueError, match=r"scores' shape \(2,\), but are \(3,\)"):
        metrics.log_loss([0.0, 1.0], [0, 1], weights=[1.0, 1.0, 1.0])
    item = distribute_cases.columns(0, 4)
    layout = layout_of()
    for bad, message in (
        (-0.5, r"weight 'w' is -0.5 in example 2; a weight is a finite"),
        (np.nan, r"'w' is nan in example 2"),
    ):
        with pytest.raises(DatasetError, match=message):
            pack_batch(layout, {**item, "w": np.array([1, 0, bad, 1], np.float32)}, dense=DENSE, weight="w")
    with pytest.raises(ValueError, match=r"weight 'w' must be \(examples,\) numbers, but is \[4, 2\]"):
        pack_batch(layout, {**item, "w": np.ones((4, 2), np.float32)}, dense=DENSE, weight="w")


def test_run_evaluate_takes_weights():
    weights = np.array(EACH[:13])
    item = distribute_cases.columns(3, 13)
    with jrec.distribute(*distribute_cases.modules(layout_of())) as run:
        found = run.evaluate([{**item, "w": weights.astype(np.float32)}], dense=DENSE, weight="w", batch_size=5)
        expected = run.evaluate([repeated(item, weights)], dense=DENSE)
    assert isinstance(found, metrics.Evaluation)
    assert isinstance(expected, metrics.Evaluation)
    assert (found.examples, found.weight) == (9, 13)
    for name in ("auc", "log_loss", "calibration_error", "base_rate", "accuracy"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-6)


def test_scores_of_several_labels_have_the_weights_of_their_examples():
    logits = {"a": np.array([0.1, 0.2, 0.3]), "b": np.array([1.0, 2.0, 3.0])}
    batch = jrec.Batch(
        dense=jnp.zeros((3, 0)), labels=jnp.array([1.0, -1.0, 0.0]), mask=jnp.array([2.0, 1.0, 0.5]), bags={},
        extras={"b": jnp.array([1.0, 0.0, -1.0])},
    )  # fmt: skip
    scores = collected([(logits, batch)], tasks=("a", "b"))
    assert scores.tasks["a"].weights is not None
    assert scores.tasks["a"].weights.tolist() == [2.0, 0.5]
    assert scores.tasks["b"].weights is not None
    assert scores.tasks["b"].weights.tolist() == [2.0, 1.0]
