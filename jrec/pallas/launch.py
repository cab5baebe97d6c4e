"""What all kernels share: the grid, the walk over tiles, and the choice of inline code or its twins."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Generator, Sequence
from types import ModuleType

import jax
import jax.numpy as jnp
from jax import Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import PyTree

from jrec.pallas import inline, twins
from jrec.pallas.capability import check_capability
from jrec.pallas.tile import Tile

Interpret = plgpu.InterpretGPUParams | None
MAX_DIM = 1024  # longer rows would not fit a fused update's registers
MOST_TOGETHER = (
    24  # tables of one launch: a kernel has 4 KB of parameters, of which an update takes up to 16 pointers a table
)


def ops_for(interpret: Interpret) -> ModuleType:
    """The primitives of compiled kernels, or their twins."""
    return inline if interpret is None else twins


def check_dim(op: str, dim: int) -> None:
    """Raises NotImplementedError for rows that no kernel holds in registers."""
    if not 1 <= dim <= MAX_DIM:
        raise NotImplementedError(
            f"{op}: Pallas kernels take dims from 1 to {MAX_DIM}, not {dim}; use implementation='xla' or None"
        )


def check_manual_axes(operands: PyTree) -> None:
    """Raises NotImplementedError inside a shard_map that tracks which axes values vary over: Mosaic GPU cannot."""
    for leaf in jax.tree.leaves(operands):
        kind = getattr(jax.typeof(leaf), "manual_axis_type", None)
        if kind is not None and kind.varying:
            axes = ", ".join(sorted(map(str, kind.varying)))
            raise NotImplementedError(
                "Pallas kernels inside shard_map need jax.shard_map(..., check_vma=False): their operands vary over"
                f" {axes}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A walk over tiles of ``count`` rows. Jobs that do not depend on each other share a launch.

    Attributes:
      body: Called for every tile with ``item``, the row scalars that number the tile's rows (-1 past the end), what the
        last of ``stages`` returned for them where there are any, the operands as refs, and the outputs' refs.
      tile: The geometry.
      count: Rows to walk over.
      operands: Arrays, refs, and pytrees of them.
      out_types: ShapeDtypeStructs of the outputs; none where the body writes to its operands.
      blocks: The most thread blocks that walk.
      active: Which operand, if any, is a (1,) int32 array holding how many of the ``count`` rows are worth visiting.
      stages: Loads ahead of the body, each stage from what the one before returned: ``stage(item, *refs)`` the first,
        ``stage(item, before, *refs)`` the others. Where a block visits several tiles, stage ``s`` of ``n`` runs for
        the tile ``n - s`` visits ahead, so that no tile waits for its own.
      writes: Another job of the launch whose outputs this one writes too, at other rows; None for none.
    """

    body: Callable[..., None]
    tile: Tile
    count: int
    operands: tuple[PyTree, ...]
    out_types: tuple[jax.ShapeDtypeStruct, ...]
    blocks: int
    active: int | None = None
    stages: tuple[Callable[..., PyTree], ...] = ()
    writes: Job | None = None

    @property
    def tiles(self) -> int:
        """How many tiles cover the rows."""
        return -(-self.count // self.tile.rows)

    @property
    def grid(self) -> int:
        """How many thread blocks walk."""
        return min(self.tiles, self.blocks)


def launch(jobs: Sequence[Job], *, interpret: Interpret) -> list[tuple[jax.Array, ...]]:
    """Launches one kernel for all ``jobs``, each on thread blocks of its own; its name is the bodies' names.

    Args:
      jobs: What to do; none may read what another writes.
      interpret: Parameters of interpret mode, or None.

    Returns:
      Each job's outputs.

    Raises:
      NotImplementedError: Inside a ``shard_map`` with ``check_vma=True``, or on a GPU that no kernel is compiled for.
    """
    jobs = list(jobs)
    check_manual_axes([job.operands for job in jobs])
    if interpret is None:
        check_capability()
    # A kernel has 4 KB of parameters, and jobs of one table share most operands: each array is passed once.
    inputs, places = _distinct([job.operands for job in jobs])

    def kernel(*refs: Ref) -> None:
        block = jax.lax.axis_index("block")
        outs = iter(refs[len(inputs) :])
        outputs = {id(job): tuple(itertools.islice(outs, len(job.out_types))) for job in jobs}
        first = 0
        # Each job has ``grid`` blocks of its own, one range of block numbers behind the other.
        for job, (tree, numbers) in zip(jobs, places, strict=True):
            operands = jax.tree.unflatten(tree, [refs[n] for n in numbers])
            walk = _walk(job, ops_for(interpret), (*operands, *outputs[id(job.writes or job)]))
            if len(jobs) == 1:
                walk(block)
            else:
                # All threads of a block take the same branch, so jobs
                # of different geometries do not diverge within a warp.
                inside = (block >= first) & (block < first + job.grid)
                pl.when(inside)(lambda walk=walk, first=first: walk(block - first))
            first += job.grid

    # What profilers and the tests of compiled programs find it by.
    kernel.__name__ = "_and_".join(dict.fromkeys(job.body.__name__ for job in jobs))
    # One warpgroup a block, without clusters or shared memory: blocks only meet at the end of the launch.
    made = plgpu.kernel(
        kernel,
        out_type=[out for job in jobs for out in job.out_types],
        grid=(sum(job.grid for job in jobs),),
        grid_names=("block",),
        interpret=interpret,
    )(*inputs)
    outputs = iter(made)
    return [tuple(itertools.islice(outputs, len(job.out_types))) for job in jobs]


type Steps[Result] = Generator[list[Job], list[tuple[jax.Array, ...]], Result]
"""Launches that depend on each other, as a generator: it yields jobs, is sent their outputs, and returns its result."""


def launch_together[Result](work: Sequence[Steps[Result]], *, interpret: Interpret) -> list[Result]:
    """Runs several tables' steps at once: their first jobs in one launch, their second ones in the next, and so on.

    Args:
      work: What to run; no two may write the same arrays. More than ``MOST_TOGETHER`` are launched in groups of that
        size.
      interpret: Parameters of interpret mode, or None.

    Returns:
      What each of ``work`` returned.
    """
    results: list[Result] = []
    for start in range(0, len(work), MOST_TOGETHER):
        results += _together(work[start : start + MOST_TOGETHER], interpret)
    return results


def _together[Result](work: Sequence[Steps[Result]], interpret: Interpret) -> list[Result]:
    results: dict[int, Result] = {}
    # Outputs that each steps next gets.
    waiting: dict[int, list[tuple[jax.Array, ...]] | None] = dict.fromkeys(range(len(work)))
    while waiting:
        jobs: dict[int, list[Job]] = {}
        for number, outputs in waiting.items():
            try:
                jobs[number] = next(work[number]) if outputs is None else work[number].send(outputs)
            except StopIteration as end:
                results[number] = end.value
        # Tables with fewer levels of pieces end earlier; the others go on together.
        flat = [job for of_one in jobs.values() for job in of_one]
        outputs = iter(launch(flat, interpret=interpret) if flat else [])
        waiting = {number: [next(outputs) for _ in of_one] for number, of_one in jobs.items()}
    return [results[number] for number in range(len(work))]


def _distinct(operands: Sequence[PyTree]) -> tuple[list[jax.Array | Ref], list[tuple[object, list[int]]]]:
    """All leaves without repetitions; and each pytree as its structure and the numbers of its leaves."""
    leaves: list[jax.Array | Ref] = []
    number_of: dict[int, int] = {}
    places = []
    for tree in operands:
        flat, structure = jax.tree.flatten(tree)
        for leaf in flat:
            if id(leaf) not in number_of:
                number_of[id(leaf)] = len(leaves)
                leaves.append(leaf)
        places.append((structure, [number_of[id(leaf)] for leaf in flat]))
    return leaves, places


def _walk(job: Job, ops: ModuleType, refs: tuple[PyTree, ...]) -> Callable[[jax.Array], None]:
    """What thread block ``block`` of the job's does."""
    tile, inputs = job.tile, refs[: len(job.operands)]

    def items(number: jax.Array) -> jax.Array:
        item = number * tile.rows + tile.row_numbers()
        return jnp.where(item < job.count, item, -1)

    def stage(number: int, item: jax.Array, before: PyTree) -> PyTree:
        run = job.stages[number]
        return run(item, *inputs) if number == 0 else run(item, before, *inputs)

    def visit(item: jax.Array, loaded: PyTree) -> None:
        job.body(item, *((loaded,) if job.stages else ()), *refs)

    def once(block: jax.Array) -> None:
        item, loaded = items(block), None
        for number in range(len(job.stages)):
            loaded = stage(number, item, loaded)
        visit(item, loaded)

    def often(block: jax.Array) -> None:
        last = jnp.int32(job.tiles)
        if job.active is not None:
            # All lanes load the same number, so the maximum over the warp is only a way to a scalar.
            real = ops.most(tile, ops.load_scalars(tile, inputs[job.active], tile.row_scalars(0, jnp.int32)))
            last = jnp.minimum(last, jax.lax.div(real + (tile.rows - 1), jnp.int32(tile.rows)))
        # How many of the tiles ``block``, ``block + grid``, ... lie before the last; none or fewer where all rows end
        # earlier.
        turns = jax.lax.div(last - block + (job.grid - 1), jnp.int32(job.grid))

        def item_at(turn: jax.Array | int) -> jax.Array:
            return items(jnp.where(turn < turns, block + turn * job.grid, job.tiles))  # past the end: no item

        # Invariant: before turn i, ahead[s] is what stage s returned for turn i + len(stages) - 1 - s.
        ahead: list[PyTree] = []
        for number in range(len(job.stages)):
            ahead = [stage(k, item_at(number - k), ahead[k - 1] if k else None) for k in range(number + 1)]

        def turn(i: jax.Array, ahead: list[PyTree]) -> list[PyTree]:
            depth = len(job.stages)
            following = [stage(k, item_at(i + depth - k), ahead[k - 1] if k else None) for k in range(depth)]
            visit(item_at(i), ahead[-1] if depth else None)
            return following

        jax.lax.fori_loop(0, turns, turn, ahead)

    # A block a tile needs no loop, and so none of the registers that carry loads ahead.
    return once if job.grid == job.tiles and job.active is None else often
