"""The host pipeline computes the bits of the device tier under every schedule, fails in order, and never hangs."""

import dataclasses
import itertools
import json
import threading
import time
import traceback

import jax
import numpy as np
import pytest
from host_runs import STEPS, HostRun, batches, device_snapshots, layout, make_batch, new_run, pipeline_threads, within
from hypothesis import given, settings
from hypothesis import strategies as st

from jrec.host.pipeline import BACK, GATHER, PLAN, READ, STEP, STORE, TRANSFER
from jrec.host.ring import LEAST_BUCKET, DeviceRing, RingIndex, Rows, bucket, head
from jrec.host.stages import Channel, Finished, Monitor, Stage
from jrec.host.timeline import Timeline

AHEAD, BEHIND = (READ, PLAN, GATHER, TRANSFER), (BACK, STORE)


class Delays(Timeline):
    """Holds every stage up for random times."""

    def __init__(self, seed: int, mean: float = 4e-4):
        super().__init__()
        self._rng, self._mean = np.random.default_rng(seed), mean

    def working(self, stage, batch):
        seconds = self._rng.exponential(self._mean)
        time.sleep(seconds * (20 if self._rng.random() < 0.05 else 1))
        return super().working(stage, batch)


class SlowStore(Timeline):
    """Rows reach the host late: a gather that does not wait for them reads the old ones."""

    def working(self, stage, batch):
        if stage == STORE:
            time.sleep(0.02)
        return super().working(stage, batch)


class Fault(Timeline):
    """Fails one stage at one batch."""

    def __init__(self, stage: str, batch: int):
        super().__init__()
        self._where = stage, batch

    def working(self, stage, batch):
        if (stage, batch) == self._where:
            raise OSError(f"{stage} broke at {batch}")
        return super().working(stage, batch)


@pytest.fixture(autouse=True)
def no_thread_outlives_its_test():
    yield
    assert pipeline_threads() == []


def run_schedule(seed: int, rows: str = "adam") -> None:
    """A whole run under one random schedule, looked at in random places, compared with the device's."""
    rng = np.random.default_rng([seed, 1])
    expected = device_snapshots(rows)
    queue = int(rng.choice([1, 2, 3, 5]))
    run = HostRun(rows, threads=int(rng.integers(1, 4)))
    cached, looks = queue - int(rng.integers(2)), rng.random(STEPS + 1) < 0.2
    slow = rng.random() < 0.5
    with run.pipeline(queue=queue, cached=cached, timeline=Delays(seed), pinned=bool(rng.integers(2))) as pipeline:
        for step in range(1, STEPS + 1):
            loss = run.step(pipeline)
            assert loss == expected[step].loss, f"step {step}"
            if slow:
                time.sleep(rng.exponential(1e-3))
            if looks[step] or step == STEPS:
                pipeline.flush()
                assert pipeline.position == step
                assert run.snapshot(loss) == expected[step], f"step {step}"
        assert run.step(pipeline) is None


def test_fifty_random_schedules_give_the_bits_of_the_device_tier():
    for seed in range(50):
        within(lambda seed=seed: run_schedule(seed))


@pytest.mark.slow
@pytest.mark.parametrize("rows", ["adam", "rowwise_adagrad", "sgd"])
def test_more_random_schedules(rows):
    for seed in range(100, 140):
        within(lambda seed=seed: run_schedule(seed, rows))


def test_the_small_run_is_worth_comparing():
    snapshots = device_snapshots()
    assert all(len({s.tables[name] for s in snapshots}) == STEPS + 1 for name in snapshots[0].tables)
    run, capacities = HostRun(), set()
    with run.pipeline(queue=3) as pipeline:
        while run.step(pipeline) is not None:
            capacities |= {ring.capacity for ring in pipeline._indexes.values()}
        rows = pipeline.timeline.summary(1.0)["rows"]
    assert len(capacities) > 1
    assert all(of["cached_on_device"] > 0.3 * of["unique"] for of in rows.values())
    assert all(of["fetched"] > 10 for of in rows.values())


@pytest.mark.parametrize("queue", [1, 2, 3, 5])
def test_a_ring_that_is_one_batch_too_short_would_be_noticed(queue):
    run = HostRun()
    with pytest.raises(ValueError, match=f"the rows of {queue - 2} batches .* up to {queue - 1} batches"):
        run.pipeline(queue=queue, cached=queue - 2)
    if queue == 1:
        return
    pipeline = run.pipeline(queue=queue, cached=queue - 1, timeline=SlowStore())
    pipeline._cached -= 1  # what the check forbids
    with pipeline:
        losses = [run.step(pipeline) for _ in range(STEPS)]
        pipeline.flush()
    assert losses != [s.loss for s in device_snapshots()[1:]]


@given(
    length=st.integers(0, 4),
    used=st.lists(
        st.sets(st.integers(0, 11), max_size=6) | st.integers(0, 200).map(lambda n: set(range(n))),
        min_size=1,
        max_size=12,
    ),
)
@settings(max_examples=200)
def test_the_plan_finds_the_latest_copy_of_every_row(length, used):
    plan, last = RingIndex(length=length, most=200), {}
    for batch, rows in enumerate(used):
        rows = np.array(sorted(rows), np.int32)
        source, missing = plan.next(batch, rows, 200)
        capacity = plan.capacity
        assert source.shape == (capacity,)
        assert len(rows) <= capacity <= max(LEAST_BUCKET, 2 * max(map(len, used)))
        expected_missing = [row for row in rows if last.get(row, (-9,))[0] < batch - length]
        assert missing.tolist() == expected_missing
        for place, row in enumerate(rows):
            if row in expected_missing:
                assert source[place] == -1 - expected_missing.index(row)
            else:
                at, where = last[row]
                assert source[place] == (at % length) * capacity + where
        assert (source[len(rows) :] == -1).all()
        last |= {row: (batch, place) for place, row in enumerate(rows)}


@pytest.mark.parametrize("length", [0, 3])
def test_the_ring_holds_what_the_plan_says_while_it_grows(length):
    rng = np.random.default_rng(length)
    host = np.arange(600, dtype=np.float32).reshape(200, 3)
    expected, most = host.copy(), 150
    plan, ring, capacities = RingIndex(length=length, most=most), DeviceRing(length=length), set()
    for batch in range(12):
        rows = np.sort(rng.choice(200, size=rng.integers(1, 10 + 12 * batch), replace=False)).astype(np.int32)
        source, missing = plan.next(batch, rows, most)
        fetched = np.full((bucket(missing.size, plan.capacity), 3), np.nan, np.float32)
        fetched[: missing.size] = host[missing]
        taken = ring.assemble(jax.numpy.asarray(source), Rows(values=fetched, slots={"sum": fetched[:, 0]}))
        np.testing.assert_array_equal(taken.values[: rows.size], expected[rows])
        np.testing.assert_array_equal(taken.slots["sum"][: rows.size], expected[rows, 0])
        updated = jax.tree.map(lambda array: array + 100, taken)
        expected[rows] += 100
        host[rows] = np.asarray(head(updated, rows.size).values)
        ring.push(batch, updated)
        capacities.add(plan.capacity)
    assert len(capacities) > 1


@given(count=st.integers(0, 100_000), capacity=st.integers(1, 100_000))
@settings(max_examples=200)
def test_buckets_hold_their_rows_with_little_padding(count, capacity):
    count = min(count, capacity)
    size = bucket(count, capacity)
    assert count <= size <= capacity
    assert size <= max(LEAST_BUCKET, 1.5 * count)


@pytest.mark.parametrize("stage", AHEAD)
@pytest.mark.parametrize("queue", [1, 3])
def test_a_failure_ahead_of_the_step_comes_after_the_steps_before_it(stage, queue):
    run = HostRun()

    def go():
        with run.pipeline(queue=queue, timeline=Fault(stage, 4)) as pipeline:
            losses = [run.step(pipeline) for _ in range(4)]
            with pytest.raises(OSError, match=f"{stage} broke at 4") as error:
                run.step(pipeline)
            pipeline.flush()
            assert run.snapshot(losses[-1]) == device_snapshots()[4]
            with pytest.raises(OSError, match=f"{stage} broke at 4"):
                pipeline.get()
        return error.value

    error = within(go)
    assert error.__notes__ == [f"(in stage {stage!r}, after 4 batches)"]
    frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert frames[-1] == "working"  # where it broke, in the stage's own thread


@pytest.mark.parametrize("stage", BEHIND)
@pytest.mark.parametrize("queue", [1, 3])
@pytest.mark.parametrize("at", ["step", "flush"])
def test_a_failure_behind_the_step_stops_the_next_wait(stage, queue, at):
    run = HostRun()

    def go():
        with run.pipeline(queue=queue, timeline=Fault(stage, 2)) as pipeline:
            for _ in range(3):
                run.step(pipeline)
            wait = pipeline.flush if at == "flush" else lambda: [run.step(pipeline) for _ in range(STEPS)]
            with pytest.raises(OSError, match=f"{stage} broke at 2") as error:
                wait()
            with pytest.raises(OSError, match=f"{stage} broke at 2"):
                pipeline.flush()
        return error.value

    assert within(go).__notes__ == [f"(in stage {stage!r}, after 2 batches)"]


def test_a_source_that_fails_and_a_table_that_fails_are_named(monkeypatch):
    run = HostRun()

    def source():
        yield from batches(run.layout, 2)
        raise ValueError("example 7 of shard 3 is bad")

    with run.pipeline(source()) as pipeline:
        assert [within(lambda: run.step(pipeline)) for _ in range(2)] == [s.loss for s in device_snapshots()[1:3]]
        with pytest.raises(ValueError, match="example 7 of shard 3") as error:
            within(lambda: run.step(pipeline))
    assert "in stage 'read'" in error.value.__notes__[0]
    table = next(iter(run.tables.values()))
    monkeypatch.setattr(table, "store", lambda *_: (_ for _ in ()).throw(MemoryError("no pages")))
    run = HostRun()
    run.tables[table.stack.name] = table
    with run.pipeline() as pipeline, pytest.raises(MemoryError, match="no pages") as error:
        within(lambda: [run.step(pipeline) for _ in range(STEPS)])
    assert "in stage 'host store'" in error.value.__notes__[0]


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_close_abandons_at_once_wherever_the_run_is(steps):
    run = HostRun()

    def go():
        pipeline = run.pipeline(timeline=Delays(steps))
        for _ in range(steps):
            run.step(pipeline)
        pipeline.close()
        pipeline.close()
        assert pipeline_threads() == []
        if steps:
            with pytest.raises(RuntimeError, match="closed"):
                pipeline.get()

    within(go)


def test_an_interrupt_between_get_and_put_back_ends_every_thread():
    run = HostRun()

    def go():
        with run.pipeline() as pipeline:
            run.step(pipeline)
            pipeline.get()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        within(go)


@pytest.mark.parametrize("queue", [1, 2, 4])
def test_batches_under_way_are_bounded_by_the_queue(queue):
    run, read = HostRun(), []

    def source():
        for one, position in batches(run.layout):
            read.append(position)
            yield one, position

    def go():
        with run.pipeline(source(), queue=queue) as pipeline:
            pipeline.get()
            for _ in range(3):
                time.sleep(0.05)
            return len(read)

    # Those between gather and store, and one in every stage and channel before the gather.
    assert within(go) <= queue + 5
    assert within(go) >= queue


def test_batches_without_any_id_pass_through():
    def source(of):
        for one, position in batches(of, 5):
            if position in (1, 4):
                empty = {n: dataclasses.replace(b, offsets=np.zeros_like(b.offsets)) for n, b in one.bags.items()}
                one = dataclasses.replace(one, bags=empty)
            yield one, position

    run, expected = HostRun(), []
    state, device = new_run("sharded")
    for one, _ in source(layout("sharded")):
        state, loss, _ = device.step(state, one)
        expected.append(float(loss))
    with run.pipeline(source(run.layout), queue=2) as pipeline:
        assert [within(lambda: run.step(pipeline)) for _ in range(6)] == [*expected, None]


def test_misuse_is_refused():
    run = HostRun()
    with pytest.raises(ValueError, match="queue has length 0"):
        run.pipeline(queue=0)
    name, table = next(iter(run.tables.items()))
    other = HostRun()
    other.tables = {name: table}
    with pytest.raises(ValueError, match=r"host stacks are .* but the tables are"):
        other.pipeline()
    with run.pipeline() as pipeline:
        ready = pipeline.get()
        with pytest.raises(RuntimeError, match="put_back first"):
            pipeline.get()
        pipeline.put_back(ready, ready.tables)
        with pytest.raises(RuntimeError, match="batch 0 was put back, but the pipeline waits for batch 1"):
            pipeline.put_back(ready, ready.tables)
    with pytest.raises(ValueError, match="exceed the 2,147,483,647 rows"):
        RingIndex(length=4, most=2**29)
    plan = RingIndex(length=1, most=4)
    with pytest.raises(ValueError, match="batch 0 may have 5 unique rows, but those before it 4"):
        plan.next(0, np.zeros(0, np.int32), 5)
    with pytest.raises(ValueError, match="capacity 0"):
        Channel(Monitor(), "c", 0, Timeline())


def test_a_model_without_its_host_rows_says_where_they_are():
    run = HostRun()
    with pytest.raises(ValueError, match=r"rows of stack\(s\) host_d8_float32, host_d8_bfloat16 are in host"):
        run.run.predict(run.state, make_batch(layout("host"), 0))


def test_stages_pass_items_on_in_order_and_finish():
    monitor, timeline = Monitor(), Timeline()
    first, second = (Channel(monitor, name, 2, timeline) for name in ("first", "second"))
    numbers = iter(enumerate("abcdef"))

    def take():
        try:
            return next(numbers)
        except StopIteration:
            raise Finished from None

    make = Stage("make", take=take, work=lambda number, item: item * number, give=first.put, finish=first.finish,
                 fail=monitor.fail, timeline=timeline)  # fmt: skip
    move = Stage("move", take=first.get, work=lambda number, item: item.upper(), give=second.put,
                 finish=second.finish, fail=monitor.fail, timeline=timeline)  # fmt: skip
    make.start()
    move.start()
    assert [within(second.get) for _ in range(6)] == list(enumerate(["", "B", "CC", "DDD", "EEEE", "FFFFF"]))
    with pytest.raises(Finished):
        within(second.get)
    make.join()
    move.join()
    assert timeline.summary(1.0)["stages"]["move"]["batches"] == 6


def test_a_stage_that_does_not_end_is_named(monkeypatch):
    monkeypatch.setattr("jrec.host.stages.JOIN_SECONDS", 0.05)
    release, ends, monitor = threading.Event(), [], Monitor()

    def take():
        if ends:
            raise Finished
        return 0, None

    stuck = Stage("disk", take=take, work=lambda *_: release.wait(), give=lambda _: None,
                  finish=lambda _: None, fail=monitor.fail, timeline=Timeline())  # fmt: skip
    stuck.start()
    with pytest.raises(RuntimeError, match=r"stage 'disk' did not end"):
        stuck.join()
    ends.append(True)
    release.set()
    monkeypatch.undo()
    stuck.join()


def test_the_timeline_says_who_worked_and_who_waited(tmp_path):
    run, timeline = HostRun(), Timeline(trace=True)
    start = time.perf_counter()
    with run.pipeline(timeline=timeline) as pipeline:
        while run.step(pipeline) is not None:
            pass
        pipeline.flush()
    seconds = time.perf_counter() - start
    summary = timeline.summary(seconds)
    assert set(summary["stages"]) == {READ, PLAN, GATHER, TRANSFER, STEP, BACK, STORE, "dispatch"}
    for stage in summary["stages"].values():
        assert stage["batches"] == STEPS
        assert 0 <= stage["busy_seconds"] <= seconds
    assert summary["stages"][summary["busiest_stage"]]["busy_seconds"] / seconds == summary["overlap_efficiency"] <= 1
    for of in summary["rows"].values():
        assert of["unique"] == of["cached_on_device"] + of["fetched"]
        assert of["hit_rate"] == of["cached_on_device"] / of["unique"]
    assert all(1 <= depth["mean"] <= depth["max"] <= 3 for depth in summary["queue_depths"].values())
    json.dumps(summary, allow_nan=False)

    timeline.write_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    spans = [e for e in events if e["ph"] == "X"]
    assert {names[e["tid"]] for e in spans} == set(summary["stages"])
    assert len(spans) == STEPS * len(summary["stages"])
    for tid, name in names.items():
        own = sorted((e["ts"], e["ts"] + e["dur"], e["args"]["batch"]) for e in spans if e["tid"] == tid)
        assert [batch for *_, batch in own] == list(range(STEPS)), name
        assert all(a[1] <= b[0] + 1e-3 for a, b in itertools.pairwise(own)), f"{name} overlaps itself"
    by = {(names[e["tid"]], e["args"]["batch"]): (e["ts"], e["ts"] + e["dur"]) for e in spans}
    for batch in range(3, STEPS):
        assert by[GATHER, batch][0] >= by[STORE, batch - 3][1]
    timeline.reset()
    assert timeline.summary(0.0)["overlap_efficiency"] is None
