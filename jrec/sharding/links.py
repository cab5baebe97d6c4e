"""Measures what a plan asks of hardware: the cost of a byte of a row between any two devices, and of an all-reduce."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jrec.errors import ConfigError
from jrec.mesh.route import AXIS
from jrec.sharding.hardware import Hardware

_SHARE = 0.8  # of a device's memory, for tables and slots; the model, activations and buffers take the rest
_WARM_UPS = 2

Tick = Callable[[str], None]


def measure_hardware(
    name: str,
    devices: Sequence[Any],
    *,
    memory: int | None = None,
    row_bytes: int = 64,
    message: int = 4 << 20,
    repeats: int = 7,
    tick: Tick | None = None,
) -> Hardware:
    """The devices of this process as a ``Hardware``.

    A fetch is what a step does: the owner gathers rows at random places of an array, and they travel to the device that
      asked by a
    collective. The cost of a byte is the median time by the bytes of a message.

    Args:
      name: A name for people.
      devices: Devices of ``jax.devices()``.
      memory: Bytes of each device for tables; None for four fifths of what it has, on CPUs for an equal share of four
        fifths of the machine's.
      row_bytes: Bytes of a row, a multiple of 4: short rows are gathered more slowly.
      message: Bytes that travel in one measurement.
      repeats: How often each is timed.
      tick: Called with what is measured next, ``len(devices) ** 2 + 1`` times.

    Raises:
      ConfigError: On sizes that cannot be, or where several processes run.
    """
    if jax.process_count() > 1:
        raise ConfigError("links are measured by one process that sees all devices; start it without jax.distributed")
    if row_bytes < 4 or row_bytes % 4 or message < row_bytes:
        raise ConfigError(f"rows of {row_bytes} bytes in messages of {message}: rows are whole float32 elements")
    if repeats < 1:
        raise ConfigError(f"repeats is {repeats}; measure at least once")
    tick = (lambda measured: None) if tick is None else tick
    fetch = []
    for i, asker in enumerate(devices):
        fetch.append([])
        for j, owner in enumerate(devices):
            tick(f"device {i} from {j}")
            run = _fetch(asker, owner, message // row_bytes, row_bytes // 4)
            fetch[-1].append(_seconds(run, repeats) / (message // row_bytes * row_bytes))
    tick("all-reduce")
    count = len(devices)
    ring = 2 * (count - 1) / count if count > 1 else 1.0
    seconds = _seconds(_all_reduce(devices, message // 4), repeats)
    return Hardware(
        name=name,
        memory=tuple(_memory(d, count) if memory is None else memory for d in devices),
        fetch=tuple(map(tuple, fetch)),
        all_reduce=ring * (message // 4 * 4) / seconds,
        host=0.0 if devices[0].platform == "cpu" else message / _seconds(_from_host(devices[0], message // 4), repeats),
    )


def hardware_toml(hardware: Hardware, comment: str = "") -> str:
    """The file that ``load_hardware`` reads."""
    rows = ",\n".join("  [" + ", ".join(f"{cost:.4e}" for cost in row) + "]" for row in hardware.fetch)
    named = hardware.name.replace("\\", "\\\\").replace('"', '\\"')
    lines = [
        *(f"# {line}" for line in comment.splitlines()),
        f'name = "{named}"',
        f"memory = {list(hardware.memory)}",
        f"all_reduce = {hardware.all_reduce:.6g}",
        *([f"host = {hardware.host:.6g}"] if hardware.host else []),
        "# fetch[i][j]: seconds that device i pays for a byte of a row of device j",
        f"fetch = [\n{rows}\n]",
    ]
    return "\n".join(lines) + "\n"


def _fetch(asker: Any, owner: Any, rows: int, dim: int) -> Callable[[], jax.Array]:
    """Gathers rows on the owner; to another device they travel by a collective of the two."""
    lines = max(rows, 1 << 16)
    places = np.random.default_rng(0).integers(0, lines, rows).astype(np.int32)
    if asker == owner:
        here = jax.sharding.SingleDeviceSharding(owner)
        gather = jax.jit(lambda table, places: table[places])
        table, at = jax.device_put(np.zeros((lines, dim), np.float32), here), jax.device_put(places, here)
        return lambda: gather(table, at)
    mesh = Mesh(np.array([asker, owner]), (AXIS,))
    over = PartitionSpec(AXIS)

    def body(table: jax.Array, places: jax.Array) -> jax.Array:
        # Gathered on the owner before it travels: a lookup there and a link, as a step has them.
        return jax.lax.ppermute(table[0][places[0]], AXIS, [(1, 0)])

    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=over, out_specs=over, check_vma=False))
    sharding = NamedSharding(mesh, over)
    table = jax.device_put(np.zeros((2, lines, dim), np.float32), sharding)
    at = jax.device_put(np.stack([places, places]), sharding)
    return lambda: run(table, at)


def _all_reduce(devices: Sequence[Any], elements: int) -> Callable[[], jax.Array]:
    mesh = Mesh(np.array(devices), (AXIS,))
    over = PartitionSpec(AXIS)

    def body(values: jax.Array) -> jax.Array:
        return jax.lax.psum(values + jnp.float32(1), AXIS)

    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=over, out_specs=PartitionSpec(), check_vma=False))
    values = jax.device_put(np.zeros((len(devices), elements), np.float32), NamedSharding(mesh, over))
    return lambda: run(values)


def _from_host(device: Any, elements: int) -> Callable[[], jax.Array]:
    values, there = np.zeros(elements, np.float32), jax.sharding.SingleDeviceSharding(device)
    return lambda: jax.device_put(values, there)


def _seconds(run: Callable[[], jax.Array], repeats: int) -> float:
    for _ in range(_WARM_UPS):
        jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _memory(device: Any, devices: int) -> int:
    limit = (device.memory_stats() or {}).get("bytes_limit") if device.platform != "cpu" else None
    if limit is None:
        limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / devices
    return math.floor(_SHARE * limit)
