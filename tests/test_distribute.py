"""``jrec.distribute``: one loop over any placement, against the plain step on one device."""

import dataclasses
import functools
import gc
import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
import pytest
from checkpoint_state import contents
from distribute_cases import DENSE, ROWS, STEPS, columns, layout_of, mesh_of, modules, three_tiers
from flax import nnx
from grids import some_of
from process_pair import run_pair

import jrec
from jrec import nn, ops
from jrec.checkpoint import Saved
from jrec.data import pack_batch
from jrec.errors import ConfigError
from jrec.run.options import HostOptions
from jrec.run.placement.plan import overlaid
from jrec.sharding.pieces import HOST

CLOSE = {"rtol": 2e-4, "atol": 2e-6}


@functools.cache
def plain():
    """Losses, tables and dense parameters of the plain step on one device."""
    layout = layout_of()
    model, optimizer = modules(layout)
    step, losses = nnx.jit(nn.train_step), []
    for number in range(STEPS):
        batch = pack_batch(layout, columns(number), dense=DENSE)
        losses.append(float(step(model, optimizer, batch)[0]))
    stack = layout.members[0]
    rows = np.asarray(model.embeddings.arrays()[stack.name])
    tables = {t.name: rows[base : base + t.rows] for t, base in zip(stack.tables, stack.bases, strict=True)}
    return losses, tables, [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))]


def placed(name):
    """A run in one of the placements."""
    if name == "device":
        return jrec.distribute(*modules(layout_of()))
    if name in ("host", "host-pipeline"):
        host = HostOptions(pipeline="on" if name == "host-pipeline" else "auto")
        return jrec.distribute(*modules(layout_of(tiers=[("user", "host")])), host=host)
    if name == "mesh":
        return jrec.distribute(*modules(layout_of()), mesh=mesh_of(4))
    if name == "mesh-planned":  # the model never holds a row
        return jrec.distribute(*modules(layout_of(planned=True)), mesh=mesh_of(4))
    devices = 1 if name == "plan-one" else 4
    mesh = None if devices == 1 else mesh_of(devices)
    return jrec.distribute(*modules(layout_of()), mesh=mesh, plan=three_tiers(devices, layout_of()))


PLACEMENTS = ("device", "host", "host-pipeline", "mesh", "mesh-planned", "plan-one", "plan-four")


def follows(run, losses, *, exact=False):
    limits = {"rtol": 0, "atol": 0} if exact else CLOSE
    expected, tables, dense = plain()
    np.testing.assert_allclose(losses, expected[len(expected) - len(losses) :], **limits)
    for name, rows in tables.items():
        np.testing.assert_allclose(run.table(name), rows, err_msg=name, **limits)
    model, _ = run.modules()
    for leaf, other in zip(jax.tree.leaves(nnx.state(model, nnx.Param)), dense, strict=True):
        np.testing.assert_allclose(np.asarray(leaf), other, **limits)


@pytest.mark.parametrize("name", some_of(PLACEMENTS, "host-pipeline", "mesh", "plan-one", "plan-four"))
def test_a_placement_trains_predicts_and_goes_on_like_the_plain_step(name, tmp_path):
    losses, half = [], STEPS // 2
    with placed(name) as run:
        first = run.predict(columns(99), dense=DENSE, batch_size=8)
        step = run.compile()
        feed = run.feed((columns(n) for n in range(half)), dense=DENSE)
        losses += [float(step(batch)[0]) for batch in feed]
        run.save(tmp_path / "c", meta={"feed": feed.position()})
    with placed(name) as run:
        meta = run.restore(tmp_path / "c")
        assert (run.steps, meta["feed"]["batches"]) == (half, half)
        step = run.compile()
        for batch in run.feed((columns(n) for n in range(half, STEPS)), dense=DENSE, workers=0):
            loss, outputs = step(batch)
            losses.append(float(loss))
            np.testing.assert_array_equal(np.asarray(outputs.labels), batch.batch.labels)
        assert run.steps == STEPS
        follows(run, losses)
        assert first.shape == (16,)
        assert np.abs(run.predict(columns(99), dense=DENSE) - first).max() > 1e-3


@pytest.mark.parametrize(("before", "after"), [("device", "plan-four"), ("plan-four", "host"), ("host", "mesh")])
def test_a_checkpoint_goes_on_in_another_placement(before, after, tmp_path):
    losses, half = [], STEPS // 2
    with placed(before) as run:
        step = run.compile()
        losses += [float(step(batch)[0]) for batch in run.feed(map(columns, range(half)), dense=DENSE)]
        run.save(tmp_path / "c")
    with placed(after) as run:
        run.restore(tmp_path / "c", step=half)
        step = run.compile()
        losses += [float(step(batch)[0]) for batch in run.feed(map(columns, range(half, STEPS)), dense=DENSE)]
        follows(run, losses)


def test_host_rows_in_place_have_the_bits_of_rows_on_the_device():
    with placed("device") as device, placed("host") as host:
        for run in (device, host):
            step = run.compile()
            for batch in run.feed(map(columns, range(STEPS)), dense=DENSE):
                step(batch)
        for name in ROWS:
            np.testing.assert_array_equal(device.table(name), host.table(name))
        np.testing.assert_array_equal(host.rows("user", np.array([7, 3, 7])), device.table("user")[[7, 3, 7]])


@pytest.mark.parametrize("pipeline", ["off", "on"])
@pytest.mark.parametrize("ragged", [False, True])
def test_bags_longer_than_the_layouts(ragged, pipeline):
    """Packed by hand: host memory has room for all of their rows, as the device has, and devices of a mesh refuse."""
    ids = np.arange(1, 7, dtype=np.int32).reshape(2, 3)
    bags = ops.Bags(ids=ids.reshape(-1), offsets=np.array([0, 3, 6], np.int32)) if ragged else ops.Bags(ids=ids)
    ones = np.ones(2, np.float32)

    def step(tier, **options):
        table = jrec.TableConfig(name="user", rows=100, dim=8, tier=tier)
        feature = jrec.FeatureConfig(name="user", table="user", max_length=2 if ragged else 1)
        with jrec.distribute(*modules(jrec.EmbeddingLayout.build([table], [feature])), **options) as run:
            (name,) = run.layout.stacks
            batch = jrec.Batch(dense=np.ones((2, 2), np.float32), labels=ones, mask=ones, bags={name: bags})
            (fed,) = (run.compile()(batch) for batch in run.feed([batch], dense=DENSE))
            return float(fed[0]), run.table("user")

    (loss, rows), (host_loss, host_rows) = step("sharded"), step("host", host=HostOptions(pipeline=pipeline))
    assert host_loss == pytest.approx(loss)
    np.testing.assert_allclose(host_rows, rows, **CLOSE)
    with pytest.raises(ValueError, match=r"a bag of feature 'user' holds 3 ids, but max_length is [12];"):
        step("sharded", mesh=mesh_of(1))


def test_a_longer_bag_beside_a_shorter_one_is_refused_on_a_mesh():
    """Packed by hand: the batch has no more ids than by max_length, but one feature more than its room for rows."""
    tables = [jrec.TableConfig(name=name, rows=100, dim=8, tier="sharded") for name in ("user", "item")]
    features = [jrec.FeatureConfig(name=table.name, table=table.name, max_length=2) for table in tables]
    ones = np.ones(2, np.float32)
    ids = np.array([0, 1, 2, 3, 100, 101], np.int32)
    bags = ops.Bags(ids=ids, offsets=np.array([0, 3, 4, 5, 6], np.int32))
    with jrec.distribute(*modules(jrec.EmbeddingLayout.build(tables, features)), mesh=mesh_of(1)) as run:
        (name,) = run.layout.stacks
        batch = jrec.Batch(dense=np.ones((2, 2), np.float32), labels=ones, mask=ones, bags={name: bags})
        with pytest.raises(ValueError, match="a bag of feature 'user' holds 3 ids, but max_length is 2; raise Feature"):
            next(run.feed([batch], dense=DENSE))


@pytest.mark.parametrize("past", [False, True])
@pytest.mark.parametrize("name", ["device", "host", "host-pipeline", "mesh", "plan-one"])
def test_addresses_that_are_no_rows_of_a_features_table(name, past):
    """In batches packed by hand: past the stack, or of another table of the same stack."""
    with placed(name) as run:
        packed = pack_batch(run.layout, columns(0), dense=DENSE)
        stack = (run.layout.planned_stacks or run.layout.host_stacks or run.layout.members)[0]
        feature = (max if past else min)(stack.features, key=lambda feature: feature.base)
        ids, address = np.array(packed.bags[stack.name].ids), feature.base + feature.rows
        bag = feature.first_bag * len(packed.labels)
        offsets = packed.bags[stack.name].offsets
        ids[bag if offsets is None else offsets[bag]] = address
        bags = packed.bags | {stack.name: dataclasses.replace(packed.bags[stack.name], ids=ids, cast=None)}
        batch = dataclasses.replace(packed, bags=bags)
        message = f"feature '{feature.config.name}' holds address {address:,}, but table '{feature.config.table}' has"
        with run.feed([batch], dense=DENSE) as feed, pytest.raises(ValueError, match=message):
            next(feed)
        with pytest.raises(ValueError, match=message):
            run.evaluate([batch])


def test_what_a_run_is_called_with_by_mistake():
    with placed("device") as run:
        step, batch = run.compile(), columns(0)
        for options, message in (
            ({"cast": "host"}, r"Run\.feed has no argument 'cast'; jrec\.distribute\(cast=\.\.\.\) says where"),
            ({"wieght": "w"}, r"Run\.feed has no argument 'wieght'; of pack_batch's it takes weight, extras, oov_rows"),
        ):
            with pytest.raises(TypeError, match=message):
                run.feed([batch], dense=DENSE, **options)
        with pytest.raises(TypeError, match=r"Run\.predict has no argument 'label'; predictions need no labels"):
            run.predict(batch, dense=DENSE, label=None)
        for name, value, least in (
            ("batch_size", 0, 1),
            ("batch_size", 8.0, 1),
            ("steps", 0, 1),
            ("workers", -1, 0),
            ("prefetch", -1, 0),
            ("total", -1, 0),
        ):
            with pytest.raises(ConfigError, match=f"{name} is {value}, but must be an integer of at least {least}"):
                run.feed([batch], dense=DENSE, **{name: value})
        for method in (run.predict, run.evaluate):
            with pytest.raises(ConfigError, match="batch_size is -1, but must be an integer of at least 1"):
                method(batch, dense=DENSE, batch_size=-1)
        with pytest.raises(ConfigError, match="micro_batches is 0, but must be an integer of at least 1"):
            run.compile(micro_batches=0)
        for one in (batch, pd.DataFrame({"user": [1]}), pack_batch(run.layout, batch, dense=DENSE)):
            for method in (run.feed, run.evaluate):
                name = f"Run.{method.__name__} takes an iterable of batches, but got one {type(one).__name__}; put it"
                with pytest.raises(TypeError, match=name):
                    method(one, dense=DENSE)
        with pytest.raises(ValueError, match=r"a step takes a batch of this run's feed.*; this one is a dict"):
            step(batch)
        with pytest.raises(ValueError, match=r"ids must be integers of shape \(n,\), but are int64 of shape \(\)"):
            run.rows("user", 3)
        assert run.rows("user", []).shape == (0, 8)


@pytest.mark.parametrize("name", ["device", "host-pipeline", "mesh"])
def test_batches_without_examples(name):
    empty = {feature: values[:0] for feature, values in columns(0).items()}
    with placed(name) as run:
        with pytest.raises(ValueError, match="the first batch has no examples, but all have its size; leave it"):
            list(run.feed([empty, columns(0)], dense=DENSE))
        for feed in run._feeds.opened:
            feed.close()
        step, rows = run.compile(), run.table("user")
        assert [float(step(batch)[0]) for batch in run.feed([empty], dense=DENSE, batch_size=16)] == [0]
        np.testing.assert_array_equal(run.table("user"), rows)


@pytest.mark.parametrize("name", ["device", "mesh"])
@pytest.mark.parametrize(
    ("loss", "kind"),
    [(lambda logits, batch: jnp.int32(1), r"int32\[\]"), (lambda logits, batch: logits, r"float32\[\d+\]")],
)
def test_a_loss_is_a_single_float(name, loss, kind):
    with placed(name) as run, run.feed([columns(0)], dense=DENSE) as feed:
        batch = next(feed)
        with pytest.raises(TypeError, match=f"the loss is {kind}; give a single float, such as a mean"):
            run.compile(loss=loss)(batch)
        run.compile()(batch)  # nothing was donated


def test_trained_rows_and_slots_move_to_where_a_plan_puts_them():
    layout, half = layout_of(), STEPS // 2
    model, optimizer = modules(layout)
    step = nnx.jit(nn.train_step)
    for number in range(half):
        step(model, optimizer, pack_batch(layout, columns(number), dense=DENSE))
    with jrec.distribute(model, optimizer, mesh=mesh_of(4), plan=three_tiers(4, layout)) as run:
        assert run.steps == half
        go = run.compile()
        losses = [float(go(batch)[0]) for batch in run.feed(map(columns, range(half, STEPS)), dense=DENSE)]
        follows(run, losses)


def test_a_plan_from_counts_places_hot_rows_on_every_device():
    layout = layout_of()
    counts = {name: np.arange(rows, 0, -1.0) ** 2 for name, rows in ROWS.items()}
    options = {"counts": counts, "examples": 1000, "hardware": "h200x8", "devices": 4, "batch_size": 16}
    plan = jrec.sharding.plan(layout, **options, optimizer=ops.Adagrad(learning_rate=0.1), memory=6000)
    assert plan.rows_in("host") > 0
    with jrec.distribute(*modules(layout), mesh=mesh_of(4), plan=plan) as run:
        step = run.compile()
        losses = [float(step(batch)[0]) for batch in run.feed(map(columns, range(STEPS)), dense=DENSE)]
        follows(run, losses)
    with pytest.raises(ConfigError, match="say in how many examples"):
        jrec.sharding.plan(layout, **options | {"examples": None})
    with pytest.raises(ConfigError, match=r"counts of table 'item' have shape \(3,\), but it has 40 rows"):
        jrec.sharding.plan(layout, **options | {"counts": counts | {"item": np.ones(3)}})


def test_any_loss_of_any_outputs():
    def parts(logits, batch):
        return jnp.sum(jnp.square(logits - 3) * batch.mask) / jnp.maximum(jnp.sum(batch.mask), 1)

    found = {}
    for name in ("device", "plan-four"):
        with placed(name) as run:
            step = run.compile(loss=parts)
            found[name] = [float(step(batch)[0]) for batch in run.feed(map(columns, range(STEPS)), dense=DENSE)]
    np.testing.assert_allclose(found["device"], found["plan-four"], **CLOSE)
    assert found["device"][-1] < found["device"][0]


def test_hot_and_cold_batches_of_one_run():
    """Hot batches need no row of another device; both kinds in turn follow the same batches without the distinction."""
    layout = layout_of()

    def hot(number):
        """Only the replicated rows: users 0 to 4, all items; no tags."""
        found = columns(number)
        return found | {"user": found["user"] % 5, "tags": np.full((16, 4), -1)}

    kinds = [hot if number % 2 else columns for number in range(STEPS)]
    model, optimizer = modules(layout)
    train, expected = nnx.jit(nn.train_step), []
    for number, kind in enumerate(kinds):
        expected.append(float(train(model, optimizer, pack_batch(layout, kind(number), dense=DENSE))[0]))
    with placed("plan-four") as run:
        step = run.compile()
        feeds = {
            hot: run.feed((hot(n) for n in range(1, STEPS, 2)), dense=DENSE, hot=True),
            columns: run.feed((columns(n) for n in range(0, STEPS, 2)), dense=DENSE),
        }
        losses = [float(step(next(feeds[kind]))[0]) for kind in kinds]
        np.testing.assert_allclose(losses, expected, **CLOSE)
        with pytest.raises(jrec.data.DatasetError, match=r"a hot batch reads row \d+ of table 'user'"):
            next(run.feed([columns(0)], dense=DENSE, hot=True))


def test_misuse_is_refused(tmp_path):
    layout = layout_of()
    with placed("device") as run, placed("device") as other:
        step, feed = run.compile(), run.feed(map(columns, range(3)), dense=DENSE)
        batch = next(feed)
        with pytest.raises(RuntimeError, match="take the step of the last batch before"):
            next(feed)
        with pytest.raises(ValueError, match="a batch of this run's feed"):
            other.compile()(batch)
        step(batch)
        with pytest.raises(ValueError, match="each batch once"):
            step(batch)
        with pytest.raises(RuntimeError, match="close the run's feeds"):
            run.restore(tmp_path)
        with pytest.raises(ConfigError, match="give distribute a plan"):
            run.feed([], hot=True)
        with pytest.raises(ValueError, match="there is no table 'users'; the tables are item, tag, user"):
            run.table("users")
        with pytest.raises(ValueError, match="table 'item' has no row 40"):
            run.rows("item", np.array([3, 40]))
    with pytest.raises(ConfigError, match="the plan is for 4 devices, but the mesh has 2"):
        jrec.distribute(*modules(layout), mesh=mesh_of(2), plan=three_tiers(4, layout))
    with pytest.raises(ConfigError, match=r"HostOptions\.pipeline is 'off'"):
        jrec.distribute(*modules(layout), mesh=mesh_of(2), host=HostOptions(pipeline="off"))


def test_batches_raise_where_they_are_wrong():
    with placed("device") as run:
        step = run.compile()
        feed = run.feed([columns(0), columns(1) | {"item": np.full(16, 99)}, columns(2)], dense=DENSE)
        step(next(feed))
        with pytest.raises(jrec.data.DatasetError, match="id 99 of feature 'item'"):
            next(feed)
        feed.close()
        short = [columns(0), {name: column[:5] for name, column in columns(1).items()}]
        sizes = [float(step(batch)[1].mask.sum()) for batch in run.feed(short, dense=DENSE)]
        assert sizes == [16, 5]


def test_a_step_updates_tables_in_place():
    """XLA's own account: tables and slots are overwritten, and no temporary is as large as one of them."""
    table = jrec.TableConfig(name="user", rows=200_000, dim=16)
    layout = jrec.EmbeddingLayout.build([table], [jrec.FeatureConfig(name="user", table="user")])
    config = nn.DLRMConfig(num_dense=1, bottom_mlp=(16,), top_mlp=(1,))
    model = nn.DLRM(config, layout, rngs=nnx.Rngs(0))
    optimizer = nn.SparseOptimizer(model, dense=optax.sgd(0.1), embedding=ops.Adagrad(learning_rate=0.1))
    found = {"label": np.zeros(8, np.float32), "price": np.zeros(8, np.float32), "user": np.arange(8)}
    with jrec.distribute(model, optimizer) as run:
        state, batch = run._state, next(run.feed([found], dense=["price"], workers=0))
        memory = state.compiled.step_on.lower(state.state, {}, {}, batch.ready.prepared).compile().memory_analysis()
    rows = 4 * 200_000 * 16
    assert memory.alias_size_in_bytes >= 2 * rows
    assert memory.temp_size_in_bytes < rows / 20


@pytest.mark.slow
def test_two_processes_train_save_and_restore(tmp_path):
    """Each has two devices and a share of the host rows, and gives half of every batch."""
    run_pair("distribute_process.py", tmp_path)
    expected, tables, _ = plain()
    found = [np.load(tmp_path / f"{process}.npz") for process in range(2)]
    for one in found:
        np.testing.assert_allclose(one["losses"], expected, **CLOSE)
        for name, rows in tables.items():
            np.testing.assert_allclose(one[name], rows, **CLOSE)
    np.testing.assert_array_equal(found[0]["logits"], found[1]["logits"])
    half, whole = (Saved(tmp_path / "c" / str(step)).manifest.tables["user"].pieces for step in (STEPS // 2, STEPS))
    assert whole[: len(half)] == half  # of which the second one is an increment
    assert 0 < sum(piece.count for piece in whole[len(half) :]) < ROWS["user"] // 2
    step = str(STEPS)
    assert contents(Saved(tmp_path / "c" / step)) == contents(Saved(tmp_path / "whole" / step))
    with placed("device") as run:  # which goes on from what the two wrote
        run.restore(tmp_path / "c")
        follows(run, [])


@pytest.mark.slow
@pytest.mark.parametrize("rows", [10_000_000])
def test_a_steps_time_does_not_grow_with_the_rows(rows):
    """The same 4,096 rows of tables of 1e5 and 1e7 rows, one step of each in turn."""
    times = {100_000: [], rows: []}
    runs = {}
    for size in times:
        table = jrec.TableConfig(name="user", rows=size, dim=16)
        layout = jrec.EmbeddingLayout.build([table], [jrec.FeatureConfig(name="user", table="user")])
        config = nn.DLRMConfig(num_dense=1, bottom_mlp=(16,), top_mlp=(1,))
        model = nn.DLRM(config, layout, rngs=nnx.Rngs(0))
        optimizer = nn.SparseOptimizer(model, dense=optax.sgd(0.1), embedding=ops.Adagrad(learning_rate=0.1))
        runs[size] = jrec.distribute(model, optimizer)
    ids = np.random.default_rng(0).integers(0, 4096, 2048)
    found = {"label": np.zeros(2048, np.float32), "price": np.zeros(2048, np.float32), "user": ids}
    steps = {
        size: (run.compile(), run.feed(itertools.repeat(found, 220), dense=["price"])) for size, run in runs.items()
    }
    for _ in range(200):
        for size, (step, feed) in steps.items():
            batch = next(feed)
            start = time.perf_counter()
            jax.block_until_ready(step(batch))
            times[size].append(time.perf_counter() - start)
    for run in runs.values():
        run.close()
    assert np.median(times[rows][20:]) < 1.5 * np.median(times[100_000][20:])


def mixed_layout(*, planned=False):
    """A tensor-train table, 16-bit rows, a frozen table, and one in two parts."""
    shape = jrec.TTShape.search(90, 8, ranks=4)
    tail = jrec.TTShape.search(280, 8, ranks=4)
    tables = [
        jrec.TableConfig(name="user", rows=20, dim=8, of_rows=300),
        jrec.TableConfig(name="user", rows=280, dim=8, tier="tt", tt_shape=tail, first_row=20, of_rows=300),
        jrec.TableConfig(name="item", rows=40, dim=8, dtype="bfloat16", group="fixed"),
        jrec.TableConfig(name="tag", rows=90, dim=8, tier="tt", tt_shape=shape),
    ]
    features = [
        jrec.FeatureConfig(name="user", table="user"),
        jrec.FeatureConfig(name="item", table="item"),
        jrec.FeatureConfig(name="tags", table="tag", max_length=4, pooling="mean"),
    ]
    return jrec.EmbeddingLayout.build(tables, features, planned=planned)


@pytest.mark.parametrize("planned", some_of([False, True], True))
def test_cores_16_bit_rows_frozen_tables_and_parts_on_a_mesh(planned):
    frozen = {"item": None}
    model, optimizer = modules(mixed_layout(), tables=frozen)
    step, expected = nnx.jit(nn.train_step), []
    for number in range(STEPS):
        batch = pack_batch(mixed_layout(), columns(number), dense=DENSE)
        expected.append(float(step(model, optimizer, batch)[0]))
    with (
        jrec.distribute(*modules(mixed_layout(planned=planned), tables=frozen), mesh=mesh_of(4)) as run,
        jrec.distribute(model, optimizer) as one,
    ):
        go = run.compile()
        losses = [float(go(batch)[0]) for batch in run.feed(map(columns, range(STEPS)), dense=DENSE)]
        np.testing.assert_allclose(losses, expected, **CLOSE)
        assert run.table("item").dtype == jnp.bfloat16
        for name in ROWS:
            np.testing.assert_allclose(
                run.table(name).astype(np.float32), one.table(name).astype(np.float32), err_msg=name, **CLOSE
            )


class TwoTower(nnx.Module):
    """Users and items as vectors; ``logits`` returns both."""

    def __init__(self, layout, rngs):
        self.embeddings = nn.EmbeddingCollection(layout, rngs=rngs)
        self.user, self.item = nnx.Linear(8, 4, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)

    def logits(self, dense, activations, bags):
        features = self.embeddings.features(activations, bags)
        return {"user": self.user(features["user"]), "item": self.item(features["item"] + features["tags"])}


def test_a_tree_of_outputs_comes_from_all_devices_in_the_order_of_examples():
    def pairs(outputs, batch):
        scores = jnp.sum(outputs["user"] * outputs["item"], axis=1)
        return jnp.sum(jax.nn.softplus(-scores) * batch.mask) / jnp.maximum(jnp.sum(batch.mask), 1)

    found = []
    layout = layout_of()
    hardware = dataclasses.replace(jrec.sharding.load_hardware("h200x8", devices=4), tables_on=(0, 3))
    apart = jrec.sharding.plan(layout, hardware=hardware, batch_size=16)
    for options in ({}, {"mesh": mesh_of(4)}, {"mesh": mesh_of(4), "plan": apart}):
        model = TwoTower(layout, nnx.Rngs(0))
        optimizer = nn.SparseOptimizer(model, dense=optax.sgd(0.1), embedding=ops.SGD(learning_rate=0.1))
        with jrec.distribute(model, optimizer, **options) as run:
            step = run.compile(loss=pairs)
            outputs = [step(batch) for batch in run.feed(map(columns, range(3)), dense=DENSE)]
            predicted = run.predict(columns(5), dense=DENSE, batch_size=12)
            found.append(([float(loss) for loss, _ in outputs], outputs[-1][1].logits, predicted))
    assert found[0][1]["user"].shape == (16, 4)
    for other in found[1:]:
        jax.tree.map(lambda one, another: np.testing.assert_allclose(one, another, **CLOSE), found[0], other)


@pytest.mark.parametrize("name", ["host-pipeline", "plan-four"])
def test_rows_of_a_feed_that_is_left_are_stored(name):
    """A loop that breaks out, and whose feed nobody keeps."""

    def some(run):
        step = run.compile()
        for batch in run.feed(map(columns, range(STEPS)), dense=DENSE):
            step(batch)
            if run.steps == 3:
                break

    with placed(name) as run, placed("device") as other:
        some(run)
        some(other)
        gc.collect()
        for table in ROWS:
            np.testing.assert_allclose(run.table(table), other.table(table), **CLOSE)
        with pytest.raises(RuntimeError, match="reads rows in host memory ahead of its steps"):
            run.feed([])


def test_a_plan_whose_paths_lead_elsewhere_is_refused():
    """Rows move to the next device, but are still asked of the one that they were on."""
    plan = jrec.run.placement.plan.default_plan(layout_of().with_plan(), 4)
    moved = dataclasses.replace(plan, owner=np.where(plan.owner < 0, -1, (plan.owner + 1) % 4).astype(np.int16))
    words = r"the rows from 0 on of table 'user' from device 0, which does not hold them; device 1 does"
    with pytest.raises(jrec.sharding.PlanError, match=words):
        jrec.distribute(*modules(layout_of()), mesh=mesh_of(4), plan=moved)


@pytest.mark.parametrize("tiers", [{"tag": "host"}, {"user": "host", "item": "host"}])
@pytest.mark.parametrize("where", ["plan", "everywhere"])
def test_a_plan_takes_tables_of_any_tier(tiers, where):
    """Under a plan tables of any tier share a stack, of which the model then has made only some rows."""
    plan = jrec.run.placement.plan.default_plan(layout_of().with_plan(), 1)
    for name in ("tag", "user"):
        plan = overlaid(plan, {name: np.array([[0, ROWS[name]]])}, HOST)
    hot = {"tag": np.arange(30), "user": np.arange(100, 300), "item": np.arange(7)}
    options = {"plan": plan} if where == "plan" else {"everywhere": hot}

    def trained(tiers):
        model, _ = modules(layout_of(tiers=tiers))
        row = ops.Adagrad(learning_rate=0.1, initial_accumulator=0.5)
        optimizer = nn.SparseOptimizer(model, dense=optax.sgd(0.05), embedding=row)
        with jrec.distribute(model, optimizer, **options) as run:
            first = {name: run.table(name) for name in ROWS}
            step = run.compile()
            losses = [float(step(batch)[0]) for batch in run.feed(map(columns, range(3)), dense=DENSE)]
            return first, losses, {name: run.table(name) for name in ROWS}

    jax.tree.map(np.testing.assert_array_equal, trained(tiers), trained({}))
