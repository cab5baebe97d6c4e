"""Every op under every transformation of JAX and in Flax's modules: the cells of the table in functional.md.

``python tests/transform_cases.py`` writes the table into the page; ``test_transforms`` runs the cells and holds the
page against them. An op is a function of floats by name, which may be differentiated, of ids, and of
``implementation``; of each there is a plain one, in ``jax.numpy``. A cell gives its numbers, or has a reason why not.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jrec import ops

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "functional.md"
BEGIN, END = "<!-- transformations: tests/transform_cases.py -->\n", "<!-- end of transformations -->\n"

ROWS, DIM, BAGS, LENGTH, COPIES = 8, 2, 4, 3, 2
SHAPE = ops.TTShape(rows=ROWS, dim=DIM, row_factors=(2, 2, 2), dim_factors=(1, 1, 2), ranks=(2, 2))
CORES = ("core 0", "core 1", "core 2")
ADAGRAD = ops.Adagrad(learning_rate=0.1)
Floats = dict[str, jax.Array]
Run = Callable[..., Any]


def floats(copy: int) -> Floats:
    """All that ops may take."""
    rng = np.random.default_rng(copy)
    shapes = {"table": (ROWS, DIM), "sum": (ROWS, DIM), "weights": (BAGS, LENGTH), "slopes": (BAGS, DIM)}
    shapes |= dict(zip(CORES, SHAPE.core_shapes, strict=True))
    return {name: jnp.asarray(rng.uniform(0.5, 1.5, shape), jnp.float32) for name, shape in shapes.items()}


def ids(copy: int) -> jax.Array:
    """Repeated and absent ones, and a bag of none."""
    drawn = np.random.default_rng(copy).integers(-1, ROWS, (BAGS, LENGTH))
    drawn[1] = -1
    return jnp.asarray(drawn, jnp.int32)


# The ops, and what they give by jax.numpy.


def embedding_bag(x: Floats, ids: jax.Array, **options: Any) -> jax.Array:
    return ops.embedding_bag(x["table"], ids, weights=x["weights"], combiner="mean", **options)


def gather_reduce(x: Floats, ids: jax.Array, **options: Any) -> jax.Array:
    """Of ragged segments."""
    offsets = jnp.arange(0, ids.size + 1, ids.shape[1], dtype=jnp.int32)
    return ops.gather_reduce(x["table"], ids.reshape(-1), offsets, weights=x["weights"].reshape(-1), **options)


def lookup(x: Floats, ids: jax.Array, **options: Any) -> jax.Array:
    return ops.lookup({"t": x["table"]}, {"t": ops.Bags(ids=ids, weights=x["weights"])}, **options)[0]["t"]


def tt_embedding_bag(x: Floats, ids: jax.Array, **options: Any) -> jax.Array:
    return ops.tt_embedding_bag(cores(x), SHAPE, ids, weights=x["weights"], **options)


def tensor_cast(x: Floats, ids: jax.Array, **options: Any) -> ops.Cast:
    return ops.tensor_cast(ids, num_rows=ROWS, **options)


def apply_gradients(x: Floats, ids: jax.Array, **options: Any) -> Any:
    bags, tables = {"t": ops.Bags(ids=ids, weights=x["weights"])}, {"t": x["table"]}
    _, residuals = ops.lookup(tables, bags, **options)
    gradients, slots = {"t": x["slopes"]}, {"t": {"sum": x["sum"]}}
    return jax.tree.leaves(ops.apply_gradients(ADAGRAD, tables, slots, residuals, gradients, **options))


def casted_update(x: Floats, ids: jax.Array, **options: Any) -> Any:
    cast, slots = tensor_cast(x, ids, **options), {"sum": x["sum"]}
    updated = ops.casted_update(ADAGRAD, x["table"], slots, cast, x["slopes"], weights=x["weights"], **options)
    return jax.tree.leaves(updated)


def row_update(x: Floats, ids: jax.Array, **options: Any) -> Any:
    """A gradient for each of four rows."""
    rows = jnp.arange(0, ROWS, 2, dtype=jnp.int32)
    return jax.tree.leaves(ops.row_update(ADAGRAD, x["table"], {"sum": x["sum"]}, rows, x["slopes"], **options))


def tt_apply_gradients(x: Floats, ids: jax.Array, **options: Any) -> Any:
    bags = ops.Bags(ids=ids, weights=x["weights"])
    _, residuals = ops.tt_lookup(cores(x), SHAPE, bags, **options)
    slots = ops.tt_init_slots(ADAGRAD, cores(x))
    return list(ops.tt_apply_gradients(ADAGRAD, cores(x), slots, SHAPE, residuals, x["slopes"], **options)[0])


def cores(x: Floats) -> Any:
    return tuple(x[name] for name in CORES)


def plain_bags(table: jax.Array, weights: jax.Array, ids: jax.Array) -> jax.Array:
    rows = jnp.take(table, jnp.maximum(ids, 0), axis=0)
    return jnp.sum(rows * jnp.where(ids >= 0, weights, 0)[..., None], axis=1)


def plain_sum(x: Floats, ids: jax.Array) -> jax.Array:
    return plain_bags(x["table"], x["weights"], ids)


def plain_mean(x: Floats, ids: jax.Array) -> jax.Array:
    return plain_sum(x, ids) / jnp.maximum(jnp.sum(ids >= 0, axis=1, keepdims=True), 1).astype(jnp.float32)


def plain_tt(x: Floats, ids: jax.Array) -> jax.Array:
    table = jnp.einsum("iuar,jrbs,kscv->ijkabc", *cores(x)).reshape(ROWS, DIM)
    return plain_bags(table, x["weights"], ids)


def plain_cast(x: Floats, ids: jax.Array) -> ops.Cast:
    keys = jnp.where(ids < 0, ROWS, ids).reshape(-1)
    positions = jnp.argsort(keys, stable=True).astype(jnp.int32)
    ordered = keys[positions]
    rows = jnp.unique(keys, size=min(ids.size, ROWS), fill_value=ROWS)
    ends = jnp.append(rows, jnp.int32(ROWS))
    return ops.Cast(
        rows=rows,
        offsets=jnp.searchsorted(ordered, ends, side="left").astype(jnp.int32),
        sources=jnp.where(ordered < ROWS, positions // jnp.int32(ids.shape[1]), ids.shape[0]),
        positions=positions,
        num_unique=jnp.sum(rows < ROWS, dtype=jnp.int32),
        num_rows=ROWS,
        num_bags=ids.shape[0],
    )


def plain_step(values: Any, sums: Any, gradients: Any) -> Any:
    sums = jax.tree.map(lambda total, gradient: total + gradient**2, sums, gradients)
    step = jax.tree.map(
        lambda v, s, g: v - 0.1 * g * jnp.where(s > 0, jax.lax.rsqrt(s + ADAGRAD.eps), 0), values, sums, gradients
    )
    return jax.tree.leaves((step, sums))


def plain_update(x: Floats, ids: jax.Array) -> Any:
    _, transpose = jax.vjp(lambda table: plain_bags(table, x["weights"], ids), x["table"])
    return plain_step(x["table"], x["sum"], transpose(x["slopes"])[0])


def plain_row_update(x: Floats, ids: jax.Array) -> Any:
    return plain_step(x["table"], x["sum"], jnp.zeros((ROWS, DIM)).at[::2].set(x["slopes"]))


def plain_tt_update(x: Floats, ids: jax.Array) -> Any:
    _, transpose = jax.vjp(lambda cores: plain_tt({**x, **dict(zip(CORES, cores, strict=True))}, ids), cores(x))
    return plain_step(cores(x), jax.tree.map(jnp.zeros_like, cores(x)), transpose(x["slopes"])[0])[: len(CORES)]


@dataclasses.dataclass(frozen=True)
class Op:
    """An op of the table."""

    run: Run
    plain: Run
    floats: tuple[str, ...]
    derivative: bool = True


UPDATED = ("table", "sum", "weights", "slopes")
OPS = {
    "embedding_bag": Op(embedding_bag, plain_mean, ("table", "weights")),
    "gather_reduce": Op(gather_reduce, plain_sum, ("table", "weights")),
    "lookup": Op(lookup, plain_sum, ("table", "weights")),
    "tt_embedding_bag": Op(tt_embedding_bag, plain_tt, (*CORES, "weights")),
    "tensor_cast": Op(tensor_cast, plain_cast, ("table",), derivative=False),
    "apply_gradients": Op(apply_gradients, plain_update, UPDATED, derivative=False),
    "casted_update": Op(casted_update, plain_update, UPDATED, derivative=False),
    "row_update": Op(row_update, plain_row_update, ("table", "sum", "slopes"), derivative=False),
    "tt_apply_gradients": Op(tt_apply_gradients, plain_tt_update, (*CORES, "weights", "slopes"), derivative=False),
}


# The transformations of a case.


@dataclasses.dataclass(frozen=True)
class Case:
    """A function of floats and ids, whose values and, where it has one, gradient are to stay the same."""

    run: Run
    names: tuple[str, ...]
    derivative: bool

    @property
    def one(self) -> tuple[Floats, jax.Array]:
        return self._drawn(0)

    @property
    def several(self) -> tuple[Floats, jax.Array]:
        """With a leading axis of ``COPIES``."""
        return jax.tree.map(lambda *each: jnp.stack(each), *map(self._drawn, range(COPIES)))

    def _drawn(self, copy: int) -> tuple[Floats, jax.Array]:
        drawn = floats(copy)
        return {name: drawn[name] for name in self.names}, ids(copy)

    def loss(self, x: Floats, ids: jax.Array) -> jax.Array:
        """Curved in what comes out."""
        return sum((jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(self.run(x, ids))), jnp.float32(0))

    def both(self, x: Floats, ids: jax.Array) -> Any:
        """What comes out, and the loss's gradient."""
        return self.run(x, ids), jax.grad(self.loss)(x, ids) if self.derivative else ()


def plainly(case: Case) -> Any:
    return jax.jit(case.both)(*case.one)


def in_jit(case: Case) -> Any:
    return jax.jit(case.run)(*case.one)


def grad(case: Case) -> Any:
    return jax.jit(jax.grad(case.loss))(*case.one)


def jvp(case: Case) -> Any:
    x, ids = case.one
    return jax.jit(lambda x: jax.jvp(lambda x: case.run(x, ids), (x,), (jax.tree.map(jnp.cos, x),)))(x)


def hessian(case: Case) -> Any:
    return jax.jit(jax.hessian(case.loss))(*case.one)


def vmap(case: Case) -> Any:
    """And the gradient of what all copies share."""
    return jax.jit(jax.vmap(case.both))(*case.several), _shared(case)


def _shared(case: Case) -> Any:
    def loss(x: Floats, ids: jax.Array) -> jax.Array:
        return jnp.sum(jax.vmap(case.loss, in_axes=(None, 0))(x, ids))

    return jax.jit(jax.grad(loss))(case.one[0], case.several[1]) if case.derivative else ()


def scan(case: Case) -> Any:
    def scanned(x: Floats, ids: jax.Array) -> Any:
        return jax.lax.scan(lambda carry, ids: (carry, case.run(x, ids)), None, ids)[1]

    return jax.jit(dataclasses.replace(case, run=scanned).both)(case.one[0], case.several[1])


def remat(case: Case) -> Any:
    return plainly(dataclasses.replace(case, run=jax.checkpoint(case.run)))


def pmap(case: Case) -> Any:
    return jax.pmap(case.both)(*case.several)


def each_alone(case: Case) -> Any:
    return jax.jit(jax.vmap(case.both))(*case.several)


def mesh(axis: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((COPIES,), ("d",), axis_types=(axis,), devices=jax.devices()[:COPIES])


def shard_map(case: Case) -> Any:
    """Each device has ids of its own, and floats, too; then all share these, with a gradient inside and one around."""

    def own(x: Floats, ids: jax.Array) -> Any:
        alone = case.both(*jax.tree.map(lambda leaf: leaf[0], (x, ids)))
        return jax.tree.map(lambda leaf: leaf[None], alone)

    def inside(x: Floats, ids: jax.Array) -> Any:
        return jax.grad(case.loss)(x, ids[0])

    def loss(x: Floats, ids: jax.Array) -> Any:
        return jax.lax.psum(case.loss(x, ids[0]), "d")

    def over(function: Run, of_floats: P, out: P) -> Run:
        return jax.shard_map(function, mesh=mesh(AxisType.Auto), in_specs=(of_floats, P("d")), out_specs=out)

    shared = case.one[0], case.several[1]
    gradients = [over(inside, P(), P()), jax.grad(over(loss, P(), P()))] if case.derivative else []
    return jax.jit(over(own, P("d"), P("d")))(*case.several), [jax.jit(run)(*shared) for run in gradients]


def sharing(case: Case) -> Any:
    return each_alone(case), [_shared(case)] * 2


def divided(axis: AxisType) -> Run:
    """Ids and what belongs to bags is divided; rows of tables are on every device, and then divided, too."""

    def transformed(case: Case) -> Any:
        def of_rows(spec: P) -> Any:
            specs = {"table": spec, "sum": spec, "weights": P("d"), "slopes": P("d")}
            x, ids = case.one
            x = {name: jax.device_put(leaf, NamedSharding(on, specs.get(name, P()))) for name, leaf in x.items()}
            return jax.jit(case.both)(x, jax.device_put(ids, NamedSharding(on, P("d"))))

        on = mesh(axis)
        return of_rows(P()), of_rows(P("d"))

    return transformed


def twice(case: Case) -> Any:
    return (plainly(case),) * 2


def export(case: Case) -> Any:
    exported = jax.export.export(jax.jit(case.both))(*case.one)
    return jax.export.deserialize(exported.serialize()).call(*case.one)


def in_nnx(case: Case) -> Any:
    x, ids = case.one

    class Module(nnx.Module):
        def __init__(self) -> None:
            self.floats = nnx.Dict({name: nnx.Param(value) for name, value in x.items()})

        def __call__(self, ids: jax.Array) -> Any:
            return case.run({name: param[...] for name, param in self.floats.items()}, ids)

    def loss(module: Module, ids: jax.Array) -> jax.Array:
        return dataclasses.replace(case, run=lambda _, ids: module(ids)).loss(x, ids)

    module = Module()
    gradient = nnx.to_pure_dict(nnx.jit(nnx.grad(loss))(module, ids))["floats"] if case.derivative else ()
    return nnx.jit(lambda module, ids: module(ids))(module, ids), gradient


def in_linen(case: Case) -> Any:
    x, ids = case.one

    class Module(linen.Module):
        @linen.compact
        def __call__(self, ids: jax.Array) -> Any:
            return case.run({name: self.param(name, lambda _, value=value: value) for name, value in x.items()}, ids)

    module = Module()
    variables = jax.jit(module.init)(jax.random.key(0), ids)
    applied = dataclasses.replace(case, run=lambda params, ids: module.apply({"params": params}, ids))
    return jax.jit(applied.both)(variables["params"], ids)


TRANSFORMS: dict[str, tuple[Run, Run]] = {  # and what gives the plain op's numbers
    "jit": (in_jit, in_jit),
    "grad": (grad, grad),
    "jvp": (jvp, jvp),
    "hessian": (hessian, hessian),
    "vmap": (vmap, vmap),
    "scan": (scan, scan),
    "remat": (remat, plainly),
    "pmap": (pmap, each_alone),
    "shard_map": (shard_map, sharing),
    "Auto mesh": (divided(AxisType.Auto), twice),
    "Explicit mesh": (divided(AxisType.Explicit), twice),
    "export": (export, plainly),
    "NNX": (in_nnx, plainly),
    "Linen": (in_linen, plainly),
}
IMPLEMENTATIONS = ("xla", "native")


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why cells do not work: the error, what it says, and what the page says."""

    error: type[Exception]
    match: str
    note: str


UPDATES = ("apply_gradients", "casted_update", "row_update", "tt_apply_gradients")
NO_DERIVATIVE = Reason(
    TypeError,
    "native kernel .* has no derivative.*or name implementation='xla'",
    'Native kernels of updates have no derivative, and raise: name `implementation="xla"`, or take derivatives of the'
    " lookup.",
)
NOT_REVERSED = Reason(
    ValueError,
    "Reverse-mode differentiation does not work for lax.while_loop",
    "An update of tensor-train cores has derivatives in forward mode alone (`jax.jvp`, `jax.jacfwd`);"
    " `tt_embedding_bag` has all.",
)
NOT_EXPORTED = Reason(
    ValueError,
    "Cannot serialize code with custom calls",
    'Native kernels cannot leave the process, and they are the default on a CPU: name `implementation="xla"` in what'
    " you export.",
)
REASONS: dict[tuple[str, str, str], Reason] = {
    **{(op, way, "native"): NO_DERIVATIVE for op in UPDATES for way in ("grad", "jvp", "hessian")},
    **{("tt_apply_gradients", way, "xla"): NOT_REVERSED for way in ("grad", "hessian")},
    **{(op, "export", "native"): NOT_EXPORTED for op in OPS},
}
CELLS = list(itertools.product(OPS, TRANSFORMS, IMPLEMENTATIONS))


def found(op: str, transform: str, implementation: str) -> Any:
    """What a cell gives."""
    run = functools.partial(OPS[op].run, implementation=implementation)
    return TRANSFORMS[transform][0](Case(run, OPS[op].floats, OPS[op].derivative))


@functools.cache
def expected(op: str, transform: str) -> Any:
    """What the plain op gives."""
    return TRANSFORMS[transform][1](Case(OPS[op].plain, OPS[op].floats, OPS[op].derivative))


def cell(op: str, transform: str) -> str:
    """What the page says of an op under a transformation."""
    notes = list(dict.fromkeys(REASONS.values()))
    failing = {way: REASONS[op, transform, way] for way in IMPLEMENTATIONS if (op, transform, way) in REASONS}
    numbers = ", ".join(sorted({str(notes.index(reason) + 1) for reason in failing.values()}))
    works = [f"`{way}`" for way in IMPLEMENTATIONS if way not in failing]
    return "yes" if not failing else f"{', '.join(works) or 'no'} ({numbers})"


def markdown() -> str:
    """The table and its notes."""
    lines = [
        f"| | {' | '.join(TRANSFORMS)} |",
        f"| --- | {' | '.join('---' for _ in TRANSFORMS)} |",
        *(f"| `{op}` | {' | '.join(cell(op, transform) for transform in TRANSFORMS)} |" for op in OPS),
        "",
        *(f"{number}. {reason.note}" for number, reason in enumerate(dict.fromkeys(REASONS.values()), 1)),
    ]
    return "\n".join(lines) + "\n"


def page_with(text: str) -> str:
    """The page's text with the table in its place."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{markdown()}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page_with(PAGE.read_text()))
