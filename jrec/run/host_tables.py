"""Tables with all rows in host memory, for a run on one device."""

from __future__ import annotations

from typing import Any

import jax

from jrec.host import HostTable
from jrec.ops import SGD
from jrec.ops.layout import EmbeddingLayout
from jrec.row_optimizers import RowOptimizers, optimizer_of
from jrec.run.options import HostOptions


def host_tables(
    layout: EmbeddingLayout, key: jax.Array, optimizer: RowOptimizers | None, host: HostOptions
) -> dict[str, HostTable]:
    """The initial rows of every stack in host memory: bit-identical to the same run's rows on the device.

    Args:
      layout: The tables.
      key: The key of the model's tables.
      optimizer: One optimizer for all rows, or one for each stack, which determines their slots; None without slots.
      host: Where and how they are kept.

    Raises:
      ConfigError: If memory or ``host.folder`` cannot hold them.
    """
    none = SGD(learning_rate=0.0)
    options: dict[str, Any] = {"folder": host.folder or None, "threads": host.threads or None}
    return {s.name: HostTable(s, optimizer_of(optimizer, s.name) or none, key, **options) for s in layout.host_stacks}
