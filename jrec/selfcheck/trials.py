"""What the check runs of each kernel class: programs, draws of their inputs, and judges of what comes out."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np

from jrec import ops
from jrec.ops.dispatch import Implementation
from jrec.ops.types import Cast
from jrec.ops.verdicts import KernelClass
from jrec.row_optimizers import ROW_OPTIMIZERS
from jrec.selfcheck import reference
from jrec.selfcheck.inputs import KINDS, SIZES, TINY_SIZES, LookupSizes, draw_lookups, draw_table
from jrec.selfcheck.kernels import BESIDE
from jrec.selfcheck.trial import Draw, Program, Wrong, worst
from jrec.selfcheck.tt_trials import tt_programs

SEED = 20
_BESIDE_DIM = 12  # of the second table where two share launches: other lanes and columns than any usual dim's


def programs(kernel_class: KernelClass, *, tiny: bool = False) -> Iterator[Program]:
    """The programs that a kernel class is checked by.

    Args:
      kernel_class: The class.
      tiny: Sizes for an interpreter.

    Raises:
      NotImplementedError: If the check knows no such kernel or optimizer.
    """
    if kernel_class.kernel not in _PROGRAMS:
        raise NotImplementedError(f"the check knows no kernel {kernel_class.kernel!r}, only {', '.join(_PROGRAMS)}")
    return _PROGRAMS[kernel_class.kernel](kernel_class, tiny)


def _sizes(tiny: bool) -> tuple[tuple[LookupSizes, ...], tuple[str, ...]]:
    return (TINY_SIZES, ("half padding", "one row", "past the end")) if tiny else (SIZES, KINDS)


def _gather_reduce(kernel_class: KernelClass, tiny: bool) -> Iterator[Program]:
    assert isinstance(kernel_class.dim, int)
    cases, kinds = _sizes(tiny)
    for sizes in cases:
        rng = np.random.default_rng(SEED)
        draws = []
        for kind in kinds:
            table, lookups = (
                draw_table(rng, sizes.rows, kernel_class.dim, kernel_class.dtype),
                draw_lookups(rng, sizes, kind),
            )
            arguments = table, lookups.ids, lookups.offsets, lookups.weights
            draws.append(Draw(name=kind, arguments=arguments, judge=functools.partial(_judge_sums, arguments)))
        yield Program(name=sizes.name, build=_call("gather_reduce"), draws=tuple(draws))
    # Tables that are looked up together share launches: code of its own, so checked beside another table.
    dim = min(kernel_class.dim, _BESIDE_DIM)
    beside = [
        dataclasses.replace(draw, judge=functools.partial(_judge_sums_beside, draw.arguments, dim)) for draw in draws
    ]

    def build(table: ModuleType, implementation: Implementation) -> Callable[..., Any]:
        return functools.partial(table.gather_reduce_beside, implementation, dim=dim)

    yield Program(name=f"{sizes.name}, two tables", build=build, draws=tuple(beside))


def _judge_sums_beside(arguments: tuple[Any, ...], dim: int, out: Any, slack: float) -> float:
    source, *lookups = arguments
    beside = source[:, :dim].astype(np.float32)
    return max(_judge_sums(arguments, out[0], slack), _judge_sums((beside, *lookups), out[1], slack))


def _judge_sums(arguments: tuple[Any, ...], out: Any, slack: float) -> float:
    want, off = reference.segment_sums(*arguments)
    return worst("sums", out, want, off * slack)


def _call(name: str) -> Callable[[ModuleType, Implementation], Callable[..., Any]]:
    return lambda table, implementation: functools.partial(getattr(table, name), implementation)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Step:
    """Hyperparameters of an update; ``keyed`` rounds 16-bit rows stochastically."""

    step: int
    scale: float
    common: Mapping[str, Any]
    keyed: bool = False


_PLAIN = _Step(step=0, scale=1.0, common={"learning_rate": 0.1})
_FULL = _Step(
    step=3,
    scale=0.5,
    common={"learning_rate": lambda step: 0.5 / (step + 1), "weight_decay": 0.01, "max_row_norm": 1.5},
    keyed=True,
)


OPTIMIZERS: dict[str, Callable[..., ops.RowOptimizer]] = {kind.__name__: kind for kind in ROW_OPTIMIZERS.values()}


def make_optimizer(name: str, **hyperparameters: Any) -> ops.RowOptimizer:
    """A row optimizer by its class name.

    Raises:
      NotImplementedError: If the check does not know it.
    """
    if name not in OPTIMIZERS:
        raise NotImplementedError(f"the check knows no optimizer {name!r}, only {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name](**hyperparameters)


def _optimizer(kernel_class: KernelClass, setup: _Step) -> ops.RowOptimizer:
    return make_optimizer(str(kernel_class.optimizer), **setup.common)


def _slots(rng: np.random.Generator, optimizer: Any, table: np.ndarray) -> dict[str, np.ndarray]:
    shapes = {name: table.shape if shape == "element" else table.shape[:1] for name, shape in optimizer.slots.items()}
    return {name: rng.uniform(0.1, 1.1, shape).astype(np.float32) for name, shape in shapes.items()}


def _options(kernel_class: KernelClass, setup: _Step, room: int) -> dict[str, Any]:
    options = {"step": setup.step, "gradient_scale": setup.scale, "rounding_key": None}
    if setup.keyed and kernel_class.dtype != "float32":
        numbers = np.random.default_rng(SEED).integers(-(2**31), 2**31, room).astype(np.int32)
        options |= {"rounding_key": np.array([1234567, 7654321], np.uint32), "rounding_rows": numbers}
    return options


def _update_program(kernel_class: KernelClass, name: str, setup: _Step, room: int, draws: tuple[Draw, ...]) -> Program:
    """``room`` is how many rows fit into an update."""
    optimizer, options = _optimizer(kernel_class, setup), _options(kernel_class, setup, room)

    def build(table: ModuleType, implementation: Implementation) -> Callable[..., Any]:
        return functools.partial(getattr(table, kernel_class.kernel), implementation, optimizer, **options)

    # With a key both must throw the same dice; sums that differ in their last bit seldom round to different sides.
    agreement = 0.99 if options["rounding_key"] is not None else 0.0
    return Program(name=name, build=build, draws=draws, donated=(0, 1), agreement=agreement)


def _casted_update(kernel_class: KernelClass, tiny: bool) -> Iterator[Program]:
    assert isinstance(kernel_class.dim, int)
    cases, kinds = _sizes(tiny)
    for sizes in cases:
        setup = _FULL if sizes.weighted else _PLAIN
        optimizer, rng = _optimizer(kernel_class, setup), np.random.default_rng(SEED)
        room = min(sizes.lookups, sizes.rows) + (20 if sizes.weighted else 0)  # unique rows never need the latter
        draws = []
        for kind in kinds:
            table, lookups = (
                draw_table(rng, sizes.rows, kernel_class.dim, kernel_class.dtype),
                draw_lookups(rng, sizes, kind),
            )
            slots = _slots(rng, optimizer, table)
            gradients = rng.normal(size=(sizes.bags, kernel_class.dim)).astype(np.float32)
            cast: dict[str, Any] = {**reference.cast_of(lookups.ids, lookups.offsets, sizes.rows, room)}
            arguments = table, slots, Cast(**cast), gradients, lookups.weights
            judge = functools.partial(_judge_casted, optimizer, setup, arguments)
            draws.append(Draw(name=kind, arguments=arguments, judge=judge))
        yield _update_program(kernel_class, sizes.name, setup, room, tuple(draws))
    yield _update_beside(kernel_class, setup, sizes.name, room, tuple(draws))


def _update_beside(kernel_class: KernelClass, setup: _Step, name: str, room: int, draws: tuple[Draw, ...]) -> Program:
    """The same draws with a second table, of another dim and optimizer, in the launches of the first."""
    beside = []
    for draw in draws:
        table, slots, *rest = draw.arguments
        other = table[:, :_BESIDE_DIM].astype(np.float32)
        judge = functools.partial(_judge_update_beside, draw, other)
        beside.append(Draw(name=draw.name, arguments=(table, slots, other, *rest), judge=judge))
    program = _update_program(kernel_class, f"{name}, two tables", setup, room, tuple(beside))
    optimizer, options = _optimizer(kernel_class, setup), _options(kernel_class, setup, room)

    def build(table: ModuleType, implementation: Implementation) -> Callable[..., Any]:
        return functools.partial(table.casted_update_beside, implementation, optimizer, **options)

    return dataclasses.replace(program, build=build, donated=(0, 1, 2))


def _judge_update_beside(draw: Draw, beside: np.ndarray, out: Any, slack: float) -> float:
    _, _, cast, gradients, weights = draw.arguments
    arguments = beside, {}, cast, gradients[:, : beside.shape[1]], weights
    error = _judge_casted(BESIDE, _PLAIN, arguments, (out[2], {}), slack)
    return max(draw.judge(out[:2], slack), error)


def _judge_casted(optimizer: Any, setup: _Step, arguments: tuple[Any, ...], out: Any, slack: float) -> float:
    table, slots, cast, gradients, weights = arguments
    sorted_weights = None if weights is None else weights.reshape(-1)[cast.positions]
    sums, off = reference.segment_sums(gradients, cast.sources, cast.offsets, sorted_weights)
    real = int(cast.num_unique)
    return _judge_update(optimizer, setup, table, slots, cast.rows[:real], sums[:real], off[:real], out, slack)


def _row_update(kernel_class: KernelClass, tiny: bool) -> Iterator[Program]:
    assert isinstance(kernel_class.dim, int)
    rows, room = (9, 7) if tiny else (400, 300)
    for setup, name in ((_PLAIN, "plain"), (_FULL, "all options")):
        optimizer, rng = _optimizer(kernel_class, setup), np.random.default_rng(SEED)
        draws = []
        for kind, real in (("some rows", room // 2), ("all rows", room), ("all padding", 0)):
            table = draw_table(rng, rows, kernel_class.dim, kernel_class.dtype)
            chosen = np.full(room, rows, np.int32)
            chosen[:real] = np.sort(rng.choice(rows, real, replace=False))
            gradients = rng.normal(size=(room, kernel_class.dim)).astype(np.float32)
            gradients[real:] = np.nan  # which nobody may read
            arguments = table, _slots(rng, optimizer, table), chosen, gradients
            judge = functools.partial(_judge_rows, optimizer, setup, real, arguments)
            draws.append(Draw(name=kind, arguments=arguments, judge=judge))
        yield _update_program(kernel_class, name, setup, room, tuple(draws))


def _judge_rows(optimizer: Any, setup: _Step, real: int, arguments: tuple[Any, ...], out: Any, slack: float) -> float:
    table, slots, rows, gradients = arguments
    sums = gradients[:real].astype(np.float64)
    return _judge_update(optimizer, setup, table, slots, rows[:real], sums, np.zeros(sums.shape), out, slack)


def _judge_update(
    optimizer: Any,
    setup: _Step,
    table: np.ndarray,
    slots: dict[str, np.ndarray],
    touched: np.ndarray,
    sums: np.ndarray,
    off: np.ndarray,
    out: Any,
    slack: float,
) -> float:
    scalars = {"step": setup.step, "scale": setup.scale}
    want, allowed = reference.updated(optimizer, table, slots, touched, sums, off, dice=setup.keyed, **scalars)
    error = worst("table", out[0], want[0], allowed[0] * slack)
    return max([error, *(worst(name, out[1][name], want[1][name], allowed[1][name] * slack) for name in want[1])])


def _tensor_cast(kernel_class: KernelClass, tiny: bool) -> Iterator[Program]:
    del kernel_class
    cases, kinds = _sizes(tiny)
    # Rows are sorted in 8, 16 or 32 bits, as the table needs, and each compiles to code of its own.
    for base, rows in [*((sizes, 40_000_000) for sizes in cases), (cases[0], 40_000), (cases[1], 200)]:
        sizes = dataclasses.replace(base, name=f"{base.name}, {rows:,} rows", rows=rows)
        room = min(sizes.lookups, sizes.rows) + (20 if sizes.weighted else 0)
        rng, draws = np.random.default_rng(SEED), []
        for kind in kinds:
            lookups = draw_lookups(rng, sizes, kind)
            want = reference.cast_of(lookups.ids, lookups.offsets, sizes.rows, room)
            judge = functools.partial(_judge_cast, want)
            draws.append(Draw(name=kind, arguments=(lookups.ids, lookups.offsets), judge=judge))

        def build(
            table: ModuleType, implementation: Implementation, rows: int = sizes.rows, room: int = room
        ) -> Callable[..., Any]:
            return lambda ids, offsets: table.tensor_cast(implementation, ids, offsets, rows, room)

        yield Program(name=sizes.name, build=build, draws=tuple(draws), agreement=1.0)


def _judge_cast(want: dict[str, np.ndarray], out: Any, slack: float) -> float:
    del slack
    for name, values in want.items():
        got = np.asarray(getattr(out, name))
        if not np.array_equal(got, values):
            place = np.argwhere(np.atleast_1d(got != values))[0].tolist()
            raise Wrong(
                f"{name}{place} is {np.atleast_1d(got)[tuple(place)]}, not {np.atleast_1d(values)[tuple(place)]}"
            )
    return 0.0


_PROGRAMS: dict[str, Callable[[KernelClass, bool], Iterator[Program]]] = {
    "gather_reduce": _gather_reduce,
    "casted_update": _casted_update,
    "row_update": _row_update,
    "tensor_cast": _tensor_cast,
    "tt_products": tt_programs,
}
KERNELS = tuple(_PROGRAMS)
