"""How many bytes a step moves between devices in each form of the lookup, by the cost model. NumPy alone.

*Retrieve*: a request of 4 bytes for each unique row, the row, and its float32 gradient. *Send*: 4 bytes for each lookup
and each bag, the bag's float32 sum, and its gradient. *Memory-centric*: as send, from devices that run the dense model
to others that keep the rows. Replicated rows, which no link carries, are left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from jrec.errors import ConfigError
from jrec.sharding.pieces import SHARDED
from jrec.sharding.plan import Plan
from jrec.sharding.problem import Problem

Mode = Literal["retrieve", "send"]
MODES: tuple[str, ...] = get_args(Mode)
INDEX = 4  # bytes of a row's offset, and of a bag's start
GRADIENT = 4  # bytes of an element of a gradient or of a sum


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Traffic:
    """What devices ask of each other in a step; (devices, devices) float64, ``[i, j]`` what i asks of j, diagonal 0.

    Attributes:
      lookups: ids.
      rows: unique rows.
      bags: with lookups at j.
      retrieve: bytes between i and j, both ways, where rows are retrieved.
      send: where pooled bags are sent.
    """

    lookups: np.ndarray
    rows: np.ndarray
    bags: np.ndarray
    retrieve: np.ndarray
    send: np.ndarray

    def bytes_of(self, mode: Mode) -> float:
        """Over all links, of one step."""
        return float(getattr(self, mode).sum())

    @property
    def cheaper(self) -> Mode:
        """The form that moves fewer bytes."""
        return "send" if self.bytes_of("send") < self.bytes_of("retrieve") else "retrieve"


def traffic(
    *, lookups: np.ndarray, rows: np.ndarray, bags: np.ndarray, row_bytes: np.ndarray, dims: np.ndarray
) -> Traffic:
    """Bytes of counts, expected or real.

    Args:
      lookups, rows, bags: (tables, devices, devices).
      row_bytes, dims: (tables,).
    """
    away = ~np.eye(lookups.shape[1], dtype=bool)
    lookups, rows, bags = (np.where(away, a, 0.0) for a in (lookups, rows, bags))
    of_row = (INDEX + row_bytes + GRADIENT * dims)[:, None, None]
    of_bag = (INDEX + 2 * GRADIENT * dims)[:, None, None]
    return Traffic(
        lookups=lookups.sum(axis=0),
        rows=rows.sum(axis=0),
        bags=bags.sum(axis=0),
        retrieve=(rows * of_row).sum(axis=0),
        send=(INDEX * lookups + bags * of_bag).sum(axis=0),
    )


def expected_traffic(problem: Problem, plan: Plan, *, computes: Sequence[bool] | None = None) -> Traffic:
    """What a profile lets expect of a plan.

    Args:
      problem: accesses and batch; its ``dedup`` does not matter.
      plan: of the same tables and devices.
      computes: which devices have examples, all of the batch together; None for all of them. Where only some have, and
        others keep the rows, ``send`` is the memory-centric mode.

    Raises:
      ConfigError: if no device has examples.
    """
    chosen = np.ones(plan.devices, bool) if computes is None else np.asarray(computes, bool)
    if chosen.shape != (plan.devices,) or not chosen.any():
        raise ConfigError(f"computes names {int(chosen.sum())} devices of {chosen.size}; the plan has {plan.devices}")
    batch = problem.batch_size * plan.devices // int(chosen.sum())  # a Problem deals it to all devices
    examples = problem.batch_size / int(chosen.sum())
    lookups = _by_table(dataclasses.replace(problem, batch_size=batch, dedup=False), plan)
    rows = _by_table(dataclasses.replace(problem, batch_size=batch, dedup=True), plan)
    lengths = np.array([problem.profile.table(t.name).accesses for t in problem.tables]) / problem.profile.examples
    length = np.maximum(lengths, 1.0)[:, None, None]
    share = np.minimum(lookups / (examples * np.maximum(lengths, 1e-300)[:, None, None]), 1.0)
    bags = np.minimum(examples * (1 - (1 - share) ** length), lookups)
    asking = chosen[None, :, None]
    return traffic(
        lookups=lookups * asking,
        rows=rows * asking,
        bags=bags * asking,
        row_bytes=problem.row_bytes,
        dims=np.array([t.dim for t in problem.tables]),
    )


def _by_table(problem: Problem, plan: Plan) -> np.ndarray:
    """(tables, devices, devices): accesses of sharded rows, by asker and source."""
    found = np.zeros((len(plan.tables), plan.devices, plan.devices))
    path = plan.path[plan.way]
    for t, ranked in enumerate(problem.by_row):
        of = slice(int(plan.first[t]), int(plan.first[t + 1]))
        mass = ranked.mass_before(plan.stop[of]) - ranked.mass_before(plan.start[of])
        mass = np.where(plan.tier[of] == SHARDED, mass, 0.0)
        for device in range(plan.devices):
            found[t, device] = np.bincount(np.maximum(path[of, device], 0), mass, plan.devices)
    return found
