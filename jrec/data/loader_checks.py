"""Whether a dataset and an embedding layout fit together, told before the first batch."""

from __future__ import annotations

import os
from collections.abc import Mapping

from jrec.data.schema import CategoricalFeature, DatasetError, Schema
from jrec.ops.layout import EmbeddingLayout, FeatureConfig, TableConfig


def check_split(folder: str | os.PathLike[str], schema: Schema, split: str, least: int) -> None:
    """Raises DatasetError if there is no such split, or if it has fewer than ``least`` examples."""
    if split not in schema.splits:
        raise DatasetError(f"{folder} has no {split!r} split; it has {', '.join(schema.splits) or 'none'}")
    examples = schema.splits[split].examples
    if not examples:
        raise DatasetError(
            f"the {split!r} split of {folder} has no examples; prepare more rows or other split fractions"
        )
    if examples < least:
        raise DatasetError(
            f"the {split!r} split of {folder} has {examples:,} examples, less than one full batch for every process"
            f" ({least:,}); reduce the batch size or pad the last batch (drop_remainder = false)"
        )


def check_layout(
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
    if stored.weighted != config.weighted:
        stated = ("weighted", "unweighted") if stored.weighted else ("unweighted", "weighted")
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
