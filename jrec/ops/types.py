"""Arrays that every embedding op speaks: bags of ids, and the cast that turns them around for the backward pass."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from typing import Any, Protocol

import jax
import jax.export


class TreeStructure(Protocol):
    """``jax.tree_util.PyTreeDef``, for which JAX declares no type: how leaves make a pytree again."""

    @property
    def num_leaves(self) -> int:
        """How many leaves there are."""
        ...

    def unflatten(self, leaves: Iterable[object], /) -> Any:
        """The pytree of these leaves."""
        ...

    def children(self) -> list[TreeStructure]:
        """The structures of what the outermost container holds."""
        ...


def array_record[T](cls: type[T]) -> type[T]:
    """Registers a dataclass of arrays as a pytree, which ``jax.export`` serializes by the class's name.

    Fields whose metadata say ``static`` are no arrays, but numbers, texts or None.
    """
    fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
    metas = [field.name for field in fields if field.metadata.get("static")]
    names = [field.name for field in fields if field.name not in metas]
    jax.tree_util.register_dataclass(cls, data_fields=names, meta_fields=metas)
    return jax.export.register_pytree_node_serialization(
        cls,
        serialized_name=f"jrec.{cls.__name__}",
        serialize_auxdata=lambda values: json.dumps(values).encode(),
        deserialize_auxdata=lambda text: tuple(json.loads(text)) if text else (None,) * len(metas),
        from_children=lambda aux_data, children: cls(
            **dict(zip([*metas, *names], [*aux_data, *children], strict=True))
        ),
    )


def known() -> Any:
    """A static field of an ``array_record``; None where it is not known."""
    return dataclasses.field(default=None, metadata={"static": True})


@array_record
@dataclasses.dataclass(frozen=True, kw_only=True)
class Cast:
    """The lookups of a batch sorted by row (Tensor Casting, Algorithm 2): the backward gather-reduce's indices.

    Segment ``u`` of the cast is table row ``rows[u]``; the gradient of that row is the sum of the bag gradients at
    ``sources[offsets[u]:offsets[u + 1]]``. The sort is stable, so lookups of one row keep their order in the batch
    and the float32 sums do not depend on who computed the cast, host or device.

    Attributes:
      rows: (unique_capacity,) int32, ascending unique rows; padding holds ``num_rows``, one past the table.
      offsets: (unique_capacity + 1,) int32, segment bounds in ``sources``; padded segments are empty.
      sources: (capacity,) int32, the bag of each sorted lookup; padding holds ``num_bags``.
      positions: (capacity,) int32, the flat position of each sorted lookup in the ids (``ARGSORT`` of the paper).
        Padding lookups come last, in ascending order.
      num_unique: () int32, how many entries of ``rows`` are real.
      num_rows: How many rows the table has, static; None where it is not known, as in casts of the loader. Updates
        refuse another table.
      num_bags: How many bags there are, static; None likewise. Updates refuse gradients of other bags.
    """

    rows: jax.Array
    offsets: jax.Array
    sources: jax.Array
    positions: jax.Array
    num_unique: jax.Array
    num_rows: int | None = known()
    num_bags: int | None = known()


@array_record
@dataclasses.dataclass(frozen=True, kw_only=True)
class Bags:
    """Ids grouped in bags, in one of two static shapes.

    *Padded*: ``ids`` is (num_bags, length) and ``offsets`` is None; negative ids are absent. ``lookup`` also takes
    (num_bags,), one id a bag. *Ragged* (CSR): ``ids`` is (capacity,), bag ``b`` owns ``ids[offsets[b]:offsets[b + 1]]``
    and what lies past ``offsets[-1]`` is padding.

    Attributes:
      ids: Row numbers, (num_bags, length) or (capacity,): int32, or for ``lookup`` and ``tt_lookup`` integers of any
        type. JAX wraps int64 ids that are given to a jitted function; convert them by ``jrec.checked_ids``.
      offsets: (num_bags + 1,) int32, ascending from 0 to at most the capacity, or None for padded bags.
      weights: float32 of the shape of ``ids``, or None for weights of one.
      cast: The cast of these ids where the loader computed it ahead of time, else None.
    """

    ids: jax.Array
    offsets: jax.Array | None = None
    weights: jax.Array | None = None
    cast: Cast | None = None

    @property
    def num_bags(self) -> int:
        """How many bags there are."""
        return self.ids.shape[0] if self.offsets is None else self.offsets.shape[0] - 1

    @property
    def capacity(self) -> int:
        """How many lookups fit, padding included."""
        return self.ids.size
