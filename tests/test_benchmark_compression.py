"""The ways that benchmarks.compression keeps a table: ids have rows, and bytes are those that were asked for."""

import numpy as np
import pytest

from benchmarks import compression
from benchmarks.compression import DIM, WAYS, hash_of, quotient, sketch, tensor_train, uncompressed

ROWS = 200_003
IDS = np.arange(ROWS)


@pytest.mark.parametrize("ratio", compression.RATIOS)
@pytest.mark.parametrize("way", [name for name in WAYS if name != "sketch"])  # whose rows are given later
def test_every_id_has_a_row_in_every_table(way, ratio):
    made = WAYS[way]("C1", ROWS, ratio)
    ids = made.ids(IDS)
    assert ids.keys() == made.tables.keys()
    for suffix, table in made.tables.items():
        assert (ids[suffix].min(), ids[suffix].max()) == (0, table.rows - 1)


@pytest.mark.parametrize(("way", "ratio"), [(way, ratio) for way in WAYS for ratio in (10, 100)])
def test_bytes_are_those_asked_for(way, ratio):
    made, whole = WAYS[way]("C1", ROWS, ratio), uncompressed("C1", ROWS, 1)
    assert whole.nbytes == ROWS * DIM * 4
    assert 0.9 <= whole.nbytes / ratio / made.nbytes <= 1.2
    if way in ("hashed", "quotient"):
        assert made.nbytes == sum(table.rows * DIM * 4 for table in made.tables.values())


def test_no_two_ids_share_quotient_and_remainder():
    for ratio in (10, 1000):  # of which the second cannot be reached
        ids = quotient("C1", ROWS, ratio).ids(IDS)
        assert len(np.unique(np.stack(list(ids.values())), axis=1).T) == ROWS
    assert quotient("C1", ROWS, 1000).nbytes < 2.1 * 64 * ROWS**0.5


def test_a_hash_spreads_frequent_ids():
    counts = np.bincount(hash_of(np.arange(1000), 100), minlength=100)
    assert 0 < counts.max() < 30


def test_a_sketch_counts_what_finds_its_rows():
    made = sketch("C1", ROWS, 100)
    own, shared = made.tables[".own"].rows, made.tables[".shared"].rows
    assert made.nbytes == 64 * (own + shared) + compression.KEPT_BYTES * own
    assert made.vocabularies["C1.own"].growth.capacity == own


def test_a_tensor_train_has_the_greatest_rank_that_fits():
    shape = tensor_train("C1", ROWS, 100).tables[""].tt_shape
    wider = compression.tt.TTShape.search(ROWS, DIM, ranks=shape.ranks[0] + 1)
    assert shape.num_parameters * 100 <= ROWS * DIM < wider.num_parameters * 100
