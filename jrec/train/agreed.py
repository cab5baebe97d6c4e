"""Sizes on which the processes of a run agree."""

from __future__ import annotations

import jax
import numpy as np

from jrec.train.mesh_arrays import Sizes, from_table, table_of


def agreed(needed: dict[str, Sizes]) -> dict[str, Sizes]:
    """The greatest needs of all processes."""
    if jax.process_count() == 1 or not needed:
        return needed
    from jax.experimental import multihost_utils

    most = np.asarray(multihost_utils.process_allgather(table_of(needed, needed))).max(axis=0)
    return from_table(needed, most)
