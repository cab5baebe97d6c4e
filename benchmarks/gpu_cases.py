"""Cases of the GPU benchmark, and the bytes that each must move.

Ids are hashed: hot rows lie all over their table, as they do in real ones (``workloads.hashed_ids``).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np

from benchmarks import workloads
from benchmarks.workloads import Workload
from jrec import ops

BATCH = 65_536
MAX_TABLE_BYTES = 12 << 30
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
FORWARD, UPDATE, CAST_AND_UPDATE = "forward", "update", "cast and update"
METRICS = (FORWARD, UPDATE, CAST_AND_UPDATE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Stacks of tables, how they are read, and what is timed.

    Attributes:
      stacks: One workload a stack: all tables of one dim. Batches of all stacks belong together.
      optimizer: The optimizer of updates.
      dtype: The tables' dtype.
      metrics: What is timed.
      source: Where the figures are from.
    """

    stacks: tuple[Workload, ...]
    optimizer: ops.RowOptimizer
    dtype: str = "float32"
    metrics: tuple[str, ...] = METRICS
    source: str = ""

    @property
    def table_bytes(self) -> int:
        """Bytes of all tables, without slots."""
        return sum(sum(s.rows) * s.dim * ITEMSIZE[self.dtype] for s in self.stacks)

    @property
    def lookups(self) -> int:
        """Ids of one batch."""
        return sum(s.lookups for s in self.stacks)

    def describe(self) -> str:
        """One line for people."""
        stacks = " + ".join(f"{s.num_tables} x {max(s.rows):,} rows x {s.dim}" for s in self.stacks)
        first = self.stacks[0]
        return (
            f"{stacks}, {self.dtype}, {self.table_bytes / 1e9:.2f} GB; batch {first.batch:,}, {self.lookups:,} lookups,"
            f" exponent {first.zipf:g}"
        )


def capped(case: Case, limit: int = MAX_TABLE_BYTES) -> Case:
    """The case with its largest tables cut until all fit ``limit`` bytes together."""
    cap = max(rows for stack in case.stacks for rows in stack.rows)
    cut = case
    while cut.table_bytes > limit:
        cap = cap * 9 // 10
        cut = dataclasses.replace(case, stacks=tuple(stack.with_rows_capped(cap) for stack in case.stacks))
    return cut


@functools.cache
def cases() -> dict[str, Case]:
    """Every case by name, those that tell most first; about seven minutes on an H100."""
    own = _own()
    first = ("design", "kaggle", "rm1")
    return {
        **{name: own[name] for name in first},
        **_several_dims(),
        **_fbgemm(),
        **_cuembed(),
        **{name: case for name, case in own.items() if name not in first},
    }


QUICK = ("design", "cuembed 1M x 32, batch 1,024, hotness 16, alpha 1.05")


def _own() -> dict[str, Case]:
    adagrad = ops.RowWiseAdagrad(learning_rate=0.01)
    made = {}
    batches = {"kaggle": BATCH, "terabyte": BATCH, "mlperf": 8192, **{f"rm{i}": 8192 for i in range(1, 5)}}
    for name, batch in batches.items():
        workload = workloads.WORKLOADS[name]
        made[name] = Case(stacks=(workload.with_batch(batch),), optimizer=adagrad, source=workload.source)
    cpu = workloads.WORKLOADS["cpu"]
    made["cpu"] = Case(stacks=(cpu,), optimizer=adagrad, source=cpu.source)
    # 16,384 bags x 20 ids x 64 floats: the shape that the kernels' design document counts bytes and launches for.
    design = dataclasses.replace(cpu, name="design", rows=(1_000_000,), ids_per_bag=(20,), batch=16_384, zipf=1.05)
    made["design"] = Case(stacks=(design,), optimizer=adagrad, source="the design's GPU case")
    dynamicemb = workloads.WORKLOADS["dynamicemb"]
    made["dynamicemb"] = Case(stacks=(dynamicemb,), optimizer=ops.Adam(learning_rate=0.01), source=dynamicemb.source)
    return made


def _several_dims() -> dict[str, Case]:
    """Tables of four dims in one step: what table-batched kernels are for."""
    tables = {16: (200_000,) * 12, 32: (500_000,) * 6, 64: (1_000_000,) * 4, 128: (2_000_000,) * 2}
    stacks = tuple(
        Workload(name=f"dim {dim}", rows=rows, dim=dim, ids_per_bag=(8,) * len(rows), batch=8192)
        for dim, rows in tables.items()
    )
    return {"several dims": Case(stacks=stacks, optimizer=ops.RowWiseAdagrad(learning_rate=0.01))}


def _fbgemm() -> dict[str, Case]:
    """The shapes that FBGEMM publishes for its table-batched embedding; its alpha of 1 and below means uniform ids."""
    adagrad = ops.RowWiseAdagrad(learning_rate=0.1)
    ci = Workload(name="fbgemm ci", rows=(10_000_000,), dim=256, ids_per_bag=(55,), batch=13_107, zipf=1.15)
    default = Workload(
        name="fbgemm default", rows=(100_000,) * 32, dim=128, ids_per_bag=(20,) * 32, batch=512, zipf=0.0
    )
    return {
        "fbgemm ci": Case(
            stacks=(ci,),
            optimizer=adagrad,
            dtype="float16",
            source="pytorch/FBGEMM, .github/scripts/fbgemm_gpu_benchmarks.bash (bfloat16 outputs there, float32 here)",
        ),
        "fbgemm default": Case(
            stacks=(default,),
            optimizer=adagrad,
            source="pytorch/FBGEMM, split_table_batched_embeddings_benchmark device, without arguments",
        ),
    }


def _cuembed() -> dict[str, Case]:
    """Cases of NVIDIA cuEmbed's sweep: forward over one table, with a fixed number of ids a bag and a power law."""
    made = {}
    for million, dim, batch, length, alpha in (
        (10, 128, 32_768, 16, 0.0),
        (10, 128, 32_768, 16, 1.05),
        (10, 128, 32_768, 16, 1.15),
        (10, 32, 32_768, 64, 1.05),
        (1, 128, 131_072, 16, 1.15),
        (1, 32, 131_072, 64, 1.15),
        (10, 128, 1024, 1, 1.05),
        (1, 32, 1024, 16, 1.05),
    ):
        name = f"cuembed {million}M x {dim}, batch {batch:,}, hotness {length}, alpha {alpha:g}"
        stack = Workload(
            name=name, rows=(million * 1_000_000,), dim=dim, ids_per_bag=(length,), batch=batch, zipf=alpha
        )
        made[name] = Case(
            stacks=(stack,),
            optimizer=ops.SGD(learning_rate=0.01),
            metrics=(FORWARD,),
            source="NVIDIA/cuEmbed, benchmarks/sweep_parameters.sh",
        )
    return made


def tiny(case: Case) -> Case:
    """The case at a size that the interpreter of the kernels ends in seconds: for tests and dry runs."""
    stacks = tuple(
        dataclasses.replace(s, rows=(97, 61)[: s.num_tables], dim=min(16, s.dim), ids_per_bag=(2, 2)[: s.num_tables],
                            batch=8)
        for s in case.stacks[:2]
    )  # fmt: skip
    return dataclasses.replace(case, stacks=stacks)


def stacked_ids(workload: Workload, *, seed: int) -> np.ndarray:
    """Hashed addresses of one batch in the stack of all tables, feature-major: (bags, length), or flat with offsets."""
    bases = np.cumsum([0, *workload.rows[:-1]])
    drawn = zip(workloads.table_ids(workload, seed=seed), workload.rows, bases, strict=True)
    ids = [workloads.hashed_ids(i, rows) + np.int32(base) for i, rows, base in drawn]
    if len(set(workload.ids_per_bag)) == 1:
        return np.concatenate(ids)
    return np.concatenate([i.reshape(-1) for i in ids])


def stacked_offsets(workload: Workload) -> np.ndarray | None:
    """Where bags begin, (bags + 1,) int32, for tables with different numbers of ids; else None."""
    if len(set(workload.ids_per_bag)) == 1:
        return None
    lengths = np.repeat(workload.ids_per_bag, workload.batch)
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes of one call, counted twice: each distinct input byte once, or every gathered row.

    Attributes:
      read: Bytes read if each distinct input byte moves once, as with a perfect cache.
      written: Bytes written, each once.
      lookups: Bytes read and written if every lookup moves its row from memory; caches can beat this.
    """

    read: int
    written: int
    lookups: int

    @property
    def distinct(self) -> int:
        """The floor: what must move."""
        return self.read + self.written

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            read=self.read + other.read, written=self.written + other.written, lookups=self.lookups + other.lookups
        )


def forward_traffic(ids: np.ndarray, *, bags: int, dim: int, itemsize: int) -> Traffic:
    """A gather-reduce: ids, rows, and float32 sums."""
    flat = ids[ids >= 0]
    indices, row = ids.size * 4, dim * itemsize
    written = bags * dim * 4
    return Traffic(
        read=indices + np.unique(flat).size * row, written=written, lookups=indices + flat.size * row + written
    )


def update_traffic(ids: np.ndarray, *, bags: int, dim: int, itemsize: int, optimizer: ops.RowOptimizer) -> Traffic:
    """A casted update: the cast, bag gradients, and the touched rows and slots, in and out."""
    flat = ids[ids >= 0]
    rows = np.unique(flat).size
    slots = sum(dim if kind == "element" else 1 for kind in optimizer.slots.values()) * 4
    touched, cast = rows * (dim * itemsize + slots), flat.size * 4 + rows * 8
    return Traffic(
        read=cast + bags * dim * 4 + touched, written=touched, lookups=cast + flat.size * dim * 4 + 2 * touched
    )


def traffic(case: Case, metric: str, ids: list[np.ndarray]) -> Traffic:
    """Bytes of one call of ``metric``, for a batch's ids by stack. The cast's own bytes are not counted in any."""
    total = Traffic(read=0, written=0, lookups=0)
    for stack, stack_ids in zip(case.stacks, ids, strict=True):
        shape: dict[str, Any] = {
            "bags": stack.batch * stack.num_tables,
            "dim": stack.dim,
            "itemsize": ITEMSIZE[case.dtype],
        }
        if metric == FORWARD:
            total += forward_traffic(stack_ids, **shape)
        else:
            total += update_traffic(stack_ids, **shape, optimizer=case.optimizer)
    return total


def expected_seconds(case: Case, bandwidth: float) -> float:
    """A guess of one call's time, which decides how many calls a dispatch makes: every lookup from memory."""
    rows = sum(s.lookups * s.dim for s in case.stacks) * ITEMSIZE[case.dtype]
    return max(1e-5, math.ceil(1.5 * rows) / bandwidth)
