"""Small planning problems that the tests of jrec.sharding share."""

import hypothesis.strategies as st
import numpy as np

from jrec.access.profile import AccessProfile, TableProfile
from jrec.sharding.hardware import grid
from jrec.sharding.problem import PlanTable, Problem


def hardware(devices=4, memory=10**9, *, nodes=1, host=0.0):
    """Devices in nodes whose links are four times slower between nodes."""
    return grid(
        "test", devices=devices, devices_per_node=devices // nodes, memory=memory, lookup=1e12, within=1e11,
        between=2.5e10, all_reduce=8e10, host=host,
    )  # fmt: skip


def problem_of(
    counts, *, devices=4, dims=None, memory=10**9, nodes=1, host=0.0, examples=1000, batch=64, slots=0, **options
):
    """A problem of tables with these (rows,) counts."""
    dims = dims or [8] * len(counts)
    tables = [
        PlanTable(name=f"t{i}", rows=len(c), dim=d, slot_bytes=slots)
        for i, (c, d) in enumerate(zip(counts, dims, strict=True))
    ]
    profiles = [TableProfile.from_counts(f"t{i}", np.asarray(c)) for i, c in enumerate(counts)]
    return Problem(
        tables=tuple(tables),
        profile=AccessProfile(tables=tuple(profiles), examples=examples),
        hardware=hardware(devices, memory, nodes=nodes, host=host),
        batch_size=batch,
        **options,
    )


def zipf_counts(rows, seed=0, total=20_000):
    """(rows,) accesses of rows whose expectations descend."""
    rng = np.random.default_rng(seed)
    weights = np.arange(1, rows + 1) ** -1.1
    return rng.multinomial(total, weights / weights.sum())


@st.composite
def problems(draw, *, max_rows=60):
    """Tables of any sizes and dims, counts in any order, devices in one or two nodes."""
    tables = draw(st.integers(1, 4))
    counts = []
    for _ in range(tables):
        rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        rows = draw(st.integers(1, max_rows))
        counts.append(rng.integers(0, draw(st.sampled_from([1, 3, 40])), rows) ** draw(st.sampled_from([1, 3])))
    devices = draw(st.sampled_from([1, 2, 3, 4, 8]))
    nodes = draw(st.sampled_from([1, 2])) if devices % 2 == 0 else 1
    return problem_of(
        counts,
        devices=devices,
        nodes=nodes,
        dims=draw(st.lists(st.sampled_from([4, 8]), min_size=tables, max_size=tables)),
        purpose=draw(st.sampled_from(["training", "inference"])),
        extra_memory=draw(st.sampled_from([0.0, 0.05, 0.5, 3.0])),
        batch=draw(st.sampled_from([1, 64, 4096])),
        slots=draw(st.sampled_from([0, 4])),
    )
