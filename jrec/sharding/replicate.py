"""Which rows every device keeps, in training (OPER §4.3): the frequency rule, under the extra memory there is."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import numpy as np

from jrec.sharding.problem import Problem

FrequencyRule = Literal["oper", "per-device"]
RULES: tuple[FrequencyRule, ...] = get_args(FrequencyRule)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Runs:
    """Runs of equally accessed rows of all tables, the most worthwhile first.

    Attributes:
      table: (runs,) int32.
      first: (runs,) int64, rank of a run's first row.
      length: (runs,) int64, rows.
      access: (runs,) float64, A of each row.
      worth: (runs,) float64, bytes accessed for each byte of memory; descending.
      memory: (runs,) float64, bytes of the run.
      fetched: (runs,) float64, bytes of it that a device accesses in a step.
    """

    table: np.ndarray
    first: np.ndarray
    length: np.ndarray
    access: np.ndarray
    worth: np.ndarray
    memory: np.ndarray
    fetched: np.ndarray

    def take(self, which: np.ndarray) -> Runs:
        """Some of the runs."""
        return Runs(**{f.name: getattr(self, f.name)[which] for f in dataclasses.fields(self)})

    def prefix(self, problem: Problem, memory: float) -> np.ndarray:
        """Per table how many ranks, the most worthwhile of all tables first, fit ``memory`` bytes; (tables,) int64."""
        total = np.cumsum(self.memory)
        # Whole runs, then as many rows of the next one as there is room for; what comes behind is worth less.
        full = int(np.searchsorted(total, memory, side="right"))
        ranks = np.zeros(len(problem.tables), np.int64)
        np.add.at(ranks, self.table[:full], self.length[:full])
        if full < len(total):
            left = memory - (total[full - 1] if full else 0.0)
            ranks[self.table[full]] += int(left / problem.memory_bytes[self.table[full]])
        return ranks


def runs_of(problem: Problem, last: np.ndarray) -> Runs:
    """The runs of all tables' ranks before ``last``, (tables,)."""
    tables, firsts, lengths, accesses = [], [], [], []
    for t, ranked in enumerate(problem.ranked):
        used = int(np.searchsorted(ranked.starts, last[t], side="left"))
        bounds = np.minimum(ranked.starts[: used + 1], last[t])
        tables.append(np.full(used, t, np.int32))
        firsts.append(bounds[:-1])
        lengths.append(np.diff(bounds))
        accesses.append(ranked.access[:used])
    table, first = np.concatenate(tables), np.concatenate(firsts)
    length, access = np.concatenate(lengths), np.concatenate(accesses)
    worth = access * (problem.row_bytes / problem.memory_bytes)[table]
    order = np.argsort(-worth, kind="stable")
    return Runs(
        table=table[order],
        first=first[order],
        length=length[order],
        access=access[order],
        worth=worth[order],
        memory=(length * problem.memory_bytes[table])[order].astype(np.float64),
        fetched=(length * access * problem.row_bytes[table])[order],
    )


def pays(problem: Problem, access: np.ndarray, rule: FrequencyRule = "oper") -> np.ndarray:
    """Whether rows of these A are worth an all-reduce: T_dup < T_non-dup.

    "oper" is the paper's f > BW_P2P / (Batch_Size BW_AR), where Equation 4 lets one link carry what all devices fetch
    of a row. "per-device" spreads those fetches over the devices as a balanced plan does, so that a row needs M times
    the frequency to pay.
    """
    if problem.devices == 1:
        return np.zeros(np.shape(access), bool)
    needed = problem.hardware.p2p / problem.hardware.all_reduce
    return access * (problem.devices if rule == "oper" else 1) > needed


def replicated_ranks(problem: Problem, last: np.ndarray, extra: float, rule: FrequencyRule = "oper") -> np.ndarray:
    """Per table how many ranks every device keeps, (tables,) int64; in inference all copies pay.

    Args:
      problem: Tables and devices.
      last: (tables,) ends of the ranks that may be replicated.
      extra: Bytes of further copies over all devices, M - 1 for each row.
      rule: See ``pays``.
    """
    if problem.devices == 1 or extra <= 0:
        return np.zeros(len(problem.tables), np.int64)
    runs = runs_of(problem, last)
    if problem.purpose == "training":
        runs = runs.take(pays(problem, runs.access, rule))
    # The owner has one copy anyway, so a replicated row takes M - 1 further ones.
    return runs.prefix(problem, extra / (problem.devices - 1))
