"""Flax NNX modules of recommendation models: embedding tables, interaction, DLRM, TBSM, and their two-phase step."""

from jrec.nn.cross import CrossNetwork as CrossNetwork
from jrec.nn.dlrm import DLRM as DLRM
from jrec.nn.dlrm import DLRMConfig as DLRMConfig
from jrec.nn.embeddings import EmbeddingCollection as EmbeddingCollection
from jrec.nn.embeddings import Table as Table
from jrec.nn.interaction import concat_interaction as concat_interaction
from jrec.nn.interaction import dot_interaction as dot_interaction
from jrec.nn.interaction import fm_interaction as fm_interaction
from jrec.nn.mlp import MLP as MLP
from jrec.nn.optimizer import SparseOptimizer as SparseOptimizer
from jrec.nn.optimizer import binary_cross_entropy as binary_cross_entropy
from jrec.nn.step import accumulated_step as accumulated_step
from jrec.nn.step import train_step as train_step
from jrec.nn.tbsm import TBSM as TBSM
from jrec.nn.tbsm import TBSMConfig as TBSMConfig
from jrec.nn.tt import TTEmbed as TTEmbed
from jrec.nn.tt import TTEmbeddingBag as TTEmbeddingBag
from jrec.nn.tt_stack import CacheHits as CacheHits
from jrec.nn.tt_stack import TTCore as TTCore
from jrec.nn.tt_stack import TTOptions as TTOptions
