"""The checked way from ids of any integer type to the int32 that every op takes."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def checked_ids(ids: ArrayLike, num_rows: int) -> np.ndarray:
    """Ids as int32, on the host, none of them past the table.

    JAX holds integers in 32 bits unless ``jax_enable_x64`` is set. It drops the upper bits of NumPy's int64 before the
    traced function, and so jrec, sees them: given to a jitted function, id 2^32 + 3 is row 3. Convert ids by this
    function instead, outside jit, wherever they do not come from jrec's own loader.

    Args:
      ids: Integers of any shape and type, NumPy's or JAX's or a list. Negative ones are padding.
      num_rows: The table's rows.

    Returns:
      int32 of the ids' shape, -1 for each negative id; without a copy where they are int32 and none is below -1.

    Raises:
      ValueError: If an id is ``num_rows`` or more, or they are no integers.

    Example:
      >>> import jrec
      >>> jrec.checked_ids([[2, 0], [1, -1]], 3).tolist()
      [[2, 0], [1, -1]]
      >>> jrec.checked_ids([2**32 + 2], 3)
      Traceback (most recent call last):
          ...
      ValueError: ids[0] is 4294967298, but the table has 3 rows; hash or clip the ids, or enlarge the table
    """
    values = np.asarray(ids)
    if not (isinstance(num_rows, int | np.integer) and 1 <= num_rows < 2**31):
        raise ValueError(f"num_rows is {num_rows}; row numbers are int32, so it must lie in 1..2**31 - 1")
    if values.size == 0:
        return np.zeros(values.shape, np.int32)
    if not np.issubdtype(values.dtype, np.integer):
        raise ValueError(f"ids must be integers of at most 64 bits, but are {values.dtype}")
    check_ids(values, num_rows)
    if values.min() < -1:
        values = np.maximum(values, -1)
    return values.astype(np.int32, copy=False)


def check_ids(ids: np.ndarray, num_rows: int) -> None:
    """Raises ValueError on the largest of (at least one) integers where it is no row of the table."""
    if (largest := int(ids.max())) >= num_rows:
        place = ", ".join(str(i) for i in np.unravel_index(ids.argmax(), ids.shape))
        raise ValueError(
            f"ids[{place}] is {largest}, but the table has {num_rows} rows; hash or clip the ids, or enlarge the table"
        )
