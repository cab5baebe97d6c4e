"""Casts of a batch's bags on the host, before the step."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from jrec.ops.layout import Stack
from jrec.ops.types import Bags


def with_cast(bags: Bags, stack: Stack, *, threads: int | None = 1) -> Bags:
    """Bags with their cast, which is computed here unless they have one.

    Args:
      bags: NumPy arrays, feature-major, of whole examples.
      stack: The stack that the bags read.
      threads: One for a loader's threads, which run side by side; None for all CPUs.
    """
    if bags.cast is not None:
        return bags
    from jrec.native import host

    ids, offsets = np.asarray(bags.ids), None if bags.offsets is None else np.asarray(bags.offsets)
    examples, most = bags.num_bags // stack.bags_per_example, min(ids.size, stack.rows)
    if ids.size <= stack.capacity(examples):  # longer bags than the layout's have room for all of their rows
        most = stack.unique_capacity(examples)
    cast = host.tensor_cast(
        ids,
        offsets,
        num_rows=stack.rows,
        unique_capacity=most,
        segments=_table_bounds(stack) * (examples, 1),
        threads=threads,
    )
    return dataclasses.replace(bags, cast=cast)


@functools.cache
def _table_bounds(stack: Stack) -> np.ndarray:
    """(tables + 1, 2) int64: first bag of every table for a batch of one, and its first row."""
    first_bag: dict[str, int] = {}
    for feature in stack.features:
        first_bag.setdefault(feature.config.table, feature.first_bag)
    bounds = [(first_bag[t.name], base) for t, base in zip(stack.tables, stack.bases, strict=True)]
    return np.array([*bounds, (stack.bags_per_example, stack.rows)], np.int64)
