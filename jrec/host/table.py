"""A stack of tables in host memory: rows and optimizer slots, which take memory when they are first written."""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jrec.errors import ConfigError
from jrec.host.checks import checked_bags, checked_rows, checked_values
from jrec.host.memory import allocate, physical_memory
from jrec.host.paging import MappedFile, MemoryLimit
from jrec.native import host
from jrec.native.host_cast import thread_count
from jrec.native.host_rows import RowStore, table_records
from jrec.ops.layout import Stack
from jrec.ops.rounding_rows import host_rounding_rows
from jrec.ops.row_init import scale, table_keys
from jrec.ops.row_optimizers import RowOptimizer
from jrec.ops.types import Bags, Cast


class HostTable:
    """The rows of one stack and their slots, in host memory.

    A row that was never written has its first values, a function of only (key, table name, row) and bit-identical to
    ``jrec.ops.row_init.init_rows``; it takes no memory, even when it is read. So a table may be larger than memory as
    long as the rows that training touches are not, and larger still in a ``folder`` on a fast disk.

    A stack may have 2^31 rows or more, where it is one table: addresses and ids are then int64
    (``Stack.address_dtype``).

    Methods may run at the same time as long as no row is written by one and read or written by another.

    Args:
      stack: The tables, of any tier: only names, rows and places are read.
      optimizer: The optimizer that determines the rows' slots.
      key: The key of the model's initial rows, as ``EmbeddingCollection`` draws it, or the result of ``table_keys``.
      folder: A folder for memory-mapped files of rows and slots, for tables larger than memory; None for memory itself.
        The files are scratch space that vanishes with the process; a checkpoint (``jrec.checkpoint``) lasts.
      threads: Threads of the native kernels; None for all CPUs, see ``jrec.native.threads``.
      huge_pages: Whether memory comes in pages of 2 MiB: faster, but one row makes its whole page take memory. None
        does so where the whole table would take no more than a quarter of the machine's memory.
      written: (n, 2) int64, begin and end of the addresses that may be written, where other rows live elsewhere: only
        these take room in a folder. None for all.
      limit: The memory that the files in ``folder``, and in other tables' with this limit, may take; None for what
        the system gives them. Needs a folder, on a disk, and Linux.

    Raises:
      ConfigError: If memory or disk cannot hold it, or there is a limit without a folder.
      ValueError: If the key is not a Threefry key.

    Example:
      >>> import jax, numpy as np
      >>> from jrec.ops import SGD
      >>> from jrec.ops.layout import EmbeddingLayout, FeatureConfig, TableConfig
      >>> tables = [TableConfig(name="site", rows=1_000_000_000, dim=16, tier="host")]
      >>> layout = EmbeddingLayout.build(tables, [FeatureConfig(name="site", table="site")])
      >>> table = HostTable(layout.stacks["host_d16_float32"], SGD(learning_rate=0.1), jax.random.key(0))
      >>> rows, slots = table.fetch(np.array([3, 999_999_999], np.int32))
      >>> rows.shape
      (2, 16)
    """

    def __init__(
        self,
        stack: Stack,
        optimizer: RowOptimizer,
        key: jax.Array | np.ndarray,
        *,
        folder: str | os.PathLike[str] | None = None,
        threads: int | None = None,
        huge_pages: bool | None = None,
        written: np.ndarray | None = None,
        limit: MemoryLimit | None = None,
    ) -> None:
        self.stack, self.optimizer, self.limit = stack, optimizer, limit
        self.threads = thread_count(threads)
        keys = np.array(key if isinstance(key, np.ndarray) else table_keys(key, [t.name for t in stack.tables]))
        shapes = {n: (stack.rows, stack.dim)[: 1 + (s == "element")] for n, s in optimizer.slots.items()}
        size = _bytes(stack, shapes)
        if huge_pages is None:
            huge_pages = size <= physical_memory() // 4
        if limit is not None and folder is None:
            raise ConfigError(f"{limit.key} limits the memory of tables in files, but no folder is given for them")
        descriptors: list[int] | None = None if limit is None else []
        placed = functools.partial(
            allocate, folder=folder, huge_pages=huge_pages, written=written, descriptors=descriptors
        )
        slots = {
            name: placed(shape, np.dtype(np.float32), name=f"{stack.name}.{name}") for name, shape in shapes.items()
        }
        bitmap = functools.partial(allocate, (-(-stack.rows // 64),), np.dtype(np.int64), huge_pages=huge_pages)
        self._store = RowStore(
            values=placed((stack.rows, stack.dim), np.dtype(jnp.dtype(stack.dtype)), name=stack.name),
            slots=slots,
            initial_slots={name: optimizer.initial_slot(name) for name in shapes},
            tables=table_records(stack.bases, keys, np.array([scale(t) for t in stack.tables], np.float32)),
            made=bitmap(name=f"{stack.name}.made"),
            dirty=bitmap(name=f"{stack.name}.dirty"),
        )
        self._files: list[MappedFile] = []
        if limit is not None:
            # The bitmaps have no file: they are small, and read at every row.
            arrays = *slots.values(), self._store.values  # in the order in which they were allocated
            for array, descriptor in zip(arrays, descriptors or (), strict=True):
                self._files.append(limit.add(array, descriptor, str(folder)))
        self.keys = keys
        self._before_write: Callable[[np.ndarray], None] = _nothing

    @property
    def rows(self) -> int:
        """The stack's rows, whether memory holds them or not."""
        return self.stack.rows

    @property
    def dim(self) -> int:
        """Elements of a row."""
        return self.stack.dim

    @property
    def dtype(self) -> np.dtype:
        """The rows' dtype; slots are float32."""
        return self._store.values.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all rows and slots, if memory held them all."""
        return self._store.values.nbytes + sum(slot.nbytes for slot in self._store.slots.values())

    @property
    def num_made(self) -> int:
        """How many rows memory holds."""
        return int(np.bitwise_count(self._store.made.view(np.uint64)).sum())

    def fetch(
        self,
        rows: np.ndarray,
        out_rows: np.ndarray | None = None,
        out_slots: Mapping[str, np.ndarray] | None = None,
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Reads rows and their slots, without giving memory to rows that have none.

        Args:
          rows: (n,) int32 or int64 addresses, ascending and unique.
          out_rows: (n, dim) of the table's dtype to write to, or None for a new array.
          out_slots: float32, (n, dim) or (n,) by name, or None for new arrays.

        Returns:
          The rows, and their slots as ``optimizer.init`` shapes them.

        Raises:
          ValueError: On addresses outside the stack or out of order, or arrays that do not fit.
        """
        rows = checked_rows(rows, self.stack)
        if out_rows is None:
            out_rows = np.empty((rows.size, self.dim), self.dtype)
        if out_slots is None:
            out_slots = {n: np.empty((rows.size, *s.shape[1:]), np.float32) for n, s in self._store.slots.items()}
        self._check_values(rows, "out_rows", out_rows, "out_slots", out_slots, written=True)
        self._read(rows, out_rows, out_slots)
        return out_rows, dict(out_slots)

    def store(self, rows: np.ndarray, values: np.ndarray, slots: Mapping[str, np.ndarray]) -> None:
        """Writes rows and slots that a device updated.

        Args:
          rows: (n,) int32 or int64 addresses, ascending and unique.
          values: (n, dim) of the table's dtype.
          slots: float32, (n, dim) or (n,) by name, all of the optimizer's slots.

        Raises:
          ValueError: On addresses outside the stack or out of order, or arrays that do not fit; nothing is written.
        """
        rows = checked_rows(rows, self.stack)
        self._check_values(rows, "values", values, "slots", slots, written=False)
        # Before the first byte changes: a checkpoint that is being written copies the rows as they were.
        self._before_write(rows)
        for piece in self._pieces(rows):
            some = {name: slot[piece] for name, slot in slots.items()}
            self._store.store(rows[piece], values[piece], some, self.threads)

    def read(self, rows: np.ndarray) -> np.ndarray:
        """The (n, dim) rows at (n,) int32 or int64 addresses in any order, without slots; gives no row memory."""
        rows = checked_rows(rows, self.stack, ascending=False)
        out = np.empty((rows.size, self.dim), self.dtype)
        self._read(rows, out, {})
        return out

    def read_all(self, rows: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """``read`` with the rows' slots, float32, (n, dim) or (n,) by name."""
        rows = checked_rows(rows, self.stack, ascending=False)
        out = np.empty((rows.size, self.dim), self.dtype)
        slots = {n: np.empty((rows.size, *s.shape[1:]), np.float32) for n, s in self._store.slots.items()}
        self._read(rows, out, slots)
        return out, slots

    def gather_reduce(
        self, bags: Bags, *, make: bool = False, mark: bool = False, out: np.ndarray | None = None
    ) -> np.ndarray:
        """Sums (weighted) rows per bag.

        Args:
          bags: NumPy arrays; ids are addresses. If they have a cast, lookups of rows without memory are cheaper.
          make: Whether rows get memory, for training, which will update them. Otherwise rows without memory are read as
            their first values and take none.
          mark: Whether rows that ``make`` looks at count as written from now on, since a ``casted_update`` follows that
            is told so (``made``) and need not look at them again.
          out: (num_bags, dim) float32 to write to, or None for a new array.

        Returns:
          (num_bags, dim) float32; the same bits with and without ``make``, for any number of threads.

        Raises:
          ValueError: On an id that the stack does not have, or arrays that do not fit.
        """
        ids, offsets, lookups = checked_bags(bags, self.stack)
        cast, options = bags.cast, {"weights": bags.weights, "out": out, "threads": self.threads}
        if cast is None and make:
            cast = self._cast(ids, offsets)
        unique = lookups if cast is None else cast_rows(cast)
        with self._using(unique) if make else contextlib.nullcontext():
            if make:
                self._store.make(unique, self.threads, mark=mark)
            # The kernel reads the table itself only by int32 ids, and only where memory holds every row that it will
            # read, and keeps it. Else the unique rows are copied out, first values among them, and pooled from there.
            held = make or (self.limit is None and self._store.holds(unique, self.threads))
            if ids.dtype == np.int64 or not held:
                cast = self._cast(ids, offsets) if cast is None else cast
                rows = self.read(cast_rows(cast))
                return host.gather_reduce(rows, local_ids(cast, ids.shape), offsets, **options)
            return host.gather_reduce(self._store.values, ids, offsets, **options)

    def casted_update(
        self,
        cast: Cast,
        bag_gradients: np.ndarray,
        *,
        weights: np.ndarray | None = None,
        step: int = 0,
        gradient_scale: float = 1.0,
        rounding_key: np.ndarray | None = None,
        hyperparameters: np.ndarray | None = None,
        made: bool = False,
    ) -> None:
        """The backward pass of a lookup and the optimizer's step in one pass over the rows, in place.

        Bit-identical to ``jrec.ops.casted_update(implementation="native")`` on a table on the device; 16-bit rows with
        the ``rounding_rows`` of their table and row (``jrec.ops.rounding_rows``).

        Args:
          cast: The cast of the lookup's addresses, NumPy arrays.
          bag_gradients: (num_bags, dim) float32, the gradient of the lookup's output.
          weights: The lookup's weights in the order of its ids, or None.
          step: The number of steps that the table took before.
          gradient_scale: A factor of the gradients: one over the loss scale.
          rounding_key: (2,) uint32, for stochastic rounding of 16-bit rows; None rounds to nearest.
          hyperparameters: (HYPER_WORDS,) int32, what a jitted step computed of ``step``, ``gradient_scale`` and
            ``rounding_key`` (``jrec.native.hyper``), in their place. A learning rate that is a schedule then has the
            bits of rows on the device.
          made: Whether the lookup made and marked the rows: ``gather_reduce`` with ``make`` and ``mark``, of bags
            with this cast.

        Raises:
          ValueError: On addresses outside the stack, or arrays that do not fit.
        """
        # ``gather_reduce`` has checked the same rows.
        rows = cast_rows(cast) if made else checked_rows(cast_rows(cast), self.stack)
        # As in ``store``: a checkpoint under way copies what it has not written yet.
        self._before_write(rows)
        numbers = host_rounding_rows(self.stack, rows) if self.dtype.itemsize < 4 else None
        with self._using(rows):
            if not made:
                # Before the step: a row that memory lacks has its first values only here.
                self._store.make(rows, self.threads, mark=True)
            host.casted_update(
                self.optimizer,
                self._store.values,
                self._store.slots,
                cast,
                bag_gradients,
                weights=weights,
                step=step,
                gradient_scale=gradient_scale,
                rounding_key=rounding_key,
                rounding_rows=numbers,
                hyperparameters=hyperparameters,
                threads=self.threads,
            )

    def ask(self, rows: np.ndarray) -> int:
        """Begins to read rows and slots that are not in memory, where the table has a limit; nothing is waited for.

        Args:
          rows: (n,) int32 or int64 addresses of rows that will be read and written soon.

        Returns:
          The bytes of the pages that they lie in; 0 without a limit.
        """
        return 0 if self.limit is None else self.limit.ask(self._files, rows) * mmap.PAGESIZE

    def made_rows(self) -> np.ndarray:
        """Addresses of the rows that memory holds, ascending; int32, or int64 where the stack has 2^31 rows or more."""
        return _numbers(self._store.made)

    def dirty_rows(self) -> np.ndarray:
        """Addresses of the rows written since ``clear_dirty``, ascending, of the same dtype as ``made_rows``."""
        return _numbers(self._store.dirty)

    def watch(self, before_write: Callable[[np.ndarray], None] | None) -> None:
        """Sets a function to call with the (n,) ascending addresses of rows before they are written; None for none.

        The writing threads call it, at the same time if there are several.
        """
        self._before_write = before_write or _nothing

    def clear_dirty(self) -> None:
        """Marks all rows as saved. Not while another thread writes rows."""
        _clear(self._store.dirty)

    def reset(self) -> None:
        """Gives all rows and slots their first values again. Not while another thread uses the table."""
        _clear(self._store.made)
        _clear(self._store.dirty)

    def _read(self, rows: np.ndarray, out: np.ndarray, slots: Mapping[str, np.ndarray]) -> None:
        for piece in self._pieces(rows, made=self._store.made):
            some = {name: slot[piece] for name, slot in slots.items()}
            self._store.fetch(rows[piece], out[piece], some, self.threads)

    def _using(self, rows: np.ndarray) -> contextlib.AbstractContextManager[object]:
        """Keeps the pages of rows that are read and written together in memory, where there is a limit."""
        return contextlib.nullcontext() if self.limit is None else self.limit.using(self._files, rows)

    def _pieces(self, rows: np.ndarray, made: np.ndarray | None = None) -> Iterator[slice]:
        """Splits rows that are read (only those that are ``made``) or written one by one, as a limit wants."""
        if self.limit is None:
            yield slice(None)
            return
        for piece in self.limit.pieces(self._files, rows):
            with self.limit.using(self._files, rows[piece], made=made, passing=made is not None):
                yield piece

    def _cast(self, ids: np.ndarray, offsets: np.ndarray | None) -> Cast:
        return host.tensor_cast(ids, offsets, num_rows=self.rows, threads=self.threads)

    def _check_values(
        self,
        rows: np.ndarray,
        name: str,
        values: np.ndarray,
        slots_name: str,
        slots: Mapping[str, np.ndarray],
        *,
        written: bool,
    ) -> None:
        checked_values(name, values, (rows.size, self.dim), self.dtype, written=written)
        own = self._store.slots
        if slots.keys() != own.keys():
            raise ValueError(
                f"{slots_name} are {sorted(slots)}, but {type(self.optimizer).__name__} keeps {sorted(own)}"
            )
        for slot, array in slots.items():
            shape = (rows.size, *own[slot].shape[1:])
            checked_values(f"{slots_name}[{slot!r}]", array, shape, np.dtype(np.float32), written=written)


def ask_ahead(tables: Mapping[str, HostTable], rows: Mapping[str, np.ndarray], batches: int) -> None:
    """Begins to read a batch's rows from the disk, where tables have a limit of memory (``HostTable.ask``).

    Args:
      tables: By stack.
      rows: By stack, (n,) int32 or int64 addresses.
      batches: How many batches are asked for, this one among them, before the first one's rows are no longer needed.

    Raises:
      ConfigError: If the limit is less than twice the pages of this batch.
    """
    limits = {table.limit for table in tables.values() if table.limit is not None}
    for limit in limits:
        limit.begin_batch(batches)
    size = sum(tables[name].ask(some) for name, some in rows.items())
    for limit in limits:
        if 2 * size > limit.size:
            raise limit.too_small("the rows of two batches like this one", 2 * size)


def files_section(tables: Iterable[HostTable]) -> dict[str, dict[str, int]]:
    """A report's section "files": what the files of tables with a limit of memory took of it, and moved, in bytes."""
    limit = next((table.limit for table in tables if table.limit is not None), None)
    if limit is None:
        return {}
    pages = {
        "memory": limit.pages,
        "read": limit.read_pages,
        "dropped": limit.dropped_pages,
        "dropped_early": limit.early_pages,
    }
    sizes = {f"{name}_bytes": count * mmap.PAGESIZE for name, count in pages.items()}
    return {"files": {"limit_bytes": limit.size, **sizes}}


def local_ids(cast: Cast, shape: tuple[int, ...]) -> np.ndarray:
    """The place of each lookup's row in ``cast.rows``; -1 for padding.

    Args:
      cast: The lookups' cast, NumPy arrays. Lookups of rows past its capacity count as padding.
      shape: The ids' shape.

    Returns:
      int32 of ``shape``.
    """
    offsets = np.asarray(cast.offsets)
    unique = min(int(cast.num_unique), offsets.size - 1)
    local = np.full(shape, -1, np.int32)
    numbers = np.repeat(np.arange(unique, dtype=np.int32), np.diff(offsets[: unique + 1]))
    local.reshape(-1)[np.asarray(cast.positions)[: numbers.size]] = numbers
    return local


def _nothing(rows: np.ndarray) -> None:
    """The watcher of a table without one."""


def _bytes(stack: Stack, slots: Mapping[str, tuple[int, ...]]) -> int:
    values = stack.rows * stack.dim * jnp.dtype(stack.dtype).itemsize
    return values + sum(4 * stack.rows * (stack.dim if len(shape) > 1 else 1) for shape in slots.values())


def cast_rows(cast: Cast) -> np.ndarray:
    """The (n,) unique rows of a cast of NumPy arrays, ascending."""
    rows = np.asarray(cast.rows)
    return np.ascontiguousarray(rows[: min(int(cast.num_unique), rows.size)])


def _clear(bitmap: np.ndarray) -> None:
    """Clears all bits; pages without set bits are not written, so they take no memory."""
    bitmap[np.flatnonzero(bitmap)] = 0


def _numbers(bitmap: np.ndarray) -> np.ndarray:
    """The numbers of the bits that are set, ascending."""
    # Only words with a bit: the bitmap of a table of a billion rows has pages that were never touched.
    words = np.flatnonzero(bitmap)
    bits = np.unpackbits(bitmap[words].view(np.uint8).reshape(-1, 8), axis=1, bitorder="little")
    at, bit = np.nonzero(bits)
    return (words[at] * 64 + bit).astype(np.int32 if bitmap.size * 64 <= 2**31 else np.int64)
