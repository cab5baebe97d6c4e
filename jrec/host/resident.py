"""Rows of a host stack that stay on the device for a whole run, such as FAE's hot rows: they never travel.

A batch's small table takes its resident rows from here and leaves them here, in place; the ring and the host have no
part in them (``HostPipeline``). A batch that reads resident rows alone needs no small table: the resident rows are its
stack (``jrec.train.host_step.train_step_on_resident``).

Values are float32, whatever the table's dtype, and padded as the model stores its own stacks, so that a step works on
them as they are. Widening is exact, and what the steps leave here was rounded to the table's dtype.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrec.host.ring import Rows, bucket
from jrec.host.table import HostTable
from jrec.ops.storage import pad, strip

_PAST = np.iinfo(np.int32).max  # past every array: a scatter drops it, a gather takes the last row instead


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """Which unique rows of a batch are resident.

    NumPy arrays, or, padded and on the device, JAX arrays.

    Attributes:
      places: (m,) int32, ascending, of the resident ones among the batch's unique rows.
      indices: (m,) int32, ascending, of the same among the resident rows.
      others: (n - m,) int32, ascending, places of those that are not.
    """

    places: Any
    indices: Any
    others: Any

    def padded(self, capacity: int) -> Split:
        """In the static sizes in which they travel, the padding past all arrays.

        Args:
          capacity: of the batch's small table.
        """
        return Split(**{field.name: _padded(getattr(self, field.name), capacity) for field in dataclasses.fields(self)})


jax.tree_util.register_dataclass(Split)


class ResidentRows:
    """The resident rows of one stack; made with their values in the table.

    Args:
      addresses: (n,) integers, ascending, n at least 1: which rows of the stack.
      table: the stack in host memory.
      pad_rows: whether the model pads stored rows to a multiple of 16 bytes (``EmbeddingCollection.pad_rows``).
      device: to be on; None for JAX's first.

    Attributes:
      rows: as they are now; a step that takes them must leave the new ones here.

    Raises:
      ValueError: on addresses outside the stack or out of order.
    """

    def __init__(self, addresses: np.ndarray, table: HostTable, *, pad_rows: bool = False, device: Any = None):
        if not addresses.size:
            raise ValueError(f"no row of stack {table.stack.name} is resident; leave the stack out, or name a row")
        self.addresses = np.ascontiguousarray(addresses, table.stack.address_dtype)
        self._dim, self._dtype = table.dim, table.dtype
        self._pad_rows, self._device = pad_rows, jax.devices()[0] if device is None else device
        self.load(table)

    @property
    def row_bytes(self) -> int:
        """Of a row and its slots in host memory."""
        slots = sum(4 * (self._dim if array.ndim == 2 else 1) for array in self.rows.slots.values())
        return self._dim * self._dtype.itemsize + slots

    def load(self, table: HostTable) -> None:
        """Takes rows and slots from the table, for a run that goes on. Not while another thread writes there."""
        values, slots = table.fetch(self.addresses)
        rows = Rows(values=values.astype(np.float32, copy=False), slots=slots)
        self.rows: Rows = jax.device_put(_stored(rows) if self._pad_rows else rows, self._device)

    def store(self, table: HostTable) -> None:
        """Writes rows and slots to the table, for a checkpoint. Not while another thread uses these rows of it."""
        rows = jax.tree.map(np.asarray, self.rows)
        slots = {n: np.ascontiguousarray(a[:, : self._dim]) if a.ndim == 2 else a for n, a in rows.slots.items()}
        table.store(
            self.addresses, np.ascontiguousarray(rows.values[:, : self._dim]).astype(self._dtype, copy=False), slots
        )

    def split(self, rows: np.ndarray) -> Split:
        """Finds the resident ones among (n,) ascending rows of the stack."""
        at = np.searchsorted(self.addresses, rows)
        found = self.addresses[np.minimum(at, self.addresses.size - 1)] == rows
        places, others = (np.flatnonzero(which).astype(np.int32) for which in (found, ~found))
        return Split(places=places, indices=at[places].astype(np.int32), others=others)

    def fill(self, rows: Rows, split: Split) -> Rows:
        """A batch's rows, with the resident ones as they are now in their places.

        Args:
          rows: (capacity, dim), with slots or without; donated.
          split: ``padded``, on the device.
        """
        here = self._here()
        resident = Rows(values=here.values, slots={name: here.slots[name] for name in rows.slots})
        return _fill(rows, resident, split)

    def _here(self) -> Rows:
        """The rows on the device on which batches' rows are put together."""
        return self.rows

    def update(self, rows: Rows, split: Split) -> None:
        """Takes a batch's resident rows as its step left them; arguments as of ``fill``, but nothing is donated."""
        self.rows = _update(self.rows, rows, split)


@jax.jit
def others(rows: Rows, split: Split) -> Rows:
    """The rows of a batch that are not resident, in the size of ``split.others``."""
    return jax.tree.map(lambda array: array.at[split.others].get(mode="clip"), rows)


def _padded(numbers: np.ndarray, capacity: int) -> np.ndarray:
    size = bucket(numbers.size, capacity)
    return np.concatenate([numbers, np.arange(_PAST - size + numbers.size, _PAST, dtype=np.int32)])


def _stored(rows: Rows) -> Rows:
    return Rows(values=pad(rows.values), slots={n: pad(a) if a.ndim == 2 else a for n, a in rows.slots.items()})


@functools.partial(jax.jit, donate_argnums=0)
def _fill(rows: Rows, resident: Rows, split: Split) -> Rows:
    def fill(new: jax.Array, stored: jax.Array) -> jax.Array:
        taken = stored.at[split.indices].get(mode="clip", indices_are_sorted=True)
        taken = strip(taken, new.shape[1]) if new.ndim == 2 else taken
        return _set(new, split.places, taken)

    return jax.tree.map(fill, rows, resident)


def updated(resident: Rows, rows: Rows, split: Split) -> Rows:
    """Resident rows with those of a batch's rows that are resident; arguments as of ``ResidentRows.update``."""

    def update(stored: jax.Array, new: jax.Array) -> jax.Array:
        taken = new.at[split.places].get(mode="clip", indices_are_sorted=True)
        if new.ndim == 2:
            taken = jnp.pad(taken, ((0, 0), (0, stored.shape[1] - new.shape[1])))
        return _set(stored, split.indices, taken)

    return jax.tree.map(update, resident, rows)


_update = jax.jit(updated, donate_argnums=0)


def _set(array: jax.Array, at: Any, values: jax.Array) -> jax.Array:
    return array.at[at].set(values.astype(array.dtype), mode="drop", indices_are_sorted=True, unique_indices=True)
