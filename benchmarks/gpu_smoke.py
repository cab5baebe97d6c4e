"""The first minute on a GPU: is the device there, how fast is its memory, and are the kernels right?

Each of gather-reduce, fused update, cast and TT expansion runs once by XLA and once by the kernels on hashed, skewed
ids with empty bags and padding, and is compared with NumPy in float64. What is right is then timed.

Examples:
  python -m benchmarks.gpu_smoke
  python -m benchmarks.gpu_smoke --small --implementation pallas     # once, on the GPU, with nothing timed
  python -m benchmarks.gpu_smoke --tiny
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import gpu_run, gpu_timing, harness, resume, workloads
from benchmarks.gpu_sides import filled
from jrec import ops
from jrec.ops import tt
from jrec.ops.dispatch import Implementation

CHECKS = ("gather", "fused update", "cast", "tt expand")
IMPLEMENTATIONS: tuple[Implementation, ...] = ("xla", "pallas")
TOLERANCE = 2e-5  # of the largest value: float32 sums of up to thousands of terms
RATE = 0.1
OPTIMIZER = ops.RowWiseAdagrad(learning_rate=RATE, initial_accumulator=0.1, eps=1e-7)
Check = Callable[[], tuple[float, gpu_timing.Loop]]


class Inputs:
    """Ragged bags over one table: some empty, one row in every fifth lookup, and padding behind the last bag."""

    def __init__(self, *, rows: int, dim: int, bags: int, length: int) -> None:
        self.rows, self.dim, self.bags = rows, dim, bags
        rng = np.random.default_rng(0)
        lengths = rng.integers(0, 2 * length, bags)
        self.offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        ids = workloads.hashed_ids(workloads.zipf_ids(rng, rows, int(self.offsets[-1]) + 64, 1.1), rows)
        ids[::5] = ids[0]
        self.ids = ids
        self.real = ids[: self.offsets[-1]]
        self.bag_of = np.repeat(np.arange(bags), lengths)

    @functools.cached_property
    def table(self) -> jax.Array:
        """(rows, dim) float32."""
        return filled(self.rows, self.dim)

    @functools.cached_property
    def gradients(self) -> jax.Array:
        """(bags, dim) float32."""
        return filled(self.bags, self.dim) * jnp.float32(0.1)

    @functools.cached_property
    def batches(self) -> list[tuple[jax.Array, jax.Array]]:
        """Two batches of (ids, offsets), the same ids twice: this is a smoke test, not a benchmark."""
        return [(jnp.asarray(self.ids), jnp.asarray(self.offsets))] * 2

    def checks(self, name: Implementation, rounds: int) -> dict[str, Check]:
        """What is checked, by name: (largest difference as a fraction of the largest value, loop that times it)."""
        made = dict(zip(CHECKS, (self._gather, self._update, self._cast, self._expand), strict=True))
        return {name_of_check: functools.partial(check, name, rounds) for name_of_check, check in made.items()}

    def _gather(self, name: Implementation, rounds: int) -> tuple[float, gpu_timing.Loop]:
        def step(table: jax.Array, state: Any, batch: Any) -> tuple[Any, jax.Array]:
            return state, ops.gather_reduce(table, *batch, implementation=name)

        loop = gpu_timing.Loop(step, self.table, None, self.batches, rounds=rounds)
        loop.dispatch()
        want = np.zeros((self.bags, self.dim))
        np.add.at(want, self.bag_of, np.asarray(self.table, np.float64)[self.real])
        return _difference(np.asarray(loop.outputs[0]), want), loop

    def _cast(self, name: Implementation, rounds: int) -> tuple[float, gpu_timing.Loop]:
        def step(fixed: Any, state: Any, batch: Any) -> tuple[Any, Any]:
            return state, ops.tensor_cast(*batch, num_rows=self.rows, implementation=name)

        loop = gpu_timing.Loop(step, None, None, self.batches, rounds=rounds)
        loop.dispatch()
        cast = loop.outputs[0]
        order = np.argsort(self.real, kind="stable")
        unique, counts = np.unique(self.real, return_counts=True)
        number = int(cast.num_unique)
        equal = (
            number == unique.size
            and np.array_equal(np.asarray(cast.rows)[:number], unique)
            and np.array_equal(np.asarray(cast.offsets)[: number + 1], np.concatenate([[0], np.cumsum(counts)]))
            and np.array_equal(np.asarray(cast.sources)[: order.size], self.bag_of[order])
        )
        return 0.0 if equal else float("inf"), loop

    def _update(self, name: Implementation, rounds: int) -> tuple[float, gpu_timing.Loop]:
        cast = jax.jit(functools.partial(ops.tensor_cast, num_rows=self.rows, implementation="xla"))(*self.batches[0])

        def step(gradients: jax.Array, state: Any, cast: Any) -> tuple[Any, None]:
            table, slots = state
            return ops.casted_update(OPTIMIZER, table, slots, cast, gradients, implementation=name), None

        gradients = self.gradients
        state = jnp.array(self.table), OPTIMIZER.init(self.table)
        once = jax.jit(lambda *arguments: step(*arguments)[0])(gradients, state, cast)
        unique, inverse = np.unique(self.real, return_inverse=True)
        summed = np.zeros((unique.size, self.dim))
        np.add.at(summed, inverse, np.asarray(self.gradients, np.float64)[self.bag_of])
        want = np.array(self.table, np.float64)
        total = OPTIMIZER.initial_accumulator + np.mean(summed**2, axis=1, keepdims=True)
        want[unique] -= RATE * summed / np.sqrt(total + OPTIMIZER.eps)
        return _difference(np.asarray(once[0]), want), gpu_timing.Loop(
            step, gradients, state, [cast, cast], rounds=rounds
        )

    def _expand(self, name: Implementation, rounds: int) -> tuple[float, gpu_timing.Loop]:
        shape = tt.TTShape.search(self.rows, 16, ranks=8)
        cores = tt.tt_init(shape, jax.random.key(0))

        def step(cores: Any, state: Any, batch: Any) -> tuple[Any, jax.Array]:
            return state, tt.tt_embedding_bag(
                cores, shape, batch[0], batch[1], contraction="unique", implementation=name
            )

        loop = gpu_timing.Loop(step, cores, None, self.batches, rounds=rounds)
        loop.dispatch()
        unique, inverse = np.unique(self.real, return_inverse=True)
        want = np.zeros((self.bags, shape.dim))
        np.add.at(want, self.bag_of, _tt_rows([np.asarray(c, np.float64) for c in cores], unique)[inverse])
        return _difference(np.asarray(loop.outputs[0])[:, : shape.dim], want), loop


def _tt_rows(cores: list[np.ndarray], rows: np.ndarray) -> np.ndarray:
    """(n, dim) float64: rows of a tensor-train table, the last core's digit changing fastest."""
    digits, rest = [], rows.astype(np.int64)
    for core in reversed(cores):
        rest, digit = np.divmod(rest, len(core))
        digits.append(digit)
    product = np.ones((len(rows), 1, 1))
    for core, digit in zip(cores, reversed(digits), strict=True):
        product = np.einsum("nab,nbcd->nacd", product, core[digit])
        product = product.reshape(len(rows), -1, core.shape[-1])
    return product.reshape(len(rows), -1)


def _difference(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.max(np.abs(got - want)) / np.max(np.abs(want)))


def _check(report: harness.Report, case: str, implementation: str, check: Check, seconds: float) -> None:
    try:
        error, loop = check()
    except NotImplementedError as reason:
        report.line({"case": case, "metric": implementation, "absent": resume.describe(reason)})
        return
    report.add(case, f"{implementation}, largest difference", min(error, 1e30), "of the largest value")
    if not error < TOLERANCE:  # NaN fails too
        raise ValueError(f"{case} by {implementation} is wrong: it differs from float64 by {error:.1e}")
    if seconds == 0:
        return
    timing = loop.time(seconds=seconds)
    report.add(case, implementation, 1e6 * timing.seconds, "us", details=timing.details())


def _device(report: harness.Report) -> None:
    device = jax.devices()[0]
    report.line(
        {"device": device.device_kind, "platform": device.platform, "count": len(jax.devices()), "smi": gpu_run.smi()}
    )


def work(arguments: argparse.Namespace, report: harness.Report, cases: resume.Cases) -> None:
    """Runs every check that has not ended."""
    tiny: bool = arguments.tiny
    once: bool = tiny or arguments.small or arguments.once
    inputs = Inputs(rows=1_000_000, dim=64, bags=8192, length=10)
    if tiny or arguments.small:
        inputs = Inputs(rows=60, dim=8, bags=6, length=3)
    size = 1 << 20 if once else gpu_timing.COPY_BYTES
    made: dict[str, Callable[[], None]] = {
        "device": lambda: _device(report),
        "copy": lambda: report.add("copy", "bandwidth", gpu_timing.copy_bandwidth(size) / 1e9, "GB/s"),
    }
    for implementation in arguments.implementation:
        for case, check in inputs.checks(implementation, 1 if once else 50).items():
            if case not in arguments.check:
                continue
            made[f"{case}, {implementation}"] = functools.partial(
                _check, report, case, implementation, check, 0.0 if once else 0.2
            )
    # XLA multiplies float32 matrices in TF32 by default, of 10 bits; the kernels do not.
    with jax.default_matmul_precision("highest"):
        cases.run(made)
    if cases.failed:
        raise SystemExit(1)


def main() -> None:
    """Runs the checks."""
    parser = gpu_run.parser(__doc__)
    parser.add_argument("--implementation", nargs="+", choices=IMPLEMENTATIONS, default=IMPLEMENTATIONS)
    parser.add_argument("--check", nargs="+", choices=CHECKS, default=CHECKS, help="only these checks")
    parser.add_argument("--small", action="store_true", help="tiny cases on the GPU, nothing timed, as for a sanitizer")
    parser.add_argument("--once", action="store_true", help="nothing timed, as for a profiler")
    arguments = parser.parse_args()
    gpu_run.run(arguments, "gpu_smoke", functools.partial(work, arguments))


if __name__ == "__main__":
    main()
