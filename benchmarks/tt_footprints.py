"""Parameters of compressed models: TT-Rec's Table 2 and Figure 5, and EL-Rec's Table III.

TT-Rec's shapes are those that it prints. EL-Rec prints none: a model is every table above a million rows in three cores
of ``TTShape.search``, whose factors of dim ascend (16 = 2 x 2 x 4), and, as a second reading, with the greatest of them
in the middle core (2 x 4 x 2), which has the square of the rank and so nearly all parameters.
"""

from __future__ import annotations

import dataclasses

from benchmarks import harness, workloads
from benchmarks.tt_side import shape_of
from jrec.ops import tt

DIM = 16
MEGABYTE, GIGABYTE = 1e6, 1e9
RANKS = (16, 32, 64)
# TT-Rec, Table 2: rows, slices of the three cores, and parameters at ranks 16, 32 and 64.
TABLE2 = (
    (10_131_227, (200, 220, 250), (135_040, 495_360, 1_891_840)),
    (8_351_593, (200, 200, 209), (122_176, 449_152, 1_717_504)),
    (7_046_547, (200, 200, 200), (121_600, 448_000, 1_715_200)),
    (5_461_306, (166, 175, 188), (106_944, 393_088, 1_502_976)),
    (2_202_608, (125, 130, 136), (79_264, 291_648, 1_115_776)),
    (286_181, (53, 72, 75), (43_360, 160_448, 615_808)),
    (142_572, (50, 52, 55), (31_744, 116_736, 446_464)),
)
FIGURE5 = {3: 4.0, 5: 48.0, 7: 117.0}  # tables compressed at rank 32, and by how much the model shrinks
# Terabyte with ids hashed to 10 million, dim 64: 12.57 GB, the paper's baseline. Its shapes are not printed.
FIGURE5_TERABYTE = {3: 2.6, 5: 21.8, 7: 95.5}
COMPRESSED_ABOVE = 1_000_000  # EL-Rec compresses tables of more rows
PAPER_RANK = 128
# The training file's vocabularies, hour aside.
AVAZU_ROWS = (
    7, 7, 4737, 7745, 26, 8552, 559, 36, 2_686_408, 6_729_486, 8251, 5, 4, 2626, 8, 9, 435, 4, 68, 172, 60,
)  # fmt: skip
# EL-Rec, Table III: megabytes of the uncompressed and of the compressed model.
MODELS = {
    "Avazu": (AVAZU_ROWS, 16, 550.0, 87.6),
    "Criteo Terabyte": (workloads.CRITEO_TERABYTE_ROWS, 64, 59_200.0, 797.9),
    "Criteo Kaggle": (workloads.CRITEO_KAGGLE_ROWS, 16, 1_900.0, 258.2),
}


def run(report: harness.Report) -> None:
    """Reports all three."""
    _table2(report)
    _figure5(report)
    _table_iii(report)


def _table2(report: harness.Report) -> None:
    for rows, slices, parameters in TABLE2:
        for rank, expected in zip(RANKS, parameters, strict=True):
            case = f"TT-Rec's Table 2, {rows:,} rows x {DIM}, rank {rank}"
            report.add(case, "parameters", table2_shape(rows, slices, rank).num_parameters, "count")
            report.add(case, "parameters, the paper's", expected, "count")


def _figure5(report: harness.Report) -> None:
    full = 4 * DIM * sum(workloads.CRITEO_KAGGLE_ROWS)
    for tables, expected in FIGURE5.items():
        cores = [table2_shape(rows, slices, 32) for rows, slices, _ in TABLE2[:tables]]
        compressed = full - sum(4 * (shape.rows * DIM - shape.num_parameters) for shape in cores)
        case = f"TT-Rec's Figure 5, Criteo Kaggle, {tables} largest tables, rank 32"
        report.add(case, "footprint, compressed", compressed / MEGABYTE, "MB")
        report.add(case, "footprint, compression", full / compressed, "x")
        report.add(case, "footprint, compression, the paper's", expected, "x")
    rows, dim = sorted(workloads.CRITEO_TERABYTE_HASHED_ROWS, reverse=True), 64
    full = 4 * dim * sum(rows)
    for tables, expected in FIGURE5_TERABYTE.items():
        shapes = [shape_of(n, dim, 32) for n in rows[:tables]]
        compressed = 4 * (sum(shape.num_parameters for shape in shapes) + dim * sum(rows[tables:]))
        case = f"TT-Rec's Figure 5, Criteo Terabyte, {tables} largest tables, rank 32"
        report.add(case, "footprint, uncompressed", full / MEGABYTE, "MB")
        report.add(case, "footprint, compressed", compressed / MEGABYTE, "MB")
        report.add(case, "footprint, compression", full / compressed, "x")
        report.add(case, "footprint, compression, the paper's", expected, "x")


def _table_iii(report: harness.Report) -> None:
    for model, (rows, dim, paper_full, paper_compressed) in MODELS.items():
        full = 4 * dim * sum(rows)
        for rank in (32, PAPER_RANK):
            for middle in (False, True):
                factors = "greatest factor of dim in the middle" if middle else "factors of dim ascending"
                case = f"EL-Rec's Table III, {model}, {sum(rows) / 1e6:.1f} M rows x {dim}, rank {rank}, {factors}"
                compressed = model_bytes(rows, dim, rank, middle=middle)
                report.add(case, "footprint, uncompressed", full / MEGABYTE, "MB")
                report.add(case, "footprint, compressed", compressed / MEGABYTE, "MB")
                report.add(case, "footprint, compression", full / compressed, "x")
                if rank == PAPER_RANK:
                    report.add(case, "footprint, uncompressed, the paper's", paper_full, "MB")
                    report.add(case, "footprint, compressed, the paper's", paper_compressed, "MB")


def table2_shape(rows: int, slices: tuple[int, int, int], rank: int) -> tt.TTShape:
    """A row of TT-Rec's Table 2: dim 16 as 2 x 2 x 4."""
    return tt.TTShape(rows=rows, dim=DIM, row_factors=slices, dim_factors=(2, 2, 4), ranks=(rank, rank))


def model_bytes(rows: tuple[int, ...], dim: int, rank: int, *, middle: bool = False) -> int:
    """Bytes of float32 parameters with every table above ``COMPRESSED_ABOVE`` rows as three cores.

    Args:
      rows: The tables' rows.
      dim: Elements of a row.
      rank: The rank of both bonds.
      middle: Whether the middle core has the greatest factor of ``dim``.
    """
    return sum(4 * (_shape(n, dim, rank, middle).num_parameters if n > COMPRESSED_ABOVE else n * dim) for n in rows)


def _shape(rows: int, dim: int, rank: int, middle: bool) -> tt.TTShape:
    shape = shape_of(rows, dim, rank)
    least, between, greatest = sorted(shape.dim_factors)
    return dataclasses.replace(shape, dim_factors=(least, greatest, between)) if middle else shape
