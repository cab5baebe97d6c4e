"""Two checkpoints of tables in host memory, the second with links to the first one's files: the protocol alone."""

from __future__ import annotations

import contextlib

import numpy as np
from checkpoint_cases import Host

from jrec.checkpoint import Checkpoints
from jrec.errors import JrecError


def main() -> int:
    """Writes both into the folder ``saved``."""
    tables, rng = Host(), np.random.default_rng(0)
    try:
        with contextlib.closing(Checkpoints("saved")) as checkpoints:
            for step in (1, 2):
                tables.write(rng)
                checkpoints.save(step, arrays={"dense": rng.normal(size=8)}, sources=tables.sources)
    except (JrecError, OSError, KeyboardInterrupt) as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        print("jrec: interrupted" if interrupted else f"jrec: error: {error}")
        return 130 if interrupted else 2
    return 0
