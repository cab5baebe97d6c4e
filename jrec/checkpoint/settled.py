"""Rows that an exact optimizer stored in a checkpoint, read as others need them: current, or stored otherwise."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jrec.checkpoint.manifest import VALUES
from jrec.json_values import JsonMapping, JsonObject
from jrec.ops.current_rows import current_on_host, settled_on_host
from jrec.row_optimizers import LAST, ROW_OPTIMIZERS, RowOptimizer

SETTLED = "settled"
"""The key of a checkpoint's meta where ``Settled.meta`` are, by table."""
Arrays = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settled:
    """What the rows of a table in a checkpoint are read with, if an exact optimizer stored them.

    They lie where they would come to rest (``jrec.row_optimizers.Exact``), by the learning rates of the steps that were
    to come: a run of another length or schedule must not read them with its own.

    Attributes:
      optimizer: The optimizer, of which the learning rate counts only where rows decay by it.
      step: How many steps it took.
      numbers: Its ``tail_numbers`` then.
    """

    optimizer: RowOptimizer
    step: int
    numbers: tuple[float, ...]

    @staticmethod
    def of(optimizer: RowOptimizer, step: int) -> Settled:
        """Of rows after ``step`` steps."""
        numbers = _numbers(optimizer, jnp.int32(step))
        return Settled(optimizer=optimizer, step=step, numbers=tuple(map(float, np.asarray(numbers))))

    def meta(self) -> JsonObject:
        """JSON."""
        kept = ["weight_decay", *(field.name for field in self.optimizer.hyperparameters())]
        rate = self.optimizer.learning_rate
        values = {name: getattr(self.optimizer, name) for name in kept} | {
            "learning_rate": 0.0 if callable(rate) else rate
        }
        return {"name": self.optimizer.name, **values, "step": self.step, "numbers": list(self.numbers)}

    @staticmethod
    def from_meta(meta: JsonMapping) -> Settled:
        """The inverse of ``meta``."""
        values = dict(meta)
        kind, step, numbers = ROW_OPTIMIZERS[values.pop("name")], values.pop("step"), values.pop("numbers")
        return Settled(optimizer=kind(**values), step=step, numbers=tuple(numbers))

    def read_by(self, wanted: RowOptimizer | None) -> Conversion | None:
        """What a run does to the rows that it reads.

        Args:
          wanted: The optimizer that will go on with the rows and their slots; None to read current rows, without slots.

        Returns:
          None if they are stored as it needs them.
        """
        if wanted is None:
            return Conversion(self, None)
        if not wanted.has_tail:
            return None
        same = wanted.row_decay == self.optimizer.row_decay and wanted.slot_decays == self.optimizer.slot_decays
        own, greatest = Settled.of(wanted, self.step).numbers, max(map(abs, self.numbers), default=0.0)
        # Another device may round exponentials otherwise; another schedule differs by more.
        same = same and np.allclose(own, self.numbers, rtol=1e-5, atol=1e-5 * greatest)
        return None if same else Conversion(self, wanted)


@dataclasses.dataclass(frozen=True)
class Conversion:
    """Reads rows that were stored by ``before`` as ``wanted`` stores them, or current."""

    before: Settled
    wanted: RowOptimizer | None

    @property
    def moves_first_values(self) -> bool:
        """Whether rows that no step touched differ, too: where rows decay in all steps."""
        return self.before.optimizer.row_decay != 1 or (self.wanted is not None and self.wanted.row_decay != 1)

    def __call__(self, arrays: Arrays) -> dict[str, np.ndarray]:
        """The values and all slots of some rows."""
        slots, before = {name: array for name, array in arrays.items() if name != VALUES}, self.before
        numbers = np.asarray(before.numbers, np.float32)
        values = current_on_host(before.optimizer, arrays[VALUES], slots, before.step, numbers)
        if self.wanted is None:
            return {**arrays, VALUES: values}
        # Steps in which the row was not read: its slots decay in them, too, once it is read.
        missed = (before.step - slots[LAST]).astype(np.float32)
        for name, decay in before.optimizer.slot_decays.items():
            powers = np.power(np.float32(decay), missed)
            slots[name] = slots[name] * (powers[:, None] if slots[name].ndim == 2 else powers)
        slots[LAST] = np.full_like(missed, before.step)
        return {VALUES: settled_on_host(self.wanted, values, slots, before.step), **slots}


_numbers = jax.jit(lambda optimizer, step: optimizer.tail_numbers(step), static_argnums=0)
