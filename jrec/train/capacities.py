"""The capacities of tables that grow, settled once for a run: other datasets that it meets later do not change them."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping

from jrec.data.schema import Schema
from jrec.train.config import TrainConfig
from jrec.train.config.tables import TableOverride
from jrec.train.run_folder import find_checkpoint, load_run_config


def with_capacities(config: TrainConfig, schema: Schema) -> TrainConfig:
    """The configuration with the capacity of every growing table that it leaves open.

    The run that this one begins from (``init_from``) decides, or else training has values for all rows but one.

    Args:
      config: The run's configuration.
      schema: The dataset to train on.
    """
    if not schema.growing or config.tables.growth.capacity:
        return config
    earlier: Mapping[str, TableOverride] = {}
    if config.init_from:
        earlier = load_run_config(find_checkpoint(pathlib.Path(config.init_from))[0]).tables.overrides
    rows = {table.name: table.rows + 1 for table in schema.tables if table.growing}
    rows |= {name: own.capacity for name, own in earlier.items() if name in rows and own.capacity}
    return _filled(config, rows)


def _filled(config: TrainConfig, rows: Mapping[str, int]) -> TrainConfig:
    overrides = dict(config.tables.overrides)
    for name, capacity in rows.items():
        own = overrides.get(name, TableOverride())
        overrides[name] = dataclasses.replace(own, capacity=own.capacity or max(2, capacity))
    return dataclasses.replace(config, tables=dataclasses.replace(config.tables, overrides=overrides))
