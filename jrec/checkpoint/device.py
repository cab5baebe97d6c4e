"""Rows of stacks that lie whole on one device, for checkpoints, and how rows are read from a device."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jrec.checkpoint.changing import ChangingRows, Part, Where
from jrec.checkpoint.manifest import TableShape
from jrec.ops.layout import Stack

Arrays = Mapping[str, jax.Array]
_SIZES = (1 << 10, 1 << 12, 1 << 14, 1 << 16)


class DeviceRows(ChangingRows):
    """A stack on the device, for checkpoints; see ``jrec.checkpoint.sources.CheckpointSource``.

    Args:
      stack: The tables.
      slots: The optimizer's slots, by name "row" or "element".
      arrays: Gives the stack's arrays as they are now, "values" and slots, (rows, dim or more) or (rows,).
    """

    def __init__(self, stack: Stack, slots: Mapping[str, str], arrays: Callable[[], Arrays]):
        super().__init__(stack, slots)
        self._arrays = arrays
        self._room: dict[int, collections.deque[dict[str, jax.Array]]] = {}  # by rows, memory to read into
        self._read: dict[str, jax.Array] | None = None

    def end(self) -> None:
        """Says that the checkpoint is written, or will not be: old rows are kept no longer."""
        super().end()
        self._room, self._read = {}, None

    def compile_all(self) -> Callable[[], None]:
        """What compiles all that reads rows; to be called in a thread."""
        arrays = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in self._arrays().items()}
        return functools.partial(_compile, arrays)

    def read(self, addresses: np.ndarray) -> list[Part]:
        """Starts to read the rows at (n,) ascending addresses, as they are now."""
        return [Part(None, gathered(self._arrays(), addresses))]

    def read_range(self, begin: int, stop: int) -> list[Part]:
        """Starts to read a range of rows, as they are now, in one of few sizes."""
        arrays = self._arrays()
        rows = next(iter(arrays.values())).shape[0]
        size = min(_bucket(stop - begin), rows)
        # XLA would move a slice that passes the end by itself, and not say so: ``Part.first`` says where the rows
        # begin.
        start = min(begin, rows - size)
        room = self._room.get(size)
        read = _slice_into(room.pop(), arrays, np.int32(start)) if room else _slice(arrays, np.int32(start), size)
        return [Part(None, read, begin - start)]

    def finish_read(self, parts: list[Part], where: Where, shape: TableShape) -> dict[str, np.ndarray]:
        """The rows of one table as of the checkpoint's step, by array; in the thread that writes.

        Memory that is new to the process comes page by page, which takes longer than to copy the rows. So the
        memory of the range before, at which nobody looks any more, is used again.
        """
        if isinstance(where, tuple):
            before, self._read = self._read, parts[0].arrays
            if before is not None:
                size = next(iter(before.values())).shape[0]
                self._room.setdefault(size, collections.deque()).append(before)
        return super().finish_read(parts, where, shape)


def compile_gathers(arrays: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Compiles ``gathered`` for arrays of these shapes."""
    for size in _sizes(arrays):
        _gather.lower(dict(arrays), jax.ShapeDtypeStruct((size,), jnp.int32)).compile()


def _compile(arrays: dict[str, jax.ShapeDtypeStruct]) -> None:
    compile_gathers(arrays)
    rows = next(iter(arrays.values())).shape[0]
    for size in _sizes(arrays):
        slices = _slice.lower(arrays, np.int32(0), min(size, rows))
        slices.compile()
        room = {name: jax.ShapeDtypeStruct(out.shape, out.dtype) for name, out in slices.out_info.items()}
        _slice_into.lower(room, arrays, np.int32(0)).compile()


def _sizes(arrays: Mapping[str, jax.ShapeDtypeStruct]) -> list[int]:
    """In which sizes rows of these arrays are read."""
    rows = next(iter(arrays.values())).shape[0]
    return [size for size, smaller in zip(_SIZES, (0, *_SIZES), strict=False) if smaller < rows]


def gathered(arrays: Arrays, addresses: np.ndarray) -> dict[str, jax.Array]:
    """Rows at (n,) addresses, in one of few sizes; what follows them is some row's."""
    padded = np.zeros(_bucket(addresses.size), np.int32)
    padded[: addresses.size] = addresses
    return _gather(dict(arrays), padded)


def _bucket(count: int) -> int:
    """The static size in which rows are read: a few powers of two, then multiples of the largest.

    A program is compiled for each, which steps may have to wait for: so there are few of them, whatever the tables.
    """
    size = next((size for size in _SIZES if count <= size), _SIZES[-1])
    return -(-count // size) * size


@functools.partial(jax.jit, static_argnums=2)
def _slice(arrays: Arrays, start: np.int32, size: int) -> dict[str, jax.Array]:
    return {name: jax.lax.dynamic_slice_in_dim(array, start, size) for name, array in arrays.items()}


# Only the memory of ``room`` is used, none of its values: JAX would drop it, and the donation, without ``keep_unused``.
@functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
def _slice_into(room: dict[str, jax.Array], arrays: Arrays, start: np.int32) -> dict[str, jax.Array]:
    """As many rows as ``room`` has, in its memory."""
    return {name: jax.lax.dynamic_slice_in_dim(array, start, room[name].shape[0]) for name, array in arrays.items()}


@jax.jit
def _gather(arrays: dict[str, jax.Array], addresses: jax.Array | np.ndarray) -> dict[str, jax.Array]:
    return {name: array.at[addresses].get(mode="clip") for name, array in arrays.items()}
