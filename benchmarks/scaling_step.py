"""A training step on a mesh, as the scaling benchmark and the ahead-of-time tests take it: plan, batch, program."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks import models, workloads
from jrec import ops
from jrec.access.power_law import power_law_profile
from jrec.mesh.communication import Communication
from jrec.mesh.exchange import Kind, Links
from jrec.mesh.route import AXIS, MeshRows
from jrec.mesh.routing import WindowCapacity
from jrec.nn import DLRM, SparseOptimizer
from jrec.ops.dispatch import Implementation
from jrec.ops.layout import EmbeddingLayout
from jrec.ops.row_optimizers import RowOptimizer
from jrec.run.feeds.partitioned import stacked
from jrec.run.feeds.partitioned_batch import BatchPartitioner, PartitionedBatch
from jrec.run.placement.lookup_modes import LookupMode, LookupModes
from jrec.run.placement.part_lookups import PartLookups
from jrec.run.placement.rows import based, replicated_capacity
from jrec.run.placement.sizes import MeshSizes
from jrec.run.step import CompiledRun, State, StepBatch, compile_run
from jrec.sharding.contents import shard_capacity
from jrec.sharding.cost import Cost
from jrec.sharding.hardware import Hardware
from jrec.sharding.of_layout import plan_tables_of
from jrec.sharding.planner import plan_placement
from jrec.sharding.plans import Plan, build_plan
from jrec.sharding.problem import Problem
from jrec.sharding.stack_ranges import StackRanges

OPTIMIZER = ops.RowWiseAdagrad(learning_rate=0.1)
EXAMPLES_OF_LOG = 4_373_472_329  # Criteo Terabyte's: in short logs, rows seen once lift the tail of the law


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """A workload planned for some devices.

    Attributes:
      workload: whose batch is that of all devices together.
      layout: The layout of its tables, whose rows a plan places.
      problem, plan, cost: of the placement.
      form: in which all features look up other devices' rows.
      exchange: how lines travel.
      narrow: Whether rows, sums and their gradients travel in bfloat16.
    """

    workload: workloads.Workload
    layout: EmbeddingLayout
    problem: Problem
    plan: Plan
    cost: Cost
    form: LookupMode = "retrieve"
    exchange: Kind = "padded"
    narrow: bool = False

    @property
    def links(self) -> Links:
        """How values travel."""
        dtype = "bfloat16" if self.narrow else None
        return Links(kind=self.exchange, rows=dtype, gradients=dtype)

    @functools.cached_property
    def modes(self) -> LookupModes:
        """Which features send their lookups."""
        return LookupModes(self.layout, self.form, links=self.links)

    @property
    def devices(self) -> int:
        """Of the plan."""
        return self.plan.devices

    @property
    def stack(self) -> str:
        """The one planned stack."""
        (stack,) = self.layout.planned_stacks
        return stack.name


def planned(workload: workloads.Workload, hardware: Hardware, *, extra_memory: float = 0.05) -> Setup:
    """Plans a workload by its own power law, counting unique rows, as a step fetches them.

    Devices that only keep tables are asked for every lookup.
    """
    layout = models.layout(workload, planned=True)
    tables = plan_tables_of(layout, OPTIMIZER.slots)
    ids = dict(zip((t.name for t in tables), map(float, workload.ids_per_bag), strict=True))
    profile = power_law_profile(
        {t.name: t.rows for t in tables}, examples=EXAMPLES_OF_LOG, exponent=workload.zipf, ids_per_example=ids
    )
    problem = Problem(
        tables=tables,
        profile=profile,
        hardware=hardware,
        batch_size=workload.batch,
        extra_memory=extra_memory,
        dedup=hardware.computes is None,
    )
    found = plan_placement(problem)
    plan = build_plan(problem, found.placement)
    return Setup(workload=workload, layout=layout, problem=problem, plan=plan, cost=found.cost)


def partitioned_of(setup: Setup, *, seed: int) -> PartitionedBatch:
    """A batch of the workload, and its parts on all devices."""
    devices = setup.devices
    cut = BatchPartitioner(setup.layout, setup.plan, devices=range(devices), first=0, count=devices, cast=False)
    return cut(models.batch(setup.workload, seed=seed, planned=True))


def lookups_of(setup: Setup, partitioned: PartitionedBatch) -> list[PartLookups]:
    """What each device's part reads."""
    (stack,), devices = setup.layout.planned_stacks, setup.devices
    ranges = StackRanges(setup.plan, based(stack))
    return [
        PartLookups.of(part.bags[stack.name], ranges, device=device, devices=devices)
        for device, part in enumerate(partitioned.parts)
    ]


def sizes_of(setup: Setup) -> MeshSizes:
    """Of the workload's parts."""
    examples = setup.workload.batch // len(setup.plan.compute_devices)
    return MeshSizes(setup.layout, setup.plan, examples=examples, headroom=1.0, send=setup.modes.send)


def mesh_batches(setup: Setup, batches: Sequence[PartitionedBatch], *, windows: bool = False) -> list[StepBatch]:
    """The parts of some batches as NumPy arrays, with room for all of them: one program.

    Args:
      setup: of the workload.
      batches: that the program is for.
      windows: whether it takes what has no room in further windows, as that of a run does. These batches need none.
    """
    (stack,), sizes, most = setup.layout.planned_stacks, sizes_of(setup), WindowCapacity()
    for partitioned in batches:
        for part in lookups_of(setup, partitioned):
            most = most.most(part.needs(sizes.sending(stack.name)))
    sizes.make_room({stack.name: most})
    ranges: Any = StackRanges(setup.plan, based(stack)).of_devices(range(setup.devices))
    places = sizes.places(stack.name, ranges)
    if not windows:
        places = dataclasses.replace(places, fits=True)
        if most.remote == 0:
            places = dataclasses.replace(places, room=places.room._replace(remote=0))
    return [StepBatch(batch=stacked(of.parts), places={stack.name: places}) for of in batches]


def modules(
    setup: Setup, *, dtype: str = "float32", implementation: Implementation | None = None
) -> tuple[DLRM, SparseOptimizer]:
    """The workload's model, and its optimizer with row-wise Adagrad; see ``models.modules``."""
    how = {"dtype": dtype, "implementation": implementation}
    return models.modules(setup.workload, tables=setup.layout, embedding=OPTIMIZER, **how)


def compiled(setup: Setup, mesh: Mesh) -> tuple[State, CompiledRun]:
    """The workload's model over a mesh."""
    return compile_run(*modules(setup), mesh=mesh, communication=together(setup))


def together(setup: Setup) -> Communication:
    """How the devices of a plan work together."""
    return Communication(links=setup.links, computes=setup.plan.computes)


def abstract_rows(setup: Setup, mesh: Mesh, optimizer: RowOptimizer = OPTIMIZER) -> dict[str, MeshRows]:
    """Shapes and placement of the planned stack's arrays."""
    (stack,) = setup.layout.planned_stacks
    lines = shard_capacity(setup.plan, stack.name) * setup.devices
    copies = replicated_capacity(setup.plan, stack)
    shapes = {"element": (stack.dim,), "row": ()}

    def array(rows: int, slot: tuple[int, ...], dtype: str, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, *slot), np.dtype(dtype), sharding=NamedSharding(mesh, spec))

    specs = {"sharded": (lines, PartitionSpec(AXIS)), "replicated": (copies, PartitionSpec())}
    made: dict[str, Any] = {n: array(rows, (stack.dim,), stack.dtype, spec) for n, (rows, spec) in specs.items()}
    for name, (rows, spec) in specs.items():
        slots = optimizer.slots.items()
        made[f"{name}_slots"] = {slot: array(rows, shapes[shape], "float32", spec) for slot, shape in slots}
    return {stack.name: MeshRows(**made)}


def abstract(tree: Any, mesh: Mesh, spec: PartitionSpec) -> Any:
    """Arrays as shapes on a mesh."""
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective of a compiled program.

    Attributes:
      kind: as HLO names it.
      shapes: of its results on one device.
      bytes: of the results.
      sent: bytes that one device sends over links, as rings do it.
    """

    kind: str
    shapes: tuple[str, ...]
    bytes: int
    sent: float


_SHAPE = re.compile(r"\b(pred|[suf]\d+|bf16)\[([\d,]*)\]")
_COLLECTIVE = re.compile(
    r"= (?P<type>.*?) (?P<kind>all-to-all|all-gather|all-reduce|reduce-scatter|ragged-all-to-all|collective-permute)"
    r"(?P<start>-start)?\("
)


def collectives(hlo: str, devices: int) -> list[Collective]:
    """All of an optimized program's, in its order."""
    found = []
    for line in hlo.splitlines():
        match = _COLLECTIVE.search(line)
        if match is None:
            continue
        shapes = _SHAPE.findall(match["type"])
        if match["kind"].startswith("ragged"):
            shapes = shapes[:1]  # values in; what comes out is as large, and sizes and offsets do not travel
        elif match["start"]:
            shapes = shapes[len(shapes) // 2 :]  # operands, then results
        size = sum(_bytes(*shape) for shape in shapes)
        share = (devices - 1) / devices * (2 if match["kind"] == "all-reduce" else 1)
        named = tuple(f"{dtype}[{dims}]" for dtype, dims in shapes)
        found.append(Collective(kind=match["kind"], shapes=named, bytes=size, sent=share * size))
    return found


def _bytes(dtype: str, dims: str) -> int:
    width = 1 if dtype == "pred" else int(re.sub(r"\D", "", dtype)) // 8
    return width * int(np.prod([int(d) for d in dims.split(",") if d]))
