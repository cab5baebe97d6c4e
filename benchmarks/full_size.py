"""Whole runs of `jrec train` at the size of the real datasets: memory, checkpoints, and a kill in between.

The twins of Criteo Kaggle, Avazu and Criteo Terabyte (`jrec synth`) have every row of the published tables; Terabyte is
trained with tensor-train tables, and with all rows in memory-mapped files of a folder (52 GB, which must be free; few
are touched). Each case is a run with a checkpoint every 100 steps, or as many as the disk needs to write one before the
next, which would wait for it. It is killed (SIGKILL) when the second checkpoint is under way or complete, resumed, and
evaluated; another run of as many steps is never interrupted. Figures:

    peak memory       of each phase: start (to the first step), steps (with checkpoints), resume, evaluation. Limit: all
                      tables and slots and 1.2 GB more. It is the kernel's VmHWM: anonymous memory and the pages of
                      mapped files, libraries among them. Of rows in a folder the pages are left out on both sides:
                      anonymous memory (RssAnon, sampled every 20 ms) against 1.2 GB.
    checkpoint        seconds until it is complete; those for which training waited, limit: 5 % of them; and with these
                      what steps took above the median while it was written, which is the price of sharing the cores
                      and the memory with whoever writes.
    step              median, and its ratio to the same model's with a million rows in all; the two alternate, run
                      by run, and the ratio is the median over pairs. Limit: 1.15.
    same bits         whether the killed run logged the same bytes as the other, and its model scores the same.

Datasets are made once in --work and kept; cases that ended are not run again there at the same commit.

Examples:
  python -m benchmarks.full_size --only kaggle --out kaggle.jsonl
  python -m benchmarks.full_size --quick
  python -m benchmarks.full_size --only terabyte-host --work /mnt/disk/full_size --out host.jsonl
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks import harness, resume
from benchmarks.full_size_process import JrecProcess, Peak, RunFolder, parsed

OVER_TABLES = 1.2e9  # bytes: the process itself, batches, what a checkpoint or an initialization takes besides the rows
HELD, STEP_RATIO = 0.05, 1.15
SMALL_ROWS = 1_000_000
QUICK_SCALE = 100
BATCH = 2048


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A model on a twin of a dataset.

    Attributes:
      like: The dataset, as `jrec synth` calls it.
      config: The configuration's file name.
      overrides: What is different from it.
      in_folder: Whether rows lie in memory-mapped files.
      every: Steps between checkpoints at full size.
    """

    like: str
    config: str
    overrides: tuple[str, ...] = ()
    in_folder: bool = False
    every: int = 100


CASES = {
    "kaggle": Case(like="criteo-kaggle", config="criteo_kaggle.toml", every=300),
    "avazu": Case(like="avazu", config="avazu.toml"),
    "terabyte-tt": Case(like="criteo-terabyte", config="criteo_terabyte_tt.toml"),
    "terabyte-host": Case(
        like="criteo-terabyte",
        config="criteo_terabyte.toml",
        overrides=("tables.tier='host'",),
        in_folder=True,
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """How long and how large.

    Attributes:
      scale: What row counts are divided by.
      every: Steps between checkpoints; the run is killed after two of them and ends after three.
      pairs: Pairs of runs whose step times are compared.
      batch: Examples of a step.
    """

    scale: int = 1
    every: int = 100
    pairs: int = 3
    batch: int = BATCH

    @property
    def steps(self) -> int:
        """Steps of the run."""
        return 3 * self.every

    @property
    def examples(self) -> int:
        """Examples of the dataset: 80 % of them are trained on."""
        return (self.steps + 4) * self.batch * 5 // 4


FULL, QUICK = Size(), Size(scale=QUICK_SCALE, every=10, pairs=1, batch=512)


def main() -> None:
    """Runs the benchmark."""
    parser = harness.parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=tuple(CASES), metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument(
        "--work", type=pathlib.Path, default=harness.ROOT / "runs" / "full_size", help="folder for datasets and runs"
    )
    arguments = parser.parse_args()
    size = QUICK if arguments.quick else FULL
    names = arguments.only or (["kaggle"] if arguments.quick else list(CASES))
    work: pathlib.Path = arguments.work / ("quick" if arguments.quick else "full")
    work.mkdir(parents=True, exist_ok=True)
    progress = work / f"{harness.commit()}.jsonl"
    with harness.Report(arguments, "full_size") as report, progress.open("a", encoding="utf-8") as file:
        earlier = list(resume.read_lines(progress))
        for line in earlier:
            if "metric" in line and line["case"].split(",")[0] in names:
                report.line(line)

        def emit(line: Mapping[str, Any]) -> None:
            print(json.dumps(line), file=file, flush=True)

        cases = resume.Cases(emit, earlier)
        cases.run({name: functools.partial(_Measured(report, emit, name, size, work).run) for name in names})
        for line in resume.read_lines(progress):
            if "error" in line:
                report.note(f"{line['end']}: {line['error']}")
    raise SystemExit(1 if cases.failed else 0)


class _Measured:
    """One case: its datasets, its runs and its figures."""

    def __init__(self, report: harness.Report, emit: resume.Emit, name: str, size: Size, work: pathlib.Path):
        every = size.every if size.scale > 1 else CASES[name].every
        self._report, self._emit, self._name, self._size = report, emit, name, dataclasses.replace(size, every=every)
        self._case, self._work, self._folder = CASES[name], work, work / name
        self._label, self._budget = name, 0.0

    def run(self) -> None:
        """Measures, and removes the runs."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        try:
            data, small = self._dataset(small=False), self._dataset(small=True)
            in_memory, in_files = self._tables(data)
            self._label = f"{self._name}, {self._rows(data):,} rows, batch {self._size.batch:,}"
            self._add("tables and slots", (in_memory + in_files) / 1e6, "MB", details={"in_files": in_files})
            self._budget = in_memory + OVER_TABLES
            killed = self._killed_and_resumed(data)
            self._same_bits(data, killed)
            self._step_times(data, small)
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _killed_and_resumed(self, data: pathlib.Path) -> RunFolder:
        size, run = self._size, RunFolder(self._folder / "killed")
        process = self._train(data, run, every=size.every)
        self._watch(process, run, "start", until=1)
        self._add("start, seconds to the first step", process.seconds, "s")
        self._memory("start", process.next_phase())
        self._watch(process, run, "steps and checkpoints", until=2 * size.every + 1)
        self._memory("steps and checkpoints", process.next_phase())
        process.kill()
        self._checkpoints(run)
        self._add("resumed from step", self._last_complete(run), "step")
        before = run.step
        process = self._train(data, run, "--resume", every=size.every)
        process.watch(lambda: run.step not in (0, before))
        self._add("resume, seconds to the first step", process.seconds, "s")
        self._watch(process, run, "resume")
        self._memory("resume", process.next_phase())
        return run

    def _last_complete(self, run: RunFolder) -> int:
        return max((int(path.name) for path in (run.path / "checkpoints").iterdir() if path.name.isdigit()), default=0)

    def _checkpoints(self, run: RunFolder) -> None:
        """Figures of the checkpoints that were completed before the kill."""
        took = run.step_seconds(self._size.batch)
        usual = statistics.median(took.values())
        for record in run.checkpoints():
            while_written = [took[step] - usual for step in range(record["of"] + 1, record["step"] + 1) if step in took]
            slower = record["blocking_seconds"] + max(0.0, sum(while_written))
            named = f"checkpoint of step {record['of']}"
            details = {key: value for key, value in record.items() if key not in ("step", "split")}
            self._add(named, record["seconds"], "s", details=details)
            held = record["blocking_seconds"] / record["seconds"]
            self._add(f"{named}, steps held", held, "of its time", limit=HELD)
            self._add(f"{named}, steps held and slower", slower / record["seconds"], "of its time")

    def _same_bits(self, data: pathlib.Path, killed: RunFolder) -> None:
        straight = RunFolder(self._folder / "straight")
        process = self._train(data, straight, every=0)
        self._watch(process, straight, "never interrupted")
        scores = []
        for run in (killed, straight):
            process = JrecProcess("eval", str(run.path), str(data), "--split", "test", "--batches", "20")
            process.watch()
            if run is killed:
                self._memory("evaluation", process.next_phase())
                self._add("evaluation", process.seconds, "s")
            scores.append({k: v for k, v in parsed(process.output()).items() if k != "checkpoint"})
        same = killed.metrics() == straight.metrics() and scores[0] == scores[1]
        self._add("same bits after kill and resume", float(same), "1 for yes", limit=1.0, at_least=True)
        for run in (killed, straight):
            shutil.rmtree(run.path)

    def _step_times(self, data: pathlib.Path, small: pathlib.Path) -> None:
        ratios, milliseconds = [], []
        for pair in range(self._size.pairs):
            sides = {"full": data, "small": small}
            order = list(sides) if pair % 2 == 0 else list(reversed(sides))
            medians = {side: self._median_step(sides[side], f"{side}{pair}") for side in order}
            ratios.append(medians["full"] / medians["small"])
            milliseconds.append(1e3 * medians["full"])
        self._add("step, median", statistics.median(milliseconds), "ms")
        comparison = f"ratio to the same with {SMALL_ROWS // self._size.scale:,} rows in all"
        self._add(f"step, {comparison}", statistics.median(ratios), "x", limit=STEP_RATIO, details={"pairs": ratios})

    def _median_step(self, data: pathlib.Path, name: str) -> float:
        size, run = self._size, RunFolder(self._folder / name)
        process = self._train(data, run, every=0)
        self._watch(process, run, name, until=size.every)
        process.kill()
        took = run.step_seconds(size.batch)
        shutil.rmtree(run.path)
        return statistics.median(seconds for step, seconds in took.items() if step > size.every // 5)

    def _watch(self, process: JrecProcess, run: RunFolder, phase: str, *, until: int | None = None) -> None:
        """Waits for a step, or the end of the run, and shows the steps on a terminal."""
        from rich.console import Console
        from rich.progress import Progress

        total = self._size.steps if until is None else until
        with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as progress:
            bar = progress.add_task(f"{self._name}: {phase}", total=total)

            def reached() -> bool:
                progress.update(bar, completed=run.step)
                return until is not None and run.step >= until

            process.watch(reached)

    def _train(self, data: pathlib.Path, run: RunFolder, *flags: str, every: int) -> JrecProcess:
        config, overrides = self._configuration(data)
        of_run = [f"out={str(run.path)!r}", f"checkpoint.every_steps={every}"]
        return JrecProcess("train", str(config), *overrides, *of_run, *flags, environment=self._environment())

    def _environment(self) -> dict[str, str]:
        """Short runs keep compiled programs; full ones compile as users do, whose memory counts."""
        if self._size.scale == 1:
            return {}
        return {
            "JAX_COMPILATION_CACHE_DIR": str(self._work / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
        }

    def _configuration(self, data: pathlib.Path) -> tuple[pathlib.Path, list[str]]:
        overrides = [
            f"data.path={str(data)!r}",
            f"data.batch_size={self._size.batch}",
            f"max_steps={self._size.steps}",
            "log.every_steps=1",
            "log.tensorboard=false",
            "log.progress='off'",
            "evaluate.every_steps=0",
            "evaluate.final_splits=[]",
            "checkpoint.keep=2",
            *self._case.overrides,
        ]
        if self._case.in_folder:
            overrides.append(f"tables.host.folder={str(self._folder / 'rows')!r}")
        return harness.ROOT / "configs" / self._case.config, overrides

    def _tables(self, data: pathlib.Path) -> tuple[int, int]:
        """Bytes of a run's tables, slots and dense parameters: those in memory, and those in memory-mapped files."""
        import jax
        from flax import nnx

        from jrec.app.build import build_layout, build_modules
        from jrec.app.config import load_config
        from jrec.data.schema import Schema

        config = load_config(*self._configuration(data))
        schema = Schema.load(config.data.path)
        layout = build_layout(config, schema)
        modules = build_modules(config, schema, layout, self._size.steps, abstract=True)
        held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(nnx.state(modules)))
        on_host = 0
        for stack in layout.host_stacks:
            slots = sum(stack.dim if shape == "element" else 1 for shape in modules[1].embedding.slots.values())
            on_host += stack.rows * (stack.dim * jax.numpy.dtype(stack.dtype).itemsize + 4 * slots)
        return (held, on_host) if self._case.in_folder else (held + on_host, 0)

    def _dataset(self, *, small: bool) -> pathlib.Path:
        """Made once; the folder appears when it is complete."""
        from jrec.prepare.synth.shapes import shape_like

        size = self._size
        shape = shape_like(self._case.like)
        rows = sum(shape.rows.values())
        total = (SMALL_ROWS if small else rows) // size.scale
        path = self._work / "data" / f"{self._case.like}-{total}-{size.examples}"
        if not path.is_dir():
            self._report.note(f"{self._name}: making {path}")
            cap = ["--table-rows", str(capped(shape.rows.values(), total))] if total < rows else []
            made = ["synth", "--like", self._case.like, "--rows", str(size.examples), "--out", str(path), *cap]
            subprocess.run([sys.executable, "-m", "jrec", *made], check=True, stdout=subprocess.DEVNULL)
        return path

    def _rows(self, data: pathlib.Path) -> int:
        from jrec.data.schema import Schema

        return sum(table.rows for table in Schema.load(data).tables)

    def _memory(self, phase: str, peak: Peak) -> None:
        value = peak.anonymous if self._case.in_folder else peak.resident
        details = {f"{name}_mb": round(getattr(peak, name) / 1e6, 1) for name in ("resident", "anonymous", "file")}
        self._add(f"peak memory, {phase}", value / 1e6, "MB", limit=self._budget / 1e6, details=details)

    def _add(
        self,
        metric: str,
        value: float,
        unit: str,
        *,
        limit: float | None = None,
        at_least: bool = False,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        """Records a figure; of one with a limit, whether it is met."""
        more = dict(details or {})
        if limit is not None:
            met = value >= limit if at_least else value <= limit
            more |= {"limit": limit, "met": met}
            self._report.note(
                f"{self._name}: {metric} {value:.4g} {unit}, limit {limit:.4g}: {'met' if met else 'MISSED'}"
            )
        self._report.add(self._label, metric, value, unit, details=more or None)
        self._emit(dataclasses.asdict(self._report.results[-1]))


def capped(rows: Iterable[int], total: int) -> int:
    """The largest cap under which these tables have at most ``total`` rows in all; at least 1."""
    rows = list(rows)
    low, high = 1, max(rows)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if sum(min(n, middle) for n in rows) <= total else (low, middle - 1)
    return low


if __name__ == "__main__":
    main()
