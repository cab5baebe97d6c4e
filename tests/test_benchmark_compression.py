"""The ways that benchmarks.compression keeps a table: ids have rows, and bytes are those that were asked for."""

import numpy as np
import pytest

from benchmarks import compression
from benchmarks.compression import DIM, WAYS, hash_of, most_rows, quotient, sketch, tensor_train, uncompressed

ROWS = 200_003
IDS = np.arange(ROWS)


@pytest.mark.parametrize("kept", [20_000, 2_000, 200, 6.5])
@pytest.mark.parametrize("way", [name for name in WAYS if name != "sketch"])  # whose rows are given later
def test_every_id_has_a_row_in_every_table(way, kept):
    made = WAYS[way]("C1", ROWS, kept)
    ids = made.ids(IDS)
    assert ids.keys() == made.tables.keys()
    for suffix, table in made.tables.items():
        assert (ids[suffix].min(), ids[suffix].max()) == (0, table.rows - 1)


@pytest.mark.parametrize(("way", "kept"), [(way, kept) for way in WAYS for kept in (20_000, 2_000)])
def test_bytes_are_those_asked_for(way, kept):
    made, whole = WAYS[way]("C1", ROWS, kept), uncompressed("C1", ROWS, kept)
    assert whole.nbytes == ROWS * DIM * 4
    assert 0.9 <= kept * DIM * 4 / made.nbytes <= 1.2
    if way in ("hashed", "quotient"):
        assert made.nbytes == sum(table.rows * DIM * 4 for table in made.tables.values())


def test_no_two_ids_share_quotient_and_remainder():
    for kept in (20_000, 200):  # of which the second cannot be reached
        ids = quotient("C1", ROWS, kept).ids(IDS)
        assert len(np.unique(np.stack(list(ids.values())), axis=1).T) == ROWS
    assert quotient("C1", ROWS, 200).nbytes < 2.1 * 64 * ROWS**0.5


def test_a_hash_spreads_frequent_ids():
    counts = np.bincount(hash_of(np.arange(1000), 100), minlength=100)
    assert 0 < counts.max() < 30


def test_a_sketch_counts_what_finds_its_rows():
    made = sketch("C1", ROWS, 2_000)
    own, shared = made.tables[".own"].rows, made.tables[".shared"].rows
    assert made.nbytes == 64 * (own + shared) + compression.KEPT_BYTES * own
    assert made.vocabularies["C1.own"].growth.capacity == own


def test_a_tensor_train_has_the_greatest_rank_that_fits():
    shape = tensor_train("C1", ROWS, 2_000).tables[""].tt_shape
    wider = compression.tt.TTShape.search(ROWS, DIM, ranks=shape.ranks[0] + 1)
    assert shape.num_parameters <= 2_000 * DIM < wider.num_parameters


@pytest.mark.parametrize("ratio", [1, 2, 10, 1000])
def test_tables_keep_as_many_rows_as_the_model_may(ratio):
    sizes = [3, 10, 10, 500, 20_000, 7]
    most = most_rows(sizes, ratio)
    assert sum(min(rows, most) for rows in sizes) == pytest.approx(sum(sizes) / ratio)
