"""Checkpoints of host tables: chains against whole states, damage, full disks, and processes killed while they save."""

import errno
import itertools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from jrec import ops
from jrec.errors import CheckpointError
from jrec.host import HostCheckpoints, HostTable
from jrec.ops.layout import EmbeddingLayout, FeatureConfig, TableConfig

KEY = jax.random.key(7, impl="threefry2x32")


def tables(seed=7, rows=(900, 40), dim=5, optimizer=None, folder=None):
    """Two stacks by name, one of bfloat16."""
    configs = [
        TableConfig(name=f"{dtype}{r}", rows=r, dim=dim, dtype=dtype, tier="host")
        for dtype in ("float32", "bfloat16")
        for r in rows
    ]
    layout = EmbeddingLayout.build(configs, [FeatureConfig(name=c.name, table=c.name) for c in configs])
    optimizer = ops.Adam(learning_rate=0.1) if optimizer is None else optimizer
    key = jax.random.key(seed, impl="threefry2x32")
    options = {"folder": folder, "huge_pages": False}
    return {name: HostTable(stack, optimizer, key, **options) for name, stack in layout.stacks.items()}


def write(made, rng, rows=60):
    """Changes random rows of every table."""
    for table in made.values():
        at = np.unique(rng.integers(0, table.rows, rows)).astype(np.int32)
        values, slots = table.fetch(at)
        values = rng.normal(size=values.shape).astype(values.dtype)
        table.store(at, values, {n: rng.normal(size=s.shape).astype(np.float32) for n, s in slots.items()})


def state(made):
    """Everything, as bytes."""
    out = {}
    for name, table in made.items():
        rows, slots = table.fetch(np.arange(table.rows, dtype=np.int32))
        out[name] = (rows.tobytes(), {n: s.tobytes() for n, s in slots.items()})
    return out


@pytest.mark.parametrize("seed", range(6))
def test_any_chain_restores_the_whole_state(seed, tmp_path):
    """With restarts in between, which go on from any step, and prunings."""
    rng = np.random.default_rng(seed)
    folder = tmp_path / "scratch" if seed % 2 else None
    made = tables(folder=folder)
    options = {"full_every": int(rng.integers(1, 6)), "shard_bytes": int(rng.integers(50, 20_000))}
    checkpoints, states, step = HostCheckpoints(tmp_path / "c", made, **options), {}, 0
    for _ in range(14):
        write(made, rng, rows=int(rng.integers(1, 200)))
        step += int(rng.integers(1, 10))
        saved = checkpoints.save(step, full=None if rng.random() < 0.8 else bool(rng.integers(2)))
        states = {s: whole for s, whole in states.items() if s < step} | {step: state(made)}
        assert saved.base is None or saved.base in states
        if rng.random() < 0.3:
            write(made, rng)  # lost, since the restart goes back
            step = int(rng.choice(list(states)))
            made = tables(folder=folder)
            checkpoints = HostCheckpoints(tmp_path / "c", made, **options)
            assert checkpoints.restore(step) == step
            assert state(made) == states[step]
        if rng.random() < 0.2:
            checkpoints.prune(keep=2)
            assert set(sorted(states)[-2:]) <= set(checkpoints.steps()) <= set(states)
            states = {s: states[s] for s in checkpoints.steps()}
    assert checkpoints.steps() == sorted(states)
    for at, whole in states.items():
        fresh = tables()
        write(fresh, rng)
        HostCheckpoints(tmp_path / "c", fresh).restore(at)
        assert state(fresh) == whole
    latest = tables()
    assert HostCheckpoints(tmp_path / "c", latest).restore() == max(states)
    assert state(latest) == states[max(states)]


def test_only_rows_that_were_written_are_saved(tmp_path):
    made = tables(rows=(50_000_000,))
    checkpoints, rng = HostCheckpoints(tmp_path, made), np.random.default_rng(0)
    write(made, rng, rows=500)
    first = checkpoints.save(1)
    write(made, rng, rows=20)
    second = checkpoints.save(2)
    third = checkpoints.save(3)
    assert (first.base, second.base, third.base) == (None, 1, 2)
    assert 990 < first.rows <= 1000
    assert 38 < second.rows <= 40
    assert (third.rows, third.bytes) == (0, 0)
    assert first.bytes == sum(p.stat().st_size for p in (tmp_path / "000000000001").glob("*.shard")) < 100_000
    fresh = tables(rows=(50_000_000,))
    HostCheckpoints(tmp_path, fresh).restore()
    for name, table in made.items():
        rows = table.made_rows()
        np.testing.assert_array_equal(fresh[name].made_rows(), rows)
        np.testing.assert_array_equal(fresh[name].read(rows), table.read(rows))


def chain_of_three(folder):
    """Checkpoints 1 (full), 2 and 3 (incremental) in several shards each, and the tables."""
    made, rng = tables(), np.random.default_rng(0)
    checkpoints = HostCheckpoints(folder, made, shard_bytes=2000)
    for step in (1, 2, 3):
        write(made, rng)
        assert (checkpoints.save(step).base is None) == (step == 1)
    return made


def flip(path, rng):
    """Changes one bit."""
    data = bytearray(path.read_bytes())
    data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
    path.write_bytes(bytes(data))


def truncate(path, rng):
    """Cuts off the end."""
    with path.open("r+b") as file:
        file.truncate(int(rng.integers(path.stat().st_size)))


def remove(path, rng):
    """Takes it away."""
    del rng
    path.unlink()


@pytest.mark.parametrize("damage", [flip, truncate, remove])
def test_a_damaged_file_is_named(damage, tmp_path):
    chain_of_three(tmp_path)
    rng, initial = np.random.default_rng(1), state(tables())
    files = sorted(tmp_path.glob("*/*"))
    assert len(files) > 10
    for path in files:
        if damage is remove and path.name == "manifest.json" and path.parent.name.endswith("3"):
            continue  # no manifest, no checkpoint: the one before is the latest
        whole = path.read_bytes()
        damage(path, rng)
        fresh = tables()
        checkpoints = HostCheckpoints(tmp_path, fresh)
        with pytest.raises(CheckpointError, match=r"is damaged: .*delete the folder") as raised:
            checkpoints.restore(3)
        assert str(path) in str(raised.value)
        assert state(fresh) == initial
        path.write_bytes(whole)
    HostCheckpoints(tmp_path, tables()).restore(3)


def test_earlier_checkpoints_survive_a_damaged_later_one(tmp_path):
    chain_of_three(tmp_path)
    (tmp_path / "000000000003" / "manifest.json").unlink()
    assert HostCheckpoints(tmp_path, tables()).restore() == 2


def test_a_replaced_base_is_noticed(tmp_path):
    chain_of_three(tmp_path / "a")
    made, rng = tables(), np.random.default_rng(9)
    write(made, rng)
    HostCheckpoints(tmp_path / "b", made).save(2)
    (tmp_path / "a" / "000000000002").rename(tmp_path / "a" / "gone")
    (tmp_path / "b" / "000000000002").rename(tmp_path / "a" / "000000000002")
    with pytest.raises(CheckpointError, match="step 3 builds on another checkpoint of that step"):
        HostCheckpoints(tmp_path / "a", tables()).restore()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 8}, "keys of initial rows of host stack host_d5_bfloat16 were"),
        ({"rows": (900, 41)}, "tables of host stack host_d5_bfloat16 were"),
        ({"optimizer": ops.SGD(learning_rate=0.1)}, r"slots of host stack host_d5_bfloat16 were \{'mu'"),
        ({"dim": 6}, "host stack host_d5_bfloat16 exists only in the checkpoint"),
    ],
)
def test_a_checkpoint_of_other_tables_is_refused(change, message, tmp_path):
    chain_of_three(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        HostCheckpoints(tmp_path, tables(**change)).restore()


def test_what_is_not_there(tmp_path):
    checkpoints = HostCheckpoints(tmp_path / "none", tables())
    assert checkpoints.steps() == []
    assert checkpoints.latest_step() is None
    with pytest.raises(CheckpointError, match="no complete host checkpoint of step None; steps there: none"):
        checkpoints.restore()
    with pytest.raises(ValueError, match="full_every=0"):
        HostCheckpoints(tmp_path, {}, full_every=0)
    with pytest.raises(ValueError, match="keep is 0"):
        checkpoints.prune(0)
    with pytest.raises(ValueError, match="step is -1"):
        checkpoints.save(-1)


def test_another_format_version_is_refused(tmp_path):
    from jrec.host.shards import read_json, write_json

    chain_of_three(tmp_path)
    path = tmp_path / "000000000003" / "manifest.json"
    content = read_json(path)
    path.unlink()
    write_json(path, {**content, "version": 99})
    with pytest.raises(CheckpointError, match="version 99, but this jrec reads 'jrec-host-tables', version 1"):
        HostCheckpoints(tmp_path, tables()).restore()
    assert json.loads(path.read_text())["version"] == 99


def test_a_full_disk_leaves_earlier_checkpoints_and_loses_no_rows(tmp_path, monkeypatch):
    made = chain_of_three(tmp_path)
    checkpoints, rng = HostCheckpoints(tmp_path, made), np.random.default_rng(5)
    checkpoints.restore()
    write(made, rng)
    calls = []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match=r"step 4 could not be written to .*No space left.*are untouched"):
            checkpoints.save(4)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["000000000001", "000000000002", "000000000003"]
    assert checkpoints.save(4).base == 3
    fresh = tables()
    assert HostCheckpoints(tmp_path, fresh).restore() == 4
    assert state(fresh) == state(made)


class Killed(BaseException):
    """Ends the program where it is raised: nothing catches it, so nothing cleans up."""


def test_a_save_may_end_at_any_call_of_the_system(tmp_path, monkeypatch):
    """Between any two changes of the disk, over a checkpoint of the same step and one of a later one."""
    options, found, states = {"shard_bytes": 3000, "full_every": 3}, [], {}
    made, rng = tables(rows=(300,)), np.random.default_rng(0)
    checkpoints = HostCheckpoints(tmp_path / "before", made, **options)
    for step in (1, 2, 3, 4):
        write(made, rng)
        checkpoints.save(step)
        states[step, "before"] = state(made)
    completed = False
    while not completed:
        shutil.rmtree(tmp_path / "now", ignore_errors=True)
        shutil.copytree(tmp_path / "before", tmp_path / "now")
        checkpoints = HostCheckpoints(tmp_path / "now", made, **options)
        checkpoints.restore(2)
        write(made, np.random.default_rng(1))
        states[3, "new"] = state(made)
        with monkeypatch.context() as patch:
            _die_at_call(patch, len(found))
            try:
                checkpoints.save(3)
                completed = True
            except Killed:
                pass
        last = HostCheckpoints(tmp_path / "now", made).restore()
        found.append(next(which for which, whole in states.items() if which[0] == last and whole == state(made)))
        HostCheckpoints(tmp_path / "now", made).save(5)  # and what was left behind is in nobody's way
    assert len(found) > 15
    assert [which for which, _ in itertools.groupby(found)] == [(4, "before"), (3, "before"), (2, "before"), (3, "new")]


def _die_at_call(patch, number):
    """Raises Killed in place of that call, and of all after it, that changes the disk."""
    counter = itertools.count()

    def dying(function):
        def call(*args, **kwargs):
            if next(counter) >= number:
                raise Killed
            return function(*args, **kwargs)

        return call

    changes = [(os, "fsync"), (os, "rmdir"), (os, "unlink"), (pathlib.Path, "rename"), (pathlib.Path, "mkdir")]
    for owner, name in changes:
        patch.setattr(owner, name, dying(getattr(owner, name)))


_CHILD = """
import sys
import numpy as np
from test_host_checkpoint import tables, rows_of, values_of
from jrec.host import HostCheckpoints
made = tables(rows=(20_000,))
checkpoints = HostCheckpoints(sys.argv[1], made, full_every=4, shard_bytes=100_000)
step = checkpoints.restore() if checkpoints.steps() else 0
while True:
    step += 1
    for table in made.values():
        rows = rows_of(step)
        _, slots = table.fetch(rows)
        table.store(rows, values_of(step, rows, table), {n: s + step for n, s in slots.items()})
    checkpoints.save(step)
    checkpoints.prune(keep=2)
    print(step, flush=True)
"""


def rows_of(step):
    """Which rows step number ``step`` of the killed program writes."""
    return np.unique(np.random.default_rng(step).integers(0, 20_000, 3000)).astype(np.int32)


def values_of(step, rows, table):
    """What it writes."""
    return np.random.default_rng((step, 1)).normal(size=(rows.size, table.dim)).astype(table.dtype)


@pytest.mark.slow
def test_a_killed_process_leaves_its_last_complete_checkpoint(tmp_path):
    """Killed at random moments, most of which fall into a save, it goes on where it was."""
    rng, last = np.random.default_rng(0), 0
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parent), "JAX_PLATFORMS": "cpu"}
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(tmp_path)], env=environment, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        printed = [int(process.stdout.readline())]
        time.sleep(float(rng.uniform(0, 0.5)))
        process.send_signal(signal.SIGKILL)
        printed += [int(line) for line in process.stdout.read().split()]
        process.stdout.close()
        process.wait()
        made = tables(rows=(20_000,))
        step = HostCheckpoints(tmp_path, made).restore()
        assert printed[0] > last
        assert step in (printed[-1], printed[-1] + 1)
        last = step
        expected = tables(rows=(20_000,))
        for done in range(1, step + 1):
            for table in expected.values():
                rows = rows_of(done)
                _, slots = table.fetch(rows)
                table.store(rows, values_of(done, rows, table), {n: s + done for n, s in slots.items()})
        assert state(made) == state(expected)
