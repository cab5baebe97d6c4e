"""The FAE form of datasets: every example once, hot or cold as it should be, whatever interrupts or damages a pack."""

import dataclasses
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from fae_cases import ITEMS, USERS, hot_set, write_dataset

from jrec.data.blocks import ListColumn, ShardReader, ShardWriter, column_names
from jrec.data.fae import FaeManifest, is_fae_folder
from jrec.data.fae.examples import hot_examples, row_set
from jrec.data.loader import LoaderConfig, make_loader
from jrec.data.schema import CategoricalFeature, DatasetError, Schema, Split, Table
from jrec.errors import ConfigError, OutputError
from jrec.ops.layout import EmbeddingLayout, FeatureConfig, TableConfig
from jrec.prepare import fae_pack as fae_pack
from jrec.prepare.fae_pack import HotSet, PackOptions, pack, verify


def examples(folder, schema):
    """All training examples as tuples of plain values, in order."""
    found = []
    for shard in schema.splits["train"].shards if "train" in schema.splits else ():
        reader = ShardReader(folder, shard)
        for block in range(shard.blocks):
            columns = reader.read(block)
            parts = []
            for name in column_names(schema):
                column = columns[name]
                values = (column.values if isinstance(column, ListColumn) else column).tolist()
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
    """Hot and cold examples."""
    hot = [] if packed.hot_schema is None else examples(packed.hot_folder, packed.hot_schema)
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
def test_examples_are_hot_whose_rows_are_all_in_the_set(rows, draw):
    table = Table(name="t", rows=rows)
    feature = CategoricalFeature(name="f", table="t", fixed_length=True)
    lists = CategoricalFeature(name="l", table="t", max_length=9)
    schema = Schema(
        name="s", block_size=8, dense=(), categorical=(feature, lists), tables=(table,), splits={}, provenance={}
    )
    row = st.integers(0, rows - 1)
    members = draw.draw(st.sets(row))
    ids = draw.draw(st.lists(st.tuples(row, st.lists(row, max_size=4)), min_size=1))
    columns = {
        "label": np.zeros(len(ids), np.float32),
        "f": np.array([one for one, _ in ids], np.uint16),
        "l": ListColumn(
            np.cumsum([0, *(len(more) for _, more in ids)]), np.array([r for _, more in ids for r in more], np.uint16)
        ),
    }
    found = hot_examples(columns, schema, {"t": row_set(table, np.array(sorted(members), np.uint32))})
    assert found.tolist() == [{one, *more} <= members for one, more in ids]


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
    verify(packed.folder)


def test_the_folders_are_ordinary_datasets(data, tmp_path):
    packed = pack(data, tmp_path / "out", hot_set(data))
    assert is_fae_folder(tmp_path / "out")
    assert not is_fae_folder(data)
    hot, cold = hot_schema(packed), packed.cold_schema
    assert hot.tables == cold.tables
    assert hot.identity.rows == cold.identity.rows == Schema.load(data).identity.rows
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


def test_nothing_depends_on_threads_and_a_seed_shuffles(data, tmp_path):
    hot = hot_set(data)
    one = pack(data, tmp_path / "one", hot, PackOptions(threads=1))
    four = pack(data, tmp_path / "four", hot, PackOptions(threads=4))
    assert dataclasses.replace(one, folder=four.folder) == four
    shuffled = [
        pack(data, tmp_path / f"s{i}", hot, PackOptions(seed=s, threads=1 + i)) for i, s in enumerate((5, 5, 6))
    ]
    for splits in ([hot_schema(s).splits for s in shuffled], [s.cold_schema.splits for s in shuffled]):
        assert splits[0] == splits[1] != splits[2]
    assert {s.content for s in shuffled} == {one.content}
    for found, plain in zip(parts(shuffled[0]), parts(one), strict=True):
        assert found != plain
        assert sorted(found) == sorted(plain)


def test_hot_ids_are_those_that_the_loader_yields(tmp_path):
    data = write_dataset(tmp_path / "data", bijection=True)
    packed = pack(data, tmp_path / "out", hot_set(data))

    def loaded(folder, schema):
        layout = EmbeddingLayout.build(
            [TableConfig(name=t.name, rows=t.rows, dim=4 * k) for k, t in enumerate(schema.tables, 1)],
            [FeatureConfig(name=f.name, table=f.table, max_length=f.max_length) for f in schema.categorical[:2]],
        )
        found = []
        with make_loader(folder, schema, layout, "train", LoaderConfig(batch_size=32, shuffle=False)) as loader:
            for batch in loader:
                kept = np.asarray(batch.mask) > 0
                columns = [np.asarray(batch.labels)[kept], np.asarray(batch.dense)[kept, 0]]
                columns += [np.asarray(bags.ids).reshape(-1)[kept] for bags in batch.bags.values()]
                found += zip(*(np.asarray(c).tolist() for c in columns), strict=True)
        return found

    whole = loaded(data, Schema.load(data))
    hot = loaded(packed.hot_folder, hot_schema(packed))
    cold = loaded(packed.cold_folder, packed.cold_schema)
    assert hot
    assert sorted(hot + cold) == sorted(whole)
    assert set(packed.hot_rows["items"].tolist()) >= {item for _, _, item, _ in hot}
    assert hot_schema(packed).tables[0].bijection == packed.cold_schema.tables[0].bijection is not None
    verify(packed.folder)


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
    assert [t.hot for t in packed.tables] == [0, 0]
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
    real, packed = fae_pack._write, []

    def some(job, piece, writers):
        if len(packed) == count:
            raise KeyboardInterrupt
        packed.append(piece.number)
        return real(job, piece, writers)

    monkeypatch.setattr(fae_pack, "_write", some)
    return packed


def test_an_interrupted_pack_goes_on_where_it_was(data, tmp_path, monkeypatch):
    hot, options = hot_set(data), PackOptions(threads=1)
    whole = pack(data, tmp_path / "whole", hot, options)
    with monkeypatch.context() as patch:
        before = interrupt_after(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            pack(data, tmp_path / "out", hot, options)
    assert not (tmp_path / "out").exists()
    damaged = tmp_path / "out.partial" / "cold" / fae_pack._pieces(Schema.load(data))[0].file
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
from jrec.data.fae import pack as fae_pack
from fae_cases import hot_set
fae_pack.PIECE_BLOCKS = 3
real = fae_pack._pack_piece
def slow(job, piece):
    found = real(job, piece)
    print(piece.number, flush=True)
    time.sleep(0.2)
    return found
fae_pack._pack_piece = slow
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


@pytest.mark.parametrize(
    "change",
    [
        lambda column: (
            np.roll(column, 1) if not isinstance(column, ListColumn) and column.dtype == np.uint16 else column
        ),
        lambda column: ListColumn(column.offsets, column.values[::-1]) if isinstance(column, ListColumn) else column,
        lambda column: column if isinstance(column, ListColumn) else column[:-1],
        lambda column: column * np.float32(1 + 2**-20) if getattr(column, "dtype", None) == np.float32 else column,
    ],
    ids=["item", "history", "lost", "price"],
)
def test_what_is_written_is_compared_with_the_source(data, tmp_path, monkeypatch, change):
    real = fae_pack.gather
    monkeypatch.setattr(fae_pack, "gather", lambda column, positions: change(real(column, positions)))
    with pytest.raises(DatasetError, match=r"block 0 of .*train-00000.* has content|column 'history' has"):
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
        verify(out)
    rows.write_bytes(content)
    shard = next((out / "cold").glob("train-*"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(DatasetError, match=rf"cold/{shard.name}.*damaged"):
        verify(out)
    shard.unlink()
    with pytest.raises(DatasetError, match=rf"cold/{shard.name} .*is missing"):
        _ = FaeManifest.load(out).cold_schema
    manifest = out / "fae.json"
    text = manifest.read_text()
    for broken, message in (
        (text.replace('"hot_examples": ', '"hot_examples": 1'), "checksum does not fit"),
        (text[:-20], "is damaged"),
        (text.replace('"version": 3', '"version": 2'), "version 2, but this jrec reads .* pack the dataset anew"),
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
