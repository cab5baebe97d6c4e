"""FAE's calibrator: the Rand-Em Box's equations and bounds, the optimizer, the sampler, and the file."""

import dataclasses
import json
import math

import numpy as np
import pytest
import scipy.stats

from benchmarks.studies.fae.figures import threshold_curve
from jrec.access.calibrate import CalibrateOptions, Calibration, CalibrationError, SampleOptions, calibrate
from jrec.access.calibrate.calibrator import count_accesses
from jrec.access.calibrate.file import KIND, VERSION
from jrec.access.calibrate.sample import FEW_HITS, RandEmBox, hot_rows
from jrec.access.container import write_container
from jrec.access.count import sample_blocks
from jrec.access.profile import TableProfile
from jrec.data.bijection import save_order
from jrec.data.blocks import ListColumn, ShardReader, ShardWriter
from jrec.data.schema import CategoricalFeature, DatasetError, Schema, Split, Table
from jrec.errors import ConfigError

BLOCK, EXAMPLES = 100, 6000
ROWS = {"items": 5000, "users": 900, "tiny": 4}
EXACT = CalibrateOptions(budget=3000.0, row_bytes=2, small_bytes=100)
SAMPLE = SampleOptions(rate=0.5, chunks=5, chunk_rows=100, confidence=0.99)
SAMPLED = dataclasses.replace(EXACT, sample=SAMPLE)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """60 blocks of items, lists of items, users and a tiny table; rows descend by frequency, nearly."""
    folder = tmp_path_factory.mktemp("fae") / "data"
    folder.mkdir()
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 3, EXAMPLES)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    columns = {
        "label": np.zeros(EXAMPLES, np.float32),
        "item": np.minimum(rng.zipf(1.4, EXAMPLES) - 1, ROWS["items"] - 1).astype(np.uint16),
        "history": ListColumn(offsets, ((rng.zipf(1.4, offsets[-1]) - 1) % ROWS["items"]).astype(np.uint16)),
        "user": ((rng.zipf(1.3, EXAMPLES) - 1) % ROWS["users"]).astype(np.uint16),
        "tiny": rng.integers(0, 4, EXAMPLES).astype(np.uint8),
    }
    with ShardWriter(folder / "train-00000-of-00001.array_record", BLOCK) as writer:
        writer.write(columns)
    Schema(
        name="shop",
        block_size=BLOCK,
        dense=(),
        categorical=(
            CategoricalFeature(name="item", table="items", fixed_length=True),
            CategoricalFeature(name="history", table="items", max_length=2),
            CategoricalFeature(name="user", table="users", fixed_length=True),
            CategoricalFeature(name="tiny", table="tiny", fixed_length=True),
        ),
        tables=tuple(Table(name=name, rows=rows) for name, rows in ROWS.items()),
        splits={"train": Split(shards=(writer.close(),)), "test": Split(shards=())},
        provenance={},
    ).save(folder)
    return folder


def columns_of(data, blocks):
    """Ids of some blocks: items, lists of items as (examples, list), users."""
    schema = Schema.load(data)
    reader = ShardReader(data, schema.splits["train"].shards[0])
    found = []
    for _, block in blocks:
        columns = reader.read(block)
        lists = columns["history"]
        assert isinstance(lists, ListColumn)
        ends = lists.offsets.tolist()
        found += [
            ({int(columns["item"][i]), *lists.values[ends[i] : ends[i + 1]].tolist()}, int(columns["user"][i]))
            for i in range(BLOCK)
        ]
    return found


def counts_of(data, blocks):
    """Accesses of items and users in some blocks."""
    schema = Schema.load(data)
    reader = ShardReader(data, schema.splits["train"].shards[0])
    found = {name: np.zeros(rows, np.int64) for name, rows in ROWS.items()}
    for _, block in blocks:
        columns = reader.read(block)
        for feature in schema.categorical:
            column = columns[feature.name]
            np.add.at(found[feature.table], column.values if isinstance(column, ListColumn) else column, 1)
    return found


# The Rand-Em Box


def zipf_profile(rows, accesses, seed=0, exponent=1.05):
    """Poisson counts of a power law."""
    weights = np.arange(1, rows + 1) ** -float(exponent)
    return TableProfile.from_counts("t", np.random.default_rng(seed).poisson(accesses * weights / weights.sum()))


def test_the_bound_is_equation_5_with_the_correction_of_the_rows_drawn():
    rows, chunks, chunk_rows = 50_000, 10, 400
    profile = zipf_profile(rows, 200_000)
    box = RandEmBox(profile, SampleOptions(confidence=0.99, seed=3, chunks=chunks, chunk_rows=chunk_rows))
    found = box.estimate(2)
    drawn = np.random.default_rng((3, 0)).choice(rows, chunks * chunk_rows, replace=False, shuffle=True)
    assert len(set(drawn.tolist())) == chunks * chunk_rows
    y = (profile.dense()[drawn].reshape(chunks, chunk_rows) >= 2).sum(axis=1)
    assert y.sum() > FEW_HITS
    correction = (rows - chunks * chunk_rows) / rows
    upper = y.mean() + scipy.stats.t.ppf(0.99, chunks - 1) * math.sqrt(correction * y.var(ddof=1) / chunks)
    assert found.rows == pytest.approx(y.mean() / chunk_rows * rows)
    assert found.bound == pytest.approx(upper / chunk_rows * rows)
    assert found.method == "t"


def test_with_few_hot_rows_the_bound_is_clopper_and_pearsons():
    profile = zipf_profile(200_000, 400_000)
    box = RandEmBox(profile, SampleOptions(seed=1))
    cutoff = float(np.sort(profile.dense())[-3])  # 3 rows are hot; most likely none is drawn
    found = box.estimate(cutoff)
    hits = round(found.rows * box.drawn / profile.rows)
    share = found.bound / profile.rows
    assert found.method == "clopper-pearson"
    assert scipy.stats.binom.cdf(hits, box.drawn, share) == pytest.approx(0.001)
    assert found.bound > 10


@pytest.mark.parametrize(("rows", "accesses"), [(60_000, 30_000), (60_000, 600_000), (400_000, 100_000)])
def test_bounds_hold(rows, accesses):
    profile = zipf_profile(rows, accesses)
    dense = np.sort(profile.dense())
    cutoffs = np.unique([max(dense[-k], 1.0) for k in (2, 30, 600, 3000, rows // 10)])
    truth = {cutoff: hot_rows(profile, cutoff) for cutoff in cutoffs}
    failures = dict.fromkeys(cutoffs, 0)
    trials = 60
    for seed in range(trials):
        box = RandEmBox(profile, SampleOptions(seed=seed))
        for cutoff in cutoffs:
            found = box.estimate(cutoff)
            failures[cutoff] += found.bound < truth[cutoff]
            assert found.rows <= found.bound <= rows
    assert max(failures.values()) <= 1, failures


def test_chunks_of_neighbours_would_not_do():
    """Rows descend by frequency: the spread between chunks of neighbours is that between hot and cold."""
    profile = zipf_profile(100_000, 500_000)
    dense = profile.dense()
    cutoff = 5
    neighbours = (dense[: 35 * 1024].reshape(35, 1024) >= cutoff).sum(axis=1)
    drawn = RandEmBox(profile, SampleOptions())._accesses >= cutoff
    assert drawn.sum(axis=1).std() < 0.1 * neighbours.std()


def test_small_tables_and_a_cutoff_of_zero_are_counted():
    profile = zipf_profile(35 * 1024 - 1, 100_000)
    found = RandEmBox(profile, SampleOptions()).estimate(3)
    assert (found.rows, found.bound, found.method) == (hot_rows(profile, 3), hot_rows(profile, 3), "counted")
    large = zipf_profile(35 * 1024, 100_000)
    assert RandEmBox(large, SampleOptions()).estimate(3).method == "t"
    assert RandEmBox(large, SampleOptions()).estimate(0) == dataclasses.replace(found, rows=35 * 1024, bound=35 * 1024)


def test_tables_draw_rows_of_their_own():
    profile = zipf_profile(60_000, 30_000)
    one, other = (RandEmBox(profile, SampleOptions(), number=number)._accesses for number in (0, 1))
    assert not np.array_equal(one, other)


@pytest.mark.parametrize(
    "options",
    [
        {"chunks": 1},
        {"chunk_rows": 0},
        {"confidence": 0.4},
        {"confidence": 1.0},
        {"rate": 0},
        {"rate": 1.5},
        {"seed": -1},
    ],
    ids=str,
)
def test_impossible_samples_are_refused(options):
    with pytest.raises(ConfigError):
        SampleOptions(**options)


# Exact counts


def with_counts(data):
    """The dataset's schema with counts beside it, as preparation leaves them."""
    for name, count in counts_of(data, [(0, b) for b in range(60)]).items():
        np.save(data / f"counts_{name}.npy", count)
    schema = Schema.load(data)
    return dataclasses.replace(
        schema, tables=tuple(dataclasses.replace(t, counts=f"counts_{t.name}.npy") for t in schema.tables)
    )


def test_exact_counts_are_of_all_inputs(data):
    found = calibrate(data, dataclasses.replace(EXACT, smooth=False))
    counts = counts_of(data, [(0, b) for b in range(60)])
    assert found.cutoff is not None
    for name in ("items", "users"):
        np.testing.assert_array_equal(found.rows[name], np.flatnonzero(counts[name] >= found.cutoff))
    np.testing.assert_array_equal(found.rows["tiny"], np.arange(4))
    assert found.counted_inputs == EXAMPLES
    assert found.threshold == found.cutoff / EXAMPLES


@pytest.mark.parametrize("smooth", [False, True])
def test_the_threshold_is_the_least_that_fits(data, smooth):
    options = dataclasses.replace(EXACT, smooth=smooth)
    found = calibrate(data, options)
    assert found.cutoff is not None
    assert found.hot_bytes <= EXACT.budget
    profile, _ = count_accesses(data, Schema.load(data), options)
    profiles = [profile.table(name) for name in ("items", "users")]
    lower = max(c for p in profiles for c in p.counts if c < found.cutoff)
    assert 2 * (4 + sum(hot_rows(p, lower) for p in profiles)) > EXACT.budget


def test_the_datasets_own_counts_are_taken_and_nothing_else_is_drawn(data, monkeypatch):
    counted, read = calibrate(data, EXACT), []
    schema, real = with_counts(data), ShardReader.read
    monkeypatch.setattr(ShardReader, "read", lambda self, block: read.append(block) or real(self, block))
    by_counts = calibrate(data, EXACT, schema=schema)
    assert "counted in preparation" in by_counts.source
    assert len(read) == 3  # 5 % of the blocks, for the share of hot inputs
    assert dataclasses.replace(by_counts, source="", dataset=counted.dataset) == dataclasses.replace(counted, source="")
    for name in ROWS:
        np.testing.assert_array_equal(by_counts.rows[name], counted.rows[name])


def test_the_share_of_hot_inputs_is_that_of_the_blocks_read(data):
    found = calibrate(data, EXACT)
    schema = Schema.load(data)
    inputs = columns_of(data, count_accesses(data, schema, EXACT)[1])
    items, users = (set(found.rows[name].tolist()) for name in ("items", "users"))
    hot = np.reshape([i <= items and u in users for i, u in inputs], (3, BLOCK)).sum(axis=1)
    assert found.hot_inputs.inputs == 300
    assert found.hot_inputs.share == pytest.approx(hot.sum() / 300)
    assert found.hot_inputs.error == pytest.approx(hot.std(ddof=1) / BLOCK / np.sqrt(3))


def test_exact_counts_make_more_inputs_hot_than_any_sample_does(data):
    """Rows in the order of their own counts are the best that fit the budget; in a sample, averages help."""
    sample = dataclasses.replace(SAMPLE, rate=0.2)
    found = {
        "exact": calibrate(data, EXACT),
        "smoothed": calibrate(data, dataclasses.replace(EXACT, sample=sample)),
        "raw": calibrate(data, dataclasses.replace(EXACT, sample=sample, smooth=False)),
    }
    counts = counts_of(data, [(0, b) for b in range(60)])
    accesses = {name: sum(counts[table][rows].sum() for table, rows in one.rows.items()) for name, one in found.items()}
    assert accesses["exact"] > accesses["smoothed"] > accesses["raw"]


# A sample


def test_the_sampler_reads_no_other_blocks(data, monkeypatch):
    read, real = [], ShardReader.read
    monkeypatch.setattr(ShardReader, "read", lambda self, block: read.append(block) or real(self, block))
    found = calibrate(data, dataclasses.replace(SAMPLED, sample=dataclasses.replace(SAMPLE, rate=0.2)))
    assert len(read) == len(set(read)) == 12
    assert found.counted_inputs == 1000
    assert found.hot_inputs.inputs == 200


@pytest.mark.parametrize("seed", [0, 1])
def test_a_sample_decides_by_its_counts_and_bounds(data, seed):
    sample = dataclasses.replace(SAMPLE, seed=seed)
    options = dataclasses.replace(SAMPLED, smooth=False, sample=sample)
    found, schema = calibrate(data, options), Schema.load(data)
    profile, held_out = count_accesses(data, schema, options)
    used = sorted(set(sample_blocks(schema, "train", fraction=0.5, seed=seed)) - set(held_out))
    counts = counts_of(data, used)
    assert found.cutoff is not None
    assert found.threshold == found.cutoff / found.counted_inputs == found.cutoff / (100 * len(used))
    for name in ("items", "users"):
        np.testing.assert_array_equal(found.rows[name], np.flatnonzero(counts[name] >= found.cutoff))
    np.testing.assert_array_equal(found.rows["tiny"], np.arange(4))

    def bound(cutoff):
        boxes = (RandEmBox(profile.table(n), sample, number=k) for k, n in enumerate(("items", "users")))
        return 2 * (4 + sum(box.estimate(cutoff).bound for box in boxes))

    lower = max(count for name in ("items", "users") for count in counts[name] if count < found.cutoff)
    assert found.hot_bytes <= bound(found.cutoff) <= EXACT.budget < bound(lower)
    held = columns_of(data, held_out)
    items, users = (set(found.rows[name].tolist()) for name in ("items", "users"))
    assert found.hot_inputs.share == pytest.approx(np.mean([i <= items and u in users for i, u in held]))


def test_confidence_and_chunks_decide(data):
    """Nothing is counted anew behind the Rand-Em Box."""
    sizes = [
        calibrate(data, dataclasses.replace(EXACT, sample=dataclasses.replace(SAMPLE, **change))).hot_bytes
        for change in ({}, {"confidence": 0.5}, {"chunks": 2, "chunk_rows": 1})
    ]
    assert sizes[1] > sizes[0] > sizes[2]


def test_a_bound_that_does_not_hold_is_no_reason_to_count_anew(data, monkeypatch):
    monkeypatch.setattr(RandEmBox, "_t_bound", lambda self, hits: 1.0)
    monkeypatch.setattr(RandEmBox, "_most", lambda self, total: 0.0)
    assert calibrate(data, SAMPLED).hot_bytes > EXACT.budget


def test_samples_of_few_blocks_are_refused(data):
    with pytest.raises(ConfigError, match=r"a sample of 15 % is 9 block\(s\), too few .* leave --sample out"):
        calibrate(data, dataclasses.replace(EXACT, sample=dataclasses.replace(SAMPLE, rate=0.15)))


# All calibrations


def test_budgets_for_all_and_for_none(data):
    everything = calibrate(data, dataclasses.replace(EXACT, budget=1e9))
    assert everything.threshold == everything.cutoff == 0
    assert all(t.hot == t.rows for t in everything.tables)
    assert everything.hot_inputs.share == 1
    nothing = calibrate(data, dataclasses.replace(EXACT, budget=0, small_bytes=0))
    assert nothing.threshold is None
    assert nothing.hot_bytes == nothing.hot_inputs.share == 0
    small = calibrate(data, dataclasses.replace(EXACT, budget=9))
    assert [t.hot for t in small.tables] == [0, 0, 4]
    with pytest.raises(ConfigError, match=r"tables below .* whose rows are all hot, take .* more than the budget"):
        calibrate(data, dataclasses.replace(EXACT, budget=7))


@pytest.mark.parametrize(
    "options", [{"budget": -1}, {"budget": math.inf}, {"row_bytes": 0}, {"small_bytes": -1}], ids=str
)
def test_impossible_options_are_refused(options):
    with pytest.raises(ConfigError):
        CalibrateOptions(**options)


def test_a_dataset_without_training_examples_is_refused(data):
    schema = Schema.load(data)
    splits = {"test": schema.splits["train"], "train": Split(shards=())}
    for options in (EXACT, SAMPLED):
        with pytest.raises(DatasetError, match=r"'train' .* is empty"):
            calibrate(data, options, schema=dataclasses.replace(schema, splits=splits))


@pytest.mark.parametrize("options", [EXACT, SAMPLED], ids=["exact", "sampled"])
def test_reordered_rows_have_the_loaders_numbers(data, tmp_path, options):
    plain = calibrate(data, options)
    order = np.random.default_rng(0).permutation(ROWS["items"]).astype(np.uint32)
    schema = Schema.load(data)
    for path in data.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    entry = save_order(tmp_path, "items", order)
    tables = tuple(dataclasses.replace(t, bijection=entry) if t.name == "items" else t for t in schema.tables)
    moved = calibrate(tmp_path, options, schema=dataclasses.replace(schema, tables=tables))
    np.testing.assert_array_equal(moved.rows["items"], np.sort(order[plain.rows["items"]]))
    np.testing.assert_array_equal(moved.rows["users"], plain.rows["users"])
    assert moved.hot_inputs == plain.hot_inputs
    with pytest.raises(CalibrationError, match="order of table items"):
        moved.check_dataset(schema)


# Files and figures


def test_files_are_read_as_they_were_written(data, tmp_path):
    found = calibrate(data, SAMPLED)
    found.save(tmp_path / "c.fae")
    again = Calibration.load(tmp_path / "c.fae")
    assert again == found
    for name, rows in found.rows.items():
        assert again.rows[name].dtype == np.uint32
        np.testing.assert_array_equal(again.rows[name], rows)
    again.check_dataset(Schema.load(data))
    hot = again.hot_set()
    assert (hot.dataset, hot.threshold) == (found.dataset, found.threshold)
    json.dumps(hot.calibration, allow_nan=False)


def test_damaged_files_are_named(data, tmp_path):
    found = calibrate(data, SAMPLED)
    path = tmp_path / "c.fae"
    found.save(path)
    content = path.read_bytes()
    for broken, message in ((content[:50], "is truncated"), (b"{}", "no jrec-fae-calibration file"),
                            (content.replace(b"calibration 4", b"calibration 9"), "version 9"),
                            (content.replace(b'"inputs"', b'"outputs"'), "damaged: its checksum")):  # fmt: skip
        path.write_bytes(broken)
        with pytest.raises(CalibrationError, match=rf"c\.fae .*{message}"):
            Calibration.load(path)
    header = {**found.summary(), "hot_bytes": found.hot_bytes + 1}
    write_container(path, kind=KIND, version=VERSION, header=header, arrays=found.rows)
    with pytest.raises(CalibrationError, match=r"c\.fae does not hold the hot rows"):
        Calibration.load(path)


def test_figures_show_what_was_counted(data):
    schema = Schema.load(data)
    curve = threshold_curve(data, schema, SAMPLED)
    assert (np.diff(curve.true_megabytes) >= 0).all()
    assert (np.diff(curve.hot_inputs) >= 0).all()
    assert curve.hot_inputs[0] < curve.hot_inputs[-1]
    profile, _ = count_accesses(data, schema, SAMPLED)
    middle = curve.thresholds[8] * profile.examples
    expected = 2e-6 * (4 + sum(hot_rows(profile.table(name), middle) for name in ("items", "users")))
    assert curve.true_megabytes[8] == pytest.approx(expected)


@pytest.mark.slow
def test_the_benchmark_measures_what_it_promises(monkeypatch, capsys, tmp_path):
    from benchmarks import fae
    from benchmarks.studies.fae import calibration

    for name, value in (
        ("QUICK_TRIALS", 3), ("SIZES", (50_000,)), ("SHARES", (0.05, 0.0001)), ("QUICK_EXAMPLES", 20_000),
        ("QUICK_BLOCK", 64), ("BUDGETS", (4e6, 5e6)),
    ):  # fmt: skip
        monkeypatch.setattr(calibration, name, value)
    out = tmp_path / "out.jsonl"
    monkeypatch.setattr("sys.argv", ["benchmark", "--quick", "--part", "calibration", "--out", str(out)])
    fae.main()
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert results == [json.loads(line) for line in out.read_text().splitlines()]
    found = {(r["case"], r["metric"]): r for r in results}
    assert found["Rand-Em Box, 50,000 rows, 5 % hot", "99.9 % upper bound holds, of 3 trials"]["value"] == 100
    assert found["Rand-Em Box, 50,000 rows", "one threshold, median"]["ratio"] > 0
    case = "kaggle, 16,000 inputs"
    assert found[case, "calibration at 5 %, median"]["ratio"] > 0
    assert found[case, "packing, median"]["unit"] == "inputs/s"
    assert 0 < found[f"{case}, budget 4 MB", "Jaccard index with exact counts"]["value"] <= 1
    foreseen, packed = (found[case, f"hot inputs {what}"]["value"] for what in ("foreseen", "packed"))
    assert foreseen == pytest.approx(packed, abs=10)
