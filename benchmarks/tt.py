"""Tensor-train tables beside TT-Rec's algorithm and tensorly-torch in PyTorch and beside the uncompressed table.

The largest Criteo Kaggle table (10,131,227 x 16 as 200 x 220 x 250 slices, rank 32; TT-Rec, Table 2), one id a bag, a
power law of exponent 1.05 over the rows. Outputs and core gradients of both sides are compared before they are timed.
All sides keep the memory that they free, as `jrec train` does.

    peers       forward; forward and backward (outputs and the cores' gradients), beside TT-Rec's algorithm as batched
                GEMMs in PyTorch and tensorly-torch's FactorizedEmbedding; a step, which is forward, backward and
                Adagrad's update of the cores, beside jrec's uncompressed table with row-wise Adagrad; and the other
                contractions in XLA
    sweep       the step over ranks, dims and rows
    crossover   the step over rows up to 100 million, for ids of a power law and of all rows alike: from which size on
                the compressed table, which the caches hold, beats the uncompressed one, which they do not
    breakdown   reuse, gradient aggregation and fused update, each switched off (EL-Rec, Figures 14, 17 and 18)
    memory      of a step, over rows and batches (TT-Rec, Figure 8)
    choices     which contraction is chosen, counted (EL-Rec, Equation 5)
    footprints  parameters of tables and models, counted (TT-Rec, Table 2 and Figure 5; EL-Rec, Table III)
    pooling     the step with bags of 1, 10 and 100 ids (TT-Rec, Figure 11)
    cache       the step with a cache of full rows, at hit rates from 0 to 100 % (TT-Rec, Figure 12)

Examples:
  python -m benchmarks.tt
  python -m benchmarks.tt --parts peers --lookups 32768
"""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Callable, Mapping

import jax
import numpy as np

from benchmarks import harness, tt_breakdown, tt_cache, tt_choices, tt_footprints, tt_memory
from benchmarks.peers import client
from benchmarks.tt_side import KAGGLE_ROWS, Side, describe, shape_of
from jrec.ops import tt

LOOKUPS = (4096, 32768)
RANK, DIM = 32, 16
TOLERANCE = 1e-4  # of gradients, by the greatest: peers add up a hot slice's float32 terms in another order
OTHERS = (("unique", "xla"), ("dense", "xla"), ("naive", "xla"))
PEERS = {"torch_tt": ("naive", "TT-Rec's"), "tltorch_tt": ("blocktt", "tensorly-torch's")}
SWEEP_ROWS = 2_500_000  # of the tables of other dims: the uncompressed one must fit beside
SWEEP = (
    *((KAGGLE_ROWS, DIM, rank) for rank in (8, 16, 64, 128)),
    *((SWEEP_ROWS, dim, RANK) for dim in (16, 32, 64, 128)),
    (40_000_000, DIM, RANK),
)
CROSSOVER_ROWS = (100_000, 1_000_000, 10_000_000, 100_000_000)
CROSSOVER_RANKS = (8, 32)
POOLING = (1, 10, 100)
POOLED_BAGS = 2048
PARTS = ("peers", "sweep", "crossover", "breakdown", "memory", "choices", "footprints", "pooling", "cache")
SECONDS = 3.0  # of a pair of sides where there are many


def main() -> None:
    """Runs the benchmark."""
    arguments = _parser().parse_args()
    harness.keep_memory()
    jax.config.update("jax_platforms", "cpu")
    with harness.Report(arguments, "tt") as report:
        for measurement in arguments.parts:
            _RUNS[measurement](report, arguments)


def _parser() -> argparse.ArgumentParser:
    parser = harness.parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    parser.add_argument("--lookups", nargs="+", type=int, help=f"of peers; default: {' '.join(map(str, LOOKUPS))}")
    parser.add_argument("--rank", type=int, default=RANK, help="of peers; default: %(default)s")
    return parser


def _seconds(report: harness.Report) -> float:
    return min(SECONDS, report.seconds)


def _peers(report: harness.Report, arguments: argparse.Namespace) -> None:
    shape = shape_of(KAGGLE_ROWS, DIM, arguments.rank)
    lookups = arguments.lookups or (LOOKUPS[:1] if report.quick else LOOKUPS)
    with contextlib.ExitStack() as stack:
        peers = {name: stack.enter_context(client.start_or_skip(name)) for name in PEERS}
        for count in lookups:
            side, case = Side(shape, count), describe(shape, count)
            report.note(f"{case}: {tt.explain(shape, count)}")
            report.add(case, "compression", shape.compression, "x")
            _beside(report, side, case, {name: peer for name, peer in peers.items() if peer is not None})
            report.compare(
                case, "step", harness.timed(side.step), peer="uncompressed table", theirs=harness.timed(side.plain_step)
            )
            for contraction, implementation in OTHERS:
                metric = f"forward and backward, {contraction} in XLA"
                run = harness.timed(side.program(True, contraction, implementation))
                report.compare(case, metric, run, seconds=_seconds(report))


def _beside(report: harness.Report, side: Side, case: str, peers: Mapping[str, client.Peer]) -> None:
    """Forward and backward of jrec and of all peers in turn, after their results have been compared."""
    arrays = {f"core{k}": np.asarray(core) for k, core in enumerate(side.cores)}
    arrays |= {"ids": np.asarray(side.ids[:, 0]), "gradient": np.asarray(side.gradient)}
    named: dict[str, client.Peer] = {}
    for name, peer in peers.items():
        setup, label = PEERS[name]
        peer.setup(setup, arrays)
        _compare(side, peer, case)
        named[f"{label}, torch {peer.versions['torch']}"] = peer
    for metric, backward in (("forward", False), ("forward and backward", True)):
        report.compare_all(
            case,
            metric,
            harness.timed(side.program(backward)),
            {label: functools.partial(peer.run, metric) for label, peer in named.items()},
            peer_versions={label: peer.versions for label, peer in named.items()},
        )


def _compare(side: Side, peer: client.Peer, case: str) -> None:
    """Raises SystemExit unless outputs and core gradients agree."""
    out, gradients = side.program(True)()
    theirs = peer.call("results")
    ours = {"out": out, **{f"core{k}": g for k, g in enumerate(gradients)}}
    for name, array in ours.items():
        own, other = np.asarray(array).ravel(), theirs[name].ravel()
        if np.abs(own - other).max() > TOLERANCE * np.abs(other).max():
            raise SystemExit(f"{case}: jrec's {name} differs from the peer's by up to {np.abs(own - other).max()}")


def _steps(report: harness.Report, shape: tt.TTShape, lookups: int, pooling: int = 1, *, uniform: bool = False) -> None:
    side = Side(shape, lookups, pooling, uniform=uniform)
    case = describe(shape, lookups, pooling, uniform=uniform)
    report.add(case, "compression", shape.compression, "x")
    report.compare(
        case,
        "step",
        harness.timed(side.step),
        peer="uncompressed table",
        theirs=harness.timed(side.plain_step),
        seconds=_seconds(report),
    )


def _sweep(report: harness.Report, arguments: argparse.Namespace) -> None:
    del arguments
    for rows, dim, rank in SWEEP[:1] if report.quick else SWEEP:
        _steps(report, shape_of(rows, dim, rank), LOOKUPS[0] if report.quick else LOOKUPS[1])


def _crossover(report: harness.Report, arguments: argparse.Namespace) -> None:
    del arguments
    for rows in CROSSOVER_ROWS[:1] if report.quick else CROSSOVER_ROWS:
        for rank in CROSSOVER_RANKS:
            for uniform in (False, True):
                _steps(report, shape_of(rows, DIM, rank), LOOKUPS[1], uniform=uniform)


def _pooling(report: harness.Report, arguments: argparse.Namespace) -> None:
    del arguments
    shape, bags = shape_of(KAGGLE_ROWS, DIM, RANK), 256 if report.quick else POOLED_BAGS
    for pooling in POOLING[1:2] if report.quick else POOLING:
        _steps(report, shape, bags * pooling, pooling)


def _breakdown(report: harness.Report, arguments: argparse.Namespace) -> None:
    tt_breakdown.run(report, seconds=_seconds(report))


def _cache(report: harness.Report, arguments: argparse.Namespace) -> None:
    tt_cache.run(report, seconds=_seconds(report))


def _memory(report: harness.Report, arguments: argparse.Namespace) -> None:
    tt_memory.run(report)


def _choices(report: harness.Report, arguments: argparse.Namespace) -> None:
    del arguments
    tt_choices.run(report)


def _footprints(report: harness.Report, arguments: argparse.Namespace) -> None:
    del arguments
    tt_footprints.run(report)


_RUNS: dict[str, Callable[[harness.Report, argparse.Namespace], None]] = {
    "peers": _peers,
    "sweep": _sweep,
    "crossover": _crossover,
    "breakdown": _breakdown,
    "memory": _memory,
    "choices": _choices,
    "footprints": _footprints,
    "pooling": _pooling,
    "cache": _cache,
}


if __name__ == "__main__":
    main()
