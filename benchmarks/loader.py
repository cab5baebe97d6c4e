"""The loader's speed and CPU time, casts off and on, and its memory at two lengths of the dataset.

    python -m benchmarks.loader --workers 2 --out loader.jsonl

The datasets are synthetic: the Kaggle challenge's 13 dense and 26 one-hot features in batches of 2,048, and those of
MLPerf's DLRM-DCNv2, 13 dense features and 214 ids, in batches of 6,912. CPU time is that of all threads; of it the time
to read an example's part of a block, and to pack it where its window is in memory. The rest orders windows.
Every measurement runs in a process of its own, whose peak resident memory includes JAX, numba and Arrow themselves.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from benchmarks import harness

BATCH_SIZES = {"criteo-kaggle": 2048, "mlperf-dlrm-dcnv2": 6912}
EXAMPLES, QUICK_EXAMPLES = 1 << 20, 1 << 17
LONGER = 4  # how many times longer Kaggle's second dataset is


def main() -> None:
    """Makes the datasets and measures."""
    parser = harness.parser(__doc__)
    parser.add_argument("--workers", type=int, default=harness.cores(), help="loader threads (default: the cores)")
    parser.add_argument("--measure", nargs=3, metavar=("DATASET", "CAST", "SECONDS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        folder, cast, seconds = arguments.measure
        print(json.dumps(measure(folder, cast, float(seconds), arguments.workers)))
        return
    examples = QUICK_EXAMPLES if arguments.quick else EXAMPLES
    with harness.Report(arguments, "loader") as report, tempfile.TemporaryDirectory() as temporary:
        for shape, name, lengths in (
            ("criteo-kaggle", "criteo", (examples, LONGER * examples)),
            ("mlperf-dlrm-dcnv2", "mlperf-dcnv2", (examples // 2,)),
        ):
            folders = [_dataset(report, shape, pathlib.Path(temporary), length) for length in lengths]
            for cast, casts in (("none", "casts off"), ("host", "casts on")):
                measured = [_in_process(folder, cast, report.seconds, arguments.workers) for folder in folders]
                _add(report, f"{name}, {casts}", dict(zip(lengths, measured, strict=True)))


def _add(report: harness.Report, case: str, by_length: dict[int, dict[str, float]]) -> None:
    peaks = []
    for length, measured in by_length.items():
        peaks.append(measured["peak"])
        report.add(case, f"median of {length:,} examples", measured["median"], "examples/s")
        report.add(case, f"fastest of {length:,} examples", measured["fastest"], "examples/s")
        report.add(case, f"CPU time, {length:,} examples", measured["cpu"], "µs/example")
        for stage in ("reading", "packing"):
            report.add(case, f"CPU time of {stage}, {length:,} examples", measured[stage], "µs/example")
        report.add(case, f"peak memory at {length:,} examples", measured["peak"] / 2**20, "MiB")
    if len(peaks) > 1:
        report.add(case, f"peak memory at {LONGER} times the length, by that at one", peaks[1] / peaks[0], "ratio")


def _dataset(report: harness.Report, shape: str, parent: pathlib.Path, examples: int) -> pathlib.Path:
    from jrec.prepare.synth import SynthOptions, shape_like, synthesize

    start, folder = time.perf_counter(), parent / f"{shape}-{examples}"
    split = (1.0, 0.0, 0.0)
    synthesize(shape_like(shape), folder, SynthOptions(rows=examples, split=split, threads=harness.cores()))
    report.note(f"made {examples:,} examples like {shape} in {time.perf_counter() - start:.1f} s")
    return folder


def _in_process(folder: pathlib.Path, cast: str, seconds: float, workers: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.loader", "--workers", str(workers)]
    command += ["--measure", str(folder), cast, str(seconds)]
    done = subprocess.run(command, cwd=harness.ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(folder: str, cast: str, seconds: float, workers: int) -> dict[str, float]:
    """Passes over the training split for ``seconds``; examples/s of the median and fastest pass, peak bytes.

    And the median pass's CPU time in µs an example, which says more on a busy machine, with the parts of it that read
    blocks and that pack the examples of a window in memory.
    """
    from jrec.data.blocks import ShardReader
    from jrec.data.loader import LoaderConfig, make_loader
    from jrec.data.schema import Schema
    from jrec.ops.layout import EmbeddingLayout, FeatureConfig, TableConfig

    schema = Schema.load(folder)
    layout = EmbeddingLayout.build(
        [TableConfig(name=t.name, rows=t.rows, dim=16) for t in schema.tables],
        [
            FeatureConfig(name=f.name, table=f.table, max_length=f.max_length, fixed_length=True)
            for f in schema.categorical
        ],
    )
    batch_size = BATCH_SIZES[pathlib.Path(folder).name.rpartition("-")[0]]
    config = LoaderConfig(batch_size=batch_size, workers=workers, cast="host" if cast == "host" else "none")
    examples = schema.splits["train"].examples
    rates: list[float] = []
    with make_loader(folder, schema, layout, "train", config) as loader:
        for _ in loader:  # compiles, or reads what was compiled
            pass

        def one_pass() -> None:
            start = time.perf_counter()
            for _ in loader:
                pass
            rates.append(examples / (time.perf_counter() - start))

        cpu = _median_cpu(one_pass, seconds) / examples
        peak = _peak_bytes()
        count = config.window_blocks * schema.block_size // batch_size
        packing = _median_cpu(lambda: loader.first(count), seconds / 4) / min(examples, count * batch_size)
    readers = [(ShardReader(folder, shard), shard.blocks) for shard in schema.splits["train"].shards]
    blocks = [(reader, block) for reader, count in readers for block in range(count)]
    reading = _median_cpu(lambda: [len(reader.read(block)) for reader, block in blocks], seconds / 4) / examples
    return {
        "median": statistics.median(rates),
        "fastest": max(rates),
        "cpu": 1e6 * cpu,
        "reading": 1e6 * reading,
        "packing": 1e6 * packing,
        "peak": peak,
    }


def _median_cpu(function: Callable[[], object], seconds: float) -> float:
    """CPU seconds of this process, all threads together, that the median call takes."""
    function()
    taken: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(taken) < 3 or time.perf_counter() < deadline:
        start = time.process_time()
        function()
        taken.append(time.process_time() - start)
    return statistics.median(taken)


def _peak_bytes() -> float:
    """Peak resident memory of this process image; ``getrusage`` would count what the parent held when it forked."""
    for line in pathlib.Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return 1024.0 * int(line.split()[1])
    raise RuntimeError("/proc/self/status has no VmHWM")


if __name__ == "__main__":
    main()
