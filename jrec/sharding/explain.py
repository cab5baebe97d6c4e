"""What a plan says for people: the comparison with the baselines, the tiers chosen, one table or row."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jrec.sharding.cost import Cost
from jrec.sharding.errors import PlanError
from jrec.sharding.memory_centric import device_ranges
from jrec.sharding.modes import Traffic, expected_traffic
from jrec.sharding.pieces import SHARDED, TIER_NAMES
from jrec.sharding.planner import Planned
from jrec.sharding.plans import Plan
from jrec.sharding.problem import Problem
from jrec.shown import human_bytes

_MOST = 12  # ranges of a table that are listed


def human_seconds(value: float) -> str:
    """``12.3 µs``."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if value >= 0.9995 / scale:
            return f"{value * scale:.3g} {unit}"
    return f"{value * 1e9:.3g} ns"


def balance_table(costs: Mapping[str, Cost]) -> str:
    """The degrees of balance and what they cost, a line a strategy."""
    header = ("strategy", "memory", "lookup", "links", "largest device", "per link", "a step", "fits")
    lines: list[tuple[str, ...]] = [header]
    for name, cost in costs.items():
        remote = cost.remote_bytes
        lines.append(
            (
                name,
                f"{100 * cost.memory_balance:.2f} %",
                f"{100 * cost.lookup_balance:.2f} %",
                f"{100 * cost.communication_balance:.2f} %",
                human_bytes(float(cost.memory.max())),
                human_bytes(float(remote.mean()) if remote.size else 0.0),
                human_seconds(cost.seconds),
                "yes" if bool((cost.memory <= cost.budget).all()) else "no",
            )
        )
    widths = [max(len(line[c]) for line in lines) for c in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if c == 0 else cell.rjust(w) for c, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def summary(problem: Problem, planned: Planned, plan: Plan) -> str:
    """What was chosen, what it costs, and what the next byte of memory would buy."""
    cost, tiers = planned.cost, planned.tiers
    rows = ", ".join(f"{name} {plan.rows_in(name):,}" for name in TIER_NAMES if plan.rows_in(name))
    rounds = ", ".join(f"{100 * t:.3g} % -> {100 * b:.2f} %" for t, b in planned.tried)
    shares = [
        f"lookups {human_seconds(float(cost.lookup.max()))}",
        f"fetches {human_seconds(cost.communication)}",
        f"all-reduce {human_seconds(cost.all_reduce)}",
    ]
    if cost.host:
        shares.append(f"host memory {human_seconds(cost.host)}")
    if cost.tt:
        shares.append(f"tensor-train products {human_seconds(cost.tt)}")
    lines = [
        f"rows: {rows}",
        f"copies: {human_bytes(cost.copies)}, {100 * cost.copies / problem.total_bytes:.2f} % of the tables'"
        f" {human_bytes(problem.total_bytes)} (allowed {100 * problem.extra_memory:g} %)",
        f"degree of balance by threshold: {rounds}",
        f"a step of {problem.batch_size:,} examples: {', '.join(shares)}, if nothing overlaps",
        *_between(problem, plan),
    ]
    if plan.computes is not None:
        lines.insert(0, _who(plan))
    elif cost.training and problem.devices > 1:
        lines.insert(2, f"rule of replication: {planned.rule}")
    if tiers.host_bytes:
        lines.append(f"host memory: {human_bytes(tiers.host_bytes)} of rows, since the devices cannot hold all")
    lines.extend(
        f"tensor-train: table {o.table!r}"
        f"{f' from row {o.first_rank:,} on' if o.first_rank else ''} at rank {o.rank}, {human_bytes(o.memory_bytes)} on"
        f" each device, {human_seconds(o.seconds)} a step"
        for o in tiers.tt
    )
    more = problem.total_bytes / 1000
    saved = tiers.marginal.seconds_per_byte * more
    gain = "the next byte of memory "
    if saved > 0:
        gain = f"{human_bytes(more)} more memory, 0.1 % of the tables, saves up to {human_seconds(saved)} a step: it "
    lines.append(gain + tiers.marginal.effect)
    lines.append(f"planned in {planned.seconds:.2f} s")
    return "\n".join(lines)


def _who(plan: Plan) -> str:
    keepers = tuple(d for d in range(plan.devices) if d not in plan.compute_devices)
    compute = device_ranges(plan.compute_devices)
    return f"devices {compute} compute and keep no rows, {device_ranges(keepers)} keep the tables"


def mode_bytes(traffic: Traffic) -> str:
    """The bytes that both modes of a lookup move."""
    retrieve, send = (human_bytes(traffic.bytes_of(mode)) for mode in ("retrieve", "send"))
    return f"{retrieve} if rows are retrieved, {send} if sums of bags are sent"


def _between(problem: Problem, plan: Plan) -> list[str]:
    """What all links carry in either mode, and for which tables sending moves fewer bytes."""
    if problem.devices == 1:
        return []
    lines = [f"between devices in a step: {mode_bytes(expected_traffic(problem, plan))}"]
    if plan.computes is not None:
        return [f"{lines[0]}, as a run does with such a plan unless mesh.form=retrieve"]
    tables = [(t.name, expected_traffic(problem, plan, table=t.name)) for t in plan.tables]
    send = [name for name, traffic in tables if traffic.cheaper == "send"]
    rest = "" if len(send) <= _MOST else f" and {len(send) - _MOST} more"
    fewer = f"tables {', '.join(send[:_MOST])}{rest}" if send else "no table"
    return [f"{lines[0]}; sending sums is fewer bytes for {fewer}"]


def explain(plan: Plan, subject: str, problem: Problem | None = None) -> str:
    """Where a table or one of its rows lives, and why.

    Args:
      plan: The plan.
      subject: ``TABLE`` or ``TABLE:ROW``.
      problem: The problem that was planned, for the accesses; None leaves these out.

    Raises:
      PlanError: On an unknown table or row.
    """
    name, colon, text = subject.rpartition(":") if subject not in [t.name for t in plan.tables] else (subject, "", "")
    if not colon:
        return _explain_table(plan, name or text, problem)
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise PlanError(f"{text[:40]!r} is no row; ask for TABLE or TABLE:ROW, such as {plan.tables[0].name}:0")
    return _explain_row(plan, name, int(text), problem)


def _explain_table(plan: Plan, name: str, problem: Problem | None) -> str:
    number = plan.number(name)
    table = plan.tables[number]
    segments = np.arange(plan.first[number], plan.first[number + 1])
    lines = [f"table {name}: {table.rows:,} rows of {table.dim} {table.dtype}, {len(segments):,} ranges"]
    fetched = None
    if plan.computes is not None:
        lines.append(f"  {_who(plan)}")
    if problem is not None:
        fetched = plan.placement(problem).pieces.fetched[segments] / table.row_bytes * problem.num_compute_devices
    rows = (plan.stop - plan.start)[segments]
    for code, tier in enumerate(TIER_NAMES):
        here = plan.tier[segments] == code
        if not here.any():
            continue
        line = f"  {tier}: {int(rows[here].sum()):,} rows"
        if fetched is not None:
            share = fetched[here].sum() / max(fetched.sum(), 1e-300)
            line += f", {100 * share:.2f} % of its accesses"
        lines.append(line)
        if code == SHARDED:
            owners = np.bincount(plan.owner[segments][here], rows[here], plan.devices)
            lines.append("    by device: " + ", ".join(f"{int(n):,}" for n in owners))
    for place in range(min(len(segments), _MOST)):
        at = segments[place]
        where = TIER_NAMES[plan.tier[at]] + (f" on device {plan.owner[at]}" if plan.owner[at] >= 0 else "")
        copies = plan.copy_device[plan.copy_segment == at]
        more = f", copied to {', '.join(map(str, copies))}" if len(copies) else ""
        often = "" if fetched is None else f", {fetched[place]:.4g} accesses a step"
        lines.append(f"  rows {plan.start[at]:,} to {plan.stop[at] - 1:,}: {where}{more}{often}")
    if len(segments) > _MOST:
        lines.append(f"  and {len(segments) - _MOST:,} ranges more")
    if problem is not None and plan.devices > 1:
        lines.append(f"  between devices in a step: {mode_bytes(expected_traffic(problem, plan, table=name))}")
    return "\n".join(lines)


def _explain_row(plan: Plan, name: str, row: int, problem: Problem | None) -> str:
    located = plan.locate(name, np.array([row]))
    tier, owner, offset = TIER_NAMES[located.tier[0]], int(located.owner[0]), int(located.offset[0])
    stack = plan.tables[plan.number(name)].stack
    places = {
        "sharded": f"row {offset:,} of device {owner}'s shard of stack {stack}",
        "replicated": f"row {offset:,} of the replicated rows of stack {stack} on every device",
        "host": f"row {offset:,} of stack {stack} in host memory",
        "tt": f"row {offset:,} of the table's tensor train, whose cores every device has",
    }
    lines = [f"{name}:{row}: {tier}, {places[tier]}"]
    if tier == "sharded":
        sources = [int(plan.route(name, np.array([row]), d).owner[0]) for d in range(plan.devices)]
        if len(set(sources)) > 1:
            lines.append("  fetched from: " + ", ".join(f"device {d} from {s}" for d, s in enumerate(sources)))
    if problem is None:
        return "\n".join(lines)
    number = plan.number(name)
    ranked = problem.by_row[number]
    access = float(ranked.access_at(np.array(row)))
    access *= problem.num_compute_devices
    lines.append(f"  {access:.4g} accesses a step of {problem.batch_size:,} examples over all devices")
    if plan.purpose == "training" and plan.devices > 1 and plan.computes is None:
        needed = problem.hardware.p2p / problem.hardware.all_reduce
        asked = plan.info.get("options", {}).get("rule")  # all that older plans say
        if plan.info.get("rule", asked) == "per-device":
            needed *= plan.devices
        verdict = "pays" if access > needed else "does not pay"
        lines.append(f"  a replica {verdict}: an all-reduce costs as much as fetching it {needed:.3g} times a step")
        if verdict == "pays" and tier == "sharded":
            lines.append("  but the extra memory went to rows accessed more often")
    return "\n".join(lines)
