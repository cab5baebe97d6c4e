"""A transformer whose n-gram table lies in files: trained, saved, killed and resumed with the same bits.

`python -m benchmarks.ngram_memory --part resume` runs it: rows of 32 floats, 8 hashes of 2- and 3-grams, row-wise
Adagrad. One process trains to the end; another is killed (SIGKILL) between two checkpoints, and a third goes on from
the last of these. Rows, slots, dense parameters and losses must be the same to the bit, or nothing is reported. Where
memory holds it, an ``nnx.Embed`` whose gradient and update are as large as the table takes the same steps from the same
first values: its losses must be the same, too, but for the order of float32 sums.

Bytes on the disk are those that the file system allocated. The files of rows are reserved as a whole: a mapped write
into a full disk would kill the process.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jrec
from benchmarks import harness
from benchmarks.ngram_model import Dense, LanguageModel, Shape, columns_of, mean_loss, pieces, python_sources
from jrec.nn import NGramConfig

SHAPE, ROWS, DIM = Shape(), [1_000_000, 8_000_000, 300_000_000], 32
EMBED_COPIES, CLOSE, FIRST = 6, 1e-5, 2
STEPS, EVERY, KILLED_AT = 40, 10, 27
RATE = 0.1


def measure(report: harness.Report, rows: list[int], folder: str | None) -> None:
    """Adds the lines of each size."""
    for size in [20_000] if report.quick else rows:
        with tempfile.TemporaryDirectory(dir=folder) as work:
            measure_size(report, size, pathlib.Path(work))


def measure_size(report: harness.Report, rows: int, work: pathlib.Path) -> None:
    """Trains, kills and resumes; trains an ``nnx.Embed``, too, where memory holds it."""
    case = f"{rows:,} rows x {DIM}, 8 heads"
    whole = worker("host", rows, work / "whole")
    worker("host", rows, work / "killed", kill_at=KILLED_AT)
    resumed = worker("host", rows, work / "killed")
    begun = STEPS - len(resumed["losses"])
    if not 0 < begun < KILLED_AT or resumed["losses"] != whole["losses"][begun:] or resumed["bits"] != whole["bits"]:
        raise SystemExit(f"ngram_memory: {case}: a run that was killed and resumed at step {begun} has other bits")
    report.add(case, "table, rows and slots", whole["table"], "bytes")
    report.add(case, "rows made", whole["made"], "count")
    report.add(case, "disk, rows and slots", whole["disk"], "bytes")
    report.add(case, "disk, checkpoint", whole["checkpoint"], "bytes")
    report.add(case, "same bits after a kill, from step", begun, "count")
    for name in ("anonymous memory", "peak memory"):
        report.add(case, f"{name}, host", whole[name], "bytes")
    report.add(case, "save, first", whole["saves"][0], "s")
    report.add(case, "save, median of later", statistics.median(whole["saves"][1:]), "s")
    report.add(case, "restore", resumed["restore"], "s")
    report.add(case, "open", whole["open"], "s")
    times = {"host": 1e3 * statistics.median(whole["seconds"][FIRST:])}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if EMBED_COPIES * rows * DIM * 4 < memory:
        embed = worker("embed", rows, work / "embed")
        apart = float(np.max(np.abs(np.divide(whole["losses"], embed["losses"]) - 1)))
        if apart > CLOSE:
            raise SystemExit(
                f"ngram_memory: {case}: a loss is {apart:.1e} of itself off the exact one, not {CLOSE:.0e}"
            )
        report.add(case, "greatest relative difference of a loss from nnx.Embed", apart, "ratio")
        report.add(case, "peak memory, nnx.Embed", embed["peak memory"], "bytes")
        times["embed"] = 1e3 * statistics.median(embed["seconds"][FIRST:])
        report.add(case, "step, nnx.Embed, median", times["embed"], "ms")
    peer = {"peer": "nnx.Embed", "ratio": times["embed"] / times["host"]} if "embed" in times else {}
    report.add(case, "step, host, median", times["host"], "ms", **peer)


def worker(side: str, rows: int, folder: pathlib.Path, kill_at: int = 0) -> dict[str, Any]:
    """What a process of a side measures; {} of one that is killed when it has taken ``kill_at`` steps."""
    command = [sys.executable, "-m", "benchmarks.ngram_resume", side, str(rows), str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=harness.ROOT) as process:
        assert process.stdout is not None
        for line in process.stdout:
            content = json.loads(line)
            if kill_at and content.get("step") == kill_at:
                process.send_signal(signal.SIGKILL)
                process.wait()
                return {}
    if process.returncode or "losses" not in content:
        raise SystemExit(f"ngram_memory: {' '.join(command)} ended with status {process.returncode}")
    return content


def said(**content: Any) -> None:
    """A line for the process that started this one."""
    print(json.dumps(content), flush=True)


def ngrams_of(rows: int) -> NGramConfig:
    """2- and 3-grams with 8 hashes each as a pair of four: eight rows a token."""
    return NGramConfig(rows=rows, dim=DIM, sizes=(2, 3), heads=4)


def host_steps(rows: int, folder: pathlib.Path) -> dict[str, Any]:
    """Takes the steps that are left, with a checkpoint every ``EVERY``."""
    model, ngrams = LanguageModel(SHAPE, ngrams_of(rows), tier="host", rngs=nnx.Rngs(0)), ngrams_of(rows)
    rows_by = jrec.ops.RowWiseAdagrad(learning_rate=RATE)
    optimizer, text = jrec.nn.SparseOptimizer(model, dense=optax.adam(2e-3), embedding=rows_by), python_sources()[0]
    files, checkpoints, losses, saves, restore = folder / "files", folder / "checkpoints", [], [], 0.0
    start = time.perf_counter()
    with jrec.distribute(model, optimizer, host=jrec.HostOptions(folder=str(files))) as run:
        opened = time.perf_counter() - start
        if checkpoints.exists():
            restore = taken(lambda: run.restore(checkpoints))
        step = run.compile(loss=lambda logits, batch: mean_loss(logits, batch.extras["next"]))
        batches = list(pieces(text, SHAPE, STEPS, 0))[run.steps :]
        seconds, start = list[float](), time.perf_counter()
        with run.feed((columns_of(piece, ngrams) for piece in batches), label=None, extras=["next"]) as feed:
            for batch in feed:
                losses.append(float(step(batch)[0]))
                seconds.append(time.perf_counter() - start)
                said(step=run.steps)
                if run.steps % EVERY == 0:
                    saves.append(taken(lambda: run.save(checkpoints)))
                start = time.perf_counter()
        (table,) = run.host_tables.values()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {
            "losses": losses,
            "seconds": seconds,
            "saves": saves,
            "restore": restore,
            "open": opened,
            "bits": bits_of(run),
            "made": table.num_made,
            "table": table.nbytes,
            "disk": sum(status.st_blocks * 512 for status in open_files(files)),
            "checkpoint": sum(path.lstat().st_blocks * 512 for path in checkpoints.rglob("*")),
            "anonymous memory": anonymous_memory(),
            "peak memory": peak,
        }


def embed_steps(rows: int, folder: pathlib.Path) -> dict[str, Any]:
    """The same steps by dense gradients, from the first values of jrec's tables; arrays are donated."""
    del folder
    ngrams, text = ngrams_of(rows), python_sources()[0]
    begun = LanguageModel(SHAPE, ngrams, rngs=nnx.Rngs(0))
    unused = jrec.nn.SparseOptimizer(begun, dense=optax.sgd(0.0), embedding=jrec.ops.SGD(learning_rate=0.0))
    with jrec.distribute(begun, unused) as run:
        first, dense = (
            {name: jnp.asarray(run.table(name)) for name in ("byte", "ngram")},
            cast("LanguageModel", run.modules()[0]).dense,
        )

    class Whole(nnx.Module):
        def __init__(self, dense: Dense) -> None:
            self.dense = dense
            self.byte, self.ngram = (
                nnx.Embed(len(first[name]), first[name].shape[1], embedding_init=lambda *_, name=name: first.pop(name),
                          rngs=nnx.Rngs(0)) for name in ("byte", "ngram")
            )  # fmt: skip

    model = Whole(dense)
    del begun, run, unused
    tables = {"byte", "ngram"}
    rule = optax.multi_transform(
        {"dense": optax.adam(2e-3), "rows": rowwise_adagrad(RATE)},
        lambda params: jax.tree.map_with_path(
            lambda path, _: "rows" if path[0].key in tables else "dense", params
        ),
    )  # fmt: skip
    optimizer = nnx.Optimizer(model, rule, wrt=nnx.Param)

    @nnx.jit(donate_argnames=("model", "optimizer"))
    def step(model: Whole, optimizer: nnx.Optimizer, tokens: jax.Array, ids: jax.Array, following: jax.Array):
        def loss(model: Whole) -> jax.Array:
            return mean_loss(model.dense(model.byte(tokens), model.ngram(ids)), following)

        value, gradients = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        return value

    losses, seconds = list[float](), list[float]()
    for piece in pieces(text, SHAPE, STEPS, 0):
        start, columns = time.perf_counter(), columns_of(piece, ngrams)
        ids = columns["ngram"].reshape(*piece[:, :-1].shape, -1)
        arrays = (jnp.asarray(array.astype(np.int32)) for array in (columns["byte"], ids, columns["next"]))
        losses.append(float(step(model, optimizer, *arrays)))
        seconds.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"losses": losses, "seconds": seconds, "peak memory": peak}


def rowwise_adagrad(rate: float) -> optax.GradientTransformation:
    """Row-wise Adagrad of whole tables, which optax lacks: the step of ``jrec.ops.RowWiseAdagrad``."""
    eps = jrec.ops.RowWiseAdagrad(learning_rate=rate).eps

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        sums = jax.tree.map(lambda g, s: s + jnp.mean(g * g, axis=1, keepdims=True), updates, state)
        return jax.tree.map(lambda g, s: jnp.where(s > 0, -rate * g * jax.lax.rsqrt(s + eps), 0), updates, sums), sums

    return optax.GradientTransformation(lambda params: jax.tree.map(lambda p: jnp.zeros((len(p), 1)), params), update)


def bits_of(run: jrec.Run) -> str:
    """A digest of all rows and slots that were made, and of all other state."""
    run.flush()
    digest = hashlib.sha256()
    for table in run.host_tables.values():
        made = table.made_rows()
        for some in np.array_split(made, max(1, -(-len(made) // 65_536))):
            rows, slots = table.fetch(some)
            for array in (some, rows, *(slots[name] for name in sorted(slots))):
                digest.update(np.ascontiguousarray(array).data)
    for array in jax.tree.leaves(run.state):
        if not jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            digest.update(np.asarray(array).tobytes())
    return digest.hexdigest()


def open_files(folder: pathlib.Path) -> Iterator[os.stat_result]:
    """The files of a folder that this process has mapped: they have no names there anymore."""
    seen = set[str]()
    for link in pathlib.Path("/proc/self/map_files").iterdir():
        target = os.readlink(link)  # noqa: PTH115, which would drop what stands behind the name
        if target.startswith(f"{folder.resolve()}/") and target not in seen:
            seen.add(target)
            yield link.stat()


def anonymous_memory() -> int:
    """Bytes of this process's memory that no file has."""
    status = pathlib.Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))


def taken(call: Callable[[], Any]) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    sides = {"host": host_steps, "embed": embed_steps}
    said(**sides[sys.argv[1]](int(sys.argv[2]), pathlib.Path(sys.argv[3])))
