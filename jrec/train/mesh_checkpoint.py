"""Planned rows in checkpoints: written as they lie on the devices, with the plan beside them, read by address.

RUN/mesh_checkpoints/host/STEP/   rows that the plan keeps in host memory (``jrec.host.checkpoint``); written first
RUN/mesh_checkpoints/STEP/   plan, one file for each stack, array and device, and their checksums; written second
RUN/checkpoints/STEP/        everything else; a checkpoint counts once this part is complete

So writing copies nothing between devices, and a checkpoint of any plan and mesh goes on under any other, or on a single
device, whose checkpoints hold whole stacks: rows, slots and replicas are found by their addresses. No file can run code
when it is read.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import shutil
import zlib
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jrec.errors import CheckpointError
from jrec.host.checkpoint import step_folder
from jrec.host.saved import VALUES, SavedRows
from jrec.ops.layout import EmbeddingLayout, Stack
from jrec.ops.row_optimizers import RowOptimizer
from jrec.sharding import Plan, load_plan, save_plan
from jrec.sharding.router import Router
from jrec.sharding.runtime.route import AXIS, MeshRows
from jrec.train.checkpoint import Checkpoints, Restored, flatten, unflatten
from jrec.train.mesh_plan import plan_stack, planned_stacks
from jrec.train.mesh_processes import wait_for_all
from jrec.train.mesh_rows import based, device_addresses
from jrec.train.run_folder import MESH_CHECKPOINT_FOLDER

PLAN, INDEX, VERSION = "plan", "index-{:05}.json", 1
HOST_ROWS = "host"
_CHUNK = 1 << 20  # rows read at a time


class RowSource(Protocol):
    """Where rows of a checkpoint are read by address."""

    def read(self, stack: Stack, array: str, addresses: np.ndarray) -> np.ndarray:
        """Rows of "values", or of a slot, at (n,) int32 addresses, in any order."""
        ...


class MeshCheckpoints:
    """The rows' part of a run's checkpoints.

    Args:
      folder: RUN/mesh_checkpoints.
      layout: with planned stacks.
      plan: where rows live (``run_plan``).
      mesh: of the devices.
    """

    def __init__(self, folder: pathlib.Path, layout: EmbeddingLayout, plan: Plan, mesh: Mesh):
        self._folder, self._layout, self._plan, self._mesh = folder, layout, plan, mesh

    def save(self, step: int, rows: Mapping[str, MeshRows]) -> None:
        """Writes the rows that this process keeps; it returns when all processes have.

        Raises:
          CheckpointError: if they cannot be written.
        """
        target = self._folder / str(step)
        first = jax.process_index() == 0
        try:
            if first:
                shutil.rmtree(target, ignore_errors=True)
                target.mkdir(parents=True)
                save_plan(self._plan, target / PLAN)
            wait_for_all(f"mesh checkpoint {step} begun")
            files = {}
            for name, of in rows.items():
                for array, sharded, replicated in _arrays(of):
                    for shard in sharded.addressable_shards:
                        device = list(self._mesh.devices.flat).index(shard.device)
                        files |= _write(target, f"{name}.{array}.{device:05}", np.asarray(shard.data))
                    if first:
                        files |= _write(target, f"{name}.{array}.replicated", np.asarray(replicated))
            index = target / INDEX.format(jax.process_index())
            index.write_text(json.dumps({"version": VERSION, "files": files}))
        except OSError as error:
            raise CheckpointError(
                f"the rows of step {step} could not be written to {target}: {error}; earlier checkpoints are untouched"
            ) from error
        wait_for_all(f"mesh checkpoint {step} written")

    def prune(self, keep: list[int]) -> None:
        """Deletes what no checkpoint of these steps needs."""
        if jax.process_index() == 0 and self._folder.is_dir():
            for found in self._folder.iterdir():
                if found.name.isdigit() and int(found.name) not in keep:
                    shutil.rmtree(found, ignore_errors=True)
            # What an earlier plan of this run left, once no checkpoint needs it.
            host = self._folder / HOST_ROWS
            if not self._plan.rows_in("host") and not any(step_folder(host, step).is_dir() for step in keep):
                shutil.rmtree(host, ignore_errors=True)

    def load(self, source: RowSource, optimizer: RowOptimizer | None) -> dict[str, MeshRows]:
        """The rows of a checkpoint, each device reading what it keeps under the present plan."""
        return {s.name: self._load(s, source, optimizer) for s in planned_stacks(self._layout)}

    def _load(self, stack: Stack, source: RowSource, optimizer: RowOptimizer | None) -> MeshRows:
        sharded, replicated = device_addresses(stack, self._plan, self._mesh)

        def filled(addresses: jax.Array, spec: PartitionSpec, array: str) -> jax.Array:
            of_device = {shard.index: np.asarray(shard.data) for shard in addresses.addressable_shards}
            width = () if array in slots and slots[array] == "row" else (stack.dim,)
            made = {index: source.read(stack, array, lines) for index, lines in of_device.items()}
            return jax.make_array_from_callback(
                (addresses.shape[0], *width), NamedSharding(self._mesh, spec), functools.partial(_first_axis, made)
            )

        slots = {} if optimizer is None else dict(optimizer.slots)
        over, everywhere = PartitionSpec(AXIS), PartitionSpec()
        return MeshRows(
            sharded=filled(sharded, over, VALUES),
            replicated=filled(replicated, everywhere, VALUES),
            sharded_slots={name: filled(sharded, over, name) for name in slots},
            replicated_slots={name: filled(replicated, everywhere, name) for name in slots},
        )


def _first_axis(made: Mapping[Any, np.ndarray], index: Any) -> np.ndarray:
    return made[index[:1]]


def _arrays(of: MeshRows) -> list[tuple[str, jax.Array, jax.Array]]:
    slots = [(name, of.sharded_slots[name], of.replicated_slots[name]) for name in of.sharded_slots]
    return [(VALUES, of.sharded, of.replicated), *slots]


def _write(target: pathlib.Path, name: str, array: np.ndarray) -> dict[str, Any]:
    data = np.ascontiguousarray(array)
    raw = data.reshape(-1).view(np.uint8)
    with (target / name).open("wb") as file:
        file.write(raw.data)
        file.flush()
        os.fsync(file.fileno())
    return {name: {"shape": list(data.shape), "dtype": data.dtype.name, "crc32": zlib.crc32(raw.data)}}


class MeshRowSource:
    """Rows of a checkpoint of a mesh, whatever its plan.

    Args:
      folder: RUN/mesh_checkpoints/STEP.

    Raises:
      CheckpointError: if something is missing or damaged; the message names it.
    """

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        if not folder.is_dir():
            raise CheckpointError(
                f"{folder} is missing: the rows of this checkpoint's tables; go back to an earlier one"
            )
        self.plan = load_plan(folder / PLAN)
        self._files: dict[str, dict[str, Any]] = {}
        for index in sorted(folder.glob("index-*.json")):
            try:
                content = json.loads(index.read_text())
                version, files = content["version"], content["files"]
            except (ValueError, KeyError) as error:
                raise CheckpointError(f"{index} is damaged: {error}; go back to an earlier checkpoint") from error
            if version != VERSION:
                raise CheckpointError(f"{index} is of format version {version}, but this jrec reads {VERSION}")
            self._files |= files
        self._opened: dict[str, np.ndarray] = {}
        self._routers: dict[str, Router] = {}
        self._saved: SavedRows | None = None

    def read(self, stack: Stack, array: str, addresses: np.ndarray) -> np.ndarray:
        """See ``RowSource``."""
        name = f"planned_{plan_stack(stack)}"
        if name not in self._routers:
            self._routers[name] = Router(self.plan, based(stack))
        unique, inverse = np.unique(addresses, return_inverse=True)
        found: np.ndarray | None = None
        for begin in range(0, max(1, unique.size), _CHUNK):
            part = unique[begin : begin + _CHUNK]
            routed = self._routers[name].route(part, 0)
            for number in np.flatnonzero(routed.counts):
                rows, at = routed.of(int(number))
                if number > self.plan.devices:
                    lines = self._host().read(dataclasses.replace(stack, name=name), array, part[at])
                else:
                    where = "replicated" if number == self.plan.devices else f"{number:05}"
                    lines = self._open(f"{name}.{array}.{where}")[rows]
                if found is None:
                    found = np.zeros((unique.size, *lines.shape[1:]), lines.dtype)
                found[begin + at] = lines
        assert found is not None  # a stack has rows
        return found[inverse]

    def _host(self) -> SavedRows:
        """The rows that the plan keeps in host memory."""
        if self._saved is None:
            self._saved = SavedRows(self._folder.parent / HOST_ROWS, int(self._folder.name))
        return self._saved

    def _open(self, name: str) -> np.ndarray:
        if name not in self._opened:
            path = self._folder / name
            known = self._files.get(name)
            if known is None or not path.is_file():
                raise CheckpointError(f"{path} is missing; go back to an earlier checkpoint")
            raw = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
            if zlib.crc32(raw.data) != known["crc32"]:
                raise CheckpointError(f"{path} is damaged: its checksum differs; go back to an earlier checkpoint")
            self._opened[name] = raw.view(jnp.dtype(known["dtype"])).reshape(known["shape"])
        return self._opened[name]


@dataclasses.dataclass(frozen=True, kw_only=True)
class WholeStacks:
    """Rows of a checkpoint of a single device.

    Attributes:
      stacks: by the stack's name there, whole arrays by "values" or slot, in the order of addresses.
    """

    stacks: Mapping[str, Mapping[str, np.ndarray]]

    def read(self, stack: Stack, array: str, addresses: np.ndarray) -> np.ndarray:
        """See ``RowSource``."""
        found = self.stacks[plan_stack(stack)][array][addresses]
        return found[:, : stack.dim] if found.ndim == 2 else found  # rows may be stored with zeros behind them


def restore_run(
    checkpoints: Checkpoints, like: Any, layout: EmbeddingLayout, folder: pathlib.Path, step: int | None = None
) -> tuple[Restored, RowSource | None]:
    """Reads a checkpoint of one device or of a mesh, for one device or for a mesh.

    Args:
      checkpoints: of the run.
      like: the state that is expected: with whole stacks for one device, without planned ones for a mesh.
      layout: of the tables, planned ones for a mesh.
      folder: of the run.
      step: which; the latest by default.

    Returns:
      The checkpoint, its state like ``like``, and for a mesh the source of its rows.

    Raises:
      CheckpointError: as ``Checkpoints.restore``, or if the rows' part is missing or damaged.
    """
    step = checkpoints.latest_step() if step is None else step
    stacks = {plan_stack(s): s for s in layout.members if s.tier in ("device", "planned")}
    if step is None or not stacks:
        return checkpoints.restore(like, step), None
    flat, stored = flatten(like), checkpoints.stored(step)
    whole = {path: name for path in {*flat, *stored} if (name := _stack_of(path, stacks)) is not None}
    if not planned_stacks(layout):
        if all(path in stored for path in whole):
            return checkpoints.restore(like, step), None
        restored = checkpoints.restore({path: leaf for path, leaf in flat.items() if path not in whole}, step)
        source = MeshRowSource(folder / MESH_CHECKPOINT_FOLDER / str(step))
        rows = {path: _whole(source, stacks[of[0]], of[1], flat[path]) for path, of in whole.items() if path in flat}
        return dataclasses.replace(restored, state=unflatten(like, {**restored.state, **rows})), None
    extra = {path: np.empty(stored[path][0], stored[path][1]) for path in whole if path in stored}
    restored = checkpoints.restore({**flat, **extra}, step)
    state = unflatten(like, {path: restored.state[path] for path in flat})
    restored_rows = {path: np.asarray(restored.state[path]) for path in extra}
    if not extra:
        return dataclasses.replace(restored, state=state), MeshRowSource(folder / MESH_CHECKPOINT_FOLDER / str(step))
    arrays: dict[str, dict[str, np.ndarray]] = {name: {} for name in stacks}
    for path, array in restored_rows.items():
        name, of = whole[path]
        arrays[name][of] = array
    return dataclasses.replace(restored, state=state), WholeStacks(stacks=arrays)


def _stack_of(path: str, stacks: Mapping[str, Stack]) -> tuple[str, str] | None:
    """(stack, array) of a path in a state of one device; None of other paths."""
    for name in stacks:
        if path == f"0.embeddings.stacks.{name}.value":
            return name, VALUES
        if path.startswith(prefix := f"1.slots.{name}."):
            return name, path.removeprefix(prefix).removesuffix(".value")
    return None


def _whole(source: RowSource, stack: Stack, array: str, like: Any) -> jax.Array:
    found = source.read(stack, array, np.arange(stack.rows, dtype=np.int32))
    if found.ndim == 2 and found.shape[1] < like.shape[1]:
        found = np.pad(found, ((0, 0), (0, like.shape[1] - found.shape[1])))
    return jax.device_put(found, getattr(like, "sharding", None))
