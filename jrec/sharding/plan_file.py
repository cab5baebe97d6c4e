"""Plan files: small, versioned, checksummed, and refused where they do not belong."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import numpy as np

from jrec.access.container import read_container, write_container
from jrec.access.profile import fingerprint
from jrec.data.schema import Schema
from jrec.errors import ConfigError
from jrec.sharding.errors import PlanError
from jrec.sharding.pieces import HOST, REPLICATED, SHARDED, TIER_NAMES
from jrec.sharding.plan import Plan
from jrec.sharding.problem import PlanTable

KIND, VERSION = "jrec-plan", 1
COMPUTES_VERSION = 2
"""Of plans for devices of which some only keep tables; what reads version 1 alone would not know."""
_REMEDY = "make it again with `jrec plan`"
_ARRAYS = (
    "first", "start", "tier", "owner", "offset", "path", "way", "copy_segment", "copy_device", "copy_offset",
)  # fmt: skip


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Writes a plan file, whole or not at all."""
    header = {
        "tables": [dataclasses.asdict(t) for t in plan.tables],
        "devices": plan.devices,
        "purpose": plan.purpose,
        "dataset": plan.dataset,
        "info": dict(plan.info),
    }
    version = VERSION
    if plan.computes is not None:
        version, header["computes"] = COMPUTES_VERSION, list(plan.computes)
    arrays = {name: getattr(plan, name) for name in _ARRAYS}
    write_container(path, kind=KIND, version=version, header=header, arrays=arrays)


def load_plan(path: str | os.PathLike[str], *, schema: Schema | None = None, devices: int | None = None) -> Plan:
    """Reads and checks a plan.

    Args:
      path: of the file.
      schema: of the dataset it is to be used with.
      devices: of the mesh it is to be used on.

    Raises:
      PlanError: if it is damaged, inconsistent, of another dataset or of a mesh of another size.
    """
    versions = (VERSION, COMPUTES_VERSION)
    header, arrays = read_container(path, kind=KIND, version=versions, error=PlanError, remedy=_REMEDY)
    try:
        computes = header.get("computes")
        plan = Plan(
            tables=tuple(PlanTable(**t) for t in header["tables"]),
            devices=header["devices"],
            purpose=header["purpose"],
            dataset=header["dataset"],
            info=header["info"],
            computes=None if computes is None else tuple(computes),
            **{name: arrays[name] for name in _ARRAYS},
        )
    except (KeyError, TypeError, ConfigError) as error:
        raise PlanError(f"{path} does not hold a plan ({error}); {_REMEDY}") from error
    _check_structure(plan, path)
    if schema is not None:
        check_dataset(plan, schema, path)
    if devices is not None and devices != plan.devices:
        raise PlanError(
            f"{path} is for {plan.devices} devices, but the mesh has {devices}; plan again with"
            f" `jrec plan DATA --hardware H --devices {devices}`"
        )
    return plan


def check_dataset(plan: Plan, schema: Schema, path: Any = "the plan") -> None:
    """Refuses a dataset whose rows are not those that were planned.

    Raises:
      PlanError: naming the difference.
    """
    planned = {t.name: t.rows for t in plan.tables}
    for table in schema.tables:
        if table.name not in planned:
            raise PlanError(f"{path} does not place table {table.name!r} of dataset {schema.name!r}; {_REMEDY}")
        if planned[table.name] != table.rows:
            raise PlanError(
                f"{path} places {planned[table.name]:,} rows of table {table.name!r}, but dataset {schema.name!r} has"
                f" {table.rows:,}; {_REMEDY}"
            )
    if extra := sorted(set(planned) - {t.name for t in schema.tables}):
        raise PlanError(f"{path} places table(s) {', '.join(extra)}, which dataset {schema.name!r} lacks; {_REMEDY}")
    if plan.dataset and plan.dataset != fingerprint(schema):
        raise PlanError(
            f"{path} was made for another dataset than {schema.name!r}: tables are as large, but features or training"
            f" examples differ; {_REMEDY}"
        )


def check_budget(plan: Plan, memory: Any) -> None:
    """Refuses devices that cannot hold what the plan gives them.

    Args:
      plan: the plan.
      memory: (devices,) bytes, or one figure for all.

    Raises:
      PlanError: naming the device and how much it lacks.
    """
    budget = np.broadcast_to(np.asarray(memory, np.float64), (plan.devices,))
    needed = plan_memory(plan)
    worst = int(np.argmax(needed - budget))
    if needed[worst] > budget[worst]:
        raise PlanError(
            f"device {worst} would hold {needed[worst]:,.0f} bytes of embedding rows, slots and cores, but has"
            f" {budget[worst]:,.0f}; plan again with `jrec plan --memory {int(budget.min())}`"
        )


def plan_memory(plan: Plan) -> np.ndarray:
    """(devices,) float64, bytes with slots that the plan gives to each device (Equation 1, and cores)."""
    memory = np.full(plan.devices, float(plan.info.get("core_bytes", 0.0)))
    size = (plan.stop - plan.start) * np.array([t.memory_bytes for t in plan.tables], np.float64)[plan.table]
    return memory + size @ (plan.path[plan.way] == np.arange(plan.devices))


def _check_structure(plan: Plan, path: Any) -> None:
    """What the checksum does not tell: that a plan of this version was written by a sound program."""
    segments = len(plan.start)
    sizes = {name: len(getattr(plan, name)) for name in ("tier", "owner", "offset", "way")}
    good = (
        plan.purpose in ("training", "inference")
        and len(plan.first) == len(plan.tables) + 1
        and plan.first[0] == 0
        and plan.first[-1] == segments
        and bool((np.diff(plan.first) > 0).all())
        and set(sizes.values()) == {segments}
        and plan.path.ndim == 2
        and plan.path.shape[1] == plan.devices
    )
    if good:
        sharded = plan.tier == SHARDED
        owned = plan.owner[sharded]
        good = bool(
            (plan.start[plan.first[:-1]] == 0).all()
            and (plan.stop > plan.start).all()
            and (plan.tier < len(TIER_NAMES)).all()
            and (plan.owner[~sharded] == -1).all()
            and (owned >= 0).all()
            and (owned < plan.devices).all()
            and (plan.way >= 0).all()
            and (plan.way < len(plan.path)).all()
            and (plan.offset >= 0).all()
            and len(plan.copy_segment) == len(plan.copy_device) == len(plan.copy_offset)
            and (plan.path[plan.way[plan.tier >= HOST - 1]] == -1).all()
        )
    if good and plan.computes is not None:
        good = _apart(plan)
    if not good:
        raise PlanError(f"{path} holds ranges that do not make a plan; {_REMEDY}")


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
