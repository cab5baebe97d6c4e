"""Tables larger than the memory that they may take: within the limit, with the bits of memory, killed and resumed."""

import json
import mmap
import os
import pathlib
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from checkpoint_state import final_arrays
from distribute_cases import DENSE, mesh_of, modules
from distribute_cases import layout_of as layout_like
from host_runs import pipeline_threads
from run_cases import CONFIG, configuring, killed_and_resumed, quickstart
from test_host_table import KEY, OPTIMIZERS, every, same, same_state, stack_of

import jrec
from jrec.app.loop import train
from jrec.data import GrowingVocabulary, Growth
from jrec.errors import ConfigError
from jrec.host import HostTable, paging
from jrec.host.memory import allocate
from jrec.host.paging import MappedFile, MemoryLimit
from jrec.native import host
from jrec.ops.types import Bags
from jrec.run.placement.plan import default_plan, overlaid
from jrec.sharding.pieces import HOST, REPLICATED

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux drops a file's pages")
PAGE = mmap.PAGESIZE


@pytest.fixture(autouse=True)
def no_thread_outlives_its_test():
    yield
    for _ in range(100):
        if not pipeline_threads():
            break
        time.sleep(0.05)  # a thread that packs ends by itself
    assert pipeline_threads() == []


@pytest.fixture
def disk(tmp_path):
    """A folder whose files can leave memory."""
    try:
        HostTable(stack_of(1), OPTIMIZERS["sgd"], KEY, folder=tmp_path / "rows", limit=MemoryLimit(2**20))
    except ConfigError as error:
        pytest.skip(f"{tmp_path} is no disk: {error}")
    return tmp_path / "rows"


def resident(*tables):
    """Bytes of the tables' files in memory, as the kernel says."""
    return PAGE * sum(int(file.resident().sum()) for table in tables for file in table._files)


def mapped_bytes(*tables):
    """Bytes of the tables' files that are part of the process's memory, by its page table."""
    pages = 0
    with pathlib.Path("/proc/self/pagemap").open("rb", buffering=0) as page_table:
        for file in (file for table in tables for file in table._files):
            address = file._array.ctypes.data
            assert address % PAGE == 0
            entries = np.frombuffer(os.pread(page_table.fileno(), 8 * file.used.size, address // PAGE * 8), np.uint64)
            assert entries.size == file.used.size
            pages += int((entries >> np.uint64(63)).sum())
    return PAGE * pages


def lookups(rng, rows, count):
    """Bags of two rows: half of the lookups are of few rows."""
    ids = np.where(rng.random((count, 2)) < 0.5, rng.zipf(1.3, (count, 2)) % rows, rng.integers(0, rows, (count, 2)))
    ids = ids.astype(np.int32)
    return ids, host.tensor_cast(ids, None, num_rows=rows)


# Tables.


# 40 elements of 4 bytes: some rows lie in two pages.
@pytest.mark.parametrize(("name", "dtype", "dim"), [("momentum", "float32", 40), ("adam", "bfloat16", 64)])
@pytest.mark.parametrize("asks", [False, True], ids=["without asking", "asking ahead"])
def test_rows_have_the_bits_of_memory_and_stay_within_the_limit(disk, name, dtype, dim, asks):
    stack, limit, rng = stack_of(9_000, 12_000, dim=dim, dtype=dtype), MemoryLimit(2 * 2**20), np.random.default_rng(0)
    on_disk = HostTable(stack, OPTIMIZERS[name], KEY, folder=disk, limit=limit)
    in_memory = HostTable(stack, OPTIMIZERS[name], KEY)
    assert on_disk.nbytes > 3 * limit.size
    for step in range(40):
        ids, cast = lookups(rng, stack.rows, 40)
        gradients = rng.normal(size=(len(ids), dim)).astype(np.float32)
        if asks:
            on_disk.ask(np.asarray(cast.rows)[: int(cast.num_unique)])
        for_both, some = [], np.unique(rng.integers(0, stack.rows, 300))
        for table in (on_disk, in_memory):
            made = step % 3 > 0
            pooled = table.gather_reduce(Bags(ids=ids, cast=cast if step % 2 else None), make=made, mark=made)
            key = np.array([step, 1], np.uint32)
            table.casted_update(cast, gradients, step=step, made=made, rounding_key=key)
            rows, slots = table.fetch(some)
            table.store(some[:99], rows[:99] * 2, {slot: array[:99] for slot, array in slots.items()})
            for_both.append(pooled)
        same(*for_both)
        assert mapped_bytes(on_disk) <= resident(on_disk) <= PAGE * limit.pages <= limit.size
    assert limit.dropped_pages > 1_000  # the limit was at work
    assert limit.read_pages - limit.dropped_pages == limit.pages
    assert mapped_bytes(on_disk) > limit.size // 2
    same_state(on_disk, in_memory)
    same(on_disk.made_rows(), in_memory.made_rows())
    assert resident(on_disk) <= limit.size


def test_a_row_that_is_written_first_takes_only_its_own_page(disk):
    """Without a limit, too: its neighbours are not read with it."""
    descriptors = []
    array = allocate((16_384, PAGE // 4), np.dtype(np.float32), name="t", folder=disk, descriptors=descriptors)
    file, rows = MappedFile(array, descriptors[0]), np.arange(5, 16_384, 64)
    array[rows] = 1
    np.testing.assert_array_equal(np.flatnonzero(file.resident()), rows)


def test_threads_of_several_tables_share_a_limit(disk):
    limit, most = MemoryLimit(2 * 2**20), [0]
    stacks = [stack_of(20_000, dim=32), stack_of(30_000, dim=16), stack_of(100, dim=8)]
    tables = [HostTable(stack, OPTIMIZERS["adagrad"], KEY, folder=disk, limit=limit) for stack in stacks]
    assert sum(table.nbytes for table in tables) > 3 * limit.size
    expected = [HostTable(stack, OPTIMIZERS["adagrad"], KEY) for stack in stacks]
    errors, over = [], threading.Event()

    def work(table, other, seed):
        rng = np.random.default_rng(seed)
        try:
            for _ in range(12):
                # Each thread has its own rows; pages are common to all.
                rows = np.unique(rng.integers(0, table.rows // 2, 200) * 2 + seed).astype(np.int32)
                table.ask(rows)
                values = rng.normal(size=(rows.size, table.dim)).astype(np.float32)
                slots = {"sum": rng.uniform(size=values.shape).astype(np.float32)}
                table.store(rows, values, slots)
                other.store(rows, values, slots)
                read, _ = table.fetch(rows)
                same(read, values)
        except BaseException as error:  # pytest sees only this thread's
            errors.append(error)

    def watch():
        while not over.wait(0.002):
            # Else pages of one file leave for those of another while the watcher looks at both in turn.
            with limit._dropping:
                most[0] = max(most[0], resident(*tables))

    pairs = list(zip(tables, expected, strict=True))
    threads = [threading.Thread(target=work, args=(t, e, n)) for t, e in pairs for n in (0, 1)]
    watching = threading.Thread(target=watch)
    for thread in [watching, *threads]:
        thread.start()
    for thread in threads:
        thread.join()
    over.set()
    watching.join()
    assert errors == []
    assert 2**20 < most[0] <= limit.size
    assert resident(*tables) <= PAGE * limit.pages <= limit.size
    for table, other in pairs:
        same_state(table, other)


def test_rows_that_are_asked_for_are_read_before_they_are_used(disk):
    limit = MemoryLimit(2**20)
    table = HostTable(stack_of(40_000, dim=32), OPTIMIZERS["sgd"], KEY, folder=disk, limit=limit)
    rows = np.arange(0, 40_000, 320, dtype=np.int32)  # each in its own page
    values = np.ones((rows.size, 32), np.float32)
    table.store(rows, values, {})
    table.store(rows[:-1] + 200, values[1:], {})
    (file,) = table._files
    pages = rows.astype(np.int64) * 128 // PAGE
    file.drop(pages)
    file.used[pages], file.count = 0, file.count - pages.size  # as if others had needed their room
    assert not file.resident()[pages].any()
    assert table.ask(rows) == PAGE * rows.size
    for _ in range(500):
        if file.resident()[pages].all():
            break
        time.sleep(0.01)
    assert file.resident()[pages].all()
    same(table.read(rows), values)


def test_rows_in_use_stay_and_those_of_a_checkpoint_leave_first(disk):
    limit = MemoryLimit(2**20)
    table = HostTable(stack_of(60_000, dim=32), OPTIMIZERS["sgd"], KEY, folder=disk, limit=limit)
    (file,) = table._files
    hot = np.arange(0, 60_000, 1_200, dtype=np.int32)
    table.store(every(table), np.ones((60_000, 32), np.float32), {})
    pages = hot.astype(np.int64) * 128 // PAGE
    for begin in range(0, 60_000, 6_000):  # three quarters of the limit each
        table.ask(hot)
        table.read(hot)  # waits for them
        table.store(every(table)[begin : begin + 6_000], np.ones((6_000, 32), np.float32), {})
        assert file.resident()[pages].all(), begin
        table.ask(hot)
        before = limit.dropped_pages
        table.read(every(table))  # as a checkpoint would
        assert limit.dropped_pages > before + 50
        assert file.resident()[pages].all(), begin


def test_a_page_that_cannot_leave_is_still_counted(disk):
    limit = MemoryLimit(2**20)
    table = HostTable(stack_of(60_000, dim=32), OPTIMIZERS["sgd"], KEY, folder=disk, limit=limit)
    (file,) = table._files
    with mmap.mmap(file._descriptor, 64 * PAGE, prot=mmap.PROT_READ) as elsewhere:
        for begin in range(0, 60_000, 2_000):
            rows = every(table)[begin : begin + 2_000]
            table.store(rows, np.ones((rows.size, 32), np.float32), {})
            assert elsewhere[3] == 0x3F  # of 1.0; a page that is mapped twice stays
        assert file.resident()[0]
        assert resident(table) <= PAGE * limit.pages <= limit.size


def test_pages_that_all_stay_are_said_and_waited_for_by_nobody(disk, monkeypatch, caplog):
    limit = MemoryLimit(2**20)
    table = HostTable(stack_of(60_000, dim=32), OPTIMIZERS["sgd"], KEY, folder=disk, limit=limit)
    monkeypatch.setattr(paging.MappedFile, "drop", lambda self, pages: pages)
    table.store(every(table), np.ones((60_000, 32), np.float32), {})
    assert PAGE * limit.pages > limit.size
    assert [line.getMessage() for line in caplog.records] == [
        "host.memory is 1.0 MiB, but pages beyond it stay in memory"
    ]
    monkeypatch.undo()
    table.store(every(table)[:10], np.ones((10, 32), np.float32), {})
    assert PAGE * limit.pages <= limit.size


def test_a_disk_that_fails_is_no_silence(disk, monkeypatch):
    limit = MemoryLimit(2**20)
    table = HostTable(stack_of(60_000, dim=32), OPTIMIZERS["sgd"], KEY, folder=disk, limit=limit)
    monkeypatch.setattr(paging.kernels.written, "call", lambda descriptor: -1)
    with pytest.raises(OSError, match=r"could not be written to the files in host\.folder"):
        table.store(every(table), np.ones((60_000, 32), np.float32), {})


def test_limits_that_cannot_work_are_refused(disk, tmp_path, monkeypatch):
    stack = stack_of(60_000, dim=32)
    with pytest.raises(ConfigError, match=r"host\.memory limits .* no folder is given"):
        HostTable(stack, OPTIMIZERS["sgd"], KEY, limit=MemoryLimit(2**20))
    table = HostTable(stack, OPTIMIZERS["adagrad"], KEY, folder=disk, limit=MemoryLimit(2**20))
    ids = np.arange(0, 60_000, 60, dtype=np.int32)[:, None]
    with pytest.raises(ConfigError, match=r"host\.memory is 1\.0 MiB, but .* lie in 15\.\d MiB .* at least that"):
        table.gather_reduce(Bags(ids=ids), make=True)
    assert not any(file.pins.any() for file in table._files)  # an error leaves nothing pinned
    for options, reason in (
        ({"memory": "1GB"}, r"HostOptions\.memory is '1GB', but limits only .* set HostOptions\.folder"),
        ({"memory": "much", "folder": "rows"}, r"HostOptions\.memory is 'much'; give bytes"),
        ({"memory": "100kB", "folder": "rows"}, r"HostOptions\.memory is '100kB', but must be at least 1MiB"),
    ):
        with pytest.raises(ConfigError, match=reason):
            jrec.HostOptions(**options)
    with pytest.raises(ConfigError, match=r"tables\.host\.memory is '1GB', .* set tables\.host\.folder"):
        configuring(tmp_path, "data", CONFIG)("tables.host.memory=1GB")
    memory = pathlib.Path("/dev/shm")
    if memory.is_dir() and os.access(memory, os.W_OK):
        with pytest.raises(ConfigError, match=r"the files in /dev/shm/.* stay in memory, as a tmpfs's do"):
            HostTable(stack_of(9), OPTIMIZERS["sgd"], KEY, folder="/dev/shm/jrec-test", limit=MemoryLimit(2**20))
        pathlib.Path("/dev/shm/jrec-test").rmdir()
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError, match=r"only Linux can drop .* leave it out"):
        MemoryLimit(2**20)


# Runs of a program.

LARGE = {"user": 60_000, "item": 40, "tag": 40_000}
STEPS = 10


def columns(step, size=16):
    rng = np.random.default_rng(step)
    return {
        "label": rng.integers(0, 2, size).astype(np.float32),
        "price": rng.normal(size=size).astype(np.float32),
        "age": rng.normal(size=size).astype(np.float32),
        "user": rng.integers(0, LARGE["user"], size),
        "item": rng.integers(0, LARGE["item"], size),
        "tags": rng.integers(0, LARGE["tag"], (size, 4)),
    }


def opened(host, *, mesh=None, planned=False, growing=None):
    """A new run of the large tables."""
    layout = layout_like(tiers={} if planned else dict.fromkeys(LARGE, "host"), rows=LARGE)
    devices = mesh_of(mesh) if mesh else None
    plan = None
    if planned:
        tails = {"user": np.array([[100, LARGE["user"]]]), "tag": np.array([[50, LARGE["tag"]]])}
        plan = overlaid(default_plan(layout.with_plan(), mesh), tails, HOST)
        plan = overlaid(plan, {"user": np.array([[0, 5]]), "item": np.array([[0, 40]])}, REPLICATED)
    vocabularies = {name: GrowingVocabulary(told) for name, told in (growing or {}).items()}
    return jrec.distribute(*modules(layout), host=host, mesh=devices, plan=plan, growing=vocabularies)


def trained(run, step, begin, end):
    """The losses of some steps; a limit was at work in them, and was kept."""
    with run.feed((columns(n) for n in range(begin, end)), dense=DENSE) as feed:
        losses = [float(step(batch)[0]) for batch in feed]
    tables = run.host_tables.values()
    for limit in {table.limit for table in tables} - {None}:
        assert resident(*tables) <= limit.size
        assert limit.read_pages > 100
    return losses


CASES = {
    "in place": ({}, {}),
    "pipeline": ({"pipeline": "on"}, {}),
    "mesh": ({}, {"mesh": 2}),
    "plan": ({"queue": 2}, {"mesh": 4, "planned": True}),
    "growing": ({}, {"growing": {"item": Growth(capacity=LARGE["item"], admit_after=2, evict="lru")}}),
    "growing pipeline": ({"pipeline": "on"}, {"growing": {"user": Growth(capacity=LARGE["user"], evict="lfu")}}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_under_a_limit_is_the_run_in_memory_and_resumes(case, disk, tmp_path):
    options, where = CASES[case]
    with opened(jrec.HostOptions(**options), **where) as run:
        losses = trained(run, run.compile(), 0, STEPS)
        rows = {name: run.table(name) for name in LARGE}

    def same_rows(run):
        (limit,) = {table.limit for table in run.host_tables.values()}
        assert limit.size == 1.75 * 2**20
        for name, table in rows.items():
            same(run.table(name), table)

    limited = jrec.HostOptions(folder=str(disk), memory="1.75MiB", **options)
    half = STEPS // 2
    with opened(limited, **where) as run:
        step = run.compile()
        first = trained(run, step, 0, half)
        run.save(tmp_path / "checkpoints")
        assert first + trained(run, step, half, STEPS) == losses  # more than the checkpoint has
        same_rows(run)
    with opened(limited, **where) as run:
        run.restore(tmp_path / "checkpoints")
        assert trained(run, run.compile(), half, STEPS) == losses[half:]
        same_rows(run)


def test_a_limit_below_two_batches_ends_the_run_at_its_first_batch(disk, tmp_path):
    options = jrec.HostOptions(folder=str(disk), memory="1MiB")
    run = jrec.distribute(*modules(layout_like(tiers=dict.fromkeys(LARGE, "host"), rows=LARGE)), host=options)
    refused = pytest.raises(ConfigError, match=r"host\.memory is 1\.0 MiB, but .* set it to at least that")
    with run, run.feed([columns(0, 64)], dense=DENSE) as feed, refused:
        next(feed)


def test_batches_that_push_each_other_out_are_told_of(disk, caplog):
    layout = layout_like(tiers=dict.fromkeys(LARGE, "host"), rows=LARGE)
    options = jrec.HostOptions(folder=str(disk), memory="1.75MiB")
    with jrec.distribute(*modules(layout), host=options) as run:
        step = run.compile()
        for batch in run.feed(map(columns, range(20)), dense=DENSE, workers=1, prefetch=8):
            step(batch)
    assert "host.memory is 1.8 MiB, which does not hold the rows of the 10 batches under way" in caplog.text


# Runs of the command.

# 18,880 rows of 64 elements with two slots: 14.5 MB.
SIZES = ("model.embedding_dim=64", "model.bottom_mlp=[16, 64]", "data.batch_size=16", "data.prefetch=1")
LIMITED = ("tables.tier=host", "tables.host.memory=3MB")
WAYS = pytest.mark.parametrize("way", ["on", "off"], ids=["pipeline", "in place"])


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return quickstart(tmp_path_factory.mktemp("data"))


@WAYS
def test_jrec_train_under_a_limit_leaves_what_it_leaves_in_memory(way, disk, tmp_path, dataset):
    configure = configuring(tmp_path, dataset, CONFIG)
    keys = (*SIZES, "tables.tier=host", f"tables.host.pipeline={way}", "max_steps=40")
    memory = train(configure(*keys, out="memory"))
    limited = train(configure(*keys, *LIMITED, f"tables.host.folder={str(disk)!r}", out="limited"))
    assert final_arrays(limited.folder) == final_arrays(memory.folder)
    for split, scores in memory.scores.items():
        np.testing.assert_array_equal(limited.scores[split].logits, scores.logits)
    section = limited.sections["files"]
    assert section["limit_bytes"] == 3_000_000
    assert 0 < section["memory_bytes"] <= section["limit_bytes"]
    assert section["read_bytes"] - section["dropped_bytes"] == section["memory_bytes"]
    assert section["dropped_bytes"] > 0
    json.dumps(section)
    assert "files" not in memory.sections


@pytest.mark.slow
@WAYS
def test_kill_9_at_random_moments_then_resume_gives_the_bits_of_memory(way, disk, tmp_path, dataset):
    (tmp_path / "tiny.toml").write_text(CONFIG)
    keys = [f"data.path={dataset}", *SIZES, "max_steps=300", "checkpoint.every_steps=20", "evaluate.every_steps=0"]
    keys += ["tables.tier=host", f"tables.host.pipeline={way}"]
    command = [sys.executable, "-m", "jrec", "train", str(tmp_path / "tiny.toml"), *keys]
    subprocess.run([*command, f"out={tmp_path / 'whole'}"], check=True, capture_output=True)
    limited = [*LIMITED, f"tables.host.folder={disk}", f"out={tmp_path / 'killed'}", "--resume"]
    killed_and_resumed([*command, *limited], tmp_path / "killed")
    assert final_arrays(tmp_path / "killed") == final_arrays(tmp_path / "whole")
    assert list(disk.iterdir()) == []  # the killed processes' files had no names


@pytest.mark.slow
def test_a_transformers_ngram_rows_are_killed_and_resumed_within_their_memory(disk, tmp_path):
    """The setting of hashed n-grams: a large sparse table of short rows, eight heads, a dense model in Flax NNX."""
    command = [sys.executable, str(pathlib.Path(__file__).with_name("ngram_disk_process.py"))]
    whole = subprocess.run([*command, str(tmp_path / "whole"), "60"], check=True, capture_output=True, text=True)
    limited = [*command, str(tmp_path / "killed"), "60", str(disk), "18MB"]
    killed_and_resumed(limited, tmp_path / "killed", most=3, least=2)
    assert final_arrays(tmp_path / "killed") == final_arrays(tmp_path / "whole")
    found = json.loads(subprocess.run([*limited[:3], "70", *limited[4:]], check=True, capture_output=True).stdout)
    assert found["bytes"] > 3 * 18e6
    assert 9e6 < found["resident"] <= 18e6
    assert len(found["losses"]) == 10
    assert len(json.loads(whole.stdout)["losses"]) == 60


@pytest.mark.slow
def test_the_benchmark_runs_whole_on_small_tables(disk, monkeypatch, tmp_path):
    from benchmarks import disk_rows

    sizes = ["--memory-mb=8", "--batch=32", "--steps=2", f"--folder={tmp_path}", f"--out={tmp_path / 'out.jsonl'}"]
    monkeypatch.setattr(sys, "argv", ["disk_rows", "--quick", *sizes])
    disk_rows.main()
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert {line["peer"] for line in lines if line["metric"] == "step, ahead, median"} == {"at once", "mmap", "memory"}
    assert all(line["value"] > 0.05 for line in lines if line["metric"] == "read a step")
