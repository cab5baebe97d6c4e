"""Tables by frequency, in one pass or several, capped by hashing or not; and the store of long texts."""

import collections
import pickle
import time
import tracemalloc

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from jrec.data import vocabulary
from jrec.data.keys import buckets, text_key
from jrec.data.long_texts import LongTexts
from jrec.data.schema import DatasetError
from jrec.data.texts import BUDGET, TextStore
from jrec.data.vocabulary import HashedTable, Vocabulary, _hash_table, build_table
from jrec.prepare.readers.movielens_side import encode_texts

KEYS = st.lists(st.lists(st.integers(0, 40), max_size=60), max_size=4)


def chunks(lists):
    return lambda: (np.array([text_key(str(v)) if v else 0 for v in chunk], np.uint64) for chunk in lists)


@hypothesis.example([list(range(1, 10))], 1, 8)  # the second of four parts has too many values for a pass
@hypothesis.given(KEYS, st.integers(1, 4), st.sampled_from([8, 16, 64, 1 << 20]))
def test_a_table_is_a_plain_count(lists, min_count, slots):
    """Few slots force several passes; the result must not show it."""
    keys = chunks(lists)
    built = build_table("t", keys, min_count=min_count, max_rows=None, slots=slots)
    assert isinstance(built, Vocabulary)
    seen = collections.Counter(int(k) for chunk in keys() for k in chunk)
    kept = sorted((-c, k) for k, c in seen.items() if c >= min_count)
    rare = sum(c for c in seen.values() if c < min_count)
    expected = [(c, 0, k) for c, k in kept]
    expected = sorted([*expected, (-rare, 1, None)], key=lambda e: e[:2])
    assert built.counts.tolist() == [-c for c, _, _ in expected]
    assert built.oov_row == [k for _, _, k in expected].index(None)
    assert [int(k) for i, k in enumerate(built.keys) if i != built.oov_row] == [k for _, k in kept]
    row_of = {int(k): i for i, k in enumerate(built.keys) if i != built.oov_row}
    asked = np.array([*seen, text_key("never seen"), 0], np.uint64)
    assert built.encoder()(asked).tolist() == [row_of.get(int(k), built.oov_row) for k in asked]


@hypothesis.given(KEYS, st.integers(1, 12))
def test_a_capped_table_is_a_plain_hash(lists, max_rows):
    keys = chunks(lists)
    plain = build_table("t", keys, min_count=1, max_rows=None)
    built = build_table("t", keys, min_count=1, max_rows=max_rows)
    if len(plain.counts) <= max_rows:
        assert isinstance(built, Vocabulary)
        return
    assert isinstance(built, HashedTable)
    assert built.oov_row is None
    every = np.concatenate([*keys(), np.empty(0, np.uint64)])
    bucket = buckets(every, max_rows) if max_rows > 1 else np.zeros(len(every), np.uint32)
    counts = np.bincount(bucket, minlength=max_rows)
    assert built.counts.tolist() == sorted(counts.tolist(), reverse=True)
    rows = built.encoder()(every)
    assert np.bincount(rows, minlength=max_rows).tolist() == built.counts.tolist()
    # The same bucket is the same row, another bucket another row.
    assert len(set(zip(bucket.tolist(), rows.tolist(), strict=True))) == len(set(bucket.tolist()))
    assert sorted(built.row_of_bucket.tolist()) == list(range(max_rows))


def test_counting_a_capped_table_costs_what_its_keys_cost():
    """Not the table's size for every block of keys: at Terabyte's size that is terabytes of memory traffic."""
    rows = 4_000_000
    values = np.random.default_rng(0).integers(0, 2**63, 4000).astype(np.uint64)
    _hash_table(lambda: [values], 2)  # compiles
    start = time.perf_counter()
    built = _hash_table(lambda: np.array_split(values, 1000), rows)
    seconds = time.perf_counter() - start
    counts = np.bincount(buckets(values, rows), minlength=rows)
    np.testing.assert_array_equal(built.counts, np.sort(counts)[::-1])
    np.testing.assert_array_equal(built.counts[built.row_of_bucket[:1000]], counts[:1000])
    assert seconds < 2  # reading and writing the table for every block takes about 10


def test_many_distinct_values_in_several_passes():
    values = np.random.default_rng(0).integers(0, 50_000, 200_000).astype(np.uint64)
    one = build_table("t", lambda: [values], min_count=2, max_rows=None)
    many = build_table("t", lambda: np.array_split(values, 7), min_count=2, max_rows=None, slots=1 << 13)
    assert isinstance(one, Vocabulary)
    assert isinstance(many, Vocabulary)
    np.testing.assert_array_equal(one.keys, many.keys)
    np.testing.assert_array_equal(one.counts, many.counts)
    assert one.oov_row == many.oov_row


@pytest.mark.parametrize("budget", [1 << 16, 1 << 19, BUDGET])
def test_texts_come_back(tmp_path, budget):
    texts = [f"a value of some length {i}" + "!" * (i % 300) for i in range(5000)]
    store = TextStore(tmp_path / "texts", "t", budget=budget)
    for start in range(0, 5000, 1250):
        store.add(encode_texts(texts[start : start + 1250] + texts[:50], 0)[1])
    store.close()
    other = TextStore(tmp_path / "other", "t", budget=budget)
    for piece in store.stored():
        other.add(piece)
    other.close()
    for one in (store, other):
        one.merge()
        check_texts(pickle.loads(pickle.dumps(one)), texts)
        assert sum(len(piece.keys) for piece in one.stored()) == 5000


def check_texts(store, texts):
    asked = [4999, 0, 17, 17, 2500]
    keys = np.array([text_key(texts[i]) for i in asked] + [text_key("short")], np.uint64)
    ends, content = store.texts_of(keys)
    starts = [0, *ends[:-1]]
    assert [bytes(content[a:b]).decode() for a, b in zip(starts, ends, strict=True)] == [texts[i] for i in asked]
    assert [len(array) for array in store.texts_of(np.array([text_key("short")], np.uint64))] == [0, 0]


def test_a_store_without_texts(tmp_path):
    store = TextStore(tmp_path / "texts", "t")
    store.add(encode_texts(["short"], 0)[1])
    store.close()
    store.merge()
    assert [len(array) for array in store.texts_of(np.array([text_key("short")], np.uint64))] == [0, 0]


def test_many_texts_take_no_more_memory_than_few(tmp_path):
    """What Python and NumPy allocate; mapped files are not theirs."""
    peaks = []
    for count in (20_000, 60_000):
        tracemalloc.start()
        store, keys = TextStore(tmp_path / str(count), "t", budget=1 << 20), []
        for start in range(0, count, 2000):
            found, texts = encode_texts([f"a value of some length {i}" for i in range(start, start + 2000)], 0)
            store.add(texts)
            keys.append(found)
        store.close()
        store.merge()
        for some in keys:
            store.texts_of(some)
        peaks.append(tracemalloc.get_traced_memory()[1] - 8 * count)
        tracemalloc.stop()
    assert peaks[1] < 1.1 * peaks[0]
    assert peaks[1] < 2 << 20


def test_a_collision_in_another_run_is_an_error(tmp_path):
    texts = [f"a value of some length {i}" for i in range(3000)]
    _, stored = encode_texts(texts, 0)
    store = TextStore(tmp_path / "texts", "site", budget=1 << 16)
    store.add(stored)
    store.add(stored.take(slice(1))._replace(fingerprints=stored.fingerprints[:1] + np.uint64(1)))
    store.close()
    with pytest.raises(DatasetError, match=r"two values of table 'site', one of them 'a value of some length 0'"):
        store.merge()


def test_a_collision_is_an_error(tmp_path):
    """Two texts with one key cannot be found by trying, so one key is forged."""
    keys, texts = encode_texts(["the first long text", "the second long text"], 0)
    forged = LongTexts(texts.field, np.full(2, keys[0]), *texts[2:])
    store = TextStore(tmp_path / "texts", "site")
    with pytest.raises(
        DatasetError, match=r"two values of table 'site', one of them 'the second long text'.*--key-seed"
    ):
        store.add(forged)
    store.close()


@pytest.mark.parametrize("rows", [2**31 + 11, vocabulary.MAX_ROWS])
def test_buckets_of_tables_beyond_int32_reach_their_last_row(rows):
    keys = np.random.default_rng(0).integers(0, 2**64, 20_000, dtype=np.uint64)
    found = buckets(keys, rows)
    assert found.dtype == np.uint32
    assert found.max() < rows
    assert found.max() > 0.999 * rows
    assert len(np.unique(found)) > 19_990


def test_more_hash_buckets_than_memory_counts_are_refused_before_they_are_made(monkeypatch):
    def pages(name):
        return {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1}[name]

    monkeypatch.setattr(vocabulary.os, "sysconf", pages)
    keys = chunks([list(range(400))])
    assert len(build_table("t", keys, min_count=1, max_rows=128).counts) == 128
    with pytest.raises(DatasetError, match=r"the 129 hash buckets of table 't' .* --max-rows of at most 128"):
        build_table("t", keys, min_count=1, max_rows=129)


def test_a_table_of_more_values_than_row_numbers_is_refused(monkeypatch):
    monkeypatch.setattr(vocabulary, "MAX_ROWS", 10)
    assert len(build_table("t", chunks([list(range(9))]), min_count=1, max_rows=None).counts) == 10
    with pytest.raises(DatasetError, match="table 't' would have more than 10 rows; cap it with --max-rows"):
        build_table("t", chunks([list(range(10))]), min_count=1, max_rows=None)
