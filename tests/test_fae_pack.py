"""The FAE form of datasets: every example once, hot or cold as it should be, whatever interrupts or damages a pack."""

import concurrent.futures
import dataclasses
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from fae_cases import ITEMS, USERS, hot_set, write_dataset

from jrec.data.blocks import ListColumn, ShardReader, ShardWriter, column_names
from jrec.data.fae import FaeManifest, is_fae_folder
from jrec.data.fae import kernels as fae_kernels
from jrec.data.fae import pack as fae_pack
from jrec.data.fae import piece as fae_piece
from jrec.data.fae.pack import HotSet, PackOptions, pack
from jrec.data.fae.rows import RowSet
from jrec.data.fae.verify import verify
from jrec.data.loader import LoaderConfig, make_loader
from jrec.data.reorder.file import load_order
from jrec.data.schema import CategoricalFeature, DatasetError, Schema, Split, Table
from jrec.errors import ConfigError, OutputError
from jrec.ops.layout import EmbeddingLayout, FeatureConfig, TableConfig


def examples(folder, schema, rows_of=None):
    """All training examples as tuples of plain values, in order; ids are led through ``rows_of`` by table."""
    rows_of, found = rows_of or {}, []
    features = {f.name: f.table for f in schema.categorical}
    for shard in schema.splits["train"].shards if "train" in schema.splits else ():
        reader = ShardReader(folder, shard)
        for block in range(shard.blocks):
            columns = reader.read(block)
            parts = []
            for name in column_names(schema):
                column = columns[name]
                rows = rows_of.get(features.get(name))
                values = column.values if isinstance(column, ListColumn) else column
                values = (values if rows is None else rows[values]).tolist()
                if isinstance(column, ListColumn):
                    ends = column.offsets.tolist()
                    values = [tuple(values[i:j]) for i, j in itertools.pairwise(ends)]
                parts.append(values)
            found += zip(*parts, strict=True)
    return found


def hot_schema(packed):
    """Of a pack that has hot examples."""
    assert packed.hot_schema is not None
    return packed.hot_schema


def parts(packed):
    """Hot and cold examples, with hot ids led back to rows."""
    hot = [] if packed.hot_schema is None else examples(packed.hot_folder, packed.hot_schema, packed.hot_rows)
    return hot, examples(packed.cold_folder, packed.cold_schema)


def is_hot(example, rows):
    _, _, item, user, history, _ = example
    return {item, *history} <= set(rows["items"].tolist()) and user in set(rows["users"].tolist())


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(fae_pack, "PIECE_BLOCKS", 3)


@pytest.fixture
def data(tmp_path):
    return write_dataset(tmp_path / "data")


@hypothesis.settings(max_examples=20, deadline=None)
@hypothesis.given(st.integers(1, 300), st.data())
def test_places_in_a_set_are_those_in_its_list(rows, draw):
    members = np.array(sorted(draw.draw(st.sets(st.integers(0, rows - 1), min_size=1))), np.uint32)
    found = RowSet.of(rows, members)
    out = np.empty(len(members), np.uint32)
    ids = members.astype(np.uint16)
    ids.flags.writeable = False
    fae_kernels.take_hot(ids, np.arange(len(members)), found.order, found.words, found.ranks, out)
    np.testing.assert_array_equal(out, np.arange(len(members)))
    assert found.dtype == np.min_scalar_type(len(members) - 1)


def test_every_example_is_there_once_in_order_of_time(data, tmp_path):
    hot = hot_set(data)
    packed = pack(data, tmp_path / "out", hot)
    source = examples(data, Schema.load(data))
    expected = [e for e in source if is_hot(e, hot.rows)], [e for e in source if not is_hot(e, hot.rows)]
    assert parts(packed) == expected
    assert 20 < len(expected[0]) < len(source) - 20
    assert (packed.hot_examples, packed.cold_examples) == tuple(map(len, expected))
    assert packed.dataset == Schema.load(data).identity
    assert (packed.threshold, packed.calibration) == (1e-3, {"why": "chosen"})
    packed.verify_files()


def test_the_folders_are_ordinary_datasets(data, tmp_path):
    packed = pack(data, tmp_path / "out", hot_set(data))
    assert is_fae_folder(tmp_path / "out")
    assert not is_fae_folder(data)
    hot, cold = hot_schema(packed), packed.cold_schema
    assert {t.name: t.rows for t in hot.tables} == {name: len(rows) for name, rows in packed.hot_rows.items()}
    assert list(hot.splits) == ["train"]
    assert hot.ceiling == {}
    assert [t.rows for t in cold.tables] == [ITEMS, USERS]
    assert cold.tables[0].oov_row == 3
    assert list(cold.splits) == ["train", "valid"]
    assert cold.ceiling == {"valid": {"auc": 0.8}}
    assert cold.splits["valid"] == Schema.load(data).splits["valid"]
    assert cold.provenance["source"] == {"made": "here"}
    file = cold.splits["valid"].shards[0].file
    assert (packed.cold_folder / file).read_bytes() == (data / file).read_bytes()


@pytest.mark.parametrize("bijection", [False, True])
def test_the_oov_row_is_found_among_the_hot_rows(tmp_path, bijection):
    data = write_dataset(tmp_path / "data", bijection=bijection)
    table = Schema.load(data).table("items")
    order = load_order(data, table)
    row = 3 if order is None else int(order[3])
    others = np.setdiff1d(np.arange(60), [row])
    for name, items in (("with", np.union1d(others, [row])), ("without", others)):
        hot = hot_schema(pack(data, tmp_path / name, hot_set(data, items=items, users=range(USERS))))
        found = hot.table("items").oov_row
        assert (None if found is None else items[found]) == (row if name == "with" else None)


def test_nothing_depends_on_threads_and_a_seed_shuffles(data, tmp_path):
    hot = hot_set(data)
    one = pack(data, tmp_path / "one", hot, PackOptions(threads=1))
    four = pack(data, tmp_path / "four", hot, PackOptions(threads=4))
    assert dataclasses.replace(one, folder=four.folder) == four
    shuffled = [
        pack(data, tmp_path / f"s{i}", hot, PackOptions(seed=s, threads=1 + i)) for i, s in enumerate((5, 5, 6))
    ]
    assert shuffled[0].files == shuffled[1].files != shuffled[2].files
    assert hot_schema(shuffled[0]).splits == hot_schema(shuffled[1]).splits
    assert {s.content for s in shuffled} == {one.content}
    for found, plain in zip(parts(shuffled[0]), parts(one), strict=True):
        assert found != plain
        assert sorted(found) == sorted(plain)


def test_hot_ids_are_those_that_the_loader_yields(tmp_path):
    data = write_dataset(tmp_path / "data", bijection=True)
    packed = pack(data, tmp_path / "out", hot_set(data))

    def loaded(folder, schema, rows_of):
        layout = EmbeddingLayout.build(
            [TableConfig(name=t.name, rows=t.rows, dim=4 * k) for k, t in enumerate(schema.tables, 1)],
            [FeatureConfig(name=f.name, table=f.table, max_length=f.max_length) for f in schema.categorical[:2]],
        )
        found = []
        with make_loader(folder, schema, layout, "train", LoaderConfig(batch_size=32, shuffle=False)) as loader:
            for batch in loader:
                kept = np.asarray(batch.mask) > 0
                columns = [np.asarray(batch.labels)[kept], np.asarray(batch.dense)[kept, 0]]
                for stack, bags in batch.bags.items():
                    ids = np.asarray(bags.ids).reshape(-1)[kept]
                    columns.append(rows_of(layout.stacks[stack].tables[0].name, ids))
                found += zip(*(np.asarray(c).tolist() for c in columns), strict=True)
        return found

    whole = loaded(data, Schema.load(data), lambda table, ids: ids)
    hot = loaded(packed.hot_folder, hot_schema(packed), lambda table, ids: packed.hot_rows[table][ids])
    cold = loaded(packed.cold_folder, packed.cold_schema, lambda table, ids: ids)
    assert sorted(hot + cold) == sorted(whole)
    assert set(packed.hot_rows["items"].tolist()) >= {item for _, _, item, _ in hot}
    assert packed.cold_schema.tables[0].bijection is not None
    assert hot_schema(packed).tables[0].bijection is None


def test_all_hot(data, tmp_path):
    packed = pack(data, tmp_path / "out", hot_set(data, items=range(ITEMS), users=range(USERS)))
    assert packed.cold_examples == 0
    assert "train" not in packed.cold_schema.splits
    assert not list((tmp_path / "out").glob("hot_rows/*"))
    assert parts(packed) == (examples(data, Schema.load(data)), [])


def test_none_hot(data, tmp_path):
    packed = pack(data, tmp_path / "out", hot_set(data, items=[], users=[]))
    assert packed.hot_examples == 0
    assert packed.hot_schema is None
    assert not packed.hot_folder.exists()
    assert all(t.placeholder for t in packed.tables)
    assert parts(packed) == ([], examples(data, Schema.load(data)))


def test_examples_with_empty_lists_are_hot_though_no_row_of_their_table_is(tmp_path):
    data = write_dataset(tmp_path / "data", empty_lists=True)
    schema = Schema.load(data)
    lists = Table(name="lists", rows=40)
    features = (*schema.categorical[:2], dataclasses.replace(schema.categorical[2], table="lists"))
    dataclasses.replace(schema, tables=(*schema.tables, lists), categorical=features).save(data)
    hot = hot_set(data)
    packed = pack(data, tmp_path / "out", dataclasses.replace(hot, rows={**hot.rows, "lists": np.empty(0, np.uint32)}))
    assert packed.hot_examples > 20
    assert hot_schema(packed).table("lists").rows == 1
    assert packed.tables[2].placeholder
    assert len(packed.hot_rows["lists"]) == 0
    assert sorted(itertools.chain(*parts(packed))) == sorted(examples(data, Schema.load(data)))


def test_one_table_of_one_row(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    with ShardWriter(data / "train-00000-of-00001.array_record", 8) as writer:
        writer.write({"label": np.arange(20, dtype=np.float32), "f": np.zeros(20, np.uint8)})
    schema = Schema(
        name="one",
        block_size=8,
        dense=(),
        categorical=(CategoricalFeature(name="f", table="t", fixed_length=True),),
        tables=(Table(name="t", rows=1),),
        splits={"train": Split(shards=(writer.close(),))},
        provenance={},
    )
    schema.save(data)
    for rows, expected in (([0], (20, 0)), ([], (0, 20))):
        hot = HotSet(rows={"t": np.array(rows, np.uint32)}, dataset=None)
        packed = pack(data, tmp_path / f"out{len(rows)}", hot)
        assert (packed.hot_examples, packed.cold_examples) == expected


@pytest.mark.parametrize("feature", ["item", "history"])
def test_ids_past_their_table_are_named(tmp_path, feature):
    def damage(columns):
        values = columns[feature].values if feature == "history" else columns[feature]
        values[-1] = ITEMS + 7

    data = write_dataset(tmp_path / "data", damage=damage)
    with pytest.raises(DatasetError, match=rf"block 2 of .*train-00001.*feature '{feature}' has id 307, but.*300 rows"):
        pack(data, tmp_path / "out", hot_set(data))
    assert not (tmp_path / "out").exists()


def test_columns_that_are_not_the_schemas_are_named(tmp_path):
    data = write_dataset(tmp_path / "data", damage=lambda columns: columns.pop("price"))
    with pytest.raises(DatasetError, match=r"block 0 of .*train-00001.*has no column 'price'"):
        pack(data, tmp_path / "out", hot_set(data))


def interrupt_after(monkeypatch, count):
    """Lets ``count`` pieces be packed, and then none; returns the numbers of those packed."""
    real, packed = fae_piece.pack_piece, []

    def some(job, piece, *rest):
        if len(packed) == count:
            raise KeyboardInterrupt
        packed.append(piece.number)
        return real(job, piece, *rest)

    monkeypatch.setattr(fae_piece, "pack_piece", some)
    return packed


def test_an_interrupted_pack_goes_on_where_it_was(data, tmp_path, monkeypatch):
    hot, options = hot_set(data), PackOptions(threads=1)
    whole = pack(data, tmp_path / "whole", hot, options)
    with monkeypatch.context() as patch:
        before = interrupt_after(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            pack(data, tmp_path / "out", hot, options)
    assert not (tmp_path / "out").exists()
    damaged = tmp_path / "out.partial" / "cold" / fae_piece.cut_pieces(Schema.load(data), 3)[0].file
    damaged.write_bytes(b"\0" * damaged.stat().st_size)
    said = []
    with monkeypatch.context() as patch:
        after = interrupt_after(patch, 99)
        packed = pack(data, tmp_path / "out", hot, options, report=said.append)
    assert before == [0, 1]
    assert after == [0, 2, 3]
    assert "going on" in said[0]
    assert dataclasses.replace(packed, folder=whole.folder) == whole
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["cold", "fae.json", "hot", "hot_rows"]
    assert not (tmp_path / "out.partial").exists()


def test_an_interrupted_pack_of_something_else_is_in_the_way(data, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_after(patch, 1)
        with pytest.raises(KeyboardInterrupt):
            pack(data, tmp_path / "out", hot_set(data), PackOptions(threads=1))
    for other in (hot_set(data, seed=2), hot_set(data)):
        with pytest.raises(OutputError, match="interrupted run that was to make something else"):
            pack(data, tmp_path / "out", other, PackOptions(seed=4))
    assert pack(data, tmp_path / "out", hot_set(data)).hot_examples


CHILD = """
import sys, numpy, time
from jrec.data.fae import pack as fae_pack, piece as fae_piece
from fae_cases import hot_set
fae_pack.PIECE_BLOCKS = 3
real = fae_piece.pack_piece
def slow(job, piece, *rest):
    found = real(job, piece, *rest)
    print(piece.number, flush=True)
    time.sleep(0.2)
    return found
fae_piece.pack_piece = slow
fae_pack.pack(sys.argv[1], sys.argv[2], hot_set(sys.argv[1]), fae_pack.PackOptions(threads=2))
"""


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 0.25])
def test_killed_packs_go_on(data, tmp_path, seconds):
    tests = os.fspath(pathlib.Path(__file__).parent)
    command = [sys.executable, "-c", CHILD, os.fspath(data), os.fspath(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": tests}) as child:
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(seconds)
        child.send_signal(signal.SIGKILL)
    assert not is_fae_folder(tmp_path / "out")
    packed = pack(data, tmp_path / "out", hot_set(data))
    assert dataclasses.replace(packed, folder=tmp_path / "again") == pack(data, tmp_path / "again", hot_set(data))


def test_a_piece_is_given_up_when_another_fails(data, tmp_path):
    job = fae_pack._job(data, tmp_path, Schema.load(data), hot_set(data).rows, PackOptions())
    stop = threading.Event()
    stop.set()
    piece = fae_piece.cut_pieces(Schema.load(data), 3)[0]
    with pytest.raises(concurrent.futures.CancelledError):
        fae_piece.pack_piece(job, piece, lambda done: None, stop)
    assert not list((tmp_path / "hot").iterdir()) + list((tmp_path / "cold").iterdir())


@pytest.mark.parametrize(
    "change",
    [
        lambda found: {"item": np.roll(found["item"], 1)},
        lambda found: {"history": ListColumn(found["history"].offsets, found["history"].values[::-1])},
        lambda found: {name: column[:-1] for name, column in found.items() if not isinstance(column, ListColumn)},
        lambda found: {"price": found["price"] * np.float32(1 + 2**-20)},
    ],
    ids=["item", "history", "lost", "price"],
)
def test_what_is_written_is_compared_with_the_source(data, tmp_path, monkeypatch, change):
    real = fae_piece.take

    def wrong(columns, positions, schema, sets):
        found = real(columns, positions, schema, sets)
        return found if sets is None else {**found, **change(found)}

    monkeypatch.setattr(fae_piece, "take", wrong)
    with pytest.raises(DatasetError, match=r"block 0 of .*train-00000.* has (content|columns of unequal)"):
        pack(data, tmp_path / "out", hot_set(data), PackOptions(threads=1))


def test_other_examples_are_noticed_in_a_packed_folder(data, tmp_path):
    packed = pack(data, tmp_path / "out", hot_set(data))
    assert verify(tmp_path / "out") == packed
    dataclasses.replace(packed, content="0" * 16).save()
    with pytest.raises(DatasetError, match=f"holds other examples .* content is {packed.content}, not 0000"):
        verify(tmp_path / "out")


def test_damaged_files_are_named(data, tmp_path):
    out = tmp_path / "out"
    pack(data, out, hot_set(data))
    rows = out / "hot_rows" / "items.npy"
    content = rows.read_bytes()
    rows.write_bytes(content[:-4] + b"\1\0\0\0")
    with pytest.raises(DatasetError, match=r"items\.npy is damaged: its SHA-256"):
        _ = FaeManifest.load(out).hot_rows
    rows.unlink()
    with pytest.raises(DatasetError, match=r"items\.npy cannot be read"):
        FaeManifest.load(out).verify_files()
    rows.write_bytes(content)
    shard = next((out / "cold").glob("train-*"))
    content = bytearray(shard.read_bytes())
    content[100] ^= 1
    shard.write_bytes(content)
    with pytest.raises(DatasetError, match=rf"cold/{shard.name} is damaged: its SHA-256"):
        FaeManifest.load(out).verify_files()
    shard.unlink()
    with pytest.raises(DatasetError, match=rf"cold/{shard.name} .*is missing"):
        _ = FaeManifest.load(out).cold_schema
    manifest = out / "fae.json"
    text = manifest.read_text()
    for broken, message in (
        (text.replace('"hot_examples": ', '"hot_examples": 1'), "checksum does not fit"),
        (text[:-20], "is damaged"),
        (text.replace('"version": 2', '"version": 1'), "version 1, but this jrec reads"),
        (json.dumps([]), "is damaged"),
    ):
        manifest.write_text(broken)
        with pytest.raises(DatasetError, match=f"fae.json.*{message}"):
            FaeManifest.load(out)
    manifest.unlink()
    with pytest.raises(DatasetError, match="not a finished FAE folder"):
        FaeManifest.load(out)


def test_datasets_that_do_not_go_with_the_manifest_are_refused(data, tmp_path):
    one = pack(data, tmp_path / "one", hot_set(data))
    two = pack(data, tmp_path / "two", hot_set(data, seed=3))
    for name in ("hot", "cold"):
        for path in (two.folder / name).iterdir():
            (one.folder / name / path.name).unlink(missing_ok=True)
            (one.folder / name / path.name).write_bytes(path.read_bytes())
        with pytest.raises(
            DatasetError, match=f"one/fae.json, folder {name}, is of dataset .*, not of .* at .*one/{name} "
        ):
            _ = getattr(FaeManifest.load(one.folder), f"{name}_schema")


def test_folders_in_the_way(data, tmp_path):
    pack(data, tmp_path / "out", hot_set(data))
    with pytest.raises(OutputError, match="pass --overwrite"):
        pack(data, tmp_path / "out", hot_set(data, seed=2))
    replaced = pack(data, tmp_path / "out", hot_set(data, seed=2), PackOptions(overwrite=True))
    np.testing.assert_array_equal(replaced.hot_rows["items"], hot_set(data, seed=2).rows["items"])
    for out, message in ((data, "is an input"), (tmp_path, "holds .*, an input")):
        with pytest.raises(OutputError, match=message):
            pack(data, out, hot_set(data), PackOptions(overwrite=True))


def test_bad_requests(data, tmp_path):
    hot = hot_set(data)
    with pytest.raises(DatasetError, match="hot rows of table\\(s\\) users do not go"):
        pack(data, tmp_path / "out", dataclasses.replace(hot, rows={"items": hot.rows["items"]}))
    for bad in ([3, 2], [3, 3], [ITEMS]):
        with pytest.raises(ValueError, match="hot rows of table 'items' must be ascending uint32 numbers below 300"):
            pack(data, tmp_path / f"out{bad[0]}", hot_set(data, items=bad))
    with pytest.raises(ConfigError, match="--threads is 0"):
        PackOptions(threads=0)
    with pytest.raises(ConfigError, match="seed is -1"):
        PackOptions(seed=-1)
    schema = Schema.load(data)
    dataclasses.replace(schema, splits={"valid": schema.splits["valid"]}).save(data)
    with pytest.raises(DatasetError, match="no training examples"):
        pack(data, tmp_path / "out", hot)
