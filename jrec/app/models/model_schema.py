"""What a model reads of a dataset: a DLRM all of it, a model that ranks items some features.

This module imports no JAX.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from jrec.app.config import ModelConfig
from jrec.data.schema import KEEP_LAST, LISTS, CategoricalFeature, Schema, Table
from jrec.errors import ConfigError


def model_schema(model: ModelConfig, schema: Schema) -> Schema:
    """The schema with only the features and tables that the model reads; the same one for models of clicks.

    Of a model that ranks items ``labels`` says whether it reads them, and there is one at most. The user's dense
    features come before the item's.

    Raises:
      ConfigError: If a feature that ``[model.sequence]`` or ``[model.two_tower]`` names is not there, or cannot be read
        by it.
    """
    if not model.ranks:
        return schema
    return _tower_schema(model, schema) if model.kind == "two_tower" else _sequence_schema(model, schema)


def _sequence_schema(model: ModelConfig, schema: Schema) -> Schema:
    own = model.sequence
    history, item = (_feature(schema, getattr(own, key), f"sequence.{key}") for key in ("history", "item"))
    if history.one_hot or history.scaled:
        raise ConfigError(
            f"model.sequence.history is {own.history!r}, which is {'weighted' if history.scaled else 'one id'}; name"
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
    if not (model.kind == "hstu" and own.ages):
        history = dataclasses.replace(history, weighted=False, aged=None)
    return dataclasses.replace(schema, dense=(), categorical=(history, item), tables=(table,), tasks=(), labels=False)


def _tower_schema(model: ModelConfig, schema: Schema) -> Schema:
    own = model.two_tower
    for key in ("user", "item"):
        for name in (name for name in getattr(own, key) if name not in schema.feature_names):
            raise ConfigError(
                f"model.two_tower.{key} names {name!r}, but the features of the dataset are"
                f" {', '.join(schema.feature_names)}; name some of them"
            )
    read = _of_features(schema, (*own.user, *own.item))
    item = _feature(read, own.id, "two_tower.id")
    if not item.one_hot:
        raise ConfigError(
            f"model.two_tower.id is {own.id!r}, which has several ids; name a feature of one id an example"
        )
    if own.history:
        history = _feature(read, own.history, "two_tower.history")
        if history.one_hot or history.table != item.table:
            raise ConfigError(
                f"model.two_tower.history is {own.history!r} of table {history.table!r}, but must be a list of ids of"
                f" table {item.table!r}, as model.two_tower.id = {own.id!r} is"
            )
    if not any(feature.name in own.user for feature in read.categorical):
        raise ConfigError(
            f"model.two_tower.user is {list(own.user)}, dense features alone; name a categorical one, too"
        )
    _check_table(read.table(item.table), model.kind)
    read.check_numbered("model.kind is 'two_tower', which reads tables of as many rows from the first step to the last")
    return read


def request_schema(model: ModelConfig, schema: Schema) -> Schema:
    """The schema of what a model that ranks items needs for that, without labels.

    Of sequences that are lists of the history, and of its ages where the model reads them, of which the last values
    count; of two towers the columns of the user's features.

    Args:
      model: The ``[model]`` section.
      schema: The features that the model reads.
    """
    names = model.two_tower.user if model.kind == "two_tower" else (model.history,)
    read = _of_features(schema, names, and_table=item_table(model, schema).name)
    options = schema.preparation.get("format_options")
    provenance: dict[str, Any] = {"options": {"key_seed": schema.key_seed}, LISTS: KEEP_LAST}
    by_columns = model.kind == "two_tower" or any(feature.aged for feature in read.categorical)
    if by_columns and isinstance(options, Mapping) and "schema" in options:
        provenance = {
            **schema.preparation,
            "format_options": {**options, "schema": _columns_of(options["schema"], names)},
        }
    return dataclasses.replace(read, provenance=provenance, labels=False, splits={})


def item_table(model: ModelConfig, schema: Schema) -> Table:
    """The table whose rows a model that ranks items ranks.

    Args:
      model: The ``[model]`` section.
      schema: The features that the model reads.
    """
    return schema.table(next(feature.table for feature in schema.categorical if feature.name == model.ranked))


def _of_features(schema: Schema, names: Collection[str], *, and_table: str = "") -> Schema:
    """The schema with some features, dense ones in the order of the names, and their tables, and without tasks."""
    dense = {feature.name: feature for feature in schema.dense}
    categorical = tuple(feature for feature in schema.categorical if feature.name in names)
    tables = {feature.table for feature in categorical} | {and_table}
    return dataclasses.replace(
        schema,
        dense=tuple(dense[name] for name in names if name in dense),
        categorical=categorical,
        tables=tuple(table for table in schema.tables if table.name in tables),
        tasks=(),
    )


def _columns_of(stored: object, names: Collection[str]) -> dict[str, Any]:
    """A stored csv schema with only the columns of some features."""
    from jrec.prepare.readers.delimited import read_stored, schema_of_features, stored_schema

    schema = read_stored(stored, where="schema.json: provenance.format_options.schema", error=ConfigError)
    return stored_schema(schema_of_features(schema, names))


def unread(model: ModelConfig, schema: Schema) -> str:
    """The features of a dataset that the model does not read, for a message; "" for none.

    Args:
      model: The ``[model]`` section.
      schema: The whole dataset's.
    """
    names = set(schema.feature_names) - set(model_schema(model, schema).feature_names)
    return ", ".join(name for name in schema.feature_names if name in names)


def _feature(schema: Schema, name: str, key: str) -> CategoricalFeature:
    found = next((feature for feature in schema.categorical if feature.name == name), None)
    if found is None:
        raise ConfigError(
            f"model.{key} is {name!r}, but the categorical features of the dataset are"
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
