"""Native kernels under plain ``jit`` over several devices: rows of a table stay where they are.

XLA knows nothing of a custom call and gathers all operands of one on every device, a table among them. These rules say
instead what each device does with the rows that it has: a lookup sums its own rows, and the devices' sums are added up;
an update steps its own rows by the replicated cast. Programs of one device, and those inside ``shard_map``, are what
they are without rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

Run = Callable[..., Any]
_Shapes = Sequence[jax.ShapeDtypeStruct]  # of operands or results, each with its sharding
_Plan = tuple[
    Run, Sequence[PartitionSpec], Sequence[PartitionSpec]
]  # what a device does, its results' and its operands' shardings
_Planner = Callable[[Mesh, _Shapes, _Shapes], _Plan]


def partitioned(run: Run, plan: _Planner, rule: str) -> Run:
    """``run`` as a function that XLA partitions by ``plan``.

    Args:
      run: A function of arrays that captures none.
      plan: A function of the mesh, and of the shardings (as PartitionSpecs) and shapes of operands and results, to what
        a device does.
      rule: Shardy's sharding rule.
    """

    @jax.custom_batching.custom_vmap
    def call(*operands: jax.Array) -> Any:
        # Inside ``shard_map`` a device's operands are its own already, and XLA may not divide them again.
        if not rules_apply(operands):
            return run(*operands)
        # Made anew for each call: what ``plan`` closes over differs from call to call.
        ruled = custom_partitioning(lambda *inner: run(*inner))

        def partition(
            mesh: Mesh, arguments: _Shapes, results: jax.ShapeDtypeStruct | list[jax.ShapeDtypeStruct]
        ) -> tuple[object, ...]:
            many = isinstance(results, (tuple, list))
            of_results = tuple(results) if many else (results,)
            if mesh.empty or not all(isinstance(a.sharding, NamedSharding) for a in (*arguments, *of_results)):
                raise ValueError("jrec's native kernels know no mesh here; run them inside jax.shard_map")
            device, outs, ins = plan(mesh, tuple(arguments), of_results)
            outs = tuple(NamedSharding(mesh, spec) for spec in outs)
            ins = tuple(NamedSharding(mesh, spec) for spec in ins)
            return mesh, _outside_of_meshes(device), outs if many else outs[0], ins

        def replicated(mesh: Mesh, arguments: _Shapes, results: PyTree) -> PyTree[NamedSharding]:
            return jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), results)

        ruled.def_partition(partition, infer_sharding_from_operands=replicated, sharding_rule=rule)
        return ruled(*operands)

    @call.def_vmap
    def batched(size: int, flags: Sequence[bool], *operands: jax.Array) -> tuple[PyTree, PyTree]:
        out = jax.vmap(run, in_axes=tuple(0 if flag else None for flag in flags), axis_size=size)(*operands)
        return out, jax.tree.map(lambda _: True, out)

    return call


def _outside_of_meshes(device: Run) -> Run:
    """What a device does, traced as its program: not under the axes of the mesh that ``jax.set_mesh`` has set."""

    def run(*operands: jax.Array) -> Any:
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            return device(*operands)

    return run


def rules_apply(operands: Sequence[jax.Array]) -> bool:
    """Whether partitioning rules may be given here: they know neither a shard_map's axes nor explicit ones."""
    meshes = [jax.sharding.get_abstract_mesh(), *(jax.typeof(operand).sharding.mesh for operand in operands)]
    return not any(mesh.manual_axes or mesh.explicit_axes for mesh in meshes)


def axes_of(argument: jax.ShapeDtypeStruct, dimension: int) -> tuple[str, ...]:
    """The mesh axes that a dimension of an argument is divided over, where they divide it evenly; else none."""
    spec = argument.sharding.spec
    entry = spec[dimension] if dimension < len(spec) else None
    axes = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
    parts = 1
    for axis in axes:
        parts *= argument.sharding.mesh.shape[axis]
    return tuple(axes) if argument.shape[dimension] % parts == 0 else ()


def _refusal(verb: str, division: str, table: jax.ShapeDtypeStruct) -> str:
    division = f"evenly {division}".rstrip()
    return (
        f"jrec's native kernels {verb} tables that are divided {division}, not {table.sharding.spec} of {table.shape};"
        " call the op inside jax.shard_map, or name implementation='xla'"
    )


def first_row(axes: tuple[str, ...], rows: int) -> jax.Array:
    """The number of a device's first row, () int32, where it has ``rows`` of them."""
    return jax.lax.axis_index(axes) * jnp.int32(rows)


def lookup_plan(run: Run, ragged: bool, weighted: bool) -> _Planner:
    """How ``gather_reduce`` of (source, indices, offsets, weights) is divided.

    By rows of the source, whose sums are added up; else by padded bags; and by columns.
    """

    def plan(mesh: Mesh, arguments: _Shapes, results: _Shapes) -> _Plan:
        source, indices, *_ = arguments
        rows, columns = axes_of(source, 0), axes_of(source, 1)
        if len(rows + columns) == 0 and any(entry is not None for entry in source.sharding.spec):
            raise ValueError(_refusal("look up", "", source))
        bags = () if ragged else axes_of(indices, 0)
        bags = tuple(axis for axis in bags if axis not in (*rows, *columns))
        wanted = () if ragged else axes_of(results[0], 0)
        scattered = rows if rows and wanted == rows and not bags else ()
        of_ids = PartitionSpec() if ragged else PartitionSpec(bags or None)
        num_rows = source.shape[0]

        def device(source: jax.Array, indices: jax.Array, offsets: jax.Array, weights: jax.Array) -> jax.Array:
            if not rows:
                return run(source, indices, offsets, weights)
            held = source.shape[0]
            # A row that another device has is skipped here, as an absent id is, and summed there. An id past the whole
            # table is past it on every device, so that the sum over devices stays NaN.
            local = indices - first_row(rows, held)
            local = jnp.where((indices >= 0) & (local >= 0) & (local < held), local, -1)
            local = jnp.where(indices >= num_rows, jnp.int32(held), local)  # past the table: NaN
            sums = run(source, local, offsets, weights)
            if scattered:
                # XLA wants the bags divided by the same axes: each device
                # keeps its share of the sums, half of what a psum moves.
                return jax.lax.psum_scatter(sums, rows, scatter_dimension=0, tiled=True)
            return jax.lax.psum(sums, rows)

        out = PartitionSpec(bags or scattered or None, columns or None)
        ins = (
            PartitionSpec(rows or None, columns or None),
            of_ids,
            PartitionSpec(),
            of_ids if weighted else PartitionSpec(),
        )
        return device, (out,), ins

    return plan


def update_plan(run: Run, casted: bool, slots: int) -> _Planner:
    """How an update of (hyperparameters, rows, ..., table, slots, rounding rows) is divided: by rows of the table.

    Args:
      run: The kernel.
      casted: Whether a cast stands before the table, else gradients of rows.
      slots: How many slots there are.
    """
    before = 8 if casted else 3

    def plan(mesh: Mesh, arguments: _Shapes, results: _Shapes) -> _Plan:
        table, num_after = arguments[before], len(arguments) - before - 1 - slots
        axes = axes_of(table, 0)
        if not axes and any(entry is not None for entry in table.sharding.spec):
            raise ValueError(_refusal("update", "by rows", table))

        def device(*operands: jax.Array) -> Any:
            # No mesh axis divides the rows: every device steps all of them alike.
            if not axes:
                return run(*operands)
            hyper, rows, *rest = operands[:before]
            state, numbers = operands[before : before + 1 + slots], operands[before + 1 + slots :]
            held = state[0].shape[0]
            first = first_row(axes, held)
            if not casted:
                # Rows of other devices become padding where they stand. They come in any order: a core's step gives a
                # row for each slice, in its place, with padding between them.
                inside = (rows >= first) & (rows < first + held)
                own = jnp.where(inside, rows - first, jnp.int32(held))
                return run(hyper, own, *rest, *state, numbers[0] if numbers else rows)
            # A cast's rows ascend, so a device's rows are one run of segments, ``low`` to ``high``. It is rolled to the
            # front, since shapes are static; everything behind it becomes padding.
            low, high = (jnp.sum(rows < bound, dtype=jnp.int32) for bound in (first, first + held))
            place = jnp.arange(rows.shape[0], dtype=jnp.int32)
            own = jnp.where(place < high - low, jnp.roll(rows, -low) - first, jnp.int32(held))
            offsets, sources, positions, gradients, weights, _ = rest
            begin = offsets[low]
            # Offsets behind the device's last segment stay at its end, so that these segments are empty.
            ends = jnp.minimum(jnp.arange(offsets.shape[0], dtype=jnp.int32) + low, high)
            moved = [jnp.roll(array, -begin) for array in (sources, positions)]
            rest = [offsets[ends] - begin, *moved, gradients, weights, high - low]
            # Rounding hashes the numbers that the rows have in the whole table.
            return run(hyper, own, *rest, *state, jnp.roll(numbers[0] if numbers else rows, -low))

        of_rows = (PartitionSpec(axes or None),) * (1 + slots)
        return device, of_rows, ((PartitionSpec(),) * before + of_rows + (PartitionSpec(),) * num_after)

    return plan


def update_rule(operands: Sequence[jax.Array], casted: bool, slots: int) -> str:
    """Shardy's rule of an update: table and slots have the dimensions of their results, others have their own."""
    before = 8 if casted else 3
    names = []
    for number, operand in enumerate(operands):
        held = before <= number <= before + slots
        names.append(" ".join(f"d{i}" if held else f"o{number}_{i}" for i in range(operand.ndim)))
    return f"{', '.join(names)} -> {', '.join(names[before : before + 1 + slots])}"
