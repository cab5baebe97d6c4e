"""Named workloads that tests and benchmarks share: published table sizes, MLPs and id distributions.

NumPy and Python 3.11 suffice, so that the peers' processes draw the very same ids and initial weights. Rows
descend by frequency, as in a prepared dataset: id 0 is the most frequent one.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np

CRITEO_KAGGLE_ROWS = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652,
    2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
CRITEO_TERABYTE_ROWS = (
    40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10, 2209, 11938, 155, 4, 976, 14,
    40000000, 40000000, 40000000, 590152, 12973, 108, 36,
)  # fmt: skip
CRITEO_TERABYTE_HASHED_ROWS = (  # ids hashed to at most 10 million, as dlrm's --max-ind-range does
    9980333, 36084, 17217, 7378, 20134, 3, 7112, 1442, 61, 9758201, 1333352, 313829, 10, 2208, 11156, 122, 4, 970, 14,
    9994222, 7267859, 9946608, 415421, 12420, 101, 36,
)  # fmt: skip
MLPERF_IDS_PER_SAMPLE = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)

_HEAD = 1 << 16  # ranks whose probabilities are summed exactly; the tail beyond is drawn from the integral


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Embedding tables, how they are read, and the MLPs around them.

    Attributes:
      name: As on the command line.
      rows: Per table; every table is read by one feature.
      dim: Elements of a row.
      ids_per_bag: Per table, the ids of one example; every example has exactly that many.
      batch: examples.
      zipf: Exponent of the ids' power law over a table's rows.
      pooled: Whether the ids of a bag are summed; otherwise every id keeps its own output.
      num_dense: Dense features, the width of the bottom MLP's input.
      bottom, top: Widths of the MLPs' layers after their inputs; empty where only embeddings are measured.
      cross_layers, cross_rank: A low-rank cross network between embeddings and top MLP (DCN-v2); without layers, dot
        products of all pairs.
      source: Where the figures are from.
    """

    name: str
    rows: tuple[int, ...]
    dim: int
    ids_per_bag: tuple[int, ...]
    batch: int = 2048
    zipf: float = 1.05
    pooled: bool = True
    num_dense: int = 0
    bottom: tuple[int, ...] = ()
    top: tuple[int, ...] = ()
    cross_layers: int = 0
    cross_rank: int = 0
    source: str = ""

    def __post_init__(self) -> None:
        if len(self.rows) != len(self.ids_per_bag):
            raise ValueError(f"{self.name}: {len(self.rows)} tables, but ids_per_bag names {len(self.ids_per_bag)}")
        if self.bottom and self.bottom[-1] != self.dim:
            raise ValueError(f"{self.name}: the bottom MLP ends in {self.bottom[-1]}, but rows have dim {self.dim}")

    @property
    def num_tables(self) -> int:
        """How many tables there are."""
        return len(self.rows)

    @property
    def lookups(self) -> int:
        """Ids in a batch, over all tables."""
        return self.batch * sum(self.ids_per_bag)

    def to_json(self) -> dict[str, Any]:
        """The fields, in JSON types."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(fields: dict[str, Any]) -> Workload:
        """The inverse of ``to_json``, which turns tuples into lists when it has been through JSON."""
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
        return Workload(**values)

    def with_batch(self, batch: int) -> Workload:
        """The same workload with ``batch`` examples."""
        return dataclasses.replace(self, batch=batch)

    def with_dim(self, dim: int) -> Workload:
        """The same workload with rows of ``dim`` elements, and a bottom MLP that ends in as many."""
        return dataclasses.replace(self, dim=dim, bottom=(*self.bottom[:-1], dim) if self.bottom else ())

    def with_rows_capped(self, rows: int) -> Workload:
        """The same workload with no table above ``rows`` rows."""
        return dataclasses.replace(self, rows=tuple(min(r, rows) for r in self.rows))

    def with_rows_divided(self, divisor: int) -> Workload:
        """The same workload with tables of a ``divisor``-th of the rows, rounded up."""
        return dataclasses.replace(self, rows=tuple(-(-r // divisor) for r in self.rows))


def zipf_ids(rng: np.random.Generator, rows: int, count: int, exponent: float) -> np.ndarray:
    """Draws (count,) int32 ids from a power law over ``rows`` ranks: P(id) is proportional to (id + 1) ** -exponent.

    The first 65,536 ranks follow the law exactly, the tail its integral from one half to the next. An exponent of 0 is
    the uniform distribution.
    """
    head = min(rows, _HEAD)
    weights = np.arange(1, head + 1, dtype=np.float64) ** -exponent
    cumulative = np.cumsum(weights)
    low, high = head + 0.5, rows + 0.5
    tail = _power_integral(low, high, exponent)
    draws = rng.random(count) * (cumulative[-1] + tail)
    ids = np.searchsorted(cumulative, draws, side="right")
    in_tail = draws >= cumulative[-1]
    ranks = _invert_power_integral(low, draws[in_tail] - cumulative[-1], exponent)
    ids[in_tail] = np.rint(ranks).astype(np.int64) - 1
    return np.clip(ids, 0, rows - 1).astype(np.int32)


def _power_integral(low: float, high: float, exponent: float) -> float:
    if exponent == 1.0:
        return math.log(high / low)
    return (high ** (1 - exponent) - low ** (1 - exponent)) / (1 - exponent)


def _invert_power_integral(low: float, mass: np.ndarray, exponent: float) -> np.ndarray:
    if exponent == 1.0:
        return low * np.exp(mass)
    return (low ** (1 - exponent) + (1 - exponent) * mass) ** (1 / (1 - exponent))


def hashed_ids(ids: np.ndarray, rows: int) -> np.ndarray:
    """Maps ids to other ids of the same table by one fixed permutation of its rows, as a hash of raw values would.

    ``zipf_ids`` numbers rows by frequency, so neighbours in the table are equally hot, and long segments are neighbours
    in a cast. In a table that was filled by hashing they are not.

    Args:
      ids: int32 of any shape; negative ids are padding and stay as they are.
      rows: The table's rows.

    Returns:
      int32 of the same shape. Equal ids stay equal, different ids stay different.
    """
    bits = max(2, (rows - 1).bit_length())
    mask, shift = np.uint32((1 << bits) - 1), np.uint32((bits + 1) // 2)
    mixed = ids.astype(np.uint32).reshape(-1)
    outside = np.flatnonzero(ids.reshape(-1) >= 0)
    # Walking the cycle of a permutation of 2**bits numbers until it is back below `rows` permutes the numbers below it.
    while outside.size:
        x = mixed[outside]
        for odd in (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D):
            x *= np.uint32(odd)  # wraps around 2**32; its low bits are a permutation of the table's bits
            x += np.uint32(0x27D4EB2F)
            x &= mask
            x ^= x >> shift
        mixed[outside] = x
        outside = outside[x >= rows]
    return mixed.view(np.int32).reshape(ids.shape)


def table_ids(workload: Workload, *, seed: int) -> list[np.ndarray]:
    """Ids of one batch: per table (batch, ids_per_bag) int32, a function of only workload and seed."""
    return [
        zipf_ids(np.random.default_rng((seed, t)), rows, workload.batch * length, workload.zipf).reshape(-1, length)
        for t, (rows, length) in enumerate(zip(workload.rows, workload.ids_per_bag, strict=True))
    ]


def dense_batch(workload: Workload, *, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Dense features (batch, num_dense) float32 and labels (batch,) float32 in {0, 1} of one batch."""
    rng = np.random.default_rng((seed, workload.num_tables, 1))
    dense = rng.standard_normal((workload.batch, workload.num_dense), dtype=np.float32)
    return dense, (rng.random(workload.batch) < 0.25).astype(np.float32)


def output_gradient(workload: Workload, *, seed: int) -> np.ndarray:
    """A gradient of the pooled outputs, (batch, num_tables * dim), or of the unpooled, (lookups, dim); float32."""
    rng = np.random.default_rng((seed, workload.num_tables, 5))
    pooled = (workload.batch, workload.num_tables * workload.dim)
    return rng.standard_normal(pooled if workload.pooled else (workload.lookups, workload.dim), dtype=np.float32)


def initial_table(workload: Workload, table: int, *, seed: int) -> np.ndarray:
    """Initial rows (rows, dim) float32 of a table, uniform within 1 / sqrt(rows) as in facebookresearch/dlrm."""
    rng = np.random.default_rng((seed, table, 2))
    rows = workload.rows[table]
    values = rng.random((rows, workload.dim), dtype=np.float32)
    values -= np.float32(0.5)
    values *= np.float32(2 / math.sqrt(rows))
    return values


def interaction_width(workload: Workload) -> int:
    """Width of the top MLP's input: all vectors side by side, crossed, or the bottom MLP's output and dot products."""
    vectors = workload.num_tables + 1
    if workload.cross_layers:
        return vectors * workload.dim
    return workload.dim + vectors * (vectors - 1) // 2


def initial_mlp(workload: Workload, which: str, *, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Initial (kernel (in, out), bias (out,)) float32 of each layer of the "bottom" or "top" MLP, as in dlrm."""
    if which == "bottom":
        widths = (workload.num_dense, *workload.bottom)
    else:
        widths = (interaction_width(workload), *workload.top)
    rng = np.random.default_rng((seed, workload.num_tables, 3 if which == "bottom" else 4))
    layers = []
    for fan_in, fan_out in itertools.pairwise(widths):
        spread = np.float32(math.sqrt(2 / (fan_in + fan_out)))
        kernel = rng.standard_normal((fan_in, fan_out), dtype=np.float32) * spread
        bias = rng.standard_normal(fan_out, dtype=np.float32) * np.float32(math.sqrt(1 / fan_out))
        layers.append((kernel, bias))
    return layers


def initial_cross(workload: Workload, *, seed: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Initial (V^T (width, rank), W^T (rank, width), bias (width,)) float32 of the layers x_0 * (W V x + b) + x."""
    rng = np.random.default_rng((seed, workload.num_tables, 6))
    width, rank = interaction_width(workload), workload.cross_rank
    spread = np.float32(math.sqrt(2 / (width + rank)))
    layers = []
    for _ in range(workload.cross_layers):
        down, up = (rng.standard_normal(shape, dtype=np.float32) * spread for shape in ((width, rank), (rank, width)))
        layers.append((down, up, np.zeros(width, np.float32)))
    return layers


def _rm(name: str, tables: int, gathers: int, bottom: tuple[int, ...], top: tuple[int, ...]) -> Workload:
    # The paper names neither table sizes nor the ids' law nor the dense features: as in `jrec synth --like rm1`.
    return Workload(
        name=name,
        rows=(1_000_000,) * tables,
        dim=64,
        ids_per_bag=(gathers,) * tables,
        num_dense=13,
        bottom=bottom,
        top=top,
        source="Tensor Casting, Table II",
    )


_WORKLOADS = (
    Workload(
        name="kaggle",
        rows=CRITEO_KAGGLE_ROWS,
        dim=16,
        ids_per_bag=(1,) * 26,
        num_dense=13,
        bottom=(512, 256, 64, 16),
        top=(512, 256, 1),
        source="facebookresearch/dlrm, bench/dlrm_s_criteo_kaggle.sh",
    ),
    Workload(
        name="terabyte",
        rows=CRITEO_TERABYTE_ROWS,
        dim=64,
        ids_per_bag=(1,) * 26,
        num_dense=13,
        bottom=(512, 256, 64),
        top=(512, 512, 256, 1),
        source="facebookresearch/dlrm, bench/dlrm_s_criteo_terabyte.sh",
    ),
    Workload(
        name="mlperf",
        rows=CRITEO_TERABYTE_ROWS,
        dim=128,
        ids_per_bag=MLPERF_IDS_PER_SAMPLE,
        num_dense=13,
        bottom=(512, 256, 128),
        top=(1024, 1024, 512, 256, 1),
        source="mlcommons/training, recommendation_v2/torchrec_dlrm (its cross network left out)",
    ),
    Workload(
        name="mlperf-dcnv2",
        rows=CRITEO_TERABYTE_ROWS,
        dim=128,
        ids_per_bag=MLPERF_IDS_PER_SAMPLE,
        batch=55_296,
        num_dense=13,
        bottom=(512, 256, 128),
        top=(1024, 1024, 512, 256, 1),
        cross_layers=3,
        cross_rank=512,
        source="mlcommons/training, recommendation_v2/torchrec_dlrm; batch: NVIDIA's submissions on 8 GPUs",
    ),
    _rm("rm1", 10, 80, (256, 128, 64), (256, 64, 1)),
    _rm("rm2", 40, 80, (256, 128, 64), (512, 128, 1)),
    _rm("rm3", 10, 20, (2560, 512, 64), (512, 128, 1)),
    _rm("rm4", 10, 20, (2560, 1024, 64), (2048, 2048, 1024, 1)),
    Workload(
        name="cpu",
        rows=(100_000,) * 8,
        dim=64,
        ids_per_bag=(20,) * 8,
        zipf=1.2,
        source="the design's CPU case",
    ),
    Workload(
        name="dynamicemb",
        rows=((24 << 20) // 10,) * 10,  # the published capacity; gives 348 k unique rows
        dim=128,
        ids_per_bag=(1,) * 10,
        batch=104_858,
        pooled=False,
        source="NVIDIA dynamicemb's single-H100 benchmark against FBGEMM: 1.05 M ids, power law 1.05, unpooled, Adam",
    ),
)

WORKLOADS: dict[str, Workload] = {workload.name: workload for workload in _WORKLOADS}
