"""Folders of checkpoints that ``Run.save`` wrote: what commands need to know of them beside the checkpoints."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import tempfile
from collections.abc import Iterable
from typing import TYPE_CHECKING

from jrec.data.identity import Identity
from jrec.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from jrec.data.schema import Schema
    from jrec.run.record import Record
    from jrec.train.config import TrainConfig


MANIFEST = "manifest.json"  # as in ``jrec.checkpoint.manifest``, whose package loads JAX


def manifests(folder: pathlib.Path) -> list[pathlib.Path]:
    """The manifests of the complete checkpoints in a folder, by ascending step."""
    found = [path for path in folder.glob(f"*/{MANIFEST}") if path.parent.name.isdigit()]
    return sorted(found, key=lambda path: int(path.parent.name))


def holds_checkpoints(folder: pathlib.Path) -> bool:
    """Whether a folder holds checkpoints itself, as ``Run.save`` writes them."""
    return bool(manifests(folder))


def latest_record(folder: pathlib.Path) -> Record:
    """What made the model of the latest checkpoint in a folder.

    Raises:
      CheckpointError: If the checkpoint does not say so, or is damaged.
    """
    from jrec.checkpoint import Saved
    from jrec.run.record import recorded

    return recorded(Saved(manifests(folder)[-1].parent))


def recorded_dataset(folder: pathlib.Path) -> Identity:
    """The dataset whose rows the tables have.

    Raises:
      CheckpointError: If the checkpoint does not say so.
    """
    if (dataset := latest_record(folder).dataset) is None:
        raise CheckpointError(
            f"{folder} does not say which dataset its rows are of, because its run was not fed with a"
            " jrec.data.Loader; feed it with one, or predict and export with the run itself (Run.predict, Run.export)"
        )
    return dataset


def recorded_config(folder: pathlib.Path, overrides: Iterable[str] = ()) -> TrainConfig:
    """A configuration with the model of a folder's latest checkpoint and its dataset, to predict with.

    Raises:
      CheckpointError: If the checkpoint does not say what made its model, or which dataset its rows are of.
      ConfigError: If the overrides are not valid.
    """
    from jrec.train.config import DataConfig, ModelConfig, TrainConfig, load_config, save_config

    config = TrainConfig(
        data=DataConfig(path=recorded_dataset(folder).path or "."),
        name=re.sub(r"[^\w.+-]|^[.+-]+", "_", folder.name) or "run",
        out=str(folder),
        model=ModelConfig.from_dict(latest_record(folder).model),
    )
    with tempfile.TemporaryDirectory() as place:
        save_config(config, path := pathlib.Path(place) / "run.toml")
        return load_config(path, overrides)


def settled(record: Record, config: TrainConfig, schema: Schema) -> TrainConfig:
    """The configuration of a folder's model on a dataset, with the capacities of tables that grow.

    Raises:
      ConfigError: If the model takes other float features than the dataset has.
    """
    if record.dense != (have := tuple(feature.name for feature in schema.dense)):
        raise ConfigError(
            f"the model takes the float features {', '.join(record.dense) or 'none'}, but the dataset at"
            f" {config.data.path} has {', '.join(have) or 'none'}; evaluate it on the dataset that it was trained on"
        )
    rows = {table.name: table.table_rows for table in record.tables if table.name in schema.growing}
    return dataclasses.replace(config, tables=config.tables.with_capacities(rows))
