"""The tables of a run that grow: keys of a batch become rows, in the order of the batches.

Of several processes each has its part of every batch. They tell each other the keys of their parts, so that all of them
give the same rows: those that one process with the whole batch would give.

Batches are mapped ahead of their steps. What a table is *now*, for evaluations and checkpoints, is what it was when the
batch of the last step had been mapped: ``taken`` says how far the steps are.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from jrec.data.columns import Column, ListColumn
from jrec.data.growing import GrowingVocabulary, NewRows, StoredKeys
from jrec.data.packing_columns import PreparedColumns
from jrec.data.value_rows import Keys
from jrec.errors import CheckpointError
from jrec.ops.layout import EmbeddingLayout

_PREFIX = "growing."


class Exchange(Protocol):
    """What processes tell each other keys by (``jrec.run.placement.peers.Peers``)."""

    process: int
    processes: int

    def exchange(self, arrays: Sequence[Sequence[np.ndarray]]) -> list[list[np.ndarray]]:
        """Sends arrays to every process, and returns the arrays that they sent to this one, by process."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Grown:
    """What mapping a batch changed.

    Attributes:
      clock: Batches mapped so far, this one among them.
      new: By table, the rows that other keys have from this batch on; tables without any are left out.
    """

    clock: int
    new: Mapping[str, NewRows]


class GrowingTables:
    """The vocabularies of a run's growing tables; false where there are none.

    Args:
      layout: The run's tables and features.
      vocabularies: By table that grows.
      peers: The other processes, which map their parts of the same batches; None for one process.

    Raises:
      ValueError: If a vocabulary is of another size than its table, or vocabularies have mapped different batches.
    """

    def __init__(
        self, layout: EmbeddingLayout, vocabularies: Mapping[str, GrowingVocabulary], *, peers: Exchange | None = None
    ):
        rows = {table.name: table.table_rows for stack in layout.members for table in stack.tables}
        for name, vocabulary in vocabularies.items():
            if name not in rows:
                raise ValueError(f"table {name!r} is to grow, but the model's tables are {', '.join(sorted(rows))}")
            if vocabulary.growth.capacity != rows[name]:
                raise ValueError(
                    f"the vocabulary of table {name!r} has a capacity of {vocabulary.growth.capacity:,} rows, but the"
                    f" table has {rows[name]:,}; make them equal"
                )
        if len(clocks := {vocabulary.clock for vocabulary in vocabularies.values()}) > 1:
            raise ValueError(f"the vocabularies have mapped {sorted(clocks)} batches; give those of one run")
        self._vocabularies = dict(vocabularies)
        self._features: dict[str, list[str]] = {name: [] for name in vocabularies}
        for feature, _ in layout.features:
            if feature.table in self._features:
                self._features[feature.table].append(feature.name)
        self._taken, self._peers, self._handed_out = clocks.pop() if clocks else 0, peers, False

    @property
    def names(self) -> frozenset[str]:
        """The tables."""
        return frozenset(self._vocabularies)

    def __bool__(self) -> bool:
        return bool(self._vocabularies)

    def keys(self, *, stored: bool = False) -> dict[str, Keys]:
        """What a packer needs to leave keys to ``map``; ``stored`` where columns are of a dataset, which holds keys."""
        return {
            name: Keys(stored=stored, key_seed=own.key_seed, canonical=own.canonical)
            for name, own in self._vocabularies.items()
        }

    def mapper(self) -> Callable[[PreparedColumns], tuple[PreparedColumns, Grown]]:
        """A function that gives the keys of the next batch their rows, from the batch after the last step on.

        It takes the batch's examples, with keys for the features of growing tables, and returns them with rows for all
        features, and what changed. What an earlier function has mapped, or still maps in a thread that is not done, is
        of no consequence any more, unless a step has been taken on it.

        Raises:
          RuntimeError: If processes may have mapped different numbers of batches.
        """
        if self._handed_out:
            if self._peers is not None and any(own.clock != self._taken for own in self._vocabularies.values()):
                raise RuntimeError(
                    "a feed was closed before all of its batches were taken, of which the processes have mapped"
                    " different numbers; save the run, and restore it into a new one"
                )
            # Copies: a closed feed's vocabularies are mapped ahead of the steps, and its thread may still work on them.
            self._vocabularies = self.now()
        self._handed_out = True
        return functools.partial(self._map, self._vocabularies)

    def _map(
        self, vocabularies: Mapping[str, GrowingVocabulary], columns: PreparedColumns
    ) -> tuple[PreparedColumns, Grown]:
        ids, new, clock = dict(columns.ids), {}, 0
        own_keys = {table: _joined([ids[name] for name in names]) for table, names in self._features.items()}
        of_all, begins = self._of_all(own_keys)
        for table, vocabulary in vocabularies.items():
            names = self._features[table]
            rows, changed = vocabulary.map(of_all[table])
            begin = begins[table]
            for name in names:
                column = ids[name]
                values = _values(column)
                own = rows[begin : begin + values.size].astype(np.int64).reshape(values.shape)
                ids[name] = ListColumn(column.offsets, own) if isinstance(column, ListColumn) else own
                begin += values.size
            clock = vocabulary.clock
            if changed.rows.size:
                new[table] = changed
        return dataclasses.replace(columns, ids=ids), Grown(clock=clock, new=new)

    def _of_all(self, keys: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, int]]:
        """By table the keys of all processes' parts, and where this one's begin among them."""
        if self._peers is None:
            return keys, dict.fromkeys(keys, 0)
        # One message for all tables; the exchange has signed integers.
        own = np.concatenate(list(keys.values())).view(np.int64)
        sizes = np.array([array.size for array in keys.values()], np.int64)
        parts = []
        for there, of_tables in self._peers.exchange([[own, sizes]] * self._peers.processes):
            parts.append(np.split(there.view(np.uint64), np.cumsum(of_tables)[:-1]))
        joined = {table: np.concatenate([part[k] for part in parts]) for k, table in enumerate(keys)}
        before = range(self._peers.process)
        return joined, {table: sum(parts[p][k].size for p in before) for k, table in enumerate(keys)}

    def taken(self, grown: Grown) -> None:
        """Says that the step of a mapped batch was taken."""
        self._taken = grown.clock
        for vocabulary in self._vocabularies.values():
            vocabulary.forget(grown.clock)

    def now(self) -> dict[str, GrowingVocabulary]:
        """By table, a copy of its vocabulary as of the last step."""
        return {name: vocabulary.at(self._taken) for name, vocabulary in self._vocabularies.items()}

    def rows_of_keys(self) -> dict[str, StoredKeys]:
        """The same, for a dataset, which holds keys instead of values."""
        return {name: vocabulary.of_keys() for name, vocabulary in self.now().items()}

    def state(self) -> dict[str, np.ndarray]:
        """Arrays by name as of the last step, for a checkpoint."""
        return {
            f"{_PREFIX}{table}.{name}": array
            for table, vocabulary in self.now().items()
            for name, array in vocabulary.state().items()
        }

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restores a ``state()``; arrays of other names are ignored.

        Raises:
          CheckpointError: If they are of other tables or capacities.
        """
        saved = {name.removeprefix(_PREFIX).rpartition(".")[0] for name in arrays if name.startswith(_PREFIX)}
        if differing := sorted(saved ^ self._vocabularies.keys()):
            has = "grows in the checkpoint" if differing[0] in saved else "grows in this run"
            raise CheckpointError(f"table {differing[0]!r} only {has}; the run must be continued with the same tables")
        for table, vocabulary in self._vocabularies.items():
            prefix = f"{_PREFIX}{table}."
            own = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
            vocabulary.restore(own)
            self._taken = vocabulary.clock

    def sections(self) -> dict[str, dict[str, int | float]]:
        """By table, counts since the beginning as of the last step, for a report."""
        sections = {}
        for name, vocabulary in self.now().items():
            counts = vocabulary.counts
            sections[name] = {
                "capacity": vocabulary.growth.capacity,
                **dataclasses.asdict(counts),
                "oov_share": counts.oov_lookups / max(1, counts.lookups),
            }
        return sections


def _joined(columns: Sequence[Column]) -> np.ndarray:
    values = [_values(column).reshape(-1) for column in columns]
    return values[0] if len(values) == 1 else np.concatenate(values)


def _values(column: Column) -> np.ndarray:
    return column.values if isinstance(column, ListColumn) else column
