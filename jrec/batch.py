"""A mini-batch, as the loader makes it and the training step takes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import ClassVar, NoReturn

import jax

from jrec.data.schema import DatasetError
from jrec.ops.types import Bags


@jax.tree_util.register_pytree_with_keys_class
class Extras(dict[str, jax.Array]):
    """Further arrays of a batch, which say how to get one that is not there."""

    def __missing__(self, name: str) -> NoReturn:
        raise DatasetError(
            f"the batch has no further column {name!r}; there are {'only ' if self else ''}"
            f"{', '.join(sorted(self)) or 'none'}: name it where batches are made, as in"
            f" run.feed(batches, extras=[{name!r}]) or pack_batch(..., extras=[{name!r}])"
        )

    def tree_flatten_with_keys(self) -> tuple[list[tuple[object, jax.Array]], tuple[str, ...]]:
        """Arrays in the order of their names, as JAX flattens a dict."""
        names = tuple(sorted(self))
        return [(jax.tree_util.DictKey(name), self[name]) for name in names], names

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], arrays: Iterable[jax.Array]) -> Extras:
        """The inverse."""
        return cls(zip(names, arrays, strict=True))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """One mini-batch of click-log examples. All arrays are NumPy on the host and JAX on the device.

    Attributes:
      dense: (batch, num_dense) float32.
      labels: (batch,) float32 in {0, 1}.
      mask: (batch,) float32, an example's weight, 1 where it has none of its own; 0 for a row that pads the last batch
        to its static size. Losses and metrics take means by it.
      bags: Per embedding stack (see ``jrec.ops.layout``) the addresses of its lookups, feature-major.
      extras: Further arrays by name, (batch, ...), zeros in rows of padding: sample weights, groups, a second label.
        Whatever cuts, joins or pads a batch does so to them; a loss may use them.
      packed: Whether ``jrec.data`` packed it, in arrays of its own; no field, so that what is made of it has it not.
    """

    packed: ClassVar[bool] = False

    dense: jax.Array
    labels: jax.Array
    mask: jax.Array
    bags: dict[str, Bags]
    extras: dict[str, jax.Array] = dataclasses.field(default_factory=Extras)

    def __post_init__(self) -> None:
        if type(self.extras) is dict:
            object.__setattr__(self, "extras", Extras(self.extras))
