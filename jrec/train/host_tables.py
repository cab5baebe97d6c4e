"""Tables with all rows in host memory, for a run on one device."""

from __future__ import annotations

from typing import Any

from jrec.host import HostTable
from jrec.ops import SGD
from jrec.ops.layout import EmbeddingLayout
from jrec.row_optimizers import RowOptimizers, optimizer_of
from jrec.train.build import table_key
from jrec.train.config import TrainConfig


def host_tables(config: TrainConfig, layout: EmbeddingLayout, optimizer: RowOptimizers | None) -> dict[str, HostTable]:
    """The initial rows of every stack in host memory: bit-identical to the same run's rows on the device.

    Args:
      config: The run's configuration.
      layout: The tables.
      optimizer: One optimizer for all rows, or one for each stack, which determines their slots; None without slots.

    Raises:
      ConfigError: If memory or ``tables.host.folder`` cannot hold them.
    """
    host, none = config.tables.host, SGD(learning_rate=0.0)
    options: dict[str, Any] = {"folder": host.folder or None, "threads": host.threads or None}
    return {
        s.name: HostTable(s, optimizer_of(optimizer, s.name) or none, table_key(config), **options)
        for s in layout.host_stacks
    }
