"""The loader: every example once an epoch, the same batches whatever the threads, resuming, sharding, bad input."""

import collections
import concurrent.futures
import dataclasses
import json
import threading
import time

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from jrec.data.blocks import ListColumn, ShardReader, ShardWriter, shard_file
from jrec.data.loader import LoaderConfig, make_loader
from jrec.data.loader_source import BatchSource, SharedCache
from jrec.data.packing_kernels import permutation
from jrec.data.schema import CategoricalFeature, DatasetError, DenseFeature, Schema, Split, Table
from jrec.errors import CheckpointError
from jrec.ops.layout import EmbeddingLayout, FeatureConfig, TableConfig

ROWS = 5000


def write_dataset(folder, shard_examples, block_size, *, splits=("train",)):
    """Examples numbered in label, dense, one-hot and multi-hot columns, so that mixed-up rows show."""
    number, schema_splits = 0, {}
    for split in splits:
        shards = []
        for s, n in enumerate(shard_examples):
            with ShardWriter(folder / shard_file(split, s, len(shard_examples)), block_size) as writer:
                ids = np.arange(number, number + n)
                lengths = ids % 4
                offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
                writer.write(
                    {
                        "label": (ids % 2).astype(np.float32),
                        "x": ids.astype(np.float32),
                        "a": ids.astype(np.uint16),
                        "m": ListColumn(offsets, np.repeat(ids, lengths).astype(np.uint16)),
                        "m:weight": ListColumn(offsets, np.repeat(ids, lengths).astype(np.float32)),
                    }
                )
            shards.append(writer.close())
            number += n
        schema_splits[split] = Split(shards=tuple(shards))
    schema = Schema(
        name="numbered",
        block_size=block_size,
        dense=(DenseFeature(name="x"),),
        categorical=(
            CategoricalFeature(name="a", table="ta", fixed_length=True),
            CategoricalFeature(name="m", table="tm", max_length=3, weighted=True),
        ),
        tables=(Table(name="ta", rows=ROWS, oov_row=7), Table(name="tm", rows=ROWS)),
        splits=schema_splits,
        provenance={},
    )
    schema.save(folder)
    return schema


def make_layout(rows=ROWS, **options):
    multi = {"name": "m", "table": "tm", "max_length": 3, "weighted": True} | options
    tables = [TableConfig(name="ta", rows=rows, dim=4), TableConfig(name="tm", rows=ROWS, dim=8)]
    features = [FeatureConfig(name="a", table="ta", fixed_length=True), FeatureConfig(**multi)]
    return EmbeddingLayout.build(tables, features)


LAYOUT = make_layout()


def numbers(batch):
    """The numbers of a batch's examples, after checking that all columns agree on them."""
    n = int(batch.mask.sum())
    assert batch.mask[:n].all()
    found = batch.dense[:n, 0].astype(int)
    np.testing.assert_array_equal(batch.labels[:n], found % 2)
    one_hot, multi = batch.bags["d4_float32"], batch.bags["d8_float32"]
    assert one_hot.ids[:, 0].tolist() == found.tolist() + [-1] * (len(batch.mask) - n)
    lengths = np.diff(multi.offsets)
    np.testing.assert_array_equal(lengths[:n], found % 4)
    assert not lengths[n:].any()
    end = multi.offsets[-1]
    np.testing.assert_array_equal(multi.ids[:end], np.repeat(found, lengths[:n]))
    np.testing.assert_array_equal(multi.weights[:end], multi.ids[:end])
    return found.tolist()


def same(first, second):
    jax.tree.map(np.testing.assert_array_equal, first, second)


datasets = st.tuples(st.lists(st.integers(0, 70), min_size=1, max_size=4).filter(any), st.integers(1, 20))
configs = st.builds(
    LoaderConfig,
    batch_size=st.integers(1, 40),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**63),
    window_blocks=st.integers(1, 5),
    workers=st.integers(0, 3),
    prefetch=st.integers(1, 4),
)


@hypothesis.given(dataset=datasets, data=st.data())
@hypothesis.settings(max_examples=30)
def test_some_examples_of_an_order(tmp_path_factory, dataset, data):
    folder = tmp_path_factory.mktemp("dataset")
    schema, total = write_dataset(folder, *dataset), sum(dataset[0])
    start = data.draw(st.integers(0, total - 1))
    first = data.draw(st.none() | st.integers(1, total + 5))
    shuffle, processes = data.draw(st.booleans()), data.draw(st.integers(1, 3))

    def read(**order):
        config, seen = LoaderConfig(batch_size=7, window_blocks=2, workers=0, shuffle=shuffle, **order), []
        for p in range(processes):
            options = {"process_index": p, "process_count": processes}
            for batch in make_loader(folder, schema, LAYOUT, "train", config, **options):
                seen += numbers(batch)
        return seen

    some = read(start=start, first=first)
    size = total - start if first is None else min(first, total - start)
    assert len(some) == size
    if shuffle:
        assert len(set(some)) == size
    else:
        assert some == list(range(start, start + size))


def test_an_order_ends_before_the_first_example_asked_for(tmp_path):
    schema = write_dataset(tmp_path, [50], 7)
    with pytest.raises(DatasetError, match="has 50 examples, none from 50 on"):
        make_loader(tmp_path, schema, LAYOUT, "train", LoaderConfig(batch_size=5, start=50))


@pytest.mark.parametrize("cast", ["none", "host"])
@pytest.mark.parametrize("drop", [False, True])
def test_processes_read_one_order_together(tmp_path, cast, drop):
    """Batch by batch the examples of one process that reads all, where each process else has a share of the epoch."""
    schema = write_dataset(tmp_path, [50, 33], 7)

    def loader(size, p, count, **options):
        config = LoaderConfig(
            batch_size=size, shuffle=False, together=True, workers=0, cast=cast, drop_remainder=drop, **options
        )
        return make_loader(tmp_path, schema, LAYOUT, "train", config, process_index=p, process_count=count)

    alone, parts = loader(12, 0, 1), [loader(4, p, 3) for p in range(3)]
    assert {part.total_batches for part in parts} == {alone.total_batches}
    for whole, *pieces in zip(alone, *parts, strict=True):
        assert [number for piece in pieces for number in numbers(piece)] == numbers(whole)
        assert [len(piece.mask) for piece in pieces] == [4, 4, 4]
    # A position holds for another number of processes.
    parts[0].restore(next_state := loader(12, 0, 1).state() | {"position": 3})
    assert numbers(next(parts[0])) == list(range(36, 40))
    with pytest.raises(CheckpointError, match="shuffle"):
        make_loader(tmp_path, schema, LAYOUT, "train", LoaderConfig(batch_size=12)).restore(next_state)


@pytest.mark.parametrize("cast", ["none", "host"])
def test_no_batch_has_memory_that_another_uses(tmp_path, cast):
    schema = write_dataset(tmp_path, [50, 33], 7)

    def batches():
        config = LoaderConfig(batch_size=10, seed=3, workers=2, prefetch=2, cast=cast)
        return make_loader(tmp_path, schema, LAYOUT, "train", config, epochs=2)

    for batch, expected in zip(batches(), list(batches()), strict=True):
        same(batch, expected)
        for leaf in jax.tree.leaves(batch):
            leaf[...] = 1


@hypothesis.given(dataset=datasets, config=configs, processes=st.integers(1, 5), epochs=st.integers(1, 3))
@hypothesis.settings(max_examples=30)
def test_processes_read_every_example_once_an_epoch(tmp_path_factory, dataset, config, processes, epochs):
    folder = tmp_path_factory.mktemp("dataset")
    schema = write_dataset(folder, *dataset)
    total = sum(dataset[0])
    seen = [[] for _ in range(epochs)]
    counts = set()
    for p in range(processes):
        options = {"epochs": epochs, "process_index": p, "process_count": processes}
        with make_loader(folder, schema, LAYOUT, "train", config, **options) as loader:
            share = []
            for i, batch in enumerate(loader):
                assert batch.mask.shape == (config.batch_size,)
                share.append(numbers(batch))
                seen[i // loader.batches_per_epoch] += share[-1]
            assert i + 1 == loader.total_batches == loader.position
            counts.add(i + 1)
            sizes = [len(s) for s in share[: loader.batches_per_epoch]]
            assert sum(sizes) in (total // processes, -(-total // processes))
            assert all(size == config.batch_size for size in sizes[:-1] if size) or processes > 1
    assert len(counts) == 1
    for epoch in seen:
        assert sorted(epoch) == list(range(total))
        assert config.shuffle or epoch == list(range(total))


def test_unequal_shares_are_padded_with_whole_batches(tmp_path):
    schema = write_dataset(tmp_path, [5], 4)
    for p, expected in enumerate([[2, 0], [2, 1]]):
        config = LoaderConfig(batch_size=2)
        with make_loader(tmp_path, schema, LAYOUT, "train", config, process_index=p, process_count=2) as loader:
            assert [len(numbers(b)) for b in loader] == expected


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("first", [1, 17, 24, 40])
def test_the_first_examples_alone_are_shared(tmp_path, processes, first):
    schema = write_dataset(tmp_path, [11, 13], 4)
    config = LoaderConfig(batch_size=5, shuffle=False, first=first)
    shares, counts = [], set()
    for p in range(processes):
        with make_loader(tmp_path, schema, LAYOUT, "train", config, process_index=p, process_count=processes) as loader:
            batches = [numbers(b) for b in loader]
        counts.add(len(batches))
        shares += [n for batch in batches for n in batch]
    assert shares == list(range(min(first, 24)))
    assert counts == {-(-min(first, 24) // (5 * processes))}


def test_first_must_be_some():
    with pytest.raises(ValueError, match="first is 0; it must be at least 1"):
        LoaderConfig(batch_size=5, first=0)


@pytest.mark.parametrize("processes", [1, 2])
def test_drop_remainder(tmp_path, processes):
    schema = write_dataset(tmp_path, [101], 8)
    config = LoaderConfig(batch_size=10, drop_remainder=True)
    for p in range(processes):
        with make_loader(tmp_path, schema, LAYOUT, "train", config, process_index=p, process_count=processes) as loader:
            assert [len(numbers(b)) for b in loader] == [10] * (101 // processes // 10)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dataset")
    return folder, write_dataset(folder, [500, 1203, 397], 64, splits=("train", "valid"))


def batches(dataset, **options):
    epochs = options.pop("epochs", 2)
    config = LoaderConfig(**{"batch_size": 50, "seed": 3, "window_blocks": 3} | options)
    with make_loader(*dataset, LAYOUT, "train", config, epochs=epochs) as loader:
        return list(loader)


def test_batches_do_not_depend_on_threads(dataset):
    expected = batches(dataset, workers=0, cast="host")
    for workers in (1, 2, 3, 4):
        for prefetch in (1, 7):
            same(batches(dataset, workers=workers, prefetch=prefetch, cast="host"), expected)
    for other in ({"seed": 4}, {"window_blocks": 2}):
        found = batches(dataset, **other)
        assert any((a.dense != b.dense).any() for a, b in zip(found, expected, strict=True))
    half = len(expected) // 2
    assert (expected[0].dense != expected[half].dense).any(), "epochs have orders of their own"


def test_windows_mix_blocks(dataset):
    first = numbers(batches(dataset, batch_size=192)[0])
    assert len({n // 64 for n in first}) >= 3
    assert (np.diff(first) != 1).mean() > 0.9


def test_the_order_is_fixed_for_ever():
    assert permutation(12, 1, 2, 3).tolist() == [10, 7, 2, 1, 11, 5, 6, 8, 4, 3, 9, 0]
    assert permutation(12, 1, 2, 4).tolist() != permutation(12, 1, 2, 3).tolist()


def test_permutations_are_uniform():
    seen = collections.Counter(tuple(permutation(4, 5, i)) for i in range(24_000))
    assert len(seen) == 24
    assert max(abs(n - 1000) for n in seen.values()) < 5 * 1000**0.5


@hypothesis.given(
    stop=st.integers(0, 100),
    workers=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    cast=st.sampled_from(["none", "host"]),
)
@hypothesis.settings(max_examples=15, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_resuming_anywhere_gives_identical_batches(dataset, stop, workers, cast):
    def loader(workers, epochs=2):
        config = LoaderConfig(batch_size=50, seed=3, window_blocks=3, workers=workers, cast=cast)
        return make_loader(*dataset, LAYOUT, "train", config, epochs=epochs)

    with loader(workers[0]) as first, loader(workers[1], epochs=3) as second:
        expected = [first.batch(i) for i in range(first.total_batches)]
        stop = min(stop, first.total_batches)
        for _ in range(stop):
            next(first)
        state = json.loads(json.dumps(first.state()))
        second.restore(state)
        assert second.position == stop == first.position
        assert second.epoch == stop // first.batches_per_epoch
        same([next(second) for _ in range(first.total_batches - stop)], expected[stop:])
        first.restore(state)
        if stop < first.total_batches:
            same(list(first), expected[stop:])


def test_states_of_other_runs_are_refused(dataset):
    def loader(split="train", epochs=2, process_count=1, **options):
        config = LoaderConfig(**{"batch_size": 50} | options)
        return make_loader(*dataset, LAYOUT, split, config, epochs=epochs, process_count=process_count)

    state = loader().state()
    for other, difference in [
        (loader(batch_size=51), "batch_size=50, but this run has batch_size=51"),
        (loader(seed=1), "seed=0, but this run has seed=1"),
        (loader(split="valid"), "split='train', but this run has split='valid'"),
        (loader(process_count=2), "process_count=1"),
        (loader(shuffle=False), "shuffle=True"),
    ]:
        with pytest.raises(CheckpointError, match=difference):
            other.restore(state)
    for options in (
        {"start": 100},
        {"first": 500},
        {"start": 100, "first": 500},
    ):  # of which a whole epoch says nothing
        with pytest.raises(CheckpointError, match=r"but this run has .*=None"):
            loader().restore(loader(**options).state())
        with pytest.raises(CheckpointError, match=r"saved with .*=None"):
            loader(**options).restore(loader().state())
    with pytest.raises(CheckpointError, match="no loader position of this jrec"):
        loader().restore({"next_index": 3})
    with pytest.raises(CheckpointError, match="outside of this run of 42 batches"):
        loader(epochs=1).restore(state | {"position": 43})


def test_iterating_again_goes_on_or_starts_over(dataset):
    config = LoaderConfig(batch_size=500, shuffle=False)
    with make_loader(*dataset, LAYOUT, "valid", config) as loader:
        assert [b.dense[0, 0] for b in loader] == [2100, 2600, 3100, 3600, 4100]
        assert loader.position == loader.total_batches
        first = next(iter(loader))
        assert first.dense[0, 0] == 2100
        assert [b.dense[0, 0] for b in loader] == [2600, 3100, 3600, 4100]


def test_an_endless_run(dataset):
    config = LoaderConfig(batch_size=1000)
    with make_loader(*dataset, LAYOUT, "train", config, epochs=None) as loader:
        assert loader.total_batches is None
        sizes = [len(numbers(next(loader))) for _ in range(9)]
        assert sizes == [1000, 1000, 100] * 3
        assert loader.epoch == 3


def test_a_window_is_read_while_batches_of_the_one_before_are_made(dataset, monkeypatch):
    loaded, load = [], BatchSource._load

    def noted(self, order, window):
        loaded.append((self, (order.epoch, window)))
        return load(self, order, window)

    def wait_for(loader, *windows):
        def now():  # threads of other tests may still read
            return sorted(window for source, window in loaded if source is loader._source)

        until = time.monotonic() + 20
        while not set(windows) <= set(now()) and time.monotonic() < until:
            time.sleep(0.01)
        for reader in loader._source._readers_ahead:
            reader.join()
        time.sleep(0.05)  # for more that would be read
        assert now() == sorted(windows)

    monkeypatch.setattr(BatchSource, "_load", noted)
    config = LoaderConfig(batch_size=50, window_blocks=20, workers=1)
    with make_loader(*dataset, LAYOUT, "train", config, epochs=2) as loader:
        source = loader._source
        loader.batch(0)
        wait_for(loader, (0, 0))  # nobody asks for more
        source.open()
        source[0]
        wait_for(loader, (0, 0), (0, 1))
        source[loader.batches_per_epoch - 1]
        wait_for(loader, (0, 0), (0, 1), (1, 0))
        source[2 * loader.batches_per_epoch - 1]
        wait_for(loader, (0, 0), (0, 1), (1, 0), (1, 1))
        assert len(numbers(next(loader))) == 50
        loader.close()
        assert not any(reader.is_alive() for reader in source._readers_ahead)
        assert len(numbers(next(loader))) == 50
    with make_loader(*dataset, LAYOUT, "train", dataclasses.replace(config, workers=0)) as loader:
        next(loader)
        wait_for(loader, (0, 0))


def test_windows_are_read_side_by_side_by_several_threads(tmp_path, monkeypatch):
    schema, load, both = write_dataset(tmp_path, [120], 10), BatchSource._load, threading.Barrier(2)

    def load_with_another(self, order, window):
        if self.folder == tmp_path and window in (1, 2):  # those after the first batch's
            both.wait(timeout=20)
        return load(self, order, window)

    monkeypatch.setattr(BatchSource, "_load", load_with_another)
    config = LoaderConfig(batch_size=20, window_blocks=4, workers=4)
    with make_loader(tmp_path, schema, LAYOUT, "train", config) as loader:
        loader._source.open()
        loader.batch(0)
        for reader in loader._source._readers_ahead:
            reader.join()
        assert {(0, 1), (0, 2)} <= set(loader._source._windows._futures)
        assert sorted(i for batch in loader for i in numbers(batch)) == list(range(120))


def test_a_windows_blocks_are_read_side_by_side(tmp_path, monkeypatch):
    schema, read, both, met = write_dataset(tmp_path, [40], 10), ShardReader.read, threading.Barrier(2), []

    def read_with_another(self, block):
        if self.path.parent == tmp_path:  # threads of other tests may still read
            met.append(both.wait(timeout=20))
        return read(self, block)

    monkeypatch.setattr(ShardReader, "read", read_with_another)
    with make_loader(tmp_path, schema, LAYOUT, "train", LoaderConfig(batch_size=40, workers=2)) as loader:
        assert sorted(numbers(loader.batch(0))) == list(range(40))
    assert sorted(met) == [0, 0, 1, 1]


def test_damage_in_the_middle_is_raised_and_can_be_retried(dataset, monkeypatch):
    read, damaged = ShardReader.read, [3]

    def read_some(self, block):
        if block in damaged and "00001-of" in str(self.path):
            raise DatasetError(f"{self.path}, block {block} cannot be read")
        return read(self, block)

    monkeypatch.setattr(ShardReader, "read", read_some)
    with make_loader(*dataset, LAYOUT, "train", LoaderConfig(batch_size=50, shuffle=False, window_blocks=1)) as loader:
        seen, errors = [], []
        while len(errors) < 2:
            try:
                seen.append(numbers(next(loader)))
            except DatasetError as error:
                errors.append(str(error))
        assert errors[0] == errors[1]
        assert errors[0].endswith("train-00001-of-00003.array_record, block 3 cannot be read")
        assert 0 < len(seen) == loader.position < loader.total_batches
        damaged.clear()
        seen.extend(numbers(batch) for batch in loader)
        assert [n for part in seen for n in part] == list(range(2100))


def test_who_waited_for_a_failure_tries_for_itself():
    """What failed may have been mended after the other thread began."""
    cache, begun, mended = SharedCache(2), threading.Event(), threading.Event()

    def fails():
        begun.set()
        mended.wait(10)
        raise DatasetError("damaged")

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first = pool.submit(cache.get, "window", fails)
        assert begun.wait(10)
        second = pool.submit(cache.get, "window", lambda: "whole")
        time.sleep(0.1)  # so that it waits for the first
        mended.set()
        assert second.result(10) == "whole"
        with pytest.raises(DatasetError, match="damaged"):
            first.result(10)
    assert cache.get("window", lambda: "made anew") == "whole"


def rewrite(folder, schema, change):
    """Writes the only shard anew with changed columns, and its size into the schema."""
    shard = schema.splits["train"].shards[0]
    reader = ShardReader(folder, shard)
    blocks = [reader.read(i) for i in range(len(reader))]
    with ShardWriter(folder / shard.file, schema.block_size) as writer:
        for i, block in enumerate(blocks):
            writer.write(change(i, dict(block)))
    return dataclasses.replace(schema, splits={"train": Split(shards=(writer.close(),))})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i, c: c | {"x": np.where(np.arange(64) == 5, np.nan, c["x"]).astype(np.float32)}, "'x' is nan"),
        (
            lambda i, c: c | {"a": np.where(np.arange(64) == 5, 6000, c["a"]).astype(np.uint16)},
            "id 6000 of feature 'a'",
        ),
    ],
)
def test_bad_values_name_file_block_and_example(tmp_path, change, message):
    schema = write_dataset(tmp_path, [640], 64)
    schema = rewrite(tmp_path, schema, lambda i, c: change(i, c) if i == 7 else c)
    for shuffle in (True, False):
        for batch_size in (10, 200):
            config = LoaderConfig(batch_size=batch_size, shuffle=shuffle, window_blocks=2)
            where = r".* in example 5 of block 7 of .*train-00000-of-00001.array_record"
            with (
                make_loader(tmp_path, schema, LAYOUT, "train", config) as loader,
                pytest.raises(DatasetError, match=message + where),
            ):
                list(loader)


def one_hot(folder, change=lambda lists: lists):
    """A dataset of 12 blocks of 16 examples, their numbers in a column of lists of one, or as ``change`` makes them."""
    schema, ids = write_dataset(folder, [192], 16), np.arange(192)
    categorical = (CategoricalFeature(name="a", table="ta"),)

    def block(number, columns):
        lists = [[i] for i in ids[16 * number : 16 * (number + 1)].tolist()]
        lists = change(lists)
        offsets = np.cumsum([0, *map(len, lists)]).astype(np.int32)
        values = np.array([i for one in lists for i in one], np.uint16)
        return {"label": columns["label"], "x": columns["x"], "a": ListColumn(offsets, values)}

    return rewrite(folder, dataclasses.replace(schema, categorical=categorical), block)


@pytest.mark.parametrize("cast", ["none", "host"])
def test_windows_that_are_packed_and_windows_that_are_not(tmp_path, cast):
    """A block without an id in one example makes its window one of lists; some batches are of both kinds."""
    schema = one_hot(tmp_path, lambda lists: [[] if i == [100] else i for i in lists])
    layout = EmbeddingLayout.build([TableConfig(name="ta", rows=ROWS, dim=4)], [FeatureConfig(name="a", table="ta")])
    config = LoaderConfig(batch_size=25, window_blocks=2, cast=cast)
    with make_loader(tmp_path, schema, layout, "train", config) as loader:
        packed = [loader._source._load(loader._source.order(0), w).packed is not None for w in range(6)]
        assert sorted(packed) == [False] + [True] * 5
        batches = list(loader)
    found = np.concatenate([batch.bags["d4_float32"].ids[:, 0] for batch in batches])
    numbers = np.concatenate([batch.dense[:, 0] for batch in batches]).astype(int)
    real = np.concatenate([batch.mask for batch in batches]) == 1
    np.testing.assert_array_equal(found, np.where(real & (numbers != 100), numbers, -1))
    assert sorted(numbers[real].tolist()) == list(range(192))
    if cast == "host":
        for batch in batches:
            cast_of = batch.bags["d4_float32"].cast
            ids = batch.bags["d4_float32"].ids
            np.testing.assert_array_equal(cast_of.rows[: cast_of.num_unique], np.unique(ids[ids >= 0]))


def test_batches_before_a_bad_value_come(tmp_path):
    schema = one_hot(tmp_path, lambda lists: [[6000] if i == [100] else i for i in lists])
    layout = EmbeddingLayout.build([TableConfig(name="ta", rows=ROWS, dim=4)], [FeatureConfig(name="a", table="ta")])
    config = LoaderConfig(batch_size=10, window_blocks=3, shuffle=False, workers=0)
    with make_loader(tmp_path, schema, layout, "train", config) as loader:
        for number in range(10):
            assert next(loader).dense[0, 0] == 10 * number
        with pytest.raises(DatasetError, match="id 6000 of feature 'a' in example 4 of block 6"):
            next(loader)


def test_missing_columns_and_short_blocks(tmp_path):
    schema = write_dataset(tmp_path, [640], 64)
    without = rewrite(tmp_path, schema, lambda i, c: {k: v for k, v in c.items() if k != "x"})
    config = LoaderConfig(batch_size=10)
    with pytest.raises(DatasetError, match=r"block \d of .* has no column x"):
        next(make_loader(tmp_path, without, LAYOUT, "train", config))
    (tmp_path / "short").mkdir()
    schema = write_dataset(tmp_path / "short", [640], 64)
    short = write_dataset(tmp_path / "short", [320], 32).splits["train"].shards[0]
    [shard] = schema.splits["train"].shards
    lying = dataclasses.replace(
        schema, splits={"train": Split(shards=(dataclasses.replace(shard, bytes=short.bytes, digest=short.digest),))}
    )
    with pytest.raises(DatasetError, match="has not the 64 examples"):
        next(make_loader(tmp_path / "short", lying, LAYOUT, "train", config))


def layout_of(*, tables=(("ta", ROWS),), **feature):
    config = {"name": "a", "table": "ta", "fixed_length": True} | feature
    return EmbeddingLayout.build([TableConfig(name=n, rows=r, dim=4) for n, r in tables], [FeatureConfig(**config)])


@pytest.mark.parametrize(
    ("layout", "options", "message"),
    [
        (layout_of(name="b"), {}, "reads feature 'b', but the dataset has a, m"),
        (layout_of(name="m"), {}, "reads table 'ta' in the model, but 'tm' in the dataset"),
        (layout_of(tables=[("ta", 10)]), {}, "'ta' has 10 rows in the model, but 5,000 in the dataset"),
        (layout_of(tables=[("ta", 9999)]), {"on_bad_id": "clip"}, "9,999 rows in the model"),
        (layout_of(tables=[("ta", 5)]), {"on_bad_id": "oov"}, "'ta' of 5 rows has its OOV row at 7"),
        (LAYOUT, {"on_bad_id": "oov"}, "'tm' of 5,000 rows has no OOV row"),
        (make_layout(max_length=2), {}, "up to 3 ids an example in the dataset, but max_length is 2"),
        (make_layout(weighted=False), {}, "'m' is weighted in the dataset, but unweighted in the model"),
        (make_layout(fixed_length=True), {}, r"promises 3 ids of feature 'm' .*dataset has 0 to 3"),
        (layout_of(max_length=2), {}, "promises 2 ids of feature 'a' .*dataset has exactly 1"),
    ],
)
def test_layouts_that_do_not_fit(dataset, layout, options, message):
    with pytest.raises(DatasetError, match=message):
        make_loader(*dataset, layout, "train", LoaderConfig(batch_size=10, **options))


def test_layouts_may_be_smaller_or_roomier(dataset):
    clipped = layout_of(tables=[("ta", 100)])
    with make_loader(*dataset, clipped, "train", LoaderConfig(batch_size=10, on_bad_id="clip")) as loader:
        assert max(int(batch.bags["d4_float32"].ids.max()) for batch in loader) == 99
    with make_loader(*dataset, make_layout(max_length=5), "train", LoaderConfig(batch_size=10)) as loader:
        assert numbers(next(loader))


def test_splits_that_cannot_be_read(tmp_path, dataset):
    with pytest.raises(DatasetError, match="has no 'test' split; it has train, valid"):
        make_loader(*dataset, LAYOUT, "test", LoaderConfig(batch_size=10))
    schema = write_dataset(tmp_path, [0], 8)
    with pytest.raises(DatasetError, match=r"'train' split of .* has no examples"):
        make_loader(tmp_path, None, LAYOUT, "train", LoaderConfig(batch_size=10))
    (tmp_path / "few").mkdir()
    schema = write_dataset(tmp_path / "few", [39], 8)
    config = LoaderConfig(batch_size=20, drop_remainder=True)
    with pytest.raises(DatasetError, match=r"39 examples, less than one full batch for every process \(40\)"):
        make_loader(tmp_path / "few", schema, LAYOUT, "train", config, process_count=2)


def test_truncated_shards_are_found_when_the_schema_is_read(tmp_path):
    schema = write_dataset(tmp_path, [640], 64)
    path = tmp_path / schema.splits["train"].shards[0].file
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DatasetError, match="copy it again or prepare anew"):
        make_loader(tmp_path, None, LAYOUT, "train", LoaderConfig(batch_size=10))
    with pytest.raises(DatasetError, match="where the schema says"):
        next(make_loader(tmp_path, schema, LAYOUT, "train", LoaderConfig(batch_size=10)))


@pytest.mark.parametrize("bad", [{"batch_size": 0}, {"workers": -1}, {"window_blocks": 0}, {"seed": -1}])
def test_bad_configs(bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))} is .*; it must be at least"):
        LoaderConfig(**{"batch_size": 1} | bad)


def test_bad_arguments(dataset):
    config = LoaderConfig(batch_size=1)
    with pytest.raises(ValueError, match="process_index is 2"):
        make_loader(*dataset, LAYOUT, "train", config, process_index=2, process_count=2)
    with pytest.raises(ValueError, match="epochs is 0"):
        make_loader(*dataset, LAYOUT, "train", config, epochs=0)
    with make_loader(*dataset, LAYOUT, "train", config) as loader, pytest.raises(IndexError, match="0 to 2099"):
        loader.batch(2100)
