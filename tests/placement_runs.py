"""Runs of placements through ``jrec train``, and what they leave: losses, logits, and every array by a plain name."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import re
import socket
import subprocess
import sys

import jax
import numpy as np
import placement_cases as cases
from checkpoint_state import latest
from child_processes import with_devices
from placement_reference import Example, Reference

from jrec.app.config import load_config
from jrec.app.loop import train
from jrec.app.report.logs import SCHEDULE, read_records
from jrec.checkpoint import Saved

TIMEOUT = 600  # seconds, of processes


@dataclasses.dataclass(frozen=True)
class Trace:
    """A run: its folder, the loss of every step, and all arrays by name.

    Of the test split it has the logits of a run in this process, or the mean loss that processes of its own report.
    """

    folder: pathlib.Path
    losses: list[float]
    logits: np.ndarray | None
    arrays: dict[str, np.ndarray]
    log_loss: float | None = None


def arrays_of(saved: Saved) -> dict[str, np.ndarray]:
    """What a checkpoint holds, by the names of ``placement_reference``; slots as ``NAME/SLOT``."""
    found = {}
    for name, record in saved.manifest.tables.items():
        rows = np.arange(record.shape.rows)
        for array in ("values", *record.shape.slots):
            key = name if array == "values" else f"{name}/{array}"
            found[key] = np.asarray(saved.table(name).read(array, rows), np.float32)
    for path, array in saved.arrays().items():
        if dense := re.search(r"(bottom|top)\.layers\.(\d+)\.(kernel|bias)", path):
            slot = "/sum" if "sum_of_squares" in path else ""
            found[f"{dense[1]}.{dense[2]}.{dense[3]}{slot}"] = np.asarray(array, np.float32)
        elif core := re.search(r"\btt_(\w+)\.cores\.(\d+)", path):
            found[f"{core[1]}.core{core[2]}"] = np.asarray(array, np.float32)
        elif slot := re.search(r"\btt_(\w+)\.core(\d+)_(\w+)", path):
            found[f"{slot[1]}.core{slot[2]}/{slot[3]}"] = np.asarray(array, np.float32)
        elif cached := re.search(r"\btt_(\w+)\.cached[._](\w+)", path):
            found[f"{cached[1]}.cached_{cached[2]}"] = np.asarray(array, np.float32)
    return found


class Workplace:
    """Datasets, plans and runs of one session of tests, each made once.

    Args:
      folder: Where to keep them.
    """

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.config = folder / "placements.toml"
        self.config.write_text(cases.CONFIG)
        self.log = functools.cache(self._log)
        self.trace = functools.cache(self._trace)
        self.first = functools.cache(self._first)
        self.data = functools.cache(self._data)

    def _log(self, reordered: bool, dealt: int) -> cases.Log:
        folder = self.folder / f"log-{'reordered' if reordered else 'plain'}-{dealt}"
        return cases.write_log(folder, reordered=reordered, dealt=dealt)

    def log_of(self, placement: cases.Placement) -> cases.Log:
        """The log that a placement trains on; one process takes the batches of several from one that is dealt."""
        return self.log(placement.reordered, max(1, placement.shares // placement.processes))

    def _data(self, placement: cases.Placement) -> pathlib.Path:
        """The dataset folder of a placement."""
        log = self.log_of(placement)
        if placement.hot is None:
            return log.folder
        return cases.write_hot_and_cold(log, self.folder / f"fae-{placement.hot}-{log.folder.name}", placement.hot)

    def keys(self, placement: cases.Placement, optimizer: str, dtype: str) -> list[str]:
        """All overrides of a placement's run."""
        keys = [f"data.path={self.data(placement)}", f"model.table_dtype={dtype}", *cases.optimizer_keys(optimizer)]
        if dtype == "float16" and placement.cores_from is not None:
            keys.append("tables.tt.dtype=float32")  # cores have no float16
        if placement.plan is not None:
            path = self.folder / f"{abs(hash((placement.plan, dtype)))}.plan"
            keys.append(f"plan={placement.plan.write(path, dtype) if not path.exists() else path}")
        if placement.hot is not None:
            keys += ["schedule=fae", "fae.batches=1", "fae.split=test"]
        return [*keys, *placement.keys]

    def _trace(self, name: str, optimizer: str, dtype: str = "float32", steps: int = 0) -> Trace:
        """Trains a placement of ``PLACEMENTS``, for so many steps or to the end of the log."""
        out = f"run-{name}-{optimizer}-{dtype}-{steps}"
        return self.run(cases.PLACEMENTS[name], optimizer, dtype, f"max_steps={steps}", out=out)

    def run(self, placement: cases.Placement, optimizer: str, dtype: str, *more: str, out: str) -> Trace:
        """Trains any placement in a folder of the given name."""
        return self.read(
            self.folder / out, self.train(placement, [*self.keys(placement, optimizer, dtype), *more], out=out)
        )

    def moved(self, move: cases.Move, optimizer: str, out: str) -> Trace:
        """Trains in one placement after the other."""
        logits, first = None, move.placements()[0]
        for (_, steps), placement in zip(move.steps, move.placements(), strict=True):
            keys = [*self.keys(placement, optimizer, move.dtype), f"data.path={self.data(first)}", f"max_steps={steps}"]
            logits = self.train(placement, keys, out=out, resume=True)
        return self.read(self.folder / out, logits)

    def train(
        self, placement: cases.Placement, keys: list[str], *, out: str, resume: bool = False
    ) -> np.ndarray | None:
        """A run in a folder; its logits of the test split, None from processes of its own."""
        keys = [*keys, f"out={self.folder / out}"]
        if placement.processes == 1 and placement.devices <= jax.device_count():
            return np.asarray(train(load_config(self.config, keys), resume=resume).scores["test"].logits)
        for code, said in self.processes(placement, keys, resume=resume):
            assert code == 0, said[-3000:]
        return None

    def read(self, folder: pathlib.Path, logits: np.ndarray | None) -> Trace:
        """What a finished run left."""
        losses = [r["loss"] for r in read_records(folder / "metrics.jsonl") if r["split"] == "train"]
        report = folder / "report" / "metrics.json"
        reported = logits is None and report.exists()
        log_loss = json.loads(report.read_text())["splits"]["test"]["log_loss"] if reported else None
        return Trace(folder, losses, logits, arrays_of(latest(folder)), log_loss)

    def processes(self, placement: cases.Placement, keys: list[str], *, resume: bool = False) -> list[tuple[int, str]]:
        """Exit status and standard error of each of a placement's processes."""
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            coordinator = f"localhost:{probe.getsockname()[1]}"
        environment = with_devices(placement.devices // placement.processes)
        command = [sys.executable, "-m", "jrec", "train", str(self.config), *keys, *(["--resume"] if resume else [])]
        others = ["--coordinator", coordinator, "--processes", str(placement.processes), "--process"]
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        started = [
            subprocess.Popen(
                [*command, *((*others, str(n)) if placement.processes > 1 else ())], env=environment, **pipes
            )
            for n in range(placement.processes)
        ]
        try:
            said = [process.communicate(timeout=TIMEOUT)[1] for process in started]
        finally:
            for process in started:
                if process.poll() is None:
                    process.kill()
                    process.communicate()
        return [(process.returncode, text) for process, text in zip(started, said, strict=True)]

    def _first(self, cores_from: int | None, dtype: str, pooling: tuple[str, ...]) -> dict[str, np.ndarray]:
        """First values, of a run on one device that learns nothing."""
        keys = {None: (), 0: (cases.TT_CORES,), cases.WHOLE_ROWS: (cases.TT_WHOLE,)}[cores_from]
        still = ("max_steps=1", "optimizer.learning_rate=0", "optimizer.embedding.learning_rate=0")
        placement = cases.Placement(keys=(*keys, *pooling), cores_from=cores_from)
        out = f"first-{cores_from}-{dtype}-{'-'.join(key.removeprefix('model.features.') for key in pooling)}"
        self.train(placement, [*self.keys(placement, "sgd", dtype), *still], out=out)
        return {name: array for name, array in arrays_of(latest(self.folder / out)).items() if "/" not in name}

    def reference(self, placement: cases.Placement, optimizer: str, dtype: str) -> Reference:
        """The model in float64, before the first step."""
        cores = {} if placement.cores_from is None else {"word": placement.cores_from}
        first = self.first(placement.cores_from, dtype, placement.pooling_keys)
        of_rows, norm = cases.OPTIMIZERS[optimizer][0], placement.max_global_norm
        return Reference(placement.features, first, of_rows, cases.DENSE, cores, norm)

    def batches(self, placement: cases.Placement, folder: pathlib.Path) -> list[list[Example]]:
        """The batches of a run in the order in which it took them."""
        log = self.log_of(placement)
        if placement.hot is None:
            return cases.batches(log.train, placement.processes)
        hot = cases.hot_rows(placement.hot)
        kinds = [cases.is_hot(example, hot) for example in log.train]
        epoch: dict[bool, list[list[Example]]] = {}
        for kind in (True, False):
            chosen = [example for example, is_hot in zip(log.train, kinds, strict=True) if is_hot == kind]
            epoch[kind] = cases.batches(chosen, placement.processes)
        waiting, taken = {kind: [*batches] for kind, batches in epoch.items()}, []
        # The last records are of the end, or none where the run stopped before a schedule was over.
        for schedule in (r for r in read_records(folder / "metrics.jsonl") if r["split"] == SCHEDULE):
            if not any(waiting.values()):
                waiting = {kind: [*batches] for kind, batches in epoch.items()}
            for kind, count in ((False, schedule["cold"]), (True, schedule["hot"])):
                taken += waiting[kind][:count]
                del waiting[kind][:count]
        return [*taken, *waiting[False], *waiting[True]]
