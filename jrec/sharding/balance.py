"""Balanced model parallelism (OPER §4.2): a greedy assignment, then exchanges that only ever improve it."""

from __future__ import annotations

import dataclasses

import numpy as np

from jrec.sharding.cost import degree_of_balance
from jrec.sharding.errors import PlanError
from jrec.sharding.partition import access_bound
from jrec.sharding.pieces import Pieces
from jrec.sharding.problem import Problem

_TIE = 0.5  # of a piece: devices whose memory differs by less count as equally full
_CANDIDATES = 96  # pieces of a device that an exchange considers
_BALANCED = 0.9999  # the degree of balance that suffices
_NEIGHBOURS = 3  # devices at the other end that an exchange considers


@dataclasses.dataclass(kw_only=True, eq=False)
class Loads:
    """What devices hold so far: bytes of memory and seconds of lookups."""

    memory: np.ndarray
    lookup: np.ndarray
    budget: np.ndarray
    per_byte: np.ndarray  # lookup seconds of a byte that every device accesses

    @staticmethod
    def empty(problem: Problem, reserved: np.ndarray | float = 0.0) -> Loads:
        """Loads of devices that hold only ``reserved`` bytes, one figure or (devices,)."""
        devices = problem.devices
        return Loads(
            memory=np.zeros(devices),
            lookup=np.zeros(devices),
            budget=np.maximum(np.array(problem.hardware.memory, np.float64) - reserved, 1.0),
            # Equation 2: a device's memory is read for the lookups of all devices, whoever asks.
            per_byte=np.diag(problem.hardware.L) * devices,
        )

    def put(self, device: int, memory: float, fetched: float) -> None:
        """Adds to a device."""
        self.memory[device] += memory
        self.lookup[device] += fetched * self.per_byte[device]


def loads_of(problem: Problem, pieces: Pieces, owner: np.ndarray, reserved: np.ndarray | float = 0.0) -> Loads:
    """The loads of an assignment."""
    loads = Loads.empty(problem, reserved)
    devices = problem.devices
    loads.memory += np.bincount(owner, pieces.memory, devices)
    loads.lookup += np.bincount(owner, pieces.fetched, devices) * loads.per_byte
    return loads


def assign(
    problem: Problem, pieces: Pieces, *, reserved: np.ndarray | float = 0.0, loads: Loads | None = None
) -> tuple[Pieces, np.ndarray]:
    """Puts every piece on one device: access-bound ones where lookups are least, the others where memory is.

    Args:
      problem: Tables and devices.
      pieces: The pieces to be placed.
      reserved: Bytes of the devices' budgets that are taken already, one figure or (devices,).
      loads: The loads of pieces that are placed already; raised.

    Returns:
      The pieces, more of them where one fitted nowhere as a whole, and their (pieces,) owners.

    Raises:
      PlanError: If the devices are too small together.
    """
    loads = Loads.empty(problem, reserved) if loads is None else loads
    by_access = access_bound(pieces)
    typical = float(pieces.memory.max(initial=0.0))
    small = pieces.memory < typical / 2
    # Access-bound by descending accesses; then full pieces, hottest first; then the remainders, largest first.
    order = np.lexsort((-np.where(small & ~by_access, pieces.memory, pieces.fetched), small & ~by_access, ~by_access))
    owners = np.full(len(pieces), -1, np.int64)
    splits: list[tuple[int, int, int, int]] = []
    for p in order.tolist():
        memory, fetched = float(pieces.memory[p]), float(pieces.fetched[p])
        device = _choose(loads, memory, fetched, by_access=bool(by_access[p]))
        if device >= 0:
            owners[p] = device
            loads.put(device, memory, fetched)
        else:
            splits.extend(_split(problem, pieces, p, loads))
    if not splits:
        return pieces, owners
    kept = owners >= 0
    table, start, stop, device = (np.array(column) for column in zip(*splits, strict=True))
    joined = Pieces.of(
        problem,
        np.concatenate([pieces.table[kept], table]),
        np.concatenate([pieces.start[kept], start]),
        np.concatenate([pieces.stop[kept], stop]),
    )
    return joined, np.concatenate([owners[kept], device])


def _choose(loads: Loads, memory: float, fetched: float, *, by_access: bool) -> int:
    fits = loads.memory + memory <= loads.budget
    if not fits.any():
        return -1
    lookup = np.where(fits, loads.lookup + fetched * loads.per_byte, np.inf)
    if by_access:
        return int(lookup.argmin())
    used = np.where(fits, loads.memory / loads.budget, np.inf)
    # Among devices that are about equally full, memory does not decide: the one with fewer lookups does.
    nearly = used <= used.min() + _TIE * memory / loads.budget
    return int(np.where(nearly, lookup, np.inf).argmin())


def _split(problem: Problem, pieces: Pieces, p: int, loads: Loads) -> list[tuple[int, int, int, int]]:
    """Spreads a piece over what room is left: (table, start, stop, device) of each piece cut from it."""
    t, start, stop = int(pieces.table[p]), int(pieces.start[p]), int(pieces.stop[p])
    row, placed, ranked = float(problem.memory_bytes[t]), [], problem.ranked[t]
    while start < stop:
        # Whole rows: what is left of a device may be less than one, and counts for nothing.
        room = np.floor(np.maximum(loads.budget - loads.memory, 0.0) / row)
        device = int(room.argmax())
        if room[device] < 1:
            raise PlanError(
                f"the tables do not fit: {(stop - start) * row:,.0f} bytes of table {problem.tables[t].name!r} are left"
                f" when the memory of all devices of {problem.hardware.name!r} is used; give the devices more memory,"
                " plan more devices or less extra memory, or allow the host or tt tier"
            )
        end = min(stop, start + int(room[device]))
        mass = float(ranked.mass_before(np.array(end)) - ranked.mass_before(np.array(start)))
        loads.put(device, (end - start) * row, mass * float(problem.row_bytes[t]))
        placed.append((t, start, end, device))
        start = end
    return placed


def polish(
    problem: Problem,
    pieces: Pieces,
    owner: np.ndarray,
    *,
    reserved: np.ndarray | float = 0.0,
    rounds: int = 400,
) -> np.ndarray:
    """Exchanges pieces between the most and least loaded devices while that improves the balance.

    An exchange moves a piece, or swaps two, such that neither the greatest lookup and memory loads grow nor the
    least ones shrink: both degrees of balance only ever rise.

    Args:
      problem: Tables and devices.
      pieces: The pieces, all of them placed.
      owner: (pieces,) the device of each.
      reserved: Bytes of the devices' budgets that are taken already, one figure or (devices,).
      rounds: Exchanges at most.

    Returns:
      The new owners.
    """
    owner = owner.astype(np.int64).copy()
    if problem.devices == 1 or len(pieces) < 2:
        return owner
    loads = loads_of(problem, pieces, owner, reserved)
    for _ in range(rounds):
        used = loads.memory / loads.budget
        # The worse of the two first; only if no exchange improves it, the other one.
        measures = sorted((degree_of_balance(load), n) for n, load in enumerate((loads.lookup, used)))
        if measures[0][0] >= _BALANCED or not any(
            _exchange(pieces, owner, loads, (loads.lookup, used)[n]) for balance, n in measures if balance < _BALANCED
        ):
            break
    return owner


def _exchange(pieces: Pieces, owner: np.ndarray, loads: Loads, load: np.ndarray) -> bool:
    """Makes the best exchange between the greatest and one of the least of ``load``; False if none improves."""
    order = np.argsort(load, kind="stable")
    giver = int(order[-1])
    offered = _candidates(pieces, np.flatnonzero(owner == giver))
    # An exchange has to gain more than rounding could.
    best = (-1e-12, -1, -1, -1)
    for taker in order[: min(_NEIGHBOURS, len(order) - 1)].tolist():
        # And none: a move is a swap with nothing.
        taken = np.append(_candidates(pieces, np.flatnonzero(owner == taker)), -1)
        change = _changes(pieces, loads, giver, taker, offered, taken)
        at = int(change.argmin())
        if change.flat[at] < best[0]:
            p, q = np.unravel_index(at, change.shape)
            best = (float(change.flat[at]), int(offered[p]), int(taken[q]), taker)
    _, p, q, taker = best
    if taker < 0:
        return False
    for piece, old, new in ((p, giver, taker), (q, taker, giver)):
        if piece >= 0:
            loads.put(old, -pieces.memory[piece], -pieces.fetched[piece])
            loads.put(new, pieces.memory[piece], pieces.fetched[piece])
            owner[piece] = new
    return True


def _candidates(pieces: Pieces, owned: np.ndarray) -> np.ndarray:
    """At most ``_CANDIDATES`` of these pieces, spread over the range of their accesses."""
    if len(owned) <= _CANDIDATES:
        return owned
    ranked = owned[np.argsort(pieces.fetched[owned], kind="stable")]
    return ranked[np.unique(np.linspace(0, len(ranked) - 1, _CANDIDATES).astype(np.int64))]


def _changes(
    pieces: Pieces, loads: Loads, giver: int, taker: int, offered: np.ndarray, taken: np.ndarray
) -> np.ndarray:
    """(offered, taken) change of the squared deviations by every exchange; infinite where one must not be made."""
    fetched = pieces.fetched[offered][:, None] - np.where(taken >= 0, pieces.fetched[taken], 0.0)[None, :]
    memory = pieces.memory[offered][:, None] - np.where(taken >= 0, pieces.memory[taken], 0.0)[None, :]
    total = np.zeros_like(fetched)
    allowed = loads.memory[taker] + memory <= loads.budget[taker]
    allowed &= loads.memory[giver] - memory <= loads.budget[giver]
    for load, out, into in (
        (loads.lookup, fetched * loads.per_byte[giver], fetched * loads.per_byte[taker]),
        (loads.memory / loads.budget, memory / loads.budget[giver], memory / loads.budget[taker]),
    ):
        mean = load.mean()
        if mean <= 0:
            continue
        new_giver, new_taker = load[giver] - out, load[taker] + into
        slack = 1e-12 * load.max()
        low, high = load.min() - slack, load.max() + slack
        # Neither device may leave the range of all devices' loads: so both degrees of balance only ever rise.
        allowed &= (new_giver >= low) & (new_giver <= high) & (new_taker >= low) & (new_taker <= high)
        old = (load[giver] - mean) ** 2 + (load[taker] - mean) ** 2
        total += ((new_giver - mean) ** 2 + (new_taker - mean) ** 2 - old) / mean**2
    return np.where(allowed, total, np.inf)
