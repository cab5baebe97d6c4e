"""BatchNorm over the real examples of a batch, on one device or many."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


class BatchNorm(nnx.BatchNorm):
    """``nnx.BatchNorm`` whose statistics under a mask are right on a mesh: devices count by their real examples.

    Flax averages the devices' own means, whatever number of examples each is of, and is NaN where a device has none.
    Steps give every ``nnx.BatchNorm`` of a model this ``__call__`` for their duration. Without a mask nothing differs.
    """

    def __call__(
        self, x: jax.Array, use_running_average: bool | None = None, *, mask: jax.Array | None = None
    ) -> jax.Array:
        """Normalizes, as ``nnx.BatchNorm`` does.

        Args:
          x: The input.
          use_running_average: Whether to use the stored statistics; None for the layer's own mode.
          mask: The elements that count, bool of a shape that broadcasts to the shape of ``x``. Where none
            counts, statistics stay as they are. None counts all.
        """
        frozen = self.use_running_average if use_running_average is None else use_running_average
        if mask is None or frozen:
            return super().__call__(x, frozen)
        if not isinstance(self.axis, int):
            raise ValueError(f"BatchNorm with a mask has one feature axis, but axis is {self.axis}")
        axes = tuple(axis for axis in range(x.ndim) if axis != self.axis % x.ndim)
        values, counted = jnp.asarray(x, jnp.promote_types(x.dtype, jnp.float32)), jnp.broadcast_to(mask, x.shape)
        # Count, sum and squares in one array, so that a mesh sums them by one collective.
        parts = [jnp.ones_like(values), values, jnp.square(values)]
        sums = jnp.stack([jnp.sum(part, axes, where=counted) for part in parts])
        if self.axis_name is not None:
            sums = jax.lax.psum(sums, self.axis_name, axis_index_groups=self.axis_index_groups)
        count, mean, square = sums[0], sums[1] / jnp.maximum(sums[0], 1), sums[2] / jnp.maximum(sums[0], 1)
        # One pass over the batch, as Flax's fast variance; rounding may take the difference below zero.
        variance = jnp.maximum(square - jnp.square(mean), 0)
        for stored, batch_value in ((self.mean, mean), (self.var, variance)):
            moved = self.momentum * stored[...] + (1 - self.momentum) * batch_value.astype(stored.dtype)
            stored[...] = jax.lax.stop_gradient(jnp.where(count > 0, moved, stored[...]))
        scale = jax.lax.rsqrt(variance + self.epsilon)
        scale = scale if self.scale is None else scale * self.scale[...].astype(scale.dtype)
        out = (values - jnp.expand_dims(mean, axes)) * jnp.expand_dims(scale, axes)
        if self.bias is not None:
            out += jnp.expand_dims(self.bias[...].astype(out.dtype), axes)
        return out if self.dtype is None else out.astype(self.dtype)
