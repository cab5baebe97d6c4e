"""Short trainings of the kinds of model that may suit a dataset, to choose one by its scores on the valid split."""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jrec.app.config import TrainConfig, load_config
from jrec.app.first_config import Candidate, Facts, first_config, render
from jrec.app.loop import train
from jrec.app.report.logs import METRICS_FILE, read_records

EXAMPLES, STEPS = 1_000_000, 8_000
"""Training examples that a trial reads at most, and steps that it takes at most."""
CLOSE = 0.002
"""The share of a log loss by which trials on small valid splits differ by chance."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """How the trial of a kind of model went.

    Attributes:
      candidate: The kind of model.
      log_loss: The least log loss on the valid split that it reached, after the best scale and shift of its logits
        there (``refinement``), in nats per example.
      auc: AUC of that evaluation; None where it is undefined.
      step: The step of that evaluation.
      steps: Steps that it took.
      seconds: Seconds of training.
      records: Its evaluations, as in ``metrics.jsonl``.
    """

    candidate: Candidate
    log_loss: float
    auc: float | None
    step: int
    steps: int
    seconds: float
    records: Sequence[Mapping[str, Any]] = ()

    @property
    def best_step(self) -> int:
        """``step`` where the model got worse after it; 0 where it may have become better still."""
        return self.step if self.step < 0.7 * self.steps else 0


def try_all(
    path: str, facts: Facts, some: Sequence[Candidate], *, on_trial: Callable[[Trial], None] = lambda trial: None
) -> list[Trial]:
    """Trains every candidate on the dataset, as its first configuration says, for at most ``STEPS`` steps.

    Args:
      path: The dataset's folder.
      facts: What the configurations depend on.
      some: The candidates.
      on_trial: Called after each.

    Returns:
      The trials, the best first.

    Raises:
      ConfigError: If the dataset cannot be trained on.
      DatasetError: If the dataset cannot be used.
      KeyboardInterrupt: On SIGINT or SIGTERM.
    """
    trials = []
    with tempfile.TemporaryDirectory(prefix="jrec-init-") as folder:
        for number, candidate in enumerate(some):
            config = _config(path, facts, candidate, pathlib.Path(folder) / str(number))
            outcome = train(config)
            if not outcome.finished:  # a signal, which ends a run with a checkpoint
                raise KeyboardInterrupt
            records = [r for r in read_records(outcome.folder / METRICS_FILE) if r["split"] == "valid"]
            best = min(records, key=lambda record: record["refinement"])
            trials.append(
                Trial(
                    candidate=candidate,
                    log_loss=best["refinement"],
                    auc=best["auc"],
                    step=best["step"],
                    steps=outcome.step,
                    seconds=outcome.seconds,
                    records=records,
                )
            )
            on_trial(trials[-1])
    return best_first(trials)


def best_first(trials: Sequence[Trial]) -> list[Trial]:
    """Trials by log loss, but first the one of the greatest AUC among those that are within ``CLOSE`` of the least."""
    ordered = sorted(trials, key=lambda trial: trial.log_loss)
    close = [trial for trial in ordered if trial.log_loss <= (1 + CLOSE) * ordered[0].log_loss]
    first = max(close, key=lambda trial: trial.auc or 0.0)
    return [first, *(trial for trial in ordered if trial is not first)]


def _config(path: str, facts: Facts, candidate: Candidate, out: pathlib.Path) -> TrainConfig:
    file = out.with_suffix(".toml")
    keys = first_config(path, facts, candidate)
    file.write_text(render("a trial", keys, facts), encoding="utf-8")
    batch = next(key.value for key in keys if key.name == "batch_size")
    watch = ("log.progress=off", "log.tensorboard=false", "evaluate.final_splits=[]", "checkpoint.keep_best=false")
    return load_config(file, [f"out={str(out)!r}", f"max_steps={min(STEPS, -(-EXAMPLES // batch))}", *watch])


def notes_of(trials: Sequence[Trial]) -> list[str]:
    """Lines that say how the trials went."""
    head = f"Each was trained for up to {STEPS:,} steps, and reached on the valid split this log loss, once calibrated:"
    return [head, *(f"  {trial.log_loss:.4f}  {trial.candidate.name}" for trial in trials)]
