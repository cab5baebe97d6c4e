"""Tables in safetensors files, by an independent reader: what is read, what is written, and what is refused."""

import json
import struct

import jax
import ml_dtypes
import numpy as np
import optax
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from table_file_cases import Model, batches, fp8_table, loss_of, plain_tensors, rows_of_bytes

import jrec
from jrec.errors import CheckpointError, OutputError
from jrec.nn import NGramConfig, NGramHashing
from jrec.table_files import StoredTable, TableFormat, Tensors, dequantized, quantized, write_table, write_tensors

ARRAYS = {
    "a.f32": np.arange(12, dtype=np.float32).reshape(3, 4),
    "a.bf16": np.arange(5).astype(ml_dtypes.bfloat16).reshape(5, 1),
    "b.i8": np.arange(-3, 4, dtype=np.int8),
    "b.f64": np.linspace(0, 1, 6).reshape(1, 2, 3),
    "b.empty": np.zeros((0, 3), np.float16),
}


@pytest.mark.parametrize("shard_bytes", [1, 60, 10**9])
def test_tensors_come_back(tmp_path, shard_bytes):
    write_tensors(tmp_path / "out", ARRAYS, shard_bytes=shard_bytes)
    tensors = Tensors(tmp_path / "out")
    assert len(tensors) == len(ARRAYS)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert [path.name for path in files] == [
        f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)
    ]
    assert len(files) == {1: 5, 60: 2, 10**9: 1}[shard_bytes]
    by_package = {}
    for path in files:
        by_package |= safetensors.numpy.load_file(path)
        assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0
    for name, array in ARRAYS.items():
        assert isinstance(tensors[name], np.memmap) or not array.size
        assert tensors[name].dtype == array.dtype == by_package[name].dtype
        np.testing.assert_array_equal(tensors[name], array)
        np.testing.assert_array_equal(by_package[name], array)
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if not path.name.startswith("model-")) == [
        "model.safetensors.index.json"
    ]


def test_files_of_the_package_are_read(tmp_path):
    safetensors.numpy.save_file(ARRAYS, tmp_path / "a.safetensors", {"format": "pt"})
    for place in (tmp_path, tmp_path / "a.safetensors"):
        tensors = Tensors(place)
        assert set(tensors) == set(ARRAYS)
        for name, array in ARRAYS.items():
            np.testing.assert_array_equal(tensors[name], array)


def test_only_what_is_asked_for_is_read(tmp_path):
    """A table of 40 GB, of zeros but for one row, in a file that takes some kilobytes of the disk."""
    rows, dim = 160_000_000, 256
    header = json.dumps({"t.weight": {"dtype": "I8", "shape": [rows, dim], "data_offsets": [0, rows * dim]}}).encode()
    with (tmp_path / "big.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + rows * dim)
        file.seek(8 + len(header) + 150_000_000 * dim)
        file.write(bytes([5]) * dim)
    index = {"metadata": {}, "weight_map": {"t.weight": "big.safetensors", "t.scale": "x", "other": "not_there"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    write_tensors(tmp_path / "scales", {"t.scale": np.full((1, 1), 0.5, np.float32)})
    (tmp_path / "scales" / "model-00001-of-00001.safetensors").rename(tmp_path / "x")
    table = StoredTable(Tensors(tmp_path), "t.weight")
    assert (table.rows, table.dim) == (rows, dim)
    np.testing.assert_array_equal(table.read([rows - 1, 150_000_000]), [[0] * dim, [2.5] * dim])


def test_rows_of_deepseek_are_read(tmp_path):
    values, scales = fp8_table()
    names = "layers.1.engram.embed.weight", "layers.1.engram.embed.scale"
    write_tensors(tmp_path / "out", dict(zip(names, (values, scales), strict=True)))
    stored = plain_tensors(tmp_path / "out")
    wanted = rows_of_bytes(stored[names[0]], stored[names[1]], 32)
    table = StoredTable(Tensors(tmp_path / "out"), names[0])
    ids = np.array([49, 0, 7, 7])
    np.testing.assert_array_equal(table.read(ids), wanted[ids])
    assert table.format == TableFormat(
        name=names[0], dtype="float8_e4m3fn", scale=names[1], scale_dtype="float8_e8m0fnu", block=(1, 32)
    )
    chunks = list(table.chunks(20))
    np.testing.assert_array_equal(np.concatenate([rows for _, rows in chunks]), wanted)
    assert [ids.size for ids, _ in chunks] == [20, 20, 10]
    as_bytes = {names[0]: values, names[1]: scales.view(np.uint8)}  # some files have the exponents as numbers
    np.testing.assert_array_equal(StoredTable(as_bytes, names[0]).read(ids), wanted[ids])


@pytest.mark.parametrize("scaled", ["no", "all", "pieces"])
def test_rows_of_qwen_are_read(tmp_path, scaled):
    """Numbered pieces, of bfloat16, or of FP8 with one scale for all of them or each with one for a row."""
    rng, name = np.random.default_rng(0), "ple.ngram_embedding.shard_{}.weight"
    wanted = rng.integers(-15, 16, (23, 8)).astype(np.float32)
    dtype = ml_dtypes.bfloat16 if scaled == "no" else ml_dtypes.float8_e4m3fn
    tensors = {name.replace("{}", str(n)): wanted[2 * n : 2 * n + 2].astype(dtype) for n in range(12)}
    if scaled == "all":
        tensors["ple.ngram_embedding.weight_scale"] = np.array([0.25], ml_dtypes.bfloat16)
        wanted = wanted / 4
    elif scaled == "pieces":
        factors = rng.integers(1, 9, (23, 1)).astype(np.float32)
        for n in range(12):
            tensors[f"ple.ngram_embedding.shard_{n}.weight_scale"] = factors[2 * n : 2 * n + 2]
        wanted = wanted * factors
    write_tensors(tmp_path / "out", tensors, shard_bytes=50)
    table = StoredTable(Tensors(tmp_path / "out"), name)
    ids = rng.permutation(23)
    np.testing.assert_array_equal(table.read(ids).astype(np.float32), wanted[ids])
    assert table.dtype == (np.float32 if scaled != "no" else ml_dtypes.bfloat16)
    write_table(tmp_path / "again", table.read, like=table, shard_bytes=50)
    one, two = plain_tensors(tmp_path / "out"), plain_tensors(tmp_path / "again")
    assert one.keys() == two.keys()
    assert all((one[name] == two[name]).all() and one[name].shape == two[name].shape for name in one)
    if scaled == "all":
        changed = wanted * np.where(np.arange(23) == 7, 29.0, 1.0)[:, None].astype(np.float32)
        write_table(tmp_path / "changed", changed.__getitem__, like=table)
        again = StoredTable(Tensors(tmp_path / "changed"), name)
        np.testing.assert_allclose(again.read(range(23)), changed, rtol=1 / 16)
        np.testing.assert_array_equal(again.read([6, 8]), wanted[[6, 8]])
        changed[7] *= 2
        with pytest.raises(ValueError, match=r"row 7 has the value .*, beyond 448 times the table's one scale, 0.25"):
            write_table(tmp_path / "changed again", changed.__getitem__, like=table)


@settings(max_examples=40)
@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    block=st.sampled_from([(1, 32), (32, 32), (1, 1), (5, 7), (128, 128)]),
    dtype=st.sampled_from(["float8_e4m3fn", "int8"]),
    seed=st.integers(0, 99),
)
def test_rows_in_8_bits(shape, block, dtype, seed):
    """Each block on its own, and as near as the format allows."""
    rng = np.random.default_rng(seed)
    rows = (rng.normal(size=shape) * 10.0 ** rng.integers(-6, 6, (shape[0], 1))).astype(np.float32)
    rows[rng.random(shape) < 0.1] = 0
    values, scales = quantized(rows, dtype, block)
    assert values.shape == shape
    assert scales.shape == tuple(-(-n // k) for n, k in zip(shape, block, strict=True))
    for i, j in np.ndindex(*shape):
        scale = float(scales[i // block[0], j // block[1]])
        piece = np.abs(rows[i // block[0] * block[0] :][: block[0], j // block[1] * block[1] :][:, : block[1]])
        found = float(values[i, j]) * scale
        if dtype == "int8":
            assert abs(found - rows[i, j]) <= 0.5001 * scale
            assert scale == np.float32(piece.max() / np.float32(127)) or piece.max() == 0
        else:
            assert abs(found - rows[i, j]) <= max(abs(rows[i, j]) / 16, 2.0**-10 * scale)
            assert np.log2(scale) % 1 == 0
            assert piece.max() == 0 or 224 < piece.max() / scale <= 448
    np.testing.assert_array_equal(
        dequantized(values, scales, block),
        values.astype(np.float32)
        * np.repeat(np.repeat(scales.astype(np.float32), block[0], 0), block[1], 1)[: shape[0], : shape[1]],
    )


def test_extreme_rows_in_8_bits():
    least = np.finfo(np.float32).smallest_subnormal
    for value in (least, 3e38, 448.0, 449.0, 2.0**-120, 0.0):
        values, scales = quantized(np.array([[value, -value]], np.float32), "float8_e4m3fn", (1, 2))
        np.testing.assert_allclose(
            dequantized(values, scales, (1, 2))[0, 0], np.float32(value), rtol=1 / 16, atol=2e-39
        )
    for bad in (np.nan, np.inf):
        with pytest.raises(ValueError, match="row 1 of the rows to write is not finite"):
            quantized(np.array([[1.0], [bad]]), "int8", (1, 1))
    with pytest.raises(ValueError, match="choose 'float8_e4m3fn' or 'int8'"):
        quantized(np.zeros((1, 1)), "int4", (1, 1))


# Written back.


@pytest.mark.parametrize("kept", ["float32", "bfloat16"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "fp8", "fp8 uint8", "fp8 squares", "int8", "int8 pieces"])
def test_unchanged_rows_keep_their_bytes(tmp_path, stored, kept):
    """In whatever dtype the run had them; the others are as near as the format allows."""
    rng = np.random.default_rng(0)
    name, scale, rows = "e.weight", "e.scale", rng.normal(size=(70, 64)).astype(np.float32)
    if stored == "fp8":
        values, scales = fp8_table(70)
    elif stored == "fp8 uint8":
        values, scales = fp8_table(70)[0], fp8_table(70)[1].view(np.uint8)
    elif stored == "fp8 squares":
        values, scales = quantized(rows, "float8_e4m3fn", (32, 32))
    elif stored.startswith("int8"):
        values, scales = quantized(rows, "int8", (1, 64))
        scales *= np.float32(1.37)  # greater than the rows need
    else:
        values, scales = rows.astype(getattr(ml_dtypes, stored, stored)), None
    tensors = {name: values} if scales is None else {name: values, scale: scales}
    if stored == "int8 pieces":
        name = "e.shard_{}.weight"
        tensors = {f"e.shard_{n}.weight": values[30 * n : 30 * n + 30] for n in range(3)}
        tensors |= {f"e.shard_{n}.scale": scales[30 * n : 30 * n + 30] for n in range(3)}
    write_tensors(tmp_path / "old", tensors)
    table = StoredTable(Tensors(tmp_path / "old"), name)
    run = table.read(np.arange(70)).astype(getattr(ml_dtypes, kept, kept))
    touched = np.array([3, 40, 69])
    run[touched] = (run[touched].astype(np.float32) * 1.5 + 0.01).astype(run.dtype)
    write_table(tmp_path / "new", run.__getitem__, like=table, chunk_rows=33)
    old, new = plain_tensors(tmp_path / "old"), plain_tensors(tmp_path / "new")
    assert old.keys() == new.keys()
    again = StoredTable(Tensors(tmp_path / "new"), name)
    if stored == "fp8 squares":
        touched = np.concatenate([np.arange(70)])  # every block has a touched row
    untouched = np.setdiff1d(np.arange(70), touched)
    if stored != "int8 pieces":
        for tensor in old:
            assert (old[tensor].dtype, old[tensor].shape) == (new[tensor].dtype, new[tensor].shape)
        if stored != "fp8 squares":
            assert all((old[tensor][untouched] == new[tensor][untouched]).all() for tensor in old)
    else:
        for n in range(3):
            same = np.isin(np.arange(30 * n, min(30 * n + 30, 70)), untouched)
            for tensor in (f"e.shard_{n}.weight", f"e.shard_{n}.scale"):
                assert (old[tensor][same] == new[tensor][same]).all()
    np.testing.assert_array_equal(again.read(untouched), table.read(untouched))
    found, wanted = again.read(touched).astype(np.float32), run[touched].astype(np.float32)
    np.testing.assert_allclose(found, wanted, rtol=1 / 16, atol=np.abs(wanted).max() / 100)


def test_blocks_of_rows_without_a_change_keep_their_bytes(tmp_path):
    values, scales = quantized(np.random.default_rng(0).normal(size=(96, 32)), "float8_e4m3fn", (32, 32))
    write_tensors(tmp_path / "old", {"e.weight": values, "e.weight_scale_inv": scales.astype(np.float32) * 2})
    table = StoredTable(Tensors(tmp_path / "old"), "e.weight")
    rows = table.read(np.arange(96))
    rows[40] *= 3
    write_table(tmp_path / "new", rows.__getitem__, like=table)
    old, new = plain_tensors(tmp_path / "old"), plain_tensors(tmp_path / "new")
    same = np.r_[0:32, 64:96]
    np.testing.assert_array_equal(new["e.weight"][same], old["e.weight"][same])
    np.testing.assert_array_equal(new["e.weight_scale_inv"][[0, 2]], old["e.weight_scale_inv"][[0, 2]])
    assert new["e.weight_scale_inv"].dtype == np.float32
    assert (new["e.weight"][40] != old["e.weight"][40]).any()


@pytest.mark.parametrize("scale_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
def test_one_scale_is_that_of_the_greatest_value(tmp_path, dtype, scale_dtype):
    rows = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)
    layout = TableFormat(
        name="t.{}.weight", dtype=dtype, piece_rows=16, scale="t.weight_scale", scale_dtype=scale_dtype, block=None
    )
    write_table(tmp_path / "out", rows.__getitem__, format=layout, rows=40, dim=6, chunk_rows=7)
    table = StoredTable(Tensors(tmp_path / "out"), layout.name)
    assert table.format == layout
    greatest = 448 if dtype == "float8_e4m3fn" else 127
    assert 1 <= table.single_scale * greatest / np.abs(rows).max() < 1.02
    atol = table.single_scale * (2.0**-9 if greatest == 448 else 0.501)
    np.testing.assert_allclose(table.read(range(40)), rows, rtol=1 / 16 if greatest == 448 else 0, atol=atol)


def test_a_table_in_pieces_is_written_from_rows(tmp_path):
    rows = np.random.default_rng(0).normal(size=(11, 6)).astype(np.float32)
    layout = TableFormat(name="t.shard_{}.weight", dtype="float32", piece_rows=4)
    write_table(tmp_path / "out", rows.__getitem__, format=layout, rows=11, dim=6, chunk_rows=3)
    tensors = plain_tensors(tmp_path / "out")
    pieces = [tensors[f"t.shard_{n}.weight"] for n in range(3)]
    assert [len(piece) for piece in pieces] == [4, 4, 3]
    np.testing.assert_array_equal(np.concatenate(pieces), rows)
    assert StoredTable(Tensors(tmp_path / "out"), layout.name).format == layout


@pytest.mark.parametrize("place", ["device", "host", "mesh"])
def test_a_published_table_is_read_trained_and_written(tmp_path, place):
    """100 steps of a table as DeepSeek-V4.1 publishes it; a row that none of them touched keeps its bits."""
    hashing = NGramHashing(scheme="deepseek-v4.1", vocabulary=20, head_rows=(3000, 3000), heads=2, pad_id=0)
    config = NGramConfig.of(hashing, dim=32)
    values, _ = fp8_table(hashing.rows, 32)
    scales = np.full((hashing.rows, 1), 120, np.uint8).view(ml_dtypes.float8_e8m0fnu)
    names = "layers.1.engram.embed.weight", "layers.1.engram.embed.scale"
    write_tensors(tmp_path / "published", dict(zip(names, (values, scales), strict=True)))
    table = StoredTable(Tensors(tmp_path / "published"), names[0])
    model = Model(config, "host" if place == "host" else "sharded")
    optimizer = jrec.nn.SparseOptimizer(model, dense=optax.adagrad(0.1), embedding=jrec.ops.Adagrad(learning_rate=0.05))
    mesh = jax.make_mesh((2,), ("d",), devices=jax.devices()[:2]) if place == "mesh" else None
    touched = np.zeros(hashing.rows, bool)
    with jrec.distribute(model, optimizer, mesh=mesh) as run:
        for ids, rows in table.chunks(1000):
            run.set_rows("ngram", ids, rows)
        step = run.compile(loss=loss_of)
        losses = [float(step(batch)[0]) for batch in run.feed(batches(config, touched), label=None, extras=["next"])]
        trained = run.table("ngram")
        write_table(tmp_path / "trained", lambda ids: run.rows("ngram", ids), like=table, chunk_rows=1000)
    assert np.mean(losses[-10:]) < 0.75 * losses[0]
    old, new = plain_tensors(tmp_path / "published"), plain_tensors(tmp_path / "trained")
    assert 100 < touched.sum() < hashing.rows - 100
    for name in names:
        np.testing.assert_array_equal(new[name][~touched], old[name][~touched])
    assert (new[names[0]][touched] != old[names[0]][touched]).any(axis=1).mean() > 0.9
    found = rows_of_bytes(new[names[0]], new[names[1]], 32)
    np.testing.assert_allclose(found, trained, rtol=1 / 16, atol=np.abs(trained).max() * 2**-14)


# Refused.


def refused(path, message, name="a.weight", **options):
    with pytest.raises(CheckpointError, match=message) as caught:
        StoredTable(Tensors(path), name, **options)
    return str(caught.value)


def test_damaged_files_are_refused(tmp_path):
    path, data = tmp_path / "a.safetensors", bytes(range(24))

    def file(*tensors, content=data, length=None):
        header = json.dumps(
            {name: {"dtype": dtype, "shape": shape, "data_offsets": offsets} for name, dtype, shape, offsets in tensors}
        ).encode()
        path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + content)
        return path

    whole = ("a.weight", "F32", [2, 3], [0, 24])
    assert StoredTable(Tensors(file(whole)), "a.weight").rows == 2
    cases = [
        ((whole,), {"length": 1 << 62}, "its header has"),
        ((whole,), {"content": data[:-1]}, "tensor 'a.weight' is cut off"),
        ((whole,), {"content": data + b"x"}, "1 bytes at its end belong to no tensor"),
        ((("a.weight", "F32", [1, 3], [0, 12]), ("b", "F32", [4], [8, 24])), {}, "'b' is cut off, or does not begin"),
        ((("a.weight", "F4", [2, 3], [0, 24]),), {}, "tensor 'a.weight' is of dtype 'F4'; known are F64, F32"),
        ((("a.weight", "F32", [2, 4], [0, 24]),), {}, r"of F32 and shape \(2, 4\) has 24 bytes"),
        ((("a.weight", "F32", [-2, -3], [0, 24]),), {}, "header is damaged"),
    ]
    for tensors, options, message in cases:
        assert str(path) in refused(file(*tensors, **options), message)
    for header in (b"{", b"[]", b"1", b'{"a": 1, "a": 2}', b'{"a": 1}', b'{"\xff": 1}', b"[" * 100_000):
        path.write_bytes(struct.pack("<Q", len(header)) + header)
        refused(path, "no whole safetensors file: its header is damaged|codec")
    for content in (b"", b"\1", b"\0" * 8):
        path.write_bytes(content)
        refused(path, "no whole safetensors file")
    path.unlink()
    refused(path, "a.safetensors is missing")
    refused(tmp_path, "has no .*index.json and no")


def test_bad_indexes_are_refused(tmp_path):
    write_tensors(tmp_path, {"a.weight": np.zeros((2, 3), np.float32)})
    index, shard = tmp_path / "model.safetensors.index.json", tmp_path / "model-00001-of-00001.safetensors"
    for content, message in (
        ("{", "is damaged or no index"),
        ("{}", "is damaged or no index"),
        ('{"weight_map": {"a": 1}}', "is damaged or no index"),
        ('{"weight_map": {"a.weight": "../b.safetensors"}}', "'../b.safetensors' for tensor 'a.weight', which is none"),
        ('{"weight_map": {"a.weight": "b.safetensors"}}', "b.safetensors is missing, which the index names for tensor"),
        (f'{{"weight_map": {{"c.weight": "{shard.name}"}}}}', "no tensor 'a.weight'"),
        (f'{{"weight_map": {{"a.weight": "{shard.name}", "a": "{shard.name}"}}}}', ""),
    ):
        index.write_text(content)
        if message:
            refused(tmp_path, message)
    with pytest.raises(CheckpointError, match="does not hold tensor 'a', which the index says"):
        _ = Tensors(tmp_path)["a"]
    shard.rename(tmp_path / "other.safetensors")
    index.unlink()
    (tmp_path / "second.safetensors").touch()
    refused(tmp_path, "has 2 files .*; give the path of one")


def test_tensors_that_are_no_table_are_refused():
    e4m3, floats = np.zeros((64, 64), ml_dtypes.float8_e4m3fn), np.zeros((4, 3), np.float32)

    def raises(tensors, message, name="a.weight", **options):
        with pytest.raises(CheckpointError, match=message):
            StoredTable(tensors, name, **options)

    raises({"b.weight": floats}, r"no tensor 'a.weight', of table a.weight; some of those there: \['b.weight'\]")
    raises({"a.weight": np.zeros(4, np.float32)}, "is float32.4.; a table has rows of floats")
    raises({"a.weight": np.zeros((4, 3), np.int64)}, "is int64.4, 3.; a table has rows of floats")
    raises({"a.weight": e4m3}, "are float8_e4m3fn, but no scales stand beside them; name the tensor")
    raises({"a.weight": e4m3}, "no tensor 's', the scales of a.weight", scale="s")
    raises({"a.weight": e4m3, "a.scale": np.zeros((64, 2), np.int32)}, "scales are floats, or exponents")
    raises({"a.weight": e4m3, "a.scale": np.zeros((64, 2, 1), np.float32)}, "fit no tensor of shape")
    raises({"a.weight": e4m3, "a.scale": np.zeros((64, 7), np.float32)}, "7 scales for 64 elements .* give block")
    scales = {"a.weight": e4m3, "a.scale": np.zeros((64, 2), np.float32)}
    raises(scales, "has 64 x 4 blocks of 1 rows and 16 elements", block=(1, 16))
    pieces = {"a.0.weight": floats, "a.1.weight": floats[:, :2]}
    raises(pieces, r"tensor a.1.weight is float32\[4, 2\], but a.0.weight float32\[4, 3\]", name="a.{}.weight")
    raises({"a.0.weight": floats, "a.2.weight": floats}, "no tensor 'a.1.weight', of table .* in 2", name="a.{}.weight")
    raises({"b": floats}, "no tensor 'a.0.weight'", name="a.{}.weight")
    table = StoredTable({"a.weight": floats}, "a.weight")
    for bad, message in (([4], "rows 4 to 4 of a.weight, which has 4"), ([-1], "rows -1"), ([0.5], "not by float64")):
        with pytest.raises(ValueError, match=message):
            table.read(bad)
    assert table.read([]).shape == (0, 3)


def test_bad_formats_and_outputs_are_refused(tmp_path):
    scaled = {"name": "a", "dtype": "int8", "scale": "s"}
    for options, message in (
        ({"name": "a", "dtype": "int4"}, "dtype='int4' of a table"),
        ({"name": "a.{}"}, "a table in pieces has"),
        ({"name": "a", "piece_rows": 3}, "a table in pieces has"),
        ({"name": "a.{}", "piece_rows": 0}, "must be whole blocks"),
        ({"name": "a", "dtype": "int8"}, "name the scales of 8 bits, and only them"),
        ({"name": "a", "scale": "s"}, "name the scales of 8 bits, and only them"),
        (scaled | {"scale_dtype": "uint8"}, "scale_dtype='uint8' of dtype='int8'"),
        (scaled | {"block": (0, 3)}, "from 1 to 4,096 rows share a scale"),
        (scaled | {"name": "a{}", "scale": "s{}", "piece_rows": 3, "block": (2, 4)}, "whole blocks of 2 rows"),
    ):
        with pytest.raises(ValueError, match=message):
            TableFormat(**options)
    rows, layout = np.zeros((4, 3), np.float32), TableFormat(name="a.weight")
    with pytest.raises(ValueError, match="give format, rows and dim"):
        write_table(tmp_path / "out", rows.__getitem__, format=layout)
    with pytest.raises(ValueError, match=r"read must return floats of shape \(4, 2\)"):
        write_table(tmp_path / "out", rows.__getitem__, format=layout, rows=4, dim=2)
    assert list(tmp_path.iterdir()) == []  # what failed leaves nothing
    with pytest.raises(ValueError, match="there are no tensors"):
        write_tensors(tmp_path / "out", {})
    with pytest.raises(ValueError, match="tensor 'a' is complex64"):
        write_tensors(tmp_path / "out", {"a": np.zeros(3, np.complex64)})
    write_table(tmp_path / "out", rows.__getitem__, format=layout, rows=4, dim=3)
    table = StoredTable(Tensors(tmp_path / "out"), "a.weight")
    with pytest.raises(OutputError, match=r"holds .*, an input"):
        write_table(tmp_path / "out", rows.__getitem__, like=table)
    with pytest.raises(OutputError, match="holds something else"):
        write_tensors(tmp_path / "out", {"a": rows})


@pytest.mark.parametrize(
    ("block", "taken"), [((1, 5), (1, 4)), ((5, 4), (4, 4)), ((40, 4), None), ((1, 32), None), ((5, 1), (4, 1))]
)
def test_blocks_that_readers_would_take_for_others_are_refused(tmp_path, block, taken):
    rows = np.random.default_rng(0).normal(size=(12, 12)).astype(np.float32)
    layout = TableFormat(name="e.weight", dtype="int8", scale="e.scale", block=block)
    if taken is not None:
        message = rf"the scales are as many as of block=\({taken[0]}, {taken[1]}\), which readers would take it for"
        with pytest.raises(ValueError, match=message):
            write_table(tmp_path / "t", rows.__getitem__, format=layout, rows=12, dim=12)
        assert not (tmp_path / "t").exists()
        return
    write_table(tmp_path / "t", rows.__getitem__, format=layout, rows=12, dim=12)
    read = StoredTable(Tensors(tmp_path / "t"), "e.weight").read(np.arange(12))
    np.testing.assert_allclose(read, rows, atol=np.abs(rows).max() / 254 * 1.01)
