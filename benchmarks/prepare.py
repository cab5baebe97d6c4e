"""``jrec prepare``: rows a second end to end, and peak memory for a log and for one four times as long.

Writes synthetic logs in Criteo's format (the same at every run) to a temporary folder and prepares them in processes of
their own: time counts the whole command, start of Python included, memory the process's peak resident set. In the
case "fixed vocabulary" no field has more than 100,000 values, so that both logs hold nearly the same values and memory
must be the same; "kaggle vocabulary" has the cardinalities of the Kaggle log, the hardest case for the hash tables.
"capped rows" counts blocks of keys into one table of as many rows as ``--max-rows`` would leave it. "csv format" has
the 40 columns of the fixed vocabulary by a schema, as text and as Parquet, in turn. ``--only full`` prepares one log of
the Kaggle challenge's 45,840,617 lines, with 12 GB for the log and about 20 GB beside it; no other run has it.
"""

from __future__ import annotations

import dataclasses
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import numba
import numpy as np

from benchmarks import harness
from jrec.data.keys import buckets, count_buckets

# Published table sizes of Criteo Kaggle (facebookresearch/dlrm).
KAGGLE = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652,
    2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
FIXED = tuple(min(rows, 100_000) for rows in KAGGLE)
COUNTS = 13
CHUNK = 50_000
KAGGLE_LINES = 45_840_617
NAMES = ("label", *(f"I{i + 1}" for i in range(COUNTS)), *(f"C{i + 1}" for i in range(len(KAGGLE))))
MAX_LINE = 3 + 10 * COUNTS + 9 * len(KAGGLE)

# Runs the command and prints its own peak (as its parent sees it, it includes the parent at the fork) and CPU time.
_CHILD = """
import pathlib, sys, time
from jrec.cli import main
code = main(sys.argv[1:])
status = pathlib.Path("/proc/self/status").read_text()
print("figures", status.split("VmHWM:")[1].split()[0], time.process_time(), file=sys.stderr)
sys.exit(code)
"""


@numba.njit(cache=True)
def _random(state):
    """The next state of a 64-bit xorshift generator, and a uniform float64."""
    state ^= state << np.uint64(13)
    state ^= state >> np.uint64(7)
    state ^= state << np.uint64(17)
    return state, (state >> np.uint64(11)) * (1.0 / (1 << 53))


@numba.njit(cache=True)
def _write_rows(rows, cardinalities, state, out):
    """Writes rows of text into ``out``; returns the generator's state and the number of bytes."""
    at = 0
    digits = np.empty(20, np.uint8)
    for _ in range(rows):
        state, u = _random(state)
        out[at] = 49 if u < 0.25 else 48
        at += 1
        for _ in range(COUNTS):
            out[at] = 9
            at += 1
            state, u = _random(state)
            if u < 0.2:
                continue
            value = np.int64(np.exp(10.0 * (u - 0.2))) - 1
            length = 0
            while value > 0 or length == 0:
                digits[length] = 48 + value % 10
                value //= 10
                length += 1
            for i in range(length):
                out[at] = digits[length - 1 - i]
                at += 1
        for field in range(cardinalities.shape[0]):
            out[at] = 9
            at += 1
            state, u = _random(state)
            if u < 0.03:
                continue
            state, u = _random(state)
            rank = np.uint64(cardinalities[field] ** u) - np.uint64(1)  # log-uniform: a power law of exponent 1
            value = ((rank + np.uint64(field << 24)) * np.uint64(0x9E3779B1)) & np.uint64(0xFFFFFFFF)
            for i in range(8):
                digit = (value >> np.uint64(28 - 4 * i)) & np.uint64(15)
                out[at] = np.uint8(digit + np.uint64(48 if digit < 10 else 87))
                at += 1
        out[at] = 10
        at += 1
    return state, at


def write_log(path: pathlib.Path, rows: int, cardinalities: tuple[int, ...]) -> None:
    """Writes a log in Criteo's format with power-law values; equal arguments write equal files."""
    state = np.uint64(20240607)
    out = np.empty(CHUNK * MAX_LINE, np.uint8)
    sizes = np.array(cardinalities, np.int64)
    with path.open("wb") as file:
        for start in range(0, rows, CHUNK):
            state, length = _write_rows(min(CHUNK, rows - start), sizes, np.uint64(state), out)
            file.write(out[:length].data)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Seconds on the clock, seconds of all cores, peak resident MiB of one run."""

    seconds: float
    cpu_seconds: float
    peak: float


def run_prepare(log: pathlib.Path, out: pathlib.Path, *arguments: str) -> Run:
    """Measures preparing a log in a process of its own; ``arguments`` are the format and its options."""
    command = ["prepare", *(arguments or ("criteo-kaggle",))]
    command += ["--input", str(log), "--out", str(out), "--overwrite", "--quiet"]
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", _CHILD, *command], capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise RuntimeError(f"jrec prepare failed: {done.stderr}")
    peak, cpu_seconds = done.stderr.split("figures")[1].split()[:2]
    return Run(seconds=seconds, cpu_seconds=float(cpu_seconds), peak=int(peak) / 1024)


def measure(report: harness.Report, folder: pathlib.Path, case: str, rows: int, cardinalities: tuple[int, ...]) -> None:
    """Prepares logs of ``rows`` and 4 × ``rows`` rows in turn and records medians.

    "Speed" counts the whole command; "speed beyond start-up" only the rows by which the logs differ.
    """
    logs = {n: folder / f"{n}.tsv" for n in (rows, 4 * rows)}
    for n, log in logs.items():
        write_log(log, n, cardinalities)
    runs_by_rows: dict[int, list[Run]] = {n: [] for n in logs}
    for _ in range(1 if report.quick else 3):
        for n, log in logs.items():
            runs_by_rows[n].append(run_prepare(log, folder / "out"))
    peaks, seconds = {}, {}
    for n, runs in runs_by_rows.items():
        name = f"{case}, {n:,} rows"
        seconds[n] = statistics.median(run.seconds for run in runs)
        peaks[n] = statistics.median(run.peak for run in runs)
        report.add(name, "speed", n / seconds[n], "rows/s")
        report.add(name, "CPU time", statistics.median(run.cpu_seconds for run in runs) / n * 1e6, "s/million rows")
        report.add(name, "peak memory", peaks[n], "MiB")
    report.add(case, "speed beyond start-up", 3 * rows / (seconds[4 * rows] - seconds[rows]), "rows/s")
    report.add(case, "peak memory of four times the rows", peaks[4 * rows] / peaks[rows], "times")
    for log in logs.values():
        log.unlink()


def compare_forms(report: harness.Report, folder: pathlib.Path, rows: int) -> None:
    """Prepares one log as text and as Parquet by the same schema, in turn, and records medians."""
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    logs = {"text": folder / "log.tsv", "Parquet": folder / "log.parquet"}
    write_log(logs["text"], rows, FIXED)
    types = {name: pa.int8() if name == "label" else pa.int64() if name[0] == "I" else pa.string() for name in NAMES}
    table = pyarrow.csv.read_csv(
        logs["text"],
        read_options=pyarrow.csv.ReadOptions(column_names=list(NAMES)),
        parse_options=pyarrow.csv.ParseOptions(delimiter="\t"),
        convert_options=pyarrow.csv.ConvertOptions(column_types=types, strings_can_be_null=True),
    )
    pyarrow.parquet.write_table(table, logs["Parquet"])
    del table
    schema = folder / "schema.toml"
    parts = [f'columns = {list(NAMES)}\ndelimiter = "\\t"\n[label]\ncolumn = "label"\n']
    parts += [f'[[dense]]\ncolumn = "{n}"\ntransform = "log1p"\nmissing = 0\n' for n in NAMES if n[0] == "I"]
    parts += [f'[[categorical]]\ncolumn = "{n}"\n' for n in NAMES if n[0] == "C"]
    schema.write_text("".join(parts))
    runs_by_form: dict[str, list[Run]] = {form: [] for form in logs}
    for _ in range(1 if report.quick else 3):
        for form, log in logs.items():
            runs_by_form[form].append(run_prepare(log, folder / "out", "csv", "--schema", str(schema)))
    for form, runs in runs_by_form.items():
        name = f"csv format, {rows:,} rows as {form}"
        report.add(name, "CPU time", statistics.median(run.cpu_seconds for run in runs) / rows * 1e6, "s/million rows")
        report.add(name, "peak memory", max(run.peak for run in runs), "MiB")
    for log in logs.values():
        log.unlink()


def measure_full(report: harness.Report, folder: pathlib.Path) -> None:
    """Prepares a log as long as the Kaggle challenge's, once."""
    log = folder / "full.tsv"
    write_log(log, KAGGLE_LINES, KAGGLE)
    run = run_prepare(log, folder / "out")
    name = f"kaggle vocabulary, {KAGGLE_LINES:,} rows"
    report.add(name, "CPU time", run.cpu_seconds / KAGGLE_LINES * 1e6, "s/million rows")
    report.add(name, "peak memory", run.peak, "MiB")


def count_capped(report: harness.Report, rows: int, blocks: int) -> None:
    """Counts blocks of keys into a table capped at ``rows``, beside NumPy's bincount over the whole table a block."""
    generator = np.random.default_rng(0)
    keys = [generator.integers(0, 2**63, 1 << 18).astype(np.uint64) for _ in range(blocks)]
    counts, reference = np.zeros(rows, np.int64), np.zeros(rows, np.int64)

    def in_place() -> None:
        for block in keys:
            count_buckets(block, counts)

    def whole_table() -> None:
        for block in keys:
            np.add(reference, np.bincount(buckets(block, rows), minlength=rows), out=reference)

    in_place()
    whole_table()
    if not np.array_equal(counts, reference):
        raise RuntimeError("count_buckets and bincount disagree")
    name = f"{rows:,} capped rows"
    measured = report.compare(
        name, "counting", harness.timed(in_place), peer="bincount a block", theirs=harness.timed(whole_table)
    )
    report.add(name, "keys counted", blocks * (1 << 18) / measured.median, "keys/s")


def main() -> None:
    """Runs the benchmark."""
    parser = harness.parser(__doc__)
    parser.add_argument("--only", choices=("logs", "capped", "forms", "full"), help="take only these cases")
    arguments = parser.parse_args()
    rows = 250_000 if arguments.quick else 1_000_000
    with harness.Report(arguments, "prepare") as report, tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        if arguments.only in (None, "capped"):
            count_capped(report, 10_000_000 if arguments.quick else 100_000_000, 4)
        if arguments.only in (None, "forms"):
            compare_forms(report, folder, rows)
        if arguments.only == "full":
            measure_full(report, folder)
        if arguments.only not in (None, "logs"):
            return
        warmup = folder / "warmup.tsv"
        write_log(warmup, 1000, FIXED)
        run_prepare(warmup, folder / "out")
        measure(report, folder, "fixed vocabulary", rows, FIXED)
        if not arguments.quick:
            measure(report, folder, "kaggle vocabulary", rows, KAGGLE)


if __name__ == "__main__":
    main()
