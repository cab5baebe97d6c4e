"""Tables in host memory of a run on one device, whose rows all lie there."""

from __future__ import annotations

from jrec.host import HostTable
from jrec.ops import SGD
from jrec.ops.layout import EmbeddingLayout
from jrec.ops.row_optimizers import RowOptimizer
from jrec.train.build import table_key
from jrec.train.config import TrainConfig


def host_tables(config: TrainConfig, layout: EmbeddingLayout, optimizer: RowOptimizer | None) -> dict[str, HostTable]:
    """The rows of every stack of tier "host", as they begin: bit-identical to those of the same run on the device.

    Args:
      config: The run's configuration.
      layout: The tables.
      optimizer: Whose slots the rows have; None for none.

    Raises:
      ConfigError: If memory or ``tables.host.folder`` cannot hold them.
    """
    stacks = [stack for stack in layout.members if stack.tier == "host"]
    host, slots = config.tables.host, optimizer or SGD(learning_rate=0.0)
    folder, threads = host.folder or None, host.threads or None
    return {s.name: HostTable(s, slots, table_key(config), folder=folder, threads=threads) for s in stacks}
