"""Rows that a model holds on one device, on their way to where a plan puts them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import jax
import numpy as np
from flax import nnx

from jrec.checkpoint.manifest import VALUES
from jrec.nn import SparseOptimizer
from jrec.nn.optimizer import SparseModel
from jrec.ops.layout import EmbeddingLayout, Stack
from jrec.row_optimizers import RowOptimizer
from jrec.run.placement.rows import first_rows


class RowSource(Protocol):
    """Rows by address: a checkpoint (``jrec.checkpoint.Saved``), or a model (``ModelRows``)."""

    def read(self, stack: Stack, array: str, addresses: np.ndarray) -> np.ndarray:
        """Rows of "values", or of a slot, at (n,) addresses of a stack, in any order."""
        ...


class ModelRows:
    """The rows and slots of a model's tables, by the addresses of another layout of the same tables.

    Args:
      layout: The layout of the arrays.
      arrays: By stack, "values" and slots, (rows, dim or more) or (rows,).
    """

    def __init__(self, layout: EmbeddingLayout, arrays: Mapping[str, Mapping[str, jax.Array]]):
        self._arrays, self._places = dict(arrays), {}
        for name in self._arrays:
            stack = layout.stacks[name]
            self._places |= {t.name: (name, base) for t, base in zip(stack.tables, stack.bases, strict=True)}

    def has_table(self, name: str) -> bool:
        """Whether a table is here."""
        return name in self._places

    def has(self, stack: Stack) -> bool:
        """Whether a table of a stack is here."""
        return any(table.name in self._places for table in stack.tables)

    def read(self, stack: Stack, array: str, addresses: np.ndarray) -> np.ndarray:
        """Rows at (n,) addresses of a stack, see ``RowSource``; zeros of tables that are not here."""
        addresses = addresses.astype(np.int64)
        number = np.searchsorted(stack.bases, addresses, side="right") - 1
        places = [self._places.get(table.name) for table in stack.tables]
        shifts = np.array([0 if at is None else at[1] - base for at, base in zip(places, stack.bases, strict=True)])
        out: np.ndarray | None = None
        # All tables of an array at once: rows of each by itself would be a compiled program for each number of them.
        for name in dict.fromkeys(at[0] for at in places if at is not None):
            chosen = np.array([at is not None and at[0] == name for at in places])[number]
            here = (addresses + shifts[number])[chosen].astype(np.int32)
            rows = np.asarray(_gathered(self._arrays[name][array], here))
            rows = rows[:, : stack.dim] if rows.ndim == 2 else rows
            out = np.zeros((addresses.size, *rows.shape[1:]), rows.dtype) if out is None else out
            out[chosen] = rows
        assert out is not None  # the stack has one of the tables
        return out


class WithFirstRows:
    """A model's rows of a stack, and of tables that the model does not hold the first ones; see ``RowSource``.

    Under a plan tables of tier "host" share a stack with others, and ``everywhere`` may have rows of theirs on devices.

    Args:
      held: The model's rows.
      key: The key of the model's tables.
      optimizer: The row optimizer; None without slots.
    """

    def __init__(self, held: ModelRows, key: jax.Array, optimizer: RowOptimizer | None):
        self._held, self._key, self._optimizer = held, key, optimizer

    def read(self, stack: Stack, array: str, addresses: np.ndarray) -> np.ndarray:
        """Rows at (n,) addresses of a stack, see ``RowSource``."""
        rows = self._held.read(stack, array, addresses)
        here = np.array([self._held.has_table(table.name) for table in stack.tables])
        missing = ~here[np.searchsorted(stack.bases, addresses, side="right") - 1]
        if not missing.any():
            return rows
        if array == VALUES:
            # Of all addresses: the first rows of only the missing ones would be a compiled program for each number.
            rows[missing] = np.asarray(first_rows(stack, self._key, addresses.astype(np.int32)))[missing]
        else:
            assert self._optimizer is not None  # whose slot it is
            rows[missing] = self._optimizer.initial_slot(array)
        return rows


@jax.jit
def _gathered(array: jax.Array, rows: jax.Array) -> jax.Array:
    return array[rows]


def without_rows(
    model: SparseModel, optimizer: SparseOptimizer
) -> tuple[SparseModel, SparseOptimizer, ModelRows | None]:
    """The same modules for a plan that places the rows, and the rows; None where the model has not made them yet.

    Args:
      model, optimizer: Modules that hold all rows on one device, or in host memory; they stay as they are.
    """
    # Modules of its own over the same arrays, so that the caller's keep their rows.
    graph, state = nnx.split((model, optimizer))
    model, optimizer = nnx.merge(graph, state)
    embeddings, before = model.embeddings, model.embeddings.layout
    slots = {stack: {n: s.get_value() for n, s in own.items()} for stack, own in optimizer.slots.items()}
    arrays = {name: {VALUES: rows, **slots[name]} for name, rows in embeddings.arrays().items()}
    made = not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(arrays))
    layout = before.with_plan()
    embeddings.without_rows(layout)
    optimizer.without_rows(before, layout)
    return model, optimizer, ModelRows(before, arrays) if made and arrays else None
