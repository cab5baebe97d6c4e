"""GPU kernels of tensor-train tables: a level's products, their gradients, and the last level fused with pooling."""

from jrec.pallas.tt.level import bags as bags
from jrec.pallas.tt.level import expand as expand
from jrec.pallas.tt.level import expand_transpose as expand_transpose
