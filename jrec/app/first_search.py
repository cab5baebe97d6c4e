"""``jrec init --minutes``: the best kind of model, then its dims, rates and dropout one by one, while there is time.

Trials are kept in a file as they end: the same command goes on where it was interrupted, and one with more minutes goes
on from what was tried.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import time
from collections.abc import Callable, Sequence

import jrec
from jrec.app.callbacks import Event
from jrec.app.config.typed_toml import MOST
from jrec.app.first_rules import Choice, Rules, render
from jrec.app.first_trials import STEPS, Trial, best_first, tried
from jrec.app.report.content import Record
from jrec.app.report.logs import JsonLines, read_records, truncate_after
from jrec.data.identity import Identity

_RECORDED = tuple(field.name for field in dataclasses.fields(Trial) if field.name != "candidate")
_OVER = 1.1  # of the minutes, after which the trial under way ends, too


def search[C: Choice](
    path: str,
    rules: Rules[C],
    some: Sequence[C],
    *,
    minutes: float,
    kept: pathlib.Path,
    dataset: Identity,
    on_trial: Callable[[Trial[C], float], None],
) -> list[Trial[C]]:
    """Tries candidates, then variants of the best one, until the time is over.

    Args:
      path: The dataset's folder.
      rules: What the configurations follow from.
      some: The kinds of model; the first is tried however little time there is.
      minutes: How long new trials may take; those that are kept take none.
      kept: The file of trials, which is made, or added to.
      dataset: The dataset; trials on another one are not taken up.
      on_trial: Called after each trial, kept or new, with the seconds that are left.

    Returns:
      The trials, the best first.

    Raises:
      KeyboardInterrupt: On SIGINT or SIGTERM; trials that ended before are kept.
    """
    clock, metric = _Clock(60 * minutes), rules.metric
    with _Kept(kept, [dataset.rows, dataset.examples, rules.trial_examples]) as before:

        def tries(candidate: C, seed: int = 0) -> bool:
            config = render("a trial", rules.config(path, candidate), rules)
            if (trial := before.of(config, candidate, seed)) is None:
                # As long as the longest of the last three took: one that is cut short says nothing, and costs as much.
                if trials and not clock.has(max(own.seconds for own in trials[-3:])):
                    return False
                trial = tried(path, rules, candidate, seed=seed, callbacks=[clock.watch] if trials else [])
                if trial is None or (trials and clock.over):
                    return False  # it was cut short, which says nothing of the model
                before.keep(config, trial)
            on_trial(trial, clock.left)
            trials.append(trial)
            return True

        trials: list[Trial[C]] = []
        for candidate in some:
            tries(candidate)
        tries(best_first(trials, metric)[0].candidate, seed=1)  # how much is chance
        done, goes_on = {_values(trial.candidate) for trial in trials}, True
        while goes_on:
            left = (c for c in best_first(trials, metric)[0].candidate.variants() if _values(c) not in done)
            if goes_on := (candidate := next(left, None)) is not None:
                done.add(_values(candidate))
                goes_on = tries(candidate)
        return best_first(trials, metric)


def _values(candidate: Choice) -> str:
    """What a candidate trains, as a text: two of one text are one."""
    return repr(dataclasses.replace(candidate, name="", tuned={}))


class _Clock:
    def __init__(self, seconds: float):
        self._end, self._budget = time.monotonic() + seconds, seconds

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return max(0.0, self._end - time.monotonic())

    @property
    def over(self) -> bool:
        """Whether a trial under way must end."""
        return time.monotonic() > self._end + (_OVER - 1) * self._budget

    def has(self, seconds: float) -> bool:
        """Whether there is time for a trial of about this many seconds."""
        return self.left > seconds

    def watch(self, event: Event) -> None:
        """Ends a trial that takes longer than was thought."""
        if self.over:
            event.stop()


class _Kept:
    """Trials in a file, by what they trained on which data."""

    def __init__(self, path: pathlib.Path, about: Sequence[object]):
        self._about = [jrec.__version__, *about, STEPS]
        self._trials: dict[str, Record] = {}
        if path.is_file():
            # A kill may have left half a line, which the next trial's would go on.
            truncate_after(path, MOST)
            self._trials = {record["trial"]: record for record in read_records(path) if "trial" in record}
        self._file = JsonLines(path)

    def of[C: Choice](self, config: str, candidate: C, seed: int) -> Trial[C] | None:
        """The trial of a configuration, if there was one."""
        record = self._trials.get(self._digest(config, seed))
        if record is None or not record.keys() >= {*_RECORDED}:
            return None
        return Trial(candidate=candidate, **{name: record[name] for name in _RECORDED})

    def keep(self, config: str, trial: Trial[Choice]) -> None:
        """Adds a trial."""
        values = {name: getattr(trial, name) for name in _RECORDED}
        digest = self._digest(config, trial.seed)
        self._file.write({"trial": digest, "model": trial.candidate.title, **values})

    def _digest(self, config: str, seed: int) -> str:
        return hashlib.sha256(json.dumps([*self._about, config, seed]).encode()).hexdigest()

    def __enter__(self) -> _Kept:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
