"""Packing: columns of a click log become a ``Batch`` of one layout.

    batch = pack_batch(layout, {"label": labels, "price": prices, "user": users}, dense=["price"])

needs no dataset folder; the loader packs with the same code.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from jrec.batch import Batch
from jrec.data import packing_kernels as kernels
from jrec.data.blocks import LABEL, ListColumn
from jrec.data.packed_window import PackedWindow, regular_ends
from jrec.data.packing_columns import (
    PreparedColumns,
    ReadColumns,
    as_matrix,
    needed_columns,
    prepare_columns,
    read_columns,
)
from jrec.data.schema import DatasetError
from jrec.data.unknown import UnknownCounts
from jrec.data.value_rows import AnyVocabulary, TableVocabulary, ValueRows, vocabulary_of
from jrec.ops.host_cast import with_cast
from jrec.ops.layout import MAX_ROWS, EmbeddingLayout, FeatureConfig, Stack, StackedFeature
from jrec.ops.types import Bags

OnBadId = Literal["raise", "clip", "oov"]
CastPlace = Literal["none", "host"]
Where = Callable[[int], str]
"""Names the place of the example at a position of columns, for messages."""
EXAMPLE: Where = "example {}".format
_POLICIES = {"raise": kernels.RAISE, "clip": kernels.CLIP, "oov": kernels.OOV}
_SCALES = {"mean": kernels.MEAN, "sqrtn": kernels.SQRTN}
# Of a batch and feature. A call takes as long as some thousand lookups; beyond, its cost does not show, and addresses
# of a window go through memory twice: a batch of DLRM-DCNv2 took 1.7 ms instead of 0.6.
_FEW_LOOKUPS = 4096
_NO_WEIGHTS = np.empty(0, np.float32)
_NO_WEIGHTS_2D = np.empty((0, 0), np.float32)
_STORED_ORDER = np.empty(0, np.uint32)
_STORED_ORDER.flags.writeable = False  # as bijections are: Numba compiles for each kind anew


def pack_batch(
    layout: EmbeddingLayout,
    columns: object,
    *,
    dense: Sequence[str] = (),
    label: str | None = LABEL,
    weight: str | None = None,
    extras: Sequence[str] = (),
    batch_size: int | None = None,
    on_bad_id: OnBadId = "raise",
    oov_rows: Mapping[str, int | None] | None = None,
    orders: Mapping[str, np.ndarray] | None = None,
    vocabularies: Mapping[str, AnyVocabulary] | None = None,
    cast: CastPlace = "none",
) -> Batch:
    """Packs examples into one batch of NumPy arrays, which are its own: docs/library.md, "Arrays that you hand over".

    Args:
      layout: Where the model's tables and features lie.
      columns: A mapping by feature name, such as a batch of grain or tf.data, an Arrow table or a DataFrame. Columns
        are (examples,) numbers, or ids of any integer type as one of
        - (examples,), one id an example;
        - (examples, length);
        - lists of any lengths: a ``ListColumn``, an Arrow or polars list column, Python lists, a ragged tensor;
        - texts instead of integers, for tables of ``vocabularies``.
        Absent ids are -1, null or None, and empty lists. Arrays are NumPy's, JAX's or another library's; see
        docs/datasets.md for what each form costs. Weights of feature F are the column ``F:weight``, of the lengths of
        its ids.
      dense: Names of the float features, in the order the model takes them; a column may be (examples, n), n features.
      label: Name of the labels, or None to fill them with 0, as for prediction.
      weight: Name of the examples' weights, finite numbers of at least 0, which become ``Batch.mask``: losses and
        metrics take means by them. None weighs all alike.
      extras: Names of further columns, (examples, ...) numbers, which become ``Batch.extras`` as they are, NaN
        included: groups, a second label.
      batch_size: Static size; missing examples are padding with mask 0. Default: as many as there are.
      on_bad_id: Ids outside of their table "raise", are clipped to its ends, or go to its OOV row.
      oov_rows: OOV row by table; needed for "oov" where the table's vocabulary does not say it.
      orders: By table, where ids are not its rows' numbers: (ids,) uint32, the row in the place of every id, OOV rows
        and clipped ids included. ``jrec reorder`` renumbers all rows (``jrec.data.bijection.load_orders``).
      vocabularies: By table whose columns hold values, texts or integers, instead of row numbers: "hash" gives a
        value the row of its hash, a mapping the row it says, ``load_vocabularies`` the row it has in a prepared
        dataset. Values without a row raise, or go to the OOV row if ``on_bad_id`` is "oov".
      cast: "host" computes the cast of every stack here, "none" leaves it to the device.

    Raises:
      DatasetError: A bad id or an unknown value (under "raise"), texts without a vocabulary, an example with more ids
        than ``max_length``, NaN or infinity, or a missing column. The message names feature, example and value.
      ValueError: Arrays of unequal lengths or of the wrong shape, or more examples than ``batch_size``.

    Example:
      >>> tables = [jrec.TableConfig(name="user", rows=1000, dim=16)]
      >>> layout = jrec.EmbeddingLayout.build(tables, [jrec.FeatureConfig(name="user", table="user")])
      >>> batch = pack_batch(layout, {"label": np.ones(2), "user": np.array([5, 7])})
      >>> batch.bags["d16_float32"].ids
      array([[5],
             [7]], dtype=int32)
    """
    packer = Packer(
        layout,
        dense=dense,
        label=label,
        weight=weight,
        extras=extras,
        on_bad_id=on_bad_id,
        oov_rows=oov_rows,
        orders=orders,
        vocabularies=vocabularies,
        cast=cast,
    )
    prepared = packer.prepare(columns)
    size = prepared.examples if batch_size is None else batch_size
    return packer.pack(prepared, size)


class Packer:
    """Packs batches of one layout; made once, used from any thread.

    Arguments as of ``pack_batch``; ``unknown`` counts the values that have no row of their own in ``vocabularies``.
    With ``unknown_labels`` a label may be NaN: the first of several, a number that is not known.
    """

    def __init__(
        self,
        layout: EmbeddingLayout,
        *,
        dense: Sequence[str] = (),
        label: str | None = LABEL,
        weight: str | None = None,
        extras: Sequence[str] = (),
        on_bad_id: OnBadId = "raise",
        oov_rows: Mapping[str, int | None] | None = None,
        orders: Mapping[str, np.ndarray] | None = None,
        vocabularies: Mapping[str, AnyVocabulary] | None = None,
        cast: CastPlace = "none",
        unknown: UnknownCounts | None = None,
        unknown_labels: bool = False,
    ):
        if on_bad_id not in _POLICIES:
            raise ValueError(f"on_bad_id is {on_bad_id!r}; choose one of {', '.join(_POLICIES)}")
        if cast not in get_args(CastPlace):
            raise ValueError(f"cast is {cast!r}; choose one of {', '.join(get_args(CastPlace))}")
        self.layout = layout
        self.dense = tuple(dense)
        self.label, self.weight = label, weight
        self.unknown_labels = unknown_labels
        self.extras = tuple(extras)
        self.cast: CastPlace = cast
        self.policy = _POLICIES[on_bad_id]
        self.orders = _checked_orders(layout, orders or {})
        known = self._checked_vocabularies(vocabularies or {})
        self.oov_rows = _checked_oov_rows(layout, oov_rows or {}, known) if on_bad_id == "oov" else {}
        self._values = ValueRows(
            vocabularies=known, oov_rows=self.oov_rows if on_bad_id == "oov" else None, unknown=unknown
        )
        self._features = [config for config, _ in layout.features]
        self._single = [name for name in (label, weight) if name is not None]
        self._numbers = [*self._single, *self.dense]

    @property
    def columns(self) -> list[str]:
        """The names of the columns that packing reads."""
        return needed_columns(self._numbers, self._features, self.extras)

    def read(self, columns: object, *, copy: bool = False) -> ReadColumns:
        """Finds the columns that packing reads, in any form that ``pack_batch`` takes; see ``read_columns``."""
        return read_columns(columns, numbers=self._numbers, features=self._features, extras=self.extras, copy=copy)

    def prepare(self, columns: object) -> PreparedColumns:
        """Checks columns, also of ``read``, and brings them into the form that ``pack`` reads.

        What is right already is not copied: pack it before the columns are written to.
        """
        prepared = prepare_columns(
            columns if isinstance(columns, ReadColumns) else self.read(columns),
            numbers=self._numbers,
            features=self._features,
            values=self._values,
            extras=self.extras,
        )
        for name in self._single:
            if (shape := prepared.numbers[name].shape)[1:]:
                role = "label" if name == self.label else "weight"
                raise ValueError(f"{role} {name!r} must be (examples,) numbers, but is {list(shape)}; give one of them")
        ids = {
            feature.name: column if feature.weighted else as_matrix(column, feature.max_length)
            for feature, column in zip(self._features, prepared.ids.values(), strict=True)
        }
        return dataclasses.replace(prepared, ids=ids)

    def _checked_vocabularies(self, vocabularies: Mapping[str, AnyVocabulary]) -> dict[str, TableVocabulary]:
        """The vocabularies of the layout's tables; others, as of a dataset's other tables, are left out."""
        tables = {t.name: t for stack in self.layout.stacks.values() for t in stack.tables}
        if vocabularies and not tables.keys() & vocabularies.keys():
            raise ValueError(
                f"vocabularies name {', '.join(map(str, vocabularies))}, but the tables are {', '.join(sorted(tables))}"
            )
        known = {}
        for name in tables.keys() & vocabularies.keys():
            order = self.orders.get(name)
            known[name] = vocabulary_of(
                name, vocabularies[name], tables[name].table_rows if order is None else order.size
            )
        return known

    def pack(self, columns: PreparedColumns, batch_size: int, where: Where = EXAMPLE, *, number: int = 0) -> Batch:
        """Packs examples into a batch of ``batch_size``, which is at least their number.

        Args:
          columns: From ``prepare``; ``take`` and ``cut`` choose among its examples.
          batch_size: Static size of the batch.
          where: Names the place of the example at a position of the columns, for messages.
          number: The batch's number among all of a run, by which wrappers of this packer draw.
        """
        del number
        if columns.examples > batch_size:
            raise ValueError(f"{columns.examples} examples do not fit into a batch of {batch_size}")
        return _Pack(self, columns, batch_size, where).batch()

    def window(self, columns: PreparedColumns, batch_size: int) -> PackedWindow | None:
        """All examples packed together, for ``batch_of`` to make batches of.

        None where examples have weights, or not all as many ids, and where packing batch by batch is quicker.

        Raises:
          DatasetError: As ``pack``.
        """
        stacks = self.layout.stacks.values()
        lists = any(isinstance(column, ListColumn) for column in columns.ids.values())
        if lists or any(stack.weighted or any(f.is_part for f in stack.features) for stack in stacks):
            return None
        lookups = batch_size * sum(config.max_length for config in self._features)
        if lookups > _FEW_LOOKUPS * len(self._features):
            return None
        return _Pack(self, columns, columns.examples, EXAMPLE).window()


class _Pack:
    """One batch in the making."""

    def __init__(self, packer: Packer, columns: PreparedColumns, batch_size: int, where: Where):
        self.packer, self.columns = packer, columns
        self.batch_size, self.where = batch_size, where
        self.fault = np.full(3, -1, np.int64)

    def batch(self, *, casts: bool = True) -> Batch:
        packer, n, size = self.packer, self.columns.examples, self.batch_size
        # Padding keeps 0, the weight of an example that does not count.
        mask = np.zeros((size, 1), np.float32)
        mask[:n] = 1
        if packer.weight is not None:
            self._numbers([packer.weight], mask[:n])
            self._check_weights(mask[:n, 0])
        labels = np.zeros((size, 1), np.float32)
        if packer.label is not None:
            self._numbers([packer.label], labels[:n], unknown=packer.unknown_labels)
        widths = [math.prod(self.columns.numbers[name].shape[1:]) for name in packer.dense]
        dense = np.zeros((size, sum(widths)), np.float32)
        self._numbers(packer.dense, dense[:n])
        bags = {name: self._bags(stack, casts) for name, stack in packer.layout.stacks.items()}
        extras = {name: self._extra(self.columns.extras[name]) for name in packer.extras}
        # Batch names the arrays as jax.Array; on the host they are NumPy's.
        arrays: Any = {"dense": dense, "labels": labels[:, 0], "mask": mask[:, 0], "extras": extras}
        batch = Batch(bags=bags, **arrays)
        # The batch is frozen, and this says only how it was made.
        object.__setattr__(batch, "packed", True)
        return batch

    def window(self) -> PackedWindow:
        batch: Any = self.batch(casts=False)
        addresses = {name: bags.ids.reshape(-1) for name, bags in batch.bags.items()}
        return PackedWindow(
            layout=self.packer.layout,
            casts=self.packer.cast != "none",
            labels=batch.labels,
            mask=batch.mask,
            dense=batch.dense,
            extras=batch.extras,
            addresses=addresses,
        )

    def _check_weights(self, weights: np.ndarray) -> None:
        if (weights < 0).any():
            k = int(np.argmax(weights < 0))
            raise DatasetError(
                f"weight {self.packer.weight!r} is {weights[k]:g} in {self.where(k)}; a weight is a finite number of at"
                " least 0: fix it, or leave the example out"
            )

    def _extra(self, values: np.ndarray) -> np.ndarray:
        extra = np.zeros((self.batch_size, *values.shape[1:]), values.dtype)
        extra[: len(values)] = values
        return extra

    def _numbers(self, names: Sequence[str], out: np.ndarray, *, unknown: bool = False) -> None:
        numbers, stop = [self.columns.numbers[name] for name in names], 0
        for values in numbers:
            start, stop = stop, stop + math.prod(values.shape[1:])
            out[:, start:stop] = values.reshape(len(out), stop - start)
        if np.isfinite(out).all() or (unknown and not np.isinf(out).any()):
            return
        bad = np.isinf if unknown else lambda values: ~np.isfinite(values)
        name, values = next(named for named in zip(names, numbers, strict=True) if bad(named[1]).any())
        k, *place = np.argwhere(bad(values))[0].tolist()
        raise DatasetError(
            f"{name!r} is {values[k, *place]} in {self.where(k)}; replace or filter such values when the data is"
            " prepared"
        )

    def _bags(self, stack: Stack, casts: bool) -> Bags:
        weights = np.zeros(stack.capacity(self.batch_size), np.float32) if stack.weighted else _NO_WEIGHTS
        ids, offsets = (self._ragged if stack.padded_length is None else self._padded)(stack, weights)
        shaped = weights.reshape(ids.shape) if stack.weighted else None
        bags = Bags(ids=ids, offsets=offsets, weights=shaped)  # pyright: ignore[reportArgumentType]
        return bags if self.packer.cast == "none" or not casts else with_cast(bags, stack)

    def _padded(self, stack: Stack, weights: np.ndarray) -> tuple[np.ndarray, None]:
        ids = np.empty(stack.capacity(self.batch_size), stack.address_dtype)
        n, stop = self.columns.examples, 0
        for feature in stack.features:
            config = feature.config
            start, stop = stop, stop + self.batch_size * config.max_length
            # A feature's examples lie together, and its padding behind them, before the next feature's.
            middle = start + n * config.max_length
            ids[middle:stop] = -1
            column = self.columns.ids[config.name]
            rows = self._table_ids(feature, ids[start:middle])
            if isinstance(column, ListColumn):
                shape = (n, config.max_length)
                kernels.address_padded(
                    column.offsets,
                    column.values,
                    self.columns.weights.get(config.name, _NO_WEIGHTS),
                    *self._address(feature),
                    config.fixed_length,
                    _scale(config),
                    rows.reshape(shape),
                    weights[start:middle].reshape(shape) if stack.weighted else _NO_WEIGHTS_2D,
                    self.fault,
                )
            else:
                self._matrix(feature, column, rows, weights[start:middle])
            self._check(feature)
            if feature.is_part:
                place = (feature.first_row, feature.rows, feature.base)
                kernels.keep_part_padded(*place, rows, ids[start:middle], weights[start:middle])
        return ids.reshape(-1, stack.padded_length or 1), None

    def _ragged(self, stack: Stack, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        ids = np.empty(stack.capacity(self.batch_size), stack.address_dtype)
        offsets = np.zeros(stack.num_bags(self.batch_size) + 1, np.int32)
        bag = position = 0
        for feature in stack.features:
            config, begin = feature.config, position
            column = self.columns.ids[config.name]
            bags = self.batch_size * config.bags_per_example
            ends = offsets[bag + 1 : bag + bags + 1]
            rows = self._table_ids(feature, ids)
            if isinstance(column, ListColumn):
                position = kernels.address_ragged(
                    column.offsets,
                    column.values,
                    self.columns.weights.get(config.name, _NO_WEIGHTS),
                    *self._address(feature),
                    config.max_length,
                    config.fixed_length,
                    _scale(config),
                    config.unpooled,
                    position,
                    rows,
                    weights,
                    ends,
                    self.fault,
                )
            else:
                position = regular_ends(config.max_length, config.unpooled, len(column), begin, ends)
                self._matrix(feature, column, rows[begin:position], weights[begin:position])
            self._check(feature)
            if feature.is_part:
                place = (feature.first_row, feature.rows, feature.base)
                position = kernels.keep_part_ragged(*place, begin, rows, ids, weights, ends)
            bag += bags
        ids[position:] = -1
        return ids, offsets

    def _matrix(self, feature: StackedFeature, column: np.ndarray, rows: np.ndarray, weights: np.ndarray) -> None:
        """The rows of a feature that has max_length ids in every example, and their weights if the stack has any."""
        length = feature.config.max_length
        kernels.address_ids(column.reshape(-1), length, *self._address(feature), rows, self.fault)
        weights[:] = kernels.weight_factor(_scale(feature.config), length)

    @staticmethod
    def _table_ids(feature: StackedFeature, ids: np.ndarray) -> np.ndarray:
        """Where a feature's rows are gathered: among the addresses, unless only a part of its table is addressed there
        and the whole has rows that these cannot number.
        """
        return np.empty(ids.shape, np.int64) if feature.is_part and feature.table_rows >= MAX_ROWS else ids

    def _address(self, feature: StackedFeature) -> tuple[int, int, int, int, np.ndarray]:
        """Base, rows, policy, OOV row and order, as the kernels take them; a part has its whole table's."""
        packer, table = self.packer, feature.config.table
        order = packer.orders.get(table, _STORED_ORDER)
        # Of a part rows are first those of the whole table, of which ``keep_part`` then takes the part's.
        base = 0 if feature.is_part else feature.base
        return base, self._ids(feature), packer.policy, packer.oov_rows.get(table, 0), order

    def _ids(self, feature: StackedFeature) -> int:
        """How many ids a feature's table has: those that its order numbers, or its rows."""
        order = self.packer.orders.get(feature.config.table)
        return feature.table_rows if order is None else order.size

    def _check(self, feature: StackedFeature) -> None:
        k, kind, value = (int(v) for v in self.fault)
        if k < 0:
            return
        config = feature.config
        if kind == kernels.BAD_ID:
            raise DatasetError(
                f"id {value} of feature {config.name!r} in {self.where(k)} is outside of table {config.table!r}, which"
                f" has {self._ids(feature):,} rows; give the table more rows, or choose on_bad_id 'clip' or 'oov'"
            )
        if kind == kernels.BAD_NUMBER:
            raise DatasetError(
                f"a weight of feature {config.name!r} in {self.where(k)} is NaN or infinite; replace or filter such"
                " values when the data is prepared"
            )
        wanted = "exactly" if config.fixed_length else "at most"
        raise DatasetError(
            f"feature {config.name!r} has {value} ids in {self.where(k)}, but {wanted} max_length={config.max_length}"
            " are promised; raise max_length or cut such examples when the data is prepared"
        )


def _scale(config: FeatureConfig) -> int:
    """How a feature's weights depend on the lengths of its bags, as the kernels take it."""
    return _SCALES.get(config.pooling, kernels.SUM)


def _checked_oov_rows(
    layout: EmbeddingLayout, oov_rows: Mapping[str, int | None], vocabularies: Mapping[str, TableVocabulary]
) -> dict[str, int]:
    checked = {}
    for table in (t for stack in layout.stacks.values() for t in stack.tables):
        row, vocabulary = oov_rows.get(table.name), vocabularies.get(table.name)
        if row is None and vocabulary is not None:
            if vocabulary.complete:
                continue
            row = vocabulary.oov_row
        if row is None:
            raise ValueError(
                f"on_bad_id is 'oov', but table {table.name!r} has no OOV row; name one, or use 'raise' or 'clip'"
            )
        if not 0 <= row < table.table_rows:
            raise ValueError(f"the OOV row of table {table.name!r} is {row}, but it has {table.table_rows:,} rows")
        checked[table.name] = row
    return checked


def kept_orders(orders: Mapping[str, np.ndarray] | None) -> dict[str, np.ndarray]:
    """Orders for a packer that outlasts the call: copies, but of those that nobody can write to, as to a mapped file.

    A read-only view does not do: whoever has the array that it shows can write to it.
    """
    return {name: order if _is_constant(order) else np.array(order) for name, order in (orders or {}).items()}


def _is_constant(array: Any) -> bool:
    while isinstance(array, np.ndarray) and not array.flags.writeable:
        array = array.base
    return array is None or isinstance(array, mmap.mmap)


def _checked_orders(layout: EmbeddingLayout, orders: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Read-only views of the orders of the layout's tables; none may lead out of its table."""
    checked = {}
    for table in (t for stack in layout.stacks.values() for t in stack.tables if t.name in orders):
        order, rows = np.asarray(orders[table.name]).view(), table.table_rows
        fits = order.dtype == np.uint32 and order.ndim == 1 and 1 <= order.size <= rows
        if not fits or (order >= rows).any():
            raise ValueError(
                f"the order of table {table.name!r} must be uint32 rows of its {rows:,}, one for every id, but is"
                f" {order.dtype}{list(order.shape)}"
            )
        order.flags.writeable = False
        checked[table.name] = np.require(order, requirements=["C", "A"])
    return checked
