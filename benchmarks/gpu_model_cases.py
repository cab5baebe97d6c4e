"""The cases that ``benchmarks.gpu_model`` predicts: stacks of a workload's tables, and their ids, hashed."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from benchmarks import workloads
from jrec.pallas.tuning import H200, TuningConfig, tune


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A workload whose tables are one stack, with bags of equal length.

    Attributes:
      name: As on the command line.
      workload: Tables, ids and batch.
      summary: What it stands for.
    """

    name: str
    workload: workloads.Workload
    summary: str

    @property
    def dim(self) -> int:
        """Elements of a row, float32."""
        return self.workload.dim

    @property
    def rows(self) -> int:
        """Rows of the stack."""
        return sum(self.workload.rows)

    @property
    def length(self) -> int:
        """Ids of a bag."""
        (length,) = set(self.workload.ids_per_bag)
        return length

    @property
    def bags(self) -> int:
        """Bags of a batch, over all tables."""
        return self.workload.batch * self.workload.num_tables

    @property
    def lookups(self) -> int:
        """Ids of a batch, over all tables."""
        return self.bags * self.length

    def forward_config(self) -> TuningConfig:
        """The tuning of its gather-reduce on an H200."""
        return tune(dim=self.dim, itemsize=4, length=self.length, gpu=H200)

    def update_config(self) -> TuningConfig:
        """The tuning of its update with row-wise Adagrad on an H200."""
        return tune(dim=self.dim, itemsize=4, length=None, element_slots=0, gpu=H200)

    @functools.cached_property
    def ids(self) -> np.ndarray:
        """(num_tables, batch * length) int64: rows of the stack, each table's permuted as by a hash."""
        bases = np.cumsum([0, *self.workload.rows[:-1]])
        tables = workloads.table_ids(self.workload, seed=0)
        return np.stack(
            [
                workloads.hashed_ids(ids.reshape(-1), rows) + base
                for ids, rows, base in zip(tables, self.workload.rows, bases, strict=True)
            ]
        )


def _case(name: str, workload: str, summary: str, **changes: object) -> Case:
    changed = dataclasses.replace(workloads.WORKLOADS[workload], **changes)  # pyright: ignore[reportArgumentType]
    return Case(name=name, workload=changed, summary=summary)


CASES = {
    case.name: case
    for case in (
        _case("cpu", "cpu", "the design's case: 8 tables x 2,048 bags x 20 ids, Zipf 1.2"),
        _case("kaggle", "kaggle", "Criteo Kaggle's 26 tables, one id each, batch 16,384", batch=16_384),
        _case("rm1", "rm1", "RM1: 10 tables x 80 ids, batch 2,048"),
        _case("rm2", "rm2", "RM2: 40 tables x 80 ids, batch 2,048"),
    )
}
_WIDE = _case("cpu-128", "cpu", "the design's case at 128 floats a row", dim=128)


def _configs(case: Case) -> list[TuningConfig]:
    tuned = case.update_config()
    return [
        dataclasses.replace(tuned, chunks=chunks, unroll=unroll, split=split)
        for split in (32, 64)
        for chunks in (1, 2, 4)
        for unroll in (4, 8)
    ]


SWEEP = [(case, _configs(case)) for case in (CASES["kaggle"], CASES["cpu"], _WIDE)]
