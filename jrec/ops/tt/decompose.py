"""Decomposes plain tables into tensor trains (TT-SVD), and reconstructs single rows and whole tables from them.

These run on the host, in NumPy, in pieces: a table is read from its first row to its last, some rows at a time, and
never held as a whole.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from jrec.ops.tt.shape import TTShape

DEFAULT_CHUNK_ROWS = 1 << 18
_CHUNK_ELEMENTS = 1 << 21  # read at once by ``tt_svd``: 16 MB of float64


class Rows(Protocol):
    """A table that is read by slices of rows: an array, memory-mapped or not, or anything that reads from files."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, dim)."""
        ...

    def __getitem__(self, rows: slice, /) -> np.ndarray:
        """(n, dim) of any float type, for a slice with begin and end."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class TTDecomposition:
    """What ``tt_svd`` found.

    Attributes:
      cores: float32, ``shape.core_shapes`` each.
      shape: The shape with the ranks that were chosen.
      relative_error: An upper bound of the Frobenius norm of (table - product), divided by the table's norm.
    """

    cores: tuple[np.ndarray, ...]
    shape: TTShape
    relative_error: float


def tt_rows(cores: Sequence[ArrayLike], shape: TTShape, ids: ArrayLike) -> np.ndarray:
    """Rows of the table, reconstructed one by one on the host.

    Args:
      cores: ``shape.core_shapes`` each.
      shape: The table's shape.
      ids: (n,) integers from 0 to ``shape.rows - 1``.

    Returns:
      (n, dim) float32.

    Raises:
      ValueError: If cores do not fit the shape, or an id lies outside of the table.
    """
    arrays = _host_cores(cores, shape)
    rest = np.asarray(ids, np.int64)
    if rest.ndim != 1:
        raise ValueError(f"ids must have shape (n,), but have shape {rest.shape}")
    if rest.size and not 0 <= (worst := int(rest[np.argmax((rest < 0) | (rest >= shape.rows))])) < shape.rows:
        raise ValueError(f"id {worst} lies outside of a table of {shape.rows:,} rows")
    digits = []
    for factor in reversed(shape.row_factors):
        digits.append(rest % factor)
        rest = rest // factor
    out = np.ones((len(digits[0]), 1, 1), np.float32)
    for core, digit in zip(arrays, reversed(digits), strict=True):
        _, rank, dims, after = core.shape
        out = np.matmul(out, core[digit].reshape(len(digit), rank, dims * after))
        out = out.reshape(len(digit), out.shape[1] * dims, after)  # -1 for a size would not do where there are no ids
    return out.reshape(len(out), shape.dim)


def tt_dense_chunks(
    cores: Sequence[ArrayLike], shape: TTShape, *, chunk_rows: int = DEFAULT_CHUNK_ROWS
) -> Iterator[np.ndarray]:
    """The table from its first row to its last, in pieces of at most ``chunk_rows`` rows, (n, dim) float32 each.

    Raises:
      ValueError: If cores do not fit the shape.
    """
    arrays = _host_cores(cores, shape)
    if chunk_rows < 1:
        raise ValueError(f"chunk_rows is {chunk_rows}; it must be at least 1")
    # The cores are split where the product of the first ones times one piece of the others is a piece.
    split, tail = shape.num_cores - 1, shape.row_factors[-1]
    while split > 1 and tail * shape.row_factors[split - 1] <= chunk_rows:
        split -= 1
        tail *= shape.row_factors[split]
    suffix = _chain(arrays[split:])
    suffix = suffix.transpose(1, 0, 2, 3).reshape(suffix.shape[1], -1)  # (R, rows * dim of the tail)
    tail_dim = suffix.shape[1] // tail
    heads = _chain(arrays[:split])  # (prefixes, 1, dim, R)
    for prefix in range(-(-shape.rows // tail)):
        head = heads[prefix, 0]
        piece = (head @ suffix).reshape(head.shape[0], tail, tail_dim).swapaxes(0, 1).reshape(tail, shape.dim)
        piece = piece[: shape.rows - prefix * tail]
        for begin in range(0, len(piece), chunk_rows):
            yield piece[begin : begin + chunk_rows]


def tt_to_dense(cores: Sequence[ArrayLike], shape: TTShape) -> np.ndarray:
    """The whole table, (rows, dim) float32. For tables that fit in memory; others take ``tt_dense_chunks``.

    Raises:
      ValueError: If cores do not fit the shape.
    """
    out = np.empty((shape.rows, shape.dim), np.float32)
    begin = 0
    for chunk in tt_dense_chunks(cores, shape):
        out[begin : begin + len(chunk)] = chunk
        begin += len(chunk)
    return out


def tt_svd(
    table: Rows,
    shape: TTShape,
    *,
    relative_error: float | None = None,
    chunk_rows: int | None = None,
) -> TTDecomposition:
    """The tensor train of a table (Oseledets 2011, Algorithm 1), with given ranks or to a given error.

    The cores are found from the last to the first, since the last unfolding, which joins blocks of ``m_d`` rows, can be
    read in the table's own order. It is read twice: for its Gram matrix, and to be multiplied by the singular vectors.
    Memory holds a chunk in three orders, that matrix of (m_d * n_d)^2, and the product, which has R_(d-1) / (m_d * n_d)
    times as many elements as the table, all in float64; of the product about four copies while the next core is found.

    Singular vectors come from Gram matrices in float64, so of a float32 table nothing above its own rounding is lost.

    Args:
      table: (rows, dim), any float type; an array, memory-mapped or not, or what else gives its rows by slices.
      shape: The result's shape. Its ranks are used unless ``relative_error`` is given; ranks that the table does not
        need are filled with zeros.
      relative_error: Choose the least ranks whose product is within this fraction of the table's Frobenius norm.
      chunk_rows: Rows that are read at once, rounded up to whole blocks; None for 16 MB of float64.

    Returns:
      Cores, shape and error.

    Raises:
      ValueError: On a table that is not finite or does not fit the shape, or an error outside of [0, 1).
    """
    table_shape = tuple(getattr(table, "shape", ("unknown",)))
    if table_shape != (shape.rows, shape.dim):
        raise ValueError(f"the table has shape {table_shape}, but the tensor train {(shape.rows, shape.dim)}")
    if relative_error is not None and not 0 <= relative_error < 1:
        raise ValueError(f"relative_error is {relative_error}; it must be in [0, 1)")
    chunk_rows = max(1, _CHUNK_ELEMENTS // shape.dim) if chunk_rows is None else chunk_rows
    size = shape.row_factors[-1] * shape.dim_factors[-1]
    gram = np.zeros((size, size), np.float64)
    for piece in _unfolded(table, shape, chunk_rows):
        # Of (m_d * n_d)^2 elements, whatever the rows are: the table itself is never in memory as a whole.
        gram += piece @ piece.T
    # The squared Frobenius norm is the trace of the Gram matrix: no further pass over the table.
    norm = math.sqrt(np.trace(gram))
    if not math.isfinite(norm):
        raise ValueError("the table holds values that are not finite; a NaN or infinite row has no decomposition")
    # Oseledets' bound: the squared errors of the truncations add up, so each may take an equal share.
    budget = None if relative_error is None else (relative_error * norm) ** 2 / (shape.num_cores - 1)
    basis, lost = _basis(gram, _Choice(shape, shape.num_cores - 2, budget))
    # (m_d * n_d)^2 float64, beside which ``rest`` is about to be made.
    del gram
    rest = np.empty((basis.shape[1], shape.capacity * shape.dim // size), np.float64)  # (R, (i_1 .., j_1 ..))
    begin = 0
    for piece in _unfolded(table, shape, chunk_rows):
        rest[:, begin : begin + piece.shape[1]] = basis.T @ piece
        begin += piece.shape[1]
    matrices = [basis]
    for core in range(shape.num_cores - 2, 0, -1):
        rest = _split_columns(rest, shape, core)  # the former one is gone
        basis, rest, dropped = _truncate(rest, _Choice(shape, core - 1, budget))
        lost += dropped
        matrices.append(basis)
    matrices.append(rest.reshape(-1, 1))
    ranks = [matrix.shape[1] for matrix in reversed(matrices[:-1])]
    chosen = shape.with_ranks(ranks) if budget is not None else shape
    return TTDecomposition(
        cores=_as_cores(matrices[::-1], ranks, chosen),
        shape=chosen,
        relative_error=math.sqrt(lost) / norm if norm else 0.0,
    )


def _unfolded(table: Rows, shape: TTShape, chunk_rows: int) -> Iterator[np.ndarray]:
    """The last unfolding, ((i_d, j_d), (i_1 .. i_(d-1), j_1 .. j_(d-1))), in blocks of columns, in float64."""
    last, width = shape.row_factors[-1], shape.dim_factors[-1]
    blocks = -(-shape.rows // last)
    step = max(1, chunk_rows // last)
    for begin in range(0, shape.capacity // last, step):
        end = min(begin + step, shape.capacity // last)
        chunk = np.zeros(((end - begin) * last, shape.dim), np.float64)
        if begin < blocks:
            rows = table[begin * last : min(end * last, shape.rows)]
            chunk[: len(rows)] = rows
        split = chunk.reshape(end - begin, last, shape.dim // width, width)
        yield split.transpose(1, 3, 0, 2).reshape(last * width, -1)


def _split_columns(rest: np.ndarray, shape: TTShape, core: int) -> np.ndarray:
    """(R, (i_1 .. i_k, j_1 .. j_k)) to ((R, i_k, j_k), (i_1 .. i_(k-1), j_1 .. j_(k-1)))."""
    m, n = shape.row_factors[core], shape.dim_factors[core]
    rows, dims = math.prod(shape.row_factors[:core]), math.prod(shape.dim_factors[:core])
    split = rest.reshape(rest.shape[0], rows, m, dims, n).transpose(0, 2, 4, 1, 3)
    return split.reshape(rest.shape[0] * m * n, rows * dims)


@dataclasses.dataclass(frozen=True)
class _Choice:
    """How many singular vectors to keep at a bond: the shape's rank, or the fewest that lose no more than a budget."""

    shape: TTShape
    bond: int
    budget: float | None

    def rank(self, squares: np.ndarray) -> int:
        """How many of these singular values, squared and descending, to keep."""
        if self.budget is None:
            return min(self.shape.ranks[self.bond], len(squares))
        # Entry r is what a rank of r leaves out; summed from the smallest on, which loses the fewest digits.
        tails = np.append(np.cumsum(squares[::-1])[::-1], 0.0)
        return max(1, int(np.argmax(tails <= self.budget)))


def _basis(gram: np.ndarray, choice: _Choice) -> tuple[np.ndarray, float]:
    """Leading eigenvectors as columns, and the sum of the eigenvalues left out."""
    # Ascending: the leading ones are the last columns.
    values, vectors = np.linalg.eigh(gram)
    # The others are zero, but for rounding: the unfolding's other side is smaller.
    values, vectors = np.maximum(values[::-1], 0)[: choice.shape.max_ranks[choice.bond]], vectors[:, ::-1]
    rank = choice.rank(values)
    return np.ascontiguousarray(vectors[:, :rank]), float(values[rank:].sum())


def _truncate(matrix: np.ndarray, choice: _Choice) -> tuple[np.ndarray, np.ndarray, float]:
    """``matrix`` as orthonormal columns times the rest, and the squared error."""
    if matrix.shape[0] <= matrix.shape[1]:
        basis, lost = _basis(matrix @ matrix.T, choice)
        return basis, basis.T @ matrix, lost
    # A tall matrix: its other Gram matrix is the large one, and the matrix itself is small by now.
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    rank = choice.rank(values**2)
    return left[:, :rank], values[:rank, None] * right[:rank], float((values[rank:] ** 2).sum())


def _as_cores(matrices: list[np.ndarray], ranks: list[int], shape: TTShape) -> tuple[np.ndarray, ...]:
    """((R', i, j), R) matrices as float32 cores (i, R, j, R'), zero where a rank was not needed."""
    cores = []
    bonds = (1, *ranks, 1)
    for k, (matrix, core_shape) in enumerate(zip(matrices, shape.core_shapes, strict=True)):
        m, _, n, _ = core_shape
        core = np.zeros(core_shape, np.float32)
        split = matrix.reshape(bonds[k + 1], m, n, bonds[k])
        core[:, : bonds[k], :, : bonds[k + 1]] = split.transpose(1, 3, 2, 0)
        cores.append(core)
    return tuple(cores)


def _chain(cores: Sequence[np.ndarray]) -> np.ndarray:
    """Product of neighbouring cores over all their digits: (rows, R, dim, R')."""
    out = cores[0]
    for core in cores[1:]:
        product = np.tensordot(out, core, axes=(3, 1))  # (i, R, j, i', j', R')
        i, left, j, m, n, right = product.shape
        out = product.transpose(0, 3, 1, 2, 4, 5).reshape(i * m, left, j * n, right)
    return out


def _host_cores(cores: Sequence[ArrayLike], shape: TTShape) -> list[np.ndarray]:
    check_cores(cores, shape)
    return [np.asarray(core).astype(np.float32) for core in cores]


def check_cores(cores: Sequence[object], shape: TTShape) -> None:
    """Raises ValueError unless there is an array of the right shape for every core."""
    shapes = tuple(tuple(getattr(core, "shape", ("no array",))) for core in cores)
    if shapes != shape.core_shapes:
        raise ValueError(
            f"the cores have shapes {list(shapes)}, but this tensor train has {list(shape.core_shapes)},"
            " (m, R, n, R') each"
        )
