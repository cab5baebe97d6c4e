"""The step time of clusters of H200, from one device's step and what the cost model lets its links carry."""

from __future__ import annotations

import dataclasses

import numpy as np

from benchmarks import workloads
from benchmarks.gpu_cases import forward_traffic, stacked_ids, update_traffic
from benchmarks.scaling_bytes import expected_rows
from benchmarks.scaling_step import OPTIMIZER, Setup
from jrec.sharding.hardware import Hardware, grid, load_hardware

ASSUMPTIONS = (
    "every device has as many examples as the one whose step is taken, and computes as long as it does",
    "links and all-reduces reach the figures of the presets: 450 GB/s in a node, 50 GB/s a device between nodes,"
    " an all-reduce of 340 GB/s in a node and 37 GB/s over several",
    f"lines of the exchange carry {1.4:g} times their real rows (capacity padding)",
    "a collective costs 20 us to begin in a node and 40 us over several, and a step has 6 of them, one after another",
    "the two bounds: nothing travels while a device computes; or all that travels is hidden behind the computing",
)
PADDING = 1.4
COLLECTIVES = 6
BANDWIDTH, MULTIPLY = 4800e9, 494e12  # H200: bytes of HBM and TF32 operations a second, by its maker
BEGIN = (20e-6, 40e-6)  # seconds, in one node and over several


@dataclasses.dataclass(frozen=True, kw_only=True)
class Projection:
    """Seconds of a step on a cluster.

    Attributes:
      compute: A single device's computations.
      exchange: requests, rows and gradients over the slowest device's links.
      all_reduce: All-reduces of replicated rows and dense parameters.
      latency: The latency of beginning collectives.
    """

    compute: float
    exchange: float
    all_reduce: float
    latency: float

    @property
    def communication(self) -> float:
        """All that travels."""
        return self.exchange + self.all_reduce + self.latency

    @property
    def apart(self) -> float:
        """If nothing overlaps."""
        return self.compute + self.communication

    @property
    def hidden(self) -> float:
        """If everything does."""
        return max(self.compute, self.communication)


def cluster(devices: int) -> Hardware:
    """So many H200, 8 a node."""
    if devices <= 8:
        return load_hardware("h200x8", devices=devices)
    return grid(
        f"{devices // 8} nodes of 8 H200",
        devices=devices,
        devices_per_node=8,
        memory=112 * 10**9,
        lookup=4800e9,
        within=450e9,
        between=50e9,
        all_reduce=37e9,
        host=63e9,
    )


def floor_seconds(workload: workloads.Workload, *, dense_parameters: int) -> float:
    """Below which no H200 takes one device's step: what must be moved, or multiplied; starting kernels is not counted.

    Args:
      workload: The workload whose batch is the device's part.
      dense_parameters: The MLPs' parameters, each multiplied and added three times per example.
    """
    ids, bags = stacked_ids(workload, seed=0), workload.batch * workload.num_tables
    floors = (
        forward_traffic(ids, bags=bags, dim=workload.dim, itemsize=4),
        update_traffic(ids, bags=bags, dim=workload.dim, itemsize=4, optimizer=OPTIMIZER),
    )
    moved = sum(floor.seconds(BANDWIDTH) for floor in floors)
    return max(moved, 6 * dense_parameters * workload.batch / MULTIPLY)


def project(setup: Setup, *, compute: float, dense_bytes: int) -> Projection:
    """A step of a workload on the hardware it was planned for.

    Args:
      setup: planned for the cluster.
      compute: seconds of one device's step on its part of the batch.
      dense_bytes: Bytes of dense gradients.
    """
    hardware, devices = setup.problem.hardware, setup.devices
    row_bytes, wide = setup.problem.tables[0].row_bytes, 4 * setup.problem.tables[0].dim
    around = (4 + row_bytes + wide) / row_bytes  # a request, the row and its gradient, by the row
    union = expected_rows(setup).union
    ring = 2 * (devices - 1) / devices
    return Projection(
        compute=compute,
        exchange=PADDING * around * float(setup.cost.links.sum(axis=1).max()),
        all_reduce=ring * (union * wide + dense_bytes) / hardware.all_reduce,
        latency=COLLECTIVES * BEGIN[int(np.unique(hardware.L[hardware.remote]).size > 1)],
    )
