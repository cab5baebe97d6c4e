"""RM1 to RM4 on 8 devices: what the compiled training step moves in each form of the lookup, beside the cost model.

Programs are compiled for virtual CPU devices and not run: no table is made. ``report_forms`` starts this module in a
process of its own, which has so many of them.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any, get_args

import jax
import numpy as np
from jax.sharding import Mesh

from benchmarks import harness, scaling_bytes, scaling_step, workloads
from benchmarks.dispatched import dispatched
from jrec.mesh.route import AXIS
from jrec.run.placement.lookup_modes import LookupModes
from jrec.sharding.hardware import load_hardware
from jrec.sharding.modes import Mode

DEVICES = 8


def report_forms(report: harness.Report, names: list[str], *, examples: int) -> None:
    """Adds the bytes of each workload's step in both forms.

    Args:
      report: to add to.
      names: of workloads.
      examples: of a device.
    """
    for line in _run(names, examples):
        case = f"{line['workload']}, {DEVICES} devices, batch {line['batch']:,}, {line['form']}, compiled step"
        expected, real, moved = (sum(e[of] for e in line["entries"]) / 1e6 for of in ("expected", "real", "moved"))
        report.add(
            case, "lookups, sent by a device, without padding", real, "MB", peer="cost model", ratio=expected / real
        )
        report.add(case, "lookups, padding", moved - real, "MB")
        report.add(case, "all collectives, sent by a device", line["collectives"] / 1e6, "MB")
        if line["form"] == "send":
            report.add(case, "tables that mesh.form=auto sends", line["auto"], "")
        for entry in line["entries"]:
            report.note(
                f"  {entry['name']}: {entry['moved'] / 1e6:,.2f} MB, {entry['real'] / 1e6:,.2f} real: {entry['why']}"
            )


def _run(names: list[str], examples: int) -> list[dict[str, Any]]:
    return harness.on_virtual_devices(DEVICES, "benchmarks.scaling_forms", str(examples), *names)


def compiled_bytes(name: str, *, examples: int) -> list[dict[str, Any]]:
    """What a workload's compiled step moves in each form; needs ``DEVICES`` devices.

    Raises:
      AssertionError: if the program's collectives are not those that the ledger lists.
    """
    workload = workloads.WORKLOADS[name].with_batch(examples * DEVICES)
    planned = scaling_step.planned(workload, load_hardware("h200x8"), extra_memory=0.0)
    mesh, found, sent = Mesh(np.array(jax.devices()[:DEVICES]), (AXIS,)), [], 0
    for form in get_args(Mode):
        setup = dataclasses.replace(planned, form=form)
        partitioned = scaling_step.partitioned_of(setup, seed=0)
        lookups = scaling_step.lookups_of(setup, partitioned)
        if form == "retrieve":
            auto = LookupModes(setup.layout)
            auto.decide([{setup.stack: lookups}], workload.batch // DEVICES)
            sent = sum(bool(table.send) for table in auto.tables)
        (batch,) = scaling_step.mesh_batches(setup, [partitioned])
        program = dispatched(setup, steps=1, mesh=mesh, implementation=None, batch=batch)
        ledger = scaling_bytes.ledger(setup, lookups, batch, program.state.state, counted=True)
        collectives = scaling_step.collectives(program.lower("cpu").compile().as_text() or "", DEVICES)
        moved, listed = sum(c.sent for c in collectives), sum(entry.moved for entry in ledger)
        assert abs(moved / listed - 1) < 1e-3, (
            f"{name}, {form}: {moved:,.0f} bytes in the program, {listed:,.0f} listed"
        )
        entries = [dataclasses.asdict(entry) for entry in scaling_bytes.link_entries(setup, lookups, batch)]
        found.append(
            {"workload": name, "form": form, "batch": workload.batch, "entries": entries, "collectives": moved}
        )
    return [line | {"auto": sent} for line in found]


if __name__ == "__main__":
    lines = [line for name in sys.argv[2:] for line in compiled_bytes(name, examples=int(sys.argv[1]))]
    json.dump(lines, sys.stdout)
