"""The capacities of tables that grow, settled once for a run: other datasets that it meets later do not change them."""

from __future__ import annotations

import dataclasses
import pathlib

from jrec.data.schema import Schema
from jrec.train.config import TrainConfig
from jrec.train.run_folder import find_checkpoint, load_run_config


def with_capacities(config: TrainConfig, schema: Schema) -> TrainConfig:
    """The configuration with the capacity of every growing table that it leaves open.

    The run that this one begins from (``init_from``) decides, or else training has values for all rows but one.

    Args:
      config: The run's configuration.
      schema: The dataset to train on.
    """
    if not schema.growing:
        return config
    rows = {table.name: table.rows_for_all for table in schema.tables if table.growing}
    if config.init_from:
        rows |= load_run_config(find_checkpoint(pathlib.Path(config.init_from))[0]).tables.capacities
    return dataclasses.replace(config, tables=config.tables.with_capacities(rows))
