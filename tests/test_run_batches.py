"""Batches of any iterable: their order, their positions, and what goes wrong in threads."""

import itertools
import threading
import time

import grain
import numpy as np
import pytest

from jrec.batch import Batch
from jrec.errors import CheckpointError
from jrec.run.feeds.batches import PackedBatches


def packed(items, **options):
    """Numbers, packed more or less slowly."""

    def pack(item):
        time.sleep(0.002 * (item % 3))
        if item == 13:
            raise ValueError("item 13 is bad")
        return 10 * item

    return PackedBatches(items, pack, **options)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_batches_keep_their_order_in_any_number_of_threads(workers):
    batches = packed(iter(range(9)), workers=workers)
    assert batches.upcoming(3) == [0, 10, 20]
    assert batches.first(2) == [0, 10]
    assert list(batches) == [10 * n for n in range(9)]
    assert batches.position == 9
    with pytest.raises(StopIteration):
        next(batches)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_comes_at_its_batch(workers):
    batches = packed([0, 1, 13, 2], workers=workers)
    assert [next(batches), next(batches)] == [0, 10]
    with pytest.raises(ValueError, match="item 13 is bad"):
        next(batches)


def test_what_the_iterable_raises_comes_after_the_batches_before_it():
    def items():
        yield from (1, 2)
        raise OSError("the disk is gone")

    batches = packed(items())
    assert [next(batches), next(batches)] == [10, 20]
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)


def test_threads_read_no_further_than_they_are_asked_and_end_when_closed():
    taken = itertools.count()
    items = (next(taken) for _ in iter(int, 1))
    batches = packed(items, workers=2, prefetch=3)
    assert next(batches) == 0
    time.sleep(0.1)
    assert 5 <= next(taken) <= 8
    before = threading.active_count()
    batches.close()
    deadline = time.monotonic() + 5
    while threading.active_count() >= before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() < before
    with pytest.raises(StopIteration):
        next(batches)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterator_with_a_state_goes_on_where_the_last_batch_was(workers):
    def batches():
        return packed(iter(grain.MapDataset.range(12).to_iter_dataset()), workers=workers)

    first = batches()
    assert [next(first) for _ in range(4)] == [0, 10, 20, 30]
    state = first.state()
    first.close()
    other = batches()
    other.restore(state)
    assert other.position == 4
    assert list(other) == [10 * n for n in range(4, 12)]


class Counting:
    """An iterator whose state is one dictionary, which it changes in place, and which has a list."""

    def __init__(self):
        self.now = {"next": [0]}

    def __iter__(self):
        return self

    def __next__(self):
        self.now["next"][0] += 1
        return self.now["next"][0] - 1

    def get_state(self):
        return self.now


@pytest.mark.parametrize("workers", [0, 2])
def test_a_position_stays_where_the_last_batch_was_while_the_iterator_changes_its_state_in_place(workers):
    batches = packed(Counting(), workers=workers)
    assert batches.upcoming(1) == [0]
    assert [next(batches), next(batches)] == [0, 10]
    time.sleep(0.02)
    assert batches.state() == {"batches": 2, "iterator": {"next": [2]}}
    batches.close()


def test_of_an_iterator_without_a_state_only_the_count_is_kept():
    batches = packed(iter([7, 8]))
    batches.restore({"batches": 5})
    assert list(batches) == [70, 80]
    assert batches.state() == {"batches": 7}
    with pytest.raises(CheckpointError, match="is no position of a feed"):
        batches.restore({"position": 3})


def test_batches_that_are_packed_already_are_not_handed_from_thread_to_thread():
    arrays = np.zeros(2, np.float32)
    batch = Batch(dense=arrays[:, None], labels=arrays, mask=arrays, bags={})
    count = threading.active_count()
    batches = PackedBatches(itertools.repeat(batch, 3), lambda item: item, workers=4)
    assert next(batches) is batch
    assert threading.active_count() == count
    assert len(list(batches)) == 2
