"""Tensor-train tables: cores in place of rows (TT-Rec), reuse and aggregation on unique prefixes (EL-Rec)."""

from jrec.ops.tt.cache import TTCache as TTCache
from jrec.ops.tt.cache import TTCacheConfig as TTCacheConfig
from jrec.ops.tt.cache import TTCachedResiduals as TTCachedResiduals
from jrec.ops.tt.cache import tt_cache_init as tt_cache_init
from jrec.ops.tt.cache import tt_cache_refresh as tt_cache_refresh
from jrec.ops.tt.cache import tt_cache_step as tt_cache_step
from jrec.ops.tt.cache import tt_cached_apply_gradients as tt_cached_apply_gradients
from jrec.ops.tt.cache import tt_cached_lookup as tt_cached_lookup
from jrec.ops.tt.cache_index import TTTracker as TTTracker
from jrec.ops.tt.contract import TTResiduals as TTResiduals
from jrec.ops.tt.cost import TTChoice as TTChoice
from jrec.ops.tt.cost import TTTraffic as TTTraffic
from jrec.ops.tt.cost import explain as explain
from jrec.ops.tt.decompose import TTDecomposition as TTDecomposition
from jrec.ops.tt.decompose import tt_dense_chunks as tt_dense_chunks
from jrec.ops.tt.decompose import tt_rows as tt_rows
from jrec.ops.tt.decompose import tt_svd as tt_svd
from jrec.ops.tt.decompose import tt_to_dense as tt_to_dense
from jrec.ops.tt.embedding_bag import tt_embedding_bag as tt_embedding_bag
from jrec.ops.tt.init import tt_init as tt_init
from jrec.ops.tt.lookup import tt_apply_gradients as tt_apply_gradients
from jrec.ops.tt.lookup import tt_core_gradients as tt_core_gradients
from jrec.ops.tt.lookup import tt_init_slots as tt_init_slots
from jrec.ops.tt.lookup import tt_lookup as tt_lookup
from jrec.ops.tt.shape import TTShape as TTShape
