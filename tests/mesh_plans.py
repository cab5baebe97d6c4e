"""Plans for the tables of ``mesh_runs``: baselines, random ones, some with tables apart from the dense model."""

import dataclasses

import mesh_runs
import numpy as np

from jrec.run.placement.plan import default_plan
from jrec.sharding.pieces import HOST, REPLICATED, SHARDED


def some_plan(
    devices, *, baseline="row-wise", seed=None, replicate=0.0, host=0.0, tt: bool | str = True, dtype="float32"
):
    """A baseline's plan, or a ``scattered`` one."""
    layout = mesh_runs.layout(tt=tt, dtype=dtype)
    plan = default_plan(layout, devices, baseline=baseline)
    if seed is None:
        return plan
    return scattered(plan, seed=seed, replicate=replicate, host=host)


def scattered(plan, *, seed, replicate=0.0, host=0.0):
    """A plan of the same tables that gives every row to a random device, some rows to all, some to host memory."""
    devices = plan.devices
    rng = np.random.default_rng(seed)
    rows = [t.rows for t in plan.tables]
    total = sum(rows)
    shared = rng.random(total) < replicate
    owner = np.where(shared, -1, rng.integers(0, devices, total))
    kept = np.zeros(total, bool) if not host else rng.random(total) < host
    owner[kept] = -1
    tier = np.where(kept, HOST, np.where(shared, REPLICATED, SHARDED))
    stack = np.repeat([plan.stacks.index(t.stack) for t in plan.tables], rows)
    array, offset = np.where(owner < 0, -1 - tier.astype(np.int64), owner), np.empty(total, np.int64)
    for group in np.unique(np.stack([stack, array]), axis=1).T:
        of = (stack == group[0]) & (array == group[1])
        offset[of] = np.arange(of.sum())
    path = np.vstack(
        [np.repeat(np.arange(devices)[:, None], devices, axis=1), np.arange(devices), np.full(devices, -1)]
    )
    return dataclasses.replace(
        plan,
        first=np.cumsum([0, *rows]),
        start=np.concatenate([np.arange(n) for n in rows]),
        tier=tier.astype(np.uint8),
        owner=owner.astype(np.int16),
        offset=offset,
        path=path.astype(np.int16),
        way=np.where(kept, devices + 1, np.where(shared, devices, owner)).astype(np.int32),
    )


MIDDLE = (False, True, True, False)
"""The first device of the mesh, whose copies of what all have are those that JAX reads, keeps tables."""


def plan_apart(computes, *, seed=0, tt=False, dtype="float32"):
    """Every row on a random one of the devices that do not compute."""
    keepers = np.flatnonzero(~np.array(computes))
    if len(keepers) > 1:
        plan = some_plan(len(keepers), seed=seed, tt=tt, dtype=dtype)
    else:
        plan = some_plan(2, seed=seed, tt=tt, dtype=dtype)
        plan = dataclasses.replace(plan, owner=np.zeros_like(plan.owner), offset=_counted(plan))
    owner = keepers[plan.owner].astype(np.int16)
    path = np.repeat(np.arange(len(computes), dtype=np.int16)[:, None], len(computes), axis=1)
    return dataclasses.replace(
        plan, devices=len(computes), owner=owner, path=path, way=owner.astype(np.int32), computes=tuple(computes)
    )


def _counted(plan):
    return np.arange(len(plan.owner), dtype=np.int64)  # segments are single rows
