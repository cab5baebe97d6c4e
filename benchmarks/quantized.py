"""Lookups of INT8 and INT4 rows on a CPU: jrec's native kernel against FBGEMM's, in one run.

The cases of ``benchmarks.embedding``. Both sides sum rows of a scale, a bias and 8 or 4 bits a value into float32 bags,
all tables in one call; FBGEMM keeps scale and bias in float16, jrec in float32. Outputs are compared with those of
float32 rows before anything is timed. "Against float32 rows" compares with jrec's own lookups of unquantized rows.

Examples:
  python -m benchmarks.quantized
  python -m benchmarks.quantized --case cpu one-hot --out results.json
"""

from __future__ import annotations

import contextlib
import functools

import numpy as np

from benchmarks import harness, workloads
from benchmarks.embedding import CASES, QUICK_CASES
from benchmarks.peers import client
from jrec.native.batched_lookup import Lookup, lookup_many, table_rows
from jrec.serving.quantize import quantize

BITS = (8, 4)


def main() -> None:
    """Runs the benchmark."""
    parser = harness.parser(__doc__)
    parser.add_argument("--case", nargs="+", choices=tuple(CASES), help="default: all; with --quick the first one")
    arguments = parser.parse_args()
    names = arguments.case or (QUICK_CASES if arguments.quick else tuple(CASES))
    with harness.Report(arguments, "quantized") as report, contextlib.ExitStack() as stack:
        peer = stack.enter_context(client.start_or_skip("fbgemm_int"))
        for name in names:
            for bits in BITS:
                _measure(report, CASES[name], bits, peer)


def _measure(report: harness.Report, workload: workloads.Workload, bits: int, peer: client.Peer | None) -> None:
    tables = [workloads.initial_table(workload, t, seed=0) for t in range(workload.num_tables)]
    ids = [np.ascontiguousarray(i, np.int32) for i in workloads.table_ids(workload, seed=0)]

    def lookups(rows: list[np.ndarray]) -> list[Lookup]:
        return [Lookup(rows=table_rows(r, workload.dim), ids=i) for r, i in zip(rows, ids, strict=True)]

    threads = harness.cores()
    of_floats, of_quantized = lookups(tables), lookups([quantize(table, bits) for table in tables])
    exact = np.concatenate(lookup_many(of_floats, threads=threads), axis=1)
    case = f"{workload.name}, INT{bits}, {workload.lookups:,} lookups, {sum(workload.rows):,} rows x {workload.dim}"
    outputs = {"jrec": np.concatenate(lookup_many(of_quantized, threads=threads), axis=1)}
    if peer is not None:
        peer.setup("fbgemm", {}, workload=workload.to_json(), seed=0, bits=bits)
        outputs["FBGEMM"] = peer.call("outputs")["outputs"]
    size = np.sqrt(np.mean(np.square(exact)))
    errors = {side: float(np.sqrt(np.mean(np.square(out - exact))) / size) for side, out in outputs.items()}
    if worst := [side for side, error in errors.items() if error > 4 / 2**bits]:
        raise SystemExit(f"{case}: {worst[0]} is off by {errors[worst[0]]:.1%} of the outputs' root mean square")
    ours = harness.timed(functools.partial(lookup_many, of_quantized, threads=threads))
    for side, error in errors.items():
        report.add(case, f"error of outputs, {side}", 100 * error, unit="% of their root mean square")
    if peer is not None:
        label = f"FBGEMM {peer.versions['fbgemm_gpu-cpu']}"
        report.compare(
            case, "forward", ours, peer=label, theirs=functools.partial(peer.run, "forward"),
            peer_versions=peer.versions,
        )  # fmt: skip
    floats = harness.timed(functools.partial(lookup_many, of_floats, threads=threads))
    report.compare(case, "forward, against float32 rows", ours, peer="jrec, float32 rows", theirs=floats)


if __name__ == "__main__":
    main()
