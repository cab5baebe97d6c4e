"""Plan files: small, versioned, checksummed, and refused where they do not belong."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from jrec.access.container import read_container, write_container
from jrec.data.identity import Identity
from jrec.data.schema import Schema
from jrec.files import decode
from jrec.json_values import JsonMapping
from jrec.sharding.errors import PlanError
from jrec.sharding.hardware import Hardware
from jrec.sharding.pieces import HOST, REPLICATED, SHARDED, TIER_NAMES
from jrec.sharding.planner import PlanOptions
from jrec.sharding.plans import ARRAYS, Plan
from jrec.sharding.problem import PlanTable, Purpose
from jrec.sharding.replicate import FrequencyRule

KIND, VERSION = "jrec-plan", 3
_REMEDY = "make it again with `jrec plan`"
_MOST_DEVICES = 2**15 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Header:
    """What a file says besides its arrays; see ``Plan``."""

    tables: tuple[PlanTable, ...]
    devices: int
    purpose: Purpose
    dataset: Identity | None
    info: JsonMapping
    computes: tuple[bool, ...] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Info:
    """What ``Plan.info`` may hold."""

    hardware: Hardware | None = None
    batch_size: int | None = None
    extra_memory: float | None = None
    dedup: bool | None = None
    options: PlanOptions | None = None
    rule: FrequencyRule | None = None
    profile: str | None = None
    data: str | None = None
    core_bytes: float = 0.0
    core_seconds: float = 0.0


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Writes a plan file, whole or not at all."""
    header = _Header(**{f.name: getattr(plan, f.name) for f in dataclasses.fields(_Header)})
    arrays = {name: getattr(plan, name) for name in ARRAYS}
    write_container(path, kind=KIND, version=VERSION, header=dataclasses.asdict(header), arrays=arrays)


def load_plan(path: str | os.PathLike[str], *, schema: Schema | None = None, devices: int | None = None) -> Plan:
    """Reads and checks a plan.

    Args:
      path: The plan file.
      schema: The schema of the dataset that it is used with; None to leave it unchecked.
      devices: How many devices the mesh has that it is used on; None to leave it unchecked.

    Raises:
      PlanError: If it is damaged, inconsistent, of another dataset or of a mesh of another size.
    """
    content, arrays = read_container(path, kind=KIND, version=VERSION, error=PlanError, remedy=_REMEDY)
    header = decode(content, _Header, where=str(path), error=PlanError, remedy=_REMEDY, partial=True)
    decode(header.info, _Info, where=f"{path}, info", error=PlanError, remedy=_REMEDY, partial=True)
    if {name: array.dtype for name, array in arrays.items()} != ARRAYS or not header.tables:
        raise PlanError(f"{path} does not hold the arrays of a plan; {_REMEDY}")
    fields: dict[str, Any] = {f.name: getattr(header, f.name) for f in dataclasses.fields(header)}
    fields.update(arrays)
    plan = Plan(**fields)
    _check_structure(plan, path)
    if schema is not None:
        check_dataset(plan, schema, path)
    if devices is not None:
        check_devices(plan, devices, path)
    return plan


def check_devices(plan: Plan, devices: int, path: str | os.PathLike[str] = "the plan") -> None:
    """Refuses a mesh of another size than the plan's.

    Raises:
      PlanError: Naming both numbers.
    """
    if devices != plan.devices:
        raise PlanError(
            f"{path} is for {plan.devices} devices, but the mesh has {devices}; plan again with"
            f" `jrec plan DATA --hardware H --devices {devices}`"
        )


def check_dataset(plan: Plan, schema: Schema, path: str | os.PathLike[str] = "the plan") -> None:
    """Refuses a dataset whose rows are not those that were planned.

    Raises:
      PlanError: Naming the difference.
    """
    planned = {t.name: t.rows for t in plan.tables}
    for table in schema.tables:
        if table.name not in planned:
            raise PlanError(f"{path} does not place table {table.name!r} of dataset {schema.name!r}; {_REMEDY}")
        if planned[table.name] != table.rows and not table.growing:  # whose capacity is the run's
            raise PlanError(
                f"{path} places {planned[table.name]:,} rows of table {table.name!r}, but dataset {schema.name!r} has"
                f" {table.rows:,}; {_REMEDY}"
            )
    if extra := sorted(set(planned) - {t.name for t in schema.tables}):
        raise PlanError(f"{path} places table(s) {', '.join(extra)}, which dataset {schema.name!r} lacks; {_REMEDY}")
    if plan.dataset is not None:
        plan.dataset.check(schema.identity, subject=str(path), remedy=_REMEDY, error=PlanError)


def check_budget(plan: Plan, memory: float | Sequence[float] | np.ndarray) -> None:
    """Refuses devices that cannot hold what the plan gives them.

    Args:
      plan: The plan.
      memory: (devices,) bytes, or one figure for all.

    Raises:
      PlanError: Naming the device and how much it lacks.
    """
    budget = np.broadcast_to(np.asarray(memory, np.float64), (plan.devices,))
    needed = plan_memory(plan)
    worst = int(np.argmax(needed - budget))
    if needed[worst] > budget[worst]:
        raise PlanError(
            f"device {worst} would hold {needed[worst]:,.0f} bytes of embedding rows, slots and cores, but has"
            f" {budget[worst]:,.0f}; plan again by the run's configuration (`jrec plan --config CONFIG.toml`), which"
            " says the optimizer's slots, or for devices of more memory (--memory)"
        )


def plan_memory(plan: Plan) -> np.ndarray:
    """(devices,) float64, bytes with slots that the plan gives to each device (Equation 1, and cores)."""
    memory = np.full(plan.devices, float(plan.info.get("core_bytes", 0.0)))
    size = (plan.stop - plan.start) * np.array([t.memory_bytes for t in plan.tables], np.float64)[plan.table]
    return memory + size @ (plan.path[plan.way] == np.arange(plan.devices))


def _check_structure(plan: Plan, path: str | os.PathLike[str]) -> None:
    """What the checksum does not tell: that a plan of this version was written by a sound program."""
    if not (_has_ranges(plan) and _has_places(plan) and (plan.computes is None or _apart(plan))):
        raise PlanError(f"{path} holds ranges that do not make a plan; {_REMEDY}")


def _has_ranges(plan: Plan) -> bool:
    """Whether every table is cut into ranges, with an entry each in every array."""
    segments = len(plan.start)
    sizes = {getattr(plan, name).shape for name in ("start", "tier", "owner", "offset", "way")}
    return bool(
        1 <= plan.devices <= _MOST_DEVICES
        and len({t.name for t in plan.tables}) == len(plan.tables)
        and plan.first.shape == (len(plan.tables) + 1,)
        and plan.first[0] == 0
        and plan.first[-1] == segments
        and (np.diff(plan.first) > 0).all()
        and sizes == {(segments,)}
        and plan.path.ndim == 2
        and plan.path.shape[1] == plan.devices
        and (plan.start[plan.first[:-1]] == 0).all()
        and (plan.stop > plan.start).all()
    )


def _has_places(plan: Plan) -> bool:
    """Whether the ranges of every array lie one behind the other, on devices that there are."""
    sharded = plan.tier == SHARDED
    owned = plan.owner[sharded]
    sound = bool(
        (plan.tier < len(TIER_NAMES)).all()
        and (plan.owner[~sharded] == -1).all()
        and (owned >= 0).all()
        and (owned < plan.devices).all()
        and (plan.way >= 0).all()
        and (plan.way < len(plan.path)).all()
        and (plan.path >= -1).all()
        and (plan.path < plan.devices).all()
        and (plan.path[plan.way[plan.tier >= HOST - 1]] == -1).all()
        and (plan.path[plan.way[sharded]] >= 0).all()
    )
    if not sound:
        return False
    # Offsets follow from the rest: what they should be is computed, and compared.
    laid_out = plan.laid_out()
    places = ("offset", "copy_segment", "copy_device", "copy_offset")
    return all(np.array_equal(getattr(laid_out, name), getattr(plan, name)) for name in places)


def _apart(plan: Plan) -> bool:
    """Whether some devices compute, others keep every row that lies on a device, and none keeps a copy."""
    computes = plan.computes or ()
    if len(computes) != plan.devices or any(type(c) is not bool for c in computes) or len(set(computes)) != 2:
        return False
    keepers = np.flatnonzero(~np.array(computes))
    sharded = plan.tier == SHARDED
    fetched = plan.path[plan.way[sharded]]
    return bool(
        np.isin(plan.owner[sharded], keepers).all()
        and not (plan.tier == REPLICATED).any()
        and len(plan.copy_segment) == 0
        and (fetched == plan.owner[sharded][:, None]).all()
    )
