"""What makes batches of columns: a packer, and wrappers of one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from jrec.data.packed_window import PackedWindow
from jrec.data.packing import EXAMPLE, CastPlace, Where
from jrec.data.packing_columns import PreparedColumns


class AnyPacker(Protocol):
    """``jrec.data.packing.Packer``, or a wrapper of one."""

    @property
    def cast(self) -> CastPlace:
        """Where the cast is computed."""
        ...

    @property
    def columns(self) -> list[str]:
        """The names of the columns that packing reads."""
        ...

    def prepare(self, columns: Any) -> PreparedColumns:
        """Checks columns, and brings them into the form that ``pack`` reads."""
        ...

    def pack(self, columns: PreparedColumns, batch_size: int, where: Where = ..., *, number: int = 0) -> Any:
        """Packs examples into a batch; see ``Packer``."""
        ...

    def window(self, columns: PreparedColumns, batch_size: int) -> PackedWindow | None:
        """All examples packed together, for ``batch_of`` to make what ``pack`` does; None where ``pack`` is called."""
        ...


def packed(packer: AnyPacker, columns: PreparedColumns, batch_size: int) -> Iterator[Any]:
    """Prepared columns as batches of one size, the last of which is padded."""
    for begin in range(0, columns.examples, batch_size):
        yield packer.pack(columns.cut(begin, min(begin + batch_size, columns.examples)), batch_size)


class PackerWrapper[P: AnyPacker]:
    """Does what the packer that it wraps does. Subclasses override the methods that they change.

    Args:
      packer: The wrapped packer.
    """

    def __init__(self, packer: P):
        self._packer = packer

    @property
    def cast(self) -> CastPlace:
        """Where the cast is computed."""
        return self._packer.cast

    @property
    def columns(self) -> list[str]:
        """The names of the columns that packing reads."""
        return self._packer.columns

    def prepare(self, columns: Any) -> PreparedColumns:
        """Checks columns, and brings them into the form that ``pack`` reads."""
        return self._packer.prepare(columns)

    def pack(self, columns: PreparedColumns, batch_size: int, where: Where = EXAMPLE, *, number: int = 0) -> Any:
        """Packs examples into a batch; see ``Packer``. ``number`` is the batch's among all of a run."""
        return self._packer.pack(columns, batch_size, where, number=number)

    def window(self, columns: PreparedColumns, batch_size: int) -> PackedWindow | None:
        """None: ``pack`` is called for every batch, since subclasses change it."""
        del columns, batch_size
