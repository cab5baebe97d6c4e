"""What a placement costs: OPER's Equations 1 to 5.

Two slips of the paper are corrected here. Equation 3 multiplies by L[j][j], the cost of a *local* lookup at the source;
a fetch by device i from j costs L[i][j], as the text defines it and Algorithm 1 has it. Algorithm 1 also writes ``g``
for the partition ``p`` and leaves out its bytes, which Equations 2 and 3 have. L is in seconds per byte.

Where some devices only keep tables, which the paper does not have, only the others look rows up, and links carry what
mode "send" moves (``jrec.sharding.modes``) in place of Equation 3's rows.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jrec.sharding.modes import sent_bytes
from jrec.sharding.pieces import HOST, REPLICATED, SHARDED, Pieces, Placement
from jrec.sharding.problem import Problem


def degree_of_balance(loads: np.ndarray) -> float:
    """OPER, Table 3: the least by the greatest of some loads, 1 if all are equal (or none is there)."""
    if loads.size == 0 or loads.max() <= 0:
        return 1.0
    return float(loads.min() / loads.max())


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Cost:
    """Figures of a placement, of one step.

    Attributes:
      memory: (devices,) float64, bytes with slots (Equation 1) and tensor-train cores.
      budget: (devices,) float64, bytes there are.
      lookup: (devices,) float64, seconds (Equation 2).
      link_bytes: (devices, devices) float64, what device ``i`` fetches from ``j`` in the forward pass; diagonal 0. To
        devices that only keep tables: all that crosses the link in a step, halved in training.
      links: The same in seconds (Equation 3).
      all_reduce: Seconds of summing the replicas' gradients (Equation 5, over all of them); 0 in inference.
      host: Seconds each device waits for host memory, both ways in training.
      tt: Seconds of tensor-train products.
      copies: Bytes of further copies of rows, over all devices.
      training: Whether gradients go back where the rows came from.
      computes: (devices,) which devices look rows up, while the others keep them; None where all do both.
    """

    memory: np.ndarray
    budget: np.ndarray
    lookup: np.ndarray
    link_bytes: np.ndarray
    links: np.ndarray
    all_reduce: float
    host: float
    tt: float
    copies: float
    training: bool
    computes: tuple[bool, ...] | None = None

    @property
    def keepers(self) -> np.ndarray:
        """(devices,) bool: the devices that keep tables, whose balance is measured."""
        return np.ones(len(self.memory), bool) if self.computes is None else ~np.array(self.computes)

    @property
    def remote(self) -> np.ndarray:
        """(devices, devices) bool: the links that are used, by the device that reads and the one that keeps."""
        if self.computes is None:
            return ~np.eye(len(self.memory), dtype=bool)
        return ~self.keepers[:, None] & self.keepers

    @property
    def memory_balance(self) -> float:
        """Degree of balance of the share of each budget that is used."""
        return degree_of_balance((self.memory / self.budget)[self.keepers])

    @property
    def lookup_balance(self) -> float:
        """Degree of balance of lookup seconds."""
        return degree_of_balance(self.lookup[self.keepers])

    @property
    def remote_bytes(self) -> np.ndarray:
        """(links,) float64, ``link_bytes`` of ``remote``."""
        return self.link_bytes[self.remote]

    @property
    def remote_seconds(self) -> np.ndarray:
        """(links,) float64, ``links`` of ``remote``."""
        return self.links[self.remote]

    @property
    def communication_balance(self) -> float:
        """Degree of balance of the links' seconds (OPER, Table 3)."""
        return degree_of_balance(self.remote_seconds)

    @property
    def balance(self) -> float:
        """The least of the three."""
        return min(self.memory_balance, self.lookup_balance, self.communication_balance)

    @property
    def communication(self) -> float:
        """Seconds of the device that fetches longest; twice in training, when as many gradients go back.

        Where some devices only keep tables, it may be one of these: few of them serve many.
        """
        fetched = float(self.links.sum(axis=1).max())
        if self.computes is not None:
            fetched = max(fetched, float(self.links.sum(axis=0).max()))
        return 2 * fetched if self.training else fetched

    @property
    def seconds(self) -> float:
        """Seconds of one step's embedding work, if nothing overlaps."""
        return float(self.lookup.max()) + self.communication + self.all_reduce + self.host + self.tt


def evaluate(problem: Problem, placement: Placement) -> Cost:
    """The cost of a placement."""
    hardware, pieces, devices = problem.hardware, placement.pieces, problem.devices
    sent = np.zeros((devices, devices))  # [i, j]: bytes that i takes from j, or from itself
    memory = np.full(devices, placement.core_bytes)
    holders = placement.holders()
    for j in range(devices):
        sent[:, j] = pieces.fetched @ (placement.path == j)
        memory[j] += pieces.memory @ holders[:, j]
    passes = 2 if problem.purpose == "training" else 1
    if problem.computes is None:
        link_bytes = sent.copy()
        np.fill_diagonal(link_bytes, 0.0)
    else:
        sent *= np.array(problem.computes)[:, None]
        link_bytes = sent_bytes(problem, placement) / passes
    replicated = placement.tier == REPLICATED
    host_bytes = float(pieces.fetched @ (placement.tier == HOST))
    copied = (holders.sum(axis=1) - 1) * ((placement.tier == SHARDED) | replicated)
    return Cost(
        memory=memory,
        budget=np.array(hardware.memory, np.float64),
        lookup=sent.sum(axis=0) * np.diag(hardware.L),
        link_bytes=link_bytes,
        links=link_bytes * hardware.L,
        all_reduce=all_reduce_seconds(problem, pieces.take(replicated)) if passes == 2 else 0.0,
        host=passes * host_bytes / hardware.host if host_bytes else 0.0,
        tt=placement.core_seconds,
        copies=float(pieces.memory @ copied),
        training=passes == 2,
        computes=problem.computes,
    )


def sharded_seconds(problem: Problem, fetched: np.ndarray | float) -> np.ndarray | float:
    """Equation 4, T_non-dup, for rows of which one device accesses ``fetched`` bytes a step (f B S / M)."""
    devices = problem.devices
    if devices == 1:
        return 0.0 * fetched
    return 2 * (fetched * devices) * (devices - 1) / devices / problem.hardware.p2p


def replicated_seconds(problem: Problem, size: np.ndarray | float) -> np.ndarray | float:
    """Equation 5, T_dup, for rows of ``size`` bytes without slots."""
    devices = problem.devices
    return 2 * (devices - 1) / devices * size / problem.hardware.all_reduce


def all_reduce_seconds(problem: Problem, pieces: Pieces) -> float:
    """Equation 5 summed over replicated pieces."""
    size = float(((pieces.stop - pieces.start) * problem.row_bytes[pieces.table]).sum())
    return float(replicated_seconds(problem, size))
