"""The row optimizers, by the name that they had before they were said below JAX; see ``jrec.row_optimizers``."""

from jrec.row_optimizers import RowOptimizer as RowOptimizer
from jrec.row_optimizers import Slots as Slots
from jrec.row_optimizers import SlotShape as SlotShape
