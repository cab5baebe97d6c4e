"""The format that a dataset was prepared from, made anew of its schema, to read values of the same kind."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jrec.data.blocks import WEIGHT_SUFFIX
from jrec.data.columns import ListColumn
from jrec.data.joined import csv_source
from jrec.data.readers.avazu import Avazu
from jrec.data.readers.criteo import Criteo
from jrec.data.readers.delimited_schema import DelimitedSchema, check_schema
from jrec.data.readers.dense import dense_column, reject_dense
from jrec.data.readers.parse import Field, ParsedBlock
from jrec.data.readers.source import CategoricalSpec, Chunk, Source, learned_of
from jrec.data.readers.taobao import Taobao
from jrec.data.schema import DatasetError, Schema
from jrec.data.vocabulary_load import preparation
from jrec.files import decode

_REMEDY = "prepare the dataset again"


def log_source(schema: Schema) -> Source | None:
    """The format of a dataset whose examples are the lines of its log; None where lines do not make examples.

    Raises:
      DatasetError: If the schema says that it was prepared from a log that cannot be, or has not its features.
    """
    made = preparation(schema)
    options, name = made.get("format_options"), made.get("format")
    options = options if isinstance(options, Mapping) else {}
    if "schema" in options:
        where = f"schema.json of {schema.name!r}: provenance.format_options.schema"
        columns = decode(
            options["schema"], DelimitedSchema, where=where, error=DatasetError, remedy=_REMEDY, partial=True
        )
        check_schema(columns, where)
        source: Source = csv_source(columns)
    elif name in ("criteo-kaggle", "criteo-terabyte"):
        source = Criteo(str(name))
    elif name == Avazu.name:
        source = Avazu()
    elif name == Taobao.name and options.get("form") != "sequence":
        return Taobao()
    else:
        return None
    _check_features(schema, source)
    source = source.with_labels("optional").limited({f.name: f.max_length for f in schema.categorical})
    return source.fitted(*learned_of(schema))


def _check_features(schema: Schema, source: Source) -> None:
    made = {f.name: f"{f.transform}, dense" for f in source.dense}
    made |= {f.name: f"of table {f.table}, {'' if f.weighted else 'not '}weighted" for f in source.categorical}
    said = {f.name: f"{f.transform}, dense" for f in schema.dense}
    said |= {f.name: f"of table {f.table}, {'' if f.weighted else 'not '}weighted" for f in schema.categorical}
    for name, what in said.items():
        if what != (other := made.get(name, "not there")):
            raise DatasetError(
                f"schema.json of {schema.name!r}: feature {name!r} is {what}, but by its provenance it is {other};"
                f" {_REMEDY}"
            )


class FeatureColumns(Source):
    """Columns that are called as the features: for datasets whose format makes examples of several lines or files."""

    def __init__(self, schema: Schema):
        self.name = schema.name
        self.dense = schema.dense
        self._features = schema.categorical
        self.categorical = tuple(
            CategoricalSpec(name=f.name, table=f.table, many=not f.one_hot, weighted=f.weighted)
            for f in schema.categorical
        )

    def raw_fields(self) -> tuple[Field, ...]:
        """A field a feature, and the weights of those that have some."""
        fields = [Field(name=f.name, kind="number", blank=False) for f in self.dense]
        for feature in self._features:
            fields.append(Field(name=feature.name, kind="text" if feature.one_hot else "texts"))
            if feature.weighted:
                fields.append(Field(name=feature.name + WEIGHT_SUFFIX, kind="weights"))
        return tuple(fields)

    def convert(self, parsed: ParsedBlock) -> Chunk:
        """Transformed dense values, keys, weights."""
        for feature in self.dense:
            reject_dense(parsed, feature.name, feature.transform)
        weights = {f.name: parsed.lists(f.name + WEIGHT_SUFFIX) for f in self._features if f.weighted}
        return Chunk(
            labels=np.zeros(parsed.rows, np.float32),
            dense={f.name: dense_column(parsed, f.name, f, None) for f in self.dense},
            keys={f.name: parsed.columns[f.name] for f in self._features},
            weights={name: ListColumn(w.offsets, w.values.astype(np.float32)) for name, w in weights.items()},
        )
