"""The program of docs/targets.md, and its formulas and figures."""

import pathlib
import re

import distribute_cases
import jax.numpy as jnp
import numpy as np
import pytest
from distribute_cases import layout_of, modules

import jrec
from jrec.metrics import ScoreAccumulator
from jrec.nn import smoothed_labels
from jrec.regression import evaluate_numbers

PAGE = pathlib.Path(__file__).resolve().parents[1] / "docs" / "targets.md"


def columns(step, size=16):
    """Stars, and how much each line is trusted."""
    item, rng = distribute_cases.columns(step, size), np.random.default_rng(step)
    rating = (3.5 + item["price"] + (item["item"] % 2)).astype(np.float32)
    del item["label"]
    return {**item, "rating": rating, "trust": rng.choice([0.0, 1.0, 2.0], size).astype(np.float32)}


class Run:
    """A run whose model has dense features, which the page leaves out."""

    def __init__(self, run):
        self.run, self.compile = run, run.compile

    def feed(self, batches, **options):
        return self.run.feed(batches, dense=distribute_cases.DENSE, batch_size=16, **options)

    def evaluate(self, batches, **options):
        return self.run.evaluate(batches, dense=distribute_cases.DENSE, **options)


def test_the_program_trains_and_prints_an_error(capsys):
    (snippet,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    test = [columns(step) for step in range(50, 54)]
    with jrec.distribute(*modules(layout_of())) as run:
        names = {"jrec": jrec, "run": Run(run), "batches": map(columns, range(40)), "test": test}
        exec(compile(snippet, str(PAGE), "exec"), names)
        outputs = [run.predict(part, dense=distribute_cases.DENSE) for part in test]
        collected = ScoreAccumulator(numbers=names["numbers"])
        for part, some in zip(test, outputs, strict=True):
            collected.update(some, part["rating"], part["trust"])
    printed = float(capsys.readouterr().out)
    assert printed == pytest.approx(evaluate_numbers(collected.number_scores()).rmse, rel=1e-5)
    assert printed < 1.1  # the labels' deviation


def test_what_the_page_says_of_smoothing():
    text = PAGE.read_text()
    assert "trains a click as 0.95 and no click as 0.05" in text
    assert smoothed_labels(jnp.array([1.0, 0.0]), 0.1).tolist() == pytest.approx([0.95, 0.05])
