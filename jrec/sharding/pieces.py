"""Pieces: what is placed as a whole, a range of ranks of one table, and where each piece is put."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from jrec.sharding.problem import Problem

SHARDED, REPLICATED, TT, HOST = range(4)
TIER_NAMES = ("sharded", "replicated", "tt", "host")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Pieces:
    """Ranges of ranks that together hold every row of the problem's tables at most once.

    Attributes:
      table: (pieces,) int32, position of the table.
      start, stop: (pieces,) int64, ranks.
      memory: (pieces,) float64, bytes with slots (OPER's sum of S_k).
      fetched: (pieces,) float64, bytes one device accesses of the piece in a step (the sum of S_k A_k).
    """

    table: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    memory: np.ndarray
    fetched: np.ndarray

    def __len__(self) -> int:
        return len(self.table)

    @staticmethod
    def of(problem: Problem, table: np.ndarray, start: np.ndarray, stop: np.ndarray) -> Pieces:
        """Measures ranges of ranks."""
        table, start, stop = np.asarray(table, np.int32), np.asarray(start, np.int64), np.asarray(stop, np.int64)
        mass = np.zeros(len(table))
        for number, ranked in enumerate(problem.ranked):
            own = table == number
            mass[own] = ranked.mass_before(stop[own]) - ranked.mass_before(start[own])
        return Pieces(
            table=table,
            start=start,
            stop=stop,
            memory=(stop - start).astype(np.float64) * problem.memory_bytes[table],
            fetched=mass * problem.row_bytes[table],
        )

    def take(self, which: np.ndarray) -> Pieces:
        """Some of the pieces."""
        return Pieces(**{f.name: getattr(self, f.name)[which] for f in dataclasses.fields(self)})


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Placement:
    """Where every piece lives and who fetches it from where: OPER's P.

    Attributes:
      pieces: All of them; every rank of every table is in exactly one.
      tier: (pieces,) uint8, one of ``TIER_NAMES``.
      owner: (pieces,) int16, the device that keeps the piece; -1 in other tiers than "sharded".
      path: (pieces, devices) int16: device ``i`` fetches from ``path[p, i]``, itself where it has a copy; -1 for tiers
        "tt" and "host".
      core_bytes: Bytes of all tensor-train cores, on each device.
      core_seconds: The time of their products in a step.
      cuts: The ``Problem.cuts`` by which the pieces' ranks are counted.
    """

    pieces: Pieces
    tier: np.ndarray
    owner: np.ndarray
    path: np.ndarray
    core_bytes: float = 0.0
    core_seconds: float = 0.0
    cuts: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @staticmethod
    def owned(pieces: Pieces, owner: np.ndarray, devices: int) -> Placement:
        """Every piece on a single device."""
        owner = owner.astype(np.int16)
        path = np.repeat(owner[:, None], devices, axis=1)
        return Placement(pieces=pieces, tier=np.full(len(pieces), SHARDED, np.uint8), owner=owner, path=path)

    @staticmethod
    def everywhere(pieces: Pieces, tier: int, devices: int) -> Placement:
        """Every piece in one tier that has no owner."""
        near = np.arange(devices) if tier == REPLICATED else np.full(devices, -1)
        return Placement(
            pieces=pieces,
            tier=np.full(len(pieces), tier, np.uint8),
            owner=np.full(len(pieces), -1, np.int16),
            path=np.repeat(near.astype(np.int16)[None, :], len(pieces), axis=0),
        )

    def holders(self) -> np.ndarray:
        """(pieces, devices) bool: who keeps a copy. Whoever keeps one fetches from himself."""
        return self.path == np.arange(self.path.shape[1])


def join(placements: list[Placement], *, core_bytes: float = 0.0, core_seconds: float = 0.0) -> Placement:
    """One placement of the pieces of several."""
    pieces = [p.pieces for p in placements]
    return Placement(
        pieces=Pieces(
            **{f.name: np.concatenate([getattr(p, f.name) for p in pieces]) for f in dataclasses.fields(Pieces)}
        ),
        tier=np.concatenate([p.tier for p in placements]),
        owner=np.concatenate([p.owner for p in placements]),
        path=np.concatenate([p.path for p in placements]),
        core_bytes=core_bytes,
        core_seconds=core_seconds,
    )
