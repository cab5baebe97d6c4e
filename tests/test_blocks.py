"""Shards of columnar blocks: what is written is read again, damage is named, an aborted file leaves nothing."""

import concurrent.futures
import pickle

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest

from jrec.data.blocks import ListColumn, ShardReader, ShardWriter, id_dtype, shard_file
from jrec.data.schema import DatasetError
from jrec.outputs import NewFile


def make_columns(rng, n):
    lengths = rng.integers(0, 5, n)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return {
        "label": rng.integers(0, 2, n).astype(np.float32),
        "x": rng.random(n, np.float32),
        "a": rng.integers(0, 200, n).astype(np.uint8),
        "b": rng.integers(0, 2**32, n, dtype=np.uint32),
        "m": ListColumn(offsets, rng.integers(0, 1000, offsets[-1]).astype(np.uint16)),
        "m:weight": ListColumn(offsets, rng.random(offsets[-1], np.float32)),
    }


def cut(column, start, stop):
    if isinstance(column, ListColumn):
        offsets = column.offsets[start : stop + 1]
        return ListColumn(offsets - offsets[0], column.values[offsets[0] : offsets[-1]])
    return column[start:stop]


def assert_same(found, expected):
    assert list(found) == list(expected)
    for name, column in expected.items():
        if isinstance(column, ListColumn):
            np.testing.assert_array_equal(found[name].offsets, column.offsets)
            found_values, values = found[name].values, column.values
        else:
            found_values, values = found[name], column
        assert found_values.dtype == values.dtype
        np.testing.assert_array_equal(found_values, values)


@hypothesis.given(
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=6),
    block_size=st.integers(1, 40),
    seed=st.integers(0, 99),
    compress_columns=st.booleans(),
)
@hypothesis.settings(max_examples=60)
def test_blocks_hold_what_was_written_however_it_was_cut(tmp_path_factory, sizes, block_size, seed, compress_columns):
    folder = tmp_path_factory.mktemp("blocks")
    n = sum(sizes)
    columns = make_columns(np.random.default_rng(seed), n)
    with ShardWriter(folder / "s", block_size, compress_columns=compress_columns) as writer:
        start = 0
        for size in sizes:
            writer.write({k: cut(c, start, start + size) for k, c in columns.items()})
            start += size
            assert writer.examples == start
    shard = writer.shard
    assert shard is not None
    assert (shard.file, shard.examples, shard.blocks) == ("s", n, -(-n // block_size))
    assert shard.bytes == (folder / "s").stat().st_size
    reader = ShardReader(folder, shard)
    for i in range(len(reader)):
        start, stop = i * block_size, min((i + 1) * block_size, n)
        assert_same(reader.read(i), {k: cut(c, start, stop) for k, c in columns.items()})
    assert [p.name for p in folder.iterdir()] == ["s"]


def test_arrow_columns_are_accepted(tmp_path):
    lists = [[1, 2], [], [3]]
    with ShardWriter(tmp_path / "s", 2) as writer:
        writer.write(
            {
                "plain": pa.array([1, 2, 3], pa.uint8()),
                "chunked": pa.chunked_array([pa.array([1.0], pa.float32()), pa.array([2.0, 3.0], pa.float32())]),
                "large": pa.array(lists, pa.large_list(pa.uint32())),
                "sliced": pa.array([[9, 9], *lists], pa.list_(pa.uint16())).slice(1),
                "fixed": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.uint8(), 2)),
            }
        )
    reader = ShardReader(tmp_path, writer.close())
    found = reader.read(0)
    np.testing.assert_array_equal(found["large"].offsets, [0, 2, 2])
    np.testing.assert_array_equal(found["sliced"].values, [1, 2])
    np.testing.assert_array_equal(found["fixed"].values, [1, 2, 3, 4])
    np.testing.assert_array_equal(reader.read(1)["sliced"].values, [3])
    np.testing.assert_array_equal(reader.read(1)["chunked"], np.float32([3]))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"a": np.zeros(2), "b": np.zeros(3)}, "'a' is double"),
        ({"a": np.zeros(2, np.uint8), "b": np.zeros(3, np.uint8)}, "equally long, but have a: 2, b: 3"),
        ({"a": np.zeros((2, 2), np.uint8)}, r"'a' has shape \(2, 2\)"),
        ({"a": pa.array([1, None], pa.uint8())}, "'a' has nulls"),
        ({"a": pa.array([[1, None]], pa.list_(pa.uint8()))}, "'a' has nulls"),
        ({}, "no columns"),
    ],
)
def test_bad_columns_are_refused(tmp_path, columns, message):
    with pytest.raises(ValueError, match=message), ShardWriter(tmp_path / "s", 4) as writer:
        writer.write(columns)
    assert not list(tmp_path.iterdir())


def test_changed_columns_are_refused(tmp_path):
    writer = ShardWriter(tmp_path / "s", 4)
    writer.write({"a": np.zeros(1, np.uint8)})
    with pytest.raises(ValueError, match=r"from \(a: uint8\) to \(a: uint16\)"):
        writer.write({"a": np.zeros(1, np.uint16)})
    writer.abort()


def test_abort_leaves_an_existing_file_alone(tmp_path):
    (tmp_path / "s").write_bytes(b"precious")
    writer = ShardWriter(tmp_path / "s", 4)
    writer.write({"a": np.zeros(9, np.uint8)})
    writer.abort()
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("s", b"precious")]
    with pytest.raises(ValueError, match="aborted"):
        writer.close()
    with pytest.raises(ValueError, match="closed"):
        writer.write({"a": np.zeros(9, np.uint8)})


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    class FullDisk(NewFile):
        def __init__(self, path):
            super().__init__(path)
            self.partial.unlink()
            self.partial.symlink_to("/dev/full")

    monkeypatch.setattr("jrec.data.blocks.NewFile", FullDisk)
    columns = {"a": np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32)}
    with (
        pytest.raises(DatasetError, match=r"cannot write .*/s: .*No space left"),
        ShardWriter(tmp_path / "s", 1000) as writer,
    ):
        writer.write(columns)
    assert not (tmp_path / "s").exists()


@pytest.fixture
def shard(tmp_path):
    columns = {"a": np.random.default_rng(0).integers(0, 2**32, 40_000, dtype=np.uint32)}
    with ShardWriter(tmp_path / "s", 1000) as writer:
        writer.write(columns)
    return tmp_path, writer.shard, columns


def test_one_reader_serves_many_threads_and_survives_pickling(shard):
    folder, description, columns = shard
    reader = pickle.loads(pickle.dumps(ShardReader(folder, description)))
    order = np.random.default_rng(1).integers(0, 40, 400)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for i, block in zip(order, pool.map(reader.read, order.tolist()), strict=True):
            np.testing.assert_array_equal(block["a"], columns["a"][i * 1000 : (i + 1) * 1000])


def test_damage_names_file_and_block(shard):
    folder, description, columns = shard
    content = bytearray((folder / "s").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "s").write_bytes(content)
    reader, errors = ShardReader(folder, description), {}
    for i in range(len(reader)):
        try:
            np.testing.assert_array_equal(reader.read(i)["a"], columns["a"][i * 1000 : (i + 1) * 1000])
        except DatasetError as error:
            errors[i] = str(error)
    [(block, message)] = errors.items()
    assert f"s, block {block} of 40 cannot be read" in message
    assert "prepare" in message


@pytest.mark.parametrize("size", [0, 1000, 100_000])
def test_truncation_is_named(shard, size):
    folder, description, _ = shard
    (folder / "s").write_bytes((folder / "s").read_bytes()[:size])
    with pytest.raises(DatasetError, match=f"has {size:,} bytes where the schema says"):
        ShardReader(folder, description).read(0)
    (folder / "s").unlink()
    with pytest.raises(DatasetError, match="is missing"):
        ShardReader(folder, description).read(0)


def test_blocks_out_of_range(shard):
    folder, description, _ = shard
    for block in (-1, 40):
        with pytest.raises(IndexError, match="blocks 0 to 39"):
            ShardReader(folder, description).read(block)


def test_names_and_types():
    assert shard_file("train", 3, 12) == "train-00003-of-00012.array_record"
    found = [str(id_dtype(rows)) for rows in (1, 256, 257, 65536, 65537, 2**32)]
    assert found == ["uint8", "uint8", "uint16", "uint16", "uint32", "uint32"]
