"""How many bytes a step moves between devices in each mode of the lookup, by the cost model. Uses only NumPy.

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
from jrec.sharding.pieces import SHARDED, Placement
from jrec.sharding.plans import Plan
from jrec.sharding.problem import Problem

Mode = Literal["retrieve", "send"]
MODES: tuple[str, ...] = get_args(Mode)
INDEX = 4  # bytes of a row's offset, and of a bag's start
WEIGHT = 4  # bytes of a lookup's weight
FLOAT32 = 4  # bytes of an element of a gradient or of a sum, unless links narrow it


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Traffic:
    """What devices ask of each other in a step; (devices, devices) float64, ``[i, j]`` what i asks of j, diagonal 0.

    Attributes:
      lookups: Ids looked up.
      rows: Unique rows.
      bags: Bags with lookups at j.
      retrieve: Bytes between i and j, both ways, where rows are retrieved.
      send: The same where pooled bags are sent.
    """

    lookups: np.ndarray
    rows: np.ndarray
    bags: np.ndarray
    retrieve: np.ndarray
    send: np.ndarray

    def bytes_of(self, mode: Mode) -> float:
        """Bytes over all links in one step."""
        return float(getattr(self, mode).sum())

    @property
    def cheaper(self) -> Mode:
        """The mode that moves fewer bytes."""
        return "send" if self.bytes_of("send") < self.bytes_of("retrieve") else "retrieve"


def traffic(
    *,
    lookups: np.ndarray,
    rows: np.ndarray,
    bags: np.ndarray,
    row_bytes: np.ndarray,
    dims: np.ndarray,
    training: bool = True,
    weighted: bool = False,
    sum_itemsize: int = FLOAT32,
    gradient_itemsize: int = FLOAT32,
) -> Traffic:
    """Bytes of counts, expected or real.

    Args:
      lookups, rows, bags: (tables, devices, devices).
      row_bytes, dims: (tables,).
      training: Whether gradients go back.
      weighted: Whether lookups have float32 weights, which are sent with them.
      sum_itemsize, gradient_itemsize: Bytes of an element of a pooled sum, and of a gradient, as they travel.
    """
    gradient = gradient_itemsize if training else 0
    away = ~np.eye(lookups.shape[1], dtype=bool)
    lookups, rows, bags = (np.where(away, a, 0.0) for a in (lookups, rows, bags))
    of_row = (INDEX + row_bytes + gradient * dims)[:, None, None]
    of_bag = (INDEX + (sum_itemsize + gradient) * dims)[:, None, None]
    of_lookup = INDEX + WEIGHT if weighted else INDEX
    return Traffic(
        lookups=lookups.sum(axis=0),
        rows=rows.sum(axis=0),
        bags=bags.sum(axis=0),
        retrieve=(rows * of_row).sum(axis=0),
        send=(of_lookup * lookups + bags * of_bag).sum(axis=0),
    )


def expected_traffic(
    problem: Problem, plan: Plan, *, computes: Sequence[bool] | None = None, table: str | None = None
) -> Traffic:
    """The traffic of a plan that an access profile lets expect.

    Args:
      problem: Accesses and batch; its ``dedup`` does not matter.
      plan: A plan of the same tables and devices.
      computes: Which devices have examples, all of the batch together; None for what the plan says. Where only some
        have, and others keep the rows, ``send`` is the memory-centric mode.
      table: Count only this table; None for all.

    Raises:
      ConfigError: If no device has examples.
    """
    stated = plan.computes if computes is None else computes
    chosen = np.ones(plan.devices, bool) if stated is None else np.asarray(stated, bool)
    if chosen.shape != (plan.devices,) or not chosen.any():
        raise ConfigError(f"computes names {int(chosen.sum())} devices of {chosen.size}; the plan has {plan.devices}")
    asking = chosen[None, :, None]
    lookups, rows = (_by_table(alike, plan.placement(alike)) * asking for alike in _alike(problem, int(chosen.sum())))
    number = slice(None) if table is None else [plan.number(table)]
    return traffic(
        lookups=lookups[number],
        rows=rows[number],
        bags=_bags(problem, lookups, int(chosen.sum()))[number],
        row_bytes=problem.row_bytes[number],
        dims=_dims(problem)[number],
        training=problem.purpose == "training",
    )


def sent_bytes(problem: Problem, placement: Placement) -> np.ndarray:
    """(devices, devices) float64: ``Traffic.send`` of a placement whose rows some devices keep and others look up."""
    asking = np.ones(problem.devices) if problem.computes is None else np.array(problem.computes, np.float64)
    lookups = _by_table(problem, placement) * asking[None, :, None]
    bags, training = _bags(problem, lookups, problem.num_compute_devices), problem.purpose == "training"
    none = np.zeros_like(lookups)
    made = traffic(
        lookups=lookups, rows=none, bags=bags, row_bytes=problem.row_bytes, dims=_dims(problem), training=training
    )
    return made.send


def _alike(problem: Problem, compute_devices: int) -> tuple[Problem, Problem]:
    """A problem whose devices all have as many examples as those that compute, without and with ``dedup``."""
    hardware = dataclasses.replace(problem.hardware, tables_on=())
    problem_of_all = problem.on_devices(hardware, compute_devices, dedup=False)
    return problem_of_all, dataclasses.replace(problem_of_all, dedup=True)


def _dims(problem: Problem) -> np.ndarray:
    return np.array([t.dim for t in problem.tables])


def _bags(problem: Problem, lookups: np.ndarray, compute_devices: int) -> np.ndarray:
    """(tables, devices, devices): bags with at least one of the (tables, devices, devices) lookups."""
    examples = problem.batch_size / compute_devices
    lengths = np.array([problem.profile.table(t.name).accesses for t in problem.tables]) / problem.profile.examples
    length = np.maximum(lengths, 1.0)[:, None, None]
    share = np.minimum(lookups / (examples * np.maximum(lengths, 1e-300)[:, None, None]), 1.0)
    return np.minimum(examples * (1 - (1 - share) ** length), lookups)


def _by_table(problem: Problem, placement: Placement) -> np.ndarray:
    """(tables, devices, devices): accesses of sharded rows, by computing device and source."""
    pieces, tables, devices = placement.pieces, len(problem.tables), problem.devices
    mass = np.where(placement.tier == SHARDED, pieces.fetched / problem.row_bytes[pieces.table], 0.0)
    accesses = np.empty((tables, devices, devices))
    for device in range(devices):
        source = pieces.table.astype(np.int64) * devices + np.maximum(placement.path[:, device], 0)
        accesses[:, device] = np.bincount(source, mass, tables * devices).reshape(tables, devices)
    return accesses
