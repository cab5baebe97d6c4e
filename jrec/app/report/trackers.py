"""Services that follow a run, beside its own files: Weights & Biases and MLflow, named in ``log.to``.

Nothing that they do ends a training: what one raises is a warning, once, and it gets nothing more. A resumed run goes
on where it was followed before, by the ids in ``RUN/trackers/ids.json``.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
import os
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jrec.errors import CheckpointError, ConfigError
from jrec.files import load_json, save_json
from jrec.optional_packages import remedy

TRACKERS_FOLDER, _IDS = "trackers", "ids.json"
_KIND, _VERSION = "jrec trackers", 1
_LOGGER = logging.getLogger(__name__)


class Tracker(Protocol):
    """One service's run."""

    id: str
    """What the service calls the run."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Records numbers by "SPLIT/METRIC"."""
        ...

    def close(self) -> None:
        """Ends the run, as far as the service is concerned."""
        ...


def check_trackers(names: Sequence[str]) -> None:
    """Refuses trackers whose package is not installed, without importing it.

    Raises:
      ConfigError: The message names the key, the package and the remedy.
    """
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # a folder of this name, such as wandb makes, is no package
            raise ConfigError(f"log.to has {name!r}, whose package is not installed: {remedy(name)}")


class Trackers:
    """All trackers of a run.

    Args:
      names: The services.
      folder: The run's folder, in which ``trackers/`` has what the services keep on disk.
      title: The run's name.
      config: The run's configuration, flat, by dotted key.
    """

    def __init__(
        self, names: Sequence[str], folder: pathlib.Path, *, title: str = "", config: Mapping[str, object] | None = None
    ):
        check_trackers(names)
        self._open: dict[str, Tracker] = {}
        if not names:
            return
        folder = folder / TRACKERS_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        ids = _known(folder / _IDS)
        for name in names:
            try:
                self._open[name] = _TRACKERS[name](folder, ids.get(name), title, dict(config or {}))
            except Exception as error:
                self._give_up(name, error)
        ids |= {name: tracker.id for name, tracker in self._open.items()}
        save_json(folder / _IDS, ids, kind=_KIND, version=_VERSION)

    def write(self, step: int, split: str, values: Mapping[str, object]) -> None:
        """Records the finite numbers among a record's values."""
        numbers = {f"{split}/{name}": float(v) for name, v in values.items() if isinstance(v, int | float)}
        for name, tracker in list(self._open.items()):
            try:
                tracker.write(step, numbers)
            except Exception as error:
                self._give_up(name, error)

    def close(self) -> None:
        """Ends all."""
        for name, tracker in list(self._open.items()):
            try:
                tracker.close()
            except Exception as error:
                self._give_up(name, error)

    def _give_up(self, name: str, error: Exception) -> None:
        self._open.pop(name, None)
        _LOGGER.warning("log.to: %s fails, and gets nothing more of this run: %r", name, error)


def _known(place: pathlib.Path) -> dict[str, str]:
    if not place.is_file():
        return {}
    advice = "remove it, and the services begin a new run"
    return load_json(place, kind=_KIND, version=_VERSION, error=CheckpointError, remedy=advice)


class _WandB:
    def __init__(self, folder: pathlib.Path, known: str | None, title: str, config: dict[str, object]):
        import wandb  # pyright: ignore[reportMissingImports]

        # The project, and whether to go online, are the environment's: WANDB_PROJECT, WANDB_MODE.
        self._run = wandb.init(id=known, resume="allow", name=title, dir=str(folder), config=config)
        self.id = str(self._run.id)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    """By its client: MLflow's own functions share one active run of the process, which may be the program's."""

    def __init__(self, folder: pathlib.Path, known: str | None, title: str, config: dict[str, object]):
        del folder
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]
        from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]

        self._client, self._metric = MlflowClient(), Metric
        if known is None:
            self.id = str(self._client.create_run(_mlflow_experiment(self._client), run_name=title).info.run_id)
            for some in itertools.batched(config.items(), 100):  # as many as a request takes
                self._client.log_batch(self.id, params=[Param(key, str(value)[:500]) for key, value in some])
        else:
            self.id = known
            self._client.update_run(known, status="RUNNING")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)  # milliseconds
        named = ((name.replace("@", "_at_"), value) for name, value in values.items())  # MLflow refuses "@"
        self._client.log_batch(self.id, metrics=[self._metric(name, value, now, step) for name, value in named])

    def close(self) -> None:
        self._client.set_terminated(self.id)


def _mlflow_experiment(client: Any) -> str:
    """The id of the experiment that MLflow's own variables name; made if absent. "0" is the default one."""
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME")
    if not name:
        return os.environ.get("MLFLOW_EXPERIMENT_ID", "0")
    experiment = client.get_experiment_by_name(name)
    return client.create_experiment(name) if experiment is None else experiment.experiment_id


_TRACKERS = {"wandb": _WandB, "mlflow": _MLflow}
