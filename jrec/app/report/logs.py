"""Metrics of a run as JSON lines and TensorBoard files.

    RUN/metrics.jsonl   {"step": 100, "split": "train", "loss": 0.48}
                        {"step": 100, "split": "valid", "auc": 0.78, "log_loss": 0.47, ...}
    RUN/timing.jsonl    {"step": 100, "split": "train", "examples_per_second": 81234.5}
                        {"step": 107, "split": "checkpoint", "of": 100, "blocking_seconds": 0.02, "seconds": 1.4}
    RUN/tensorboard/    metrics and rates, for TensorBoard

``metrics.jsonl`` holds nothing that depends on the clock, so that a run that was killed and resumed has the same file,
byte for byte, as an uninterrupted one.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from jrec.app.report.trackers import Trackers
from jrec.errors import CheckpointError, DivergedError
from jrec.json_values import JsonObject
from jrec.optional_packages import explains_missing
from jrec.outputs import check_local, writing

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter

SCHEDULE = "schedule"
"""In place of a split: the records of FAE's schedules (``jrec.app.shuffle_scheduler.Schedule``)."""
PROGRESSIVE = "progressive"
"""In place of a split: the records of windows of training that were scored before it (``jrec.app.progressive``). Those
of further labels are called "progressive/TASK"."""
FORMS = "forms"
"""In place of a split: the record, at step 0, of how a mesh looks rows up (``LookupModes.record``)."""
LENGTHS = "length"
"""In place of a split: the records, in ``timing.jsonl``, of resumptions with another length of the run."""
CHECKPOINTS = "checkpoint"
"""In place of a split, in ``timing.jsonl`` only: how long a checkpoint took. ``of`` is its step, and the record's step
the one at which it was complete; of its ``seconds``, training waited ``blocking_seconds``."""
METRICS_FILE = "metrics.jsonl"
TIMING_FILE = "timing.jsonl"
TENSORBOARD_FOLDER = "tensorboard"


class JsonLines:
    """Appends records to a file of JSON lines. The operating system has each record when ``write`` returns."""

    def __init__(self, path: str | os.PathLike[str]):
        self._path = pathlib.Path(path)
        # Append mode writes at the end as it is then, also after ``truncate_after`` has cut the file meanwhile. No
        # buffer: what a kill leaves is whole records, but for the last.
        self._file = self._path.open("ab", buffering=0)

    def write(self, record: Mapping[str, object]) -> None:
        """Appends one record; NumPy and JAX scalars count as numbers.

        Raises:
          ValueError: If the record holds a NaN or an infinity, which JSON lacks.
          OutputError: If it cannot be written.
        """
        line = json.dumps(_plain(record), allow_nan=False, separators=(", ", ": ")) + "\n"
        rest = memoryview(line.encode())
        with writing(self._path):
            while rest:  # the system may take less than it is given
                rest = rest[self._file.write(rest) :]

    def sync(self) -> None:
        """Returns when everything written is on disk."""
        with writing(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def read_records(path: str | os.PathLike[str]) -> Iterator[JsonObject]:
    """The records of a file of JSON lines, without an incomplete last line, which a killed run may leave.

    Raises:
      CheckpointError: If any other line is no record with a step.
    """
    for record, _ in _records(pathlib.Path(path)):
        yield record


def truncate_after(path: str | os.PathLike[str], step: int) -> None:
    """Cuts a file of JSON lines after the last record of ``step`` or before, for a run that resumes from there.

    Steps never descend in a file, so all following records are later. An absent file stays absent.

    Raises:
      CheckpointError: If a line that would be kept is no record with a step.
    """
    path = pathlib.Path(path)
    if not path.exists():
        return
    keep = 0
    for record, end in _records(path):
        if record["step"] > step:
            break
        keep = end
    if keep < path.stat().st_size:
        os.truncate(path, keep)


class MetricLog:
    """Appends the metrics of a run to the logs in its folder.

    Args:
      folder: The run folder; made if absent.
      tensorboard: Whether to write TensorBoard files too.
      trackers: Services that get every record too; closed with the log.
    """

    def __init__(self, folder: str | os.PathLike[str], *, tensorboard: bool, trackers: Trackers | None = None):
        check_local(folder)
        self._folder = pathlib.Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._metrics = JsonLines(self._folder / METRICS_FILE)
        self._timing = JsonLines(self._folder / TIMING_FILE)
        self._tensorboard, self._trackers = tensorboard, trackers
        self._writer: SummaryWriter | None = None
        self._step = -1
        self._purge_step: int | None = None

    def truncate_after(self, step: int) -> None:
        """Drops every record after ``step``, from which the run goes on. -1 drops all.

        Raises:
          CheckpointError: If a line of an earlier record is damaged.
        """
        for name in (METRICS_FILE, TIMING_FILE):
            truncate_after(self._folder / name, step)
        self._step, self._purge_step = step, step + 1

    def write(
        self,
        step: int,
        metrics: Mapping[str, object],
        *,
        split: str = "train",
        timing: Mapping[str, object] | None = None,
    ) -> None:
        """Records metrics of ``split`` at ``step``.

        Args:
          step: The step, not below the last record's.
          metrics: Numbers, NumPy or JAX scalars, None for undefined; ``Evaluation.to_dict()`` for example. The same for
            every run of the same configuration.
          split: The split that they were measured on.
          timing: Values that depend on the clock.

        Raises:
          DivergedError: If a metric is NaN or infinite; nothing is recorded then.
          ValueError: If ``step`` is before one recorded earlier.
        """
        if step < self._step:
            raise ValueError(f"metrics of step {step} come after those of step {self._step}")
        self._step = step
        plain, clock = _plain(metrics), _plain(timing or {})
        for name, value in plain.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise DivergedError(
                    f"{split} {name} is {value} at step {step:,}: training has diverged; lower the learning rates"
                )
        self._metrics.write({"step": step, "split": split, **plain})
        if clock:
            self._timing.write({"step": step, "split": split, **clock})
        if self._tensorboard:
            for name, value in {**plain, **clock}.items():
                if isinstance(value, int | float):
                    self._board().add_scalar(f"{split}/{name}", value, step)
        if self._trackers is not None:
            self._trackers.write(step, split, {**plain, **clock})

    def write_timing(self, step: int, timing: Mapping[str, object], *, split: str) -> None:
        """Records only values that depend on the clock.

        Args:
          step: The step, not below the last record's.
          timing: Numbers, NumPy or JAX scalars.
          split: The kind of record, such as ``CHECKPOINTS``.
        """
        self._timing.write({"step": step, "split": split, **_plain(timing)})

    @explains_missing
    def _board(self) -> SummaryWriter:
        if self._writer is None:
            from tensorboardX import SummaryWriter

            self._writer = SummaryWriter(str(self._folder / TENSORBOARD_FOLDER), purge_step=self._purge_step)
        return self._writer

    def sync(self) -> None:
        """Puts everything on disk. Call it before a checkpoint of the same step is completed."""
        self._metrics.sync()
        self._timing.sync()
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Closes all files."""
        self._metrics.close()
        self._timing.close()
        if self._writer is not None:
            self._writer.close()
        if self._trackers is not None:
            self._trackers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _records(path: pathlib.Path) -> Iterator[tuple[JsonObject, int]]:
    """Records and their end offsets in bytes."""
    end = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            end += len(line)
            try:
                record = json.loads(line)
                int(record["step"])
            except (ValueError, KeyError, TypeError) as error:
                raise CheckpointError(
                    f"{path}: line {number} is no record of metrics: {line[:60]!r}; remove that line, or start anew in"
                    " another folder"
                ) from error
            yield record, end


def _plain(value: Any) -> Any:
    """Mappings with every NumPy or JAX scalar turned into a Python number."""
    if isinstance(value, Mapping):
        return {name: _plain(v) for name, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value.item() if hasattr(value, "item") else value
