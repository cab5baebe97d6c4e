"""Trainings in this process, as `jrec train` does them: what the benchmarks of accuracy share."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jrec.app.config import TrainConfig
    from jrec.app.loop import Outcome
    from jrec.metrics import Evaluation

CURVE = 8  # evaluations on the way


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """A finished training.

    Attributes:
      config: The configuration that it was trained with.
      outcome: What ``jrec.app.loop.train`` returned.
      test: All metrics of the split test.
      curve: What the valid split's evaluations on the way found, in order of the steps.
    """

    config: TrainConfig
    outcome: Outcome
    test: Evaluation
    curve: tuple[dict[str, Any], ...]

    def score(self, metric: str) -> float:
        """A metric of the split test.

        Raises:
          SystemExit: The split does not define it: it has one label only.
        """
        value = getattr(self.test, metric)
        if value is None:
            raise SystemExit(f"the test split of {self.config.data.path} has no {metric}: {self.test.undefined}")
        return value


def compile_once(folder: pathlib.Path) -> None:
    """Keeps compiled programs in ``folder``: runs of other seeds are the same programs."""
    import jax

    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def train(
    path: pathlib.Path, data: pathlib.Path, seed: int, overrides: Sequence[str], *, curve_of: pathlib.Path | None = None
) -> Trained:
    """Trains, in a folder beside the dataset that the next training overwrites.

    Args:
      path: The configuration.
      data: The prepared dataset, or the one that `jrec fae pack` made of it.
      seed: The run's seed.
      overrides: Overrides of the configuration, "KEY=VALUE".
      curve_of: The prepared dataset, to evaluate its whole valid split ``CURVE`` times on the way, the last time at the
        end or shortly before; None for no evaluations on the way.

    Raises:
      SystemExit: A signal stopped the run.
    """
    from jrec.app.config import load_config
    from jrec.app.loop import train as train_run
    from jrec.metrics import Scores, evaluate

    places = (f"data.path={str(data)!r}", f"out={str(data.with_name('run'))!r}", f"seed={seed}")
    watch = ("log.progress=off", "log.tensorboard=false", "checkpoint.every_steps=0", "evaluate.baselines=off")
    watch += ("evaluate.batches=0", "evaluate.every_steps=0", "evaluate.final_splits=['test']")
    config = load_config(path, [*places, *watch, *overrides])
    if curve_of is not None:
        every = config.epochs * _steps(curve_of, config.data.batch_size) // CURVE
        config = dataclasses.replace(config, evaluate=dataclasses.replace(config.evaluate, every_steps=every))
    outcome = train_run(config, overwrite=True)
    if not outcome.finished:
        raise SystemExit("a signal stopped the training")
    log = (outcome.folder / "metrics.jsonl").read_text(encoding="utf-8")
    curve = [line for line in map(json.loads, log.splitlines()) if line["split"] == "valid"][:CURVE]
    test = outcome.scores["test"]
    assert isinstance(test, Scores)  # of clicks, which all of these models tell
    return Trained(config=config, outcome=outcome, test=evaluate(test), curve=tuple(curve))


def _steps(data: pathlib.Path, batch: int) -> int:
    """How many batches a dataset's training split has, the last, smaller one included."""
    from jrec.data.schema import Schema

    return -(-Schema.load(data).splits["train"].examples // batch)
