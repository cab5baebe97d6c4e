"""How the devices of one step work together: which of them compute, and what they sum and exchange.

Where a plan gives the tables to some devices, these skip the dense model's forward and backward pass, and its gradients
are summed over the others. So their copies of dense parameters are out of date and must not be read. State that leaves
the mesh goes through ``state_of_first``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend import core
from jax.sharding import Mesh, PartitionSpec

from jrec.errors import ConfigError
from jrec.mesh.allreduce import Reduce
from jrec.mesh.exchange import DEFAULT, Links
from jrec.mesh.route import AXIS
from jrec.random_keys import over_words

Computes = tuple[bool, ...] | None
"""Which devices of the mesh have examples, as in ``Plan``; None for all."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Communication:
    """What a step inside ``shard_map`` knows of the other devices; static.

    Attributes:
      reduce: How gradients of rows that all devices hold are summed; see ``shared_gradients``.
      links: How rows, sums and their gradients travel between devices.
      computes: The devices that run the dense model; the others get blank parts of the batch. None for all.
    """

    reduce: Reduce = "local"
    links: Links = DEFAULT
    computes: Computes = None

    @property
    def groups(self) -> list[list[int]] | None:
        """The devices that compute, and each other one by itself; None where all compute."""
        if self.computes is None:
            return None
        # XLA's groups have to name every device. One that stands by itself keeps its value, and waits for nobody.
        idle = ([d] for d, computing in enumerate(self.computes) if not computing)
        return [np.flatnonzero(self.computes).tolist(), *idle]

    def summed[T](self, tree: T) -> T:
        """Sums over the devices that compute; the others keep their own values."""
        return jax.lax.psum(tree, AXIS, axis_index_groups=self.groups)

    def once(self, value: jax.Array) -> jax.Array:
        """``value`` on the first device that computes, zero on the others: counts once what is equal on all of them."""
        # For sums of squares: replicated rows are stepped alike everywhere, but belong to the global norm once.
        first = 0 if self.computes is None else self.computes.index(True)
        return jnp.where(jax.lax.axis_index(AXIS) == first, value, jnp.zeros_like(value))

    def gathered(self, values: jax.Array) -> jax.Array:
        """(N * n, ...) on every device, from each device's (n, ...), in the order of the devices."""
        return jax.lax.all_gather(values, AXIS, tiled=True)

    def of_examples(self, values: jax.Array) -> jax.Array:
        """(batch, ...) on every device, from the (examples, ...) of each device that computes, in their order."""
        # All devices enter, those without examples too: their parts are cut out afterwards.
        every = self.gathered(values)
        if self.computes is None:
            return every
        by_device = every.reshape(len(self.computes), *values.shape)
        return by_device[np.flatnonzero(self.computes)].reshape(-1, *values.shape[1:])

    def where_computed[T](self, work: Callable[..., T]) -> Callable[..., T]:
        """The same function, which gives zeros on devices that do not compute.

        They skip the work. Where it has collectives over ``groups``, which all devices have to enter, they do it on
        blank examples, in the time for which they would wait.

        Raises:
          ConfigError: If the function has collectives over devices that do not compute, when it is called.
        """
        computes = self.computes
        if computes is None:
            return work

        def computed(*arguments: object) -> T:
            if not _has_collectives(jax.make_jaxpr(work)(*arguments).jaxpr):
                return only_on(computes, work, *arguments)
            # A ``cond`` would keep idle devices out of a collective that the others wait in, so all devices run the
            # work, and its results are dropped where they mean nothing.
            chosen = _chosen(computes)
            return jax.tree.map(lambda leaf: jnp.where(chosen, leaf, jnp.zeros_like(leaf)), work(*arguments))

        return computed


def only_on[T](devices: Sequence[bool], work: Callable[..., T], *arguments: object) -> T:
    """The result of ``work(*arguments)`` on some of the devices; zeros, at no cost, on the others.

    Args:
      devices: (N,), whether each device does the work. A memory-centric plan's other devices keep tables and skip the
        dense model.
      work: A function without collectives, since all devices would have to enter those.
      *arguments: Its arguments.
    """
    # Both branches of a ``cond`` need the same shapes and types; tracing ``work`` for them computes nothing.
    shapes = jax.eval_shape(work, *arguments)

    def nothing(*_: object) -> T:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    # Each device takes a branch of its own: ``work`` must have no collective, or those that skip it would be waited
    # for.
    return jax.lax.cond(_chosen(devices), work, nothing, *arguments)


def _chosen(devices: Sequence[bool]) -> jax.Array:
    return jnp.asarray(np.asarray(devices, bool))[jax.lax.axis_index(AXIS)]


def _has_collectives(jaxpr: core.Jaxpr) -> bool:
    """Whether devices exchange anything within a program.

    Raises:
      ConfigError: If all of them do, not groups of them.
    """
    exchanges = False
    for eqn in jaxpr.eqns:
        # A device's own number names the axis, but exchanges nothing.
        if eqn.primitive.name != "axis_index" and AXIS in (eqn.params.get("axis_name"), *eqn.params.get("axes", ())):
            if eqn.params.get("axis_index_groups") is None:
                raise ConfigError(
                    f"the model's logits or the loss have a collective ({eqn.primitive.name}) over all devices, but by"
                    " the plan some only keep tables and have no examples; leave it out, or take a plan without"
                    " `computes`"
                )
            exchanges = True
        # Collectives may stand inside loops, branches and functions of the program, whose jaxprs are parameters. The
        # call comes first, so that an inner collective over all devices is refused wherever it is.
        for inner in core.jaxprs_in_params(eqn.params):
            exchanges = _has_collectives(inner) or exchanges
    return exchanges


def state_of_first(mesh: Mesh, computes: tuple[bool, ...]) -> Callable[[nnx.State], nnx.State]:
    """A jitted function that copies the state of the first device that computes to all devices."""
    first, everywhere = computes.index(True), PartitionSpec()

    def of_first(leaf: jax.Array) -> jax.Array:
        return jax.lax.all_gather(leaf, AXIS)[first]

    def copied(state: nnx.State) -> nnx.State:
        return jax.tree.map(functools.partial(over_words, of_first), state)

    return jax.jit(jax.shard_map(copied, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False))
