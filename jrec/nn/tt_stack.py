"""A tensor-train table among the stacks of a model: its cores, and the two phases of a step on them."""

from __future__ import annotations

import dataclasses
import zlib

import jax
from flax import nnx

from jrec.ops import rounding
from jrec.ops.dispatch import Implementation
from jrec.ops.layout import Stack
from jrec.ops.row_init import table_key
from jrec.ops.row_optimizers import RowOptimizer, Slots
from jrec.ops.tt import TTResiduals, TTShape, tt_apply_gradients, tt_init, tt_init_slots, tt_lookup
from jrec.ops.tt.init import Cores, Initializer
from jrec.ops.types import Bags


@dataclasses.dataclass(frozen=True, kw_only=True)
class TTOptions:
    """What the tensor-train tables of a model have in common.

    Attributes:
      initializer: of the cores, see ``tt_init``.
    """

    initializer: Initializer = "sampled_gaussian"


class TTCore(nnx.Variable):
    """A core of a tensor-train table. Not an ``nnx.Param``: it is updated in the backward pass, as a ``Table`` is."""


class TTStack(nnx.Module):
    """A tensor-train table whose cores a row optimizer updates in place; ``EmbeddingCollection`` makes it.

    (``TTEmbeddingBag`` is the module to use alone, with gradients and any optax optimizer.)

    Args:
      stack: of tier "tt".
      key: of the collection's initial parameters; the cores follow from it and the table's name.
      options: see ``TTOptions``.
      implementation: of the ops; None for the platform's fastest.
    """

    def __init__(
        self, stack: Stack, key: jax.Array, *, options: TTOptions, implementation: Implementation | None = None
    ):
        if stack.tt_shape is None:
            raise ValueError(f"stack {stack.name} is of tier {stack.tier!r}, not a tensor-train table")
        self.name = stack.name
        self.shape: TTShape = stack.tt_shape
        self.implementation: Implementation | None = implementation
        cores = tt_init(
            self.shape, table_key(key, stack.tables[0].name), initializer=options.initializer, dtype=stack.dtype
        )
        self.cores = nnx.List([TTCore(core) for core in cores])

    def arrays(self) -> Cores:
        """The cores as plain arrays."""
        return tuple(core[...] for core in self.cores)

    def set_arrays(self, cores: Cores) -> None:
        """Replaces the cores."""
        for variable, core in zip(self.cores, cores, strict=True):
            variable[...] = core

    def lookup(self, bags: Bags) -> tuple[jax.Array, TTResiduals]:
        """Phase one: activations (num_bags, dim) float32, and what ``apply_gradients`` needs."""
        return tt_lookup(self.arrays(), self.shape, bags, implementation=self.implementation)

    def init_slots(self, optimizer: RowOptimizer) -> Slots:
        """Fresh slots of all cores, by core and name."""
        return _named(tt_init_slots(optimizer, self.arrays()))

    def apply_gradients(
        self,
        optimizer: RowOptimizer,
        slots: Slots,
        residuals: TTResiduals,
        gradients: jax.Array,
        *,
        step: jax.Array | int = 0,
        rounding_key: jax.Array | None = None,
    ) -> Slots:
        """Phase two, in place on the cores; see ``tt_apply_gradients``.

        Args:
          optimizer: to which a slice of a core is a row.
          slots: as ``init_slots`` makes them.
          residuals: from ``lookup``.
          gradients: (num_bags, dim) float32, of the activations.
          step: () int32, how many steps were taken before.
          rounding_key: (2,) uint32 of this step, the same for all tables; None rounds bfloat16 cores to nearest.

        Returns:
          The new slots.
        """
        if rounding_key is not None:
            rounding_key = rounding.derived_key(rounding_key, zlib.crc32(self.name.encode()))
        cores, new_slots = tt_apply_gradients(
            optimizer,
            self.arrays(),
            _by_core(slots, self.shape.num_cores),
            self.shape,
            residuals,
            gradients,
            step=step,
            rounding_key=rounding_key,
            implementation=self.implementation,
        )
        self.set_arrays(cores)
        return _named(new_slots)


def _named(slots: tuple[Slots, ...]) -> Slots:
    return {f"core{k}_{name}": slot for k, of in enumerate(slots) for name, slot in of.items()}


def _by_core(slots: Slots, cores: int) -> tuple[Slots, ...]:
    """The inverse of ``_named``."""
    prefixes = [f"core{k}_" for k in range(cores)]
    return tuple({name.removeprefix(p): slot for name, slot in slots.items() if name.startswith(p)} for p in prefixes)
