"""`jrec` commands as processes of their own, whose memory and progress are watched from outside."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from jrec.app.report.logs import CHECKPOINTS, METRICS_FILE, TIMING_FILE, read_records

_INTERVAL = 0.02  # seconds between samples
_KIB = 1024


@dataclasses.dataclass(kw_only=True)
class Peak:
    """The most memory that a process had in a phase, in bytes.

    Attributes:
      resident: VmHWM of /proc, which the kernel counts itself and which is set back when a phase begins: anonymous
        memory and the pages of files that are mapped, libraries among them.
      anonymous: RssAnon, the largest of samples every 20 ms: without pages of files, which the system can take back.
      file: RssFile, the largest of these samples.
    """

    resident: int = 0
    anonymous: int = 0
    file: int = 0


class JrecProcess:
    """A `jrec` command under watch; end it with ``kill``, or wait with ``watch``.

    Args:
      arguments: The command's arguments.
      environment: Further environment variables.
    """

    def __init__(self, *arguments: str, environment: dict[str, str] | None = None):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "jrec", *arguments],
            env={**os.environ, **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._arguments = arguments
        self._folder = pathlib.Path("/proc", str(self._process.pid))
        self._began = time.perf_counter()
        self.peak = Peak()

    @property
    def seconds(self) -> float:
        """Since the process was started."""
        return time.perf_counter() - self._began

    def next_phase(self) -> Peak:
        """The peak of the phase that ends; the next begins."""
        self._sample()
        ended, self.peak = self.peak, Peak()
        with contextlib.suppress(OSError):  # it may have ended
            (self._folder / "clear_refs").write_text("5")
        return ended

    def watch(self, until: Callable[[], bool] = lambda: False, *, seconds: float = 3600) -> None:
        """Samples memory until the process ends or ``until()`` is true.

        Raises:
          RuntimeError: If the process fails, or takes longer than ``seconds``.
        """
        deadline = time.monotonic() + seconds
        while self._process.poll() is None and not until():
            self._sample()
            if time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"jrec {' '.join(self._arguments)} took more than {seconds:.0f} s")
            time.sleep(_INTERVAL)
        if self._process.returncode not in (None, 0):
            _, errors = self._process.communicate()
            raise RuntimeError(f"jrec {' '.join(self._arguments)} ended with {self._process.returncode}: {errors}")

    def output(self) -> str:
        """Waits for the end; standard output."""
        output, _ = self._process.communicate()
        return output

    def kill(self) -> None:
        """Ends the process by SIGKILL, if it has not ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)
        self._process.communicate()

    def _sample(self) -> None:
        try:
            lines = (self._folder / "status").read_text(encoding="ascii").splitlines()
        except OSError:  # it has ended
            return
        values = {
            name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if _memory(name)
        }
        if values:
            self.peak.resident = max(self.peak.resident, values["VmHWM"] * _KIB)
            self.peak.anonymous = max(self.peak.anonymous, values["RssAnon"] * _KIB)
            self.peak.file = max(self.peak.file, values["RssFile"] * _KIB)


def _memory(name: str) -> bool:
    return name in ("VmHWM", "RssAnon", "RssFile")


class RunFolder:
    """What a run has written so far. Its steps are logged one by one (``log.every_steps=1``)."""

    def __init__(self, path: pathlib.Path):
        self.path = path
        self._size, self._step = -1, 0

    @property
    def step(self) -> int:
        """The last step that was logged; 0 before the first."""
        path = self.path / METRICS_FILE
        size = path.stat().st_size if path.is_file() else 0
        if size != self._size:
            self._size = size
            self._step = max((record["step"] for record in self._records(METRICS_FILE, "train")), default=0)
        return self._step

    def step_seconds(self, batch_size: int, *, start: int = 0) -> dict[int, float]:
        """Seconds of every step after ``start``, of the process that began there; evaluations and waits left out."""
        took, before = {}, 0.0
        for record in self._records(TIMING_FILE, "train"):
            if record["step"] > start:
                seconds = (record["step"] - start) * batch_size / record["examples_per_second"]
                took[record["step"]], before = seconds - before, seconds
        return took

    def checkpoints(self) -> list[dict[str, Any]]:
        """The records of the checkpoints that were completed (``jrec.app.report.logs.CHECKPOINTS``)."""
        return list(self._records(TIMING_FILE, CHECKPOINTS))

    def metrics(self) -> bytes:
        """All that the run logged and that does not depend on the clock."""
        return (self.path / METRICS_FILE).read_bytes()

    def _records(self, name: str, split: str) -> Iterator[dict[str, Any]]:
        path = self.path / name
        if path.is_file():
            yield from (record for record in read_records(path) if record["split"] == split)


def parsed(output: str) -> dict[str, Any]:
    """The JSON object that `jrec eval` printed."""
    return json.loads(output.strip().splitlines()[-1])
