"""The run that another begins from (``init_from``): its model, rows and slots, on data of the same rows."""

from __future__ import annotations

import dataclasses
import pathlib

from jrec.app.config import TrainConfig
from jrec.app.run_dataset import run_dataset
from jrec.app.run_folder import (
    INITIAL_FILE,
    began,
    checkpoints_of,
    find_checkpoint,
    holds_checkpoints,
    load_run_config,
)
from jrec.data.identity import Identity
from jrec.errors import CheckpointError, ConfigError
from jrec.files import decode, load_json, save_json

FORMAT, VERSION = "jrec-run-initial", 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Initial:
    """A checkpoint that a run begins from.

    Attributes:
      run: The folder of its run.
      step: Its step in that run.
      optimizer_step: Steps that its optimizer has taken, those before that run included; 0 of a folder of ``Run.save``,
        since the dense optimizer, which counts them, begins anew.
    """

    run: str
    step: int
    optimizer_step: int

    @property
    def checkpoints(self) -> pathlib.Path:
        """The folder of the run's checkpoints."""
        return checkpoints_of(pathlib.Path(self.run))

    @property
    def configured(self) -> bool:
        """Whether its run has a configuration, which says what its dense optimizer is.

        A run that begins from a folder of ``Run.save`` takes over its model, rows and slots; the state of the dense
        optimizer begins anew.
        """
        return not holds_checkpoints(pathlib.Path(self.run))

    @property
    def trained_on(self) -> Identity:
        """The dataset of the run."""
        return run_dataset(pathlib.Path(self.run))


def check_initial(config: TrainConfig, dataset: Identity) -> None:
    """Refuses to begin from a run that is none, or whose rows mean other values.

    Raises:
      CheckpointError: If ``init_from`` is no run or checkpoint, or does not record its dataset.
      ConfigError: If its rows mean other values than the dataset's.
    """
    if not config.init_from:
        return
    folder, _ = find_checkpoint(pathlib.Path(config.init_from))
    remedy = f"prepare the log with --vocabulary-from {run_dataset(folder).path}, or begin without init_from"
    run_dataset(folder).check(dataset, subject=f"init_from: the run in {folder}", remedy=remedy, error=ConfigError)


def initial_of(config: TrainConfig, folder: pathlib.Path, dataset: Identity, *, resume: bool) -> Initial | None:
    """The checkpoint that a run begins, or began, from; None where ``init_from`` is not set.

    Args:
      config: The run's configuration.
      folder: The run's folder, which says where a run that is resumed began.
      dataset: The dataset to train on.
      resume: Whether to resume a run that began there.

    Raises:
      CheckpointError: If there is no such checkpoint.
      ConfigError: If its rows mean other values than the dataset's.
    """
    if not config.init_from:
        return None
    path = folder / INITIAL_FILE
    if resume and began(folder):
        return _read(path)
    check_initial(config, dataset)
    from jrec.app.watch import chosen_step
    from jrec.run.processes import first  # loads JAX, which check_initial need not

    run, step = find_checkpoint(pathlib.Path(config.init_from))
    step = chosen_step(run) if step is None else step
    if step is None:
        raise CheckpointError(f"init_from: the run in {run} has no complete checkpoint; train it first")
    before = _read(run / INITIAL_FILE).optimizer_step if load_run_config(run).init_from else 0
    taken = 0 if holds_checkpoints(run) else before + step
    initial = Initial(run=str(run.absolute()), step=step, optimizer_step=taken)
    if first():
        save_json(path, dataclasses.asdict(initial), kind=FORMAT, version=VERSION, sealed=True)
    return initial


def _read(path: pathlib.Path) -> Initial:
    remedy = "copy the run again, or train it anew"
    content = load_json(path, kind=FORMAT, version=VERSION, error=CheckpointError, remedy=remedy, sealed=True)
    return decode(content, Initial, where=str(path), error=CheckpointError, remedy=remedy)
