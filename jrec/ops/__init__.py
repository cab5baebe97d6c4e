"""Functional embedding operations over plain arrays: lookups, casts, gather-reduces and row updates."""

from jrec.ops.embedding_bag import embedding_bag as embedding_bag
from jrec.ops.gather_reduce import gather_reduce as gather_reduce
from jrec.ops.lookup import Residuals as Residuals
from jrec.ops.lookup import apply_gradients as apply_gradients
from jrec.ops.lookup import init_slots as init_slots
from jrec.ops.lookup import lookup as lookup
from jrec.ops.row_optimizers import SGD as SGD
from jrec.ops.row_optimizers import Adagrad as Adagrad
from jrec.ops.row_optimizers import Adam as Adam
from jrec.ops.row_optimizers import Momentum as Momentum
from jrec.ops.row_optimizers import RMSProp as RMSProp
from jrec.ops.row_optimizers import RowOptimizer as RowOptimizer
from jrec.ops.row_optimizers import RowWiseAdagrad as RowWiseAdagrad
from jrec.ops.row_update import casted_update as casted_update
from jrec.ops.row_update import row_update as row_update
from jrec.ops.tensor_cast import tensor_cast as tensor_cast
from jrec.ops.tt import TTShape as TTShape
from jrec.ops.tt import tt_apply_gradients as tt_apply_gradients
from jrec.ops.tt import tt_core_gradients as tt_core_gradients
from jrec.ops.tt import tt_embedding_bag as tt_embedding_bag
from jrec.ops.tt import tt_init as tt_init
from jrec.ops.tt import tt_init_slots as tt_init_slots
from jrec.ops.tt import tt_lookup as tt_lookup
from jrec.ops.types import Bags as Bags
from jrec.ops.types import Cast as Cast
