"""Benchmarks of n-gram memories: what they compare with is right, and they run whole on tiny models."""

import json
import sys
from collections import Counter

import jax
import numpy as np
import pytest

from benchmarks import ngram_memory, ngram_quality, ngram_resume
from benchmarks.ngram_model import Shape, pieces, python_sources


def witten_bell(seen, context, byte, orders):
    """The probability of a byte after a context, by dictionaries."""
    probability = 1 / 256
    for size in range(min(orders, len(context) + 1)):
        counts = Counter()
        for piece in seen:
            for place in range(size, len(piece)):
                if size == 0 or list(piece[place - size : place]) == list(context[len(context) - size :]):
                    counts[int(piece[place])] += 1
        if counts:
            probability = (counts[byte] + len(counts) * probability) / (counts.total() + len(counts))
    return probability


def test_counts_are_interpolated_after_witten_and_bell():
    rng = np.random.default_rng(0)
    seen, held_out = (rng.integers(0, 4, shape).astype(np.uint8) for shape in ((6, 12), (3, 9)))
    wanted = [
        np.mean([
            -np.log2(witten_bell(seen, piece[:place], int(piece[place]), orders))
            for piece in held_out
            for place in range(1, 9)
        ])
        for orders in (1, 2, 3, 4)
    ]  # fmt: skip
    np.testing.assert_allclose(ngram_quality.counted_bits(seen, held_out, 4), wanted, rtol=1e-12)


def test_counts_give_a_distribution():
    rng = np.random.default_rng(0)
    seen, total = rng.integers(0, 256, (20, 65)).astype(np.uint8), 0
    held_out = np.concatenate([seen[:2, :6], rng.integers(0, 256, (2, 6)).astype(np.uint8)])
    for byte in range(256):
        below, following = np.full((4, 5), 1 / 256), np.full((4, 5), byte)
        for context in range(4):
            below = ngram_quality.interpolated(seen, held_out, following, context, below)
        total = total + below
    np.testing.assert_allclose(total, 1, rtol=1e-12)


def test_the_wider_model_computes_as_much_as_the_memory():
    plain = ngram_quality.operations(ngram_quality.SHAPE, None)
    memory = ngram_quality.operations(ngram_quality.SHAPE, ngram_quality.NGRAMS)
    wider = ngram_quality.operations(ngram_quality.WIDER, None)
    assert plain < 0.95 * memory
    assert abs(wider / memory - 1) < 0.01


def test_files_of_the_text_are_in_one_split():
    train, valid = python_sources()
    assert len(train) > 5 * len(valid) > 1_000_000
    shape = Shape(length=8, batch=3)
    (piece,) = pieces(valid, shape, 1, 0)
    assert piece.shape == (3, 9)
    assert all(row.tobytes() in valid.tobytes() for row in piece)


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    def run(*arguments):
        platforms = jax.config.jax_platforms
        monkeypatch.setattr(sys, "argv", ["ngram_memory", "--quick", "--out", str(tmp_path / "out.jsonl"), *arguments])
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            ngram_memory.main()
        jax.config.update("jax_platforms", platforms)
        capsys.readouterr()
        return [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]

    return run


@pytest.mark.slow
def test_a_table_is_killed_resumed_and_beside_an_exact_one(run):
    """The benchmark itself refuses other bits, and losses that differ."""
    lines = {line["metric"]: line["value"] for line in run("--part", "resume")}
    assert lines["table, rows and slots"] == 20_000 * (32 + 1) * 4
    assert 0 < lines["rows made"] <= 20_000
    assert lines["disk, rows and slots"] >= lines["table, rows and slots"]
    assert lines["disk, checkpoint"] > lines["rows made"] * 33 * 4
    assert lines["same bits after a kill, from step"] == 20
    assert lines["greatest relative difference of a loss from nnx.Embed"] < 1e-5
    assert min(lines[name] for name in ("anonymous memory, host", "restore", "open", "step, host, median")) > 0


def test_the_exact_side_steps_rows_as_jrec_does():
    rng = np.random.default_rng(0)
    rows, rule = rng.normal(size=(7, 4)).astype(np.float32), ngram_resume.rowwise_adagrad(0.1)
    state, sums, wanted = rule.init(rows), np.zeros(7), rows.astype(np.float64)
    for _ in range(3):
        gradients = rng.normal(size=(7, 4)).astype(np.float32)
        gradients[2:5] = 0
        steps, state = rule.update(gradients, state)
        rows = rows + np.asarray(steps)
        sums += (gradients.astype(np.float64) ** 2).mean(axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            wanted -= np.where(sums[:, None] > 0, 0.1 * gradients / np.sqrt(sums + 1e-7)[:, None], 0)
    np.testing.assert_allclose(rows, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_quality_is_measured_of_every_model(run):
    lines = run("--part", "quality")
    assert {line["case"] for line in lines} == {"sizes", "5 steps of 512 bytes", "10 steps of 512 bytes"}
    for name in ("transformer", "with a memory", "wider", "counts"):
        found = [line["value"] for line in lines if line["metric"] == f"bits a byte, {name}"]
        assert len(found) == 2
        assert 2 < found[1] < found[0] < 8.5
