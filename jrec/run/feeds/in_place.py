"""Batches whose rows the host pools and updates where they lie, for a CPU, whose own memory host memory is.

The pipeline (``jrec.run.feeds.host``) copies every unique row to the device and back. Here no row moves: the host
pools the batch's rows, the step computes on the sums of bags, and the host updates the rows with their gradients. The
kernels are the ones for rows on the device, so that all bits are the same. Reading and casting happen ahead, in the
loader's threads; rows are read and written between the steps, so that none is ever stale.
"""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from jrec.batch import Batch
from jrec.errors import ConfigError
from jrec.host import HostTable
from jrec.host.pipeline_batch import on_device
from jrec.host.table import ask_ahead, cast_rows, files_section
from jrec.host.timeline import Timeline
from jrec.json_values import JsonObject
from jrec.ops.dispatch import native_unavailable
from jrec.ops.host_cast import with_cast
from jrec.ops.layout import EmbeddingLayout, Stack
from jrec.ops.types import Bags
from jrec.run.feeds.ahead import aligned
from jrec.run.feeds.batches import Batches
from jrec.run.feeds.feed import LoaderFeed, Ready
from jrec.run.options import HostOptions
from jrec.run.placement.new_lines import FirstRows
from jrec.run.step import HostResults, StepBatch, StepResults
from jrec.tiers.pooled import PooledRows, PooledUpdate

READ, LOOKUP, STEP, UPDATE = "read", "lookup", "device step", "update"


def reads_in_place(
    layout: EmbeddingLayout, host: HostOptions, *, planned: bool, exact: bool, implementation: str | None, key: str
) -> bool:
    """Whether a run pools and updates its rows in host memory in place, as ``host.pipeline`` says.

    Args:
      layout: The run's tables.
      host: How its rows in host memory travel.
      planned: See ``needs_pipeline``.
      exact: See ``needs_pipeline``.
      implementation: See ``needs_pipeline``.
      key: What ``host.pipeline`` is called in messages.

    Raises:
      ConfigError: If the pipeline is "off", but the run needs it.
    """
    check_pipeline(host, planned=planned, exact=exact, implementation=implementation, key=key)
    wanted = bool(layout.host_stacks) and host.pipeline != "on"
    return wanted and needs_pipeline(planned=planned, exact=exact, implementation=implementation) is None


def check_pipeline(host: HostOptions, *, planned: bool, exact: bool, implementation: str | None, key: str) -> None:
    """Raises ConfigError if the pipeline is "off", but the run needs it. Starts JAX's devices only where it is off."""
    if host.pipeline != "off":
        return
    if (reason := needs_pipeline(planned=planned, exact=exact, implementation=implementation)) is not None:
        raise ConfigError(f"{key} is 'off', but {reason}; set it to 'auto' or leave it out")


def needs_pipeline(*, planned: bool, exact: bool, implementation: str | None) -> str | None:
    """Why rows in host memory cannot be read in place, or None where they can.

    Args:
      planned: Whether a plan places the run's rows.
      exact: Whether an exact optimizer steps rows.
      implementation: The implementation of the embedding ops that the model names; None where it names none.
    """
    if planned:
        return "a plan places the run's rows (plan, mesh.devices or schedule 'fae'), and only the pipeline follows one"
    if exact:
        return "an exact optimizer reads rows with their slots, which only the pipeline brings to a step"
    if (platform := jax.devices()[0].platform) != "cpu":
        return f"the device is a {platform.upper()}, which only the pipeline brings rows to"
    if implementation not in (None, "native"):
        return (
            f"tables.implementation is {implementation!r}, and rows in host memory are updated by the 'native' kernels"
        )
    if (missing := native_unavailable()) is not None:
        return f"steps on this machine run without the native kernels ({missing}), and would have other bits"
    return None


class HostCasts:
    """Casts the bags of stacks in host memory where they have no cast yet; a ``transform`` of the loader.

    Args:
      stacks: The stacks in host memory.
      tables: Their tables by stack: rows that lie on a disk begin to be read.
      ahead: How many batches the loader makes before the first of them is used.
    """

    def __init__(self, stacks: Iterable[Stack], tables: Mapping[str, HostTable] | None = None, ahead: int = 0):
        self._stacks, self._tables, self._ahead = {stack.name: stack for stack in stacks}, tables or {}, ahead

    def __call__(self, batch: Batch) -> Batch:
        """The batch of NumPy arrays, with casts."""
        bags = {
            name: of_stack if (stack := self._stacks.get(name)) is None else with_cast(of_stack, stack)
            for name, of_stack in batch.bags.items()
        }
        rows = {name: cast_rows(cast) for name in self._tables if (cast := bags[name].cast) is not None}
        ask_ahead(self._tables, rows, self._ahead + 1)
        return dataclasses.replace(batch, bags=bags)


class HostPooling:
    """Pools a batch's rows in host memory before its step, and updates them there after it. Use it from one thread.

    Args:
      tables: The tables in host memory, by stack.
      frozen: Stacks of tables that no step updates; their rows are only read.

    A step is ``pooled`` of a batch of NumPy arrays that were cast on the host, ``CompiledRun.step_on`` of what that
    returns, and ``update`` with the step's host outputs.
    """

    def __init__(self, tables: Mapping[str, HostTable], *, frozen: Collection[str] = ()):
        self._tables, self._frozen = dict(tables), frozenset(frozen)
        self._sums: dict[str, np.ndarray] = {}

    def pooled(self, batch: Batch) -> StepBatch:
        """The batch for its step, with the sums of its bags. The step before must have ended: memory is used again.

        Rows that were never written get memory, since ``update`` will write them.

        Raises:
          ValueError: On an id that a table does not have.
        """
        bags, pooled = dict(batch.bags), {}
        for name, table in self._tables.items():
            of_stack, trained = bags[name], name not in self._frozen
            space = self._space(name, of_stack.num_bags)
            # Rows of frozen stacks are only read: one that was never written takes no memory, and none counts as
            # changed.
            sums: Any = table.gather_reduce(of_stack, make=trained, mark=trained, out=space)
            pooled[name] = PooledRows(values=sums)
            bags[name] = _without_addresses(of_stack)
        return StepBatch(batch=dataclasses.replace(batch, bags=bags), pooled=pooled)

    def update(self, batch: Batch, updates: Mapping[str, PooledUpdate]) -> None:
        """Waits for the step, and updates the rows in place.

        Args:
          batch: The batch as it was given to ``pooled``, with casts.
          updates: The step's results, by stack that is not frozen.
        """
        for name, update in updates.items():
            bags = batch.bags[name]
            if bags.cast is None:
                raise ValueError(f"the bags of stack {name} have no cast; the loader makes it, or HostCasts")
            # Views where the step left float32: it has ended (``stepped``), and nothing else writes to its results.
            gradients, words = np.asarray(update.gradients, np.float32), np.asarray(update.hyperparameters)
            weights: Any = bags.weights
            self._tables[name].casted_update(bags.cast, gradients, weights=weights, hyperparameters=words, made=True)

    def _space(self, name: str, num_bags: int) -> np.ndarray:
        """(num_bags, dim) float32 whose content may be overwritten."""
        space = self._sums.get(name)
        if space is None or len(space) < num_bags:
            # The step reads the sums where they are, in this one array for all batches: hence one batch under way at a
            # time.
            space = self._sums[name] = aligned((num_bags, self._tables[name].dim), np.dtype(np.float32))
        return space[:num_bags]


class InPlaceFeed(LoaderFeed):
    """A loader's batches, whose rows in host memory stay where they are; see ``Feed`` and the module.

    Between steps every row is as the last one left it.

    Args:
      loader: The training batches, with casts of all stacks in host memory.
      tables: The tables in host memory, by stack.
      total: The number of batches that the run takes; None for all.
      frozen: See ``HostPooling``.
      trace: Where to write the trace of the stages; None for none.
      first_rows: Makes the first values of rows of growing tables.
    """

    def __init__(
        self,
        loader: Batches,
        *,
        tables: Mapping[str, HostTable],
        total: int | None,
        frozen: Collection[str] = (),
        trace: pathlib.Path | None = None,
        first_rows: FirstRows | None = None,
    ):
        self.timeline = Timeline(trace=trace is not None)
        super().__init__(loader)
        self._tables, self._total, self._trace = dict(tables), total, trace
        self._pooling = HostPooling(tables, frozen=frozen)
        self._dispatched, self._first_rows = 0.0, first_rows

    def next(self) -> Ready:
        """The next batch, its rows pooled; see ``Feed``."""
        number = self._loader.position
        if self._total is not None and number >= self._total:
            raise StopIteration
        with self.timeline.working(READ, number):
            batch = next(self._loader)
        grown = self._loader.aside
        with self.timeline.working(LOOKUP, number):
            if grown is not None and self._first_rows is not None:
                for table in self._tables.values():
                    # Before the lookup, which must find the first values of a row's new key.
                    self._first_rows.store(table, grown)
            prepared = self._pooling.pooled(batch)
        self._dispatched = time.perf_counter()
        return Ready(batches=(batch,), prepared=prepared, grown=grown)

    def stepped(self, ready: Ready, host: HostResults, results: StepResults) -> None:
        """Waits for the step and updates the rows; see ``Feed``."""
        number = self._loader.position - 1
        jax.block_until_ready((host, results))  # also of a step whose tables are all frozen: it reads our memory
        self.timeline.worked(STEP, number, self._dispatched, time.perf_counter())
        with self.timeline.working(UPDATE, number):
            self._pooling.update(ready.batches[0], host)

    def sections(self, seconds: float) -> JsonObject:
        """The sections "in_place", where the time of the steps went and how many rows memory holds, and "files"."""
        stages = self.timeline.summary(seconds)["stages"]
        names = {"read_seconds": READ, "lookup_seconds": LOOKUP, "step_seconds": STEP, "update_seconds": UPDATE}
        spent = {key: stages[stage]["busy_seconds"] if stage in stages else 0.0 for key, stage in names.items()}
        made = {name: table.num_made for name, table in self._tables.items()}
        section = {"seconds": seconds, **spent, "rows_made": made}
        return {"in_place": section, **files_section(self._tables.values())}

    def close(self) -> None:
        """Closes the loader, and writes the trace."""
        super().close()
        if self._trace is not None:
            self.timeline.write_trace(self._trace)


def _without_addresses(bags: Bags) -> Bags:
    """Bags without int64, for a step that looks at no row: of wide ids only the sign is left, which marks padding."""
    ids: Any = np.asarray(bags.ids)
    if ids.dtype == np.int64:
        ids = -(ids < 0).astype(np.int32)
    return dataclasses.replace(bags, ids=ids, cast=None if bags.cast is None else on_device(bags.cast))
