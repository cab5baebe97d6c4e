"""Every published format on its real sample, value by value against plain Python."""

import collections
import datetime
import gzip
import math

import numpy as np
import pytest
from prepare_reference import bounds, check_table, provenance, read_dataset, read_vocabulary

from jrec.data.schema import DatasetError
from jrec.prepare.prepare import prepare
from jrec.prepare.prepare_options import PrepareOptions
from jrec.prepare.readers import Avazu, Criteo, MovieLens, MovieLensOptions, Taobao

SMALL = PrepareOptions(block_size=512, shard_examples=4096, threads=2)


def rows_of(path, delimiter):
    with gzip.open(path, "rt", encoding="latin-1") as file:
        return [line.rstrip("\n").split(delimiter) for line in file]


def log1p(text):
    return np.float32(math.log1p(max(float(text or 0), 0)))


def check_splits(schema, rows):
    train, valid, _ = bounds(rows)
    assert {n: s.examples for n, s in schema.splits.items()} == {
        "train": train, "valid": valid - train, "test": rows - valid,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "file"), [("criteo-kaggle", "criteo_kaggle_80k.tsv.gz"), ("criteo-terabyte", "criteo_terabyte_1k.tsv.gz")]
)
def test_criteo(shared_data, tmp_path, name, file):
    schema = prepare(Criteo(name), [str(shared_data / file)], tmp_path / "out", SMALL)
    _, columns = read_dataset(tmp_path / "out")
    raw = list(zip(*rows_of(shared_data / file, "\t"), strict=True))
    rows = len(raw[0])
    check_splits(schema, rows)
    assert columns["label"] == [float(v) for v in raw[0]]
    for i in range(13):
        np.testing.assert_allclose(columns[f"I{i + 1}"], [log1p(v) for v in raw[1 + i]], rtol=1e-6)
    train = bounds(rows)[0]
    for i in range(26):
        feature = f"C{i + 1}"
        check_table(tmp_path / "out", schema, feature, {feature: list(raw[14 + i])}, columns, train, min_count=2)
    assert provenance(tmp_path / "out")["bad_lines"] == 0
    assert schema.name == name
    assert all(f.one_hot for f in schema.categorical)


def test_criteo_in_several_files_is_one_log(shared_data, tmp_path):
    with gzip.open(shared_data / "criteo_terabyte_1k.tsv.gz", "rb") as file:
        content = file.read().splitlines(keepends=True)
    (tmp_path / "day_0").write_bytes(b"".join(content[:300]))
    (tmp_path / "day_1.gz").write_bytes(gzip.compress(b"".join(content[300:])))
    source = Criteo("criteo-terabyte")
    prepare(source, [str(tmp_path / "day_0"), str(tmp_path / "day_1.gz")], tmp_path / "two", SMALL)
    prepare(source, [str(shared_data / "criteo_terabyte_1k.tsv.gz")], tmp_path / "one", SMALL)
    assert read_dataset(tmp_path / "two")[1] == read_dataset(tmp_path / "one")[1]


def test_preparing_twice_gives_the_same_bytes(shared_data, tmp_path):
    for out, threads in (("a", 1), ("b", 3)):
        options = PrepareOptions(block_size=512, shard_examples=1024, threads=threads)
        prepare(Avazu(), [str(shared_data / "avazu_9k.csv.gz")], tmp_path / out, options)
    files = sorted(p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*") if p.is_file())
    assert files == sorted(p.relative_to(tmp_path / "b") for p in (tmp_path / "b").rglob("*") if p.is_file())
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file


def test_criteo_capped_by_hashing(shared_data, tmp_path):
    options = PrepareOptions(max_rows=500, block_size=512, shard_examples=1 << 20)
    messages = []
    source = Criteo("criteo-kaggle")
    schema = prepare(
        source, [str(shared_data / "criteo_kaggle_80k.tsv.gz")], tmp_path / "out", options, report=messages.append
    )
    _, columns = read_dataset(tmp_path / "out")
    raw = list(zip(*rows_of(shared_data / "criteo_kaggle_80k.tsv.gz", "\t"), strict=True))
    train = bounds(len(raw[0]))[0]
    assert max(t.rows for t in schema.tables) == 500
    hashed = schema.table("C3")
    assert (hashed.vocabulary, hashed.oov_row) == (None, None)
    counts = np.load(tmp_path / "out" / hashed.counts)
    assert np.bincount(columns["C3"][:train], minlength=500).tolist() == counts.tolist()
    assert (np.diff(counts) <= 0).all()
    row_of = {}
    for value, row in zip(raw[16], columns["C3"], strict=True):
        assert row_of.setdefault(value, row) == row
    check_table(tmp_path / "out", schema, "C1", {"C1": list(raw[14])}, columns, train, min_count=2)
    assert any("'C3' is capped at 500 rows by hashing" in m for m in messages)


def test_avazu(shared_data, tmp_path):
    file = shared_data / "avazu_9k.csv.gz"
    schema = prepare(Avazu(), [str(file)], tmp_path / "out", SMALL)
    _, columns = read_dataset(tmp_path / "out")
    header, *raw = rows_of(file, ",")
    check_splits(schema, len(raw))
    by_name = dict(zip(header, zip(*raw, strict=True), strict=True))
    assert schema.dense == ()
    assert columns["label"] == [float(v) for v in by_name["click"]]
    hours = [datetime.datetime.strptime(h, "%y%m%d%H") for h in by_name["hour"]]
    by_name["hour_of_day"] = [str(h.hour) for h in hours]
    by_name["weekday"] = [str(h.weekday()) for h in hours]
    names = [f.name for f in schema.categorical]
    assert names == ["hour_of_day", "weekday", *(n for n in header if n not in ("id", "click", "hour"))]
    for name in names:
        values = {name: list(by_name[name])}
        check_table(tmp_path / "out", schema, name, values, columns, bounds(len(raw))[0], min_count=2)


@pytest.mark.parametrize("file", ["taobao_user_behavior_10k.csv.gz", "taobao_user_behavior_96k.csv.gz"])
def test_taobao(shared_data, tmp_path, file):
    """The 10k sample is grouped by user, so this also sorts."""
    schema = prepare(Taobao(), [str(shared_data / file)], tmp_path / "out", SMALL)
    _, columns = read_dataset(tmp_path / "out")
    raw = sorted(rows_of(shared_data / file, ","), key=lambda row: int(row[4]))
    check_splits(schema, len(raw))
    users, items, categories, behaviours, times = zip(*raw, strict=True)
    assert columns["label"] == [0.0 if b == "pv" else 1.0 for b in behaviours]
    china = datetime.timezone(datetime.timedelta(hours=8))
    local = [datetime.datetime.fromtimestamp(int(t), china) for t in times]
    values = {
        "user_id": list(users),
        "item_id": list(items),
        "category_id": list(categories),
        "hour_of_day": [str(t.hour) for t in local],
        "weekday": [str(t.weekday()) for t in local],
    }
    for name, column in values.items():
        check_table(tmp_path / "out", schema, name, {name: column}, columns, bounds(len(raw))[0], min_count=2)


def side_files(shared_data):
    users = {row[0]: row for row in rows_of(shared_data / "ml1m_users.dat.gz", "::")}
    movies = {row[0]: row for row in rows_of(shared_data / "ml1m_movies.dat.gz", "::")}
    return users, movies


def test_movielens_without_ratings(shared_data, tmp_path, monkeypatch):
    monkeypatch.setattr("jrec.prepare.readers.lines.BLOCK_BYTES", 10_000)  # histories of users go on in the next block
    paths = {k: str(shared_data / f"ml1m_{k}.dat.gz") for k in ("users", "movies")}
    _, *raw = rows_of(shared_data / "ml1m_user_item.csv.gz", ",")
    raw = raw[:20_000]
    (tmp_path / "log.csv").write_text("user_id,item_id\n" + "".join(f"{u},{m}\n" for u, m in raw))
    source = MovieLens(MovieLensOptions(**paths, negatives=2, seed=3))
    options = PrepareOptions(min_count=1, block_size=512, shard_examples=1 << 20)
    schema = prepare(source, [str(tmp_path / "log.csv")], tmp_path / "out", options)
    _, columns = read_dataset(tmp_path / "out")
    check_splits(schema, 3 * len(raw))
    names = {}
    for feature in ("user_id", "movie_id"):
        vocabulary, _ = read_vocabulary(tmp_path / "out", schema.table(feature))
        names[feature] = [vocabulary[row] for row in columns[feature]]
    found = list(zip(names["user_id"], names["movie_id"], columns["label"], strict=True))

    touched, histories = collections.defaultdict(set), collections.Counter(u for u, _ in raw)
    for user, movie in raw:
        touched[user].add(movie)
    passed, order = collections.Counter(), []
    for user, movie in raw:
        order.append((passed[user] * 2**32 // histories[user], user, movie))
        passed[user] += 1
    order.sort(key=lambda row: row[0])
    assert [row[:2] for row in found[::3] if row[1] is not None] == [
        row[1:] for row, kept in zip(order, found[::3], strict=True) if kept[1] is not None
    ]
    assert [row[2] for row in found] == [1.0, 0.0, 0.0] * len(raw)
    for i in range(0, len(found), 3):
        for user, movie, _ in found[i + 1 : i + 3]:
            assert user == found[i][0]
            assert movie not in touched[user]

    users, movies = side_files(shared_data)
    assert [f.name for f in schema.categorical] == [
        "user_id", "movie_id", "gender", "age", "occupation", "zip_code", "genres", "year",
    ]  # fmt: skip
    train = bounds(len(found))[0]
    for at, feature in ((1, "gender"), (2, "age"), (3, "occupation"), (4, "zip_code")):
        values = [users[user][at] for user, _, _ in found]
        check_table(tmp_path / "out", schema, feature, {feature: values}, columns, train, min_count=1)
    known = [movie for _, movie, _ in found]
    assert None not in known[:train]
    vocabulary, _ = read_vocabulary(tmp_path / "out", schema.table("genres"))
    for movie, genres in list(zip(known, columns["genres"], strict=True))[:train]:
        assert [vocabulary[g] for g in genres] == movies[movie][2].split("|")
    assert schema.categorical[6].max_length == max(len(g) for g in columns["genres"])
    assert not schema.categorical[6].fixed_length


def test_movielens_negatives_follow_the_seed(shared_data, tmp_path):
    _, *raw = rows_of(shared_data / "ml1m_user_item.csv.gz", ",")
    (tmp_path / "log.csv").write_text("user_id,item_id\n" + "".join(f"{u},{m}\n" for u, m in raw[:2000]))
    movies = []
    for out, seed in (("a", 0), ("b", 0), ("c", 1)):
        source = MovieLens(MovieLensOptions(seed=seed))
        prepare(source, [str(tmp_path / "log.csv")], tmp_path / out, PrepareOptions(min_count=1))
        movies.append(read_dataset(tmp_path / out)[1]["movie_id"])
    assert movies[0] == movies[1] != movies[2]


@pytest.mark.parametrize("form", ["dat", "csv"])
def test_movielens_ratings(tmp_path, form):
    rows = [(1, 10, 5, 300), (1, 20, 3, 100), (2, 10, 4, 200), (2, 30, 1, 100), (3, 20, 2, 50), (3, 10, 4.5, 400)]
    if form == "dat":
        text = "".join("::".join(map(str, row)) + "\n" for row in rows)
    else:
        text = "userId,movieId,rating,timestamp\n" + "".join(",".join(map(str, row)) + "\n" for row in rows)
    (tmp_path / "ratings").write_text(text)
    options = PrepareOptions(min_count=1, split=(1, 0, 0))
    source = MovieLens(MovieLensOptions())
    schema = prepare(source, [str(tmp_path / "ratings")], tmp_path / "out", options)
    _, columns = read_dataset(tmp_path / "out")
    ordered = sorted(rows, key=lambda row: row[3])
    assert columns["label"] == [float(row[2] >= 4) for row in ordered]
    for at, feature in ((0, "user_id"), (1, "movie_id")):
        values = {feature: [str(row[at]) for row in ordered]}
        check_table(tmp_path / "out", schema, feature, values, columns, len(rows), min_count=1)
    assert schema.splits["test"].shards == ()


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("a,b\n1,2\n", {}, "found neither user::movie::rating::timestamp nor a header"),
        ("user_id,item_id\n1,5\n2,6\n1,7\n", {}, r"log:4: user 1 again, after other users"),
        ("user_id,item_id\n1,5\n1,6\n", {}, "user 1 has interacted with all 2 movies"),
        ("user_id,item_id\n1,5\n-1,6\n", {}, r"log:3: field 'user' holds '-1', which is not an id"),
        ("1::5::5::100\n1::x::5::100\n", {}, r"log:2: field 'movie' holds 'x', which is not an integer"),
        ("user_id,item_id\n1,5\n2,6\n", {"users": "users"}, r"log:3: field 'user' holds '2', which is not in .*users"),
    ],
)
def test_movielens_errors(tmp_path, content, options, message):
    (tmp_path / "log").write_text(content)
    (tmp_path / "users").write_text("1::F::25::3::12345\n")
    options = {k: str(tmp_path / v) for k, v in options.items()}
    with pytest.raises(DatasetError, match=message):
        prepare(MovieLens(MovieLensOptions(**options)), [str(tmp_path / "log")], tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log", "users"]


@pytest.mark.parametrize(
    ("side", "message"),
    [
        ("1::F::25::3\n", r"users:1: the line has 4 field\(s\) where 5 are expected"),
        ("x::F::25::3::1\n", r"users:1: the id is 'x', which is not an integer"),
        ("1::F::25::3::1\n1::F::25::3::1\n", r"users: id 1 occurs more than once"),
        ("", "users is empty"),
    ],
)
def test_movielens_side_files_are_checked(tmp_path, side, message):
    (tmp_path / "users").write_text(side)
    with pytest.raises(DatasetError, match=message):
        MovieLens(MovieLensOptions(users=str(tmp_path / "users")))


CRITEO_LINE = "\t".join(["1", *(["2"] * 13), *(["0000000a"] * 26)])
TAOBAO_LINE = "1,2,3,pv,1511658000"


@pytest.mark.parametrize(
    ("source", "good", "bad", "message"),
    [
        (Criteo("criteo-kaggle"), CRITEO_LINE, CRITEO_LINE[2:], r"39 field\(s\) where 40 are expected .*have no label"),
        (
            Criteo("criteo-kaggle"),
            CRITEO_LINE,
            "2" + CRITEO_LINE[1:],
            "field 'label' holds '2', which is neither 0 nor 1",
        ),
        (
            Criteo("criteo-kaggle"),
            CRITEO_LINE,
            CRITEO_LINE.replace("2", "nan", 1),
            "'I1' holds 'nan', which is not a finite",
        ),
        (
            Criteo("criteo-kaggle"),
            CRITEO_LINE,
            CRITEO_LINE.replace("\t2\t0", "\tinf\t0"),
            "'I13' holds 'inf', which is not",
        ),
        (Criteo("criteo-kaggle"), CRITEO_LINE, CRITEO_LINE[:-1] + "g", "'C26' holds '0000000g', which is not 8 hexa"),
        (
            Taobao(),
            TAOBAO_LINE,
            TAOBAO_LINE.replace("pv", "view"),
            "'behaviour' holds 'view', which is none of pv, buy",
        ),
        (Taobao(), TAOBAO_LINE, "-" + TAOBAO_LINE, "'user_id' holds '-1', which is not an id"),
        (
            Taobao(),
            TAOBAO_LINE,
            TAOBAO_LINE.replace(",1511", ",-1511"),
            "'timestamp' holds '-1511658000', which is before",
        ),
        (Taobao(), TAOBAO_LINE, TAOBAO_LINE + "0" * 12, "'timestamp' holds .*, which is not an integer"),
        (Taobao(), TAOBAO_LINE, "", "the line is empty"),
    ],
)
def test_bad_lines_of_formats(tmp_path, source, good, bad, message):
    other = good.replace("pv", "buy") if good == TAOBAO_LINE else "0" + good[1:]
    (tmp_path / "log").write_text(f"{good}\n{other}\n{bad}\n{good}\n{good}\n")
    with pytest.raises(DatasetError, match=rf"log:3: .*{message}"):
        prepare(source, [str(tmp_path / "log")], tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["log"]
    schema = prepare(source, [str(tmp_path / "log")], tmp_path / "out", PrepareOptions(on_bad_line="skip"))
    assert sum(s.examples for s in schema.splits.values()) == 4
    assert schema.provenance["bad_lines"] == 1
    header, aside = (tmp_path / "out" / "bad_lines.tsv").read_text().splitlines()
    assert header.split("\t") == ["file", "line", "reason", "text"]
    assert aside.split("\t", 3)[:2] == [str(tmp_path / "log"), "3"]
    assert aside.split("\t", 3)[3] == bad


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("id,hour,C1", r"log:1: the header lacks C14, .*click"),
        ("x", "the header lacks"),
    ],
)
def test_avazu_headers(tmp_path, header, message):
    (tmp_path / "log").write_text(header + "\n")
    with pytest.raises(DatasetError, match=message):
        prepare(Avazu(), [str(tmp_path / "log")], tmp_path / "out")


def test_avazu_test_file_and_hours(shared_data, tmp_path):
    header, *rows = rows_of(shared_data / "avazu_9k.csv.gz", ",")
    without = [h for h in header if h != "click"]
    (tmp_path / "test.csv").write_text(",".join(without) + "\n")
    with pytest.raises(DatasetError, match="test file has no clicks"):
        prepare(Avazu(), [str(tmp_path / "test.csv")], tmp_path / "out")
    for hour in ("14102124", "14133100", "14022900", "14000100", "1"):
        row = [hour if h == "hour" else v for h, v in zip(header, rows[0], strict=True)]
        (tmp_path / "log").write_text(",".join(header) + "\n" + ",".join(row) + "\n")
        with pytest.raises(DatasetError, match=rf"log:2: field 'hour' holds '{hour}', which is not an hour"):
            prepare(Avazu(), [str(tmp_path / "log")], tmp_path / "out")
