import tracemalloc

import jax
import numpy as np
import pytest
import tt_reference

from jrec.ops.tt import TTShape, tt_dense_chunks, tt_init, tt_rows, tt_svd, tt_to_dense

SHAPES = (
    TTShape.search(1000, 16, num_cores=2, ranks=7),
    TTShape.search(997, 16, ranks=(5, 9)),
    TTShape.search(1003, 24, num_cores=4, ranks=6),
    TTShape(rows=50, dim=6, row_factors=(5, 3, 4), dim_factors=(1, 6, 1), ranks=(5, 4)),
    TTShape(rows=3, dim=2, row_factors=(1, 3), dim_factors=(2, 1), ranks=(2,)),
)


def _cores(shape, seed=0):
    return [np.asarray(core) for core in tt_init(shape, jax.random.key(seed), variance=1.0)]


@pytest.mark.parametrize("shape", SHAPES)
def test_dense_and_rows_equal_the_einsum(shape):
    cores = _cores(shape)
    want = tt_reference.dense(cores, shape.rows)
    np.testing.assert_allclose(tt_to_dense(cores, shape), want, rtol=1e-5, atol=1e-5)
    ids = np.random.default_rng(0).integers(0, shape.rows, 40)
    np.testing.assert_allclose(tt_rows(cores, shape, ids), want[ids], rtol=1e-5, atol=1e-5)
    assert tt_rows(cores, shape, []).shape == (0, shape.dim)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chunk_rows", [1, 7, 64, 300, 5000])
def test_chunks_make_up_the_table(shape, chunk_rows):
    cores = _cores(shape)
    chunks = list(tt_dense_chunks(cores, shape, chunk_rows=chunk_rows))
    assert max(map(len, chunks)) <= chunk_rows
    want = tt_reference.dense(cores, shape.rows)
    np.testing.assert_allclose(np.concatenate(chunks), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("row", [2**24 - 1, 2**24 + 1, 2**24 + 3, 2**31 - 3, 2**31 - 2])
def test_rows_beyond_what_float32_counts(row):
    shape = TTShape.search(2**31 - 1, 8, ranks=4)
    cores = _cores(shape)
    np.testing.assert_allclose(tt_rows(cores, shape, [row])[0], tt_reference.row_of(cores, row), rtol=1e-4, atol=1e-5)


def test_rows_outside_of_the_table_raise():
    shape = SHAPES[0]
    for bad in (-1, 1000):
        with pytest.raises(ValueError, match=f"id {bad} lies outside of a table of 1,000 rows"):
            tt_rows(_cores(shape), shape, [0, bad])
    with pytest.raises(ValueError, match="the cores have shapes"):
        tt_rows(_cores(SHAPES[1]), shape, [0])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chunk_rows", [13, 1 << 18])
def test_svd_finds_the_cores_of_a_product(shape, chunk_rows):
    table = tt_to_dense(_cores(shape), shape)
    found = tt_svd(table, shape, chunk_rows=chunk_rows)
    assert found.shape == shape
    assert [core.shape for core in found.cores] == list(shape.core_shapes)
    error = np.linalg.norm(tt_to_dense(found.cores, shape) - table) / np.linalg.norm(table)
    # Rows past the table are zero to the SVD, which a product need not be: ranks suffice where nothing is padded.
    if shape.capacity == shape.rows:
        assert error < 1e-5
    assert error <= found.relative_error + 1e-5


@pytest.mark.parametrize("cores", [2, 3, 4])
@pytest.mark.parametrize("wanted", [0.5, 0.1, 0.01, 0.0])
def test_svd_reaches_a_wanted_error_with_least_ranks(cores, wanted):
    rng = np.random.default_rng(0)
    shape = TTShape.search(900, 8, num_cores=cores, ranks=1)
    smooth = np.add.outer(np.sin(np.arange(900) / 50), np.cos(np.arange(8))) ** 3
    table = (smooth + 0.05 * rng.normal(size=(900, 8))).astype(np.float32)
    found = tt_svd(table, shape, relative_error=wanted)
    error = np.linalg.norm(tt_to_dense(found.cores, found.shape) - table) / np.linalg.norm(table)
    assert error <= wanted + 1e-5
    assert found.relative_error <= wanted + 1e-12
    if wanted == 0.5:
        assert found.shape.num_parameters < tt_svd(table, shape, relative_error=0.01).shape.num_parameters


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chunk_rows", [13, None])
def test_a_table_read_in_pieces_has_the_cores_of_plain_svds(shape, chunk_rows):
    table = np.random.default_rng(0).normal(size=(shape.rows, shape.dim)).astype(np.float32)
    pieces = _Pieces(table)
    found = tt_svd(pieces, shape, chunk_rows=chunk_rows)
    want = _product_of_svds(table, shape)
    np.testing.assert_allclose(tt_to_dense(found.cores, shape), want, rtol=1e-4, atol=1e-5)
    error = np.linalg.norm(want - table) / np.linalg.norm(table)
    assert found.relative_error >= error - 1e-6
    # Twice from the first row to the last, some at a time.
    once = pieces.read[: len(pieces.read) // 2]
    assert pieces.read == once * 2
    assert [begin for begin, _ in once] == [0, *(end for _, end in once[:-1])]
    assert once[-1][1] == shape.rows
    if chunk_rows is not None:
        assert max(end - begin for begin, end in once) <= max(chunk_rows, shape.row_factors[-1])


class _Pieces:
    """A table that only gives slices, and knows which."""

    def __init__(self, table):
        self.shape, self.read, self._table = table.shape, [], table

    def __getitem__(self, rows):
        self.read.append((rows.start, rows.stop))
        return self._table[rows]


def _product_of_svds(table, shape):
    """A table by Oseledets' algorithm, from the last core on, whole unfoldings in float64."""
    cores, (m, n) = shape.num_cores, (shape.row_factors, shape.dim_factors)
    digits = [axis for k in range(cores) for axis in (k, cores + k)]  # i_1, j_1, i_2, j_2, ..
    padded = np.zeros((shape.capacity, shape.dim))
    padded[: shape.rows] = table
    rest, bases = padded.reshape(*m, *n).transpose(digits), []
    for k in range(cores - 1, 0, -1):
        left, values, right = np.linalg.svd(rest.reshape(np.prod(m[:k]) * np.prod(n[:k]), -1), full_matrices=False)
        rank = shape.ranks[k - 1]
        rest, basis = left[:, :rank] * values[:rank], right[:rank]
        bases.append(basis)
    for basis in reversed(bases):
        rest = rest.reshape(-1, len(basis)) @ basis
    split = rest.reshape([size for pair in zip(m, n, strict=True) for size in pair])
    return split.transpose(np.argsort(digits)).reshape(shape.capacity, shape.dim)[: shape.rows]


def test_svd_is_the_best_of_two_cores():
    """With two cores a tensor train is a low-rank matrix: no error can be below that of the SVD of the unfolding."""
    shape = TTShape.search(400, 8, num_cores=2, ranks=6)
    assert shape.capacity == shape.rows
    table = np.random.default_rng(0).normal(size=(400, 8)).astype(np.float32)
    (m, n), (p, q) = shape.row_factors, shape.dim_factors
    unfolded = table.reshape(m, n, p, q).swapaxes(1, 2).reshape(m * p, n * q)
    values = np.linalg.svd(unfolded, compute_uv=False)
    best = np.sqrt(np.sum(values[6:] ** 2) / np.sum(values**2))
    assert tt_svd(table, shape).relative_error == pytest.approx(best, rel=1e-6)


def test_svd_of_a_table_of_zeros():
    shape = SHAPES[1]
    found = tt_svd(np.zeros((shape.rows, shape.dim), np.float32), shape, relative_error=0.1)
    assert found.relative_error == 0
    assert not tt_to_dense(found.cores, found.shape).any()


def test_svd_refuses_bad_input():
    shape = SHAPES[0]
    table = np.ones((1000, 16), np.float32)
    with pytest.raises(ValueError, match=r"the table has shape \(999, 16\)"):
        tt_svd(table[:-1], shape)
    with pytest.raises(ValueError, match="relative_error is 1"):
        tt_svd(table, shape, relative_error=1)
    table[500, 3] = np.nan
    with pytest.raises(ValueError, match="not finite"):
        tt_svd(table, shape)


@pytest.mark.slow
def test_ten_million_rows_are_compressed_in_a_fraction_of_their_memory(tmp_path):
    """The largest Criteo Kaggle table, 648 MB, from disk: chunks, a Gram matrix and copies of a product of 42 MB."""
    shape = TTShape.search(10_131_227, 16, ranks=32)
    table = np.lib.format.open_memmap(tmp_path / "table.npy", "w+", np.float32, (shape.rows, 16))
    for begin in range(0, shape.rows, 1 << 20):
        rows = np.arange(begin, min(begin + (1 << 20), shape.rows), dtype=np.float32)
        table[begin : begin + len(rows)] = np.sin(rows / 1e5)[:, None] * np.arange(16)
    tracemalloc.start()
    try:
        found = tt_svd(table, shape)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.relative_error < 1e-3
    assert peak < 200 << 20
