"""Tables that grow in ``jrec.distribute``: in any placement, against plain steps with rows given out by hand."""

import dataclasses
import functools
import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from distribute_cases import mesh_of
from flax import nnx
from grids import some_of
from growing_cases import DENSE, STEPS, columns, growing, layout_of, modules, three_tiers
from process_pair import run_pair

import jrec
from jrec import nn, ops
from jrec.data import GrowingVocabulary, Growth, pack_batch
from jrec.data.keys import value_keys
from jrec.errors import CheckpointError, ConfigError
from jrec.ops.row_init import init_rows_of_keys, key_words
from jrec.run.options import HostOptions
from jrec.run.placement.plan import default_plan, overlaid
from jrec.sharding.pieces import HOST

CLOSE = {"rtol": 2e-4, "atol": 2e-6}


def with_rows(given, rows_of):
    """Columns of rows for columns of values, by ``rows_of(table, values)``, which is called once a table."""
    users = rows_of("user", np.array(given["user"]))
    flat = [tag for tags in given["tags"] for tag in tags]
    rows = rows_of("tag", np.array([*flat, *given["seen"]], np.int64))
    ends = np.cumsum([len(tags) for tags in given["tags"]])
    tags = np.split(rows[: len(flat)], ends[:-1])
    return {**given, "user": users, "tags": [t.tolist() for t in tags], "seen": rows[len(flat) :]}


def keys_of(values):
    import pyarrow as pa

    return value_keys(pa.array(values.tolist(), pa.large_string()) if values.dtype.kind == "U" else values, 0)


@functools.cache
def plain():
    """Losses, tables and predictions of plain steps, whose rows are set before each by hand."""
    layout = layout_of()
    model, optimizer = modules(layout)
    step, vocabularies, losses = nnx.jit(nn.train_step), growing(), []
    stack = layout.members[0]
    bases = {table.name: base for table, base in zip(stack.tables, stack.bases, strict=True)}
    numbers = {table.name: number for number, table in enumerate(stack.tables)}
    words, given_out = key_words(model.embeddings.table_key()), 0
    for number in range(STEPS):
        fresh = []

        def mapped(table, values, fresh=fresh):
            rows, new = vocabularies[table].map(keys_of(values))
            fresh.append((table, new))
            return rows

        batch = pack_batch(layout, with_rows(columns(number), mapped), dense=DENSE)
        values = np.array(model.embeddings.arrays()[stack.name])
        slots = np.array(optimizer.slots[stack.name]["sum"][...])
        for table, new in fresh:
            for row, key in zip(new.rows.tolist(), new.keys.tolist(), strict=True):
                halves = jnp.array([[key >> 32, key & 0xFFFFFFFF]], jnp.uint32)
                first = init_rows_of_keys(stack.tables, words, jnp.array([numbers[table]]), halves)
                values[bases[table] + row], slots[bases[table] + row] = np.asarray(first[0]), 0.5
                given_out += 1
        model.embeddings.set_arrays({stack.name: jnp.array(values)})
        optimizer.slots[stack.name]["sum"][...] = jnp.array(slots)
        losses.append(float(step(model, optimizer, batch)[0]))
    counts = {name: own.counts for name, own in vocabularies.items()}
    assert min(count.evicted for count in counts.values()) > 10
    rows = np.asarray(model.embeddings.arrays()[stack.name])
    tables = {t.name: rows[base : base + t.rows] for t, base in zip(stack.tables, stack.bases, strict=True)}
    looked_up = with_rows(columns(99), lambda table, values: vocabularies[table].rows_of_keys(keys_of(values)))
    batch = pack_batch(layout, looked_up, dense=DENSE)
    activations, _ = model.embeddings.lookup(batch.bags)
    predicted = np.asarray(model.logits(jnp.asarray(batch.dense), activations, batch.bags))
    return losses, tables, predicted, counts


def placed(name):
    places = {"growing": growing()}
    if name in ("host", "host-pipeline"):
        places["host"] = HostOptions(pipeline="on" if name == "host-pipeline" else "auto")
        return jrec.distribute(*modules(layout_of(tier="host")), **places)
    if name == "device":
        return jrec.distribute(*modules(layout_of()), **places)
    if name in ("mesh", "mesh-planned"):  # planned: the model never holds a row
        return jrec.distribute(*modules(layout_of(planned=name == "mesh-planned")), mesh=mesh_of(4), **places)
    if name == "replicated":
        return jrec.distribute(*modules(layout_of(tier="replicated")), mesh=mesh_of(4), **places)
    devices = 1 if name == "plan-one" else 4
    mesh = None if devices == 1 else mesh_of(devices)
    return jrec.distribute(*modules(layout_of()), mesh=mesh, plan=three_tiers(devices, layout_of()), **places)


PLACEMENTS = ("device", "host", "host-pipeline", "plan-four", "mesh", "mesh-planned", "replicated", "plan-one")


def steps_of(run, numbers, **feeding):
    step = run.compile()
    with run.feed(map(columns, numbers), dense=DENSE, **feeding) as feed:
        return [float(step(batch)[0]) for batch in feed]


def follows(run, losses):
    expected, tables, predicted, counts = plain()
    np.testing.assert_allclose(losses, expected, **CLOSE)
    for name, rows in tables.items():
        np.testing.assert_allclose(run.table(name), rows, err_msg=name, **CLOSE)
    given = columns(99)
    del given["label"]
    np.testing.assert_allclose(run.predict(given, dense=DENSE), predicted, rtol=2e-3, atol=2e-5)
    assert {name: vocabulary.counts for name, vocabulary in run.growing.items()} == counts


@pytest.mark.parametrize("name", some_of(PLACEMENTS, "device", "host-pipeline", "plan-four"))
def test_a_placement_follows_rows_given_out_by_hand(name):
    with placed(name) as run:
        follows(run, steps_of(run, range(STEPS)))


@pytest.mark.parametrize(
    ("before", "after"),
    [("device", "device"), pytest.param("host-pipeline", "plan-four", marks=pytest.mark.slow), ("plan-four", "host")],
)
def test_a_checkpoint_goes_on_in_any_placement(before, after, tmp_path):
    half = STEPS // 2
    with placed(before) as run:
        step, losses = run.compile(), []
        feed = run.feed(map(columns, range(STEPS)), dense=DENSE)  # maps batches ahead of the checkpoint
        for batch in feed:
            losses.append(float(step(batch)[0]))
            if run.steps == half:
                run.save(tmp_path / "c")
                run.predict({k: v for k, v in columns(99).items() if k != "label"}, dense=DENSE)
                break
        feed.close()
    with placed(after) as run:
        run.restore(tmp_path / "c")
        follows(run, losses + steps_of(run, range(half, STEPS)))


def test_a_second_feed_begins_where_the_steps_ended():
    with placed("device") as run:
        step, losses = run.compile(), []
        for batch in run.feed(map(columns, range(STEPS)), dense=DENSE):
            losses.append(float(step(batch)[0]))
            if len(losses) == 5:
                break
        with pytest.raises(RuntimeError, match="one feed at a time"):
            run.feed(map(columns, range(5, STEPS)), dense=DENSE)
        batch.feed.close()
        follows(run, losses + steps_of(run, range(5, STEPS), workers=0))


def test_a_closed_feed_that_still_reads_changes_nothing():
    """Its iterable gives one more batch when the next feed is under way."""
    waiting, go_on = threading.Event(), threading.Event()

    def slow():
        yield from map(columns, range(5))
        waiting.set()
        go_on.wait(60)
        yield columns(77)

    with placed("device") as run:
        step, losses = run.compile(), []
        feed = run.feed(slow(), dense=DENSE, workers=1)
        losses = [float(step(batch)[0]) for batch in itertools.islice(feed, 5)]
        assert waiting.wait(60)
        feed.close()
        with run.feed(map(columns, range(5, STEPS)), dense=DENSE, workers=0) as later:
            for number, batch in enumerate(later):
                losses.append(float(step(batch)[0]))
                if number == 1:
                    go_on.set()
                    for thread in threading.enumerate():
                        if thread.name == "jrec-read":
                            thread.join(60)
        follows(run, losses)


def test_batches_that_read_no_row_in_host_memory_grow_on_the_devices():
    tables = [jrec.TableConfig(name="user", rows=30, dim=8)]
    layout = jrec.EmbeddingLayout.build(tables, [jrec.FeatureConfig(name="user", table="user")])
    config = nn.DLRMConfig(num_dense=0, bottom_mlp=(), top_mlp=(8, 1), interaction="concat")
    plan = overlaid(default_plan(layout.with_plan(), 1), {"user": np.array([[5, 30]])}, HOST)

    def trained(**where):
        model = nn.DLRM(config, layout, rngs=nnx.Rngs(0))
        optimizer = nn.SparseOptimizer(model, dense=optax.sgd(0.1), embedding=ops.Adagrad(learning_rate=0.1))
        growing = {"user": GrowingVocabulary(Growth(capacity=30))}
        with jrec.distribute(model, optimizer, growing=growing, **where) as run:
            step = run.compile()
            # Two new keys a batch: rows 1 to 4 are on the device, the others in host memory.
            items = ({"label": np.ones(4), "user": np.arange(4) % 2 + 2 * n} for n in range(4))
            losses = [float(step(batch)[0]) for batch in run.feed(items)]
            return np.array(losses), run.table("user")

    jax.tree.map(functools.partial(np.testing.assert_allclose, **CLOSE), trained(plan=plan), trained())


def test_no_further_vocabularies_are_none():
    """``pack_batch`` takes None for them; a run adds the vocabularies of its growing tables."""
    layout = jrec.EmbeddingLayout.build(
        [jrec.TableConfig(name="user", rows=4, dim=8)], [jrec.FeatureConfig(name="user", table="user")]
    )
    config = nn.DLRMConfig(num_dense=0, bottom_mlp=(), top_mlp=(8, 1), interaction="concat")
    model = nn.DLRM(config, layout, rngs=nnx.Rngs(0))
    optimizer = nn.SparseOptimizer(model, dense=optax.sgd(0.1), embedding=ops.SGD(learning_rate=0.1))
    growing, examples = {"user": GrowingVocabulary(Growth(capacity=4))}, {"label": np.ones(2), "user": np.array([7, 9])}
    with jrec.distribute(model, optimizer, growing=growing) as run:
        step = run.compile()
        for batch in run.feed([examples], vocabularies=None):
            step(batch)
        np.testing.assert_array_equal(run.predict(examples, vocabularies=None), run.predict(examples))


@pytest.mark.parametrize("row", [ops.Adam(learning_rate=0.01), ops.RowWiseAdagrad(learning_rate=0.1)])
def test_slots_of_every_shape_begin_anew(row):
    """A table of one row for keys: each new key takes it from the one before."""
    tables = [jrec.TableConfig(name="user", rows=2, dim=8)]
    layout = jrec.EmbeddingLayout.build(tables, [jrec.FeatureConfig(name="user", table="user")])
    vocabularies = {"user": GrowingVocabulary(Growth(capacity=2, evict="lru"))}
    config = nn.DLRMConfig(num_dense=0, bottom_mlp=(), top_mlp=(8, 1), interaction="concat")
    model = nn.DLRM(config, layout, rngs=nnx.Rngs(0))
    optimizer = nn.SparseOptimizer(model, dense=optax.sgd(0.0), embedding=row)
    words, name = key_words(model.embeddings.table_key()), layout.members[0].name
    with jrec.distribute(model, optimizer, growing=vocabularies) as run:
        step = run.compile()
        for number, batch in enumerate(run.feed({"label": np.ones(4), "user": np.full(4, n)} for n in (5, 6, 5))):
            step(batch)
            model, optimizer = run.modules()
            slots = {k: np.asarray(slot[...])[1] for k, slot in optimizer.slots[name].items()}
            if number == 0:
                first = slots, run.table("user")[1]
        if not isinstance(row, ops.Adam):  # whose steps depend on their number
            np.testing.assert_array_equal(run.table("user")[1], first[1])  # the same key, begun anew
        for slot, array in slots.items():
            np.testing.assert_array_equal(array, first[0][slot])
            assert np.abs(array).max() > 0
        halves = jnp.array([[0, 0]], jnp.uint32)
        assert np.abs(np.asarray(init_rows_of_keys(tables, words, jnp.array([0]), halves))).max() <= 2**-0.5


def test_first_values_depend_on_the_key_alone():
    tables = [jrec.TableConfig(name=name, rows=50, dim=16) for name in ("a", "b")]
    words = key_words(jax.random.key(3))
    halves = np.random.default_rng(0).integers(0, 2**32, (40, 2), dtype=np.uint32)
    numbers = np.repeat([0, 1], 20)
    values = np.asarray(init_rows_of_keys(tables, words, numbers, halves))
    order = np.random.default_rng(1).permutation(40)
    np.testing.assert_array_equal(init_rows_of_keys(tables, words, numbers[order], halves[order]), values[order])
    np.testing.assert_array_equal(init_rows_of_keys(tables[1:], words, np.zeros(20, int), halves[20:]), values[20:])
    assert np.unique(values).size > 600
    assert 0.12 < np.abs(values).max() <= 50**-0.5
    assert abs(values.mean()) < 0.02
    tables[1] = dataclasses.replace(tables[1], initial_bound=0.5)
    longer = np.asarray(init_rows_of_keys(tables, words, numbers, halves))
    np.testing.assert_array_equal(longer[:20], values[:20])
    np.testing.assert_allclose(longer[20:], values[20:] * (0.5 * 50**0.5), rtol=1e-6)


def test_what_does_not_fit_is_refused(tmp_path):
    small = {"user": GrowingVocabulary(Growth(capacity=29))}
    with pytest.raises(ValueError, match="capacity of 29 rows, but the table has 30"):
        jrec.distribute(*modules(layout_of()), growing=small)
    with pytest.raises(ValueError, match="'shop' is to grow, but the model's tables are item, tag, user"):
        jrec.distribute(*modules(layout_of()), growing={"shop": small["user"]})
    shape = jrec.TTShape.search(30, 8, ranks=2)
    tables = [jrec.TableConfig(name="user", rows=30, dim=8, tier="tt", tt_shape=shape)]
    layout = jrec.EmbeddingLayout.build(tables, [jrec.FeatureConfig(name="user", table="user")])
    with pytest.raises(ConfigError, match="'user' grows, but is a tensor train"):
        jrec.distribute(*modules(layout), growing={"user": growing()["user"]})
    with placed("device") as run:
        batch = pack_batch(
            layout_of(), with_rows(columns(0), lambda _, values: np.zeros(len(values), int)), dense=DENSE
        )
        with pytest.raises(ValueError, match="a packed batch has rows, but tables of the run grow"):
            next(run.feed([batch]))
    with placed("device") as run:
        steps_of(run, range(2))
        run.save(tmp_path / "c")
    with (
        jrec.distribute(*modules(layout_of())) as run,
        pytest.raises(CheckpointError, match="'tag' only grows in"),
    ):
        run.restore(tmp_path / "c")


@pytest.mark.slow
def test_two_processes_grow_as_one(tmp_path):
    """Each has two devices and a share of the host rows, and gives half of every batch."""
    run_pair("growing_process.py", tmp_path)
    expected, tables, predicted, _ = plain()
    for process in range(2):
        one = np.load(tmp_path / f"{process}.npz")
        np.testing.assert_allclose(one["losses"], expected, **CLOSE)
        np.testing.assert_allclose(one["logits"], predicted, rtol=2e-3, atol=2e-5)
        for name, rows in tables.items():
            np.testing.assert_allclose(one[name], rows, err_msg=name, **CLOSE)
    with placed("device") as run:  # what the two wrote
        run.restore(tmp_path / "c")
        follows(run, expected)
