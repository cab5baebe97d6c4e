"""Rows of stacks that lie whole on one device: which change, and what they were at the step of a checkpoint."""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrec.checkpoint.manifest import TableShape
from jrec.checkpoint.sources import Piece
from jrec.checkpoint.undo import DIRTY, PENDING, Undo, mark
from jrec.ops.layout import Stack

Arrays = Mapping[str, jax.Array]
_SIZES = (1 << 10, 1 << 13, 1 << 16)


class DeviceRows:
    """A stack on the device, for checkpoints; see ``jrec.checkpoint.sources.Source``.

    It keeps a byte a row in host memory.

    Args:
      stack: The tables.
      slots: The optimizer's slots, by name "row" or "element".
      arrays: Gives the stack's arrays as they are now, "values" and slots, (rows, dim or more) or (rows,).
    """

    def __init__(self, stack: Stack, slots: Mapping[str, str], arrays: Callable[[], Arrays]):
        self.stack = stack
        self.tables = stack_shapes(stack, slots)
        self._arrays, self._flags, self._undo = arrays, np.zeros(stack.rows, np.uint8), Undo()
        self._writing = False
        self._room: dict[int, collections.deque[dict[str, jax.Array]]] = {}  # by rows, memory to read into
        self._read: dict[str, jax.Array] | None = None

    def changed(self) -> dict[str, tuple[int, int]]:
        """By table: rows changed since the last checkpoint, and all rows of the table."""
        return {
            name: (int(np.count_nonzero(self._flags[base : base + shape.rows] & DIRTY)), shape.rows)
            for (name, shape), base in zip(self.tables.items(), self.stack.bases, strict=True)
        }

    def begin(self, full: Collection[str]) -> list[Piece]:
        """The pieces of a checkpoint of this moment; flags their rows as pending."""
        self._undo.clear()  # of one that failed
        pieces: list[Piece] = []
        for (name, shape), base in zip(self.tables.items(), self.stack.bases, strict=True):
            flags = self._flags[base : base + shape.rows]
            if name in full:
                flags[:] = PENDING
                pieces.append(_DevicePiece(self, name, None, shape.rows, base))
            else:
                rows = np.flatnonzero(flags & DIRTY)
                flags[:] = 0
                flags[rows] = PENDING
                if rows.size:
                    pieces.append(_DevicePiece(self, name, rows, rows.size, base))
        self._writing = True
        return pieces

    def end(self) -> None:
        """Says that the checkpoint is written, or will not be: old rows are kept no longer."""
        self._writing = False
        self._undo.clear()
        self._room, self._read = {}, None

    @property
    def undo_bytes(self) -> int:
        """Bytes of the old rows that are kept."""
        return self._undo.bytes

    def compile_reads(self) -> None:
        """Compiles in a thread what reads rows, so that no step waits for it once a checkpoint begins."""
        arrays = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in self._arrays().items()}
        threading.Thread(target=_compile, args=(arrays,), name="jrec-checkpoint-compile").start()

    def before_step(self, addresses: np.ndarray) -> None:
        """Says which rows the next step may change, before it is dispatched.

        Args:
          addresses: (n,) int, repeated or not; negative ones are none.
        """
        pending = np.empty(addresses.size, addresses.dtype)
        count = mark(self._flags, addresses.reshape(-1), pending)
        if count and self._writing:
            kept = np.sort(pending[:count])
            arrays = gathered(self._arrays(), kept)
            self._undo.add(kept, arrays, sum(array.nbytes for array in arrays.values()))

    def read_range(self, begin: int, stop: int) -> dict[str, tuple[jax.Array, int]]:
        """Starts to read rows, in one of few sizes: arrays by name, and where ``begin`` is in them."""
        self._flags[begin:stop] &= ~PENDING
        arrays = self._arrays()
        rows = next(iter(arrays.values())).shape[0]
        size = min(_bucket(stop - begin), rows)
        start = min(begin, rows - size)
        room = self._room.get(size)
        read = _slice_into(room.pop(), arrays, np.int32(start)) if room else _slice(arrays, np.int32(start), size)
        return {name: (array, begin - start) for name, array in read.items()}

    def taken(self, read: dict[str, jax.Array]) -> None:
        """Says that the writing thread looks at these arrays from ``read_range`` now, and at those before no longer.

        Memory that is new to the process comes page by page, which takes longer than to copy the rows: so it is used
        again.
        """
        if (before := self._read) is not None:
            size = next(iter(before.values())).shape[0]
            self._room.setdefault(size, collections.deque()).append(before)
        self._read = read


@dataclasses.dataclass(kw_only=False)
class _DevicePiece:
    """See ``jrec.checkpoint.sources.Piece``."""

    source: DeviceRows
    table: str
    rows: np.ndarray | None
    count: int
    base: int
    folder: str = ""

    def begin(self, start: int, stop: int) -> dict[str, tuple[jax.Array, int]]:
        source = self.source
        if self.rows is None:
            return source.read_range(self.base + start, self.base + stop)
        addresses = self.rows[start:stop] + self.base
        source._flags[addresses] &= ~PENDING
        return {name: (array, 0) for name, array in gathered(source._arrays(), addresses).items()}

    def finish(self, begun: dict[str, tuple[jax.Array, int]], start: int, stop: int) -> dict[str, np.ndarray]:
        source, shape, arrays = self.source, self.source.tables[self.table], {}
        if self.rows is None:
            source.taken({name: array for name, (array, _) in begun.items()})
        for name, (array, first) in begun.items():
            rows = np.asarray(array)[first : first + stop - start]
            arrays[name] = rows[:, : shape.dim] if rows.ndim == 2 else rows
        where = (self.base + start, self.base + stop) if self.rows is None else self.rows[start:stop] + self.base
        return source._undo.overlay(where, arrays)


def stack_shapes(stack: Stack, slots: Mapping[str, str]) -> dict[str, TableShape]:
    """The shapes of a stack's tables by name."""
    return {
        t.name: TableShape(name=t.name, rows=t.rows, dim=t.dim, dtype=t.dtype, slots=dict(slots)) for t in stack.tables
    }


def _compile(arrays: dict[str, jax.ShapeDtypeStruct]) -> None:
    rows = next(iter(arrays.values())).shape[0]
    for size in _SIZES:
        _gather.lower(arrays, jax.ShapeDtypeStruct((size,), jnp.int32)).compile()
        slices = _slice.lower(arrays, np.int32(0), min(size, rows))
        slices.compile()
        room = {name: jax.ShapeDtypeStruct(out.shape, out.dtype) for name, out in slices.out_info.items()}
        _slice_into.lower(room, arrays, np.int32(0)).compile()


def gathered(arrays: Arrays, addresses: np.ndarray) -> dict[str, jax.Array]:
    """Rows at (n,) addresses, in one of few sizes; what follows them is some row's."""
    padded = np.zeros(_bucket(addresses.size), np.int32)
    padded[: addresses.size] = addresses
    return _gather(dict(arrays), padded)


def _bucket(count: int) -> int:
    """The static size in which rows are read: a few powers of two, then multiples of the largest.

    A program is compiled for each, which steps may have to wait for: so there are three of them, whatever the tables.
    """
    size = next((size for size in _SIZES if count <= size), _SIZES[-1])
    return -(-count // size) * size


@functools.partial(jax.jit, static_argnums=2)
def _slice(arrays: Arrays, start: Any, size: int) -> dict[str, jax.Array]:
    return {name: jax.lax.dynamic_slice_in_dim(array, start, size) for name, array in arrays.items()}


@functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
def _slice_into(room: dict[str, jax.Array], arrays: Arrays, start: Any) -> dict[str, jax.Array]:
    """As many rows as ``room`` has, in its memory."""
    return {name: jax.lax.dynamic_slice_in_dim(array, start, room[name].shape[0]) for name, array in arrays.items()}


@jax.jit
def _gather(arrays: dict[str, jax.Array], addresses: Any) -> dict[str, jax.Array]:
    return {name: array.at[addresses].get(mode="clip") for name, array in arrays.items()}
