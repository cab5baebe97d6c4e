"""Which contraction ``jrec.ops.tt.explain`` takes by default, counted over shapes and batches of a power law.

EL-Rec's sample-level reuse (Equation 5) is the contraction "sample". Nothing is timed: the choice is by the cost model.
"""

from __future__ import annotations

import collections
import itertools

from benchmarks import harness
from jrec.ops import tt
from jrec.ops.tt.cost import CONTRACTIONS, Platform

ROWS = (100_000, 1_000_000, 10_000_000, 100_000_000)
DIMS = (16, 64, 128)
CORES = (2, 3, 4)
RANKS = (8, 32, 128)
LOOKUPS = (2048, 8192, 32_768, 131_072)
POOLING = (1, 10, 50, 100)
PLATFORMS: dict[str, Platform] = {"CPU, native kernels": "cpu", "GPU": "gpu"}


def run(report: harness.Report) -> None:
    """Counts the forward choices of each platform."""
    sizes = list(itertools.product(ROWS[:1] if report.quick else ROWS, DIMS, CORES, RANKS))
    shapes = [_shape(*size) for size in sizes]
    batches = list(itertools.product(LOOKUPS, POOLING))
    case = f"{len(shapes) * len(batches):,} shapes and batches of a power law"
    for name, platform in PLATFORMS.items():
        chosen = collections.Counter(
            tt.explain(shape, lookups, bags=lookups // pooling, platform=platform).forward
            for shape, (lookups, pooling) in itertools.product(shapes, batches)
        )
        for contraction in CONTRACTIONS:
            report.add(f"{name}, {case}", f"chosen, {contraction}", chosen[contraction], "count")


def _shape(rows: int, dim: int, cores: int, rank: int) -> tt.TTShape:
    """Ranks that say no more than the rows have are cut, as `jrec train` cuts them."""
    shape = tt.TTShape.search(rows, dim, num_cores=cores, ranks=1)
    return shape.with_ranks(tuple(min(rank, bound) for bound in shape.max_ranks))
