"""A step of an n-gram memory, by rows: jrec's sparse update on the device and in host memory, beside an ``nnx.Embed``.

The same dense part, Adagrad and batches of random tokens, 65,536 lookups a step, rows of 64 floats. Each side runs in a
process of its own, whose peak memory is reported, less that of the imports. A side is left out where the machine's
memory is less than its copies of the table: rows and slot on the device, gradient and update beside them of an
``nnx.Embed``, and of host memory only the rows that were read.

`--part quality` is benchmarks/ngram_quality.py: what a memory gains in bits a byte. `--part resume` is
benchmarks/ngram_resume.py: a table of up to 300 million rows in files, killed and resumed. Speeds need a quiet machine,
and bits and bytes do not.

Examples:
  python -m benchmarks.ngram_memory
  python -m benchmarks.ngram_memory --part quality
  python -m benchmarks.ngram_memory --part resume --rows 300000000 --folder /fast/disk
  python -m benchmarks.ngram_memory --rows 1000000 --side device embed
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jrec
from benchmarks import harness, ngram_quality, ngram_resume

TEXTS, LENGTH, WIDTH, DIM, VOCABULARY, CLASSES = 32, 256, 64, 64, 1_000, 16
ROWS = [1_000_000, 8_000_000, 64_000_000]
SIDES = ("device", "host", "embed")
STEPS, FIRST = 12, 2
COPIES = {"device": 2, "host": 0, "embed": 4}


def main() -> None:
    """Runs the benchmark."""
    parser = harness.parser(__doc__)
    parser.add_argument("--part", choices=("steps", "quality", "resume"), default="steps", help="what to measure")
    parser.add_argument("--rows", type=int, nargs="+", help="of the table; default: several sizes")
    parser.add_argument("--folder", help="of resume: where rows and checkpoints are; default: the temporary folder")
    parser.add_argument("--side", nargs="+", choices=SIDES, default=list(SIDES), help="default: all")
    parser.add_argument("--worker", nargs=2, metavar=("SIDE", "ROWS"), help="measure one side in this process")
    arguments = parser.parse_args()
    if arguments.worker:
        side, rows = arguments.worker
        print(json.dumps(measured(side, int(rows))))
        return
    if arguments.part == "quality":
        with harness.Report(arguments, "ngram_quality") as report:
            ngram_quality.measure(report)
        return
    if arguments.part == "resume":
        with harness.Report(arguments, "ngram_resume") as report:
            ngram_resume.measure(report, arguments.rows or ngram_resume.ROWS, arguments.folder)
        return
    with harness.Report(arguments, "ngram_memory") as report:
        for rows in [20_000] if arguments.quick else arguments.rows or ROWS:
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            fit = [side for side in arguments.side if COPIES[side] * rows * DIM * 4 < memory]
            found = {side: worker(side, rows) for side in fit}
            case, embed = f"{rows:,} rows x {DIM}, 65,536 lookups", found.get("embed")
            for side, (milliseconds, gigabytes) in found.items():
                ratio = (
                    {} if embed is None or side == "embed" else {"peer": "nnx.Embed", "ratio": embed[0] / milliseconds}
                )
                report.add(case, f"step, {side}, median", milliseconds, "ms", **ratio)
                report.add(case, f"peak memory, {side}", gigabytes, "GB")


def worker(side: str, rows: int) -> tuple[float, float]:
    """Milliseconds of a step and peak gigabytes of one side, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.ngram_memory", "--worker", side, str(rows)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=harness.ROOT)
    if done.returncode:
        raise SystemExit(f"ngram_memory: {' '.join(command)} ended with status {done.returncode}:\n{done.stderr}")
    return tuple(json.loads(done.stdout.splitlines()[-1]))


def measured(side: str, rows: int) -> tuple[float, float]:
    """Median milliseconds of a step, and peak gigabytes above those of the imports."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    config = jrec.nn.NGramConfig(rows=rows, dim=DIM)
    times = (embed_steps if side == "embed" else sparse_steps)(config, side)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return 1e3 * statistics.median(times[FIRST:]), peak * 1024 / 1e9


class Memory(nnx.Module):
    """The dense part: gated rows, and scores of what comes next, little work beside that of the rows."""

    def __init__(self, config: jrec.nn.NGramConfig, *, rngs: nnx.Rngs):
        self.memory = jrec.nn.NGramMemory(config, WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, rows: jax.Array) -> jax.Array:
        """(texts, length, classes)."""
        return self.out(self.memory(jnp.ones((rows.shape[0], LENGTH, WIDTH)), rows))


class Sparse(nnx.Module):
    """The same, over jrec's table."""

    def __init__(self, config: jrec.nn.NGramConfig, tier: Any, *, rngs: nnx.Rngs):
        layout = jrec.EmbeddingLayout.build([config.table(tier=tier)], [config.feature(LENGTH)])
        self.embeddings, self.dense = jrec.nn.EmbeddingCollection(layout, rngs=rngs), Memory(config, rngs=rngs)

    def logits(self, dense: jax.Array, activations: Any, bags: Any) -> jax.Array:
        """(texts, length, classes)."""
        del dense
        return self.dense(self.embeddings.features(activations, bags)["ngram"])


def mean_loss(logits: jax.Array, following: jax.Array) -> jax.Array:
    """The mean cross entropy."""
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, following))


def tokens_of(step: int) -> np.ndarray:
    """(texts, length + 1) random tokens: the worst case, in which few n-grams come twice."""
    return np.random.default_rng(step).integers(0, VOCABULARY, (TEXTS, LENGTH + 1))


def next_of(tokens: np.ndarray) -> np.ndarray:
    """(texts, length) int32, the class of each next token."""
    return (tokens[:, 1:] % CLASSES).astype(np.int32)


def sparse_steps(config: jrec.nn.NGramConfig, side: str) -> list[float]:
    """Seconds of each step by ``jrec.distribute``, loading and hashing included."""
    model = Sparse(config, "host" if side == "host" else "sharded", rngs=nnx.Rngs(0))
    rows = jrec.ops.Adagrad(learning_rate=0.1)
    optimizer = jrec.nn.SparseOptimizer(model, dense=optax.adagrad(0.1), embedding=rows)

    def columns(step: int) -> dict[str, np.ndarray]:
        tokens = tokens_of(step)
        rows = jrec.nn.ngram_rows(config, tokens[:, :-1])
        return {"ngram": rows.reshape(TEXTS, -1), "next": next_of(tokens)}

    with jrec.distribute(model, optimizer) as run:
        step_on = run.compile(loss=lambda logits, batch: mean_loss(logits, batch.extras["next"]))
        feed = run.feed(map(columns, range(STEPS)), label=None, extras=["next"])
        return timed(lambda batch: step_on(batch)[0], feed)


def embed_steps(config: jrec.nn.NGramConfig, side: str) -> list[float]:
    """Seconds of each step of an ``nnx.Embed`` trained by optax, hashing included; arrays are donated."""
    del side

    class Whole(nnx.Module):
        def __init__(self) -> None:
            self.embed = nnx.Embed(config.rows, DIM, rngs=nnx.Rngs(0))
            self.dense = Memory(config, rngs=nnx.Rngs(1))

    model = Whole()
    optimizer = nnx.Optimizer(model, optax.adagrad(0.1), wrt=nnx.Param)

    @nnx.jit(donate_argnames=("model", "optimizer"))
    def step(model: Whole, optimizer: nnx.Optimizer, rows: jax.Array, following: jax.Array) -> jax.Array:
        def loss(model: Whole) -> jax.Array:
            return mean_loss(model.dense(model.embed(rows)), following)

        value, gradients = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        return value

    def taken(number: int) -> jax.Array:
        tokens = tokens_of(number)
        rows = jrec.nn.ngram_rows(config, tokens[:, :-1])
        return step(model, optimizer, jnp.asarray(rows), jnp.asarray(next_of(tokens)))

    return timed(taken, range(STEPS))


def timed(step: Callable[[Any], jax.Array], items: Any) -> list[float]:
    """Seconds from the end of a step to the end of the next."""
    seconds, start = [], time.perf_counter()
    for item in items:
        jax.block_until_ready(step(item))
        now = time.perf_counter()
        seconds.append(now - start)
        start = now
    return seconds


if __name__ == "__main__":
    main()
