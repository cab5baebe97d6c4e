"""What a model reads of a dataset: a DLRM all of it, a model that ranks items some features of one table.

This module imports no JAX.
"""

from __future__ import annotations

import dataclasses

from jrec.data.schema import KEEP_LAST, LISTS, CategoricalFeature, Schema, Table
from jrec.errors import ConfigError
from jrec.train.config import ModelConfig, SequenceSection


def model_schema(model: ModelConfig, schema: Schema) -> Schema:
    """The schema with only the features and tables that the model reads; the same one for models of clicks.

    Raises:
      ConfigError: If a feature that ``[model.sequence]`` names is not there, or cannot be read by it.
    """
    if not model.ranks:
        return schema
    own = model.sequence
    history, item = (_feature(schema, own, key) for key in ("history", "item"))
    if history.one_hot or history.weighted:
        raise ConfigError(
            f"model.sequence.history is {own.history!r}, which is {'weighted' if history.weighted else 'one id'}; name"
            " a list of ids in order of time, as `jrec prepare csv` makes it by"
            ' history = {by = "user", of = "item", length = 200}'
        )
    if not item.one_hot or item.table != history.table:
        raise ConfigError(
            f"model.sequence.item is {own.item!r} of table {item.table!r}, but must be a feature of one id an example,"
            f" of table {history.table!r}, as model.sequence.history = {own.history!r} is"
        )
    table = schema.table(item.table)
    _check_table(table, model.kind)
    return dataclasses.replace(schema, dense=(), categorical=(history, item), tables=(table,), tasks=())


def history_schema(model: ModelConfig, schema: Schema) -> Schema:
    """The schema of what a model that ranks items needs for that: lists of the history alone, of which the last count.

    Args:
      model: The ``[model]`` section.
      schema: The features that the model reads.
    """
    histories = tuple(f for f in schema.categorical if f.name == model.sequence.history)
    provenance = {"options": {"key_seed": schema.key_seed}, LISTS: KEEP_LAST}
    return dataclasses.replace(schema, categorical=histories, provenance=provenance, labels=False, splits={})


def unread(model: ModelConfig, schema: Schema) -> str:
    """The features of a dataset that the model does not read, for a message; "" for none.

    Args:
      model: The ``[model]`` section.
      schema: The whole dataset's.
    """
    names = set(schema.feature_names) - set(model_schema(model, schema).feature_names)
    return ", ".join(name for name in schema.feature_names if name in names)


def _feature(schema: Schema, own: SequenceSection, key: str) -> CategoricalFeature:
    name = getattr(own, key)
    found = next((feature for feature in schema.categorical if feature.name == name), None)
    if found is None:
        raise ConfigError(
            f"model.sequence.{key} is {name!r}, but the categorical features of the dataset are"
            f" {', '.join(feature.name for feature in schema.categorical)}; name one of them"
        )
    return found


def _check_table(table: Table, kind: str) -> None:
    """Refuses tables whose rows do not stand for the same items from the first step to the last."""
    if table.growing:
        raise ConfigError(
            f"model.kind is {kind!r}, which ranks the rows of table {table.name!r}, but that table grows; prepare it"
            " without --growing"
        )
    if table.bijection is not None:
        raise ConfigError(
            f"model.kind is {kind!r}, which ranks the rows of table {table.name!r}, but `jrec reorder` renumbered them;"
            " train on the dataset from before it"
        )
    if table.rows < 2 + (table.oov_row is not None):
        raise ConfigError(
            f"table {table.name!r} has {table.rows} row(s), among which there is nothing to rank; prepare more lines,"
            " or by a smaller --min-count"
        )
