"""Annotations of the arrays that public functions take and give: dtypes, and names of dimensions.

Dimensions of one name are equal within a call, and ``_`` is any. They are documentation, which tests check; what calls
check of them is in ``jrec.ops.doors``. NumPy arrays are taken for JAX's everywhere, as ``jit`` does.
"""

from __future__ import annotations

import numpy as np
from jax import Array
from jaxtyping import Float, Float32, Int32, Integer, UInt32

_Arrays = Array | np.ndarray

Table = Float[Array, "rows width"]
"""Rows as they are stored, float32, bfloat16 or float16; ``width`` is the dim, or more where rows are padded."""
Ids = Int32[Array, "num_bags length"] | Int32[Array, "capacity"]
"""Row numbers, in padded bags or in ragged ones with ``Offsets``."""
AnyIds = (
    Integer[_Arrays, "num_bags length"] | Integer[_Arrays, "capacity"] | Integer[_Arrays, "batch features *more length"]
)
"""Row numbers of any integer type: ``Ids``, one id a bag, or padded bags of several features."""
AnyOffsets = Integer[_Arrays, "bounds"]
"""``Offsets`` of any integer type."""
AnyWeights = (
    Float32[_Arrays, "num_bags length"] | Float32[_Arrays, "capacity"] | Float32[_Arrays, "batch features *more length"]
)
"""A weight for each of ``AnyIds``."""
AnyBagged = Float32[Array, "num_bags dim"] | Float32[Array, "batch features *more dim"]
"""Pooled rows of ``AnyIds``."""
Offsets = Int32[Array, "bounds"]
"""Where ragged bags begin, and where the last one ends: one more than there are bags."""
Weights = Float32[Array, "num_bags length"] | Float32[Array, "capacity"]
"""A weight for each id, of the ids' shape."""
Bagged = Float32[Array, "num_bags dim"]
"""Pooled rows, or the gradients of them."""
Rows = Int32[Array, "unique"]
"""Ascending, unique row numbers, padded."""
RowGradients = Float32[Array, "unique dim"]
"""The gradients of ``Rows``."""
Step = Int32[Array, ""] | int
"""The number of steps taken before."""
Scale = Float32[Array, ""] | float
"""A factor."""
RoundingKey = UInt32[Array, "2"]
"""The key of stochastic rounding (``jrec.ops.rounding``)."""
Tables = Float[Array, "_ _"]
"""One of several tables, whose sizes differ."""
Activations = Float32[Array, "_ _"]
"""Pooled rows of one of several tables, or the gradients of them."""
Scalar = Float32[Array, ""]
"""A single number."""
Count = Int32[Array, ""]
"""A number of rows or lookups."""
Core = Float[Array, "_ _ _ _"]
"""A core of a tensor train, float32 or bfloat16."""
RowSlots = dict[str, Float32[Array, "rows width"] | Float32[Array, "rows"]]
"""A table's optimizer slots by name, a number for each element or for each row."""
AnyRows = Int32[_Arrays, "..."]
"""Row numbers in any shape."""
RowsOfAny = Float[Array, "... dim"]
"""The rows of ``AnyRows``."""
Slots = dict[str, Float32[Array, "..."]]
"""Optimizer slots by name, of one of several tables or cores."""
