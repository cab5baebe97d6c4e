"""Several processes of one model: how they find each other, agree to stop, share scores, and end when one dies."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jrec.errors import ConfigError, JrecError
from jrec.train.config import TrainConfig
from jrec.train.interrupt import StopRequest
from jrec.train.metrics import Scores, check_finite
from jrec.train.run_folder import open_run_folder

HEARTBEAT_SECONDS = 30
"""After so long without a sign of life a process counts as dead, and the others end."""
_SHUTDOWN_SECONDS = 600  # how long the others wait at the end for the first process, which writes the report
_STOP_EVERY = 16


class ProcessError(JrecError):
    """Another process of the run has ended, or cannot be reached."""


def join_processes(
    coordinator: str | None = None, processes: int | None = None, process: int | None = None, *, wait: int = 300
) -> None:
    """Makes this process one of several; call it before anything else of JAX.

    Args:
      coordinator: HOST:PORT at which process 0 listens; None where the cluster (Slurm, Open MPI) or the environment
        (JAX_COORDINATOR_ADDRESS) says.
      processes: how many there are; None where the cluster says.
      process: the number of this one, from 0; None where the cluster says.
      wait: seconds until all have to be there.

    Raises:
      ConfigError: if something is missing.
      ProcessError: if the processes do not find each other.
    """
    if processes is not None and process is not None and not 0 <= process < processes:
        raise ConfigError(f"--process is {process}; processes are numbered from 0 to --processes - 1 = {processes - 1}")
    # On CPUs a process may be given several devices; on GPUs the cluster says which are whose.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            coordinator,
            processes,
            process,
            initialization_timeout=wait,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
        )
    except ValueError as error:
        raise ConfigError(
            f"the processes of the run are not known: {error} Give --coordinator HOST:PORT --processes N --process I,"
            " or start them by Slurm (srun)"
        ) from error
    except jax.errors.JaxRuntimeError as error:
        where = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS", "the cluster's coordinator")
        raise ProcessError(f"the processes did not find each other at {where} within {wait} s: {error}") from error


def first() -> bool:
    """Whether this is the process that writes logs and reports."""
    return jax.process_index() == 0


def wait_for_all(what: str) -> None:
    """Returns when every process is here; ``what`` must be the same everywhere."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(what)


def shared_scores(scores: Scores) -> Scores:
    """The scores of all processes, those of the first process first, in every process.

    Raises:
      DivergedError: in all of them, if a logit of any is NaN or infinite.
    """
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        sizes = np.asarray(multihost_utils.process_allgather(np.array(scores.labels.size, np.int32)))

        def of_all(values: np.ndarray) -> np.ndarray:
            padded = np.zeros(int(sizes.max()), values.dtype)
            padded[: values.size] = values
            found = np.asarray(multihost_utils.process_allgather(padded))
            return np.concatenate([line[:size] for line, size in zip(found, sizes, strict=True)])

        labels = of_all(scores.labels.astype(np.uint8)).astype(bool)
        scores = Scores(logits=of_all(scores.logits), labels=labels)
    check_finite(scores.logits)
    return scores


@contextlib.contextmanager
def shared_run_folder(config: TrainConfig, *, resume: bool, overwrite: bool) -> Iterator[pathlib.Path]:
    """``open_run_folder`` by the first process, for all; the folder is one that all of them see."""
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
            wait_for_all("run folder")
            yield folder
    else:
        wait_for_all("run folder")
        yield pathlib.Path(config.out)


@contextlib.contextmanager
def one_of_many() -> Iterator[None]:
    """Says what it means where a collective fails because another process is gone.

    Raises:
      ProcessError: in that case.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1:
            raise
        cause = str(error).splitlines()[0][:300]
        raise ProcessError(
            f"process {jax.process_index()} of {jax.process_count()} lost another one: {cause}. Look at the output of"
            " the others for the reason; --resume goes on from the last checkpoint, with mesh.devices=N also on fewer"
            " devices"
        ) from error


class AgreedStop(StopRequest):
    """A request to stop that all processes see at the same step: whoever is asked, all stop.

    It is to be looked at once a step; every ``_STOP_EVERY``-th look asks the others.
    """

    def __init__(self, own: StopRequest):
        super().__init__()
        self._own, self._looks, self._agreed = own, 0, False

    def __bool__(self) -> bool:
        if jax.process_count() == 1:
            return bool(self._own)
        self._looks += 1
        if not self._agreed and self._looks % _STOP_EVERY == 0:
            from jax.experimental import multihost_utils

            self._agreed = bool(np.any(multihost_utils.process_allgather(np.array(bool(self._own)))))
        return self._agreed


class SilentLog:
    """In place of ``MetricLog`` where another process writes it."""

    def truncate_after(self, step: int) -> None:
        """Nothing was written."""

    def write(
        self, step: int, metrics: Mapping[str, Any], *, split: str = "train", timing: Mapping[str, Any] | None = None
    ) -> None:
        """Writes nothing."""

    def write_timing(self, step: int, timing: Mapping[str, Any], *, split: str) -> None:
        """Writes nothing."""

    def sync(self) -> None:
        """Nothing was written."""

    def close(self) -> None:
        """Nothing is open."""
