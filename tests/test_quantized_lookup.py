"""Lookups of float and quantized rows in one native call, against float64 sums over the dequantized rows."""

import itertools

import ml_dtypes
import numpy as np
import pytest

from jrec.native.batched_lookup import Lookup, lookup_beside, lookup_many, quantized_dtype, table_rows
from jrec.serving.quantize import dequantize, quantize

KINDS = ("float32", "bfloat16", "float16", "int8", "int4")


def _bags(rng, rows, form):
    bags = int(rng.integers(0, 40))
    if form == "one":
        ids = rng.integers(-1, rows, (bags, 1))
        return ids.astype(np.int32), None
    if form == "padded":
        return rng.integers(-1, rows, (bags, 7)).astype(np.int32), None
    lengths = rng.integers(0, 12, bags) * rng.integers(0, 2, bags)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    capacity = int(offsets[-1]) + int(rng.integers(0, 5))
    return rng.integers(-1, rows, capacity).astype(np.int32), offsets


def _stored(rng, kind, rows, dim):
    """The table as it is stored, and its rows in float64."""
    values = rng.normal(size=(rows, dim)) * rng.choice([1e-4, 1.0, 100.0], size=(rows, 1))
    if kind.startswith("int"):
        bits = int(kind[3:])
        stored = quantize(values.astype(np.float32), bits)
        return stored, dequantize(stored, bits, dim).astype(np.float64)
    stored = values.astype(ml_dtypes.bfloat16 if kind == "bfloat16" else kind)
    return stored, stored.astype(np.float64)


def _reference(rows, ids, offsets, weights):
    ids_of = ids if offsets is None else [ids[a:b] for a, b in itertools.pairwise(offsets)]
    if weights is None:
        weights = np.ones(ids.shape, np.float32)
    weights_of = weights if offsets is None else [weights[a:b] for a, b in itertools.pairwise(offsets)]
    out = np.zeros((len(ids_of), rows.shape[1]))
    size = np.zeros(len(ids_of))
    for bag, (some, of_some) in enumerate(zip(ids_of, weights_of, strict=True)):
        for i, w in zip(some, of_some, strict=True):
            if i >= 0:
                out[bag] += float(w) * rows[i]
                size[bag] += abs(float(w)) * np.abs(rows[i]).max()
    return out, size


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("seed", range(6))
def test_sums_of_every_kind_in_one_call(seed, threads):
    rng = np.random.default_rng(seed)
    lookups, wanted = [], []
    for kind in KINDS:
        for form in ("one", "padded", "ragged"):
            rows, dim = int(rng.integers(1, 300)), int(rng.choice([1, 2, 3, 7, 16, 31, 64, 100, 200]))
            stored, exact = _stored(rng, kind, rows, dim)
            ids, offsets = _bags(rng, rows, form)
            weights = rng.normal(size=ids.shape).astype(np.float32) if rng.integers(2) else None
            lookups.append(Lookup(rows=table_rows(stored, dim), ids=ids, offsets=offsets, weights=weights))
            wanted.append(_reference(exact, ids, offsets, weights))
    for one, got, (sums, size) in zip(lookups, lookup_many(lookups, threads=threads), wanted, strict=True):
        assert got.shape == sums.shape
        assert (np.abs(got - sums) <= 1e-5 * size[:, None] + 1e-30).all(), one.rows.values.dtype


@pytest.mark.parametrize("bits", [8, 4])
def test_large_values_are_quantized(bits):
    rows = np.array([[2e38, 3e38, 2e38], [-3e38, -3e38, -3e38]], np.float32)
    np.testing.assert_allclose(dequantize(quantize(rows, bits), bits, 3), rows, rtol=1e-6)
    for bad in (np.nan, np.inf, -np.inf):
        with pytest.raises(ValueError, match=f"row 1 of the rows to quantize holds {bad}"):
            quantize(np.array([[0, 1, 2], [bad, 1, 2]], np.float32), bits)


def test_sums_side_by_side_are_those_of_their_own_arrays():
    rng = np.random.default_rng(1)
    lookups = []
    for kind, dim in itertools.product(KINDS, (1, 16, 31)):
        stored, _ = _stored(rng, kind, 50, dim)
        lookups.append(Lookup(rows=table_rows(stored, dim), ids=rng.integers(-1, 50, (700, 7), dtype=np.int32)))
    wide = np.full((700, 10 + len(KINDS) * 48), 7.5, np.float32)
    lookup_beside(lookups, wide[:, 10:], threads=2)
    assert (wide[:, :10] == 7.5).all()
    assert np.array_equal(wide[:, 10:], np.concatenate(lookup_many(lookups, threads=1), axis=1))


def test_no_bags_have_no_sums():
    """Of an array of no elements, whose strides NumPy makes 0."""
    lookup = Lookup(rows=table_rows(quantize(np.ones((4, 6)), 8), 6), ids=np.zeros((0, 1), np.int32))
    lookup_beside([lookup], np.empty((0, 8), np.float32)[:0, 2:])


@pytest.mark.parametrize("shape", [(3, 6), (2, 5), (2, 7)])
def test_a_place_of_another_size_is_refused(shape):
    lookup = Lookup(rows=table_rows(quantize(np.ones((4, 6)), 8), 6), ids=np.zeros((2, 1), np.int32))
    lookup_beside([lookup], np.zeros((2, 6), np.float32))
    with pytest.raises(ValueError, match="of 2 bags of 6 elements"):
        lookup_beside([lookup], np.zeros(shape, np.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_an_id_past_the_table_is_nan_and_no_other_bag_is(kind):
    stored, _ = _stored(np.random.default_rng(0), kind, 10, 5)
    ids = np.array([[1, 2], [3, 10], [-1, -1]], np.int32)
    (out,) = lookup_many([Lookup(rows=table_rows(stored, 5), ids=ids)])
    assert np.isnan(out[1]).all()
    assert np.isfinite(out[[0, 2]]).all()
    assert not out[2].any()


@pytest.mark.parametrize("bits", [8, 4])
def test_no_rows_are_no_values(bits):
    """As of a request without a candidate; NumPy cannot tell the width of no rows."""
    stored = quantize(np.zeros((0, 3), np.float32), bits)
    assert dequantize(stored, bits, 3).shape == (0, 3)


@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_values_are_within_half_a_step(bits):
    rng = np.random.default_rng(bits)
    rows = rng.normal(size=(500, 33)) * 10.0 ** rng.integers(-6, 4, (500, 1))
    rows[0] = 3.25  # constant
    stored = quantize(rows, bits)
    assert stored.dtype == quantized_dtype(bits, 33)
    assert stored.dtype.itemsize == 8 + (33 if bits == 8 else 17)
    step = (rows.max(axis=1) - rows.min(axis=1)) / (2**bits - 1)
    error = np.abs(dequantize(stored, bits, 33) - rows)
    assert (error <= 0.5 * step[:, None] + 1e-6 * np.abs(rows).max(axis=1)[:, None]).all()
    assert (error[0] == 0).all()


def test_what_does_not_fit_is_refused():
    stored = quantize(np.ones((4, 6)), 8)
    ids = np.zeros((1, 1), np.int32)
    with pytest.raises(ValueError, match=r"rows must be \(rows, 5\)"):
        lookup_many([Lookup(rows=table_rows(stored, 5), ids=ids)])
    with pytest.raises(ValueError, match="ids must be int32"):
        lookup_many([Lookup(rows=table_rows(stored, 6), ids=ids.astype(np.int64))])
    with pytest.raises(ValueError, match="weights must be float32"):
        lookup_many([Lookup(rows=table_rows(stored, 6), ids=ids, weights=np.ones((1, 2), np.float32))])
    with pytest.raises(ValueError, match=r"row 1 .* holds nan"):
        quantize(np.array([[0.0], [np.nan]]), 8)
    with pytest.raises(ValueError, match="bits is 6"):
        quantize(np.ones((1, 1)), 6)
