"""Start-up: how long ``jrec eval`` of two batches and ``jrec train`` of five steps take, in whole processes.

With ``--against FOLDER``, another checkout of jrec takes turns with this one. In "warm" runs, bytecode, native kernels
and compiled programs are where earlier runs left them; in "cold" ones only bytecode and native kernels, and with "no
kernels" only bytecode, as after an update of jrec.

Examples:
  python -m benchmarks.startup --quick
  python -m benchmarks.startup --against ../jrec-before --out benchmarks/results/cpu-2-cores/startup.jsonl
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from benchmarks import harness

ROWS = 60_000
STEPS, BATCHES = 5, 2
PROGRAMS = "cache/jrec"
EVALUATION = "import jrec.app.evaluate"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkout:
    """A checkout whose command is timed, with caches of its own.

    Attributes:
      root: The checkout.
      work: A folder for caches, the dataset and the run.
    """

    root: pathlib.Path
    work: pathlib.Path

    def python(self, *arguments: str) -> float:
        """Runs Python with the checkout's jrec; returns the seconds of the whole process.

        Raises:
          SystemExit: With what it printed, if it fails.
        """
        dropped = ("PYTHONDONTWRITEBYTECODE", "JAX_COMPILATION_CACHE_DIR")
        environment = {name: value for name, value in os.environ.items() if name not in dropped}
        environment |= {
            "PYTHONPATH": str(self.root),
            "PYTHONPYCACHEPREFIX": str(self.work / "bytecode"),
            "NUMBA_CACHE_DIR": str(self.work / "kernels"),
            "XDG_CACHE_HOME": str(self.work / "cache"),
        }
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.work,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        seconds = time.perf_counter() - start
        if done.returncode:
            raise SystemExit(f"{self.root}: {' '.join(arguments)} failed:\n{done.stdout}")
        return seconds

    def jrec(self, *arguments: str) -> float:
        """Runs the command."""
        return self.python("-m", "jrec", *arguments)

    def train(self, *overrides: str, folder: str = "run") -> float:
        """Trains five steps of the quickstart's model from the beginning, evaluates, and writes the report."""
        config = str(self.root / "configs" / "quickstart.toml")
        return self.jrec("train", config, "data.path=data", f"out={folder}", f"max_steps={STEPS}", *overrides)

    def prepare(self) -> None:
        """Makes the dataset and a trained run, and thereby all caches."""
        self.work.mkdir()
        self.jrec("synth", "--like", "quickstart", "--rows", str(ROWS), "--out", "data")
        for _ in range(2):
            self.train("--overwrite")
            self.evaluate()

    def evaluate(self) -> float:
        """Evaluates two batches."""
        return self.jrec("eval", "run", "data", "--batches", str(BATCHES))

    def without(self, *caches: str) -> None:
        """Empties caches."""
        for name in caches:
            shutil.rmtree(self.work / name, ignore_errors=True)


def _cold(checkout: Checkout, caches: tuple[str, ...], run: Callable[[], float]) -> float:
    checkout.without(*caches)
    return run()


CASES: dict[str, tuple[str, Callable[[Checkout], float]]] = {
    "imports": ("what jrec eval imports", lambda c: c.python("-c", EVALUATION)),
    "eval": (f"jrec eval, {BATCHES} batches, warm", lambda c: c.evaluate()),
    "train": (f"jrec train, {STEPS} steps, warm", lambda c: c.train("--overwrite")),
    "resume": ("jrec train --resume, one more step, warm", lambda c: _resumed(c)),
    "eval-cold": (f"jrec eval, {BATCHES} batches, cold", lambda c: _cold(c, (PROGRAMS,), c.evaluate)),
    "train-cold": (f"jrec train, {STEPS} steps, cold", lambda c: _cold(c, (PROGRAMS,), lambda: c.train("--overwrite"))),
    "train-no-kernels": (
        f"jrec train, {STEPS} steps, no kernels",
        lambda c: _cold(c, (PROGRAMS, "kernels"), lambda: c.train("--overwrite")),
    ),
}


def _resumed(checkout: Checkout) -> float:
    shutil.rmtree(checkout.work / "resumed", ignore_errors=True)
    shutil.copytree(checkout.work / "run", checkout.work / "resumed")
    return checkout.train(f"max_steps={STEPS + 1}", "--resume", folder="resumed")


def main() -> None:
    """Runs the benchmark."""
    parser = harness.parser(__doc__)
    parser.add_argument(
        "--case", nargs="+", choices=tuple(CASES), help="which; all by default, with --quick imports and eval"
    )
    parser.add_argument(
        "--against", type=pathlib.Path, metavar="FOLDER", help="another checkout of jrec to compare with"
    )
    arguments = parser.parse_args()
    chosen = arguments.case or (("imports", "eval") if arguments.quick else tuple(CASES))
    with tempfile.TemporaryDirectory() as folder, harness.Report(arguments, "startup") as report:
        own = Checkout(root=harness.ROOT, work=pathlib.Path(folder) / "own")
        other = None
        if arguments.against is not None:
            other = Checkout(root=arguments.against.resolve(), work=pathlib.Path(folder) / "other")
        for checkout in (own, other):
            if checkout is not None:
                checkout.prepare()
        for name in chosen:
            metric, run = CASES[name]
            _measure(report, metric, run, own, other)


def _measure(
    report: harness.Report, metric: str, run: Callable[[Checkout], float], own: Checkout, other: Checkout | None
) -> None:
    theirs = None if other is None else (lambda: run(other))
    peer = None if other is None else _commit(other.root)
    report.compare("quickstart", metric, lambda: run(own), peer=peer, theirs=theirs, seconds=0, warmup=1)


def _commit(root: pathlib.Path) -> str:
    described = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    done = subprocess.run(described, cwd=root, capture_output=True, text=True, check=False)
    return done.stdout.strip() or root.name


if __name__ == "__main__":
    main()
