"""Deep recommendation models with huge embedding tables, trained in JAX.

Names are imported when first used, so that the ``jrec`` command answers before JAX is loaded.
"""

from typing import TYPE_CHECKING

import jrec.moved  # noqa: F401 (import paths of 0.1.0 that moved)
from jrec.lazy import attach

if TYPE_CHECKING:
    from jrec import access as access
    from jrec import checkpoint as checkpoint
    from jrec import data as data
    from jrec import host as host
    from jrec import nn as nn
    from jrec import ops as ops
    from jrec import optax as optax
    from jrec import serving as serving
    from jrec import sharding as sharding
    from jrec import table_files as table_files
    from jrec.app import imports as imports
    from jrec.app.fit import FittedModel as FittedModel
    from jrec.app.fit import fit as fit
    from jrec.app.predict import load_run as load_run
    from jrec.batch import Batch as Batch
    from jrec.memory import keep_freed_memory as keep_freed_memory
    from jrec.ops import Bags as Bags
    from jrec.ops import Cast as Cast
    from jrec.ops import TTShape as TTShape
    from jrec.ops import apply_gradients as apply_gradients
    from jrec.ops import checked_ids as checked_ids
    from jrec.ops import embedding_bag as embedding_bag
    from jrec.ops import gather_reduce as gather_reduce
    from jrec.ops import init_slots as init_slots
    from jrec.ops import lookup as lookup
    from jrec.ops import tensor_cast as tensor_cast
    from jrec.ops import tt_embedding_bag as tt_embedding_bag
    from jrec.ops.layout import EmbeddingLayout as EmbeddingLayout
    from jrec.ops.layout import FeatureConfig as FeatureConfig
    from jrec.ops.layout import TableConfig as TableConfig
    from jrec.ops.table import RowGradients as RowGradients
    from jrec.ops.table import Table as Table
    from jrec.run.distribute import distribute as distribute
    from jrec.run.options import HostOptions as HostOptions
    from jrec.run.options import MeshOptions as MeshOptions
    from jrec.run.run import Run as Run

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = attach(__name__)
