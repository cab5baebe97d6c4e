"""A full-size Criteo Terabyte model with compressed tables: memory, start and steps on one small machine.

The dataset is synthetic, of the published table sizes capped at 40 million rows, its ids following a power law with
drift; the model is configs/criteo_terabyte_tt.toml's. Uncompressed, its tables would take 52 GB. Also the
footprints of EL-Rec's Table III: tables of a million rows and more as tensor trains, beside the published figures.

Example:
  python -m benchmarks.terabyte_tt
"""

from __future__ import annotations

import argparse
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING

from benchmarks import harness

if TYPE_CHECKING:
    from jrec.app.config import TrainConfig

CONFIG = harness.ROOT / "configs" / "criteo_terabyte_tt.toml"
ELREC = {"avazu": ("0.55 GB", 87.6), "criteo-terabyte": ("59.2 GB", 797.9), "criteo-kaggle": ("1.9 GB", 258.2)}
DIMS = {"avazu": 16, "criteo-terabyte": 64, "criteo-kaggle": 16}
COMPRESSED_FROM = 1_000_000  # rows, as in EL-Rec, Section VI
RANKS = (32, 64, 128)


def main() -> None:
    """Runs the benchmark."""
    parser = harness.parser(__doc__)
    parser.add_argument("--steps", type=int, default=30, help="timed training steps (default 30; 5 with --quick)")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of the configuration")
    arguments = parser.parse_args()
    with harness.Report(arguments, "terabyte_tt") as report:
        for name in ELREC:
            _footprints(report, name)
        _train(report, arguments)


def _footprints(report: harness.Report, name: str) -> None:
    from jrec.ops.tt import TTShape
    from jrec.prepare.synth.shapes import shape_like

    rows, dim = shape_like(name).rows.values(), DIMS[name]
    whole = 4 * dim * sum(rows)
    case = f"{name}, {sum(rows):,} rows of {dim}"
    report.add(case, "tables, uncompressed", whole / 1e6, "MB")
    for rank in RANKS:
        stored = 0
        for n in rows:
            shape = TTShape.search(n, dim, ranks=1)
            ranks = [min(rank, bound) for bound in shape.max_ranks]
            stored += shape.with_ranks(ranks).num_parameters if n >= COMPRESSED_FROM else n * dim
        report.add(case, f"tables, rank {rank} from a million rows on", 4 * stored / 1e6, "MB")
        report.add(case, f"compression, rank {rank}", whole / (4 * stored), "times smaller")
    published, megabytes = ELREC[name]
    report.add(case, "tables, EL-Rec's Table III", megabytes, "MB")
    report.note(f"{name}: EL-Rec's Table III has {published} before, {megabytes} MB after")


def _train(report: harness.Report, arguments: argparse.Namespace) -> None:
    from jrec.app.config import load_config

    steps = 5 if report.quick else arguments.steps
    with tempfile.TemporaryDirectory() as folder:
        data = pathlib.Path(folder) / "data"
        overrides = [f"data.path={str(data)!r}", "data.window_blocks=1", *arguments.set]
        config = load_config(CONFIG, overrides)
        examples = max(20_000, 2 * (steps + 3) * config.data.batch_size)
        synth = ["synth", "--like", "criteo-terabyte", "--rows", str(examples), "--out", str(data), "--quiet"]
        # In a process of its own, whose memory is not that of training.
        subprocess.run([sys.executable, "-m", "jrec", *synth], check=True, stdout=subprocess.DEVNULL)
        _measure(report, config, steps)


def _measure(report: harness.Report, config: TrainConfig, steps: int) -> None:
    import jax

    from jrec.app.build import build_layout, build_model, build_optimizer, parameter_counts
    from jrec.app.loaders import train_loader
    from jrec.app.tables import describe_tables, tables_total
    from jrec.data.schema import Schema
    from jrec.run.step import compile_run

    schema = Schema.load(config.data.path)
    total = tables_total(describe_tables(config, schema))
    rows = sum(table.rows for table in schema.tables)
    case = f"Terabyte, {rows:,} rows of {config.model.embedding_dim}, batch {config.data.batch_size:,}"
    report.add(case, "tables, uncompressed", total["uncompressed_bytes"] / 1e6, "MB")
    report.add(case, "tables", total["bytes"] / 1e6, "MB")
    report.add(case, "compression", total["compression"], "times smaller")
    start = time.perf_counter()
    layout = build_layout(config, schema)
    model = build_model(config, schema, layout)
    state, run = compile_run(model, build_optimizer(config, model, steps))
    jax.block_until_ready(state)
    report.add(case, "build and initialize", time.perf_counter() - start, "s")
    parameters = parameter_counts(model)
    report.add(case, "parameters, dense part", parameters["dense"]["bytes"] / 1e6, "MB")
    report.add(case, "state with optimizer", sum(x.nbytes for x in jax.tree.leaves(state)) / 1e6, "MB")
    seconds, losses = [], []
    with train_loader(config, schema, layout) as loader:
        for _, batch in zip(range(steps + 3), loader, strict=False):
            start = time.perf_counter()
            state, loss, _ = run.step(state, batch)
            losses.append(float(loss))
            seconds.append(time.perf_counter() - start)
    report.add(case, "first step, with compilation", seconds[0], "s")
    report.add(case, "step, median", 1e3 * statistics.median(seconds[3:]), "ms")
    report.add(case, "step, fastest", 1e3 * min(seconds[3:]), "ms")
    report.add(case, "examples a second, median", config.data.batch_size / statistics.median(seconds[3:]), "1/s")
    report.add(case, "log loss, first 3 steps", statistics.mean(losses[:3]), "nats")
    report.add(case, "log loss, last 3 steps", statistics.mean(losses[-3:]), "nats")
    report.add(case, "peak memory of the process", _peak(), "MB")


def _peak() -> float:
    """Most resident memory of this process so far, in MB."""
    scale = 1e6 if sys.platform == "darwin" else 1e3
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale


if __name__ == "__main__":
    main()
