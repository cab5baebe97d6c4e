"""Training on tables in host memory: stages that overlap, with the results of stages that run one after the other.

    read → plan → host gather → transfer → (the caller's device step) → transfer back → host store

Every stage is a thread; bounded channels join them. With queue length ``Q`` the *gather* of batch ``b`` begins after
the *store* of batch ``b - Q`` has ended, so at most ``Q`` batches are between the two, and memory is bounded.

    with HostPipeline(source, layout, tables, queue=3) as pipeline:
        while (ready := pipeline.get()) is not None:
            rows, ... = step(ready.tables, ready.batch)
            pipeline.put_back(ready, rows)
        pipeline.flush()

**Every row is read as the sequential program would read it.** Let ``L`` be the length of the ring
(``jrec.host.ring``), ``L >= Q - 1``, and let batch ``b`` use row ``r``. Call ``a < b`` the last batch before ``b`` that
used ``r``, and so the last that changed it.

1. ``a >= b - L``: the plan names entry ``a mod L`` of the ring. Batch ``a`` wrote it after its step, and the next batch
   to write it is ``a + L >= b``, whose step comes after the assembly of ``b``'s rows (where ``a + L = b``, batch ``b``
   itself reads the entry and then writes it). The plan asks later batches first, so it finds ``a``, no earlier copy.
2. ``a < b - L``, or there is no such ``a``: the row is fetched. Then ``a <= b - L - 1 <= b - Q``. Stores happen in the
   order of the batches, and the store of ``b - Q`` has ended before the gather begins: so has the store of ``a``, and
   the host holds ``r`` as ``a`` left it.
3. Meanwhile the host may be storing batches ``b - Q + 1`` to ``b - 1``. All of them are among the last ``L``, so each
   of their rows that ``b`` uses comes from the ring (case 1) and none is fetched: the gather never reads a row that is
   being written.

``L = Q - 1`` is enough; a longer ring saves more transfers. With ``Q = 1`` a batch is gathered when the one before is
stored, and nothing overlaps but reading and planning, which touch no row. After ``flush`` the host holds every row as
the last step left it, while batches ahead wait, unharmed: their rows are as the plan said. No stage decides anything
by the clock, so neither timing nor threads change a bit.

**Nothing hangs.** A gather waits for an earlier batch's store, every other wait is for the neighbour's next item or a
free place, so the oldest batch can always move on, unless a stage failed; that wakes and ends all (``stages``).
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np

from jrec.host.pipeline_batch import (
    Gathered,
    LocatedBatch,
    Preparation,
    Ready,
    Retrieved,
    StackReads,
    Transferred,
    Updated,
    WholeBatches,
    fetched,
    transfers,
    tree_bytes,
)
from jrec.host.ring import DeviceRing, RingIndex, Rows, bucket
from jrec.host.stages import Channel, Finished, Monitor, Progress, Stage
from jrec.host.table import HostTable, ask_ahead
from jrec.host.timeline import Timeline
from jrec.ops.layout import EmbeddingLayout

READ, PLAN, GATHER, TRANSFER, STEP, BACK, STORE = (
    "read", "plan", "host gather", "transfer", "device step", "transfer back", "host store",
)  # fmt: skip
DISPATCH = "dispatch"
"""The caller's thread: assembling rows, and whatever the caller does between ``get`` and ``put_back``."""


class HostPipeline:
    """Prepares batches ahead of the device's step and stores their rows behind it; the module says why it is exact.

    Use it from one thread. Threads begin with the first ``get``.

    Args:
      source: Yields (batch of NumPy arrays, position); the property ``position`` returns the position once the batch's
        step is taken. The pipeline reads ahead of the steps. With a ``preparation`` it yields that one's items in place
        of batches.
      layout: The batches' layout.
      tables: The host table of every stack that lies in host memory, and of every stack that a plan keeps partly there.
      queue: How many batches may be between gather and store; 1 is sequential.
      cached: How many batches' rows the device keeps, at least ``queue - 1``; None for ``queue``.
      device: The device to compute on; None for JAX's first.
      pinned: Whether rows come back through page-locked host memory; None for what suits the device.
      timeline: Records the stages; None makes a new one.
      preparation: Makes batches of the source's items and finds their rows of all ``tables``. None for batches of one
        device.

    Raises:
      ValueError: If the tables do not match the layout, or ``queue`` or ``cached`` is too small.
    """

    def __init__(
        self,
        source: Iterator[tuple[Any, Any]],
        layout: EmbeddingLayout,
        tables: Mapping[str, HostTable],
        *,
        queue: int,
        cached: int | None = None,
        device: object = None,
        pinned: bool | None = None,
        timeline: Timeline | None = None,
        preparation: Preparation | None = None,
    ):
        stacks = {stack.name: stack for stack in layout.host_stacks}
        partly = {stack.name for stack in layout.planned_stacks}
        if stacks.keys() != tables.keys() - partly:
            raise ValueError(f"the layout's host stacks are {sorted(stacks)}, but the tables are {sorted(tables)}")
        if queue < 1:
            raise ValueError(f"the queue has length {queue}; it must be at least 1")
        self._cached = queue if cached is None else cached
        # Case 2 of the module needs L >= Q - 1: with fewer, a row could be neither in the ring nor stored yet.
        if self._cached < queue - 1:
            raise ValueError(
                f"the rows of {self._cached} batches are kept on the device, but with a queue of length {queue} up to"
                f" {queue - 1} batches are not stored when rows are fetched; keep at least as many"
            )
        self.timeline = Timeline() if timeline is None else timeline
        self._source, self._tables, self._queue = source, dict(tables), queue
        self._to_device, self._begin_return = transfers(jax.devices()[0] if device is None else device, pinned=pinned)
        self._preparation = WholeBatches(stacks, self._to_device) if preparation is None else preparation
        self._indexes: dict[str, RingIndex] = {}
        self._rings = {name: DeviceRing(length=self._cached) for name in tables}
        self._position: Any = None
        self._taken = self._returned = 0
        self._dispatched = 0.0
        self._monitor = Monitor()
        self._stored = Progress(self._monitor)
        self._step_end = 0.0
        self._started = False
        self._make_stages()

    def get(self) -> Ready | None:
        """The next batch with its rows on the device, or None after the last; ``put_back`` takes it after its step.

        Raises:
          Exception: The failure of a stage; a note names the stage and the batch. A failure to prepare this batch comes
            after all batches before it, as it would without threads.
        """
        if self._taken != self._returned:
            raise RuntimeError("give the batch before to put_back first: the rows of this one depend on its step")
        if not self._started:
            self._started = True
            for stage in self._stages:
                stage.start()
        start = time.perf_counter()
        if (ready := self._ready.next()) is None:
            return None
        number, item = ready
        self._dispatched = time.perf_counter()
        self.timeline.waited(DISPATCH, self._dispatched - start)
        self._taken += 1
        tables = {}
        for name, rows in item.fetched.items():
            # Dispatched, not waited for. Everything that touches the ring runs in this one thread, in the order of the
            # batches, so an entry is read before a later batch overwrites it.
            tables[name] = self._rings[name].assemble(item.sources[name], rows)
        return Ready(number=number, batch=item.batch, tables=tables, located=item.located)

    def put_back(self, ready: Ready, tables: Mapping[str, Rows]) -> None:
        """Takes a batch's rows and slots after its step, in the shapes of ``Ready.tables``, and sends them to the host.

        Raises:
          Exception: The failure of a stage.
        """
        if ready.number != self._returned or self._taken == self._returned:
            raise RuntimeError(f"batch {ready.number} was put back, but the pipeline waits for batch {self._returned}")
        # Before the next ``get`` assembles its rows, which the plan has promised to find in the ring.
        for name, ring in self._rings.items():
            ring.push(ready.number, tables[name])
        # Begun here, behind the step in the device's queue: the
        # copy waits only for the step, whatever is dispatched next.
        returning = {name: self._return(ready, name, tables[name]) for name in ready.located.reads}
        # Nothing waits for the step here: the stage behind does, and the caller goes on to the next batch.
        item = Updated(located=ready.located, rows=dict(tables), returning=returning, dispatched=self._dispatched)
        with self._monitor.guarded():
            # Waits while Q batches are on their way back: what is not stored yet is bounded, too.
            self._updated.put((ready.number, item))
        self._returned += 1
        # Of the batch whose step is taken, not of the last one read: a resumed run reads those ahead again.
        self._position = ready.located.position
        self.timeline.worked(DISPATCH, ready.number, self._dispatched, time.perf_counter())

    @property
    def position(self) -> Any:
        """The source's position after the last batch that was put back; None before the first."""
        return self._position

    def flush(self) -> None:
        """Waits until the host holds every row as the last step left it, for a checkpoint or an evaluation.

        Raises:
          Exception: The failure of a stage.
          RuntimeError: If the pipeline was closed before it could flush.
        """
        # Also where the pipeline is closed or has failed: then there is nothing to wait for, and nothing to raise.
        if self._stored.count == self._returned:
            return
        with self._monitor.guarded():
            self._stored.wait_for(self._returned)

    def close(self) -> None:
        """Ends the threads. Rows that are not stored yet are lost; ``flush`` first to keep them."""
        # First the threads are told, then waited for: one that waits for another's item would never end otherwise.
        self._monitor.close()
        stages, self._stages = self._stages, []
        if self._started:
            for stage in stages:
                stage.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _return(self, ready: Ready, name: str, rows: Rows) -> Rows:
        """Begins the transfer of one stack's rows to the host."""
        count, capacity = ready.located.reads[name].rows.size, rows.values.shape[0]
        self.timeline.moved(name, to_host=tree_bytes(rows) // capacity * bucket(count, capacity))
        return self._begin_return(rows, count)

    def _make_stages(self) -> None:
        def channel(after: str, before: str, capacity: int) -> Channel[Any]:
            return Channel(self._monitor, f"{after} > {before}", capacity, self.timeline)

        def ahead(name: str, take: Callable[[], Any], work: Callable[[int, Any], Any], out: Channel[Any]) -> Stage:
            ends = {"finish": out.finish, "fail": out.finish}
            return Stage(name, take=take, work=work, give=out.put, timeline=self.timeline, **ends)

        # A stage ahead of the step fails by ending its channel, so that the caller gets the batches before it. A stage
        # behind the step has nobody to hand a failure to: it stops everything.
        behind = functools.partial(Stage, fail=self._monitor.fail, timeline=self.timeline)
        read, located = channel(READ, PLAN, 1), channel(PLAN, GATHER, 1)
        # ``_admit`` already bounds what lies between gather and store to Q
        # batches: these channels never make a stage wait longer than that.
        gathered, self._ready = channel(GATHER, TRANSFER, self._queue), channel(TRANSFER, STEP, self._queue)
        self._updated, back = channel(STEP, BACK, self._queue), channel(BACK, STORE, self._queue)
        numbers = ((number, None) for number in itertools.count())
        self._stages = [
            ahead(READ, numbers.__next__, self._read, read),
            ahead(PLAN, read.get, self._locate, located),
            ahead(GATHER, lambda: self._admit(located), self._gather, gathered),
            ahead(TRANSFER, gathered.get, self._transfer, self._ready),
            behind(BACK, take=self._await_step, work=self._retrieve, give=back.put, finish=back.finish),
            behind(STORE, take=back.get, work=self._store, give=self._count_stored, finish=lambda _: None),
        ]

    def _count_stored(self, stored: tuple[int, None]) -> None:
        del stored
        self._stored.advance()

    def _read(self, number: int, item: None) -> tuple[Any, Any]:
        del number, item
        try:
            return next(self._source)
        except StopIteration:
            raise Finished from None

    def _locate(self, number: int, item: tuple[Any, Any]) -> LocatedBatch:
        source_item, position = item
        prepared, reads = self._preparation.prepare(source_item), {}
        for name, read in prepared.rows.items():
            if name not in self._indexes:
                self._indexes[name] = RingIndex(length=self._cached, most=read.most)
            # In the order of the batches: where a row is depends on
            # who used it last, and on nothing that other stages do.
            rows = read.addresses
            source, missing = self._indexes[name].next(number, rows, read.most, read.room)
            reads[name] = StackReads(rows=rows, source=source, missing=missing)
            self.timeline.rows(name, unique=rows.size, cached=rows.size - missing.size)
        # All of them, since those that come from the ring will be stored, too. Before a batch enters the queue it waits
        # in the channel, and one more for its admission.
        ask_ahead(self._tables, {name: read.rows for name, read in reads.items()}, self._queue + 2)
        return LocatedBatch(batch=prepared.batch, sent=prepared.sent, position=position, reads=reads)

    def _admit(self, located: Channel[tuple[int, LocatedBatch]]) -> tuple[int, LocatedBatch]:
        number, item = located.get()
        # Case 2 of the module: a row that is not in the ring was stored before this gather begins.
        self._stored.wait_for(number - self._queue + 1)
        return number, item

    def _gather(self, number: int, item: LocatedBatch) -> Gathered:
        del number
        rows = {n: fetched(self._tables[n], read.missing, read.source.size) for n, read in item.reads.items()}
        return Gathered(located=item, fetched=rows)

    def _transfer(self, number: int, item: Gathered) -> Transferred:
        del number
        reads = item.located.reads
        for name in reads:
            self.timeline.moved(name, to_device=tree_bytes(item.fetched[name]))
        sources = {name: read.source for name, read in reads.items()}
        self.timeline.sent_batch(tree_bytes((item.located.batch, sources)))
        # The arrays are this batch's own and never written again: on a CPU the device may read them where they are.
        fetched, sources = self._to_device((item.fetched, sources))
        batch = self._preparation.send(item.located.sent)
        jax.block_until_ready(fetched)  # so that the span covers the transfer
        return Transferred(located=item.located, batch=batch, fetched=fetched, sources=sources)

    def _await_step(self) -> tuple[int, Updated]:
        number, item = self._updated.get()
        # A thread waits for the device, so that the caller's never
        # does; the time at which it wakes ends the step's span.
        jax.block_until_ready(item.rows)
        now = time.perf_counter()
        self.timeline.worked(STEP, number, max(item.dispatched, self._step_end), now)
        self._step_end = now
        return number, item

    def _retrieve(self, number: int, item: Updated) -> Retrieved:
        del number
        return Retrieved(located=item.located, rows=jax.tree.map(np.asarray, item.returning))

    def _store(self, number: int, item: Retrieved) -> None:
        del number
        for name, plan in item.located.reads.items():
            # What came back is a bucket, of which only the batch's own rows are stored.
            stored, rows = plan.rows, item.rows[name]
            slots = {slot: array[: stored.size] for slot, array in rows.slots.items()}
            self._tables[name].store(stored, rows.values[: stored.size], slots)
