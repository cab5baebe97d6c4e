"""Steps of a model whose table is three times the memory that it may take, beside the same steps in memory.

One table of rows with Adagrad's slot, every one of them written, is trained in place on the CPU, by ids that are
uniform, or skewed (Zipf 1.1, scattered over the table):

    ahead       host.memory is a third of the table: rows are read from the disk ahead of their batch's step
    at once     the same, but a batch is read from the disk when its step begins (a feed without threads)
    mmap        host.folder alone, as the system does it; its pages leave memory before each round, so that the round
                begins cold, but keeps whatever it reads, and drops and writes nothing in it, as the first two do
    memory      no folder

A round is ``--steps`` steps of each side in turn; rows and losses of all sides are compared afterwards. A figure is the
time of a step in milliseconds; what was read from the disk, in MB a step, follows.

Examples:
  python -m benchmarks.disk_rows --folder /mnt/nvme/rows
  python -m benchmarks.disk_rows --quick --out results.json
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import pathlib
import tempfile
import time
from collections.abc import Iterator

import jax
import numpy as np
import optax
from flax import nnx

import jrec
from benchmarks import harness
from jrec.native.compile import pointer

DIM, IDS = 32, 4
_PAGEOUT, _MS_SYNC = 21, 4


class Side:
    """A run, and a feed of its batches.

    Args:
      rows: The table's rows.
      batch: Examples of a batch.
      skewed: Whether ids are.
      host: Where its rows lie.
      workers: Threads that make batches ahead of their steps, and batches that may wait; 0 for none.
    """

    def __init__(self, rows: int, batch: int, *, skewed: bool, host: jrec.HostOptions, workers: int):
        tables = [jrec.TableConfig(name="item", rows=rows, dim=DIM, tier="host")]
        features = [jrec.FeatureConfig(name="item", table="item", max_length=IDS)]
        layout = jrec.EmbeddingLayout.build(tables, features)
        config = jrec.nn.DLRMConfig(
            num_dense=0, bottom_mlp=(), top_mlp=(256, 256, 1), interaction="concat", dot_with="bottom"
        )
        model = jrec.nn.DLRM(config, layout, rngs=nnx.Rngs(0))
        adagrad = jrec.ops.Adagrad(learning_rate=0.05, initial_accumulator=0.1)
        optimizer = jrec.nn.SparseOptimizer(model, dense=optax.sgd(0.01), embedding=adagrad)
        self._run = jrec.distribute(model, optimizer, host=host)
        (self.table,) = self._run.host_tables.values()
        self._write_all()
        self._step, self.losses = self._run.compile(), list[float]()
        self._feed = self._run.feed(self._batches(rows, batch, skewed), workers=workers, prefetch=2 * workers)

    def _write_all(self, chunk: int = 1 << 16) -> None:
        for begin in range(0, self.table.rows, chunk):
            rows = np.arange(begin, min(self.table.rows, begin + chunk), dtype=np.int32)
            self.table.store(rows, *self.table.fetch(rows))

    @staticmethod
    def _batches(rows: int, batch: int, skewed: bool) -> Iterator[dict[str, np.ndarray]]:
        for number in itertools.count():
            rng = np.random.default_rng(number)
            ids = rng.zipf(1.1, (batch, IDS)) * 2_654_435_761 if skewed else rng.integers(0, rows, (batch, IDS))
            yield {"label": (rng.random(batch) < 0.3).astype(np.float32), "item": np.abs(ids) % rows}

    def steps(self, count: int) -> float:
        """Takes steps; the seconds of one."""
        begin = time.perf_counter()
        for batch in itertools.islice(self._feed, count):
            self.losses.append(float(self._step(batch)[0]))
        return (time.perf_counter() - begin) / count

    def leave_memory(self) -> None:
        """Writes the table's pages and takes them out of memory, of a table without a limit."""
        libc = ctypes.CDLL(None)
        for array in (self.table._store.values, *self.table._store.slots.values()):
            place, size = ctypes.c_void_p(pointer(array)), ctypes.c_size_t(array.nbytes)
            libc.msync(place, size, _MS_SYNC)
            libc.madvise(place, size, _PAGEOUT)

    def close(self) -> None:
        """Ends the threads."""
        self._feed.close()
        self._run.close()


def main() -> None:
    """Runs the benchmark."""
    parser = harness.parser(__doc__)
    parser.add_argument("--folder", type=pathlib.Path, help="on the disk to measure; default: the system's")
    parser.add_argument("--memory-mb", type=int, help="the limit, a third of the table; default 256, with --quick 48")
    parser.add_argument("--batch", type=int, help="examples of four ids; default 1024, with --quick 256")
    parser.add_argument("--steps", type=int, default=8, help="of a round")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    limit = (arguments.memory_mb or (48 if arguments.quick else 256)) << 20
    batch = arguments.batch or (256 if arguments.quick else 1024)
    with (
        harness.Report(arguments, "disk_rows") as report,
        tempfile.TemporaryDirectory(dir=arguments.folder, prefix="rows.") as folder,
    ):
        for skewed in (False, True):
            _measure(report, limit, batch, arguments.steps, folder, skewed=skewed)


def _measure(report: harness.Report, limit: int, batch: int, steps: int, folder: str, *, skewed: bool) -> None:
    rows = 3 * limit // (2 * 4 * DIM)
    limited = jrec.HostOptions(folder=folder, memory=f"{limit}")
    places = {
        "ahead": (limited, 1),
        "at once": (limited, 0),
        "mmap": (jrec.HostOptions(folder=folder), 1),
        "memory": (jrec.HostOptions(), 1),
    }
    sides = {
        name: Side(rows, batch, skewed=skewed, host=host, workers=workers) for name, (host, workers) in places.items()
    }
    ahead, mapped = sides["ahead"], sides["mmap"]
    ahead.steps(steps)  # compiles, and fills its memory
    assert ahead.table.limit is not None
    begin, taken = ahead.table.limit.read_pages, len(ahead.losses)

    def cold() -> float:
        mapped.leave_memory()
        return mapped.steps(steps)

    peers = {name: lambda side=side: side.steps(steps) for name, side in sides.items() if name != "ahead"}
    case = f"{rows:,} rows x {DIM}, {batch * IDS:,} ids, {'Zipf 1.1' if skewed else 'uniform'}"
    report.compare_all(case, "step, ahead", lambda: ahead.steps(steps), {**peers, "mmap": cold})
    read = (ahead.table.limit.read_pages - begin) * mmap.PAGESIZE / (len(ahead.losses) - taken)
    report.add(case, "read a step", read / 1e6, "MB")
    report.add(case, "dropped before use", ahead.table.limit.early_pages * mmap.PAGESIZE / 1e6, "MB")
    for side in sides.values():
        least = min(len(side.losses), len(ahead.losses))
        assert side.losses[:least] == ahead.losses[:least]
        side.close()


if __name__ == "__main__":
    main()
