"""Forward mode, second order and gradients through ``lookup``, against a plain ``jnp.take`` with a segment sum."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jrec import ops

SLOW = pytest.mark.slow
IMPLEMENTATIONS = (None, "xla", pytest.param("native", marks=SLOW))  # None takes the native one on a CPU
ONE = (None, pytest.param("xla", marks=SLOW), pytest.param("native", marks=SLOW))
ROWS, DIM, LENGTHS = 7, 2, (3, 0, 2, 4)
BAGS = len(LENGTHS)


class Case:
    """Bags of ids that repeat, padded or ragged, with padding between and behind them."""

    def __init__(self, ragged, dtype=jnp.float32):
        rng = np.random.default_rng(5)
        mask = np.arange(max(LENGTHS))[None] < np.array(LENGTHS)[:, None]
        ids = np.where(mask, rng.integers(0, ROWS, mask.shape), -1).astype(np.int32)
        ids[0, 1] = -1
        segments = np.broadcast_to(np.arange(BAGS)[:, None], mask.shape)
        self.offsets = None
        if ragged:
            self.offsets = jnp.asarray(np.cumsum([0, *LENGTHS]), jnp.int32)
            ids, segments = np.append(ids[mask], [2, 2]), np.append(segments[mask], [BAGS, BAGS])
        self.ids, self.segments = jnp.asarray(ids, jnp.int32), jnp.asarray(segments, jnp.int32)
        self.table, self.table_dot = (jnp.asarray(rng.normal(size=(ROWS, DIM)), dtype) for _ in range(2))
        self.weights, self.weights_dot = (jnp.asarray(rng.normal(size=ids.shape), jnp.float32) for _ in range(2))

    def bags(self, implementation, combiner="sum"):
        """The op, from table and weights (or None)."""
        options = {"combiner": combiner, "implementation": implementation}
        return lambda table, weights=None: ops.embedding_bag(table, self.ids, self.offsets, weights=weights, **options)

    def reference(self, table, weights=None, combiner="sum"):
        """The same by ``jnp.take`` and segment sums."""
        ids, segments = self.ids.reshape(-1), self.segments.reshape(-1)
        weights = jnp.ones(ids.shape) if weights is None else weights.reshape(-1)
        rows = jnp.take(table, jnp.maximum(ids, 0), axis=0).astype(jnp.float32)
        rows = rows * jnp.where(ids >= 0, weights, 0)[:, None]
        total = jax.ops.segment_sum(rows, segments, BAGS + 1)[:BAGS]
        if combiner == "sum":
            return total
        count = jax.ops.segment_sum((ids >= 0).astype(jnp.float32), segments, BAGS + 1)[:BAGS]
        return total / jnp.maximum(count, 1)[:, None]


def _loss(bags):
    """Curved in table and weights, each bag by another factor."""
    factors = jnp.arange(1, 1 + BAGS * DIM, dtype=jnp.float32).reshape(BAGS, DIM)
    return lambda *args: jnp.sum(factors * jnp.sin(bags(*args)))


def _assert_close(got, want):
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5), got, want)


@pytest.mark.parametrize(
    ("implementation", "ragged"),
    [
        (None, False),
        ("xla", True),
        *[pytest.param(*args, marks=SLOW) for args in ((None, True), ("xla", False), ("native", False))],
    ],
)
def test_every_derivative_of_table_and_weights(implementation, ragged):
    case = Case(ragged)
    primals, tangents = (case.table, case.weights), (case.table_dot, case.weights_dot)

    @functools.partial(jax.jit, static_argnums=0)
    def derivatives(bags):
        loss = _loss(bags)
        out, linear = jax.linearize(bags, *primals)
        return {
            "jvp": jax.jvp(bags, primals, tangents),
            "jvp by the table": jax.jvp(lambda table: bags(table, case.weights), primals[:1], tangents[:1]),
            "linearize": (out, linear(*tangents)),
            "jacfwd": jax.jacfwd(bags, argnums=(0, 1))(*primals),
            "jacrev": jax.jacrev(bags, argnums=(0, 1))(*primals),
            "hessian": jax.hessian(loss, argnums=(0, 1))(*primals),
            "reverse over reverse": jax.jacrev(jax.grad(loss, argnums=(0, 1)), argnums=(0, 1))(*primals),
            "reverse over forward": jax.grad(lambda *at: jnp.sum(jnp.square(jax.jvp(loss, at, tangents)[1])))(*primals),
            "third": jax.jvp(lambda *at: jax.jvp(jax.grad(loss, argnums=(0, 1)), at, tangents)[1], primals, tangents),
        }

    _assert_close(derivatives(case.bags(implementation)), derivatives(case.reference))


@pytest.mark.parametrize(("combiner", "ragged"), [("mean", True), pytest.param("sum", False, marks=SLOW)])
def test_hessian_without_weights(combiner, ragged):
    case = Case(ragged)
    got = jax.jit(jax.hessian(_loss(case.bags(None, combiner))))(case.table)
    want = jax.jit(jax.hessian(_loss(functools.partial(case.reference, combiner=combiner))))(case.table)
    _assert_close(got, want)


@pytest.mark.parametrize("ragged", [pytest.param(False, marks=SLOW), True])
def test_forward_mode_of_a_maximum_equals_reverse_mode(ragged):
    case = Case(ragged)
    loss = _loss(case.bags(None, "max"))

    @jax.jit
    def derivatives(table):
        gradient = jax.grad(loss)(table)
        first = jax.jvp(loss, (table,), (case.table_dot,))[1], jnp.sum(gradient * case.table_dot)
        return gradient, first, (jax.jacfwd(jax.grad(loss))(table), jax.jacrev(jax.grad(loss))(table))

    gradient, first, second = derivatives(case.table)
    assert np.any(gradient != 0)
    _assert_close(*first)
    _assert_close(*second)


@pytest.mark.parametrize("implementation", ONE)
def test_outside_jit_and_of_16_bits(implementation):
    case = Case(ragged=True, dtype=jnp.bfloat16)
    got = jax.jvp(case.bags(implementation), (case.table, case.weights), (case.table_dot, case.weights_dot))
    _assert_close(got, jax.jvp(case.reference, (case.table, case.weights), (case.table_dot, case.weights_dot)))
    gradient = jax.grad(_loss(case.bags(implementation)))(case.table)
    assert gradient.dtype == jnp.bfloat16
    want = jax.grad(_loss(case.reference))(case.table.astype(jnp.float32))
    np.testing.assert_allclose(np.asarray(gradient, np.float32), want, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients_through_lookup(implementation):
    """Of several tables and of weights: dense ones, as from ``embedding_bag``."""
    cases = {"padded": Case(ragged=False), "ragged": Case(ragged=True)}
    tables, weights = ({name: getattr(case, of) for name, case in cases.items()} for of in ("table", "weights"))

    def loss(tables, weights):
        bags = {n: ops.Bags(ids=c.ids, offsets=c.offsets, weights=weights[n]) for n, c in cases.items()}
        activations, _ = ops.lookup(tables, bags, implementation=implementation)
        return sum(_loss(lambda pooled: pooled)(pooled) for pooled in activations.values())

    def reference(tables, weights):
        return sum(_loss(case.reference)(tables[name], weights[name]) for name, case in cases.items())

    _assert_close(jax.jit(jax.grad(loss, (0, 1)))(tables, weights), jax.grad(reference, (0, 1))(tables, weights))


@pytest.mark.parametrize("implementation", ONE)
@pytest.mark.parametrize("shared", [0, 1, 2])
def test_derivatives_of_a_batch_of_bags(implementation, shared):
    """Gradient and Hessian-vector product of ``vmap``, where the table, the ids or the weights are of all bags."""
    case = Case(ragged=False)
    ids = jnp.stack([case.ids, jnp.where(case.ids < 0, case.ids, ROWS - 1 - case.ids)])
    args = [jnp.stack([case.table, case.table_dot]), ids, jnp.stack([case.weights, case.weights_dot])]
    args[shared] = args[shared][0]
    table, ids, weights = args
    axes = tuple(None if i == shared else 0 for i in range(3))

    def derivatives(bags):
        def loss(table, weights):
            return jnp.sum(jnp.sin(jax.vmap(bags, in_axes=axes)(table, ids, weights)))

        def product(table, weights):
            return jax.jvp(jax.grad(loss, (0, 1)), (table, weights), (jnp.cos(table), jnp.cos(weights)))

        return product(table, weights), jax.grad(lambda *at: jnp.sum(jnp.square(product(*at)[1][0])), (0, 1))(
            *args[::2]
        )

    def reference(table, ids, weights):
        rows = jnp.take(table, jnp.maximum(ids, 0), axis=0)
        return jnp.sum(rows * jnp.where(ids >= 0, weights, 0)[..., None], axis=1)

    def bags(table, ids, weights):
        return ops.embedding_bag(table, ids, weights=weights, implementation=implementation)

    _assert_close(jax.jit(lambda: derivatives(bags))(), jax.jit(lambda: derivatives(reference))())


@pytest.mark.parametrize("check_vma", [pytest.param(False, marks=SLOW), True])
@pytest.mark.parametrize("implementation", ONE)
def test_hessian_vector_products_in_shard_map(implementation, check_vma):
    """Each device has a table and bags of its own."""
    case = Case(ragged=False)
    tables = jnp.concatenate([case.table, case.table_dot])
    ids = jnp.concatenate([case.ids, jnp.where(case.ids < 0, case.ids, ROWS - 1 - case.ids)])

    def product(table, ids):
        def loss(table):
            return jnp.sum(jnp.sin(ops.embedding_bag(table, ids, implementation=implementation)))

        return jax.jvp(jax.grad(loss), (table,), (jnp.cos(table),))

    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    run = jax.shard_map(product, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=check_vma)
    want = [product(*half) for half in zip(tables.reshape(2, ROWS, DIM), ids.reshape(2, BAGS, -1), strict=True)]
    _assert_close(jax.jit(run)(tables, ids), jax.tree.map(lambda *parts: jnp.concatenate(parts), *want))


def test_the_tables_gradient_is_a_casted_gather_reduce():
    """No scatter-add of lookups, in any order of derivatives."""
    case = Case(ragged=False)
    loss = _loss(case.bags("xla"))

    def product(table):
        return jax.jvp(jax.grad(loss), (table,), (case.table_dot,))

    names = {equation.primitive.name for equation in jax.make_jaxpr(product)(case.table).eqns}
    assert "jrec_bag_sums" in names
    assert not any("scatter" in name for name in names)
