"""Short trainings of the kinds of model that may suit a dataset, to choose one by its scores on the valid split."""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jrec.app.callbacks import Callback
from jrec.app.config import TrainConfig, load_config
from jrec.app.first_config import Candidate, Facts, first_config, render
from jrec.app.loop import train
from jrec.app.report.logs import METRICS_FILE, read_records

EXAMPLES, STEPS = 1_000_000, 8_000
"""Training examples that a trial reads at most, and steps that it takes at most."""
CLOSE = 0.002
"""The share of a score by which trials on small valid splits differ by chance."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """How the trial of a kind of model went.

    Attributes:
      candidate: The kind of model.
      score: The least of the metric on the valid split (``Facts.metric``) that it reached: log loss after the best
        scale and shift of its logits there, in nats per example, or RMSE.
      auc: AUC of that evaluation; None where it is undefined, as where the label is a number.
      step: The step of that evaluation.
      steps: Steps that it took.
      seconds: Seconds of training.
      records: Its evaluations, as in ``metrics.jsonl``.
      seed: Its seed.
    """

    candidate: Candidate
    score: float
    auc: float | None
    step: int
    steps: int
    seconds: float
    records: Sequence[Mapping[str, Any]] = ()
    seed: int = 0

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
    for candidate in some:
        trial = tried(path, facts, candidate)
        assert trial is not None  # nothing cuts it short
        trials.append(trial)
        on_trial(trial)
    return best_first(trials)


def tried(
    path: str, facts: Facts, candidate: Candidate, *, seed: int = 0, callbacks: Sequence[Callback] = ()
) -> Trial | None:
    """Trains a candidate on the dataset; arguments and errors as of ``try_all``, callbacks as of ``train``.

    Returns:
      The trial; None where a callback ended it before its first evaluation.
    """
    with tempfile.TemporaryDirectory(prefix="jrec-init-") as folder:
        outcome = train(trial_config(path, facts, candidate, pathlib.Path(folder) / "run", seed), callbacks=callbacks)
        if not outcome.finished:  # a signal, which ends a run with a checkpoint
            raise KeyboardInterrupt
        records = [r for r in read_records(outcome.folder / METRICS_FILE) if r["split"] == "valid"]
    if not records:
        return None
    metric, _, _ = facts.metric
    best = min(records, key=lambda record: record[metric])
    return Trial(
        candidate=candidate,
        score=best[metric],
        auc=best.get("auc"),
        step=best["step"],
        steps=outcome.step,
        seconds=outcome.seconds,
        records=records,
        seed=seed,
    )


def best_first(trials: Sequence[Trial]) -> list[Trial]:
    """Trials by score, but first the one of the greatest AUC among those that are within ``CLOSE`` of the least.

    Those of other seeds than the first, which tell what is chance, are the last.
    """
    ordered = sorted((trial for trial in trials if not trial.seed), key=lambda trial: trial.score)
    close = [trial for trial in ordered if trial.score <= (1 + CLOSE) * ordered[0].score]
    first = max(close, key=lambda trial: trial.auc or 0.0)
    return [first, *(trial for trial in ordered if trial is not first), *(trial for trial in trials if trial.seed)]


def spread(trials: Sequence[Trial]) -> float | None:
    """By how much the scores of one candidate with two seeds differ; None where none has two."""
    for other in (trial for trial in trials if trial.seed):
        same = (trial for trial in trials if not trial.seed and trial.candidate == other.candidate)
        return max(abs(trial.score - other.score) for trial in same)
    return None


def trial_config(path: str, facts: Facts, candidate: Candidate, out: pathlib.Path, seed: int = 0) -> TrainConfig:
    """The configuration of a trial, whose run is ``out``."""
    file = out.with_suffix(".toml")
    keys = first_config(path, facts, candidate)
    file.write_text(render("a trial", keys, facts), encoding="utf-8")
    batch = next(key.value for key in keys if key.name == "batch_size")
    watch = ("log.progress=off", "log.tensorboard=false", "evaluate.final_splits=[]", "checkpoint.keep_best=false")
    most = min(STEPS, -(-EXAMPLES // batch))
    return load_config(file, [f"out={str(out)!r}", f"max_steps={most}", f"seed={seed}", *watch])


def notes_of(trials: Sequence[Trial], facts: Facts) -> list[str]:
    """Lines that say how the trials went."""
    metric = facts.metric[1] if facts.numeric else f"{facts.metric[1]}, once calibrated"
    head = f"Each was trained for up to {STEPS:,} steps, and reached on the valid split this {metric}:"
    return [head, *(f"  {trial.score:.4f}  {trial.candidate.title}" for trial in trials if not trial.seed)]
