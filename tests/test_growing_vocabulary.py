"""Vocabularies that grow, against a plain model of dictionaries."""

import collections
import threading

import numpy as np
import pytest

from jrec.data import growing_kernels as kernels
from jrec.data.growing import GrowingVocabulary, Growth
from jrec.data.keys import mix64
from jrec.errors import CheckpointError

LAST = 2**64 - 1


class Model:
    """What ``GrowingVocabulary.map`` does, literally: victims are searched for among all rows, every time."""

    def __init__(self, growth: Growth):
        self.growth, self.clock, self.next = growth, 0, 1
        self.rows: dict[int, int] = {}
        self.used: dict[int, int] = {}
        self.count: dict[int, int] = {}
        width = max(1024, 1 << (4 * growth.capacity - 1).bit_length())
        self.sketch = np.zeros((kernels.DEPTH, width), np.int64)
        self.queue: list[int] = []
        self.scanned = 0

    def map(self, keys: np.ndarray) -> tuple[list[int], dict[int, int]]:
        self.clock += 1
        occurrences, new = collections.Counter(int(key) for key in keys), {}
        for key, count in occurrences.items():
            if (row := self.rows.get(key)) is not None:
                self.used[row], self.count[row] = self.clock, self.count[row] + count
        unknown = {key: count for key, count in occurrences.items() if key not in self.rows}
        cells = {key: [self._cell(key, d) for d in range(kernels.DEPTH)] for key in unknown}
        for key, count in unknown.items():
            for cell in cells[key]:
                self.sketch[cell] = min(self.sketch[cell] + count, 255)
        enough = self.growth.admit_after
        admitted = [k for k in unknown if enough == 1 or min(self.sketch[c] for c in cells[k]) >= enough]
        seen = {key: min(self.sketch[cell] for cell in cells[key]) for key in unknown}
        frequency = seen if self.growth.evict == "lfu" else unknown
        for key in sorted(admitted, key=lambda key: (-frequency[key], key)):
            if self.next < self.growth.capacity:
                row, self.next = self.next, self.next + 1
            elif (row := self._victim()) is None or self._stays(row, frequency[key]):
                break
            else:
                self.queue = self.queue[1:]
                del self.rows[next(k for k, r in self.rows.items() if r == row)]
            self.rows[key], new[row] = row, key
            self.used[row] = self.clock
            self.count[row] = frequency[key]
        return [self.rows.get(int(key), 0) for key in keys], new

    def _cell(self, key: int, depth: int) -> tuple[int, int]:
        mixed = int(mix64(np.uint64((key + (depth + 1) * 0x9E3779B97F4A7C15) % 2**64)))
        return depth, mixed % self.sketch.shape[1]

    def _stays(self, row: int, seen: int) -> bool:
        return self.growth.evict == "lfu" and seen <= self.count[row] and seen < 255

    def _victim(self) -> int | None:
        free = [row for row, clock in self.used.items() if clock < self.clock]
        if self.growth.evict == "lru":  # exactly, whatever the queue of the implementation
            return min(free, key=lambda row: (self.used[row], row), default=None)
        while self.queue and self.used[self.queue[0]] > self.scanned:
            self.queue.pop(0)
        if not self.queue:
            self.queue = sorted(free, key=lambda row: (self.count[row], self.used[row], row))
            self.scanned = self.clock
        return self.queue[0] if self.queue else None


def stream(seed: int, batches: int, size: int, keys: int, *, skewed: bool) -> list[np.ndarray]:
    """Batches of keys, 0 and the last one among them."""
    draw = np.random.default_rng(seed)
    names = np.append(draw.integers(1, LAST, keys - 2, dtype=np.uint64), np.array([0, LAST], np.uint64))
    chosen = [draw.zipf(1.3, size) % keys if skewed else draw.integers(0, keys, size) for _ in range(batches)]
    return [names[numbers] for numbers in chosen]


@pytest.mark.parametrize("evict", ["lru", "lfu"])
@pytest.mark.parametrize("admit_after", [1, 2, 3])
@pytest.mark.parametrize("capacity", [2, 3, 17, 60])
@pytest.mark.parametrize("skewed", [False, True])
def test_rows_are_the_model_s(evict, admit_after, capacity, skewed):
    growth = Growth(capacity=capacity, admit_after=admit_after, evict=evict)
    vocabulary, model = GrowingVocabulary(growth), Model(growth)
    for keys in stream(capacity + admit_after, 60, 23, 90, skewed=skewed):
        rows, new = vocabulary.map(keys)
        expected, expected_new = model.map(keys)
        assert rows.tolist() == expected
        assert dict(zip(new.rows.tolist(), new.keys.tolist(), strict=True)) == expected_new
        assert (np.diff(new.rows) > 0).all()
        np.testing.assert_array_equal(vocabulary.rows_of_keys(keys), [model.rows.get(int(k), 0) for k in keys])
    counts = vocabulary.counts
    assert counts.keys == len(model.rows) == counts.admitted - counts.evicted
    assert counts.lookups == 60 * 23


@pytest.mark.parametrize("evict", ["lru", "lfu"])
def test_victims_come_from_more_than_one_scan(evict):
    """The queue of victims has room for 1,024 rows: here batches want more at once, and fewer."""
    growth = Growth(capacity=3000, evict=evict)
    vocabulary, model = GrowingVocabulary(growth), Model(growth)
    model._victim = exact_lfu_queue(model) if evict == "lfu" else model._victim
    draw = np.random.default_rng(1)
    for number, size in enumerate((2999, 2500, 10, 700, 1500, 3, 2999)):
        keys = draw.integers(0, 40 if size < 20 else LAST, size, dtype=np.uint64)
        rows, _ = vocabulary.map(keys)
        assert rows.tolist() == model.map(keys)[0], number


def exact_lfu_queue(model: Model):
    """Victims by queues of the implementation's length."""

    def victim() -> int | None:
        while model.queue and model.used[model.queue[0]] > model.scanned:
            model.queue.pop(0)
        if not model.queue:
            free = [row for row, clock in model.used.items() if clock < model.clock]
            order = sorted(free, key=lambda row: (model.count[row], model.used[row], row))
            model.queue, model.scanned = order[: max(1024, model.growth.capacity // 16)], model.clock
        return model.queue[0] if model.queue else None

    return victim


@pytest.mark.parametrize("evict", ["lru", "lfu"])
def test_the_order_of_keys_in_a_batch_does_not_matter(evict):
    growth = Growth(capacity=20, admit_after=2, evict=evict)
    one, other, draw = GrowingVocabulary(growth), GrowingVocabulary(growth), np.random.default_rng(0)
    for keys in stream(3, 40, 31, 70, skewed=True):
        order = draw.permutation(keys.size)
        rows, new = one.map(keys)
        shuffled, same = other.map(keys[order])
        np.testing.assert_array_equal(rows[order], shuffled)
        np.testing.assert_array_equal(new.rows, same.rows)
        np.testing.assert_array_equal(new.keys, same.keys)


@pytest.mark.parametrize("evict", ["lru", "lfu"])
@pytest.mark.parametrize("admit_after", [1, 2])
def test_it_goes_back_and_on_from_a_state(evict, admit_after):
    growth = Growth(capacity=20, admit_after=admit_after, evict=evict)
    batches = stream(5, 40, 25, 60, skewed=True)
    vocabulary, states, results = GrowingVocabulary(growth), [], []
    states.append(vocabulary.state())
    for keys in batches:
        results.append(vocabulary.map(keys))
        states.append(vocabulary.state())
    for clock in (0, 1, 17, 39, 40):
        back, restored = vocabulary.at(clock), GrowingVocabulary(growth)
        restored.restore(states[clock])
        assert back.clock == restored.clock == clock
        for name, array in back.state().items():
            np.testing.assert_array_equal(array, states[clock][name], err_msg=name)
        for one in (back, restored):
            for keys, (rows, new) in zip(batches[clock:], results[clock:], strict=True):
                again, same = one.map(keys)
                np.testing.assert_array_equal(again, rows)
                np.testing.assert_array_equal(same.keys, new.keys)
    assert vocabulary.clock == 40  # copies leave it alone


def test_forgotten_and_future_states_are_refused():
    vocabulary = GrowingVocabulary(Growth(capacity=5))
    for keys in stream(0, 6, 4, 9, skewed=False):
        vocabulary.map(keys)
    vocabulary.forget(4)
    assert vocabulary.at(4).clock == 4
    with pytest.raises(ValueError, match="no state after 3 batches; it is kept for 4 to 6"):
        vocabulary.at(3)
    with pytest.raises(ValueError, match="no state after 7 batches"):
        vocabulary.at(7)


def test_a_full_table_of_rows_in_use_admits_nothing():
    vocabulary = GrowingVocabulary(Growth(capacity=3))
    vocabulary.map(np.array([1, 2], np.uint64))
    rows, new = vocabulary.map(np.array([1, 2, 3, 3], np.uint64))
    assert rows.tolist() == [1, 2, 0, 0]
    assert not new.rows.size
    rows, new = vocabulary.map(np.array([], np.uint64))
    assert not rows.size
    assert vocabulary.clock == 3


def test_values_have_the_rows_of_their_keys():
    vocabulary = GrowingVocabulary(Growth(capacity=10))
    import pyarrow as pa

    from jrec.data.keys import value_keys

    texts = pa.array(["a", "a long text that is no key of its own", "17"], pa.large_string())
    rows, _ = vocabulary.map(value_keys(texts, 0))
    np.testing.assert_array_equal(vocabulary.rows(texts), rows)
    assert vocabulary.rows(np.array([17, 18])).tolist() == [rows[2], 0]


def test_a_state_of_another_capacity_is_refused():
    saved = GrowingVocabulary(Growth(capacity=10)).state()
    with pytest.raises(CheckpointError, match="has 10 rows, but this one 11; set the capacity"):
        GrowingVocabulary(Growth(capacity=11)).restore(saved)
    del saved["queue"]
    with pytest.raises(CheckpointError, match="no 'queue'"):
        GrowingVocabulary(Growth(capacity=10)).restore(saved)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"capacity": 1}, "capacity is 1; it must be 2 to"),
        ({"capacity": 9, "admit_after": 256}, "admit_after is 256"),
        ({"capacity": 9, "evict": "fifo"}, "evict is 'fifo'; choose one of lru, lfu"),
    ],
)
def test_a_growth_is_checked(wrong, message):
    with pytest.raises(ValueError, match=message):
        Growth(**wrong)


def test_states_are_taken_while_batches_are_mapped():
    vocabulary, batches = GrowingVocabulary(Growth(capacity=50)), stream(9, 300, 40, 200, skewed=True)
    mapper = threading.Thread(target=lambda: [vocabulary.map(keys) for keys in batches])
    mapper.start()
    seen = []
    while len(seen) < 20:
        seen.append(vocabulary.at(vocabulary.clock) if len(seen) % 2 else vocabulary.at(0))
        assert len(set(seen[-1].rows_of_keys(np.unique(batches[0])).tolist()) - {0}) <= 49
    mapper.join()
    alone = GrowingVocabulary(Growth(capacity=50))
    for keys in batches:
        alone.map(keys)
    for name, array in vocabulary.state().items():
        np.testing.assert_array_equal(array, alone.state()[name], err_msg=name)
