"""What a row takes in memory, as a command's arguments or a run's configuration say."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

from jrec.errors import ConfigError

if TYPE_CHECKING:
    from jrec.app.config import TrainConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of a table.

    Attributes:
      dim: Elements of a row.
      dtype: Their dtype.
      slot_bytes: Bytes of the optimizer's slots of one row.
    """

    dim: int
    dtype: str = "float32"
    slot_bytes: int = 0

    def given(self, args: argparse.Namespace) -> Rows:
        """The rows with what ``--dim``, ``--dtype`` and ``--slot-bytes`` say."""
        return Rows(
            dim=self.dim if args.dim is None else args.dim,
            dtype=self.dtype if args.dtype is None else args.dtype,
            slot_bytes=self.slot_bytes if args.slot_bytes is None else args.slot_bytes,
        )


def rows_of(config: TrainConfig, table: str = "") -> Rows:
    """The rows of a run's table; "" for tables that the configuration does not name."""
    from jrec.row_optimizers import slot_bytes

    dim = config.model.table_dim
    slots = config.optimizer.embedding.slots(table)
    return Rows(dim=dim, dtype=config.model.table_dtype, slot_bytes=slot_bytes(slots, dim))


def check_row_arguments(path: str, rows: Rows, args: argparse.Namespace) -> None:
    """Refuses rows of another kind than the run's that is planned.

    Args:
      path: The configuration's file.
      rows: What it says.
      args: ``--dim`` and ``--dtype``.

    Raises:
      ConfigError: Naming the argument and both values.
    """
    for name, configured, value in (("dim", rows.dim, args.dim), ("dtype", rows.dtype, args.dtype)):
        if value not in (None, configured):
            raise ConfigError(
                f"--{name} is {value}, but {path} has rows of {name} {configured}, so that its run would refuse the"
                f" plan; leave --{name} out, or leave out --config"
            )
