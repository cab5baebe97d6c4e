"""The packer of a dataset's examples: what makes the loader's batches, and those of encoded columns."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np

from jrec.batch import Batch
from jrec.data.blocks import LABEL
from jrec.data.encoder import EncodedColumns
from jrec.data.loader_checks import check_layout
from jrec.data.packing import CastPlace, OnBadId, Packer, kept_orders
from jrec.data.reorder.file import load_orders
from jrec.data.schema import DatasetError, Schema
from jrec.data.value_rows import TableVocabulary
from jrec.ops.layout import EmbeddingLayout


def dataset_packer(
    folder: str | os.PathLike[str],
    schema: Schema,
    layout: EmbeddingLayout,
    *,
    on_bad_id: OnBadId = "raise",
    cast: CastPlace = "none",
    orders: Mapping[str, np.ndarray] | None = None,
    growing: Mapping[str, TableVocabulary] | None = None,
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
    check_layout(schema, layout, on_bad_id, {name: order.size for name, order in own.items()})
    return Packer(
        layout,
        dense=[f.name for f in schema.dense],
        on_bad_id=on_bad_id,
        oov_rows={t.name: t.oov_row for t in schema.tables if not t.growing},
        orders=load_orders(folder, schema, read) | own,
        vocabularies=vocabularies,
        cast=cast,
    )


def pack_encoded(packer: Packer, encoded: EncodedColumns, batch_size: int | None = None) -> Batch:
    """A batch of encoded examples, bit for bit the loader's of the same examples.

    Args:
      packer: Made by ``dataset_packer`` for the encoder's dataset.
      encoded: What ``Encoder.columns`` returns, or ``Encoder.stream`` yields.
      batch_size: Static size; missing examples are padding with mask 0. Default: as many as there are.

    Returns:
      A batch of NumPy arrays; labels are zeros where the examples have none.

    Raises:
      DatasetError: On what ``pack_batch`` raises it for.
    """
    labels = np.zeros(encoded.examples, np.float32) if encoded.labels is None else encoded.labels
    prepared = packer.prepare({**encoded.by_name(), LABEL: labels})
    size = encoded.examples if batch_size is None else batch_size
    return packer.pack(prepared, np.arange(encoded.examples, dtype=np.int32), size)
