"""Ops on arrays whose types say how a mesh divides them: within an op XLA divides the work, as over Auto axes.

``jax.make_mesh`` makes Explicit axes, over which JAX asks every primitive how its result is divided. An op knows that
of its own results: bags are divided as their ids are, and new tables as the old ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jaxtyping import PyTree


def auto_inside[**Args, Result](
    divided: Callable[..., PyTree[PartitionSpec]],
) -> Callable[[Callable[Args, Result]], Callable[Args, Result]]:
    """Has an op run under Auto axes where its arguments are of a mesh with Explicit ones; else it is as it was.

    Args:
      divided: From the op's arguments, which it has checked, a PartitionSpec for each of its results, or one for
        several of them.
    """

    def decorated(op: Callable[Args, Result]) -> Callable[Args, Result]:
        @functools.wraps(op)
        def door(*args: Args.args, **kwargs: Args.kwargs) -> Result:
            original = args, kwargs
            leaves, structure = jax.tree.flatten(original)
            mesh = _explicit_mesh(leaves)
            if mesh is None:
                return op(*args, **kwargs)
            auto = mesh.update_axis_types(dict.fromkeys(mesh.explicit_axes, AxisType.Auto))
            with jax.sharding.use_abstract_mesh(auto):
                inside = [jax.sharding.reshard(x, PartitionSpec()) if isinstance(x, jax.Array) else x for x in leaves]
                args, kwargs = jax.tree.unflatten(structure, inside)
                results = op(*args, **kwargs)
            specs = divided(*original[0], **original[1])
            is_spec = {"is_leaf": lambda node: isinstance(node, PartitionSpec)}
            return jax.sharding.reshard(results, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, **is_spec))

        return door

    return decorated


def like(values: PyTree) -> PyTree[PartitionSpec]:
    """How each array of a pytree is divided."""
    return jax.tree.map(_spec, values)


def like_bags(ids: object, offsets: object = None, table: object = None) -> PartitionSpec:
    """How the sums of bags are divided: padded bags as their ids, and columns as the table's where bags leave the axis.

    Args:
      ids: As for ``embedding_bag``, as are ``offsets``.
      offsets: None for padded bags.
      table: (rows, dim), or None where nothing divides columns.
    """
    of_ids = tuple(_spec(ids))
    bags = (None,) if offsets is not None else of_ids[:1] if len(of_ids) < 2 else of_ids[:-1]
    # An axis divides one dimension of an array: columns give way to bags.
    taken = {axis for entry in bags for axis in _axes(entry)}
    columns = [None if taken & _axes(entry) else entry for entry in tuple(_spec(table))[1:]]
    return PartitionSpec(*bags, *columns)


def _spec(array: object) -> PartitionSpec:
    return jax.typeof(array).sharding.spec if isinstance(array, jax.Array) else PartitionSpec()


def _axes(entry: str | tuple[str, ...] | None) -> set[str]:
    return set() if entry is None else set(entry) if isinstance(entry, tuple) else {entry}


def _explicit_mesh(leaves: Iterable[object]) -> AbstractMesh | None:
    """The arrays' mesh if it has Explicit axes, be it over what ``vmap`` maps, which an array's own spec leaves out."""
    meshes = (jax.typeof(leaf).sharding.mesh for leaf in leaves if isinstance(leaf, jax.Array))
    return next((mesh for mesh in meshes if mesh.explicit_axes), None)
