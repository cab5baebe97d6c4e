"""Rows and gradients between devices: requests go out once a step, values then flow along them in either direction.

One device's values for the others lie in lines, (N, C, dim): line j is for device j. A *swap* exchanges them for the
other devices' lines for this device. Both directions are swaps: an owner's answers to requests, and
the gradients of the devices that asked.

"padded" moves whole lines by an all-to-all. "ragged" moves only their real beginnings by a ragged all-to-all, which
XLA has on GPUs; places that it does not fill are zero. With neither kind does the content of padding reach a row.

Values may travel in 16 bits (``Links``): each is rounded to nearest once, before it travels, and summed in float32.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from jrec.mesh.route import AXIS, GatherMap

Kind = Literal["padded", "ragged"]
KINDS: tuple[str, ...] = get_args(Kind)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Links:
    """How values travel between devices; static.

    Attributes:
      kind: "padded" or "ragged".
      rows: The dtype in which rows, and sums of rows, travel if it is narrower than their own; None for their own.
      gradients: The same of their gradients.
    """

    kind: Kind = "padded"
    rows: Literal["bfloat16", "float16"] | None = None
    gradients: Literal["bfloat16"] | None = None

    def itemsize(self, values: Literal["rows", "gradients"], own: int) -> int:
        """Bytes of an element that has ``own`` bytes, as it travels."""
        dtype = getattr(self, values)
        return own if dtype is None else min(own, jnp.dtype(dtype).itemsize)


DEFAULT = Links()


def check_kind(kind: str, platform: str) -> None:
    """Raises ValueError where ``kind`` is unknown, or the platform ("cpu", "gpu") does not have it."""
    if kind not in KINDS:
        raise ValueError(f"exchange {kind!r} is unknown; choose one of {', '.join(KINDS)}")
    if kind == "ragged" and platform == "cpu":
        raise ValueError("exchange 'ragged' needs XLA's ragged all-to-all, which it lacks on CPUs; use 'padded' there")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchange:
    """One step's requests between the devices, inside ``shard_map``.

    Attributes:
      asked: (N, C) int32, offsets in this device's shard: line i is what device i asks for; padding holds S + K or
        more.
      sends: (N,) int32, how many values this device asks of each other device.
      answers: (N,) int32, how many values each other device asks of this one.
      links: How values travel.
    """

    asked: jax.Array
    sends: jax.Array
    answers: jax.Array
    links: Links = dataclasses.field(metadata={"static": True})

    @staticmethod
    def open(remote: GatherMap, *, shard_rows: int, links: Links = DEFAULT) -> Exchange:
        """Sends the requests of a route.

        Args:
          remote: (N, C); real requests come first in each line.
          shard_rows: S + K, the rows that each device can give: its shard and its rows from host memory.
          links: How values will travel; requests, a fraction of their bytes, are always padded.

        Raises:
          ValueError: On an unknown kind.
        """
        check_kind(links.kind, "any")
        # Every later swap follows from these: both sides know how many lines are real without asking again.
        asked = swap_padded(remote.rows)
        count = jax.tree.map(lambda rows: jnp.sum(rows < shard_rows, axis=1, dtype=jnp.int32), (remote.rows, asked))
        return Exchange(asked=asked, sends=count[0], answers=count[1], links=links)

    def answer(self, values: jax.Array) -> jax.Array:
        """Rows to their asker: (N, C, ...) in the order of ``asked`` becomes (N, C, ...) in the order of requests."""
        return swap(values, self.answers, self.sends, kind=self.links.kind, dtype=self.links.rows)

    def deliver(self, values: jax.Array) -> jax.Array:
        """Gradients to the rows' owner: (N, C, ...) in the order of requests becomes one in the order of ``asked``.

        Integers, which say something of the rows, travel as they are.
        """
        return swap(values, self.sends, self.answers, kind=self.links.kind, dtype=self.links.gradients)


def swap(values: jax.Array, out: jax.Array, into: jax.Array, *, kind: Kind, dtype: str | None = None) -> jax.Array:
    """Sends line j of (N, C, ...) to device j, which receives device i's line as its line i.

    Args:
      values: The values to send; only the first ones of each line are real.
      out: (N,) int32, how many are real in each line.
      into: (N,) int32, how many each other device has for this one.
      kind: "padded" or "ragged".
      dtype: As what floating-point values of more bits travel; what arrives has the dtype of ``values``.
    """
    travelling = _narrowed(values, dtype)
    # Padding travels along, and whoever places the values drops it: no sizes are needed.
    arrived = swap_padded(travelling) if kind == "padded" else _swap_ragged(travelling, out, into)
    # Widened at once: what is computed from it is float32, so that each value is rounded once, for the way.
    return arrived.astype(values.dtype)


def _narrowed(values: jax.Array, dtype: str | None) -> jax.Array:
    """Floating-point values in a dtype of fewer bits, rounded to nearest; others as they are."""
    if dtype is None or not jnp.issubdtype(values.dtype, jnp.floating):
        return values
    # bfloat16 rows that are to travel in float16 stay what they are: neither holds all values of the other.
    if values.dtype.itemsize <= jnp.dtype(dtype).itemsize:
        return values
    most = jnp.finfo(dtype).max.astype(values.dtype)
    # float16 ends at 65,504: what is beyond it arrives as that, not as infinity.
    return (jnp.clip(values, -most, most) if dtype == "float16" else values).astype(dtype)


def swap_padded(values: jax.Array) -> jax.Array:
    """Sends line j of (N, ...) to device j, which receives device i's line as its line i."""
    return jax.lax.all_to_all(values, AXIS, split_axis=0, concat_axis=0, tiled=True)


def _swap_ragged(values: jax.Array, out: jax.Array, into: jax.Array) -> jax.Array:
    devices, line = values.shape[:2]
    flat = values.reshape(devices * line, *values.shape[2:])
    # The sender says where its values begin in the receiver's result: at the line of its own number, as after a padded
    # swap. Only the sizes differ between the kinds, never a place.
    starts = jnp.arange(devices, dtype=jnp.int32) * line
    own_line = jnp.full(devices, jax.lax.axis_index(AXIS) * line, jnp.int32)  # this device's line in each result
    # Zeros where nothing arrives: padding is read, though it reaches no row.
    moved = jax.lax.ragged_all_to_all(flat, jnp.zeros_like(flat), starts, out, own_line, into, axis_name=AXIS)
    return moved.reshape(values.shape)
