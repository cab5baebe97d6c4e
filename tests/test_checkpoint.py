"""Checkpoints of every tier: any sequence of them restores any state; damage, full disks, kills, links that fail."""

import contextlib
import dataclasses
import errno
import itertools
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_cases import PLACES, TIERS, Host, chain_of_three, counts, layout_of, make, restore, save
from grids import some_of

from jrec import ops
from jrec.checkpoint import Checkpoints, CopiedRows, HostRows, Saved, device
from jrec.checkpoint.files import read_json, write_json
from jrec.checkpoint.manifest import ARRAYS, TableShape
from jrec.checkpoint.undo import Undo
from jrec.checkpoint.writer import Writer, piece_to_write
from jrec.errors import CheckpointError, OutputError
from jrec.host import HostTable
from jrec.native.crc32c import crc32c


def test_the_checksum_is_castagnolis():
    assert crc32c(b"123456789") == 0xE3069283
    data = np.random.default_rng(0).integers(0, 256, 1000, np.uint8)
    for begin, size in itertools.product(range(9), (0, 1, 7, 8, 9, 15, 16, 17, 31, 500)):
        part = data[begin : begin + size]
        crc = 0xFFFFFFFF
        for byte in part.tolist():
            crc ^= byte
            for _ in range(8):
                crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
        assert crc32c(part) == crc ^ 0xFFFFFFFF


@pytest.mark.parametrize(
    ("seed", "tier"), some_of(itertools.product(range(8), PLACES), (0, "device"), (1, "host"), (1, "mesh-host"))
)
def test_any_sequence_restores_the_whole_state(seed, tier, tmp_path):
    """With restarts in between, which go on from any step."""
    rng = np.random.default_rng(seed)
    folder = tmp_path / "scratch" if seed % 2 else None
    tables = make(tier, folder=folder)
    options = {"chunk_bytes": int(rng.integers(50, 20_000))}
    checkpoints, states, step = Checkpoints(tmp_path / "c", keep=99, **options), {}, 0
    pieces = set()
    for _ in range(9):
        tables.write(rng, rows=int(rng.integers(1, 90)))
        step += int(rng.integers(1, 10))
        save(checkpoints, tables, step, full=None if rng.random() < 0.9 else True)
        states = {s: whole for s, whole in states.items() if s < step} | {step: tables.state()}
        pieces |= {len(of) for of in counts(checkpoints.open()).values()}
        if rng.random() < 0.3:
            tables.write(rng)  # lost, since the restart goes back
            step = int(rng.choice(list(states)))
            tables = make(tier, folder=folder)
            checkpoints = restore(tmp_path / "c", tables, step, **options)
            assert tables.state() == states[step]
    assert max(pieces) > 2
    assert checkpoints.steps() == sorted(states)
    for at, whole in states.items():
        fresh = make(tier)
        fresh.write(rng)
        restore(tmp_path / "c", fresh, at)
        assert fresh.state() == whole


@pytest.mark.parametrize("tier", TIERS)
def test_each_checkpoint_stands_alone(tier, tmp_path):
    """Older ones are deleted, and what later ones share with them stays; most of it was written once."""
    tables, rng = make(tier, rows=(3000,)), np.random.default_rng(0)
    checkpoints = Checkpoints(tmp_path, keep=1)
    tables.write(rng, rows=3000)
    save(checkpoints, tables, 1)
    values = tmp_path / "1" / "tables" / "float323000" / "0000" / "values" / "c.0.0"
    inode = values.stat().st_ino
    for step in (2, 3):
        tables.write(rng, rows=9)
        save(checkpoints, tables, step)
    assert [p.name for p in tmp_path.iterdir()] == ["3"]
    assert [len(of) for of in counts(checkpoints.open()).values()] == [3, 3]
    assert (tmp_path / "3" / values.relative_to(tmp_path / "1")).stat().st_ino == inode
    fresh = make(tier, rows=(3000,))
    restore(tmp_path, fresh)
    assert fresh.state() == tables.state()


def test_only_rows_that_were_written_are_saved(tmp_path):
    tables, rng = Host(rows=(50_000_000,)), np.random.default_rng(0)
    checkpoints = Checkpoints(tmp_path)
    tables.write(rng, rows=500)
    save(checkpoints, tables, 1)
    tables.write(rng, rows=20)
    save(checkpoints, tables, 2)
    save(checkpoints, tables, 3)
    for first, second in counts(checkpoints.open()).values():
        assert 495 < first <= 500
        assert 18 < second <= 20
    assert sum(p.stat().st_size for p in (tmp_path / "3").rglob("*") if p.is_file()) < 100_000
    fresh = Host(rows=(50_000_000,))
    restore(tmp_path, fresh)
    for one, other in zip(fresh.tables, tables.tables, strict=True):
        rows = other.made_rows()
        np.testing.assert_array_equal(one.made_rows(), rows)
        np.testing.assert_array_equal(one.read(rows), other.read(rows))


def test_rows_that_no_piece_has_begin_within_their_own_bound(tmp_path):
    tables = Host(bound=0.5)
    tables.write(np.random.default_rng(0))
    save(Checkpoints(tmp_path), tables, 1)
    rows = Checkpoints(tmp_path).open().table("float32900").read("values", np.arange(900))
    table = tables.tables[0]
    np.testing.assert_array_equal(rows, table.fetch(np.arange(900, dtype=np.int32))[0])
    made = table.made_rows()
    assert 0.49 < np.abs(np.delete(rows, made[made < 900], axis=0)).max() < 0.5


@pytest.mark.parametrize("tier", TIERS)
def test_rows_of_another_checkpoint_are_copied(tier, tmp_path):
    rng, tables, source = np.random.default_rng(0), make(tier), Checkpoints(tmp_path / "source")
    for step in (1, 2):
        tables.write(rng)
        save(source, tables, step)
    saved, copies = source.open(), Checkpoints(tmp_path / "copies", chunk_bytes=2000)
    first = {"float32900": 500, "bfloat16900": 900, "bfloat1640": 40}
    copies.save(2, arrays={}, sources=[CopiedRows(saved, first)])
    copied = copies.open()
    copied.verify()
    assert copied.manifest.tables.keys() == first.keys()
    for name, count in first.items():
        rows, (old, new) = np.arange(count), (one.table(name) for one in (saved, copied))
        assert new.record.shape.rows == count
        for array in ("values", *old.record.shape.slots):
            assert new.read(array, rows).tobytes() == old.read(array, rows).tobytes()
        if tier == "host":  # where those with first values take no space
            written = {row for found, _ in old.written([]) for row in found.tolist() if row < count}
            assert sum(piece.count for piece in new.record.pieces) == len(written) < count


def test_many_pieces_or_rows_become_one(tmp_path):
    tables, rng = make("device", rows=(4000,)), np.random.default_rng(0)
    checkpoints = Checkpoints(tmp_path)
    pieces = []
    for step in range(1, 20):
        tables.write(rng, rows=5)
        save(checkpoints, tables, step)
        pieces += [len(counts(checkpoints.open())["float324000"])]
    assert pieces == [*range(1, 17), *range(1, 4)]
    tables.write(rng, rows=1800)
    save(checkpoints, tables, 25)
    tables.write(rng, rows=1800)
    save(checkpoints, tables, 26)
    assert counts(checkpoints.open())["float324000"] == [4000]


def test_a_table_is_read_without_jrec(tmp_path):
    """By tensorstore here; any reader of zarr 3 does, and checks the chunks."""
    import tensorstore

    def array(path):
        return tensorstore.open({"driver": "zarr3", "kvstore": f"file://{path}/"}).result().read().result()

    tables, rng = make("device"), np.random.default_rng(0)
    checkpoints = Checkpoints(tmp_path, chunk_bytes=3000)
    save(checkpoints, tables, 1)
    tables.write(rng, rows=20)
    save(checkpoints, tables, 2)
    for dtype in ("float32", "bfloat16"):
        folder = tmp_path / "2" / "tables" / f"{dtype}900"
        rows = array(folder / "0000" / "values")
        rows[array(folder / "0001" / "rows")] = array(folder / "0001" / "values")
        assert rows.dtype == jnp.dtype(dtype)
        assert rows.tobytes() == np.asarray(tables.arrays[f"d5_{dtype}"]["values"])[:900].tobytes()
    chunk = tmp_path / "2" / "tables" / "float32900" / "0000" / "values" / "c.0.0"
    content = bytearray(chunk.read_bytes())
    content[9] ^= 4
    chunk.write_bytes(content)
    with pytest.raises(ValueError, match="Digest mismatch"):
        array(chunk.parent)


def test_the_documentation_reads_a_table(tmp_path):
    tables, rng = make("device"), np.random.default_rng(0)
    checkpoints = Checkpoints(tmp_path / "checkpoints", chunk_bytes=3000)
    for step in (1, 2):
        save(checkpoints, tables, step)
        tables.write(rng, rows=20)
    save(checkpoints, tables, 3)
    page = (pathlib.Path(__file__).parents[1] / "docs" / "checkpoints.md").read_text()
    code = page.split("```python\n", 1)[1].split("```", 1)[0]
    names = {}
    exec(code.replace("RUN/checkpoints/STEP/tables/NAME", f"{tmp_path}/checkpoints/3/tables/float32900"), names)
    assert names["rows"].tobytes() == np.asarray(tables.arrays["d5_float32"]["values"])[:900].tobytes()


def test_names_of_tables_may_be_odd(tmp_path):
    from jrec.checkpoint.manifest import TableShape

    folders = {
        name: TableShape(name=name, rows=1, dim=1, dtype="float32", slots={}).folder
        for name in ("..", ".", "a/b", "a b", "Ü", "%2E", "c:d", "*")
    }
    assert len(set(folders.values())) == len(folders)
    for folder in folders.values():
        assert folder not in ("", ".", "..")
        assert "/" not in folder


def flip(path, rng):
    """Changes one bit."""
    data = bytearray(path.read_bytes())
    data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
    replace(path, bytes(data))


def truncate(path, rng):
    """Cuts off the end."""
    replace(path, path.read_bytes()[: int(rng.integers(path.stat().st_size))])


def remove(path, rng):
    """Takes it away."""
    del rng
    path.unlink()


def replace(path, data):
    """Another file of that name: the links of other checkpoints keep theirs."""
    path.unlink()
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "tier"),
    some_of(itertools.product((flip, truncate, remove), TIERS), (flip, "mesh"), (truncate, "host"), (remove, "device")),
)
def test_a_damaged_file_is_named(damage, tier, tmp_path):
    expected = chain_of_three(tmp_path, tier).state()
    rng, initial = np.random.default_rng(1), make(tier).state()
    files = sorted(p for p in (tmp_path / "3").rglob("*") if p.is_file())
    groups = [p for p in files if p.name == "zarr.json" and p.parent.parent.name == "tables"]  # say nothing to jrec
    assert len(files) > 40
    for path in rng.permutation(sorted(set(files) - set(groups)))[:12]:
        whole = path.read_bytes()
        damage(path, rng)
        if damage is remove and path.name == "manifest.json":
            assert Checkpoints(tmp_path).latest_step() == 2  # no manifest, no checkpoint
        else:
            fresh = make(tier)
            with pytest.raises(CheckpointError, match="is damaged: ") as raised:
                restore(tmp_path, fresh, 3)
            assert str(path) in str(raised.value)
            for name, bits in fresh.state().items():  # nothing of a damaged file is left in a table
                assert tier == "device" or bits in (initial[name], expected[name])
        path.unlink(missing_ok=True)
        path.write_bytes(whole)
    fresh = make(tier)
    restore(tmp_path, fresh, 3)
    assert fresh.state() == expected


def test_swapped_chunks_and_edited_metadata_are_found(tmp_path):
    chain_of_three(tmp_path)
    values = tmp_path / "3" / "tables" / "float32900" / "0000" / "values"
    first, second = values / "c.0.0", values / "c.1.0"
    one, other = first.read_bytes(), second.read_bytes()
    replace(first, other)
    replace(second, one)
    with pytest.raises(CheckpointError, match=r"c\.0\.0 is damaged: its checksum differs"):
        restore(tmp_path, Host(), 3)
    replace(first, one)
    replace(second, other)
    metadata = values / "zarr.json"
    replace(metadata, metadata.read_bytes().replace(b"little", b"big   "))
    with pytest.raises(CheckpointError, match=r"values/zarr\.json is damaged"):
        restore(tmp_path, Host(), 3)
    with pytest.raises(CheckpointError, match=r"values/zarr\.json is damaged"):
        Saved(tmp_path / "3").verify()
    manifest = tmp_path / "2" / "manifest.json"
    replace(manifest, manifest.read_bytes().replace(b'"position": 2', b'"position": 1'))
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged: its content does not match its checksum"):
        Checkpoints(tmp_path).open(2)


def test_the_newest_whole_checkpoint_before_a_damaged_one_is_named(tmp_path):
    chain_of_three(tmp_path)
    for step, name in ((3, "arrays"), (2, "tables/float3240/0000/rows/c.0")):
        flip(tmp_path / str(step) / name, np.random.default_rng(0))
    checkpoints = Checkpoints(tmp_path)
    saved = checkpoints.open()
    with (
        pytest.raises(CheckpointError, match=r"/3/arrays is damaged: .*; take step 1$"),
        checkpoints.reading(3, lambda step: f"take step {step}"),
    ):
        saved.arrays()
    shutil.rmtree(tmp_path / "1")
    assert checkpoints.newest_whole(3) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 8}, "keys of first values of table 'float32900' were"),
        ({"bound": 0.5}, "initial bounds of table 'float32900' were None and are 0.5 in this run"),
        ({"rows": (900, 41)}, "has no rows of table 'float3241'"),
        ({"optimizer": ops.SGD(learning_rate=0.1)}, r"slots of table 'float32900' were \{'mu'"),
        ({"dim": 6}, r"table 'float32900' is 900 x 5 of float32 there, but this run expects 900 x 6"),
    ],
)
def test_a_checkpoint_of_other_tables_is_refused(change, message, tmp_path):
    chain_of_three(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        restore(tmp_path, Host(**change))


def test_what_is_not_there(tmp_path):
    checkpoints = Checkpoints(tmp_path / "none", fingerprint={"dim": 4})
    assert checkpoints.steps() == []
    assert checkpoints.latest_step() is None
    with pytest.raises(CheckpointError, match="no complete checkpoint of step None; steps there: none"):
        checkpoints.open()
    with pytest.raises(ValueError, match="step is -1"):
        checkpoints.save(-1, arrays={})
    checkpoints.save(1, arrays={"a": np.arange(3)})
    with pytest.raises(CheckpointError, match="no complete checkpoint of step 7; steps there: 1"):
        checkpoints.open(7)
    assert checkpoints.open().manifest.fingerprint == {"dim": 4}


def test_rows_that_are_in_no_piece_are_counted_once(tmp_path):
    """Also where others are in several, as in increments."""
    (stack,) = layout_of("host", (8,), 1).members[:1]
    pieces = [NumberedPiece(4, "float328", np.arange(4)), NumberedPiece(4, "float328", np.arange(1, 5))]
    table = HostTable(stack, ops.SGD(learning_rate=0.1), jax.random.key(0, impl="threefry2x32"), huge_pages=False)
    shape = TableShape(name="float328", rows=8, dim=1, dtype="float32", slots={})
    source = types.SimpleNamespace(
        tables={"float328": shape}, changed=dict, begin=lambda full: pieces, end=lambda: None
    )
    source.undo_bytes = 0
    Checkpoints(tmp_path).save(1, arrays={}, sources=[source])
    saved = Checkpoints(tmp_path).open()
    np.testing.assert_array_equal(saved.read(stack, "values", np.arange(5))[:, 0], [0, 0, 1, 2, 3])
    with pytest.raises(CheckpointError, match="3 of 8 rows of table 'float328' are in no piece of this checkpoint"):
        saved.read(stack, "values", np.arange(8))
    with pytest.raises(CheckpointError, match="'float328' has 5 of its 8 rows there; go on from an earlier"):
        HostRows(table).restore(saved)


def test_other_formats_are_refused_with_what_to_do(tmp_path):
    chain_of_three(tmp_path / "c")
    path = tmp_path / "c" / "3" / "manifest.json"
    content = read_json(path)
    path.unlink()
    write_json(path, {**content, "version": 99})
    with pytest.raises(CheckpointError, match="version 99, but this jrec reads 'jrec-checkpoint', version 2; use"):
        Checkpoints(tmp_path / "c").open()
    (tmp_path / "old" / "800" / "state").mkdir(parents=True)
    for act in (Checkpoints(tmp_path / "old").latest_step, lambda: Checkpoints(tmp_path / "old").open(800)):
        with pytest.raises(CheckpointError, match=r"old/800 is a checkpoint of an earlier jrec .*start anew with --ov"):
            act()


def test_what_an_earlier_jrec_did_not_write_yet_is_no_damage(tmp_path):
    """Checkpoints of host memory had no ``bound`` before 2026-11-23."""
    tables = chain_of_three(tmp_path)
    path = tmp_path / "3" / "manifest.json"
    content = read_json(path)
    for table in content["tables"].values():
        assert table["shape"]["first"].pop("bound") is None
    path.unlink()
    write_json(path, content)
    fresh = Host()
    restore(tmp_path, fresh, 3)
    assert fresh.state() == tables.state()


@pytest.mark.parametrize("tier", TIERS)
def test_a_full_disk_leaves_earlier_checkpoints_and_loses_no_rows(tier, tmp_path, monkeypatch):
    chain_of_three(tmp_path, tier)
    tables, rng, calls = make(tier), np.random.default_rng(5), []
    checkpoints = restore(tmp_path, tables)
    tables.write(rng)

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) > 12:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match=r"step 4 could not be written to .*No space left.*are untouched"):
            save(checkpoints, tables, 4)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2", "3"]
    tables.write(rng)
    save(checkpoints, tables, 4)
    fresh = make(tier)
    restore(tmp_path, fresh, 4)
    assert fresh.state() == tables.state()


def test_where_links_are_impossible_everything_is_written(tmp_path, monkeypatch):
    tables = chain_of_three(tmp_path)
    checkpoints = restore(tmp_path, tables)
    tables.write(np.random.default_rng(3), rows=5)

    def refused(*args):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", refused)
    save(checkpoints, tables, 4)
    assert {len(of) for of in counts(checkpoints.open()).values()} == {1}
    fresh = Host()
    restore(tmp_path, fresh)
    assert fresh.state() == tables.state()


def steps_while_saving(tables, checkpoints, step, rng, monkeypatch, *, rows=60, **kwargs):
    """Goes on changing rows while a slow disk writes a checkpoint; the state at its step, and how often it changed."""
    expected, written, changes = tables.state(), Writer._write, 0

    def slowly(self, *args):
        time.sleep(0.005)
        written(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Writer, "_write", slowly)
        save(checkpoints, tables, step, wait=False, **kwargs)
        while checkpoints.saving:
            checkpoints.between_steps()
            time.sleep(0.001)
            if changes < 15:
                tables.write(rng, rows=rows)
                changes += 1
    return expected, changes


@pytest.mark.parametrize(
    ("tier", "read_bytes"),
    some_of(itertools.product(PLACES, (2500, 4 << 20)), ("device", 2500), ("host", 4 << 20), ("mesh-host", 2500)),
)
def test_a_checkpoint_is_of_its_step_while_steps_go_on(tier, read_bytes, tmp_path, monkeypatch):
    """Rows change in place before they are written, in full ones and increments, in chunks of one read or several."""
    monkeypatch.setattr("jrec.checkpoint.writer._READ_BYTES", read_bytes)
    tables, rng = make(tier, rows=(1500, 40)), np.random.default_rng(2)
    checkpoints = Checkpoints(tmp_path, keep=99, chunk_bytes=6000)
    tables.write(rng, rows=6000)
    pieces = []
    for step, full in ((1, True), (2, None), (3, None), (4, True)):
        expected, changes = steps_while_saving(tables, checkpoints, step, rng, monkeypatch, rows=9, full=full)
        assert changes > 3
        fresh = make(tier, rows=(1500, 40))
        restore(tmp_path, fresh, step)
        assert fresh.state() == expected, step
        pieces.append(max(map(len, counts(Checkpoints(tmp_path).open(step)).values())))
        assert sum(source.undo_bytes for source in tables.sources) == 0
    assert pieces[0] == pieces[-1] == (2 if tier == "mesh-host" else 1) < max(pieces)
    save(checkpoints, tables, 5)  # what changed during the last one belongs to this one
    fresh = make(tier, rows=(1500, 40))
    restore(tmp_path, fresh)
    assert fresh.state() == tables.state()


@pytest.mark.parametrize("tier", some_of(TIERS, "mesh"))
def test_without_the_kept_rows_it_would_not_be(tier, tmp_path, monkeypatch):
    tables, rng = make(tier, rows=(400, 40)), np.random.default_rng(2)
    tables.write(rng, rows=600)
    monkeypatch.setattr(Undo, "overlay", lambda self, addresses, arrays: arrays)
    checkpoints = Checkpoints(tmp_path, chunk_bytes=1000)
    expected, _ = steps_while_saving(tables, checkpoints, 1, rng, monkeypatch, rows=12)
    fresh = make(tier, rows=(400, 40))
    restore(tmp_path, fresh)
    assert fresh.state() != expected


@pytest.mark.parametrize("tier", some_of(TIERS, "host", "mesh"))
def test_rows_that_are_kept_are_bounded(tier, tmp_path, monkeypatch):
    """A step waits for the disk where too many rows would have to be kept."""
    tables, rng = make(tier, rows=(2000,)), np.random.default_rng(2)
    tables.write(rng, rows=4000)
    checkpoints, most = Checkpoints(tmp_path, chunk_bytes=2000, undo_bytes=200_000), []
    write = tables.write

    def watched(*args, **kwargs):
        write(*args, **kwargs)
        most.append(sum(source.undo_bytes for source in tables.sources))

    tables.write = watched
    expected, _ = steps_while_saving(tables, checkpoints, 1, rng, monkeypatch, rows=50)
    places = 5 if tier == "mesh" else 1
    assert 0 < max(most) < 200_000 + 2 * places * 1024 * 70  # the rows of one step go beyond it
    fresh = make(tier, rows=(2000,))
    restore(tmp_path, fresh)
    assert fresh.state() == expected


def test_a_checkpoint_reads_into_the_same_memory(tmp_path, monkeypatch):
    """Fresh memory for every read would cost more than the rows' copy."""
    calls = {"_slice": 0, "_slice_into": 0}

    def counted(name, read):
        def call(*args):
            calls[name] += 1
            return read(*args)

        return call

    for name in calls:
        monkeypatch.setattr(device, name, counted(name, getattr(device, name)))
    monkeypatch.setattr(device, "_compile", lambda arrays: None)
    monkeypatch.setattr("jrec.checkpoint.writer._READ_BYTES", 3000)
    tables = make("device", rows=(20_000,))
    checkpoints = Checkpoints(tmp_path, chunk_bytes=40_000)
    save(checkpoints, tables, 1)
    assert calls["_slice"] <= 12
    assert calls["_slice_into"] > 500
    other = make("device", rows=(20_000,), seed=8)
    restore(tmp_path, other)
    assert other.state() == tables.state()


def go_on(tables, checkpoints, rng):
    while True:
        tables.write(rng)
        checkpoints.between_steps()


def test_a_checkpoint_may_end_while_rows_are_written(monkeypatch):
    case = Host((40,))
    table, source = case.tables[0], case.sources[0]
    rows = np.arange(table.rows, dtype=np.int32)
    values, slots = table.fetch(rows)
    table.store(rows, values, slots)
    source.begin(())
    ended, searchsorted = threading.Thread(target=source.end), np.searchsorted

    def ends_meanwhile(of, wanted, *more, **options):
        if not ended.ident:
            ended.start()
            ended.join(0.2)
        return searchsorted(of, wanted, *more, **options)

    monkeypatch.setattr("jrec.checkpoint.host.np.searchsorted", ends_meanwhile)
    table.store(rows, values + 1, slots)
    ended.join()
    assert source.undo_bytes == 0
    np.testing.assert_array_equal(table.read(rows), values + 1)


def test_dense_arrays_and_counters_are_of_the_step_too(tmp_path):
    checkpoints, dense, meta = Checkpoints(tmp_path), np.arange(5.0), {"losses": [0.5]}
    tables = make("device")
    checkpoints.save(1, arrays={"a": dense}, sources=tables.sources, meta=meta, wait=False)
    dense += 1
    meta["losses"].append(0.25)
    checkpoints.finish()
    saved = checkpoints.open()
    np.testing.assert_array_equal(saved.arrays()["a"], np.arange(5.0))
    assert saved.manifest.meta == {"losses": [0.5]}


def test_the_next_checkpoint_waits_for_the_one_before(tmp_path):
    tables, rng = make("device"), np.random.default_rng(0)
    checkpoints = Checkpoints(tmp_path, chunk_bytes=2000)
    for step in (1, 2, 3):
        tables.write(rng)
        save(checkpoints, tables, step, wait=False)
        assert checkpoints.steps() == [1, 2, 3][max(0, step - 3) : step - 1] or step == 1
    checkpoints.finish()
    assert checkpoints.written().step == 3
    assert checkpoints.written() is None
    fresh = make("device")
    restore(tmp_path, fresh)
    assert fresh.state() == tables.state()


@pytest.mark.parametrize("tier", TIERS)
def test_a_failure_while_steps_go_on_is_raised_at_the_next_one(tier, tmp_path, monkeypatch):
    tables, rng = make(tier), np.random.default_rng(0)
    checkpoints = Checkpoints(tmp_path, chunk_bytes=1000)
    tables.write(rng)
    save(checkpoints, tables, 1)

    def full(self, *args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    tables.write(rng)
    with monkeypatch.context() as patch:
        patch.setattr(Writer, "_write", full)
        save(checkpoints, tables, 2, wait=False)
        with pytest.raises(CheckpointError, match=r"step 2 could not be written to .*No space left.*are untouched"):
            go_on(tables, checkpoints, rng)
    assert [p.name for p in tmp_path.iterdir()] == ["1"]
    tables.write(rng)
    save(checkpoints, tables, 3)
    fresh = make(tier)
    restore(tmp_path, fresh)
    assert fresh.state() == tables.state()


def test_a_checkpoint_that_goes_while_it_is_read_is_not_called_damaged(tmp_path):
    """A run that is taken back to an earlier step removes what follows, whoever reads it."""
    world = make("host")
    writer, reader = Checkpoints(tmp_path, keep=1), Checkpoints(tmp_path)
    save(writer, world, 1)
    saved = reader.open(1)
    writer.drop_after(0)
    message = f"{tmp_path}/1 was removed while it was read: a run goes on there"
    with pytest.raises(CheckpointError, match=message), reader.reading(1, lambda step: f"take step {step}"):
        saved.arrays()


def test_a_checkpoint_that_is_read_stays_until_it_is_not(tmp_path):
    """A run beside an export keeps only its latest checkpoints, and that which the export reads."""
    world, rng = make("host"), np.random.default_rng(0)
    writer, reader = Checkpoints(tmp_path, keep=1), Checkpoints(tmp_path)
    save(writer, world, 1)
    saved = reader.open(1).current()
    before = world.state()
    for step in (2, 3):
        world.write(rng)
        save(writer, world, step)
    assert reader.steps() == [1, 3]
    saved.verify()
    fresh = make("host")
    fresh.restore(saved)
    assert fresh.state() == before
    del saved
    save(writer, world, 4)
    assert reader.steps() == [4]


def test_a_second_writer_of_a_folder_is_refused_until_the_first_is_done(tmp_path):
    """A checkpoint under way is another program's to finish: its temporary folder is not removed."""
    world, other = make("host"), make("host")
    first, second = Checkpoints(tmp_path), Checkpoints(tmp_path)
    save(first, world, 1, wait=False)
    for write in (lambda: save(second, other, 2), lambda: second.drop_after(0)):
        with pytest.raises(OutputError, match=f"another process is writing {tmp_path}"):
            write()
    first.finish()
    save(second, other, 2)
    assert second.steps() == [1, 2]
    for step in (1, 2):
        first.open(step).verify()
    second.drop_after(1)
    assert second.steps() == [1]


def test_what_a_killed_process_left_goes_with_the_next_checkpoint(tmp_path):
    tables, rng = make("device"), np.random.default_rng(0)
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, tables, 1)
    (tmp_path / "9.partial" / "tables").mkdir(parents=True)
    (tmp_path / "8.removed").mkdir()
    os.link(tmp_path / "1" / ARRAYS, tmp_path / "2.link")  # the trial of whether there are links
    os.link(tmp_path / "1" / ARRAYS, tmp_path / "9.link")
    tables.write(rng)
    save(checkpoints, tables, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]
    for step in (1, 2):
        checkpoints.open(step).verify()


def test_a_closed_run_leaves_no_part_of_a_checkpoint(tmp_path):
    tables = make("device")
    checkpoints = Checkpoints(tmp_path, chunk_bytes=1000)
    save(checkpoints, tables, 1, wait=False)
    checkpoints.close()
    assert list(tmp_path.iterdir()) == []


@dataclasses.dataclass
class NumberedPiece:
    """Rows whose values are their numbers."""

    count: int
    table: str = "t"
    rows: np.ndarray | None = None

    def begin(self, start, stop):
        return np.arange(start, stop, dtype=np.float32)

    def finish(self, begun, start, stop):
        return {"values": begun[:, None]}


def interrupting(number):
    """A trace that raises KeyboardInterrupt in place of that line of the writer's, or of what it calls."""
    lines = itertools.count()

    def trace(frame, event, argument):
        if event == "line" and next(lines) == number:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    return trace


def goes_on(writer):
    writer.advance()
    writer.put()
    writer.wait()


def gives_up(writer):
    writer.put()
    writer.abort()


@pytest.mark.parametrize("calls", [goes_on, gives_up])
def test_an_interrupt_anywhere_in_the_writer_never_hangs_and_never_seals_a_part(calls, tmp_path):
    """At every line of ``put``, ``advance``, ``wait``, ``abort`` and the Python that they call."""
    shape, outcomes = TableShape(name="t", rows=8, dim=1, dtype="float32", slots={}), []

    def scenario(number):
        folder = tmp_path / str(number)
        (folder / "tables" / "t").mkdir(parents=True)
        sealed = threading.Event()
        piece = piece_to_write(NumberedPiece(8), shape, "0000", chunk_bytes=8)
        writer = Writer(folder, [piece], prepare=lambda: None, finish=sealed.set)
        writer.start()
        interrupted = False
        try:
            sys.settrace(interrupting(number))
            calls(writer)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            sys.settrace(None)
        if calls is goes_on:  # whoever catches the interrupt may go on: that ends, too
            with contextlib.suppress(BaseException):
                writer.wait()
        writer.abort()
        writer._thread.join(5)
        assert not writer._thread.is_alive()
        if sealed.is_set():
            files = sorted((folder / "tables/t/0000/values").glob("c.*"))
            assert [np.fromfile(path, np.float32)[0] for path in files] == [0, 2, 4, 6]
        outcomes.append((interrupted, sealed.is_set()))

    for number in itertools.count():
        thread = threading.Thread(target=scenario, args=(number,), daemon=True)
        thread.start()
        thread.join(20)
        assert not thread.is_alive(), f"it hangs where line {number} is interrupted"
        assert len(outcomes) == number + 1
        if not outcomes[-1][0]:
            break
    assert len(outcomes) > 10
    assert outcomes[-1][1] == (calls is goes_on)


class Killed(BaseException):
    """Ends the program where it is raised: nothing catches it, so nothing cleans up."""


@pytest.mark.parametrize("stride", [19, pytest.param(1, marks=pytest.mark.slow)])
def test_a_save_may_end_at_any_call_of_the_system(stride, tmp_path, monkeypatch):
    """Between any two changes of the disk, over a checkpoint of the same step and one of a later one."""
    options, found, states = {"chunk_bytes": 90_000}, [], {}
    tables, rng = Host(rows=(300,), optimizer=ops.SGD(learning_rate=0.1)), np.random.default_rng(0)
    checkpoints = Checkpoints(tmp_path / "before", keep=9, **options)
    tables.write(rng, rows=300)
    for step in (1, 2, 3, 4):
        tables.write(rng, rows=20)
        save(checkpoints, tables, step)
        states[step, "before"] = tables.state()
    completed, number = False, 0
    while not completed:
        shutil.rmtree(tmp_path / "now", ignore_errors=True)
        shutil.copytree(tmp_path / "before", tmp_path / "now")
        checkpoints = restore(tmp_path / "now", tables, 2, **options)
        tables.write(np.random.default_rng(1), rows=20)
        states[3, "new"] = tables.state()
        with monkeypatch.context() as patch:
            _die_at_call(patch, number)
            try:
                save(checkpoints, tables, 3)
                completed = True
            except Killed:
                pass
        restore(tmp_path / "now", tables)
        last = Checkpoints(tmp_path / "now").latest_step()
        found.append(next(w for w, whole in states.items() if w[0] == last and whole == tables.state()))
        save(Checkpoints(tmp_path / "now"), tables, 5)  # and what was left behind is in nobody's way
        number += stride
    assert len(found) > 5
    order = [which for which, _ in itertools.groupby(found)]
    expected = [(4, "before"), (3, "before"), (2, "before"), (3, "new")]
    assert order == expected if stride == 1 else order == [which for which in expected if which in order]


def _die_at_call(patch, number):
    """Raises Killed in place of that call, and of all after it, that changes the disk."""
    counter = itertools.count()

    def dying(function):
        def call(*args, **kwargs):
            if next(counter) >= number:
                raise Killed
            return function(*args, **kwargs)

        return call

    changes = [(os, "fsync"), (os, "link"), (os, "rmdir"), (os, "unlink"), (pathlib.Path, "rename")]
    for owner, name in [*changes, (pathlib.Path, "mkdir")]:
        patch.setattr(owner, name, dying(getattr(owner, name)))


_CHILD = """
import sys
import numpy as np
from checkpoint_cases import make, restore, save
from jrec.checkpoint import Checkpoints, CopiedRows
tables = make(sys.argv[2], rows=(20_000,))
checkpoints = Checkpoints(sys.argv[1], keep=2, chunk_bytes=100_000)
step = 0
if checkpoints.steps():
    saved = checkpoints.open()
    tables.restore(saved)
    checkpoints.restored(saved)
    step = saved.step
while True:
    step += 1
    tables.write(np.random.default_rng(step), rows=2000)
    save(checkpoints, tables, step)
    print(step, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("tier", TIERS)
def test_a_killed_process_leaves_its_last_complete_checkpoint(tier, tmp_path):
    """Killed at random moments, most of which fall into a save, it goes on where it was."""
    rng, last = np.random.default_rng(0), 0
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parent), "JAX_PLATFORMS": "cpu"}
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(tmp_path), tier], env=environment, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        printed = [int(process.stdout.readline())]
        time.sleep(float(rng.uniform(0, 0.5)))
        process.send_signal(signal.SIGKILL)
        printed += [int(line) for line in process.stdout.read().split()]
        process.stdout.close()
        process.wait()
        tables = make(tier, rows=(20_000,))
        restore(tmp_path, tables)
        step = Checkpoints(tmp_path).latest_step()
        assert printed[0] > last
        assert step in (printed[-1], printed[-1] + 1)
        last = step
        expected = make(tier, rows=(20_000,))
        for done in range(1, step + 1):
            expected.write(np.random.default_rng(done), rows=2000)
        assert tables.state() == expected.state()
