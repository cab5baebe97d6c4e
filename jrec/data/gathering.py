"""The examples of a batch, gathered but not packed: of tables that grow, keys get their rows in between."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import override

from jrec.batch import Batch
from jrec.data.packers import PackerWrapper
from jrec.data.packing import EXAMPLE, CastPlace, Packer, Where
from jrec.data.packing_columns import PreparedColumns, join


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Gathered:
    """What ``Packer.pack`` makes a batch of.

    Attributes:
      packer: The packer.
      columns: The batch's examples, in order.
      batch_size: The static size of the batch.
      where: Names the place of an example, for messages.
    """

    packer: Packer
    columns: PreparedColumns
    batch_size: int
    where: Where

    def pack(self) -> Batch:
        """The batch."""
        return self.packer.pack(self.columns, self.batch_size, self.where)


def joined(pieces: Sequence[tuple[Gathered, int, int]]) -> Gathered:
    """Some places of some batches, as one batch; padding goes to its end.

    Args:
      pieces: (batch, first place, last + 1).
    """
    held = []
    for batch, begin, stop in pieces:
        examples = batch.columns.examples
        # Places of padding hold no example, and are padding of the joined batch.
        held.append((batch, range(min(begin, examples), min(stop, examples))))

    def where(k: int) -> str:
        for batch, places in held:
            if k < len(places):
                return batch.where(places[k])
            k -= len(places)
        raise IndexError(k)

    columns = join([batch.columns.cut(places.start, places.stop) for batch, places in held])
    size = sum(stop - begin for _, begin, stop in pieces)
    return Gathered(packer=pieces[0][0].packer, columns=columns, batch_size=size, where=where)


class Gathering(PackerWrapper[Packer]):
    """Takes the place of a loader's packer: its batches are ``Gathered``.

    Args:
      packer: Says which columns are read, checks them, and packs what was gathered.
    """

    @property
    @override
    def cast(self) -> CastPlace:
        return "none"

    @override
    def pack(self, columns: PreparedColumns, batch_size: int, where: Where = EXAMPLE, *, number: int = 0) -> Gathered:
        del number
        return Gathered(packer=self._packer, columns=columns, batch_size=batch_size, where=where)
