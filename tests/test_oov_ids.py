"""Ids that become the OOV row in training: which ones, how many, and the same ones again after a resume."""

import dataclasses

import numpy as np
import pytest
from run_cases import CONFIG, configuring, quickstart

import jrec
from jrec.app.build import build_layout
from jrec.app.commands.train import _say_unread
from jrec.app.loaders import eval_loader, train_loader
from jrec.app.models.oov_ids import OovIds
from jrec.data.columns import ListColumn
from jrec.data.packing import Packer
from jrec.data.schema import Schema
from jrec.errors import ConfigError

ROWS, OOV, EXAMPLES = 50, 7, 4000


def packer():
    table = jrec.TableConfig(name="item", rows=ROWS, dim=8)
    features = [
        jrec.FeatureConfig(name="one", table="item"),
        jrec.FeatureConfig(name="list", table="item", max_length=4),
        jrec.FeatureConfig(name="kept", table="item"),
    ]
    return Packer(jrec.EmbeddingLayout.build([table], features), label=None)


class Recording:
    """Keeps the columns that come to be packed."""

    cast, columns = "none", ()

    def pack(self, columns, batch_size, where=None, *, number=0):
        self.ids, self.number = columns.ids, number


def prepared(seed, dtype):
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 5, EXAMPLES)
    offsets = np.cumsum([0, *lengths])
    columns = {
        "one": random.integers(0, ROWS, EXAMPLES).astype(dtype),
        "list": ListColumn(offsets, random.integers(0, ROWS, offsets[-1]).astype(dtype)),
        "kept": random.integers(0, ROWS, EXAMPLES).astype(dtype),
    }
    if np.dtype(dtype).kind == "i":
        columns["one"][random.random(EXAMPLES) < 0.1] = -1
    return packer().prepare(columns)


def drawn(columns, rate, number, seed=3):
    recording = Recording()
    OovIds(recording, {"one": OOV, "list": OOV}, rate=rate, seed=seed).pack(columns, EXAMPLES, number=number)
    assert recording.number == number
    return recording.ids


def values(column):
    return column.values if isinstance(column, ListColumn) else column


@pytest.mark.parametrize("rate", [0.0, 0.01, 0.3])
@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64])
def test_about_that_share_of_present_ids_becomes_the_oov_row(rate, dtype):
    columns = prepared(0, dtype)
    before = {name: values(column).copy() for name, column in columns.ids.items()}
    after = drawn(columns, rate, 5)
    for name in ("one", "list"):
        found = values(after[name])
        assert found.dtype == before[name].dtype
        changed = found != before[name]
        assert (found[changed] == OOV).all()
        present = (before[name].astype(np.int64) >= 0) & (before[name] != OOV)
        assert not changed[~present].any()
        expected = 1 - np.exp(-rate)  # some places are drawn twice
        assert changed[present].mean() == pytest.approx(expected, abs=4 * np.sqrt(rate / present.sum()) + 1e-9)
        np.testing.assert_array_equal(values(columns.ids[name]), before[name])  # other batches read them, too
    np.testing.assert_array_equal(after["list"].offsets, columns.ids["list"].offsets)
    assert after["kept"] is columns.ids["kept"]


def test_the_number_of_the_batch_and_the_seed_say_which():
    columns = prepared(1, np.int32)
    first = values(drawn(columns, 0.2, 4)["one"])
    np.testing.assert_array_equal(values(drawn(columns, 0.2, 4)["one"]), first)
    for other in (drawn(columns, 0.2, 5), drawn(columns, 0.2, 4, seed=4)):
        assert (values(other["one"]) != first).any()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return quickstart(tmp_path_factory.mktemp("oov"), rows=3000)


def ids_of(batch):
    return np.concatenate([np.asarray(bags.ids).reshape(-1) for bags in batch.bags.values()])


def test_a_run_resumes_with_the_same_ids_and_evaluates_without(dataset, tmp_path):
    load = configuring(tmp_path, dataset, CONFIG)
    plain, config = load(), load("data.oov_rate=0.25")
    schema = Schema.load(dataset)
    schema = dataclasses.replace(schema, tables=tuple(dataclasses.replace(t, oov_row=1) for t in schema.tables))
    layout = build_layout(config, schema)
    with train_loader(config, schema, layout) as loader:
        batches = [ids_of(next(loader)) for _ in range(4)]
        state = loader.state()
        following = ids_of(next(loader))
    with train_loader(config, schema, layout) as loader:
        loader.restore(state)
        np.testing.assert_array_equal(ids_of(next(loader)), following)
    with train_loader(plain, schema, layout) as loader:
        for batch in batches:
            changed = (batch != ids_of(next(loader))).mean()
            assert 0.05 < changed < 0.25  # of ids that were not in row 1 already
    of_both = []
    for one in (plain, config):
        with eval_loader(one, schema, layout, "valid") as loader:
            of_both.append(ids_of(next(loader)))
    np.testing.assert_array_equal(*of_both)


def test_where_there_is_no_oov_row_it_is_refused(dataset, tmp_path):
    load = configuring(tmp_path, dataset, CONFIG)
    schema = Schema.load(dataset)
    without = dataclasses.replace(schema, tables=tuple(dataclasses.replace(t, oov_row=None) for t in schema.tables))
    config = load("data.oov_rate=0.1")
    with pytest.raises(ConfigError, match=r"data\.oov_rate is 0\.1, but no table that 'quickstart' reads .* OOV row"):
        train_loader(config, without, build_layout(config, without))


def test_packs_leave_it_out_and_say_so(dataset, tmp_path, capsys):
    load, schema = configuring(tmp_path, dataset, CONFIG), Schema.load(dataset)
    _say_unread(load("data.oov_rate=0.01", "schedule=fae"), schema)
    assert capsys.readouterr().err == "jrec: data.oov_rate = 0.01 does not apply to the ids of packs\n"
    for config in (load("data.oov_rate=0.01"), load("schedule=fae")):
        _say_unread(config, schema)
        assert capsys.readouterr().err == ""
