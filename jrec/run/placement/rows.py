"""The mesh of a run, and its planned stacks as arrays over it: every device makes only the rows that it keeps."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jrec.errors import ConfigError
from jrec.mesh.route import AXIS, MeshRows
from jrec.ops.layout import Stack
from jrec.ops.row_init import init_stack_rows
from jrec.row_optimizers import RowOptimizer
from jrec.sharding.contents import replicated_addresses, shard_addresses, shard_capacity
from jrec.sharding.plans import Plan


def make_mesh(devices: int) -> Mesh:
    """A mesh of the first ``devices`` devices, an equal number from each process.

    Raises:
      ConfigError: If there are fewer, or the processes cannot give equal numbers.
    """
    visible = jax.devices()
    if len(visible) < devices:
        raise ConfigError(
            f"mesh.devices is {devices}, but JAX sees {len(visible)} {visible[0].platform} device(s) in"
            f" {jax.process_count()} process(es); lower mesh.devices, start more processes, or, to try it on a CPU, set"
            f" XLA_FLAGS=--xla_force_host_platform_device_count={devices}"
        )
    chosen = visible[:devices] if jax.process_count() == 1 else _even(devices)
    return Mesh(np.array(chosen), (AXIS,))


def _even(devices: int) -> list[Any]:
    """An equal number of devices of every process, process by process."""
    processes = jax.process_count()
    each, rest = divmod(devices, processes)
    if rest:
        raise ConfigError(
            f"mesh.devices is {devices}, which {processes} processes cannot share equally; use a multiple"
            f" of {processes}"
        )
    # The devices of a process are neighbours in the mesh: ``HostOwners`` numbers them from ``p * devices`` on.
    by_process = [[d for d in jax.devices() if d.process_index == p] for p in range(processes)]
    if short := [p for p, own in enumerate(by_process) if len(own) < each]:
        raise ConfigError(
            f"mesh.devices is {devices}, {each} a process, but process {short[0]} has {len(by_process[short[0]])}"
        )
    return [d for own in by_process for d in own[:each]]


def local_numbers(mesh: Mesh) -> list[int]:
    """The numbers of this process's devices in the mesh."""
    return [i for i, d in enumerate(mesh.devices.flat) if d.process_index == jax.process_index()]


def on_mesh(tree: PyTree, mesh: Mesh) -> PyTree:
    """Arrays whose first axis are this process's devices, as arrays over the mesh's."""
    sharding = NamedSharding(mesh, PartitionSpec(AXIS))
    count, local = mesh.devices.size, sum(d.process_index == jax.process_index() for d in mesh.devices.flat)
    if local == count:  # all arrays at once, in half the time
        return jax.device_put(tree, sharding)

    def place(leaf: np.ndarray) -> jax.Array:
        shape = (leaf.shape[0] // local * count, *leaf.shape[1:])
        return jax.make_array_from_process_local_data(sharding, leaf, shape)

    return jax.tree.map(place, tree)


def based(stack: Stack) -> list[tuple[str, int]]:
    """The tables of a stack with their first addresses."""
    return [(t.name, base) for t, base in zip(stack.tables, stack.bases, strict=True)]


def initial_stack(stack: Stack, plan: Plan, mesh: Mesh, key: jax.Array, optimizer: RowOptimizer | None) -> MeshRows:
    """A planned stack with fresh slots, bit-identical to the rows of a run on one device.

    Args:
      stack: The tables.
      plan: Where rows live (``placed_plan``).
      mesh: The mesh of ``plan.devices`` devices.
      key: The key of the model's tables, as ``EmbeddingCollection`` draws it.
      optimizer: The row optimizer, which determines the slots; None without slots.
    """

    # Each device makes its rows from their addresses: first values depend on the row, not on where it lives, and no row
    # travels.
    def make(addresses: jax.Array, everywhere: jax.Array, key: jax.Array) -> MeshRows:
        own, shared = _rows(stack, key, addresses), _rows(stack, key, everywhere)
        slots = (lambda array: {}) if optimizer is None else optimizer.init
        return MeshRows(sharded=own, replicated=shared, sharded_slots=slots(own), replicated_slots=slots(shared))

    specs = MeshRows.specs(optimizer)
    over, nowhere = PartitionSpec(AXIS), PartitionSpec()
    mapped = jax.shard_map(make, mesh=mesh, in_specs=(over, nowhere, nowhere), out_specs=specs, check_vma=False)
    return jax.jit(mapped)(*device_addresses(stack, plan, mesh), key)


def replicated_capacity(plan: Plan, stack: Stack) -> int:
    """H, the lines of the replicated array: at least one."""
    return max(1, plan.replicated_rows(stack.name))


def device_addresses(stack: Stack, plan: Plan, mesh: Mesh) -> tuple[jax.Array, jax.Array]:
    """The address of each line of ``MeshRows``: (N * S,) int32 over the mesh and (H,) everywhere; 0 for padding.

    Addresses of 2^31 or more are stored modulo 2^32.
    """
    capacity = shard_capacity(plan, stack.name)

    def of_device(index: Any) -> np.ndarray:
        begin, stop, _ = index[0].indices(capacity * plan.devices)
        lines = np.zeros(stop - begin, np.int32)
        for device in range(begin // capacity, stop // capacity):
            held = shard_addresses(plan, based(stack), device)
            lines[device * capacity - begin :][: held.size] = held.astype(np.int32)
        return lines

    over, everywhere = (NamedSharding(mesh, spec) for spec in (PartitionSpec(AXIS), PartitionSpec()))
    shared = np.zeros(replicated_capacity(plan, stack), np.int32)
    held = replicated_addresses(plan, based(stack))
    shared[: held.size] = held.astype(np.int32)
    return (
        jax.make_array_from_callback((capacity * plan.devices,), over, of_device),
        jax.make_array_from_callback(shared.shape, everywhere, lambda index: shared[index]),
    )


@functools.partial(jax.jit, static_argnums=0)
def first_rows(stack: Stack, key: jax.Array, addresses: jax.Array) -> jax.Array:
    """The first values of rows at (n,) int32 addresses of a stack, (n, dim), as ``initial_stack`` makes them."""
    return _rows(stack, key, addresses)


def _rows(stack: Stack, key: jax.Array, addresses: jax.Array) -> jax.Array:
    def some(begin: jax.Array, lines: int) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(addresses, begin, lines)

    return init_stack_rows(stack.tables, stack.bases, key, addresses.size, some)
