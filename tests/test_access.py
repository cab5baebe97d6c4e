"""Access profiles: exact and sampled counts of datasets, files, smoothing, and the monitor."""

import collections
import dataclasses

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from jrec import cli
from jrec.access.container import read_container, write_container
from jrec.access.count import exact_profile, sampled_profile
from jrec.access.monitor import AccessMonitor
from jrec.access.power_law import power_law_profile
from jrec.access.profile import AccessProfile, ProfileError, TableProfile
from jrec.data.blocks import ListColumn, ShardWriter, shard_file
from jrec.data.schema import CategoricalFeature, DatasetError, Schema, Split, Table

FEW = hypothesis.settings(max_examples=25, deadline=None)
COUNTS = st.lists(st.integers(0, 5), min_size=1, max_size=60)


@FEW
@hypothesis.given(COUNTS)
def test_runs_are_the_counts(counts):
    counts = np.array(counts)
    dense = TableProfile.from_counts("t", counts)
    np.testing.assert_array_equal(dense.dense(), counts)
    np.testing.assert_array_equal(dense.count_of(np.arange(len(counts))), counts)
    assert (np.diff(dense.counts) != 0).all()
    ids = np.flatnonzero(counts)
    sparse = TableProfile.from_sparse("t", len(counts), ids, counts[ids])
    np.testing.assert_array_equal(sparse.starts, dense.starts)
    np.testing.assert_array_equal(sparse.counts, dense.counts)
    assert dense.accesses == counts.sum()


def test_runs_cross_the_chunks_of_long_tables(monkeypatch):
    from jrec.access import profile

    monkeypatch.setattr(profile, "_CHUNK", 7)
    counts = np.repeat([5, 4, 4, 1], [7, 7, 1, 20])
    found = TableProfile.from_counts("t", counts)
    assert found.starts.tolist() == [0, 7, 15, 35]
    assert found.counts.tolist() == [5, 4, 1]


@FEW
@hypothesis.given(COUNTS, st.integers(1, 6), st.floats(1.01, 3))
def test_smoothing_keeps_accesses_and_frequent_rows(counts, min_hits, ratio):
    table = TableProfile.from_counts("t", np.array(counts))
    smooth = table.smoothed(min_hits=min_hits, ratio=ratio)
    assert smooth.rows == table.rows
    assert smooth.accesses == pytest.approx(table.accesses)
    frequent = table.dense() >= min_hits
    np.testing.assert_array_equal(smooth.dense()[frequent], table.dense()[frequent])
    assert (smooth.dense()[~frequent] < min_hits).all()


@FEW
@hypothesis.given(COUNTS, st.integers(1, 6), st.floats(1.01, 3))
def test_sparse_counts_are_smoothed_alike(counts, min_hits, ratio):
    counts = np.array(counts)
    ids = np.flatnonzero(counts)
    found = TableProfile.smoothed_from_sparse("t", len(counts), ids, counts[ids], min_hits=min_hits, ratio=ratio)
    expected = TableProfile.from_counts("t", counts).smoothed(min_hits=min_hits, ratio=ratio)
    np.testing.assert_allclose(found.dense(), expected.dense(), rtol=1e-12)


def test_smoothing_a_sample_comes_closer_to_the_truth():
    rows, sample = 20_000, 0.05
    truth = 2_000_000 * np.arange(1, rows + 1) ** -1.1 / (np.arange(1, rows + 1) ** -1.1).sum()
    table = TableProfile.from_counts("t", np.random.default_rng(0).poisson(sample * truth))
    raw, smooth = (np.abs(t.dense() / sample - truth).sum() for t in (table, table.smoothed()))
    assert smooth < 0.35 * raw
    assert len(table.smoothed().counts) < 1000 < len(table.counts)


@pytest.mark.parametrize(
    ("starts", "counts"),
    [([0], []), ([1, 2], [1]), ([0, 2, 2], [1, 1]), ([0, 2], [-1]), ([0, 2], [np.nan]), ([0, 2], [1, 2])],
)
def test_impossible_profiles_are_refused(starts, counts):
    with pytest.raises(ProfileError, match="table 't'"):
        TableProfile(name="t", starts=np.array(starts), counts=np.array(counts))


def test_ids_outside_a_table_are_refused():
    for ids in ([-1, 2], [0, 5]):
        with pytest.raises(ProfileError, match="table 't' of 5 rows was accessed at rows"):
            TableProfile.from_sparse("t", 5, np.array(ids), np.array([1, 1]))
        with pytest.raises(ProfileError, match="table 't' of 5 rows was accessed at rows"):
            TableProfile.smoothed_from_sparse("t", 5, np.array(ids), np.array([1, 1]))


@FEW
@hypothesis.given(st.lists(st.lists(st.integers(0, 30), max_size=20), max_size=8))
def test_sparse_counts_are_those_of_a_counter(batches):
    from jrec.access import count

    counter, expected = count.SparseCounter(), collections.Counter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(count, "_PENDING", 10)
        for ids in batches:
            counter.add(np.array(ids, np.uint8))
            expected.update(ids)
    ids, counts = counter.counts()
    assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == dict(expected)


@pytest.mark.parametrize("exponent", [0.0, 0.6, 1.0, 1.05, 1.5])
@pytest.mark.parametrize("rows", [1, 3, 1000, 200_000])
def test_power_laws_are_the_rounded_expectations(exponent, rows):
    examples = 1_000_000
    table = power_law_profile({"t": rows}, examples=examples, exponent=exponent, ids_per_example={"t": 2.0}).tables[0]
    weights = np.arange(1, rows + 1, dtype=float) ** -exponent
    expected = np.maximum(np.rint(2 * examples * weights / weights.sum()), 1)
    assert table.rows == rows
    # The tail of a large table is an integral: counts may differ by the last bit before rounding.
    assert np.abs(table.dense() - expected).max() <= 1
    assert (table.dense() != expected).mean() < 1e-3
    assert table.descending


# Datasets


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Two shards of a one-hot and a multi-hot feature; the multi-hot one shares its table with a second one-hot."""
    folder = tmp_path_factory.mktemp("dataset")
    rng = np.random.default_rng(0)
    expected = {"a": np.zeros(300, np.int64), "b": np.zeros(70, np.int64)}
    shards = []
    for s, examples in enumerate((950, 333)):
        one, other = rng.zipf(1.3, examples) % 300, rng.integers(0, 70, examples)
        lengths = rng.integers(0, 4, examples)
        offsets = np.append(0, np.cumsum(lengths)).astype(np.int32)
        many = rng.integers(0, 70, offsets[-1])
        with ShardWriter(folder / shard_file("train", s, 2), 100) as writer:
            writer.write(
                {
                    "label": np.zeros(examples, np.float32),
                    "one": one.astype(np.uint16),
                    "many": ListColumn(offsets, many.astype(np.uint8)),
                    "other": other.astype(np.uint8),
                }
            )
            shards.append(writer.close())
        expected["a"] += np.bincount(one, minlength=300)
        expected["b"] += np.bincount(many, minlength=70) + np.bincount(other, minlength=70)
    schema = Schema(
        name="two",
        block_size=100,
        dense=(),
        categorical=(
            CategoricalFeature(name="one", table="a", fixed_length=True),
            CategoricalFeature(name="many", table="b", max_length=3),
            CategoricalFeature(name="other", table="b", fixed_length=True),
        ),
        tables=(Table(name="a", rows=300), Table(name="b", rows=70)),
        splits={"train": Split(shards=tuple(shards)), "test": Split(shards=())},
        provenance={},
    )
    schema.save(folder)
    return folder, schema, expected


def test_exact_counts_are_those_of_the_data(dataset, tmp_path):
    folder, schema, expected = dataset
    found = exact_profile(folder)
    for table in found.tables:
        np.testing.assert_array_equal(table.dense(), expected[table.name])
    assert found.examples == 1283
    assert found.dataset == schema.identity
    whole = sampled_profile(folder, fraction=1.0)
    for table in whole.tables:
        np.testing.assert_array_equal(table.dense(), expected[table.name])


def test_stored_counts_are_taken_and_checked(dataset, tmp_path):
    _, schema, _ = dataset
    (tmp_path / "counts").mkdir()
    counted = dataclasses.replace(
        schema, tables=tuple(dataclasses.replace(t, counts=f"counts/{t.name}.npy") for t in schema.tables)
    )
    for table in counted.tables:
        np.save(tmp_path / "counts" / f"{table.name}.npy", np.arange(table.rows)[::-1])
    found = exact_profile(tmp_path, counted)
    assert found.table("b").dense().tolist() == list(range(69, -1, -1))
    np.save(tmp_path / "counts" / "a.npy", np.arange(7))
    with pytest.raises(DatasetError, match=r"counts of shape \(7,\), but table 'a' has 300 rows"):
        exact_profile(tmp_path, counted)
    (tmp_path / "counts" / "a.npy").write_bytes(b"no array")
    with pytest.raises(DatasetError, match=r"a\.npy cannot be read"):
        exact_profile(tmp_path, counted)


def test_a_sample_reads_its_share_and_is_the_same_by_seed(dataset, monkeypatch):
    from jrec.data import blocks

    read = []
    original = blocks.ShardReader.read
    monkeypatch.setattr(blocks.ShardReader, "read", lambda self, block: read.append(block) or original(self, block))
    folder, _, _ = dataset
    first = sampled_profile(folder, fraction=0.25, seed=3)
    assert len(read) == round(0.25 * 14)
    again, other = sampled_profile(folder, fraction=0.25, seed=3), sampled_profile(folder, fraction=0.25, seed=4)
    np.testing.assert_array_equal(first.tables[0].dense(), again.tables[0].dense())
    assert (first.tables[0].dense() != other.tables[0].dense()).any()
    assert first.table("a").accesses == pytest.approx(first.examples)  # one id an example


def test_wrong_requests_are_refused(dataset):
    folder, _, _ = dataset
    with pytest.raises(DatasetError, match="no split 'dev'; it has train, test"):
        exact_profile(folder, split="dev")
    with pytest.raises(DatasetError, match="split 'test' of dataset 'two' is empty"):
        sampled_profile(folder, split="test")
    with pytest.raises(ProfileError, match=r"fraction is 1\.5"):
        sampled_profile(folder, fraction=1.5)


# Files


def test_profiles_are_the_same_after_loading_and_refused_elsewhere(dataset, tmp_path):
    folder, schema, expected = dataset
    exact_profile(folder).save(tmp_path / "a.access")
    found = AccessProfile.load(tmp_path / "a.access")
    for table in found.tables:
        np.testing.assert_array_equal(table.dense(), expected[table.name])
    found.check_dataset(schema)
    numbered = (dataclasses.replace(schema.tables[0], numbering="other values"), schema.tables[1])
    with pytest.raises(ProfileError, match=r"of dataset 'two' .*, not of 'three' .*: not the same in both: table a;"):
        found.check_dataset(dataclasses.replace(schema, name="three", tables=numbered))
    larger = dataclasses.replace(schema, tables=(schema.tables[0], Table(name="b", rows=71)))
    with pytest.raises(ProfileError, match="has 70 rows where dataset 'two' has table 'b' of 71 rows"):
        found.check_dataset(larger)
    with pytest.raises(ProfileError, match="no table 'c'; it has a, b"):
        found.table("c")


def test_containers_hold_arrays_of_any_shape_and_refuse_others(tmp_path):
    arrays = {
        "a": np.arange(6, dtype=np.int16).reshape(2, 3),
        "b": np.empty((0, 4), np.float64),
        "c": np.array([True, False]),
        "d": np.arange(3, dtype=">i4"),
    }
    write_container(tmp_path / "x", kind="kind", version=2, header={"ü": 1}, arrays=arrays)
    arguments = {"kind": "kind", "version": 2, "error": ProfileError, "remedy": "try again"}
    header, found = read_container(tmp_path / "x", **arguments)
    assert header == {"ü": 1}
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
    assert not list(tmp_path.glob("*.partial"))
    with pytest.raises(ProfileError, match="is no other file; try again"):
        read_container(tmp_path / "x", **arguments | {"kind": "other"})
    with pytest.raises(ProfileError, match="version 2, but this jrec reads version 3; try again"):
        read_container(tmp_path / "x", **arguments | {"version": 3})
    write_container(tmp_path / "y", kind="kind", version=2, header={}, arrays={"o": np.array([None])[:0].astype("S3")})
    with pytest.raises(ProfileError, match="does not hold what a kind file holds"):
        read_container(tmp_path / "y", **arguments)


# The monitor


def test_a_monitor_with_room_counts_exactly():
    monitor = AccessMonitor({"a": 10, "b": 5})
    monitor.observe({"a": np.array([[1, 1], [9, 0]], np.uint8), "b": np.array([4])}, examples=2)
    monitor.observe({"a": np.array([1])}, examples=1)
    found = monitor.profile(smooth=False)
    assert found.table("a").dense().tolist() == [1, 3, 0, 0, 0, 0, 0, 0, 0, 1]
    assert found.table("b").dense().tolist() == [0, 0, 0, 0, 1]
    assert found.examples == 3
    monitor.reset()
    with pytest.raises(ProfileError, match="seen no examples"):
        monitor.profile()


def test_a_full_monitor_keeps_an_unbiased_sample_in_bounded_memory():
    rng = np.random.default_rng(0)
    weights = np.arange(1, 101) ** -1.0
    weights /= weights.sum()
    batches = [rng.choice(100, 3000, p=weights) for _ in range(40)]
    truth = np.bincount(np.concatenate(batches), minlength=100)
    runs = []
    for seed in range(30):
        monitor = AccessMonitor({"t": 100}, capacity=1000, seed=seed)
        for ids in batches:
            monitor.observe({"t": ids}, examples=len(ids))
            assert monitor._count <= 1000
        assert monitor.rate <= 1000 / 120_000 * 2
        runs.append(monitor.profile(smooth=False).table("t").dense())
    mean = np.mean(runs, axis=0)
    # Of 30 samples of about 700 accesses; rows accessed 23,000 to 230 times each.
    error = np.sqrt(truth / np.mean([1 / 128]) / 30)
    assert (np.abs(mean - truth) < 5 * error).all()
    assert mean.sum() == pytest.approx(truth.sum(), rel=0.05)


def test_a_monitor_is_the_same_by_seed_and_refuses_what_is_not_there():
    ids = np.random.default_rng(0).integers(0, 50, 5000)
    profiles = []
    for _ in range(2):
        monitor = AccessMonitor({"t": 50}, capacity=300, seed=1)
        monitor.observe({"t": ids}, examples=5000)
        profiles.append(monitor.profile(smooth=False).table("t").dense())
    np.testing.assert_array_equal(*profiles)
    with pytest.raises(ProfileError, match="table 'u' is not monitored; those that are: t"):
        monitor.observe({"u": ids}, examples=1)
    with pytest.raises(ProfileError, match="table 't' of 50 rows was accessed at rows 0 to 50"):
        monitor.observe({"t": np.array([0, 50])}, examples=1)
    with pytest.raises(ValueError, match="capacity is 0"):
        AccessMonitor({"t": 1}, capacity=0)


def test_the_command_counts_and_writes(dataset, tmp_path, capsys):
    folder, _, expected = dataset
    out = tmp_path / "x.access"
    assert cli.main(["access", str(folder), "--sample", "0.3", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "sampled, 400 of 1,283 examples" in printed or "sampled, 3" in printed
    assert AccessProfile.load(out).table("b").rows == 70
    assert cli.main(["access", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    share = 100 * np.sort(expected["a"])[::-1][:3].sum() / expected["a"].sum()
    assert lines[2].split()[0] == "a"
    assert float(lines[2].split()[-2]) == pytest.approx(share, abs=0.06)
    assert cli.main(["access", str(tmp_path)]) == 2
