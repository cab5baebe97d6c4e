"""Which features of a run on a mesh fetch other devices' rows, and which have the rows' owners pool them.

Retrieving moves every unique row and its gradient; sending moves every lookup's id, every pooled sum and its gradient
(``jrec.sharding.modes``). Which is less depends on a feature's bags: long bags of rows that hardly repeat are better
sent. "auto" counts both in the run's first batches, always the same ones, so that a resumed run decides alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Literal

import jax
import numpy as np

from jrec.json_values import JsonObject
from jrec.mesh.exchange import DEFAULT, Links
from jrec.ops.layout import EmbeddingLayout, Stack, StackedFeature
from jrec.run.placement.part_lookups import PartLookups, bags_of, poolable
from jrec.sharding.modes import traffic

LookupMode = Literal["auto", "retrieve", "send"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableModes:
    """The choice for the features of one table that could send.

    Attributes:
      table: The table's name.
      send, retrieve: Names of the features with each chosen mode.
      retrieve_bytes, send_bytes: Bytes that a step moves over all links if all features retrieve, or send.
      bytes: Bytes that a step moves with the chosen modes.
    """

    table: str
    send: tuple[str, ...]
    retrieve: tuple[str, ...]
    retrieve_bytes: float
    send_bytes: float
    bytes: float


class LookupModes:
    """The lookup modes of all features of a run; made once, then decided, then read by the loader's threads.

    Args:
      layout: The batches' layout.
      mode: "auto", or one mode for all features that can have it. Where some devices compute and others keep the
        tables, with "send" only pooled sums travel between them.
      links: How values travel.

    Attributes:
      send: Names of the features that send; none until an automatic choice is made.
      decided: Whether the choice is made.
      tables: The byte counts behind an automatic choice, by table.
    """

    def __init__(self, layout: EmbeddingLayout, mode: LookupMode = "auto", *, links: Links = DEFAULT):
        self._links = links
        self._stacks = layout.planned_stacks
        every = frozenset(f.config.name for stack in self._stacks for f in poolable(stack))
        self.send: Set[str] = every if mode == "send" else frozenset()
        self.decided = mode != "auto" or not any(_candidates(stack) for stack in self._stacks)
        self.tables: tuple[TableModes, ...] = ()

    def decide(
        self, batches: Iterable[Mapping[str, Sequence[PartLookups]]], examples: int, *, training: bool = True
    ) -> None:
        """Chooses by the lookups of batches; where processes have different parts, all call this.

        Args:
          batches: By stack the lookups of the parts of the process's own devices, or of all, of every batch.
          examples: The examples of a part.
          training: Whether gradients travel, too.
        """
        counts_by_table: dict[tuple[str, str], _Counts] = {}
        steps = parts = 0
        for lookups in batches:
            steps += 1
            for stack in self._stacks:
                parts = len(lookups[stack.name])
                for part in lookups[stack.name]:
                    for table, counts in _counted(stack, part, examples):
                        key = (stack.name, table)
                        counts_by_table[key] = counts_by_table[key] + counts if key in counts_by_table else counts
        stacks = {stack.name: stack for stack in self._stacks}
        self.tables = tuple(
            _chosen(stacks[stack], table, counts, steps, training, self._links)
            for (stack, table), counts in _summed(counts_by_table, parts).items()
        )
        self.send = frozenset(name for table in self.tables for name in table.send)
        self.decided = True

    def restore(self, send: Iterable[str]) -> None:
        """Takes an earlier choice: the features whose lookups are sent."""
        self.send, self.decided = frozenset(send), True

    def record(self) -> JsonObject | None:
        """The choice in JSON types, in megabytes per step over all links; None where there was nothing to choose."""
        if not self.tables:
            return None
        return {
            table.table: {
                "send": list(table.send),
                "retrieve": list(table.retrieve),
                "retrieve_megabytes": table.retrieve_bytes / 1e6,
                "send_megabytes": table.send_bytes / 1e6,
                "megabytes": table.bytes / 1e6,
            }
            for table in self.tables
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Counts:
    """Requests between devices for a table's k candidates, longest bags first; (..., N, N), requesting device first.

    Attributes:
      rows: (k + 1, ...) unique rows that the candidates from the i-th on, or other features, read.
      lookups, bags: (k, ...) lookups and bags of each candidate.
    """

    rows: np.ndarray
    lookups: np.ndarray
    bags: np.ndarray

    def __add__(self, other: _Counts) -> _Counts:
        return _Counts(rows=self.rows + other.rows, lookups=self.lookups + other.lookups, bags=self.bags + other.bags)


def _candidates(stack: Stack) -> dict[str, list[StackedFeature]]:
    """The features that could gain by sending, by table, the longest bags first.

    One id's sum is no smaller than its row, so features of one id retrieve.
    """
    candidates: dict[str, list[StackedFeature]] = {}
    for feature in sorted(poolable(stack), key=lambda f: -f.config.max_length):
        if feature.config.max_length > 1:
            candidates.setdefault(feature.config.table, []).append(feature)
    return candidates


def _counted(stack: Stack, part: PartLookups, examples: int) -> Iterator[tuple[str, _Counts]]:
    """One device's requests to the others, by table with candidates."""
    owner, devices, device = part.owner, part.devices, part.device
    for table, candidates in _candidates(stack).items():
        rest = [f for f in stack.features if f.config.table == table and f not in candidates]
        last = np.full(owner.size, -1, np.int64)  # reader of each unique row, the latest in the order of preference
        counts = {n: np.zeros((len(candidates), devices, devices)) for n in ("lookups", "bags")}
        for i, feature in enumerate([*candidates, *rest]):
            span = bags_of(feature, examples)
            lookups = slice(*np.searchsorted(part.bag, [span.start, span.stop]))
            numbers, example = part.number[lookups], part.bag[lookups] - span.start
            # Readers come in ascending order, so the greatest number stays: while the first j candidates send, exactly
            # the rows with last >= j still have a reader that fetches them.
            last[numbers] = min(i, len(candidates))
            if i >= len(candidates):
                continue
            away = owner[numbers] >= 0
            asked = owner[numbers[away]].astype(np.int64)
            counts["lookups"][i, device] = np.bincount(asked, minlength=devices)
            pairs = np.zeros((examples, devices), bool)
            pairs[example[away], asked] = True
            counts["bags"][i, device] = pairs.sum(axis=0)
        rows = np.zeros((len(candidates) + 1, devices, devices))
        for i in range(len(candidates) + 1):
            rows[i, device] = np.bincount(owner[(owner >= 0) & (last >= i)], minlength=devices)
        yield table, _Counts(rows=rows, **counts)


def _summed(counts: dict[tuple[str, str], _Counts], devices: int) -> dict[tuple[str, str], _Counts]:
    """The sums over all processes, which have the same keys, where each counted only its own ``devices``."""
    if jax.process_count() == 1 or not counts or next(iter(counts.values())).rows.shape[-1] == devices:
        return counts
    from jax.experimental import multihost_utils

    fields = [f.name for f in dataclasses.fields(_Counts)]
    arrays = [getattr(count, name) for count in counts.values() for name in fields]
    # The counts are whole numbers: int32 keeps them, where JAX would make float32 of float64.
    flat = np.concatenate([a.reshape(-1) for a in arrays]).astype(np.int32)
    total = np.asarray(multihost_utils.process_allgather(flat), np.float64).sum(axis=0)
    parts = iter(np.split(total, np.cumsum([a.size for a in arrays])[:-1]))
    return {
        key: _Counts(**{name: next(parts).reshape(getattr(count, name).shape) for name in fields})
        for key, count in counts.items()
    }


def _chosen(stack: Stack, table: str, counts: _Counts, steps: int, training: bool, links: Links) -> TableModes:
    """The cheapest split in which the first candidates send and the others retrieve; at equal cost more retrieve."""
    candidates = _candidates(stack)[table]
    (config,) = [t for t in stack.tables if t.name == table]
    none = np.zeros_like(counts.rows[:1])

    def moved(rows: np.ndarray, lookups: np.ndarray, bags: np.ndarray) -> Any:
        return traffic(
            rows=rows,
            lookups=lookups,
            bags=bags,
            row_bytes=np.array([config.dim * links.itemsize("rows", jax.numpy.dtype(config.dtype).itemsize)]),
            sum_itemsize=links.itemsize("rows", 4),
            gradient_itemsize=links.itemsize("gradients", 4),
            dims=np.array([config.dim]),
            training=training,
            weighted=stack.weighted,
        )

    fetched = [moved(rows[None], none, none).bytes_of("retrieve") for rows in counts.rows]
    sent = [moved(none, counts.lookups[i : i + 1], counts.bags[i : i + 1]) for i in range(len(candidates))]
    # Only prefixes of the candidates are tried, longest bags first, so k + 1 splits instead of 2^k. A row that a later
    # feature reads is fetched in any case: ``fetched`` has counted that.
    total = [fetched[i] + sum(t.bytes_of("send") for t in sent[:i]) for i in range(len(candidates) + 1)]
    best = int(np.argmin(total))
    names = [f.config.name for f in candidates]
    return TableModes(
        table=table,
        send=tuple(names[:best]),
        retrieve=tuple(names[best:]),
        retrieve_bytes=total[0] / max(1, steps),
        send_bytes=total[-1] / max(1, steps),
        bytes=total[best] / max(1, steps),
    )
