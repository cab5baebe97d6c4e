"""Exact row optimizers: every row as ``optax`` on the whole table has it, wherever rows lie, whenever they are read."""

import functools
import itertools

import growing_cases
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import shop_logs
from distribute_cases import DENSE, ROWS, columns, layout_of, mesh_of, three_tiers
from flax import nnx
from grids import in_turn, some_of

import jrec
from jrec import nn, ops, serving
from jrec.app.compress import Selection, compress_run
from jrec.app.evaluate import restore_run
from jrec.app.export import export_run
from jrec.data import pack_batch
from jrec.data.blocks import ShardReader
from jrec.data.schema import Schema
from jrec.errors import ConfigError
from jrec.ops.current_rows import current
from jrec.row_optimizers import MOST_STEPS
from jrec.serving.encode import model_inputs

STEPS = 200
WARMUP = optax.warmup_cosine_decay_schedule(0.0, 0.02, 20, 2 * STEPS)
CASES = {
    "adam": (ops.ExactAdam(learning_rate=0.02), optax.adam(0.02)),
    "adam by a schedule": (ops.ExactAdam(learning_rate=WARMUP), optax.adam(WARMUP)),
    "adam of other decays": (ops.ExactAdam(learning_rate=0.02, b1=0.5, b2=0.9), optax.adam(0.02, b1=0.5, b2=0.9)),
    "adam without momentum": (ops.ExactAdam(learning_rate=0.02, b1=0.0), optax.adam(0.02, b1=0.0)),
    "adamw": (ops.ExactAdamW(learning_rate=0.02, weight_decay=0.1), optax.adamw(0.02, weight_decay=0.1)),
    "momentum": (ops.ExactMomentum(learning_rate=WARMUP), optax.sgd(WARMUP, momentum=0.9)),
    "nesterov": (
        ops.ExactMomentum(learning_rate=0.02, nesterov=True), optax.sgd(0.02, momentum=0.9, nesterov=True)
    ),
    "ema of gradients": (
        ops.ExactMomentum(learning_rate=0.02 * (1 - 0.8), momentum=0.8),
        optax.chain(optax.ema(0.8, debias=False), optax.scale(-0.02)),
    ),
    "rmsprop": (ops.ExactRMSProp(learning_rate=0.02, eps=1e-8), optax.rmsprop(0.02, eps=1e-8)),
}  # fmt: skip


def full_but(cases, *default):
    """For ``parametrize``: CI runs the other cases, but for slow ones."""

    def marked(case):
        if case in default or hasattr(case, "marks"):
            return case
        return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.full)

    return [marked(case) for case in cases]


def gradient(rows, number, scale):
    """Of touched rows: a pull, and noise, without which Adam's steps near a minimum are those of rounding errors."""
    key = jax.random.fold_in(jax.random.key(7), number)
    return scale * (0.1 * rows + jax.random.normal(key, rows.shape, jnp.float32))


@functools.cache
def touched(rows, steps, most):
    """The rows of each step, skewed by Zipf's law, padded: (steps, most)."""
    rng, shares = np.random.default_rng(0), 1 / np.arange(1, rows + 1) ** 1.05
    drawn = [np.unique(rng.choice(rows, most, p=shares / shares.sum())) for _ in range(steps)]
    return np.stack([np.pad(ids, (0, most - ids.size), constant_values=rows) for ids in drawn]).astype(np.int32)


@functools.cache
def whole_of(name):
    """The table of ``optax`` after all steps, compiled once for both sizes of gradients."""

    @jax.jit
    def run(table, ids, scale):
        def step(carry, of_step):
            (table, state), (number, rows_of) = carry, of_step
            at = table.at[rows_of].get(mode="fill", fill_value=0)
            gradients = jnp.zeros_like(table).at[rows_of].set(gradient(at, number, scale), mode="drop")
            with jax.numpy_dtype_promotion("standard"):
                updates, state = CASES[name][1].update(gradients, state, table)
            return (optax.apply_updates(table, updates), state), None

        return jax.lax.scan(step, (table, CASES[name][1].init(table)), (jnp.arange(STEPS), ids))[0][0]

    return run


@functools.cache
def sparse_of(name, implementation):
    """The table as it is stored, and as it is read, after all steps of ``row_update``."""
    optimizer = CASES[name][0]

    @jax.jit
    def run(table, ids, scale):
        def step(carry, of_step):
            (table, slots), (number, rows_of) = carry, of_step

            def of_rows(array):
                return array.at[rows_of].get(mode="fill", fill_value=0)

            at = current(optimizer, of_rows(table), {k: of_rows(slot) for k, slot in slots.items()}, number)
            gradients = gradient(at, number, scale)
            return ops.row_update(
                optimizer, table, slots, rows_of, gradients, step=number, implementation=implementation
            ), None  # fmt: skip

        carry = (table, optimizer.init(table))
        (table, slots), _ = jax.lax.scan(step, carry, (jnp.arange(STEPS, dtype=jnp.int32), ids))
        return table, current(optimizer, table, slots, STEPS)

    return run


@pytest.mark.parametrize("implementation", ["xla", "native"])
@pytest.mark.parametrize("scale", [1.0, 1e-7], ids=["gradients", "gradients below eps"])
@pytest.mark.parametrize("name", full_but(CASES, "adam by a schedule", "adamw", "nesterov", "rmsprop"))
def test_rows_are_those_of_optax_on_the_whole_table(name, scale, implementation):
    first = jax.random.normal(jax.random.key(0), (400, 5), jnp.float32)
    arguments = first, touched(400, STEPS, 16), jnp.float32(scale)
    expected = whole_of(name)(*arguments)
    stored, now = sparse_of(name, implementation)(*arguments)
    moved, away = jnp.linalg.norm(expected - first), jnp.linalg.norm(now - expected)
    # A row of size 1 that moves by as much is rounded in each of its steps, by 6e-8 each.
    assert away < 4e-6 * moved + 1e-7 * jnp.linalg.norm(first)
    if CASES[name][0].has_tail and name != "adam without momentum" and scale == 1.0:
        assert jnp.linalg.norm(stored - expected) > 100 * away  # what is stored is not what is read


@pytest.mark.parametrize("eps", [1e-3, 1e-8, 1e-20])
@pytest.mark.parametrize("decays", [(0.9, 0.999), (0.5, 0.9), (0.9, 0.99)])
def test_a_few_nodes_give_the_sum_of_all_coming_steps(decays, eps):
    b1, b2 = decays
    optimizer = ops.ExactAdam(learning_rate=lambda step: 0.1 / (1 + 0.01 * step), b1=b1, b2=b2, eps=eps)
    roots = np.concatenate([[0.0], np.logspace(-18, 2, 200)])
    for step in (0, 1, 7, 100, 10_000, 1_000_000):
        numbers = np.asarray(optimizer.tail_numbers(jnp.int32(step)), np.float64)
        tails = np.sum(numbers[:8] / (roots[:, None] + numbers[8:]), axis=1)
        k = np.arange(1, 2_000)
        rates, count = 0.1 / (1 + 0.01 * (step + k - 1)), step + k
        # In float32, as optax has them: 1 - 0.999**1 is there 7e-6 off.
        first, second = (np.asarray(x, np.float64) for x in optimizer.bias_corrections(np.float32(count)))
        terms = rates * b1**k / first / (roots[:, None] * np.sqrt(b2**k / second) + eps)
        np.testing.assert_allclose(tails, terms.sum(axis=1), rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ops.ExactAdam(learning_rate=0.1, weight_decay=0.1), "take ExactAdamW, which decays all rows"),
        (lambda: ops.ExactAdamW(learning_rate=WARMUP), "learning_rate of ExactAdamW is a schedule"),
        (lambda: ops.ExactAdamW(learning_rate=2.0, weight_decay=1.0), r"learning_rate \* weight_decay .* is 2.0"),
        (lambda: ops.ExactAdam(learning_rate=0.1, b1=0.99, b2=0.9), r"b1 must be below sqrt\(b2\): an exact"),
        (lambda: ops.ExactAdamW(learning_rate=0.5, weight_decay=0.3), r"below sqrt\(b2\) \* 0.85, the share"),
        (lambda: ops.ExactMomentum(learning_rate=0.1, momentum=0.9999), "momentum is 0.9999: an exact"),
    ],
)
def test_what_cannot_be_exact_is_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_rows_are_no_numbers_where_steps_are_no_longer_counted():
    optimizer = ops.ExactAdam(learning_rate=0.1)
    table = jnp.ones((3, 4))
    for step, finite in ((MOST_STEPS - 2, True), (MOST_STEPS, False)):
        new, slots = ops.row_update(optimizer, table, optimizer.init(table), jnp.arange(2), jnp.ones((2, 4)), step=step)
        assert np.isfinite(new[:2]).all() == finite
        assert slots["last"][0] == step + 1 or not finite


def test_tensor_trains_are_refused():
    layout = jrec.EmbeddingLayout.build(
        [jrec.TableConfig(name="user", rows=300, dim=8, tier="tt", tt_shape=jrec.TTShape.search(300, 8, ranks=2))],
        [jrec.FeatureConfig(name="user", table="user")],
    )
    with pytest.raises(ValueError, match="'user' is a tensor train, but by cores it would be trained by ExactAdam"):
        modules(layout, ops.ExactAdam(learning_rate=0.1))


train_step, accumulated_step = nnx.jit(nn.train_step), nnx.jit(nn.accumulated_step)


@nnx.jit
def own_step(model, sparse, batch):
    activations, residuals = sparse.lookup(model, batch.bags)

    def loss(model, activations):
        return nn.binary_cross_entropy(model.logits(batch.dense, activations, batch.bags), batch)

    value, gradients = nnx.value_and_grad(loss, argnums=(0, 1))(model, activations)
    sparse.update(model, residuals, *gradients)
    return value


def test_own_loops_look_up_by_the_optimizer():
    optimizer, _ = CASES["adam by a schedule"]
    batches = [pack_batch(layout_of(), columns(number), dense=DENSE) for number in range(8)]
    losses, models = {}, {}
    for way in ("train_step", "update", "accumulated_step"):
        model, sparse = modules(layout_of(), optimizer)
        losses[way], models[way] = [], (model, sparse)
        for batch in batches:
            if way == "train_step":
                value, _ = train_step(model, sparse, batch)
            elif way == "accumulated_step":
                value, _ = accumulated_step(model, sparse, [batch])
            else:
                value = own_step(model, sparse, batch)
            losses[way].append(float(value))
    expected, *_ = trained_whole("adam by a schedule", 8)
    for way, of_way in losses.items():
        np.testing.assert_allclose(of_way, expected, rtol=1e-5, err_msg=way)
    model, sparse = models["update"]
    for look_up in (
        lambda: model.embeddings.lookup(batches[0].bags),
        lambda: model.embeddings.lookup_feature("user", np.arange(3)),
    ):
        with pytest.raises(ValueError, match=r"look them up by optimizer.lookup\(model, bags\)"):
            look_up()
    with pytest.raises(ConfigError, match="an exact optimizer took 8 steps on the model"):
        jrec.distribute(model, sparse, training=False)


def test_lookups_of_plain_arrays_are_given_optimizer_and_slots():
    optimizer, dense = CASES["adam"]
    tables = {"a": jax.random.normal(jax.random.key(0), (60, 5)), "b": jax.random.normal(jax.random.key(1), (9, 3))}
    expected, state = tables, dense.init(tables)
    slots = jrec.init_slots(optimizer, tables)
    rng = np.random.default_rng(0)
    for step in range(12):
        bags = {name: jrec.Bags(ids=jnp.asarray(rng.integers(-1, len(t), (8, 2)))) for name, t in tables.items()}

        def pooled(tables, bags=bags):
            return {n: jnp.where((b.ids < 0)[..., None], 0, tables[n][b.ids]).sum(axis=1) for n, b in bags.items()}

        def loss(activations, step=step):
            return sum(jnp.sum(jnp.sin(a + step)) for a in activations.values())

        gradients = jax.grad(lambda tables, pooled=pooled, loss=loss: loss(pooled(tables)))(expected)
        read, residuals = jrec.lookup(tables, bags, optimizer=optimizer, slots=slots, step=step)
        for name, vectors in pooled(expected).items():
            np.testing.assert_allclose(read[name], vectors, rtol=1e-5, atol=1e-5)
        with jax.numpy_dtype_promotion("standard"):
            updates, state = dense.update(gradients, state, expected)
        expected = optax.apply_updates(expected, updates)
        tables, slots = jrec.apply_gradients(optimizer, tables, slots, residuals, jax.grad(loss)(read), step=step)
    with pytest.raises(ValueError, match=r"'a'.*looked up as they lie, but ExactAdam reads them with their slots"):
        jrec.apply_gradients(optimizer, tables, slots, jrec.lookup(tables, bags)[1], read, step=step)
    with pytest.raises(ValueError, match="slots are named"):
        jrec.lookup(tables, bags, optimizer=optimizer)


# Runs.

HALF, WHOLE = 12, 24  # steps
LATER = optax.linear_schedule(0.03, 0.001, WHOLE)
SCHEDULES = "adam by two schedules"
RUNS = {name: (optimizer, optimizer, dense) for name, (optimizer, dense) in CASES.items()} | {
    SCHEDULES: (
        ops.ExactAdam(learning_rate=WARMUP), ops.ExactAdam(learning_rate=LATER),
        optax.adam(lambda count: jnp.where(count < HALF, WARMUP(count), LATER(count))),
    )
}  # fmt: skip
"""The optimizer of the first half of the steps, that of the second, and what both are in optax."""


def modules(layout, optimizer, tables=None):
    config = nn.DLRMConfig(num_dense=2, bottom_mlp=(16, 8), top_mlp=(16, 1))
    model = nn.DLRM(config, layout, rngs=nnx.Rngs(0))
    return model, nn.SparseOptimizer(model, dense=optax.sgd(0.05), embedding=optimizer, tables=tables or {})


@functools.cache
def trained_whole(name, steps):
    """Losses, tables and predictions of the model with its stacks as parameters of optax, all rows in every step."""
    optimizer, _, dense = RUNS[name]
    layout = layout_of()
    model, _ = modules(layout, optimizer)
    stack = layout.members[0]
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    table, of_params = model.embeddings.arrays()[stack.name], optax.sgd(0.05)

    def logits(params, table, batch):
        bags = batch.bags[stack.name]
        rows = jnp.where((bags.ids < 0)[..., None], 0, table[jnp.maximum(bags.ids, 0)])
        if bags.weights is not None:
            rows = rows * bags.weights[..., None]
        if bags.offsets is None:
            sums = jnp.sum(rows, axis=1)
        else:
            segments = jnp.searchsorted(bags.offsets, jnp.arange(rows.shape[0]), side="right") - 1
            sums = jax.ops.segment_sum(rows, segments, bags.num_bags)
        return nnx.merge(graph, params, rest).logits(batch.dense, {stack.name: sums}, batch.bags)

    @jax.jit
    def step(params, table, states, batch):
        def loss(params, table):
            return nn.binary_cross_entropy(logits(params, table, batch), batch)

        value, gradients = jax.value_and_grad(loss, argnums=(0, 1))(params, table)
        with jax.numpy_dtype_promotion("standard"):
            changes = of_params.update(gradients[0], states[0], params), dense.update(gradients[1], states[1], table)
        new = optax.apply_updates(params, changes[0][0]), optax.apply_updates(table, changes[1][0])
        return value, *new, (changes[0][1], changes[1][1])

    states, losses = (of_params.init(params), dense.init(table)), []
    for number in range(steps):
        batch = pack_batch(layout, columns(number), dense=DENSE)
        value, params, table, states = step(params, table, states, batch)
        losses.append(float(value))
    rows = np.asarray(table)
    tables = {t.name: rows[base : base + t.rows] for t, base in zip(stack.tables, stack.bases, strict=True)}
    return losses, tables, np.asarray(jax.jit(logits)(params, table, pack_batch(layout, columns(99), dense=DENSE)))


def placed(place, optimizer, **options):
    tiers = [("user", "host")] if place == "host" else []
    if place == "mesh":
        options["mesh"] = mesh_of(4)
    elif place.startswith("plan-"):
        devices = int(place.removeprefix("plan-"))
        options |= {"plan": three_tiers(devices, layout_of()), "mesh": None if devices == 1 else mesh_of(devices)}
    return jrec.distribute(*modules(layout_of(tiers=tiers), optimizer), **options)


def assert_close(rows, expected):
    """Of a whole table: where a gradient's terms cancel, rounding errors decide a part of an element's step."""
    assert np.linalg.norm(rows - expected) < 2e-5 * np.linalg.norm(expected)


PLACES = ("device", "host", "mesh", "plan-1", "plan-4")


def trained(run, step, first, last):
    """The losses of these steps."""
    with run.feed(map(columns, range(first, last)), dense=DENSE) as batches:
        return [float(step(batch)[0]) for batch in batches]


def tables_of(run):
    return {table: run.table(table) for table in ROWS}


SOME_RUNS = [(SCHEDULES, place) for place in ("device", "host", "mesh", "plan-1")]


@pytest.mark.parametrize(
    ("name", "place"),
    full_but(some_of(itertools.product(RUNS, PLACES), *SOME_RUNS, *in_turn([*RUNS], PLACES)), *SOME_RUNS),
)
def test_a_run_is_that_of_the_whole_table_wherever_rows_lie(name, place, tmp_path):
    expected, tables, logits = trained_whole(name, WHOLE)
    with placed(place, RUNS[name][0]) as run:
        losses = trained(run, run.compile(), 0, HALF)
        run.save(tmp_path)
        before = tables_of(run)
    with placed(place, RUNS[name][1]) as run:
        run.restore(tmp_path)
        for table, rows in tables_of(run).items():
            np.testing.assert_allclose(rows, before[table], rtol=1e-5, atol=1e-6, err_msg=table)
        step = run.compile()
        losses += trained(run, step, HALF, HALF + 2)
        run.save(tmp_path)  # all rows, since those of the first checkpoint are stored by the first schedule
        now = tables_of(run)
        rest = trained(run, step, HALF + 2, WHOLE)
        np.testing.assert_allclose([*losses, *rest], expected, rtol=1e-5)
        after = tables_of(run)
        for table, rows in tables.items():
            assert_close(after[table], rows)
        close = {"rtol": 1e-4, "atol": 1e-5}
        np.testing.assert_allclose(run.predict(columns(99), dense=DENSE, batch_size=16), logits, **close)
        run.restore(tmp_path)
        for table, rows in tables_of(run).items():
            np.testing.assert_array_equal(rows, now[table])
        assert trained(run, step, HALF + 2, WHOLE) == rest
        for table, rows in tables_of(run).items():
            np.testing.assert_array_equal(rows, after[table])


@pytest.mark.parametrize("place", full_but(PLACES, "host", "plan-4"))
@pytest.mark.parametrize("name", full_but(["adamw", "adam by a schedule"], "adamw"))
def test_a_run_that_only_predicts_needs_no_slots(name, place, tmp_path):
    run = placed(place, CASES[name][0])
    with run, run.feed((columns(number) for number in range(6)), dense=DENSE) as batches:
        step = run.compile()
        for batch in batches:
            step(batch)
        run.save(tmp_path)
        logits, tables = run.predict(columns(99), dense=DENSE), {table: run.table(table) for table in ("user", "item")}
    # Another learning rate, which no reader may take.
    run = placed(place, type(CASES[name][0])(learning_rate=0.5), training=False)
    run.restore(tmp_path)
    with run:
        np.testing.assert_allclose(run.predict(columns(99), dense=DENSE), logits, rtol=1e-4, atol=1e-5)
        for table, rows in tables.items():
            np.testing.assert_allclose(run.table(table), rows, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("keys", [(), pytest.param(("tables.tier='host'",), marks=pytest.mark.full)])
def test_a_configured_run_is_evaluated_exported_and_resumed(keys, tmp_path):
    shop_logs.write_log(tmp_path / "log.csv")
    dataset = shop_logs.prepare(tmp_path, tmp_path / "log.csv", "data")
    own = ("name='exact_adam'", "learning_rate=0.05")
    keys = (*keys, *(f"optimizer.embedding.{key}" for key in own), "lr_schedule.kind='warmup_linear'")
    keys = (*keys, "lr_schedule.end_factor=0.5", "epochs=2")  # at 0, rows would be at rest in the end
    run = shop_logs.trained(tmp_path, dataset, *keys)
    want = restore_run(run).scores("test")
    export_run(run, tmp_path / "export")
    model = serving.load(tmp_path / "export")
    (shard,) = Schema.load(dataset).splits["test"].shards
    inputs = model_inputs(ShardReader(dataset, shard).read(0), model.manifest)
    np.testing.assert_allclose(model.logits_of(*inputs), want.logits, rtol=2e-5, atol=2e-6)
    with pytest.raises(ConfigError, match="user is trained by 'exact_adam', but the slices of a tensor train by lazy"):
        compress_run(run, tmp_path / "small", Selection(rank=2, tables=("user",)))
    with pytest.raises(ConfigError, match=r"tables.user.name = \"adam\""):
        shop_logs.trained(tmp_path, dataset, *keys, "tables.tt.min_rows=20", "tables.tt.rank=2", out="tt")
    shop_logs.trained(tmp_path, dataset, *keys, "epochs=3", resume=True)
    after = restore_run(run).scores("test").logits
    assert 1e-3 < np.abs(after - want.logits).max() < 3


def grown(place, optimizer):
    """A run of tables that grow."""
    layout = growing_cases.layout_of(tier="host") if place == "host" else growing_cases.layout_of()
    options = {"plan": growing_cases.three_tiers(4, layout), "mesh": mesh_of(4)} if place == "plan" else {}
    return jrec.distribute(*growing_cases.modules(layout, optimizer), growing=growing_cases.growing(), **options)


@pytest.mark.parametrize("name", full_but(["momentum", "adam of other decays"], "adam of other decays"))
def test_rows_of_tables_that_grow_begin_without_a_past(name):
    optimizer, losses, tables = CASES[name][0], {}, {}
    for place in ("device", "host", "plan"):
        batches = map(growing_cases.columns, range(growing_cases.STEPS))
        with grown(place, optimizer) as run, run.feed(batches, dense=growing_cases.DENSE) as feed:
            step = run.compile()
            losses[place] = [float(step(batch)[0]) for batch in feed]
            tables[place] = {table: run.table(table) for table in ("user", "tag")}
    for place in ("host", "plan"):
        np.testing.assert_allclose(losses[place], losses["device"], rtol=1e-5)
        for table, rows in tables["device"].items():
            assert_close(tables[place][table], rows)


@functools.cache
def first_rows_of_grown():
    """All rows after the same steps, none of which moved them: those that were given away begin anew, too."""
    batches = map(growing_cases.columns, range(growing_cases.STEPS))
    still = ops.SGD(learning_rate=0.0)
    with grown("device", still) as run, run.feed(batches, dense=growing_cases.DENSE) as feed:
        step = run.compile()
        for batch in feed:
            step(batch)
        return {table: run.table(table) for table in run.growing}


@pytest.mark.parametrize("place", ["device", "host", "plan"])
def test_a_row_that_a_growing_table_gives_away_is_not_decayed_for_steps_before_it(place):
    """Weight decay takes a fifth of a row each step, and gradients next to nothing."""
    decayed = ops.ExactAdamW(learning_rate=2e-4, weight_decay=1e3, b1=0.5)
    batches = map(growing_cases.columns, range(growing_cases.STEPS))
    with grown(place, decayed) as run, run.feed(batches, dense=growing_cases.DENSE) as feed:
        step, before = run.compile(), {}
        for batch in feed:
            before = {table: own.keys[1:].tolist() for table, own in run.growing.items()}
            step(batch)
        after = {table: own.keys[1:].tolist() for table, own in run.growing.items()}
        new = {t: [1 + n for n, key in enumerate(after[t]) if before[t][n : n + 1] != [key]] for t in after}
        assert sum(map(len, new.values())) > 3
        for table, rows in new.items():
            first = first_rows_of_grown()[table][rows]
            assert np.abs(first).max(initial=1.0) > 0.05
            np.testing.assert_allclose(run.rows(table, rows), 0.8 * first, atol=2e-3)
