"""Rows that stay on the device: a pipeline with them, and steps on them alone, compute the bits of the device tier."""

import dataclasses
import time

import jax
import numpy as np
import pytest
from host_runs import (
    PROBE,
    STEPS,
    TABLES,
    HostRun,
    dense_bits,
    layout,
    make_batch,
    new_run,
    optimizer,
    pipeline_threads,
    row_bits,
    within,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from jrec.host import HostTable
from jrec.host.pipeline import STORE
from jrec.host.resident import ResidentRows, others
from jrec.host.ring import RingPlan, Rows
from jrec.host.timeline import Timeline
from jrec.native import host as native
from jrec.ops.layout import EmbeddingLayout, FeatureConfig, TableConfig
from jrec.train.host_run import host_predict

HOT = {"site": 12, "user": 5, "item": 60}
"""Rows of the random hot sets: of one size, so that steps are compiled once."""


@pytest.fixture(autouse=True)
def no_thread_outlives_its_test():
    yield
    assert pipeline_threads() == []


class SlowStore(Timeline):
    """Rows reach the host late."""

    def working(self, stage, batch):
        if stage == STORE:
            time.sleep(0.005)
        return super().working(stage, batch)


def hot_rows(seed, sizes=HOT):
    """A hot set: rows by table."""
    rng = np.random.default_rng([seed, 7])
    return {name: np.sort(rng.choice(rows, sizes[name], replace=False)) for name, rows, _ in TABLES}


def hot_batch(of, number, hot):
    """Batch ``number`` with its ids mapped to hot rows, as addresses of the stacks."""
    one = make_batch(of, number)
    bags = {}
    for name, stack in of.stacks.items():
        ids = np.array(one.bags[name].ids)
        for table, base in zip(stack.tables, stack.bases, strict=True):
            own = (ids >= base) & (ids < base + table.rows)
            rows = hot[table.name]
            ids[own] = base + rows[(ids[own] - base) % rows.size]
        bags[name] = dataclasses.replace(one.bags[name], ids=ids)
    return dataclasses.replace(one, bags=bags)


class DeviceRun:
    """The same batches on a model whose tables are on the device."""

    def __init__(self, rows):
        self.layout = layout("device")
        self.state, self.run = new_run("device", rows)

    def step(self, batch):
        self.state, loss, _ = self.run.step(self.state, batch)
        return float(loss)

    def predict(self):
        return np.asarray(self.run.predict(self.state, make_batch(self.layout, PROBE))).tobytes()

    def bits(self):
        model, sparse = self.run.merge(self.state)
        found = dense_bits(self.state)
        for name, array in model.embeddings.arrays().items():
            slots = {slot: np.asarray(variable[...]) for slot, variable in sparse.slots[name].items()}
            found |= row_bits(name, np.asarray(array), slots)
        return found


class ResidentRun(HostRun):
    """A run whose hot rows stay on the device; hot batches are trained without the pipeline."""

    def __init__(self, hot, rows="adam", **options):
        super().__init__(rows, **options)
        self.addresses = {
            name: np.concatenate(
                [base + hot[table.name] for table, base in zip(stack.tables, stack.bases, strict=True)]
            ).astype(np.int32)
            for name, stack in self.layout.stacks.items()
        }
        self.resident = {n: ResidentRows(addresses, self.tables[n]) for n, addresses in self.addresses.items()}
        self.predict = host_predict(self.run, self.layout, self.tables, self.resident)
        self.numbers = {name: jax.numpy.asarray(addresses) for name, addresses in self.addresses.items()}

    def compact(self, batch):
        """A hot batch as a loader of hot examples makes it: ids number the resident rows."""
        bags = {}
        for name, of in batch.bags.items():
            addresses = self.addresses[name]
            ids = np.minimum(np.searchsorted(addresses, of.ids), addresses.size - 1).astype(np.int32)
            real = np.arange(ids.size) < of.offsets[-1]
            assert (addresses[ids] == of.ids)[real].all()
            cast = native.tensor_cast(ids, of.offsets, num_rows=addresses.size)
            bags[name] = dataclasses.replace(of, ids=ids, cast=cast)
        return dataclasses.replace(batch, bags=bags)

    def hot_step(self, batch):
        rows = {name: of.rows for name, of in self.resident.items()}
        self.state, rows, loss, _ = self.run.step_on_resident(self.state, rows, self.numbers, self.compact(batch))
        for name, of in self.resident.items():
            of.rows = rows[name]
        return float(loss)

    def bits(self):
        for name, of in self.resident.items():
            of.store(self.tables[name])
        found = dense_bits(self.state)
        for name, table in self.tables.items():
            found |= row_bits(name.removeprefix("host_"), *table.fetch(np.arange(table.rows, dtype=np.int32)))
        return found


def compare(order, hot, rows="adam", looks=(), saves=(), threads=1, **options):
    """Trains hot (True) and cold batches in ``order`` here and on the device, and compares every bit."""
    device, run = DeviceRun(rows), ResidentRun(hot, rows, threads=threads)
    cold = ((make_batch(run.layout, number), number) for number, is_hot in enumerate(order) if not is_hot)
    with run.pipeline(cold, resident=run.resident, **options) as pipeline:
        for number, is_hot in enumerate(order):
            if is_hot:
                expected = device.step(hot_batch(device.layout, number, hot))
                found = run.hot_step(hot_batch(run.layout, number, hot))
            else:
                expected, found = device.step(make_batch(device.layout, number)), run.step(pipeline)
            assert found == expected, f"step {number} of {order}"
            if number in looks or number in saves:
                pipeline.settle()
            if number in looks:  # what a prediction reads of resident rows comes from the device
                logits = run.predict(run.state, make_batch(run.layout, PROBE))
                assert np.asarray(logits).tobytes() == device.predict()
            if number in saves:
                assert run.bits() == device.bits()
        pipeline.settle()
        assert run.bits() == device.bits()
        return pipeline.timeline.summary(1.0), run


@given(
    order=st.lists(st.booleans(), min_size=STEPS, max_size=STEPS),
    seed=st.integers(0, 2**31),
    queue=st.sampled_from([1, 3]),
    longer=st.integers(-1, 0),
    looks=st.sets(st.integers(0, STEPS - 1), max_size=2),
    saves=st.sets(st.integers(0, STEPS - 1), max_size=2),
    slow=st.booleans(),
)
@settings(max_examples=2, derandomize=True)
def test_hot_and_cold_steps_in_any_order_give_the_bits_of_the_device_tier(
    order, seed, queue, longer, looks, saves, slow
):
    timeline = SlowStore() if slow else Timeline()
    options = {"queue": queue, "cached": max(0, queue + longer), "timeline": timeline}
    within(lambda: compare(order, hot_rows(seed), looks=looks, saves=saves, **options))


@pytest.mark.slow
@pytest.mark.parametrize("rows", ["rowwise_adagrad", "sgd"])
def test_more_orders_and_optimizers(rows):
    for seed in range(10):
        rng = np.random.default_rng(seed)
        order = list(rng.random(STEPS) < rng.choice([0.2, 0.5, 0.8]))
        options = {"queue": int(rng.integers(1, 5)), "threads": int(rng.integers(1, 4)), "timeline": SlowStore()}
        within(lambda order=order, seed=seed, options=options: compare(order, hot_rows(seed), rows, **options))


@pytest.mark.parametrize("sizes", [
    pytest.param({"site": 1, "user": 1, "item": 1}, marks=pytest.mark.slow), {n: rows for n, rows, _ in TABLES},
])  # fmt: skip
def test_one_hot_row_a_table_and_all_rows_hot(sizes):
    order = [False, True, False, False, True, True, False, True]
    most_popular = {name: np.arange(size) for name, size in sizes.items()}
    summary, run = within(lambda: compare(order, most_popular))
    for name, of in summary["rows"].items():
        assert 0 < of["resident"] <= of["cached_on_device"]
        if run.addresses[name].size == run.layout.stacks[name].rows:
            assert of["resident"] == of["unique"]
            assert of["fetched"] == 0


def test_resident_rows_are_neither_fetched_nor_stored(monkeypatch):
    hot, seen = hot_rows(3), {"fetch": [], "store": []}
    for verb, log in seen.items():
        real = getattr(HostTable, verb)

        def spy(self, rows, *args, real=real, log=log):
            log.append((self.stack.name, np.array(rows)))
            return real(self, rows, *args)

        monkeypatch.setattr(HostTable, verb, spy)
    run = ResidentRun(hot)
    for log in seen.values():
        log.clear()  # the rows' first values
    source = ((make_batch(run.layout, number), number) for number in range(STEPS))
    with run.pipeline(source, resident=run.resident) as pipeline:
        while within(lambda: run.step(pipeline)) is not None:
            pass
        pipeline.settle()
        summary = pipeline.timeline.summary(1.0)
    assert len(seen["fetch"]) == len(seen["store"]) == 2 * STEPS
    for name, rows in seen["fetch"] + seen["store"]:
        assert not np.isin(rows, run.addresses[name]).any()
    for name, of in summary["rows"].items():
        stored = sum(rows.size for stack, rows in seen["store"] if stack == name)
        fetched = sum(rows.size for stack, rows in seen["fetch"] if stack == name)
        assert fetched == of["fetched"]
        assert stored == of["unique"] - of["resident"]
        row_bytes = run.resident[name].row_bytes
        assert row_bytes == run.tables[name].nbytes // run.tables[name].rows
        # Padding to static sizes is counted, and is no more than half again or one least bucket a batch.
        for moved, rows in ((of["bytes_to_device"], fetched), (of["bytes_to_host"], stored)):
            assert row_bytes * rows <= moved <= row_bytes * (1.5 * rows + 32 * STEPS)
    assert summary["batch_bytes_to_device"] > 0


def test_stale_copies_in_the_ring_would_be_noticed(monkeypatch):
    real = RingPlan.next
    monkeypatch.setattr(RingPlan, "next", lambda self, batch, rows, most, resident=None: real(self, batch, rows, most))
    monkeypatch.setattr(ResidentRows, "fill", lambda self, rows, split: rows)
    order = [number % 2 == 1 for number in range(STEPS)]
    with pytest.raises(AssertionError, match="step "):
        within(lambda: compare(order, hot_rows(1)))


def test_a_hot_step_works_in_place():
    """Its temporaries do not grow with the resident rows."""
    rows = {"site": 40_000, "user": 5, "item": 60_000}
    tables = [TableConfig(name=n, rows=rows[n], dim=8, dtype=dtype, tier="host") for n, _, dtype in TABLES]
    run = ResidentRun(hot_rows(0))
    large = EmbeddingLayout.build(tables, [f.config for s in run.layout.members for f in s.features])
    resident = {
        stack.name: ResidentRows(
            np.arange(stack.rows, dtype=np.int32), HostTable(stack, optimizer("adam"), jax.random.key(0))
        ).rows
        for stack in large.members
    }
    numbers = {name: jax.numpy.arange(stack.rows, dtype=np.int32) for name, stack in large.stacks.items()}
    batch = run.compact(hot_batch(run.layout, 0, hot_rows(0)))
    lowered = run.run.step_on_resident.lower(run.state, resident, numbers, batch)
    memory = lowered.compile().memory_analysis()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(resident))
    assert size > 9_000_000
    assert memory.temp_size_in_bytes < 500_000
    assert memory.alias_size_in_bytes >= size


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rows_of_odd_width_are_kept_as_the_model_stores_its_stacks(dtype):
    tables = [TableConfig(name="site", rows=50, dim=6, dtype=dtype, tier="host")]
    stack = EmbeddingLayout.build(tables, [FeatureConfig(name="site", table="site")]).members[0]
    table, fresh = (HostTable(stack, optimizer("adam"), jax.random.key(0)) for _ in range(2))
    resident = ResidentRows(np.array([3, 7, 8, 41], np.int32), table, pad_rows=True)
    assert resident.rows.values.shape == (4, 8)
    split = resident.split(np.array([0, 3, 8, 9, 41], np.int32))
    assert (split.places.tolist(), split.indices.tolist(), split.others.tolist()) == ([1, 2, 4], [0, 2, 3], [0, 3])
    split = split.padded(40)
    rows = Rows(
        values=np.zeros((40, 6), table.dtype),
        slots={"mu": np.ones((40, 6), np.float32), "nu": np.ones((40, 6), np.float32)},
    )
    rows.slots.update(dict.fromkeys(resident.rows.slots, rows.slots["mu"]))
    rows = Rows(values=rows.values, slots={name: rows.slots[name] for name in resident.rows.slots})
    filled = resident.fill(jax.tree.map(jax.numpy.asarray, rows), split)
    values, _ = table.fetch(np.array([3, 8, 41], np.int32))
    np.testing.assert_array_equal(np.asarray(filled.values)[[1, 2, 4]], values)
    assert not np.asarray(filled.values)[[0, 3, 5, 39]].any()
    assert all(not np.asarray(slot)[[1, 2, 4]].any() for slot in filled.slots.values())
    updated = jax.tree.map(lambda array: array + jax.numpy.ones((), array.dtype), filled)
    cold = others(updated, split)
    np.testing.assert_array_equal(np.asarray(cold.values)[:2], np.asarray(updated.values)[[0, 3]])
    resident.update(updated, split)
    resident.store(table)
    expected = fresh.read(np.arange(50, dtype=np.int32))
    expected[[3, 8, 41]] += np.ones((), expected.dtype)
    np.testing.assert_array_equal(table.read(np.arange(50, dtype=np.int32)), expected)
    again = ResidentRows(resident.addresses, table, pad_rows=True)
    assert jax.tree.map(lambda a, b: bool((a == b).all()), again.rows, resident.rows) == jax.tree.map(
        lambda _: True, again.rows
    )


def test_what_cannot_be_resident_is_refused():
    run = ResidentRun(hot_rows(0))
    table = next(iter(run.tables.values()))
    with pytest.raises(ValueError, match=r"no row of stack host_d8_float32 is resident"):
        ResidentRows(np.zeros(0, np.int32), table)
    with pytest.raises(ValueError, match="45"):
        ResidentRows(np.array([45], np.int32), table)
    with pytest.raises(ValueError, match=r"rows of \['other'\] are resident, but the tables are"):
        run.pipeline(resident={"other": run.resident["host_d8_float32"]})
