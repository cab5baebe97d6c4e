"""Several processes of one run: they agree to stop, share scores and a folder, and explain a lost collective."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator, Mapping

import jax
import numpy as np

from jrec.app.config import TrainConfig
from jrec.app.processes.interrupt import StopRequest
from jrec.app.report.ranking import AnyScores, RankScores
from jrec.app.run_folder import open_run_folder
from jrec.errors import ConfigError, ProcessError
from jrec.metrics import LabelScores, by_task, check_finite
from jrec.regression import NumberScores
from jrec.run.processes import first, wait_for_all

_STOP_EVERY = 16


def shared_scores(scores: AnyScores) -> AnyScores:
    """The scores of all processes, in the order of processes, in every process.

    Raises:
      DivergedError: In all processes, if a logit of any is NaN or infinite.
    """
    if isinstance(scores, RankScores):
        return dataclasses.replace(scores, ranks=_of_all(scores.ranks))
    if scores.tasks:
        return by_task({task: _shared(own) for task, own in scores.tasks.items()})
    return _shared(scores)


def _shared(scores: LabelScores) -> LabelScores:
    weights = _weights_of_all(scores.weights, scores.labels)
    if isinstance(scores, NumberScores):
        predictions, labels = _of_all(scores.predictions), _of_all(scores.labels)
        check_finite(predictions, "predictions")
        return NumberScores(predictions=predictions, labels=labels, weights=weights)
    labels = _of_all(scores.labels.astype(np.uint8)).astype(bool)
    scores = dataclasses.replace(scores, logits=_of_all(scores.logits), labels=labels, weights=weights)
    # Only now, so that all processes raise: one that raised before would leave the others in the collective.
    check_finite(scores.logits)
    return scores


def _weights_of_all(weights: np.ndarray | None, labels: np.ndarray) -> np.ndarray | None:
    """Weights of all processes' examples; None stands for weights of 1, which others' need not have."""
    every = _of_all(np.ones(labels.size, np.float32) if weights is None else weights)
    return None if (every == 1).all() else every


def _of_all(values: np.ndarray) -> np.ndarray:
    """The values of all processes, (n,) in each, one after the other."""
    if jax.process_count() == 1:
        return values
    from jax.experimental import multihost_utils

    # Collectives take equal shapes, but processes may have unequal numbers of examples: padded, then cut again.
    sizes = np.asarray(multihost_utils.process_allgather(np.array(values.size, np.int32)))
    padded = np.zeros(int(sizes.max()), values.dtype)
    padded[: values.size] = values
    lines = np.asarray(multihost_utils.process_allgather(padded))
    return np.concatenate([line[:size] for line, size in zip(lines, sizes, strict=True)])


def sum_of_all(values: np.ndarray) -> np.ndarray:
    """The sums over all processes of (n,) int64; each calls it with as many."""
    if jax.process_count() == 1:
        return values
    from jax.experimental import multihost_utils

    # As bytes: collectives take integers of 32 bits.
    lines = np.asarray(multihost_utils.process_allgather(values.view(np.uint8)))
    return lines.reshape(jax.process_count(), -1).view(np.int64).sum(axis=0)


@contextlib.contextmanager
def shared_run_folder(config: TrainConfig, *, resume: bool, overwrite: bool) -> Iterator[pathlib.Path]:
    """``open_run_folder`` by the first process, for all processes, which must all see the folder."""
    if jax.process_count() == 1:
        with open_run_folder(config, resume=resume, overwrite=overwrite) as folder:
            yield folder
        return
    if not config.mesh.on:
        raise ConfigError(
            f"{jax.process_count()} processes were started, but mesh.devices is {config.mesh.devices}; set it to the"
            f" number of all their devices, {jax.device_count()}"
        )
    if first():
        with open_run_folder(config, resume=resume, overwrite=overwrite) as folder:
            # The others go on once the folder is checked, cleared where that was asked, and has the configuration.
            wait_for_all("run folder")
            yield folder
    else:
        wait_for_all("run folder")
        yield pathlib.Path(config.out)


@contextlib.contextmanager
def one_of_many() -> Iterator[None]:
    """Around a run: explains a collective that fails because another process has ended.

    Raises:
      ProcessError: If a collective fails in a run of several processes.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        # gloo's failures come as one or the other.
        failed = isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error)
        if jax.process_count() == 1 or not failed:
            raise
        cause = str(error).splitlines()[0][:300]
        if "Gloo context initialization failed" in cause:  # both have joined, by process 0's one port
            raise ProcessError(
                f"process {jax.process_index()} of {jax.process_count()} did not reach another one: {cause}. Let the"
                " processes' machines reach each other at all ports, and look at the output of the others"
            ) from error
        raise ProcessError(
            f"process {jax.process_index()} of {jax.process_count()} lost another one: {cause}. Look at the output of"
            " the others for the reason; --resume goes on from the last checkpoint, with mesh.devices=N also on fewer"
            " devices"
        ) from error


class AgreedStop(StopRequest):
    """A request to stop that all processes see at the same step: if one is asked, all stop.

    Test it once per step; every ``_STOP_EVERY``-th test asks the others.
    """

    def __init__(self, own: StopRequest):
        super().__init__()
        self._own, self._looks, self._agreed = own, 0, False

    def __bool__(self) -> bool:
        if jax.process_count() == 1:
            return bool(self._own)
        # All processes count their looks alike, so that they meet in the same collective. Never the own request alone:
        # the others would step on into collectives that this process no longer joins.
        self._looks += 1
        if not self._agreed and self._looks % _STOP_EVERY == 0:
            from jax.experimental import multihost_utils

            self._agreed = bool(np.any(multihost_utils.process_allgather(np.array(bool(self._own)))))
        return self._agreed


class SilentLog:
    """Stands for ``MetricLog`` where another process writes the log."""

    def truncate_after(self, step: int) -> None:
        """Does nothing."""

    def write(
        self,
        step: int,
        metrics: Mapping[str, object],
        *,
        split: str = "train",
        timing: Mapping[str, object] | None = None,
    ) -> None:
        """Writes nothing."""

    def write_timing(self, step: int, timing: Mapping[str, object], *, split: str) -> None:
        """Writes nothing."""

    def sync(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""
