"""Tensor-train tables: against TT-Rec's algorithm in PyTorch, against the uncompressed table, and one by one.

The largest Criteo Kaggle table (10,131,227 x 16 as 200 x 220 x 250 slices, rank 32; TT-Rec, Table 2), one id a bag, a
power law of exponent 1.05 over the rows. Outputs and core gradients of both sides are compared before they are timed.

    forward                     pooled rows
    forward and backward        those and the cores' gradients; with a contraction's name, that one in place of the
                                chosen one (EL-Rec's reuse and aggregation switched off: "naive")
    step                        forward, backward and Adagrad's update of the cores; the peer is jrec's uncompressed
                                table with row-wise Adagrad

Examples:
  python -m benchmarks.tt --device cpu
  python -m benchmarks.tt --lookups 32768 --rank 8 32 64 128 --rows 10131227 40000000 --dim 16 64
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness, workloads
from benchmarks.peers import client
from jrec import ops
from jrec.ops import tt

KAGGLE_ROWS = 10_131_227
LOOKUPS = (4096, 32768)
EXPONENT = 1.05
TOLERANCE = 1e-4  # of gradients, by the greatest: the peer adds up a hot slice's float32 terms in another order
OTHERS = (("unique", "xla"), ("dense", "xla"), ("naive", "xla"))
PLAIN = ops.RowWiseAdagrad(learning_rate=0.01)
FUSED = ops.Adagrad(learning_rate=0.01)


class Side:
    """jrec's side of a case: cores, ids and the jitted programs over them."""

    def __init__(self, shape: tt.TTShape, lookups: int) -> None:
        self.shape = shape
        self.cores = tt.tt_init(shape, jax.random.key(0))
        rng = np.random.default_rng(0)
        self.ids = jnp.asarray(workloads.zipf_ids(rng, shape.rows, lookups, EXPONENT).reshape(-1, 1))
        self.gradient = jnp.asarray(rng.standard_normal((lookups, shape.dim), np.float32))
        self._cores = jax.tree.map(jnp.array, self.cores)  # those that are trained
        self._core_slots = tt.tt_init_slots(FUSED, self._cores)
        self._table: jax.Array | None = None
        self._slots: Any = None

        def step(cores: Any, slots: Any, ids: jax.Array, gradient: jax.Array) -> Any:
            activations, residuals = tt.tt_lookup(cores, shape, ops.Bags(ids=ids))
            gradient = _after(activations, gradient)
            return tt.tt_apply_gradients(FUSED, cores, slots, shape, residuals, gradient)

        def plain(table: Any, slots: Any, ids: jax.Array, gradient: jax.Array) -> Any:
            activations, residuals = ops.lookup({"table": table}, {"table": ops.Bags(ids=ids)})
            gradient = _after(activations["table"], gradient)
            updated = ops.casted_update(PLAIN, table, slots, residuals["table"].cast, gradient)
            return *updated, activations["table"]

        self._step = jax.jit(step, donate_argnums=(0, 1))
        self._plain = jax.jit(plain, donate_argnums=(0, 1))

    def program(self, backward: bool, contraction: Any = None, implementation: Any = None) -> Callable[[], Any]:
        """Forward, or forward and backward, as a callable."""
        bag = functools.partial(
            tt.tt_embedding_bag, shape=self.shape, contraction=contraction, implementation=implementation
        )

        @jax.jit
        def forward(cores: Any, ids: jax.Array, _: jax.Array) -> Any:
            return bag(cores, ids=ids)

        @jax.jit
        def both(cores: Any, ids: jax.Array, gradient: jax.Array) -> Any:
            out, transpose = jax.vjp(functools.partial(bag, ids=ids), cores)
            return out, transpose(gradient)[0]

        return lambda: (both if backward else forward)(self.cores, self.ids, self.gradient)

    def step(self) -> Any:
        """One training step of the cores."""
        self._cores, self._core_slots = self._step(self._cores, self._core_slots, self.ids, self.gradient)
        return self._cores

    def plain_step(self) -> Any:
        """One training step of the uncompressed table."""
        if self._table is None:
            self._table = jnp.zeros((self.shape.rows, self.shape.dim))
            self._slots = PLAIN.init(self._table)
        self._table, self._slots, out = self._plain(self._table, self._slots, self.ids, self.gradient)
        return self._table, out


def _after(activations: jax.Array, gradient: jax.Array) -> jax.Array:
    """The gradient, known no sooner than the activations, as in training: else XLA updates a copy of the table."""
    return jax.lax.optimization_barrier((activations, gradient))[1]


def main() -> None:
    """Runs the benchmark."""
    arguments = _parser().parse_args()
    jax.config.update("jax_platforms", arguments.device)
    lookups = arguments.lookups or (LOOKUPS[:1] if arguments.quick else LOOKUPS)
    with harness.Report(arguments, "tt") as report, client.start_or_skip("torch_tt") as peer:
        for rows in arguments.rows:
            for dim in arguments.dim:
                for rank in arguments.rank:
                    for count in lookups:
                        _measure(report, _shape(rows, dim, rank), count, peer)


def _parser() -> argparse.ArgumentParser:
    parser = harness.parser(__doc__)
    parser.add_argument("--device", choices=("cpu",), default="cpu", help="where to run")
    parser.add_argument("--lookups", nargs="+", type=int, help=f"default: {' '.join(map(str, LOOKUPS))}")
    parser.add_argument("--rows", nargs="+", type=int, default=(KAGGLE_ROWS,), help="default: %(default)s")
    parser.add_argument("--dim", nargs="+", type=int, default=(16,), help="default: %(default)s")
    parser.add_argument("--rank", nargs="+", type=int, default=(32,), help="default: %(default)s")
    return parser


def _shape(rows: int, dim: int, rank: int) -> tt.TTShape:
    if (rows, dim) == (KAGGLE_ROWS, 16):
        return tt.TTShape(rows=rows, dim=dim, row_factors=(200, 220, 250), dim_factors=(2, 2, 4), ranks=(rank, rank))
    return tt.TTShape.search(rows, dim, ranks=rank)


def _measure(report: harness.Report, shape: tt.TTShape, lookups: int, peer: client.Peer | None) -> None:
    side = Side(shape, lookups)
    case = f"{shape.rows:,} rows x {shape.dim}, rank {shape.ranks[0]}, {lookups:,} lookups"
    report.note(f"{case}: {tt.explain(shape, lookups)}")
    report.add(case, "compression", shape.compression, "x")
    label, versions = None, None
    if peer is not None:
        arrays = {f"core{k}": np.asarray(core) for k, core in enumerate(side.cores)}
        arrays |= {"ids": np.asarray(side.ids[:, 0]), "gradient": np.asarray(side.gradient)}
        peer.setup("naive", arrays)
        label, versions = f"TT-Rec's, torch {peer.versions['torch']}", peer.versions
        _compare(side, peer, case)
    for metric, backward in (("forward", False), ("forward and backward", True)):
        report.compare(
            case,
            metric,
            harness.timed(side.program(backward)),
            peer=label,
            theirs=functools.partial(peer.run, metric) if peer else None,
            peer_versions=versions,
        )
    report.compare(
        case, "step", harness.timed(side.step), peer="uncompressed table", theirs=harness.timed(side.plain_step)
    )
    for contraction, implementation in OTHERS:
        metric = f"forward and backward, {contraction} in XLA"
        report.compare(case, metric, harness.timed(side.program(True, contraction, implementation)))


def _compare(side: Side, peer: client.Peer, case: str) -> None:
    """Raises SystemExit unless outputs and core gradients agree."""
    out, gradients = side.program(True)()
    theirs = peer.call("results")
    ours = {"out": out, **{f"core{k}": g for k, g in enumerate(gradients)}}
    for name, array in ours.items():
        own, other = np.asarray(array).ravel(), theirs[name].ravel()
        if np.abs(own - other).max() > TOLERANCE * np.abs(other).max():
            raise SystemExit(f"{case}: jrec's {name} differs from the peer's by up to {np.abs(own - other).max()}")


if __name__ == "__main__":
    main()
