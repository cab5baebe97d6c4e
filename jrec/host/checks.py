"""Checks of a host table's arguments, made once, before anything is read or written."""

from __future__ import annotations

import numpy as np

from jrec.native.host_cast import checked_ids
from jrec.ops.layout import Stack
from jrec.ops.types import Bags


def checked_rows(rows: np.ndarray, stack: Stack, *, ascending: bool = True) -> np.ndarray:
    """C-contiguous addresses.

    Raises:
      ValueError: If they are not (n,) int32 or int64, not in the stack, or, where ``ascending``, not ascending and
        unique.
    """
    if rows.ndim != 1 or rows.dtype not in (np.int32, np.int64):
        raise ValueError(f"rows must be (n,) int32 or int64 addresses, but are {rows.dtype}{list(rows.shape)}")
    rows = np.ascontiguousarray(rows)
    if ascending and np.any(rows[1:] <= rows[:-1]):
        at = 1 + int(np.argmax(rows[1:] <= rows[:-1]))
        raise ValueError(
            f"rows[{at}] is {rows[at]} after {rows[at - 1]}; addresses must ascend without repeats, as a cast's rows do"
        )
    ends = rows[[0, -1]] if ascending and rows.size else rows
    if ends.size and (ends.min() < 0 or ends.max() >= stack.rows):
        at = int(np.argmax((rows < 0) | (rows >= stack.rows)))
        raise _outside(f"rows[{at}]", int(rows[at]), stack)
    return rows


def checked_bags(bags: Bags, stack: Stack) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """C-contiguous ids and offsets of bags, and the flat ids that lie in bags.

    Raises:
      ValueError: On shapes, dtypes or offsets that do not fit, or an id past the stack.
    """
    offsets = None if bags.offsets is None else np.asarray(bags.offsets)
    ids, offsets = checked_ids(np.asarray(bags.ids), offsets, wide=True)
    lookups = ids.reshape(-1) if offsets is None else ids[: offsets[-1]]
    if lookups.size and lookups.max() >= stack.rows:
        place = np.unravel_index(int(np.argmax(lookups >= stack.rows)), ids.shape)
        raise _outside(f"ids{[int(i) for i in place]}", int(ids[place]), stack)
    return ids, offsets, lookups


def checked_values(name: str, array: np.ndarray, shape: tuple[int, ...], dtype: np.dtype, *, written: bool) -> None:
    """Raises ValueError if the array does not have the shape, dtype and memory layout that the kernels take."""
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(f"{name} must be {dtype} of shape {shape}, but is {array.dtype}{list(array.shape)}")
    if not array.flags.c_contiguous or (written and not array.flags.writeable):
        needed = "writable and C-contiguous" if written else "C-contiguous"
        raise ValueError(f"{name} must be {needed}, but has strides {array.strides}; make a copy of it")


def _outside(name: str, value: int, stack: Stack) -> ValueError:
    return ValueError(
        f"{name} is {value:,}, but stack {stack.name} has rows 0 to {stack.rows - 1:,}; addresses are a table's base"
        " and an id below the table's rows"
    )
