"""Where the rows of a run's stacks live: one tier a stack, which makes, reads, loads and saves its rows.

A plan places the rows of a stack over devices and host memory (``jrec.run.placed``). Without one they lie in the model,
in host memory, or in tensor-train cores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from jrec.checkpoint import DeviceRows, Saved
from jrec.checkpoint import HostRows as HostSource
from jrec.checkpoint.changing import ChangingRows
from jrec.checkpoint.manifest import VALUES
from jrec.checkpoint.sources import CheckpointSource
from jrec.host import HostTable
from jrec.host.paging import MemoryLimit
from jrec.mesh.route import MeshRows
from jrec.nn.optimizer import SparseModel
from jrec.ops import SGD
from jrec.ops.layout import Stack
from jrec.ops.tt import tt_rows
from jrec.row_optimizers import RowOptimizer
from jrec.run.options import HostOptions
from jrec.run.placement.new_lines import Addresses, Lines, MeshLines, SetAddresses


class Tier:
    """The rows of one stack; the base of all tiers, for rows that are in the run's state.

    Attributes:
      stack: The tables.
      host: The rows in host memory that batches read; None without any.
      changing: The rows on devices, which steps change in place, for checkpoints; None without any.
      sources: All that a checkpoint writes of the stack, beside what lies in the run's state.
    """

    host: HostTable | None = None
    changing: ChangingRows | None = None
    sources: Sequence[CheckpointSource] = ()

    def __init__(self, stack: Stack):
        self.stack = stack

    @property
    def rows(self) -> MeshRows | None:
        """The rows that a step takes, and gives back by ``put``, beside the run's state; None without a plan."""
        return None

    def put(self, rows: MeshRows) -> None:
        """Takes back the rows after a step."""
        raise TypeError(f"the rows of stack {self.stack.name} are not placed by a plan")

    def new_lines(self, new: Addresses) -> Lines | MeshLines | None:
        """Where rows on devices begin anew, as ``CompiledRun.renew`` takes it; None without any."""

    def store(self, new: SetAddresses) -> None:
        """Writes those of the rows that are in host memory; of several processes each its own."""

    def read(self, addresses: np.ndarray) -> np.ndarray:
        """Rows of one table as the last step left them: of (n,) int64 addresses, (n, dim).

        Rows in host memory are flushed; of several processes all call it, and get all rows.
        """
        raise NotImplementedError

    def read_all(self, addresses: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """``read`` with the rows' slots, as ``optimizer.init`` shapes them."""
        raise NotImplementedError

    def load(self, saved: Saved, *, slots: bool) -> None:
        """Takes over the rows of a checkpoint, but for those in the run's state.

        Args:
          saved: The checkpoint.
          slots: Whether rows have slots.

        Raises:
          CheckpointError: If they are damaged, or of other tables.
        """


class ModelTier(Tier):
    """A stack whose rows the model holds, on one device.

    Args:
      stack: The tables.
      optimizer: The row optimizer; None without slots.
      arrays: Gives the stack's arrays in the run's state as they are now, "values" and slots.
    """

    def __init__(self, stack: Stack, optimizer: RowOptimizer | None, arrays: Callable[[], Mapping[str, jax.Array]]):
        super().__init__(stack)
        self._arrays = arrays
        self.changing = DeviceRows(stack, {} if optimizer is None else optimizer.slots, arrays)
        self.sources = (self.changing,)

    def new_lines(self, new: Addresses) -> Lines:
        """Lines of the stack's array."""
        return new.lines(new.addresses, np.arange(new.addresses.size))

    def read(self, addresses: np.ndarray) -> np.ndarray:
        """See ``Tier``; without the zeros that follow padded rows."""
        return self._read(VALUES, addresses)

    def read_all(self, addresses: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """See ``Tier``."""
        slots = {name: self._read(name, addresses) for name in self._arrays() if name != VALUES}
        return self.read(addresses), slots

    def _read(self, array: str, addresses: np.ndarray) -> np.ndarray:
        # Gathered on the device, so that only these rows travel and not the table.
        lines = np.asarray(self._arrays()[array][addresses.astype(np.int32)])
        return lines[:, : self.stack.dim] if lines.ndim == 2 else lines


class HostTier(Tier):
    """A stack that lies in host memory as a whole.

    Args:
      stack: The tables.
      optimizer: The row optimizer; None without slots.
      key: The key of the model's tables.
      options: Where and how the rows are kept.
      limit: The memory that all tables in ``options.folder`` may take together; None without a limit.

    Raises:
      ConfigError: If memory or ``options.folder`` cannot hold them.
    """

    def __init__(
        self,
        stack: Stack,
        optimizer: RowOptimizer | None,
        key: jax.Array,
        options: HostOptions,
        limit: MemoryLimit | None = None,
    ):
        super().__init__(stack)
        self.host = self._table = host_table(stack, optimizer, key, options, limit=limit)
        self._source = HostSource(self._table)
        self.sources = (self._source,)

    def store(self, new: SetAddresses) -> None:
        """See ``Tier``: all of them."""
        new.store(self._table, np.ones(new.addresses.size, bool))

    def read(self, addresses: np.ndarray) -> np.ndarray:
        """Rows as the last step left them, (n, dim), read where they lie in host memory."""
        return self._table.read(addresses.astype(self.stack.address_dtype))

    def read_all(self, addresses: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """See ``Tier``."""
        return self._table.read_all(addresses.astype(self.stack.address_dtype))

    def load(self, saved: Saved, *, slots: bool) -> None:
        """See ``Tier``; rows that the checkpoint does not have become what they were at first."""
        self._source.restore(saved, slots=slots)


class CoresTier(Tier):
    """A table in tensor-train cores, which are in the run's state.

    Args:
      stack: The table.
      model: Gives the model as it is now.
    """

    def __init__(self, stack: Stack, model: Callable[[], SparseModel]):
        super().__init__(stack)
        self._model = model

    def read(self, addresses: np.ndarray) -> np.ndarray:
        """See ``Tier``; float32."""
        cores = self._model().embeddings.tt[self.stack.name]
        values = np.array(tt_rows(cores.arrays(), cores.shape, addresses))
        if cores.cache_config is not None and addresses.size:  # a cached row has changed since it was in the cores
            numbers, changed = (np.asarray(cores.cached[key][...]) for key in ("ids", "rows"))
            # Places without a row hold the number of rows, which no address equals.
            order = np.argsort(numbers, kind="stable")
            at = np.minimum(np.searchsorted(numbers, addresses, sorter=order), numbers.size - 1)
            cached = numbers[order[at]] == addresses
            values[cached] = changed[order[at[cached]]]
        return values


def host_table(
    stack: Stack,
    optimizer: RowOptimizer | None,
    key: jax.Array,
    options: HostOptions,
    *,
    written: np.ndarray | None = None,
    limit: MemoryLimit | None = None,
) -> HostTable:
    """The initial rows of a stack in host memory: bit-identical to the same run's rows on the device.

    Args:
      stack: The tables.
      optimizer: The row optimizer, which determines the slots; None without slots.
      key: The key of the model's tables.
      options: Where and how the rows are kept.
      written: (n, 2) int64 ranges of the addresses that will ever be written; None for all.
      limit: See ``HostTier``.

    Raises:
      ConfigError: If memory or ``options.folder`` cannot hold them.
    """
    return HostTable(
        stack,
        optimizer or SGD(learning_rate=0.0),
        key,
        folder=options.folder or None,
        threads=options.threads or None,
        written=written,
        limit=limit,
    )
