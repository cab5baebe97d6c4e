"""Tables in host memory: first values, reads, writes and the fused path, against float64 and the device tier."""

import dataclasses
import doctest
import errno
import importlib
import itertools
import json
import os
import pathlib
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.random import threefry_2x32

from jrec import ops
from jrec.errors import ConfigError
from jrec.host import HostTable
from jrec.host.table import local_ids
from jrec.native import host
from jrec.ops.layout import EmbeddingLayout, FeatureConfig, TableConfig
from jrec.ops.rounding_rows import rounding_rows
from jrec.ops.row_init import init_rows, scale, table_key
from jrec.ops.types import Bags

KEY = jax.random.key(7, impl="threefry2x32")
OPTIMIZERS = {
    "sgd": ops.SGD(learning_rate=0.5, weight_decay=0.1),
    "momentum": ops.Momentum(learning_rate=0.1, max_row_norm=1.0),
    "nesterov": ops.Momentum(learning_rate=0.1, nesterov=True),
    "adagrad": ops.Adagrad(learning_rate=0.2, weight_decay=0.01),
    "row-wise adagrad": ops.RowWiseAdagrad(learning_rate=0.2, max_row_norm=2.0),
    "rmsprop": ops.RMSProp(learning_rate=0.05, decay=0.8),
    "adam": ops.Adam(learning_rate=lambda step: 0.1 / (step + 1), max_row_norm=3.0),
}


def stack_of(*rows, dim=8, dtype="float32"):
    """A stack of tables t0, t1, … of these rows."""
    tables = [TableConfig(name=f"t{i}", rows=r, dim=dim, dtype=dtype, tier="host") for i, r in enumerate(rows)]
    layout = EmbeddingLayout.build(tables, [FeatureConfig(name=t.name, table=t.name) for t in tables])
    return layout.stacks[f"host_d{dim}_{dtype}"]


def every(table):
    """All addresses."""
    return np.arange(table.rows, dtype=np.int32)


def same(a, b):
    """Bit-identical arrays."""
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(np.ascontiguousarray(a).view(np.uint8), np.ascontiguousarray(b).view(np.uint8))


def same_state(a, b):
    """Bit-identical rows and slots."""
    (rows, slots), (other, other_slots) = a.fetch(every(a)), b.fetch(every(b))
    same(rows, other)
    assert slots.keys() == other_slots.keys()
    for name, slot in slots.items():
        same(slot, other_slots[name])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_first_values_are_those_of_the_device_tier(dtype):
    stack = stack_of(1000, 37, dim=7, dtype=dtype)
    table = HostTable(stack, ops.Adam(learning_rate=0.1), KEY)
    rows, slots = table.fetch(every(table))
    same(rows, np.concatenate([np.asarray(init_rows(t, KEY)) for t in stack.tables]))
    assert not slots["mu"].any()
    assert not slots["nu"].any()
    assert table.num_made == 0


def test_first_values_past_2_to_the_32_elements():
    """By Threefry itself, since no such array can be made whole to compare with."""
    stack = stack_of(100, 2**31 - 200, dim=16)
    table = HostTable(stack, ops.SGD(learning_rate=0.1), KEY)
    rows = np.array([100, 2**28 + 99, 2**28 + 100, 2**30, 2**31 - 101], np.int32)
    elements = (rows.astype(np.uint64) - 100)[:, None] * 16 + np.arange(16, dtype=np.uint64)
    assert elements.max() > 2**34
    counters = np.stack([elements >> 32, elements & 0xFFFFFFFF]).astype(np.uint32)
    key = jax.random.key_data(table_key(KEY, "t1"))
    words = np.asarray(threefry_2x32(key, jnp.asarray(counters.reshape(-1)))).reshape(2, *elements.shape)
    odd = ((words[0] ^ words[1]) >> 8).astype(np.int32) * 2 - (2**24 - 1)
    same(table.fetch(rows)[0], odd.astype(np.float32) * np.asarray(scale(stack.tables[1])))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_equals_float64(name):
    optimizer = OPTIMIZERS[name]

    @given(case=reference.cases(), threads=st.sampled_from([1, 2, 3]), make=st.booleans())
    @settings(max_examples=50)
    def check(case, threads, make):
        shape = case.shape
        table = HostTable(stack_of(shape.rows, dim=shape.dim, dtype=shape.dtype), optimizer, KEY, threads=threads)
        first, slots = table.fetch(every(table))
        case = dataclasses.replace(case, table=first)
        cast = host.tensor_cast(case.ids, case.offsets, num_rows=shape.rows)
        want, want_slots = first.copy(), {n: s.astype(np.float64) for n, s in slots.items()}
        gradients = reference.row_gradients(case)
        eps, slack = reference.EPSILON[shape.dtype], reference.slack(case)
        for step in range(2 if shape.dtype == "float32" else 1):
            now = dataclasses.replace(case, table=table.read(every(table)))
            pooled = table.gather_reduce(Bags(ids=case.ids, offsets=case.offsets, weights=case.weights), make=make)
            np.testing.assert_allclose(pooled, reference.gather_reduce(now), rtol=1e-4, atol=2e-5)
            table.casted_update(cast, case.bag_gradients, weights=case.weights, step=step, gradient_scale=0.5)
            reference.step_rows(optimizer, want, want_slots, gradients, step=step, scale=0.5)
        rows, new_slots = table.fetch(every(table))
        np.testing.assert_allclose(rows.astype(np.float64), want.astype(np.float64), rtol=2e-4 + eps, atol=slack + eps)
        untouched = np.setdiff1d(every(table), list(gradients))
        same(rows[untouched], first[untouched])
        for n, slot in new_slots.items():
            np.testing.assert_allclose(slot, want_slots[n], rtol=2e-4, atol=slack, err_msg=n)
            same(slot[untouched], slots[n][untouched])
        np.testing.assert_array_equal(table.dirty_rows(), sorted(gradients))

    check()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_equals_the_device_tier_to_the_bit(name, dtype):
    optimizer, stack = OPTIMIZERS[name], stack_of(300, 50, dim=12, dtype=dtype)
    table = HostTable(stack, optimizer, KEY, threads=2)
    rng = np.random.default_rng(3)
    ids = np.minimum(rng.zipf(1.2, (500, 4)) - 1, stack.rows - 1).astype(np.int32)
    weights = rng.normal(size=ids.shape).astype(np.float32)
    key = None if dtype == "float32" else np.array([1, 2], np.uint32)
    device = jnp.concatenate([init_rows(t, KEY) for t in stack.tables])
    slots = optimizer.init(device)
    cast = host.tensor_cast(ids, num_rows=stack.rows)
    on_device = {} if key is None else {
        "rounding_key": jnp.asarray(key), "rounding_rows": rounding_rows(stack, jnp.asarray(cast.rows))
    }  # fmt: skip
    for step in range(3):
        gradients = rng.normal(size=(500, 12)).astype(np.float32)
        pooled = table.gather_reduce(Bags(ids=ids, weights=weights, cast=cast))
        same(pooled, np.asarray(ops.gather_reduce(device, ids, weights=weights, implementation="native")))
        table.casted_update(cast, gradients, weights=weights, step=step, rounding_key=key)
        device, slots = ops.casted_update(
            optimizer, device, slots, cast, gradients, weights=weights, step=step,
            implementation="native", **on_device,
        )  # fmt: skip
    rows, own = table.fetch(every(table))
    same(rows, np.asarray(device))
    for n, slot in slots.items():
        same(own[n], np.asarray(slot))


def test_updates_by_fetch_and_store_equal_those_in_place():
    """As the pipeline trains: the unique rows of a batch as a table of their own."""
    optimizer, stack = OPTIMIZERS["adagrad"], stack_of(400, dim=20)
    whole, parts = HostTable(stack, optimizer, KEY), HostTable(stack, optimizer, KEY)
    rng = np.random.default_rng(5)
    for _ in range(4):
        offsets = np.sort(rng.integers(0, 90, 31)).astype(np.int32)
        offsets[0] = 0
        ids = rng.integers(-1, 400, 90).astype(np.int32)
        cast = host.tensor_cast(ids, offsets, num_rows=400)
        gradients = rng.normal(size=(30, 20)).astype(np.float32)
        pooled = whole.gather_reduce(Bags(ids=ids, offsets=offsets))
        whole.casted_update(cast, gradients)
        unique = np.asarray(cast.rows[: int(cast.num_unique)])
        rows, slots = parts.fetch(unique)
        local = local_ids(cast, ids.shape)
        same(pooled, host.gather_reduce(rows, local, offsets))
        host.casted_update(optimizer, rows, slots, host.tensor_cast(local, offsets, num_rows=unique.size), gradients)
        parts.store(unique, rows, slots)
    same_state(whole, parts)
    np.testing.assert_array_equal(whole.dirty_rows(), parts.dirty_rows())


def test_any_number_of_threads_gives_the_same_bits():
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 5000, (30_000, 1)).astype(np.int32)
    ids[rng.random((30_000, 1)) < 0.35] = 7
    gradients = rng.normal(size=(30_000, 24)).astype(np.float32)
    tables = [HostTable(stack_of(5000, dim=24), OPTIMIZERS["row-wise adagrad"], KEY, threads=n) for n in (1, 2, 5)]
    pooled = []
    for table in tables:
        pooled.append(table.gather_reduce(Bags(ids=ids), make=True))
        table.casted_update(host.tensor_cast(ids, num_rows=5000), gradients)
    for other, values in zip(tables[1:], pooled[1:], strict=True):
        same(pooled[0], values)
        same_state(tables[0], other)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("with_cast", [False, True])
def test_reading_makes_no_rows_and_gives_what_making_gives(ragged, with_cast):
    rng = np.random.default_rng(1)
    ids = rng.integers(-1, 2000, (60, 5)).astype(np.int32)
    weights = rng.normal(size=ids.shape).astype(np.float32)
    offsets = None
    if ragged:
        offsets = np.linspace(0, 280, 61).astype(np.int32)
        ids, weights = ids.reshape(-1), weights.reshape(-1)
        ids[280:] = 2**31 - 1  # past the last bag anything goes
    cast = host.tensor_cast(ids, offsets, num_rows=2000) if with_cast else None
    bags = Bags(ids=ids, offsets=offsets, weights=weights, cast=cast)
    table = HostTable(stack_of(2000), ops.SGD(learning_rate=0.1), KEY)
    read = table.gather_reduce(bags)
    assert table.num_made == 0
    made = table.gather_reduce(bags, make=True)
    wanted = np.unique(ids[:280] if ragged else ids)
    np.testing.assert_array_equal(table.made_rows(), wanted[wanted >= 0])
    assert table.dirty_rows().size == 0
    same(read, made)
    out = np.empty_like(made)
    assert table.gather_reduce(bags, out=out) is out
    same(out, made)


def test_read_takes_any_order():
    table = HostTable(stack_of(50), ops.Adam(learning_rate=0.1), KEY)
    rows = np.array([4, 49, 4, 0], np.int32)
    values, slots = table.fetch(rows[[0]])
    table.store(rows[[0]], values + 1, slots)
    same(table.read(rows), table.fetch(every(table))[0][rows])
    assert table.read(np.zeros(0, np.int32)).shape == (0, 8)


def test_fetch_and_store_round_trip_through_given_arrays():
    table = HostTable(stack_of(1000, dim=5, dtype="bfloat16"), ops.Adam(learning_rate=0.1), KEY, threads=3)
    rows = np.arange(3, 1000, 2, dtype=np.int32)
    rng = np.random.default_rng(0)
    values = rng.normal(size=(rows.size, 5)).astype(table.dtype)
    slots = {n: rng.normal(size=(rows.size, 5)).astype(np.float32) for n in ("nu", "mu")}  # in another order than its
    before = table.fetch(every(table))[0]
    table.store(rows, values, slots)
    out, out_slots = np.empty_like(values), {n: np.empty_like(s) for n, s in slots.items()}
    got, got_slots = table.fetch(rows, out, out_slots)
    assert got is out
    same(got, values)
    for n in slots:
        assert got_slots[n] is out_slots[n]
        same(got_slots[n], slots[n])
    others = np.setdiff1d(every(table), rows)
    same(table.fetch(others)[0], before[others])
    np.testing.assert_array_equal(table.made_rows(), rows)
    table.clear_dirty()
    assert table.dirty_rows().size == 0
    table.reset()
    same(table.fetch(every(table))[0], before)


def test_disjoint_stores_of_many_threads_lose_no_row():
    """Neighbouring rows share words of the bitmaps."""
    table = HostTable(stack_of(40_000, dim=2), ops.SGD(learning_rate=0.1), KEY, threads=1)
    barrier, workers = threading.Barrier(8), []

    def work(first):
        barrier.wait()
        for begin in range(first, 40_000, 800):
            rows = np.arange(begin, min(begin + 800, 40_000), 8, dtype=np.int32)
            table.store(rows, np.repeat(rows[:, None], 2, 1).astype(np.float32), {})

    for first in range(8):
        workers.append(threading.Thread(target=work, args=(first,)))
        workers[-1].start()
    for worker in workers:
        worker.join()
    assert table.num_made == 40_000
    np.testing.assert_array_equal(table.dirty_rows(), every(table))
    np.testing.assert_array_equal(table.read(every(table))[:, 1], every(table))


def test_mapped_files_hold_what_memory_holds(tmp_path):
    optimizer, stack = OPTIMIZERS["adam"], stack_of(700, 9, dim=6, dtype="bfloat16")
    tables = [HostTable(stack, optimizer, KEY), HostTable(stack, optimizer, KEY, folder=tmp_path / "new")]
    rng = np.random.default_rng(2)
    for step in range(3):
        ids = rng.integers(0, 709, (100, 3)).astype(np.int32)
        gradients = rng.normal(size=(100, 6)).astype(np.float32)
        for table in tables:
            table.gather_reduce(Bags(ids=ids))
            table.casted_update(host.tensor_cast(ids, num_rows=709), gradients, step=step)
    same_state(*tables)
    assert list((tmp_path / "new").iterdir()) == []  # scratch files have no names, so that nothing leaves one behind
    assert str(tmp_path / "new") in pathlib.Path("/proc/self/maps").read_text()


def test_a_full_disk_is_an_error_before_training(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"host_d8_float32 needs 0\.00 GiB in .*free some, or choose another folder"):
        HostTable(stack_of(10), ops.SGD(learning_rate=0.1), KEY, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="choose another folder"):
        HostTable(stack_of(10), ops.SGD(learning_rate=0.1), KEY, folder=tmp_path / "file")


def test_a_table_of_many_times_the_memory_takes_what_is_touched():
    def resident():
        pages = pathlib.Path("/proc/self/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    if not sys.platform.startswith("linux"):
        pytest.skip("reads /proc")
    before = resident()
    table = HostTable(stack_of(1_000_000_000, dim=16), ops.Adam(learning_rate=0.1), KEY)
    assert table.nbytes == 3 * 64 * 10**9
    rows = np.arange(0, 10**9, 10**7, dtype=np.int32)
    values, slots = table.fetch(rows)
    table.store(rows, values, slots)
    assert table.num_made == 100
    assert resident() - before < 64 << 20


def test_a_key_of_another_generator_is_refused():
    with pytest.raises(ValueError, match="Threefry, but the key is of rbg"):
        HostTable(stack_of(4), ops.SGD(learning_rate=0.1), jax.random.key(0, impl="rbg"))


ROWS = np.array([1, 2], np.int32)
VALUES, SLOTS = np.zeros((2, 8), np.float32), {"sum": np.zeros(2, np.float32)}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t.fetch(np.array([1, 4, 4], np.int32)), r"rows\[2\] is 4 after 4"),
        (lambda t: t.fetch(np.array([5, 4], np.int32)), r"rows\[1\] is 4 after 5"),
        (
            lambda t: t.fetch(np.array([5, 30], np.int32)),
            r"rows\[1\] is 30, but stack host_d8_float32 has rows 0 to 29",
        ),
        (lambda t: t.fetch(np.array([-1, 3], np.int32)), r"rows\[0\] is -1"),
        (lambda t: t.fetch(np.array([1, 2], np.uint32)), r"int64 addresses, but are uint32\[2\]"),
        (lambda t: t.fetch(ROWS[None]), r"int64 addresses, but are int32\[1, 2\]"),
        (lambda t: t.fetch(ROWS, np.zeros((3, 8), np.float32)), r"out_rows must be float32 of shape \(2, 8\)"),
        (lambda t: t.fetch(ROWS, VALUES, {}), r"out_slots are \[\], but RowWiseAdagrad keeps \['sum'\]"),
        (lambda t: t.fetch(ROWS, VALUES, {"sum": VALUES}), r"out_slots\['sum'\] must be float32 of shape \(2,\)"),
        (lambda t: t.fetch(ROWS, np.zeros((8, 2), np.float32).T), "out_rows must be writable and C-contiguous"),
        (lambda t: t.store(ROWS, VALUES.astype(np.float16), SLOTS), "values must be float32"),
        (lambda t: t.store(ROWS, VALUES, {}), r"slots are \[\]"),
        (lambda t: t.store(np.array([2, 1], np.int32), VALUES, SLOTS), "ascend without repeats"),
        (lambda t: t.read(np.array([4, 99, 3], np.int32)), r"rows\[1\] is 99"),
        (lambda t: t.gather_reduce(Bags(ids=np.array([[1, 2], [3, 30]], np.int32))), r"ids\[1, 1\] is 30"),
        (lambda t: t.gather_reduce(Bags(ids=np.array([[1.0]]))), "ids must be int32"),
        (
            lambda t: t.casted_update(host.tensor_cast(np.array([[40]], np.int32), num_rows=50), VALUES[:1]),
            r"rows\[0\] is 40",
        ),
        (
            lambda t: t.casted_update(host.tensor_cast(np.array([[4]], np.int32), num_rows=30), VALUES[:1, :4]),
            "bag_gradients must be float32",
        ),
    ],
)
def test_bad_input(call, message):
    table = HostTable(stack_of(20, 10), ops.RowWiseAdagrad(learning_rate=0.1), KEY)
    with pytest.raises(ValueError, match=message):
        call(table)
    assert table.num_made <= 1  # an update makes its rows before the gradients are looked at; they keep their values
    same_state(table, HostTable(stack_of(20, 10), ops.RowWiseAdagrad(learning_rate=0.1), KEY))


def test_local_ids():
    ids = np.array([[5, 5, -1], [2, 9, 5]], np.int32)
    cast = host.tensor_cast(ids, num_rows=10)
    np.testing.assert_array_equal(local_ids(cast, ids.shape), [[1, 1, -1], [0, 2, 1]])


def test_examples_of_the_documentation():
    module = importlib.import_module("jrec.host.table")
    assert doctest.testmod(module).failed == 0
    assert any(itertools.chain(t.examples for t in doctest.DocTestFinder().find(module)))


@pytest.mark.slow
def test_the_benchmark_runs_whole(tmp_path, monkeypatch, capsys):
    from benchmarks import harness, host_table, workloads
    from benchmarks.peers import client

    tiny = workloads.Workload(name="tiny", rows=(40, 300), dim=8, ids_per_bag=(3, 3), batch=16)
    monkeypatch.setattr(host_table, "CASES", {"cpu": tiny})
    monkeypatch.setattr(host_table, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(harness, "QUICK_SECONDS", 0.05)
    monkeypatch.setenv(client.FBGEMM_VARIABLE, str(tmp_path / "absent"))
    monkeypatch.setattr(sys, "argv", ["host_table", "--quick", "--out", str(tmp_path / "out.json")])
    host_table.main()
    lines = [json.loads(line) for line in (tmp_path / "out.json").read_text().splitlines()]
    assert {line["metric"] for line in lines} >= {"gather, median", "update, median", "both, bandwidth by copy"}
    assert all(line["value"] > 0 for line in lines)
    assert "peer fbgemm_tbe skipped" in capsys.readouterr().err


@pytest.mark.parametrize("in_folder", [False, True])
def test_rows_beyond_int32_are_addressed_in_64_bits(tmp_path, in_folder):
    rows, dim = 3_000_000_000, 4
    stack = stack_of(rows, dim=dim)
    addresses = np.array([0, 5, 2**31 - 1, 2**31, 2**31 + 5, rows - 1], np.int64)
    place = {}
    if in_folder:  # 48 GB of which a few pages are written
        written = np.stack([addresses, addresses + 1], axis=1)
        place = {"folder": tmp_path, "written": written}
    table = HostTable(stack, ops.SGD(learning_rate=0.5), KEY, **place)
    first, _ = table.fetch(addresses)
    numbers = addresses.astype(np.uint64)[:, None] * np.uint64(dim) + np.arange(dim, dtype=np.uint64)
    words = (numbers >> np.uint64(32)).astype(np.uint32), numbers.astype(np.uint32)
    bits = threefry_2x32(jax.random.key_data(table_key(KEY, "t0")), jnp.concatenate([w.reshape(-1) for w in words]))
    odd = ((bits[: numbers.size] ^ bits[numbers.size :]) >> 8).astype(jnp.int32) * 2 - (2**24 - 1)
    np.testing.assert_array_equal(first.reshape(-1), odd.astype(jnp.float32) * scale(stack.tables[0]))
    new = np.arange(first.size, dtype=np.float32).reshape(first.shape)
    table.store(addresses[2:], new[2:], {})
    np.testing.assert_array_equal(table.read(addresses[::-1].copy()), np.concatenate([first[:2], new[2:]])[::-1])
    assert table.dirty_rows().tolist() == table.made_rows().tolist() == addresses[2:].tolist()
    with pytest.raises(ValueError, match=r"rows\[0\] is 3,000,000,000, but stack host_d4_float32 has rows 0 to"):
        table.fetch(np.array([rows]))
    with pytest.raises(ValueError, match=r"ids\[1, 0\] is 3,000,000,000, but stack host_d4_float32 has rows 0 to"):
        table.gather_reduce(Bags(ids=np.array([[0], [rows]])))
