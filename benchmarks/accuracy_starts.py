"""Uncompressed tables whose rows begin as Gaussians of several widths, against DLRM's uniform start (TT-Rec, Table 1).

`jrec train` begins rows uniformly, as DLRM does, and knows no other start, since nothing but this table asks for one.
Here the same random bits become a Gaussian of the uniform's variance, and `initial_bound` chooses the variance.

Examples:
  python -m benchmarks.accuracy_starts
"""

from __future__ import annotations

import contextlib
import pathlib
import statistics
import tempfile
from collections.abc import Callable, Iterator
from unittest import mock

import jax
import jax.numpy as jnp

from benchmarks import harness, trainings
from benchmarks.accuracy import CONFIG, SAMPLE, run_jrec
from jrec.data.schema import Schema
from jrec.ops import row_init

VARIANCES: dict[str, Callable[[int], float]] = {
    "N(0, 1)": lambda rows: 1.0,
    "N(0, 1/2)": lambda rows: 1 / 2,
    "N(0, 1/8)": lambda rows: 1 / 8,
    "N(0, 1/3n)": lambda rows: 1 / (3 * rows),
    "N(0, 1/9n^2)": lambda rows: 1 / (9 * rows**2),
}
"""The table's distributions, by their variance for a table of n rows."""


def main() -> None:
    """Runs the benchmark."""
    parser = harness.parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one training a seed (default: 0 1 2)")
    arguments = parser.parse_args()
    if not SAMPLE.is_file():
        raise SystemExit(f"accuracy_starts: {SAMPLE} is no file")
    with harness.Report(arguments, "accuracy_starts") as report, tempfile.TemporaryDirectory() as folder:
        data = pathlib.Path(folder) / "kaggle"
        run_jrec("prepare", "criteo-kaggle", "--input", str(SAMPLE), "--out", str(data), "--quiet")
        seeds = arguments.seeds[:1] if report.quick else arguments.seeds
        name = f"{SAMPLE.name.split('.')[0]}, {len(seeds)} seed(s)"
        uniform = [trainings.train(CONFIG, data, seed, ()).score("auc") for seed in seeds]
        report.add(f"{name}, uniform", "test auc, mean", statistics.mean(uniform), "auc")
        for start, variance in list(VARIANCES.items())[: 1 if report.quick else None]:
            with gaussian_rows():
                aucs = [trainings.train(CONFIG, data, seed, bounds(data, variance)).score("auc") for seed in seeds]
            lost = [100 * (plain - auc) for plain, auc in zip(uniform, aucs, strict=True)]
            report.add(f"{name}, {start}", "test auc, mean", statistics.mean(aucs), "auc")
            report.add(f"{name}, {start}", "auc points lost, mean", statistics.mean(lost), "points")
            report.add(f"{name}, {start}", "auc points lost, least", min(lost), "points")
            report.add(f"{name}, {start}", "auc points lost, greatest", max(lost), "points")


def bounds(data: pathlib.Path, variance: Callable[[int], float]) -> list[str]:
    """Overrides that give every table's rows a variance."""
    tables = Schema.load(data).tables
    return [f"tables.overrides.{t.name}.initial_bound={(3 * variance(t.rows)) ** 0.5}" for t in tables]


@contextlib.contextmanager
def gaussian_rows() -> Iterator[None]:
    """Rows begin as Gaussians of the variance that their uniform start would have."""

    def from_bits(bits: jax.Array, scales: jax.Array, dtype: str) -> jax.Array:
        uniform = ((bits >> 8).astype(jnp.int32) * jnp.int32(2) - jnp.int32(2**24 - 1)).astype(jnp.float32)
        # erfinv makes a uniform within ±1 a Gaussian of variance 1/2; the uniform's own is 1/3.
        inside = jnp.clip(uniform * jnp.float32(2.0**-24), -1 + 2.0**-23, 1 - 2.0**-23)
        wide = jax.lax.erf_inv(inside) * jnp.float32((2 / 3) ** 0.5 * 2**24)
        return (wide * scales).astype(dtype)

    jax.clear_caches()
    with mock.patch.object(row_init, "_from_bits", from_bits):
        yield
    jax.clear_caches()


if __name__ == "__main__":
    main()
