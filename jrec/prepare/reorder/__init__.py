"""Reordering the rows of a dataset's tables, so that the lookups of a batch share more (EL-Rec, §IV)."""

from typing import TYPE_CHECKING

from jrec.lazy import attach

if TYPE_CHECKING:
    from jrec.prepare.reorder.driver import Outcome as Outcome
    from jrec.prepare.reorder.driver import reorder as reorder
    from jrec.prepare.reorder.driver import restore as restore
    from jrec.prepare.reorder.driver import summary as summary
    from jrec.prepare.reorder.options import ReorderOptions as ReorderOptions

__getattr__, __dir__, __all__ = attach(__name__)
