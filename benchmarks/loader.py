"""The loader's speed in Criteo's shape, casts off and on, and its memory at two lengths of the dataset.

    python -m benchmarks.loader [--quick] [--out FILE] [--workers N]

The dataset is synthetic: 13 dense and 26 one-hot features with the Kaggle challenge's table sizes, batches of 2,048.
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

from benchmarks import harness

BATCH_SIZE = 2048
EXAMPLES, QUICK_EXAMPLES = 1 << 20, 1 << 17
LONGER = 4  # how many times longer the second dataset is


def main() -> None:
    """Makes both datasets and measures."""
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
        short = _dataset(report, pathlib.Path(temporary) / "short", examples)
        long = _dataset(report, pathlib.Path(temporary) / "long", LONGER * examples)
        for cast, casts in (("none", "casts off"), ("host", "casts on")):
            case = f"criteo, {casts}"
            peaks = {}
            for folder, length in ((short, examples), (long, LONGER * examples)):
                measured = _in_process(folder, cast, report.seconds, arguments.workers)
                peaks[length] = measured["peak"]
                report.add(case, f"median of {length:,} examples", measured["median"], "examples/s")
                report.add(case, f"fastest of {length:,} examples", measured["fastest"], "examples/s")
                report.add(case, f"by CPU time, {length:,} examples", measured["by_cpu"], "examples/CPU s")
                report.add(case, f"peak memory at {length:,} examples", measured["peak"] / 2**20, "MiB")
            growth = peaks[LONGER * examples] / peaks[examples]
            report.add(case, f"peak memory at {LONGER} times the length, by that at one", growth, "ratio")


def _dataset(report: harness.Report, folder: pathlib.Path, examples: int) -> pathlib.Path:
    from jrec.data.synth import SynthOptions, shape_like, synthesize

    start = time.perf_counter()
    split = (1.0, 0.0, 0.0)
    synthesize(shape_like("criteo-kaggle"), folder, SynthOptions(rows=examples, split=split, threads=harness.cores()))
    report.note(f"made {examples:,} examples in {time.perf_counter() - start:.1f} s")
    return folder


def _in_process(folder: pathlib.Path, cast: str, seconds: float, workers: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.loader", "--workers", str(workers)]
    command += ["--measure", str(folder), cast, str(seconds)]
    done = subprocess.run(command, cwd=harness.ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(folder: str, cast: str, seconds: float, workers: int) -> dict[str, float]:
    """Passes over the training split for ``seconds``; examples/s of the median and fastest pass, peak bytes.

    On a busy machine examples per second of CPU time, over all threads, say more than those per second.
    """
    from jrec.data.loader import LoaderConfig, make_loader
    from jrec.data.schema import Schema
    from jrec.ops.layout import EmbeddingLayout, FeatureConfig, TableConfig

    schema = Schema.load(folder)
    layout = EmbeddingLayout.build(
        [TableConfig(name=t.name, rows=t.rows, dim=16) for t in schema.tables],
        [FeatureConfig(name=f.name, table=f.table, fixed_length=True) for f in schema.categorical],
    )
    config = LoaderConfig(batch_size=BATCH_SIZE, workers=workers, cast="host" if cast == "host" else "none")
    examples = schema.splits["train"].examples
    rates: list[float] = []
    with make_loader(folder, schema, layout, "train", config) as loader:
        for _ in loader:  # compiles, or reads what was compiled
            pass
        deadline = time.perf_counter() + seconds
        cpu = time.process_time()
        while len(rates) < 3 or time.perf_counter() < deadline:
            start = time.perf_counter()
            for _ in loader:
                pass
            rates.append(examples / (time.perf_counter() - start))
        cpu = time.process_time() - cpu
    by_cpu = len(rates) * examples / cpu
    return {"median": statistics.median(rates), "fastest": max(rates), "by_cpu": by_cpu, "peak": _peak_bytes()}


def _peak_bytes() -> float:
    """Peak resident memory of this process image; ``getrusage`` would count what the parent held when it forked."""
    for line in pathlib.Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return 1024.0 * int(line.split()[1])
    raise RuntimeError("/proc/self/status has no VmHWM")


if __name__ == "__main__":
    main()
