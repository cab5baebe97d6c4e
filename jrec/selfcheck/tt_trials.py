"""The check's programs for products of tensor-train levels, and for their gradients."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from jrec.ops.tt.index import Level
from jrec.ops.verdicts import KernelClass
from jrec.selfcheck.reference import HALF_UNIT
from jrec.selfcheck.trial import Draw, Program, worst

XLA_SLACK = 2.0**14  # XLA multiplies float32 matrices in TF32 on the tensor cores, of 10 bits; the kernels do not
_SEED = 21


def tt_programs(kernel_class: KernelClass, tiny: bool) -> Iterator[Program]:
    """Programs for one shape of level; see ``trials.programs``."""
    assert not isinstance(kernel_class.dim, int)
    height, rank, columns, right_rank = kernel_class.dim
    parents, slices, capacity = (5, 6, 20) if tiny else (60, 70, 1500)
    rng, draws = np.random.default_rng(_SEED), []
    for kind, real in (("few entries", capacity // 3), ("padded tail", capacity - 3), ("all padding", 0)):
        if tiny and kind == "few entries":
            continue
        pairs = np.sort(rng.choice(parents * slices, real, replace=False))
        if kind == "few entries":  # one slice that most entries choose
            pairs = np.unique(np.where(rng.random(real) < 0.7, pairs // slices * slices, pairs))
            real = pairs.size
        of_parent, of_digit = np.full(capacity, parents, np.int32), np.full(capacity, slices, np.int32)
        of_parent[:real], of_digit[:real] = pairs // slices, pairs % slices
        gradient = np.full((capacity, height * columns, right_rank), np.nan, np.float32)  # padding's is never read
        gradient[:real] = rng.normal(size=(real, *gradient.shape[1:]))
        dtype = jnp.dtype(kernel_class.dtype)
        below = rng.normal(size=(parents, height, rank)).astype(np.float32)
        core = rng.normal(size=(slices, rank, columns, right_rank)).astype(dtype)
        level = Level(parents=of_parent, digits=of_digit, count=np.int32(real))  # pyright: ignore[reportArgumentType]
        arguments = below, core, level, gradient
        draws.append(Draw(name=kind, arguments=arguments, judge=functools.partial(_judge, arguments, real)))
    yield Program(
        name="level",
        build=lambda table, implementation: functools.partial(table.tt_products, implementation),
        draws=tuple(draws),
        xla_slack=XLA_SLACK,
    )


def _judge(arguments: tuple[Any, ...], real: int, out: Any, slack: float) -> float:
    below, core, level, gradient = arguments
    parents, digits = level.parents[:real], level.digits[:real]
    left, right = below.astype(np.float64)[parents], core.astype(np.float64)[digits]
    height, (rank, columns, right_rank) = below.shape[1], core.shape[1:]
    slope = gradient[:real].astype(np.float64).reshape(real, height, columns, right_rank)
    errors = []
    product, size = (np.einsum("uar,urns->uans", x, y) for x, y in ((left, right), (np.abs(left), np.abs(right))))
    shape = real, height * columns, right_rank
    off = (rank + 2) * HALF_UNIT * slack
    errors.append(worst("products", out[0][:real], product.reshape(shape), off * size.reshape(shape)))
    for name, got, places, formula, factor, terms in (
        ("gradient of the level below", out[1], parents, "uans,urns->uar", right, columns * right_rank),
        ("gradient of the core", out[2], digits, "uans,uar->urns", left, height),
    ):
        want, size = (np.zeros(got.shape) for _ in range(2))
        np.add.at(want, places, np.einsum(formula, slope, factor))
        np.add.at(size, places, np.einsum(formula, np.abs(slope), np.abs(factor)))
        entries = np.bincount(places, minlength=got.shape[0]).reshape(-1, *[1] * (got.ndim - 1))
        # Some kernels, and XLA, sum every slice or parent of the table; one that no entry chose must give zero.
        errors.append(worst(name, got, want, (terms * entries + 2) * HALF_UNIT * slack * size))
    return max(errors)
