"""Data parallelism for inference: OPER's Algorithm 1, with the second hop's rerouting."""

from __future__ import annotations

import dataclasses

import numpy as np

from jrec.sharding.pieces import SHARDED, Pieces, Placement
from jrec.sharding.problem import Problem

_SHARE = 512  # pieces that may be copied are at most this part of a device's room for copies


def split_for_copies(problem: Problem, placement: Placement, room: np.ndarray) -> Placement:
    """Cuts the pieces that are hot enough to be copied so small that the room for copies can be filled.

    Args:
      problem: Tables and devices.
      placement: A placement by model parallelism, without copies.
      room: (devices,) bytes for copies.
    """
    pieces = placement.pieces
    with np.errstate(divide="ignore", invalid="ignore"):
        heat = np.where(pieces.memory > 0, pieces.fetched / pieces.memory, 0.0)
    order = np.argsort(-heat, kind="stable")
    # No more than all rooms together can be copied; a piece is cut only if it may be among those.
    hot = order[np.cumsum(pieces.memory[order]) - pieces.memory[order] <= room.sum()]
    most = max(float(room.min()) / _SHARE, 1.0)
    large = np.zeros(len(pieces), bool)
    large[hot] = (pieces.memory[hot] > most) & (placement.tier[hot] == SHARDED)
    if not large.any():
        return placement
    rows = np.maximum(most / problem.memory_bytes[pieces.table], 1).astype(np.int64)
    cuts = np.where(large, -(-(pieces.stop - pieces.start) // rows), 1)
    origin = np.repeat(np.arange(len(pieces)), cuts)
    number = np.arange(len(origin)) - np.repeat(np.cumsum(cuts) - cuts, cuts)
    step = np.where(large, rows, pieces.stop - pieces.start)[origin]
    start = pieces.start[origin] + number * step
    stop = np.minimum(start + step, pieces.stop[origin])
    return dataclasses.replace(
        placement,
        pieces=Pieces.of(problem, pieces.table[origin], start, stop),
        tier=placement.tier[origin],
        owner=placement.owner[origin],
        path=placement.path[origin],
    )


def copy_for_inference(problem: Problem, placement: Placement, room: np.ndarray) -> Placement:
    """Algorithm 1: each device in turn copies a piece from the device it waits for longest.

    Pieces are tried by descending accesses per byte. After each copy, every other device that reaches the new copy at
    less cost than its present source fetches from there ("second hop"). A device stops when nothing that it fetches
    over its costliest link fits its room.

    The paper's line 4 takes the greatest communication cost including the device's own lookups; here own lookups do
    not count, since there is no link to relieve.

    Args:
      problem: Tables and devices.
      placement: A placement by model parallelism, without copies.
      room: (devices,) bytes for copies.

    Returns:
      The placement with further holders; owners stay.
    """
    placement = split_for_copies(problem, placement, room)
    pieces, L, devices = placement.pieces, problem.hardware.L, problem.devices
    order = np.argsort(-pieces.fetched / np.maximum(pieces.memory, 1e-300), kind="stable")
    path = placement.path[order].astype(np.int64)
    memory, fetched = pieces.memory[order], pieces.fetched[order]
    room = room.astype(np.float64).copy()
    cost = np.stack([fetched @ (path == j) for j in range(devices)], axis=1) * L  # CL of Algorithm 1
    first = np.zeros((devices, devices), np.int64)  # no piece before this one is worth trying on link [gid, tid]
    running = np.full(devices, devices > 1)
    while running.any():
        for gid in np.flatnonzero(running).tolist():
            remote = cost[gid].copy()
            remote[gid] = -np.inf
            tid = int(remote.argmax())
            p = _next(path[:, gid], memory, tid, room[gid], int(first[gid, tid]))
            if p < 0 or remote[tid] <= 0:
                running[gid] = False
                continue
            first[gid, tid] = p + 1
            room[gid] -= memory[p]
            _reroute(cost, path[p], L, gid, gid, fetched[p])
            remote_now = path[p] != np.arange(devices)
            for i in np.flatnonzero(remote_now & (L[:, gid] < L[np.arange(devices), path[p]])).tolist():
                _reroute(cost, path[p], L, i, gid, fetched[p])
                # The device now fetches this piece from there: it is worth a try again, though later ones were tried.
                first[i, gid] = min(first[i, gid], p)
    updated = np.empty_like(placement.path)
    updated[order] = path
    return dataclasses.replace(placement, path=updated)


def _next(source: np.ndarray, memory: np.ndarray, tid: int, room: float, first: int) -> int:
    """The first piece from ``first`` on that comes from ``tid`` and fits, -1 if there is none."""
    for at in range(first, len(source), 4096):
        fits = (source[at : at + 4096] == tid) & (memory[at : at + 4096] <= room)
        if fits.any():
            return at + int(fits.argmax())
    return -1


def _reroute(cost: np.ndarray, path: np.ndarray, L: np.ndarray, i: int, to: int, fetched: float) -> None:
    cost[i, path[i]] -= fetched * L[i, path[i]]
    cost[i, to] += fetched * L[i, to]
    path[i] = to
