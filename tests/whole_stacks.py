"""Planned stacks of a mesh as whole tables: rows by address, whatever the plan."""

from __future__ import annotations

import numpy as np

from jrec.host import HostTable
from jrec.mesh.route import MeshRows
from jrec.ops.layout import Stack
from jrec.run.placement.rows import based
from jrec.sharding.contents import replicated_addresses, shard_addresses
from jrec.sharding.pieces import HOST
from jrec.sharding.plans import Plan


def whole_stack(
    stack: Stack, plan: Plan, rows: MeshRows, host: HostTable | None = None
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """All rows of a stack and their slots, in the order of addresses, as a single device has them.

    For one process, which has all shards.

    Args:
      stack: The planned stack.
      plan: Where its rows live.
      rows: Its rows on the devices.
      host: Its rows in host memory; if None, these rows are zero.
    """
    values = np.zeros((stack.rows, stack.dim), rows.sharded.dtype)
    slots = {n: np.zeros((stack.rows, *a.shape[1:]), np.float32) for n, a in rows.sharded_slots.items()}
    capacity = rows.sharded.shape[0] // plan.devices
    pairs = [(values, rows.sharded, rows.replicated)]
    pairs += [(slots[n], rows.sharded_slots[n], rows.replicated_slots[n]) for n in slots]
    for out, sharded, replicated in pairs:
        for device in range(plan.devices):
            held = shard_addresses(plan, based(stack), device, copies=False)
            out[held] = np.asarray(sharded[device * capacity : device * capacity + held.size])
        held = replicated_addresses(plan, based(stack))
        out[held] = np.asarray(replicated)[: held.size]
    if host is not None:
        held = host_addresses(plan, stack)
        values[held], of_host = host.fetch(held)
        for name, array in of_host.items():
            slots[name][held] = array
    return values, slots


def host_addresses(plan: Plan, stack: Stack) -> np.ndarray:
    """The ascending addresses of a stack's rows that the plan has in host memory."""
    tiers = [plan.locate(table.name, np.arange(table.rows)).tier for table in stack.tables]
    return np.flatnonzero(np.concatenate(tiers) == HOST)
