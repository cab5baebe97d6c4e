"""Taobao's log as labelled sequences, against plain Python: targets, histories, negatives, order and split."""

import collections
import gzip

import numpy as np
import pytest
import sklearn.metrics
from prepare_reference import provenance, read_dataset, read_vocabulary

from benchmarks.accuracy_tbsm import rules
from jrec import cli
from jrec.data.schema import DatasetError
from jrec.prepare.prepare import prepare
from jrec.prepare.prepare_options import PrepareOptions
from jrec.prepare.readers import SequenceOptions, TaobaoSequences, lines, taobao
from jrec.prepare.synth import shape_like
from jrec.prepare.synth.examples import ExampleGenerator
from jrec.prepare.synth.teacher import Teacher

ALL = PrepareOptions(split=(1, 0, 0), min_count=1, block_size=64, shard_examples=256, threads=2)
FEATURES = ("user_id", "item_id", "category_id", "item_history", "category_history")


def events(seed=0, users=20, count=400, items=60):
    """(user, item, category, behaviour, time) in any order, with repeated seconds and items of changing category."""
    rng = np.random.default_rng(seed)
    columns = rng.zipf(1.5, count) % users, rng.zipf(1.3, count) % items, rng.random(count) < 0.05
    kinds, times = rng.choice(["pv", "buy", "cart", "fav"], count), rng.integers(1_511_600_000, 1_511_600_150, count)
    return [
        (1000 + int(u), int(i), 700 + int(i) % 7 + 50 * int(odd), str(b), int(t))
        for u, i, odd, b, t in zip(*columns, kinds, times, strict=True)
    ]


def write(path, log):
    path.write_text("".join(",".join(map(str, event)) + "\n" for event in log))
    return str(path)


def made(tmp_path, log, name="out", prepared=ALL, **options):
    """Examples in order, dicts of the raw values, from a log that is all training data."""
    folder = tmp_path / name
    path = write(tmp_path / f"{name}.csv", log)
    schema = prepare(TaobaoSequences(SequenceOptions(**options)), [path], folder, prepared)
    return raw_examples(folder, schema)


def raw_examples(folder, schema):
    _, columns = read_dataset(folder)
    values = {}
    for feature in schema.categorical:
        texts = [None if v is None else int(v) for v in read_vocabulary(folder, schema.table(feature.table))[0]]
        values[feature.name] = [
            [texts[i] for i in one] if isinstance(one, list) else texts[one] for one in columns[feature.name]
        ]
    rows = zip(columns["label"], *(values[name] for name in FEATURES), strict=True)
    return [dict(zip(("label", *FEATURES), row, strict=True)) for row in rows]


def positives_of(log, history=20):
    """What the positives have to be: in order of the target's time, then of user and of place in the history."""
    behaviours = collections.defaultdict(list)
    for event in sorted(log, key=lambda event: event[4]):  # stable: one second keeps the order of the file
        behaviours[event[0]].append(event)
    found = []
    for user, of in sorted(behaviours.items()):
        for k in range(1, len(of)):
            before = of[max(k - history, 0) : k]
            expected = {
                "label": 1.0, "user_id": user, "item_id": of[k][1], "category_id": of[k][2],
                "item_history": [e[1] for e in before], "category_history": [e[2] for e in before],
            }  # fmt: skip
            found.append((of[k][4], expected))
    return [expected for _, expected in sorted(found, key=lambda one: one[0])]


def check_negatives(examples, log, negatives, categories):
    """Behind each positive its negatives, which differ in the item, untouched by the user, and its category alone."""
    touched = collections.defaultdict(set)
    for user, item, *_ in log:
        touched[user].add(item)
    for start in range(0, len(examples), 1 + negatives):
        positive, *drawn = examples[start : start + 1 + negatives]
        assert [e["label"] for e in (positive, *drawn)] == [1.0] + [0.0] * negatives
        for negative in drawn:
            shared = ("user_id", "item_history", "category_history")
            assert [negative[name] for name in shared] == [positive[name] for name in shared]
            assert negative["item_id"] not in touched[negative["user_id"]]
            assert negative["category_id"] in categories[negative["item_id"]]


def first_categories(log):
    found = {}
    for _, item, category, *_ in log:
        found.setdefault(item, {category})
    return found


def all_categories(log):
    found = collections.defaultdict(set)
    for _, item, category, *_ in log:
        found[item].add(category)
    return found


@pytest.mark.parametrize(
    ("options", "categories"),
    [({}, all_categories), ({"draw": "uniform", "negatives": 3, "history": 4}, first_categories)],
    ids=["popularity", "uniform"],
)
def test_positives_histories_and_negatives(tmp_path, options, categories):
    log = events()
    examples = made(tmp_path, log, **options)
    negatives = options.get("negatives", 1)
    assert examples[:: 1 + negatives] == positives_of(log, options.get("history", 20))
    check_negatives(examples, log, negatives, categories(log))
    lengths = {len(e["item_history"]) for e in examples}
    assert (min(lengths), max(lengths)) == (1, options.get("history", 20))
    assert provenance(tmp_path / "out")["format_options"]["draw"] == options.get("draw", "popularity")


def test_the_result_depends_neither_on_blocks_nor_on_threads_but_on_the_seed(tmp_path, monkeypatch):
    log = events(seed=1)
    whole = made(tmp_path, log, "whole")
    monkeypatch.setattr(lines, "BLOCK_BYTES", 600)
    monkeypatch.setattr(taobao, "_READ_ROWS", 11)
    assert made(tmp_path, log, "pieces", PrepareOptions(split=(1, 0, 0), min_count=1, threads=1)) == whole
    other = made(tmp_path, log, "other", seed=7)
    assert other[::2] == whole[::2]
    assert sum(a != b for a, b in zip(other[1::2], whole[1::2], strict=True)) > len(whole) // 4
    assert not list(tmp_path.glob("*/work"))


def test_popularity_draws_events_around_the_positive_and_uniform_draws_items_alike(tmp_path, monkeypatch):
    """Item 1 has half of the events of the second half of the log, all of users below 400."""
    monkeypatch.setattr("jrec.prepare.readers.taobao_expand._LEAST_WINDOW", 8)
    rng = np.random.default_rng(0)
    n = 3000
    log = []
    for k in range(n):
        one = k > n / 2 and k % 2
        user, item = int(rng.integers(400)) + 400 * (not one), 1 if one else 2 + int(rng.integers(100))
        log.append((user, item, 5, "pv", 10**9 + k))
    for draw, late in (("popularity", 0.5), ("uniform", 1 / 101)):
        drawn = [e for e in made(tmp_path, log, draw, draw=draw)[1::2] if e["user_id"] >= 400]
        early = sum(user >= 400 for place, user in positive_places(log) if place <= n / 2)
        is_one = [e["item_id"] == 1 for e in drawn]
        assert np.mean(is_one[: early - 20]) == pytest.approx(0 if draw == "popularity" else late, abs=0.01)
        assert np.mean(is_one[early + 20 :]) == pytest.approx(late, abs=0.06)


def positive_places(log):
    """(place, user) of the events whose user had one before."""
    seen = set()
    for place, (user, *_) in enumerate(log):
        if user in seen:
            yield place, user
        seen.add(user)


def test_positives_per_user_are_some_of_all(tmp_path):
    log = events(seed=2)
    everything = positives_of(log)
    some = made(tmp_path, log, positives_per_user=3)[::2]
    counts = collections.Counter(e["user_id"] for e in some)
    of_all = collections.Counter(e["user_id"] for e in everything)
    assert counts == {user: min(count, 3) for user, count in of_all.items()}
    remaining = iter(everything)
    assert all(example in remaining for example in some)  # in the same order
    first = [e for e in everything if e["user_id"] == of_all.most_common(1)[0][0]][:3]
    assert [e for e in some if e["user_id"] == first[0]["user_id"]] != first


def test_the_split_is_by_the_time_of_the_target_and_rows_by_accesses_of_targets_and_histories(tmp_path):
    log = events(seed=3)
    path = write(tmp_path / "log.csv", log)
    schema = prepare(TaobaoSequences(), [path], tmp_path / "out", PrepareOptions(block_size=64, shard_examples=64))
    expected = positives_of(log)
    total = 2 * len(expected)
    assert [schema.splits[s].examples for s in ("train", "valid", "test")] == [
        int(total * 0.8), int(total * 0.9) - int(total * 0.8), total - int(total * 0.9),
    ]  # fmt: skip
    examples = raw_examples(tmp_path / "out", schema)
    assert [e["user_id"] for e in examples[::2]] == [e["user_id"] for e in expected]
    assert [(f.name, f.table, f.max_length, f.one_hot) for f in schema.categorical] == [
        ("user_id", "user_id", 1, True), ("item_id", "item_id", 1, True), ("category_id", "category_id", 1, True),
        ("item_history", "item_id", 20, False), ("category_history", "category_id", 20, False),
    ]  # fmt: skip
    assert schema.dense == ()
    train = examples[: schema.splits["train"].examples]
    seen = collections.Counter(i for e in train for i in (e["category_id"], *e["category_history"]))
    values, counts = read_vocabulary(tmp_path / "out", schema.table("category_id"))
    assert {int(v): c for v, c in zip(values, counts, strict=True) if v is not None} == {
        v: c for v, c in seen.items() if v is not None
    }


def test_popularity_of_the_benchmark_is_a_count_of_positives_in_train(tmp_path):
    path = write(tmp_path / "log.csv", events(seed=5, count=900, items=90))
    schema = prepare(TaobaoSequences(), [path], tmp_path / "out", PrepareOptions(block_size=64, shard_examples=256))
    examples = raw_examples(tmp_path / "out", schema)
    train, test = examples[: schema.splits["train"].examples], examples[-schema.splits["test"].examples :]
    labels = [e["label"] for e in test]
    expected = {}
    for name in ("item", "category"):
        counts = collections.Counter(e[f"{name}_id"] for e in train if e["label"])
        counts[None] = 0  # out of the vocabulary
        scores = [counts[e[f"{name}_id"]] for e in test]
        expected[f"popularity of {name}"] = sklearn.metrics.roc_auc_score(labels, scores)
    known = [e["category_id"] in e["category_history"] for e in test]
    expected["category in history"] = sklearn.metrics.roc_auc_score(labels, known)
    times = [e["category_history"].count(e["category_id"]) for e in test]
    expected["times of category in history"] = sklearn.metrics.roc_auc_score(labels, times)
    assert rules(tmp_path / "out") == pytest.approx(expected, abs=1e-6)


def test_real_behaviours(shared_data, tmp_path):
    """The 10k sample: 114 users over 9 days; every positive is the user's next behaviour."""
    file = shared_data / "taobao_user_behavior_10k.csv.gz"
    with gzip.open(file, "rt") as text:
        log = [tuple(v if k == 3 else int(v) for k, v in enumerate(line.strip().split(","))) for line in text]
    schema = prepare(TaobaoSequences(), [str(file)], tmp_path / "out", ALL)
    examples = raw_examples(tmp_path / "out", schema)
    assert len(examples) == 2 * (len(log) - len({event[0] for event in log}))
    assert examples[::2] == positives_of(log)
    check_negatives(examples, log, 1, all_categories(log))


@pytest.mark.parametrize(
    ("log", "message"),
    [
        ([(1, 5, 1, "pv", 10), (2, 5, 1, "pv", 11)], "no user of the log has two behaviours"),
        ([(1, 5, 1, "pv", 10), (1, 6, 1, "pv", 11), (2, 5, 1, "pv", 12)], "user 1 has touched every item of the log"),
        ([(1, 5, 1, "seen", 10)], "'seen', which is none of pv, buy, cart, fav"),
    ],
)
@pytest.mark.parametrize("draw", ["popularity", "uniform"])
def test_logs_without_sequences(tmp_path, log, message, draw):
    with pytest.raises(DatasetError, match=message):
        made(tmp_path, log, draw=draw)
    assert not (tmp_path / "out").exists()


def test_a_user_who_has_touched_nearly_everything_gets_what_is_left(tmp_path):
    log = [(1, item, 3, "pv", item) for item in range(300)] + [(2, 300, 4, "pv", 10)]
    assert {e["item_id"] for e in made(tmp_path, log)[1::2]} == {300}
    assert {e["category_id"] for e in made(tmp_path, log, "uniform", draw="uniform")[1::2]} == {4}


def test_options_on_the_command_line(tmp_path, capsys):
    path = write(tmp_path / "log.csv", events(seed=4, count=100))
    out = str(tmp_path / "out")
    arguments = ["prepare", "taobao", "--input", path, "--out", out, "--quiet"]
    assert cli.main([*arguments, "--negatives", "2", "--history", "5", "--draw", "uniform"]) == 0
    options = provenance(tmp_path / "out")["format_options"]
    assert (options["form"], options["negatives"], options["history"], options["draw"]) == ("sequence", 2, 5, "uniform")
    assert cli.main([*arguments, "--form", "intent", "--overwrite"]) == 0
    assert "3 tables" not in capsys.readouterr().out.splitlines()[-1]
    assert cli.main([*arguments, "--overwrite", "--form", "intent", "--history", "3"]) == 2
    assert "--history is an option of --form sequence" in capsys.readouterr().err
    for option in ("negatives", "positives_per_user"):
        with pytest.raises(DatasetError, match=f"--{option.replace('_', '-')} is 0; it must be at least 1"):
            SequenceOptions(**{option: 0})


def test_synthetic_sequences_have_histories_that_say_something_about_the_target():
    """At full cardinality; an item has one category wherever it stands, and late steps matter most."""
    shape = shape_like("taobao")
    assert shape.rows == {"user_id": 987_994, "item_id": 4_162_024, "category_id": 9_439}
    source = ExampleGenerator(shape=shape, seed=3, total=10**7)
    examples = source.examples(np.arange(0, 10**7, 5000))
    items = examples.items
    np.testing.assert_array_equal(items["item_history"].offsets, items["category_history"].offsets)
    lengths = np.diff(items["item_history"].offsets)
    assert (lengths.min(), lengths.max()) == (0, 20)
    category_of = {}
    for item, category in (("item_id", "category_id"), ("item_history", "category_history")):
        for i, c in zip(items[item].items.tolist(), items[category].items.tolist(), strict=True):
            assert category_of.setdefault(i, c) == c
    owner = np.repeat(np.arange(len(lengths)), lengths)
    expected = np.zeros(len(lengths))
    for target, history in shape.matches:
        age = items[history].offsets[owner + 1] - np.arange(len(owner))
        same = items[history].items == items[target].items[owner]
        expected += np.bincount(owner, same / age, len(lengths))
    teacher = Teacher.calibrated(source)
    np.testing.assert_allclose(teacher.parts(examples)[3], expected)
    assert 0.1 < np.mean(expected > 0) < 0.6
    labels = teacher.labels(examples, teacher.logits(examples))
    assert labels.mean() == pytest.approx(0.5, abs=0.05)
    assert labels[expected > 1].mean() > 0.8
