"""Slices of a split: sums by block equal those of all examples at once, computed plainly."""

import dataclasses

import numpy as np
import pytest

from jrec import metrics, regression
from jrec.app.report.judgement import is_off
from jrec.app.report.slices import add_block, slicers
from jrec.data.schema import CategoricalFeature, LabelNumbers, Schema, Table

TABLES = (Table(name="kind", rows=4), Table(name="item", rows=2500, oov_row=7), Table(name="key", rows=9, growing=True))


@pytest.fixture(scope="module")
def schema():
    one_hot = [CategoricalFeature(name=t.name, table=t.name, fixed_length=True) for t in TABLES]
    several = CategoricalFeature(name="items", table="item", max_length=3)
    return Schema(name="s", block_size=100, dense=(), categorical=(*one_hot, several), tables=TABLES, splits={},
                  provenance={})  # fmt: skip


@pytest.fixture(scope="module")
def examples():
    random = np.random.default_rng(0)
    size = 5000
    columns = {"kind": random.integers(0, 3, size).astype(np.uint8),
               "item": np.minimum(random.zipf(1.3, size), 2500).astype(np.uint16) - 1}  # fmt: skip
    logits = random.normal(size=size).astype(np.float32) - 1
    return columns, logits, random.random(size) < 0.25


@pytest.mark.parametrize("weighted", [False, True])
def test_slices_of_blocks_are_those_of_all_examples(schema, examples, weighted):
    columns, logits, labels = examples
    weights = np.random.default_rng(1).exponential(size=5000).astype(np.float32) if weighted else None
    some = slicers(schema)
    for begin in range(0, 5000, 300):
        span = slice(begin, begin + 300)
        block = metrics.Scores(
            logits=logits[span], labels=labels[span], weights=None if weights is None else weights[span]
        )
        add_block(some, {name: column[span] for name, column in columns.items()}, block)
    assert [one.feature for one in some] == ["kind", "item"]  # one id an example, of tables that do not grow
    found = [entry for one in some for entry in one.describe({0: "home"})]
    items = columns["item"].astype(int)
    bands = {"rows 0 to 9 by frequency": (items < 10) & (items != 7),
             "rows 10 to 99 by frequency": (items >= 10) & (items < 100),
             "rows 100 to 999 by frequency": (items >= 100) & (items < 1000),
             "rows 1,000 to 2,499 by frequency": items >= 1000, "values not in training": items == 7}  # fmt: skip
    kinds = {"home": columns["kind"] == 0, "row 1": columns["kind"] == 1, "row 2": columns["kind"] == 2}
    assert [entry["slice"] for entry in found] == [*kinds, *bands]  # none of row 3, which no example has
    for entry, chosen in zip(found, [*kinds.values(), *bands.values()], strict=True):
        whole = metrics.evaluate(metrics.Scores(logits=logits, labels=labels, weights=weights).cut(chosen))
        assert entry["examples"] == whole.examples
        for name in ("base_rate", "mean_prediction", "calibration", "log_loss", "normalized_entropy"):
            assert entry[name] == pytest.approx(getattr(whole, name), rel=1e-9)
        p, w = (
            metrics.sigmoid(logits[chosen]),
            np.ones(chosen.sum()) if weights is None else weights[chosen].astype(float),
        )
        expected = np.sum(w * (p - labels[chosen])) / np.sqrt(np.sum(w**2 * p * (1 - p)))
        assert entry["deviations"] == pytest.approx(expected)


def test_a_slice_of_one_label_has_no_entropy(schema):
    some = slicers(schema)[:1]
    add_block(
        some,
        {"kind": np.array([1, 1])},
        metrics.Scores(logits=np.array([-3, -4], np.float32), labels=np.zeros(2, bool)),
    )
    (entry,) = some[0].describe({})
    assert entry["calibration"] is None
    assert entry["normalized_entropy"] is None


@pytest.mark.parametrize("weighted", [False, True])
def test_slices_of_numbers(schema, examples, weighted):
    columns, logits, _ = examples
    random = np.random.default_rng(2)
    labels = (2 * logits + random.normal(size=5000)).astype(np.float32)
    weights = random.exponential(size=5000).astype(np.float32) if weighted else None
    scores = regression.NumberScores(predictions=logits, labels=labels, weights=weights)
    some = slicers(dataclasses.replace(schema, numbers=LabelNumbers(least=-9, mean=0, deviation=1)))[:1]
    for begin in range(0, 5000, 300):
        span = slice(begin, begin + 300)
        add_block(some, {name: column[span] for name, column in columns.items()}, scores.cut(span))
    for row, entry in enumerate(some[0].describe({})):
        chosen = columns["kind"] == row
        whole = regression.evaluate_numbers(scores.cut(chosen))
        for name in ("examples", "mean_label", "mean_prediction", "rmse"):
            assert entry[name] == pytest.approx(getattr(whole, name), rel=1e-6)
        error = logits[chosen].astype(float) - labels[chosen]
        w = np.ones(chosen.sum()) if weights is None else weights[chosen].astype(float)
        assert entry["deviations"] == pytest.approx(np.sum(w * error) / np.sqrt(np.sum((w * error) ** 2)), rel=1e-6)


def test_a_slice_is_off_by_its_error():
    """A mean of numbers may be 0, so that no share of it says how far off a prediction is."""
    one = {"mean_label": 0.0, "rmse": 2.0, "deviations": 9.0}
    assert is_off({**one, "mean_prediction": 0.3})
    assert not is_off({**one, "mean_prediction": 0.1})
    assert not is_off({**one, "mean_prediction": 0.3, "deviations": 3.0})
