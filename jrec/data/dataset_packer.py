"""The packer of a dataset's examples: what makes batches for the loader and from encoded columns."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict

import numpy as np

from jrec.batch import Batch
from jrec.data.bijection import load_orders
from jrec.data.blocks import EXAMPLE_WEIGHT, LABEL
from jrec.data.packers import AnyPacker
from jrec.data.packing import CastPlace, OnBadId, Packer, kept_orders
from jrec.data.schema import CategoricalFeature, DatasetError, Schema
from jrec.data.value_rows import TableVocabulary
from jrec.ops.layout import EmbeddingLayout, FeatureConfig, TableConfig

if TYPE_CHECKING:
    from jrec.data.encoded_columns import EncodedColumns


class PackerOptions(TypedDict, total=False):
    """Arguments of ``dataset_packer`` that do not follow from a run's configuration."""

    cast: CastPlace
    growing: Mapping[str, TableVocabulary]
    weighted: bool


def dataset_packer(
    folder: str | os.PathLike[str],
    schema: Schema,
    layout: EmbeddingLayout,
    *,
    on_bad_id: OnBadId = "raise",
    cast: CastPlace = "none",
    orders: Mapping[str, np.ndarray] | None = None,
    growing: Mapping[str, TableVocabulary] | None = None,
    extras: Sequence[str] = (),
    weighted: bool = True,
) -> Packer:
    """Packs batches of a layout from a dataset's stored rows.

    Args:
      folder: The dataset, of which only bijections are read.
      schema: Its description.
      layout: The stacks to pack addresses for.
      on_bad_id: How out-of-range ids are handled.
      cast: Where the cast is computed.
      orders: By table of which the dataset numbers only some rows, (numbered rows,) uint32: the row of the layout's
        table for each of them.
      growing: By table that grows, the rows that keys have (``GrowingVocabulary.of_keys``).
      extras: Further arrays that columns to pack will have, beside the dataset's.
      weighted: Whether examples have their weights, where the dataset has any; else they all have 1.

    Raises:
      DatasetError: If layout and dataset do not fit together, a bijection is damaged, or nothing gives a table's keys
        their rows.
    """
    own, vocabularies = kept_orders(orders), dict(growing or {})
    read = {table.name for stack in layout.members for table in stack.tables}
    if lacking := sorted((schema.growing & read) - vocabularies.keys()):
        raise DatasetError(
            f"table {lacking[0]!r} of {schema.name!r} grows: the dataset holds keys, which get rows in training; give"
            f" growing={{{lacking[0]!r}: GrowingVocabulary(...).of_keys()}}, or prepare it without --growing"
        )
    _check_layout(schema, layout, on_bad_id, {name: order.size for name, order in own.items()})
    return Packer(
        layout,
        dense=[f.name for f in schema.dense],
        weight=EXAMPLE_WEIGHT if schema.weighted and weighted else None,
        extras=(*schema.tasks[1:], *extras),
        unknown_labels=bool(schema.tasks) and schema.numbers is not None,
        on_bad_id=on_bad_id,
        oov_rows={t.name: t.oov_row for t in schema.tables if not t.growing},
        orders=load_orders(folder, schema, read) | own,
        vocabularies=vocabularies,
        cast=cast,
    )


def pack_encoded(packer: AnyPacker, encoded: EncodedColumns, batch_size: int | None = None) -> Batch:
    """A batch of encoded examples, bit for bit the loader's of the same examples.

    Args:
      packer: Made by ``dataset_packer`` for the encoder's dataset, or what takes its place.
      encoded: What ``Encoder.columns`` returns, or ``Encoder.stream`` yields.
      batch_size: Static size; missing examples are padding with mask 0. Default: as many as there are.

    Returns:
      A batch of NumPy arrays; labels are zeros where the examples have none.

    Raises:
      DatasetError: On what ``pack_batch`` raises it for.
    """
    none = np.zeros(encoded.examples, np.float32)
    labels = none if encoded.labels is None else encoded.labels
    tasks = dict.fromkeys(packer.extras if isinstance(packer, Packer) else (), none) | dict(encoded.tasks)
    weights = {EXAMPLE_WEIGHT: np.ones(encoded.examples, np.float32)}
    prepared = packer.prepare({**encoded.by_name(), LABEL: labels, **weights, **tasks})
    size = encoded.examples if batch_size is None else batch_size
    return packer.pack(prepared, size)


def _check_layout(
    schema: Schema, layout: EmbeddingLayout, on_bad_id: str, numbered: Mapping[str, int] | None = None
) -> None:
    """Raises DatasetError where features or tables of the layout do not match the dataset.

    A layout may leave features of the dataset out, may allow more ids per example than the dataset has, and, where bad
    ids do not raise, may have fewer rows.

    Args:
      schema: The dataset.
      layout: The layout.
      on_bad_id: How out-of-range ids are handled.
      numbered: By table of which the dataset numbers only some rows, the number of these rows.
    """
    known = {f.name: f for f in schema.categorical}
    for stack in layout.stacks.values():
        for feature in stack.features:
            _check_feature(known, feature.config)
        for table in stack.tables:
            _check_table(schema, table, on_bad_id, (numbered or {}).get(table.name))


def _check_feature(known: dict[str, CategoricalFeature], config: FeatureConfig) -> None:
    name = config.name
    if name not in known:
        raise DatasetError(f"the model reads feature {name!r}, but the dataset has {', '.join(known) or 'none'}")
    stored = known[name]
    if stored.table != config.table:
        raise DatasetError(
            f"feature {name!r} reads table {config.table!r} in the model, but {stored.table!r} in the dataset"
        )
    if stored.max_length > config.max_length:
        raise DatasetError(
            f"feature {name!r} has up to {stored.max_length} ids an example in the dataset, but max_length is"
            f" {config.max_length} in the model; raise it to {stored.max_length}"
        )
    if stored.scaled != config.weighted:
        stated = ("weighted", "unweighted") if stored.scaled else ("unweighted", "weighted")
        raise DatasetError(f"feature {name!r} is {stated[0]} in the dataset, but {stated[1]} in the model")
    if config.fixed_length and not (stored.fixed_length and stored.max_length == config.max_length):
        length = f"exactly {stored.max_length}" if stored.fixed_length else f"0 to {stored.max_length}"
        raise DatasetError(
            f"the model promises {config.max_length} ids of feature {name!r} in every example (fixed_length), but the"
            f" dataset has {length}"
        )


def _check_table(schema: Schema, table: TableConfig, on_bad_id: str, numbered: int | None) -> None:
    if table.name not in {t.name for t in schema.tables}:
        raise DatasetError(
            f"the model has table {table.name!r}, but the dataset has {', '.join(t.name for t in schema.tables)}"
        )
    stored = schema.table(table.name)
    if stored.growing:  # any number of rows does
        return
    rows = table.table_rows if numbered is None else numbered
    if rows > stored.rows or (rows < stored.rows and on_bad_id == "raise"):
        raise DatasetError(
            f"table {table.name!r} has {rows:,} rows in the model, but {stored.rows:,} in the dataset; make them"
            " equal (fewer rows in the model need on_bad_id 'clip' or 'oov')"
        )
    if rows != stored.rows and stored.bijection is not None:
        raise DatasetError(
            f"table {table.name!r} has {rows:,} rows in the model, but the dataset renumbers its {stored.rows:,}"
            " rows (`jrec reorder`), so that none of them can be left out; make them equal"
        )
    if on_bad_id == "oov" and (stored.oov_row is None or stored.oov_row >= rows):
        has = "no OOV row" if stored.oov_row is None else f"its OOV row at {stored.oov_row}"
        raise DatasetError(
            f"on_bad_id is 'oov', but table {table.name!r} of {rows:,} rows has {has}; choose 'raise' or 'clip'"
        )
