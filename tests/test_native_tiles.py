"""The register tiles of tensor-train kernels, each against NumPy: those of other processors than this one too."""

import numpy as np
import pytest

from jrec.native import narrow_tiles, tt_kernels
from jrec.native.accumulate import sum_lines
from jrec.native.compile import inlined, pointer


@pytest.mark.parametrize("wide", [False, True])
def test_products_of_slices_of_four_columns(wide):
    tile = narrow_tiles._expand_tile(wide)

    @inlined
    def run(out, below, slice_, rank):
        tile(out, below, slice_, rank)

    rng = np.random.default_rng(0)
    for rank in (8, 16, 24, 40):
        below, slice_ = (rng.standard_normal(shape).astype(np.float32) for shape in ((4, rank), (rank, 4)))
        out = np.full((6, 4), 7, np.float32)
        run(pointer(out[1:]), pointer(below), pointer(slice_), rank)
        np.testing.assert_allclose(out[1:5], below.astype(np.float64) @ slice_, rtol=1e-5, atol=1e-5)
        assert (out[[0, 5]] == 7).all()


@inlined
def _transposed(out, source, rows, columns):
    tt_kernels.transpose(out, source, rows, columns)


@pytest.mark.parametrize("columns", [1, 4, 7, 8, 20, 32])
@pytest.mark.parametrize("rows", [1, 3, 4, 8, 12, 13, 32])
def test_transposes(rows, columns):
    source = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
    out = np.full(rows * columns + 1, -1, np.float32)
    _transposed(pointer(out), pointer(source), rows, columns)
    np.testing.assert_array_equal(out[:-1].reshape(columns, rows), source.T)
    assert out[-1] == -1


@inlined
def _summed(out, source, dim, lines, step):
    sum_lines(out, source, dim, lines, step)


@pytest.mark.parametrize("lines", [0, 1, 5])
@pytest.mark.parametrize("dim", [1, 6, 64, 200])
def test_sums_of_lines_that_lie_apart(dim, lines):
    source = np.random.default_rng(dim).standard_normal((5, dim + 3)).astype(np.float32)
    out = np.full(dim + 1, -1, np.float32)
    _summed(pointer(out), pointer(source), dim, lines, dim + 3)
    want = np.zeros(dim, np.float32)
    for line in source[:lines]:
        want += line[:dim]
    np.testing.assert_allclose(out[:-1], want, rtol=1e-6, atol=0)  # LLVM may add in another order
    assert out[-1] == -1
    if lines > 0:
        _summed(pointer(source), pointer(source), dim, lines, dim + 3)
        np.testing.assert_array_equal(source[0, :dim], out[:-1])
