"""Checkpoints of host tables: the rows written since the last one, in shards with checksums, whole or not at all.

    FOLDER/000000001200/manifest.json       format, tables, shards and their checksums, which checkpoint it builds on
    FOLDER/000000001200/STACK-00000.shard   addresses, rows and slots of up to ``shard_bytes``; see ``shards``

A *full* checkpoint holds every row that was ever written, an *incremental* one those written since the checkpoint it
builds on; what no checkpoint holds has its first values. A checkpoint is made under a temporary name, brought to the
disk, and renamed: so a process killed at any moment leaves the last complete one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jrec.errors import CheckpointError
from jrec.host.shards import checksum, damaged, read_json, read_shard, sync_folder, write_json, write_shard
from jrec.host.table import HostTable

VERSION = 1
_MANIFEST = "manifest.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved:
    """What a save wrote. ``base`` is the step it builds on, None for a full checkpoint."""

    step: int
    base: int | None
    rows: int
    bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Link:
    """The checkpoint that the tables' dirty rows are counted from."""

    step: int
    checksum: int
    length: int  # incremental checkpoints since the full one
    rows: int  # in them


class HostCheckpoints:
    """The checkpoints of the host tables of one run.

    Args:
      folder: made if absent; its own.
      tables: by stack name.
      full_every: at the latest after so many checkpoints there is a full one, so that no chain grows longer. A full
        one comes earlier where the increments since the last outnumber the rows there are.
      shard_bytes: about how large a shard becomes, and how much memory saving and loading take.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        tables: Mapping[str, HostTable],
        *,
        full_every: int = 16,
        shard_bytes: int = 64 << 20,
    ) -> None:
        if full_every < 1 or shard_bytes < 1:
            raise ValueError(f"full_every={full_every} and shard_bytes={shard_bytes} must be at least 1")
        self._folder, self._tables = pathlib.Path(folder).absolute(), dict(tables)
        self._full_every, self._shard_bytes = full_every, shard_bytes
        self._last: _Link | None = None

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        if not self._folder.is_dir():
            return []
        return sorted(
            int(path.parent.name) for path in self._folder.glob(f"*/{_MANIFEST}") if path.parent.name.isdigit()
        )

    def latest_step(self) -> int | None:
        """The step of the newest complete checkpoint."""
        return max(self.steps(), default=None)

    def save(self, step: int, *, full: bool | None = None) -> Saved:
        """Writes a checkpoint. Not while another thread writes rows.

        Checkpoints of this and of later steps, left by a run that went on from an earlier one, are removed.

        Args:
          step: its number.
          full: whether to write every row; None decides by ``full_every``. Without a checkpoint of this object to build
            on, written or restored, it is full in any case.

        Raises:
          CheckpointError: if it cannot be written, such as on a full disk; older checkpoints stay.
        """
        if step < 0:
            raise ValueError(f"step is {step}; it must be at least 0")
        base = self._base(step, full)
        temporary = self._path(step).with_name(f"{step:012d}.partial")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._clean()
            temporary.mkdir()
            manifest, saved = self._write(temporary, step, base)
            replaced = [self._withdraw(later) for later in reversed(self.steps()) if later >= step]
            temporary.rename(self._path(step))
            sync_folder(self._folder)
            for path in replaced:
                shutil.rmtree(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                shutil.rmtree(temporary)
            raise CheckpointError(
                f"the host tables' checkpoint of step {step} could not be written to {self._folder}: {error}; free"
                " space there or choose another folder. Earlier checkpoints are untouched"
            ) from error
        length, rows = (0, 0) if base is None else (base.length + 1, base.rows + saved.rows)
        self._last = _Link(step=step, checksum=checksum(manifest), length=length, rows=rows)
        for table in self._tables.values():
            table.clear_dirty()
        return saved

    def restore(self, step: int | None = None) -> int:
        """Brings the tables to a checkpoint, the latest by default. Not while another thread uses them.

        Returns:
          Its step.

        Raises:
          CheckpointError: if there is none, it or one that it builds on is damaged, or it is of other tables. Tables
            that were touched before a damage was found are back at their first values.
        """
        steps = self.steps()
        step = max(steps, default=None) if step is None else step
        if step not in steps:
            have = ", ".join(map(str, steps)) or "none"
            raise CheckpointError(f"{self._folder} has no complete host checkpoint of step {step}; steps there: {have}")
        assert step is not None
        chain = self._chain(step)
        try:
            for table in self._tables.values():
                table.reset()
            for manifest in chain:
                self._load(self._path(manifest["step"]), manifest)
        except BaseException:
            for table in self._tables.values():
                table.reset()
            self._last = None
            raise
        for table in self._tables.values():
            table.clear_dirty()
        rows = sum(shard["rows"] for manifest in chain[1:] for shard in manifest["shards"])
        self._last = _Link(step=step, checksum=checksum(chain[-1]), length=len(chain) - 1, rows=rows)
        return step

    def prune(self, keep: int) -> None:
        """Removes all but the newest ``keep`` checkpoints and those that they build on."""
        if keep < 1:
            raise ValueError(f"keep is {keep}; at least the newest checkpoint stays")
        needed = {link["step"] for step in self.steps()[-keep:] for link in self._chain(step)}
        for step in reversed(self.steps()):
            if step not in needed:
                shutil.rmtree(self._withdraw(step))

    def prune_before(self, step: int) -> None:
        """Removes checkpoints before a step that those from there on do not build on; the newest stays in any case."""
        if steps := self.steps():
            self.prune(max(1, sum(found >= step for found in steps)))

    def _base(self, step: int, full: bool | None) -> _Link | None:
        """What to build on; None for a full checkpoint."""
        last = self._last
        if last is None or full or last.step >= step or last.step not in self.steps():
            return None
        made = sum(table.num_made for table in self._tables.values())
        due = last.length + 1 >= self._full_every or last.rows > made
        return None if due and full is None else last

    def _write(self, folder: pathlib.Path, step: int, base: _Link | None) -> tuple[dict[str, Any], Saved]:
        shards = []
        for name, table in self._tables.items():
            rows = table.made_rows() if base is None else table.dirty_rows()
            for number, part in enumerate(_parts(rows, table, self._shard_bytes)):
                values, slots = table.fetch(part)
                arrays = {"rows": part, "values": values, **{f"slot:{n}": s for n, s in slots.items()}}
                record = write_shard(folder / f"{name}-{number:05d}.shard", arrays)
                shards.append({**record, "stack": name, "rows": int(part.size)})
        manifest = {
            "format": "jrec-host-tables",
            "version": VERSION,
            "step": step,
            "base": None if base is None else {"step": base.step, "checksum": base.checksum},
            "tables": {name: describe(table) for name, table in self._tables.items()},
            "shards": shards,
        }
        write_json(folder / _MANIFEST, manifest)
        sync_folder(folder)
        saved = Saved(
            step=step,
            base=None if base is None else base.step,
            rows=sum(shard["rows"] for shard in shards),
            bytes=sum(shard["bytes"] for shard in shards),
        )
        return manifest, saved

    def _chain(self, step: int) -> list[dict[str, Any]]:
        """Manifests from the full checkpoint to this one, all of this object's tables."""
        chain, own = manifests(self._folder, step), {name: describe(table) for name, table in self._tables.items()}
        for manifest in reversed(chain):
            path = self._path(manifest["step"]) / _MANIFEST
            for name in sorted(own.keys() | manifest["tables"].keys()):
                _check_same(path, name, manifest["tables"].get(name), own.get(name))
        return chain

    def _load(self, folder: pathlib.Path, manifest: Mapping[str, Any]) -> None:
        for shard in manifest["shards"]:
            arrays = read_shard(folder, shard)
            rows, values = arrays.pop("rows"), arrays.pop("values")
            slots = {name.removeprefix("slot:"): array for name, array in arrays.items()}
            self._tables[shard["stack"]].store(rows, values, slots)

    def _path(self, step: int) -> pathlib.Path:
        return step_folder(self._folder, step)

    def _withdraw(self, step: int) -> pathlib.Path:
        """Takes away its name first, so that a checkpoint is complete or not there."""
        return self._path(step).rename(self._path(step).with_name(f"{step:012d}.removed"))

    def _clean(self) -> None:
        """Removes what processes that were killed left behind."""
        for pattern in ("*.partial", "*.removed"):
            for path in self._folder.glob(pattern):
                shutil.rmtree(path)


def step_folder(folder: pathlib.Path, step: int) -> pathlib.Path:
    """Of one checkpoint."""
    return folder / f"{step:012d}"


def manifests(folder: pathlib.Path, step: int) -> list[dict[str, Any]]:
    """The manifests that make up a checkpoint, from the full one to that of ``step``.

    Raises:
      CheckpointError: if one is missing or damaged.
    """
    chain = [_manifest(folder, step)]
    while (base := chain[-1]["base"]) is not None:
        last = chain[-1]["step"]
        if base["step"] >= last:
            raise damaged(step_folder(folder, last) / _MANIFEST, f"it builds on the later step {base['step']}")
        chain.append(_manifest(folder, base["step"]))
        if checksum(chain[-1]) != base["checksum"]:
            path = step_folder(folder, base["step"]) / _MANIFEST
            raise damaged(path, f"step {last} builds on another checkpoint of that step")
    return chain[::-1]


def _manifest(folder: pathlib.Path, step: int) -> dict[str, Any]:
    path = step_folder(folder, step) / _MANIFEST
    manifest = read_json(path)
    if manifest.get("format") != "jrec-host-tables" or manifest.get("version") != VERSION:
        raise CheckpointError(
            f"{path} is of format {manifest.get('format')!r}, version {manifest.get('version')!r}, but this jrec"
            f" reads 'jrec-host-tables', version {VERSION}"
        )
    return manifest


def describe(table: HostTable) -> dict[str, Any]:
    """What a checkpoint must agree about with the table it is loaded into, in JSON types."""
    return {
        "dim": table.dim,
        "dtype": table.stack.dtype,
        "tables": [[t.name, t.rows] for t in table.stack.tables],
        "slots": {n: [shape, float(table.optimizer.initial_slot(n))] for n, shape in table.optimizer.slots.items()},
        "keys of initial rows": [[int(word) for word in key] for key in table.keys],
    }


def _check_same(path: pathlib.Path, name: str, stored: Mapping[str, Any] | None, own: Mapping[str, Any] | None) -> None:
    if stored is None or own is None:
        where = "this run" if stored is None else "the checkpoint"
        raise CheckpointError(f"{path}: host stack {name} exists only in {where}; use the run's own configuration")
    for what in own:
        if stored.get(what) != own[what]:
            raise CheckpointError(
                f"{path}: {what} of host stack {name} were {stored.get(what)} and are {own[what]} in this run; use the"
                " run's own configuration and seed, or another folder"
            )


def _parts(rows: np.ndarray, table: HostTable, shard_bytes: int) -> Iterator[np.ndarray]:
    """The rows of each shard."""
    each = max(1, shard_bytes // (4 + math.ceil(table.nbytes / table.rows)))
    for begin in range(0, rows.size, each):
        yield rows[begin : begin + each]
