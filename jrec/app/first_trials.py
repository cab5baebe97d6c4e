"""Short trainings of the kinds of model that may suit a dataset, to choose one by its scores on the valid split."""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile
from collections.abc import Callable, Sequence

from jrec.app.callbacks import Callback
from jrec.app.config import TrainConfig, load_config
from jrec.app.first_rules import Choice, Metric, Rules, render
from jrec.app.loop import train
from jrec.app.report.content import Records
from jrec.app.report.logs import METRICS_FILE, read_records

STEPS = 8_000
"""Steps that a trial takes at most."""
CLOSE = 0.002
"""The share of a score by which trials on small valid splits differ by chance."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial[C: Choice]:
    """How the trial of a kind of model went.

    Attributes:
      candidate: The kind of model.
      score: The best of the metric on the valid split (``Rules.metric``) that it reached.
      beside: The metric beside it (``Metric.beside``) of that evaluation; None where there is none or it is undefined.
      step: The step of that evaluation.
      steps: Steps that it took.
      seconds: Seconds of training.
      records: Its evaluations, as in ``metrics.jsonl``.
      seed: Its seed.
    """

    candidate: C
    score: float
    beside: float | None
    step: int
    steps: int
    seconds: float
    records: Records = ()
    seed: int = 0

    @property
    def best_step(self) -> int:
        """``step`` where the model got worse after it; 0 where it may have become better still."""
        return self.step if self.step < 0.7 * self.steps else 0


def try_all[C: Choice](
    path: str, rules: Rules[C], some: Sequence[C], *, on_trial: Callable[[Trial[C]], None] = lambda trial: None
) -> list[Trial[C]]:
    """Trains every candidate on the dataset, as its first configuration says, for at most ``STEPS`` steps.

    Args:
      path: The dataset's folder.
      rules: What the configurations follow from.
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
        trial = tried(path, rules, candidate)
        assert trial is not None  # nothing cuts it short
        trials.append(trial)
        on_trial(trial)
    return best_first(trials, rules.metric)


def tried[C: Choice](
    path: str, rules: Rules[C], candidate: C, *, seed: int = 0, callbacks: Sequence[Callback] = ()
) -> Trial[C] | None:
    """Trains a candidate on the dataset; arguments and errors as of ``try_all``, callbacks as of ``train``.

    Returns:
      The trial; None where a callback ended it before its first evaluation.
    """
    with tempfile.TemporaryDirectory(prefix="jrec-init-") as folder:
        config = trial_config(path, rules, candidate, pathlib.Path(folder) / "run", seed)
        outcome = train(config, callbacks=callbacks, stoppable=False)  # nothing would go on from a checkpoint
        records = [r for r in read_records(outcome.folder / METRICS_FILE) if r["split"] == "valid"]
    if not records:
        return None
    metric = rules.metric
    best = min(records, key=lambda record: metric.loss(record[metric.key]))
    return Trial(
        candidate=candidate,
        score=best[metric.key],
        beside=best.get(metric.beside[0]) if metric.beside else None,
        step=best["step"],
        steps=outcome.step,
        seconds=outcome.seconds,
        records=records,
        seed=seed,
    )


def best_first[C: Choice](trials: Sequence[Trial[C]], metric: Metric) -> list[Trial[C]]:
    """Trials by score, but first the one that is best by the metric beside it among those within ``CLOSE`` of the best.

    Trials of other seeds than the first, which tell what is chance, are the last.
    """
    ordered = sorted((trial for trial in trials if not trial.seed), key=lambda trial: metric.loss(trial.score))
    least = metric.loss(ordered[0].score)
    close = [trial for trial in ordered if metric.loss(trial.score) <= least + CLOSE * abs(least)]
    # ``max`` takes the first of equals, which is the best by the metric itself.
    first = max(close, key=lambda trial: trial.beside or 0.0)
    return [first, *(trial for trial in ordered if trial is not first), *(trial for trial in trials if trial.seed)]


def spread(trials: Sequence[Trial[Choice]]) -> float | None:
    """By how much the scores of one candidate with two seeds differ; None where none has two."""
    for other in (trial for trial in trials if trial.seed):
        same = (trial for trial in trials if not trial.seed and trial.candidate == other.candidate)
        return max(abs(trial.score - other.score) for trial in same)
    return None


def trial_config[C: Choice](path: str, rules: Rules[C], candidate: C, out: pathlib.Path, seed: int = 0) -> TrainConfig:
    """The configuration of a trial, whose run is ``out``."""
    file = out.with_suffix(".toml")
    keys = rules.config(path, candidate)
    file.write_text(render("a trial", keys, rules), encoding="utf-8")
    batch = next(key.value for key in keys if key.name == "batch_size")
    watch = ("log.progress=off", "log.tensorboard=false", "evaluate.final_splits=[]", "checkpoint.keep_best=false")
    most = min(STEPS, -(-rules.trial_examples // batch))
    return load_config(file, [f"out={str(out)!r}", f"max_steps={most}", f"seed={seed}", *watch])


def notes_of(trials: Sequence[Trial[Choice]], metric: Metric) -> list[str]:
    """Lines that say how the trials went."""
    name = f"{metric.name}, once calibrated" if metric.calibrated else metric.name
    head = f"Each was trained for up to {STEPS:,} steps, and reached on the valid split this {name}:"
    return [head, *(f"  {trial.score:.4f}  {trial.candidate.title}" for trial in trials if not trial.seed)]
