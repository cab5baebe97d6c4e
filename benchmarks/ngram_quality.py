"""Bits a byte of a transformer, of one with an n-gram memory, of a wider one that computes as much, and of counts.

`python -m benchmarks.ngram_memory --part quality` runs it. The text is Python's library, split by file. The models see
the same pieces in the same order; the counts are those of these pieces, interpolated after Witten and Bell, of the
order that is best on the valid pieces.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jrec
from benchmarks import harness
from benchmarks.ngram_model import Dense, LanguageModel, Shape, columns_of, mean_loss, pieces, python_sources
from jrec.nn import NGramConfig

SHAPE = Shape()
NGRAMS = NGramConfig(rows=400_000, dim=16, sizes=(2, 3, 4), heads=2)
WIDER = Shape(hidden=304)
"""The memory's keys and values are 2 x 96 x 64 products a byte; so are 48 more hidden elements of two layers."""
STEPS, VALID_BATCHES, ORDERS = (200, 2_000), 40, 6


def measure(report: harness.Report) -> None:
    """Adds a line for each model and number of steps."""
    steps, valid_batches, shape, wider = STEPS, VALID_BATCHES, SHAPE, WIDER
    if report.quick:
        steps, valid_batches = (5, 10), 2
        shape, wider = (dataclasses.replace(sizes, layers=1, batch=8) for sizes in (SHAPE, WIDER))
    train, valid = python_sources()
    held_out = list(pieces(valid, shape, valid_batches, 1))
    models = {"transformer": (shape, None), "with a memory": (shape, NGRAMS), "wider": (wider, None)}
    for name, (sizes, ngrams) in models.items():
        report.add("sizes", f"operations a byte, {name}", operations(sizes, ngrams), "count")
        report.add("sizes", f"parameters, {name}", parameters(sizes, ngrams), "count")
        report.add("sizes", f"bytes of rows, {name}", 4 * (256 * sizes.width + rows_of(ngrams)), "bytes")
    for number in steps:
        seen = np.concatenate(list(pieces(train, shape, number, 0)))
        by_order = counted_bits(seen, np.concatenate(held_out), ORDERS)
        best = min(range(len(by_order)), key=by_order.__getitem__)
        details = {"order": best + 1, "by order": by_order}
        report.add(case_of(number, shape), "bits a byte, counts", by_order[best], "bits", details=details)
    for name, (sizes, ngrams) in models.items():
        for number, (bits, error) in trained_bits(sizes, ngrams, train, held_out, steps).items():
            details = {"standard error": error}
            report.add(case_of(number, shape), f"bits a byte, {name}", bits, "bits", details=details)


def case_of(steps: int, shape: Shape) -> str:
    """A line's case."""
    return f"{steps:,} steps of {shape.batch * shape.length:,} bytes"


def rows_of(ngrams: NGramConfig | None) -> int:
    """Elements of the memory's table."""
    return 0 if ngrams is None else ngrams.rows * ngrams.dim


def trained_bits(
    shape: Shape, ngrams: NGramConfig | None, train: np.ndarray, held_out: Sequence[np.ndarray], steps: Sequence[int]
) -> dict[int, tuple[float, float]]:
    """Bits a byte of held-out pieces, and their standard error, after each of some numbers of steps."""
    model = LanguageModel(shape, ngrams, rngs=nnx.Rngs(0))
    rows = jrec.ops.RowWiseAdagrad(learning_rate=0.1)
    optimizer, after = jrec.nn.SparseOptimizer(model, dense=optax.adam(2e-3), embedding=rows), {}
    batches = (columns_of(piece, ngrams) for piece in pieces(train, shape, max(steps), 0))
    with jrec.distribute(model, optimizer) as run:
        step = run.compile(loss=lambda logits, batch: mean_loss(logits, batch.extras["next"]))
        for batch in run.feed(batches, label=None, extras=["next"]):
            step(batch)
            if run.steps in steps:
                of_pieces = np.concatenate([bits_of(run, columns_of(piece, ngrams)) for piece in held_out])
                after[run.steps] = float(of_pieces.mean()), float(of_pieces.std() / np.sqrt(len(of_pieces)))
    return after


def bits_of(run: jrec.Run, columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """The mean bits of a byte of each piece."""
    following = columns["next"]
    scores = run.predict({name: values for name, values in columns.items() if name != "next"})
    bits = -np.asarray(jax.nn.log_softmax(scores)) / np.log(2)
    return np.take_along_axis(bits, following[:, :, None], axis=2)[:, :, 0].mean(axis=1)


def operations(shape: Shape, ngrams: NGramConfig | None) -> float:
    """Floating-point operations of the dense part's forward pass for a byte, as XLA counts them."""
    model = Dense(shape, ngrams, rngs=nnx.Rngs(0))
    graph, state = nnx.split(model)
    tokens = jnp.zeros((shape.batch, shape.length, shape.width))
    rows = None if ngrams is None else jnp.zeros((shape.batch, shape.length, ngrams.slots, ngrams.dim))
    compiled = jax.jit(lambda state, tokens, rows: nnx.merge(graph, state)(tokens, rows)).lower(state, tokens, rows)
    return (compiled.compile().cost_analysis() or {})["flops"] / (shape.batch * shape.length)


def parameters(shape: Shape, ngrams: NGramConfig | None) -> int:
    """Elements of the dense part's parameters."""
    state = nnx.state(Dense(shape, ngrams, rngs=nnx.Rngs(0)), nnx.Param)
    return sum(array.size for array in jax.tree.leaves(state))


def counted_bits(seen: np.ndarray, held_out: np.ndarray, orders: int) -> list[float]:
    """Bits a byte by interpolated counts of n-grams, by the longest of them, n = 1, 2, ….

    Args:
      seen: (pieces, length + 1) uint8, which are counted.
      held_out: The same; bytes but the first of each piece are predicted, by those before it in the piece.
      orders: The greatest n.
    """
    following = held_out[:, 1:].astype(np.int64)
    probability, bits = np.full(following.shape, 1 / 256), []
    for context in range(orders):
        probability = interpolated(seen, held_out, following, context, probability)
        bits.append(float(-np.log2(probability).mean()))
    return bits


def interpolated(
    seen: np.ndarray, held_out: np.ndarray, following: np.ndarray, context: int, below: np.ndarray
) -> np.ndarray:
    """Witten and Bell's estimate of what follows ``context`` bytes, by counts and the estimate of shorter ones.

    A context that came n times, with t different bytes behind it, has (n of the byte + t * below) / (n + t).

    Args:
      seen: (pieces, length + 1) uint8.
      held_out: (pieces, length + 1) uint8, whose positions from the second on have a context; shorter contexts, at the
        begin of a piece, keep ``below``.
      following: (pieces, length) int64, the bytes whose probability is asked for.
      context: At most 6 bytes.
      below: (pieces, length), their probability by shorter contexts.
    """
    pairs, times = np.unique(_keys(seen, context + 1), return_counts=True)
    contexts, begins = np.unique(pairs // 256, return_index=True)
    totals, kinds = np.add.reduceat(times, begins), np.diff([*begins, len(pairs)])
    out = below.copy()
    # The first position that has the whole context; without context that of the second byte, as all others.
    first = max(context - 1, 0)
    asked = _keys(held_out[:, :-1], context) if context else np.zeros(held_out[:, 1:].shape, np.int64)
    place, known = _found(contexts, asked.reshape(following[:, first:].shape))
    pair, there = _found(pairs, asked.reshape(following[:, first:].shape) * 256 + following[:, first:])
    count = np.where(there, times[pair], 0)
    estimate = (count + kinds[place] * below[:, first:]) / (totals[place] + kinds[place])
    out[:, first:] = np.where(known, estimate, below[:, first:])
    return out


def _keys(pieces_: np.ndarray, size: int) -> np.ndarray:
    """All runs of ``size`` bytes within pieces as numbers, piece by piece."""
    length = pieces_.shape[1] - size + 1
    keys = np.zeros((len(pieces_), length), np.int64)
    for place in range(size):
        keys = keys * 256 + pieces_[:, place : place + length]
    return keys.ravel()


def _found(numbers: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where numbers are among ascending ones, and whether they are."""
    place = np.minimum(np.searchsorted(numbers, wanted), len(numbers) - 1)
    return place, numbers[place] == wanted
