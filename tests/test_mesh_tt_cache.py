"""Caches of tensor-train tables on a mesh: the same rows as on one device, with the same values, step after step."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from mesh_run_cases import CONFIG
from run_cases import configuring, quickstart

from jrec.app.evaluate import evaluate_checkpoint
from jrec.app.loop import train
from jrec.mesh.communication import Communication
from jrec.mesh.step import StepOptions
from jrec.nn.tt_stack import TTOptions, TTStack
from jrec.ops import SGD, Adagrad, Bags, tensor_cast
from jrec.ops.layout import EmbeddingLayout, FeatureConfig, TableConfig
from jrec.ops.tt import TTCacheConfig, TTShape
from jrec.ops.tt.cache_index import lookups_of_rows
from jrec.tiers.cores import count, counted, empty_counter
from jrec.tiers.shared_cores import cast_of_all
from jrec.tiers.store import Context


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return quickstart(tmp_path_factory.mktemp("data"), rows=800)


EXACT = TTCacheConfig(cache_rows=6, tracked_rows=90, warmup_steps=3, refresh_every=2)
ROWS = 40


@pytest.mark.parametrize(("bags", "length"), [(6, 3), (64, 4)])
def test_the_lookups_of_all_devices_are_those_of_the_whole_batch(bags, length):
    """A device tells the others its lookups, or, where it repeats few rows, their counts."""
    devices = 4
    ids = np.random.default_rng(0).integers(-2, ROWS + 3, (devices * bags, length)).astype(np.int32)
    ids[:bags] = -1  # the first device has none
    mesh = Mesh(np.array(jax.devices()[:devices]), ("devices",))
    parts = PartitionSpec("devices")

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=parts, out_specs=parts, check_vma=False)
    def found(ids):
        own = tensor_cast(ids, num_rows=ROWS)
        assert (own.positions.size <= 2 * own.rows.size) == (bags == 6)
        cast = cast_of_all(own, ROWS, Context(options=StepOptions(), communication=Communication()))
        return cast.rows[None], lookups_of_rows(cast)[None]

    rows, counts = (np.asarray(a) for a in found(ids))
    real, times = np.unique(ids[(ids >= 0) & (ids < ROWS)], return_counts=True)
    for device in range(devices):
        np.testing.assert_array_equal(rows[device], [*real, *[ROWS] * (rows.shape[1] - real.size)])
        np.testing.assert_array_equal(counts[device], [*times, *[0] * (rows.shape[1] - real.size)])


def test_counters_carry():
    step = jax.jit(count)
    counter = empty_counter()
    for more in (7, 2**31 - 1, 2**31 - 1, 2**31 - 1, 0):
        counter = step(counter, jnp.int32(more))
    assert counted(counter) == 7 + 3 * (2**31 - 1)


def test_cores_cached_rows_and_choices_are_those_of_one_device():
    """Through the warm-up and two choices of rows; every device's copy keeps the same bits."""
    shape, devices, bags = TTShape.search(ROWS, 4, num_cores=2, ranks=2), 4, 24
    optimizer, cores = Adagrad(learning_rate=0.1), SGD(learning_rate=0.05)
    table = TableConfig(name="word", rows=ROWS, dim=4, tier="tt", tt_shape=shape)
    (of,) = EmbeddingLayout.build([table], [FeatureConfig(name="word", table="word", max_length=2)]).members
    options = TTOptions(caches={"word": dataclasses.replace(EXACT, tracked_rows=8)})
    graph, state = nnx.split(TTStack(of, jax.random.key(0), options=options))
    slots = nnx.merge(graph, state).init_slots(optimizer, cores=cores)
    mesh = Mesh(np.array(jax.devices()[:devices]), ("devices",))

    def train(communication, state, slots, ids, gradients, step):
        stack, named = nnx.merge(graph, state), StepOptions(step=step, implementation="xla")
        context = Context(options=named, optimizer=optimizer, cores=cores, communication=communication)
        store = stack.store(slots)
        out, residuals = store.lookup(Bags(ids=ids), context).finish(None)
        new = store.update(residuals, gradients, context).step(context.options).finish(None)
        stack.put(new)
        return nnx.state(stack), new.slots, out

    over, everywhere = PartitionSpec("devices"), PartitionSpec()
    specs = {"in_specs": (everywhere, everywhere, over, over, everywhere), "out_specs": (everywhere, everywhere, over)}
    mapped = jax.shard_map(functools.partial(train, Communication()), mesh=mesh, **specs, check_vma=False)
    steps = jax.jit(functools.partial(train, None)), jax.jit(mapped)
    kept = [(state, slots), jax.device_put((state, slots), NamedSharding(mesh, everywhere))]
    for step in range(7):
        rng = np.random.default_rng(step)
        ids = np.minimum(rng.zipf(1.3, (bags, 2)) - 2, ROWS - 1).astype(np.int32)  # -1 is padding
        gradients = rng.normal(size=(bags, 4)).astype(np.float32)
        *kept[0], expected = steps[0](*kept[0], ids, gradients, jnp.int32(step))
        *kept[1], found = steps[1](*kept[1], ids, gradients, jnp.int32(step))
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)
        ours, theirs = (jax.tree_util.tree_leaves_with_path(tuple(of)) for of in kept)
        for (path, one), (_, many) in zip(ours, theirs, strict=True):
            assert len({np.asarray(shard.data).tobytes() for shard in many.addressable_shards}) == 1, path
            rtol, atol = (2e-4, 2e-5) if one.dtype == jnp.float32 else (0, 0)
            np.testing.assert_allclose(many, one, rtol=rtol, atol=atol, err_msg=str(path))
    state, slots = kept[0]
    assert (nnx.merge(graph, state).cached["ids"][...] < ROWS).all()
    assert 0 < counted(slots["hits"]) < counted(slots["lookups"])


RUN = """
every_steps = 2
[tables.tt]
largest = 1
rank = 4
[tables.tt.cache]
rows = 20
warmup_steps = 2
refresh_every = 3
"""


def logged(folder, metric):
    """Its values in a run's log records of training."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record[metric] for record in records if record["split"] == "train"]


@pytest.mark.slow
def test_a_cached_run_moves_between_one_device_and_meshes(tmp_path, dataset):
    """And logs the same hits."""
    configure = configuring(tmp_path, dataset, CONFIG + RUN)  # CONFIG ends in the section [log]
    one = train(configure("max_steps=9", out="one"))
    for steps, devices in ((3, 1), (5, 2), (7, 4), (9, 1)):
        moved = train(configure(f"max_steps={steps}", f"mesh.devices={devices}", out="moved"), resume=True)
    np.testing.assert_allclose(moved.scores["test"].logits, one.scores["test"].logits, rtol=1e-4, atol=1e-5)
    assert moved.sections["caches"] == one.sections["caches"]
    ((table, hits),) = one.sections["caches"].items()
    assert 0 < hits["hits"] < hits["lookups"] == 9 * 64
    rates = [logged(run.folder, f"cache_hit_rate.{table}") for run in (one, moved)]
    assert rates[0] == rates[1]
    assert rates[0][0] == 0 < rates[0][-1] <= 1
    scores = evaluate_checkpoint(moved.folder, dataset, split="test", devices=4).scores
    np.testing.assert_allclose(scores.logits, moved.scores["test"].logits, rtol=1e-5, atol=1e-6)
