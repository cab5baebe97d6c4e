"""Benchmarks of n-gram memories: what they compare with is right, and they run whole on tiny models."""

import json
import sys
from collections import Counter

import jax
import numpy as np
import pytest

from benchmarks import ngram_memory, ngram_quality
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
def test_quality_is_measured_of_every_model(run):
    lines = run("--part", "quality")
    assert {line["case"] for line in lines} == {"sizes", "5 steps of 512 bytes", "10 steps of 512 bytes"}
    for name in ("transformer", "with a memory", "wider", "counts"):
        found = [line["value"] for line in lines if line["metric"] == f"bits a byte, {name}"]
        assert len(found) == 2
        assert 2 < found[1] < found[0] < 8.5
