"""Tables in host memory of a run on one device, whose rows all lie there."""

from __future__ import annotations

from typing import Any

from jrec.host import HostTable
from jrec.ops import SGD
from jrec.ops.layout import EmbeddingLayout
from jrec.row_optimizers import RowOptimizers, optimizer_of
from jrec.train.build import table_key
from jrec.train.config import TrainConfig


def host_tables(config: TrainConfig, layout: EmbeddingLayout, optimizer: RowOptimizers | None) -> dict[str, HostTable]:
    """The rows of every stack of tier "host", as they begin: bit-identical to those of the same run on the device.

    Args:
      config: The run's configuration.
      layout: The tables.
      optimizer: The optimizer, or that of each stack, whose slots the rows have; None for none.

    Raises:
      ConfigError: If memory or ``tables.host.folder`` cannot hold them.
    """
    stacks = [stack for stack in layout.members if stack.tier == "host"]
    host, none = config.tables.host, SGD(learning_rate=0.0)
    how: dict[str, Any] = {"folder": host.folder or None, "threads": host.threads or None}
    return {s.name: HostTable(s, optimizer_of(optimizer, s.name) or none, table_key(config), **how) for s in stacks}
