"""Rows that lie over a table in its files: what is written, read, merged and served, and what is refused."""

import hashlib
import json
import struct
import time

import ml_dtypes
import numpy as np
import optax
import pytest
import safetensors.numpy
from export_cases import SIZES, made_exports
from table_file_cases import Model, batches, fp8_table, loss_of, plain_tensors

import jrec
from jrec.errors import CheckpointError, OutputError
from jrec.nn import NGramConfig, NGramHashing
from jrec.serving.checks import load_manifest
from jrec.table_files import StoredTable, TableFormat, Tensors, quantized, write_overlay, write_table, write_tensors

FORMATS = ["float32", "bfloat16", "fp8", "fp8 uint8", "fp8 squares", "int8", "int8 pieces", "one scale"]


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def published(folder, stored, rows=70):
    """A table of 70 rows of 64 elements in files, as models publish them; returns its name."""
    values, name = np.random.default_rng(0).normal(size=(rows, 64)).astype(np.float32), "e.weight"
    if stored in ("float32", "bfloat16"):
        tensors = {name: values.astype(getattr(ml_dtypes, stored, stored))}
    elif stored == "one scale":
        layout = TableFormat(name=name, dtype="float8_e4m3fn", scale="e.weight_scale", block=None)
        write_table(folder, values.__getitem__, format=layout, rows=rows, dim=64)
        return name
    elif stored == "fp8 squares":
        tensors = dict(zip((name, "e.scale"), quantized(values, "float8_e4m3fn", (32, 32)), strict=True))
    elif stored.startswith("int8"):
        values, scales = quantized(values, "int8", (1, 64))
        tensors = {name: values, "e.scale": scales * np.float32(1.37)}  # greater than the rows need
    else:
        values, scales = fp8_table(rows)
        tensors = {name: values, "e.scale": scales.view(np.uint8) if "uint8" in stored else scales}
    if stored == "int8 pieces":
        name, whole = "e.shard_{}.weight", tensors
        tensors = {f"e.shard_{n}.weight": whole["e.weight"][30 * n : 30 * n + 30] for n in range(3)}
        tensors |= {f"e.shard_{n}.scale": whole["e.scale"][30 * n : 30 * n + 30] for n in range(3)}
    write_tensors(folder, tensors, shard_bytes=3000)
    return name


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
@pytest.mark.parametrize("stored", FORMATS)
def test_an_overlay_is_read_and_merged_as_the_edited_table(tmp_path, stored, dtype):
    name = published(tmp_path / "base", stored)
    before, table = digests(tmp_path / "base"), StoredTable(Tensors(tmp_path / "base"), name)
    old = table.read(range(70)).astype(np.float32)
    run, touched = old.copy(), np.array([3, 40, 69])
    run[touched] = run[touched] * 0.75 + 0.01
    run[40] = old[40]  # read, but not changed
    changed = write_overlay(tmp_path / "edit.safetensors", run.__getitem__, like=table, dtype=dtype, chunk_rows=33)
    edited = StoredTable(Tensors(tmp_path / "base"), name, overlays=[tmp_path / "edit.safetensors"])
    np.testing.assert_array_equal(edited.read(touched), edited.read(touched[::-1])[::-1])
    write_table(tmp_path / "trained", run.__getitem__, like=table, shard_bytes=3000)
    write_table(tmp_path / "merged", edited.read, like=edited, shard_bytes=3000)
    merged, base = plain_tensors(tmp_path / "merged"), plain_tensors(tmp_path / "base")
    again = StoredTable(Tensors(tmp_path / "merged"), name)
    if dtype is None:
        # The rows, and the files, are those of the edited table written as a whole.
        trained = plain_tensors(tmp_path / "trained")
        assert all((merged[tensor] == trained[tensor]).all() for tensor in base)
        np.testing.assert_array_equal(edited.read(range(70)), again.read(range(70)))
        for tensor in base:  # a row that is not in the overlay has its old bytes
            if "{}" not in name and len(base[tensor]) == 70:
                untouched = np.setdiff1d(np.arange(70), edited.overlaid)
                assert (merged[tensor][untouched] == base[tensor][untouched]).all()
    else:
        wanted = run.astype(getattr(ml_dtypes, dtype, dtype)).astype(np.float32)
        same = np.setdiff1d(np.arange(70), [3, 69])
        wanted[same] = old[same]
        np.testing.assert_array_equal(edited.read(range(70)).astype(np.float32), wanted)
        np.testing.assert_allclose(
            again.read(range(70)).astype(np.float32), wanted, rtol=1 / 15, atol=np.abs(wanted).max() / 80
        )
    if stored != "fp8 squares" or dtype is not None:
        assert (changed, edited.overlaid.tolist()) == (2, [3, 69])
    else:
        scale = quantized(run, "float8_e4m3fn", (32, 32))
        rows = (scale[0].view(np.uint8) != base["e.weight"]).any(axis=1)
        rows |= np.repeat((scale[1].view(np.uint8) != base["e.scale"]).any(axis=1), 32)[:70]
        assert edited.overlaid.tolist() == np.flatnonzero(rows).tolist()
        assert changed == rows.sum()
    assert digests(tmp_path / "base") == before  # undone, the table is what it was
    np.testing.assert_array_equal(StoredTable(Tensors(tmp_path / "base"), name).read(range(70)), old)
    with safetensors.safe_open(tmp_path / "edit.safetensors", "numpy") as by_package:
        assert by_package.get_tensor("ids").tolist() == edited.overlaid.tolist()
        assert by_package.metadata()["table"] == name


@pytest.mark.parametrize("block", [(1, 32), (32, 32)])
def test_a_row_whose_scale_alone_changes_is_there(tmp_path, block):
    """Twice the row has the same values in FP8, and twice the scale; and zeros have the same values by any scale."""
    rows = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
    rows[32] = 0
    values, scales = quantized(rows, "float8_e4m3fn", block)
    table = StoredTable({"e.weight": values, "e.scale": scales}, "e.weight")
    run = table.read(range(64))
    run[40 if block[0] == 1 else slice(32, 64)] *= 2
    write_overlay(tmp_path / "edit", run.__getitem__, like=table)
    edited = StoredTable({"e.weight": values, "e.scale": scales}, "e.weight", overlays=[tmp_path / "edit"])
    assert edited.overlaid.tolist() == ([40] if block[0] == 1 else list(range(32, 64)))
    np.testing.assert_array_equal(edited.read(range(64)), run)
    write_table(tmp_path / "merged", edited.read, like=edited)
    np.testing.assert_array_equal(StoredTable(Tensors(tmp_path / "merged"), "e.weight").read(range(64)), run)


@pytest.mark.parametrize("kept", ["float32", "bfloat16"])
@pytest.mark.parametrize("stored", FORMATS)
def test_a_run_that_changed_nothing_has_no_rows(tmp_path, stored, kept):
    """In whatever dtype the run had them."""
    name = published(tmp_path / "base", stored)
    table = StoredTable(Tensors(tmp_path / "base"), name)
    run = table.read(range(70)).astype(getattr(ml_dtypes, kept, kept))
    assert write_overlay(tmp_path / "none.safetensors", run.__getitem__, like=table) == 0
    assert (tmp_path / "none.safetensors").stat().st_size < 2000
    edited = StoredTable(Tensors(tmp_path / "base"), name, overlays=str(tmp_path / "none.safetensors"))
    np.testing.assert_array_equal(edited.read(range(70)), table.read(range(70)))
    assert edited.overlaid.size == 0


@pytest.mark.parametrize("stored", ["fp8", "fp8 squares", "bfloat16"])
def test_rows_by_their_numbers(tmp_path, stored):
    """As they come from a run that knows what it read; only these are looked at."""
    name = published(tmp_path / "base", stored)
    table = StoredTable(Tensors(tmp_path / "base"), name)
    ids, rows = np.array([65, 2, 33]), np.random.default_rng(1).normal(size=(3, 64)).astype(np.float32)
    write_overlay(tmp_path / "given.safetensors", rows, ids=ids, like=table)
    run, asked = table.read(range(70)).astype(np.float32), []
    run[ids] = rows

    def read(numbers):
        asked.extend(numbers)
        return run[numbers]

    write_overlay(tmp_path / "read.safetensors", read, ids=ids, like=table)
    assert (tmp_path / "given.safetensors").read_bytes() == (tmp_path / "read.safetensors").read_bytes()
    if stored != "fp8 squares":
        assert asked == sorted(ids)


def test_later_overlays_count(tmp_path):
    """The second was made over the first, of which it changes one row; the third stands alone."""
    name = published(tmp_path / "base", "fp8")
    tensors = Tensors(tmp_path / "base")

    def edited(*files):
        return StoredTable(tensors, name, overlays=[tmp_path / file for file in files])

    rows = np.random.default_rng(1).normal(size=(3, 2, 64)).astype(np.float32)
    write_overlay(tmp_path / "one", rows[0], ids=np.array([5, 6]), like=edited())
    write_overlay(tmp_path / "two", rows[1], ids=np.array([6, 7]), like=edited("one"), dtype="bfloat16")
    write_overlay(tmp_path / "three", rows[2], ids=np.array([8, 9]), like=edited())
    of_one, of_two = edited("one").read([5]), rows[1].astype(ml_dtypes.bfloat16)
    for order in (("one", "two", "three"), ("three", "one", "two"), ("one", "three", "two")):
        table = edited(*order)
        np.testing.assert_array_equal(table.read([5]), of_one)
        np.testing.assert_array_equal(table.read([6, 7]), of_two)
        np.testing.assert_array_equal(table.read([9, 8]), edited("three").read([9, 8]))
        assert table.overlaid.tolist() == [5, 6, 7, 8, 9]
        assert table.files[-3:] == [tmp_path / file for file in order]
    write_overlay(tmp_path / "four", rows[0], ids=np.array([6, 9]), like=edited("one", "two", "three"))
    np.testing.assert_allclose(edited("one", "two", "three", "four").read([6]), rows[0][:1], rtol=1 / 15, atol=1e-2)
    write_table(tmp_path / "merged", table.read, like=table)
    merged = StoredTable(Tensors(tmp_path / "merged"), name)
    np.testing.assert_array_equal(merged.read([5, 8, 9]), table.read([5, 8, 9]))

    def refused(message, *files, tensors=tensors):
        with pytest.raises(CheckpointError, match=message):
            StoredTable(tensors, name, overlays=[tmp_path / file for file in files])

    refused(
        "two was made when the 2 rows that it changes had other values, such as row 6; give the overlay that", "two"
    )
    refused("two was made when", "three", "two")
    refused("one was not made over .*one, and both change row 5", "one", "one")
    refused("four was not made over .*two, and both change row 6; give overlays in the order", "one", "two", "four")
    refused("one is an overlay of another table than", "one", tensors=Tensors(tmp_path / "merged"))


@pytest.mark.parametrize("stored", ["fp8 squares", "int8 pieces", "one scale", "bfloat16"])
def test_an_edit_over_floats_is_merged_as_it_is_read(tmp_path, stored):
    """The first edit is float32; the second, in the table's format, is of a row that may share a scale with it."""
    name, rows = published(tmp_path / "base", stored), np.random.default_rng(1).normal(size=(2, 64)).astype(np.float32)
    one, two, tensors = tmp_path / "one", tmp_path / "two", Tensors(tmp_path / "base")
    write_overlay(one, rows[:1], ids=np.array([3]), like=StoredTable(tensors, name), dtype="float32")
    below = StoredTable(tensors, name, overlays=[one])
    assert below.dtype == np.float32
    write_overlay(two, rows[1:], ids=np.array([10]), like=below)
    edited = StoredTable(tensors, name, overlays=[one, two])
    assert 10 in edited.overlaid
    write_table(tmp_path / "merged", edited.read, like=edited)
    merged, rest = StoredTable(Tensors(tmp_path / "merged"), name), np.setdiff1d(np.arange(70), [3])
    np.testing.assert_array_equal(merged.read(rest).astype(np.float32), edited.read(rest))
    np.testing.assert_allclose(merged.read([3]).astype(np.float32), rows[:1], rtol=1 / 15, atol=0.03)


def test_an_overlay_of_a_huge_table_is_quick(tmp_path, monkeypatch):
    """A table of 40 GB, of zeros, in a file that takes some kilobytes of the disk."""
    monkeypatch.setattr("jrec.table_files.tables._SAMPLED_ROWS", 64)  # each read of such a file takes milliseconds
    rows, dim = 160_000_000, 256
    header = json.dumps({"t.weight": {"dtype": "BF16", "shape": [rows, dim], "data_offsets": [0, rows * dim * 2]}})
    with (tmp_path / "big.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header.encode())
        file.truncate(8 + len(header) + rows * dim * 2)
    table, start = StoredTable(Tensors(tmp_path / "big.safetensors"), "t.weight"), time.perf_counter()
    ids = np.random.default_rng(0).choice(rows, 100, replace=False)
    assert write_overlay(tmp_path / "edit", np.ones((100, dim)), ids=ids, like=table) == 100
    edited = StoredTable(Tensors(tmp_path / "big.safetensors"), "t.weight", overlays=[tmp_path / "edit"])
    assert edited.read([ids[0], (ids[0] + 1) % rows, ids[1]]).astype(int).sum() in (2 * dim, 3 * dim)
    assert time.perf_counter() - start < 30
    assert (tmp_path / "edit").stat().st_size < 100 * (2 * dim + 8) + 2000


# From published files to a served edit.


def made(config, host=False):
    return Model(config, "host" if host else "sharded")


def start(config, table, model, dense):
    rows = jrec.ops.Adagrad(learning_rate=0.05)
    run = jrec.distribute(model, jrec.nn.SparseOptimizer(model, dense=dense, embedding=rows))
    for ids, values in table.chunks(1000):
        run.set_rows("ngram", ids, values)
    return run


@pytest.mark.parametrize(("stored", "place"), [("fp8", "device"), ("bfloat16", "host"), ("fp8", "host")])
def test_an_edit_is_trained_written_merged_and_served(tmp_path, stored, place):
    """100 steps of rows alone; a new run of base and overlay has the rows to the bit, and so has what is served."""
    hashing = NGramHashing(scheme="deepseek-v4.1", vocabulary=20, head_rows=(3000, 3000), heads=2, pad_id=0)
    config, name = NGramConfig.of(hashing, dim=32), "layers.1.engram.embed.weight"
    values = 0.01 * np.random.default_rng(0).normal(size=(hashing.rows, 32)).astype(np.float32)
    layout = TableFormat(name=name)
    if stored == "fp8":
        layout = TableFormat(name=name, dtype="float8_e4m3fn", scale="layers.1.engram.embed.scale", block=(1, 32))
    write_table(tmp_path / "base", values.__getitem__, format=layout, rows=hashing.rows, dim=32, shard_bytes=100_000)
    before, base = digests(tmp_path / "base"), StoredTable(Tensors(tmp_path / "base"), name)
    touched, host = np.zeros(hashing.rows, bool), place == "host"
    run = start(config, base, made(config, host), optax.set_to_zero())  # the dense part stays as it is
    with run:
        run.export(tmp_path / "served")
        step = run.compile(loss=loss_of)
        losses = [float(step(batch)[0]) for batch in run.feed(batches(config, touched), label=None, extras=["next"])]
        changed = write_overlay(
            tmp_path / "edit", lambda ids: run.rows("ngram", ids), like=base, ids=np.flatnonzero(touched)
        )
        trained = run.table("ngram")
    assert np.mean(losses[-10:]) < 0.9 * losses[0]
    assert 100 < changed <= touched.sum() < hashing.rows - 100
    assert (tmp_path / "edit").stat().st_size < 0.9 * (values.nbytes if stored == "fp8" else values.nbytes / 2)

    edited = StoredTable(Tensors(tmp_path / "base"), name, overlays=[tmp_path / "edit"])
    np.testing.assert_allclose(edited.read(np.arange(hashing.rows)).astype(np.float32), trained, rtol=1 / 15, atol=1e-3)
    with start(config, edited, made(config, host), optax.set_to_zero()) as again:
        np.testing.assert_array_equal(again.table("ngram"), edited.read(np.arange(hashing.rows)).astype(np.float32))
        columns = next(batches(config, touched, steps=1))
        columns.pop("next")
        scores = again.predict(columns)
        again.export(tmp_path / "by_run", since=[tmp_path / "served"])

    write_table(tmp_path / "merged", edited.read, like=edited, shard_bytes=100_000)
    merged, old = plain_tensors(tmp_path / "merged"), plain_tensors(tmp_path / "base")
    untouched = np.setdiff1d(np.arange(hashing.rows), edited.overlaid)
    for tensor in old:
        assert (merged[tensor][untouched] == old[tensor][untouched]).all()
    np.testing.assert_array_equal(
        StoredTable(Tensors(tmp_path / "merged"), name).read(edited.overlaid), edited.read(edited.overlaid)
    )
    assert digests(tmp_path / "base") == before
    with pytest.raises(CheckpointError, match=r"edit was made when|edit is an overlay of another table"):
        StoredTable(Tensors(tmp_path / "merged"), name, overlays=[tmp_path / "edit"])

    rows = {"ngram": (edited.overlaid, edited.read(edited.overlaid))}
    jrec.serving.write_delta(tmp_path / "delta", rows, since=[tmp_path / "served"])
    for delta in ("delta", "by_run"):
        served = jrec.serving.load(tmp_path / "served", batch_sizes=[16])
        assert np.abs(served.logits(columns) - scores).max() > 0.01
        served.apply(tmp_path / delta)
        np.testing.assert_allclose(served.logits(columns), scores, rtol=1e-5, atol=1e-5)
    for file in ("tables/ngram.npy", "tables/ngram.changed.npy"):
        assert (tmp_path / "delta" / file).read_bytes() == (tmp_path / "by_run" / file).read_bytes()


# Refused.


def test_damaged_overlays_are_refused(tmp_path):
    name = published(tmp_path / "base", "fp8")
    tensors, path = Tensors(tmp_path / "base"), tmp_path / "edit"
    table = StoredTable(tensors, name)
    write_overlay(path, np.ones((2, 64), np.float32), ids=np.array([3, 5]), like=table)
    whole = path.read_bytes()

    def refused(message):
        with pytest.raises(CheckpointError, match=message) as caught:
            StoredTable(tensors, name, overlays=[path])
        assert str(path) in str(caught.value)

    for place in (len(whole) - 1, len(whole) - 60, whole.index(b'"table": "e') + 10, whole.index(b"sha256") + 20):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        refused("is damaged: its checksum does not fit; copy it again|ascii|fetch it anew")
    path.write_bytes(whole[:-1])
    refused("is no whole safetensors file")
    path.unlink()
    refused("edit is missing")
    safetensors.numpy.save_file({"ids": np.arange(3)}, path)
    refused("is no overlay of a table; give files that jrec.table_files.write_overlay wrote")

    def rewritten(old, new):
        """With another header, and a checksum that fits it."""
        (length,) = struct.unpack("<Q", whole[:8])
        header, content = whole[8 : 8 + length], whole[8 + length :]
        checksum = json.loads(header)["__metadata__"]["sha256"].encode()
        header, content = header.replace(old, new)[:length].ljust(length), content.replace(old, new)
        data = whole[:8] + header.replace(checksum, b"0" * 64) + content
        path.write_bytes(data.replace(b"0" * 64, hashlib.sha256(data).hexdigest().encode()))

    rewritten(b'"overlay_version": "1"', b'"overlay_version": "2"')
    refused("is an overlay of version '2', but this jrec reads '1'")
    rewritten(struct.pack("<qq", 3, 5), struct.pack("<qq", 5, 3))
    refused("does not hold ascending rows with a value for each")
    rewritten(struct.pack("<qq", 3, 5), struct.pack("<qq", 3, 70))
    refused("changes rows 3 to 70 of e.weight, which has 70; write the overlay again")
    rewritten(b'"shape": [2, 64]', b'"shape": [4, 32]')
    refused("does not hold ascending rows with a value for each")
    rewritten(b'"dtype": "F8_E8M0"', b'"dtype": "U8"')
    refused("which are no rows of e.weight")
    rewritten(b"", b"")
    assert StoredTable(tensors, name, overlays=[path]).overlaid.tolist() == [3, 5]


def test_overlays_of_other_tables_are_refused(tmp_path):
    names = {stored: published(tmp_path / stored, stored) for stored in FORMATS}
    for stored, name in names.items():
        table = StoredTable(Tensors(tmp_path / stored), name)
        write_overlay(tmp_path / f"{stored}.edit", np.ones((1, 64), np.float32), ids=np.array([3]), like=table)
    for stored, name in names.items():
        for other in names.keys() - {stored}:
            with pytest.raises(CheckpointError, match=r"is an overlay of another table than .*; give the files"):
                StoredTable(Tensors(tmp_path / stored), name, overlays=[tmp_path / f"{other}.edit"])
    # Of the same outline, with one other row among those that a fingerprint reads.
    published(tmp_path / "again", "float32")
    tensors = {name: np.array(value) for name, value in Tensors(tmp_path / "again").items()}
    tensors["e.weight"][60] += 1
    with pytest.raises(CheckpointError, match=r"another table than e\.weight in arrays"):
        StoredTable(tensors, "e.weight", overlays=[tmp_path / "float32.edit"])


def test_bad_edits_are_refused(tmp_path):
    name = published(tmp_path / "base", "one scale")
    table = StoredTable(Tensors(tmp_path / "base"), name)
    out, rows = tmp_path / "edit", np.ones((2, 64), np.float32)
    for arguments, message in (
        ({"rows": rows, "ids": np.array([1, 70])}, "e.weight has no row 70; its rows are 0 to 69"),
        ({"rows": rows, "ids": np.array([1, 1])}, "row 1 of e.weight is given twice"),
        ({"rows": rows, "ids": np.array([1.0, 2])}, "ids must be integers"),
        ({"rows": rows, "ids": np.array([1, 2, 3])}, r"rows are float32 .*give floats of shape \(3, 64\)"),
        ({"rows": rows}, "say by ids which rows of e.weight they are"),
        ({"rows": rows, "ids": np.array([1, 2]), "dtype": "int8"}, "dtype='int8' of an overlay; choose one of float32"),
        ({"rows": np.nan * rows, "ids": np.array([1, 2])}, "row 1 is not finite in float32; did the run diverge"),
        ({"rows": 1e30 * rows, "ids": np.array([1, 2]), "dtype": "float16"}, "row 1 is not finite in float16"),
        ({"rows": 1e9 * rows, "ids": np.array([1, 2])}, "beyond 448 times the table's one scale.*or an overlay as"),
        ({"rows": lambda ids: rows}, r"read must return floats of shape \(70, 64\)"),
    ):
        with pytest.raises(ValueError, match=message):
            write_overlay(out, like=table, **arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]  # what failed leaves nothing
    write_overlay(out, rows, ids=np.array([1, 2]), like=table)
    with pytest.raises(OutputError, match="edit exists"):
        write_overlay(out, rows, ids=np.array([1, 2]), like=table)
    edited = StoredTable(Tensors(tmp_path / "base"), name, overlays=[out])
    with pytest.raises(OutputError, match="is an input, which would be lost"):
        write_overlay(out, rows, ids=np.array([1, 2]), like=edited)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
def test_a_delta_of_rows_is_that_of_the_run(tmp_path, dtype):
    config = NGramConfig(rows=400, dim=8, sizes=(2,), heads=2)
    model = made(config)
    optimizer = jrec.nn.SparseOptimizer(model, dense=optax.set_to_zero(), embedding=jrec.ops.SGD(learning_rate=0.1))
    ids, rows = np.array([7, 300, 2]), np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    with jrec.distribute(model, optimizer) as run:
        run.export(tmp_path / "served", dtype=dtype)
        run.set_rows("ngram", ids, rows)
        run.export(tmp_path / "by_run", since=[tmp_path / "served"])
        columns = {"ngram": np.random.default_rng(1).choice(ids, (4, 12 * config.slots))}
    jrec.serving.write_delta(tmp_path / "delta", {"ngram": (ids, rows)}, since=[tmp_path / "served"])
    assert load_manifest(tmp_path / "delta") == load_manifest(tmp_path / "by_run")  # checksums of all files among it
    one, two = (jrec.serving.load(tmp_path / "served", tmp_path / name) for name in ("delta", "by_run"))
    np.testing.assert_array_equal(one.logits(columns), two.logits(columns))
    # A further one, of none of the rows, and one that does not follow.
    jrec.serving.write_delta(tmp_path / "none", {}, since=[tmp_path / "served", tmp_path / "delta"])
    one.apply(tmp_path / "none")
    np.testing.assert_array_equal(one.logits(columns), two.logits(columns))
    with pytest.raises(jrec.serving.ExportError, match="is what was taken last"):
        one.apply(tmp_path / "none")
    with pytest.raises(jrec.serving.ExportError, match="does not come right before it"):
        one.apply(tmp_path / "delta")
    two.apply(tmp_path / "none")


def test_bad_deltas_of_rows_are_refused(tmp_path):
    config = NGramConfig(rows=400, dim=8, sizes=(2,), heads=2)
    model = made(config)
    optimizer = jrec.nn.SparseOptimizer(model, dense=optax.set_to_zero(), embedding=jrec.ops.SGD(learning_rate=0.1))
    with jrec.distribute(model, optimizer) as run:
        run.export(tmp_path / "served", dtype="float16")
    rows, since = np.ones((2, 8), np.float32), [tmp_path / "served"]
    for ids, values, message in (
        ([1, 400], rows, "table 'ngram' has no row 400; its rows are 0 to 399"),
        ([1, 1], rows, "row 1 of table 'ngram' is given twice"),
        ([1.5, 2], rows, "give integers of one axis"),
        ([1, 2], rows[:, :4], r"give floats of shape \(2, 8\)"),
        ([1, 2], 1e9 * rows, "row 1 of table 'ngram' is not finite in float16"),
    ):
        with pytest.raises(jrec.serving.ExportError, match=message):
            jrec.serving.write_delta(tmp_path / "delta", {"ngram": (np.array(ids), values)}, since=since)
    with pytest.raises(jrec.serving.ExportError, match="has no table 'n'; its tables are ngram"):
        jrec.serving.write_delta(tmp_path / "delta", {"n": (np.array([1, 2]), rows)}, since=tmp_path / "served")
    with pytest.raises(jrec.serving.ExportError, match="since is empty"):
        jrec.serving.write_delta(tmp_path / "delta", {}, since=[])
    with pytest.raises(jrec.serving.ExportError, match=r"is no export: it has no manifest\.json; `jrec export"):
        jrec.serving.load(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["served"]


def test_a_delta_of_rows_follows_one_of_every_kind_of_table(tmp_path):
    """Tables that grow, tensor-train cores with cached rows, and a table of rows and cores, quantized."""
    folder = made_exports(tmp_path, deltas=("delta1",))
    since = [folder / "whole", folder / "delta1"]
    model, by_run = (jrec.serving.load(since[0], since[1:], batch_sizes=SIZES) for _ in range(2))
    tables = by_run._loaded.tables
    rows = {name: tables.rows_between(name, 0, count) for name, count in tables.rows.items()}
    first = next(part for part in model.manifest.tables["item"] if not part.cores)
    cores = next(part for part in model.manifest.tables["item"] if part.cores)
    edits = {"item": (np.array([first.rows - 1, 2]), np.ones((2, first.dim), np.float32))}
    jrec.serving.write_delta(folder / "edit", edits, since=since)
    model.apply(folder / "edit")
    rows["item"][edits["item"][0]] = 1
    for name, wanted in rows.items():
        np.testing.assert_array_equal(model._loaded.tables.rows_between(name, 0, len(wanted)), wanted)
    jrec.serving.write_delta(folder / "again", edits, since=[*since, folder / "edit"])
    model.apply(folder / "again")
    edits = {"item": (np.array([cores.first_row]), np.ones((1, first.dim), np.float32))}
    with pytest.raises(jrec.serving.ExportError, match=r"row \d+ of table 'item' is in tensor-train cores, which all"):
        jrec.serving.write_delta(folder / "cores", edits, since=since)
