"""``jrec train`` on a GPU as a user runs it: examples a second, and the share of the time that the GPU is busy.

A synthesized log of Kaggle's and of DLRM-DCNv2's shape is trained for some epochs. While steps go on,
nvidia-smi is asked which share of the last moments a kernel was running in: at 100 % the GPU never waits for its host.

Examples:
  python -m benchmarks.gpu_train
  python -m benchmarks.gpu_train --model kaggle --tiny
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time

from benchmarks import gpu_run, harness, resume
from jrec.ops.verdicts import KERNELS_VARIABLE

# synth's log, its options, the configuration, the batch, the examples to train on, epochs, and steps between two rates
MODELS = {
    "kaggle": ("criteo-kaggle", ("--table-rows", "2000000"), "criteo_kaggle.toml", 2048, 409_600, 10, 64),
    "kaggle, large batch": ("criteo-kaggle", ("--table-rows", "2000000"), "criteo_kaggle.toml", 16384, 819_200, 10, 16),
    "dcnv2": ("mlperf-dlrm-dcnv2", ("--scale", "1/256"), "mlperf_dlrm_dcnv2.toml", 6912, 221_184, 10, 16),
}
DEFAULT = ("kaggle", "dcnv2")
SECONDS = 100  # of one command
EVERY = 0.1  # seconds between two looks at the GPU


class Watch:
    """Asks nvidia-smi in a thread how busy the first GPU is, for as long as the context lasts."""

    def __init__(self) -> None:
        self.busy: list[float] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-i", "0"]
        while not self._over.wait(EVERY):
            try:
                self.busy.append(float(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
            except (OSError, ValueError, subprocess.SubprocessError):
                return


def measure(report: harness.Report, name: str, *, threads: list[int], tiny: bool) -> None:
    """Synthesizes the model's log, trains on it with each number of loader threads, and reports the steady rates."""
    like, options, config, batch, examples, epochs, every = MODELS[name]
    if tiny:
        options, batch, examples, epochs, every = ("--table-rows", "100"), 64, 384, 2, 4
    with tempfile.TemporaryDirectory() as folder:
        data = pathlib.Path(folder) / "data"
        rows = str(examples * 10 // 8)  # of which 80 % are trained on
        _jrec("synth", "--like", like, "--rows", rows, "--seed", "0", *options, "--out", str(data), "--quiet")
        for count in threads:
            run = pathlib.Path(folder) / f"run-{count}"
            overrides = {
                "data.path": str(data), "data.batch_size": batch, "data.eval_batch_size": batch, "out": str(run),
                "data.workers": count, "lr_schedule.kind": "constant", "checkpoint.every_steps": 0,
                "evaluate.every_steps": 0, "evaluate.baselines": "off", "evaluate.batches": 1,
                "log.every_steps": every, "epochs": epochs, "log.tensorboard": False, "log.progress": "off",
            }  # fmt: skip
            # TOML writes strings, numbers and booleans as JSON does.
            words = [f"{key}={json.dumps(value)}" for key, value in overrides.items()]
            begin = time.monotonic()
            with Watch() as watch:
                _jrec("train", f"configs/{config}", *words)
            took = time.monotonic() - begin
            lines = [json.loads(line) for line in (run / "timing.jsonl").read_text().splitlines()]
            rates = [line["examples_per_second"] for line in lines if line.get("split") == "train"]
            steady = rates[len(rates) // 3 :]  # files are read for the first time, and programs compiled, in the first
            case = f"jrec train, {name}, batch {batch:,}, {count} loader threads"
            details = {"slowest": min(steady), "fastest": max(steady), "records of steps": every}
            report.add(case, "training", statistics.median(steady), "examples/s", details=details)
            report.add(case, "whole command", took, "s", details={"steps": examples * epochs // batch})
            if working := [busy for busy in watch.busy if busy > 0]:
                details = {"looks": len(working), "most": max(working)}
                report.add(case, "GPU busy, where it is", statistics.median(working), "%", details=details)


def _jrec(*words: str) -> None:
    command = [sys.executable, "-m", "jrec", *words]
    # The kernels are not checked again: a check takes longer than these runs.
    environment = {KERNELS_VARIABLE: "pallas", **os.environ}
    done = subprocess.run(
        command, cwd=harness.ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    if done.returncode:
        raise ValueError(f"jrec {words[0]} exited with {done.returncode}: {(done.stdout + done.stderr)[-1500:]}")


def work(arguments: argparse.Namespace, report: harness.Report, cases: resume.Cases) -> None:
    """Measures every model that was asked for."""
    how = {"threads": arguments.threads, "tiny": arguments.tiny}
    cases.run({name: functools.partial(measure, report, name, **how) for name in arguments.model})


def main() -> None:
    """Measures the models."""
    parser = gpu_run.parser(__doc__)
    parser.add_argument("--model", nargs="+", choices=tuple(MODELS), default=list(DEFAULT))
    parser.add_argument("--threads", nargs="+", type=int, default=[2, 8], help="threads that read and pack")
    arguments = parser.parse_args()
    gpu_run.run(arguments, "gpu_train", functools.partial(work, arguments))


if __name__ == "__main__":
    main()
