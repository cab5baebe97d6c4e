"""Arrow columns of every type as the few types that jrec reads, the same for Parquet files and for columns in memory.

A UUID is its text, as 550e8400-e29b-41d4-a716-446655440000. Bytes are the text that they are in UTF-8; bytes that are
none, or hold a character that no line of a log can, are 0x and their hexadecimal digits: a value of any bytes has a
text of its own, whatever the others of its column are.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from jrec.data.scan import OK, check_text
from jrec.kernel_cache import compiled

if TYPE_CHECKING:
    import pyarrow as pa

EXACT = float(1 << 53)
"""Up to which float64 counts whole numbers one by one."""
PRINTED = 1e16
"""Up to which Python, and so pandas, print whole floats without an exponent."""

_DASHES = (8, 12, 16, 20)  # in front of these digits of a UUID
_DIGITS = np.frombuffer(b"0123456789abcdef", np.uint8)


def arrow_compute() -> ModuleType:
    """``pyarrow.compute``, whose functions exist at run time only, unknown to type checkers."""
    import pyarrow.compute

    return pyarrow.compute


def is_list(dtype: pa.DataType) -> bool:
    """Whether values of an Arrow type are lists, of any length or of one."""
    import pyarrow as pa

    kinds = pa.types
    tests: list[Callable[[pa.DataType], bool]] = [
        kinds.is_list,
        kinds.is_large_list,
        kinds.is_fixed_size_list,
        kinds.is_list_view,
        kinds.is_large_list_view,
    ]
    return any(test(dtype) for test in tests)


def decoded_type(dtype: pa.DataType) -> pa.DataType:
    """The type of a column's values without their dictionary, where it has one."""
    import pyarrow as pa

    return dtype.value_type if pa.types.is_dictionary(dtype) else dtype


def plain_type(dtype: pa.DataType) -> pa.DataType:
    """The type that ``plain`` gives values of an Arrow type; the type itself where Arrow cannot convert it."""
    import pyarrow as pa

    try:
        return plain(pa.nulls(0, dtype)).type
    except pa.ArrowException:
        return dtype


def plain(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """An array of one chunk, without dictionary, runs, view or extension; texts and bytes as large_binary.

    Raises:
      pa.ArrowException: If Arrow cannot convert the values.
    """
    import pyarrow as pa

    compute = arrow_compute()
    kinds = pa.types
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if isinstance(column, pa.ChunkedArray):  # of several chunks where offsets of 32 bits do not hold them
        wide = pa.large_string() if kinds.is_string(column.type) else pa.large_binary()
        column = pa.concat_arrays(column.cast(wide).chunks)
    dtype = column.type
    if isinstance(dtype, pa.UuidType):
        # Before other extensions, whose storage is what they mean: a UUID's 16 bytes would become 0x and digits.
        return _uuid_texts(column.storage)
    if isinstance(dtype, pa.Bool8Type):
        return column.storage.cast(pa.bool_())
    if isinstance(dtype, pa.BaseExtensionType):
        return plain(column.storage)
    if kinds.is_dictionary(dtype):
        if kinds.is_string_view(dtype.value_type) or kinds.is_binary_view(dtype.value_type):  # Arrow decodes no views
            column = pa.DictionaryArray.from_arrays(column.indices, plain(column.dictionary))
        return plain(column.dictionary_decode())
    if kinds.is_run_end_encoded(dtype):
        return plain(compute.run_end_decode(column))
    if kinds.is_float16(dtype):
        return column.cast(pa.float32())
    if kinds.is_string(dtype) or kinds.is_large_string(dtype) or kinds.is_string_view(dtype):
        return column.cast(pa.large_string()).cast(pa.large_binary())
    if kinds.is_fixed_size_binary(dtype) or kinds.is_binary_view(dtype):
        column = column.cast(pa.binary())
    if kinds.is_binary(column.type) or kinds.is_large_binary(column.type):
        return _byte_texts(column.cast(pa.large_binary()))
    return column


def texts_of(column: pa.Array, *, number: bool = False, whole: float = PRINTED) -> pa.Array:
    """Values of a plain type as the texts that a log has of them, a LargeBinaryArray with nulls; NaN is null.

    Args:
      column: A column of any type that ``plain`` gives but lists.
      number: Whether they are to be read as numbers, not as categories: whole floats keep their point, booleans are 0
        and 1.
      whole: Up to which floats without a fraction are printed as integers.
    """
    import pyarrow as pa

    compute = arrow_compute()
    kinds = pa.types
    if kinds.is_floating(column.type):
        column = compute.if_else(compute.is_nan(column), None, column)
        if not number:
            return _whole(column, whole).cast(pa.large_binary())
    if kinds.is_boolean(column.type) and number:
        column = column.cast(pa.int8())
    if kinds.is_decimal(column.type):
        return compute.replace_substring_regex(column.cast(pa.large_string()), r"\.0+$", "").cast(pa.large_binary())
    if not kinds.is_large_binary(column.type):
        column = column.cast(pa.large_string())
    return column.cast(pa.large_binary())


def _whole(column: pa.Array, most: float) -> pa.Array:
    """Floats as texts, whole numbers among them as integers have them: columns of ids with gaps are often floats."""
    import pyarrow as pa

    compute = arrow_compute()
    # Infinities equal their floor, and are kept out by the bound.
    whole = compute.and_(compute.equal(compute.floor(column), column), compute.less(compute.abs(column), most))
    integers = compute.if_else(whole, column, None).cast(pa.int64()).cast(pa.large_string())
    return compute.coalesce(integers, column.cast(pa.large_string()))


def _uuid_texts(column: pa.Array) -> pa.Array:
    content = column.buffers()[1]
    values = np.frombuffer(content, np.uint8)[16 * column.offset :][: 16 * len(column)].reshape(-1, 16)
    digits = _DIGITS[np.stack([values >> 4, values & 15], axis=2)].reshape(-1, 32)
    texts = np.insert(digits, _DASHES, ord("-"), axis=1)
    return _large_binary(column, np.arange(len(texts) + 1, dtype=np.int64) * texts.shape[1], texts)


def _byte_texts(column: pa.Array) -> pa.Array:
    _, ends, content = column.buffers()
    if content is None or not len(column):
        return column
    bounds = np.frombuffer(ends, np.int64)[column.offset :][: len(column) + 1]
    values = np.frombuffer(content, np.uint8)[bounds[0] : bounds[-1]]
    # Of printable ASCII alone, as most bytes are, every value is a text that a line can hold.
    if not values.size or (values.min() >= ord(" ") and values.max() < 128):
        return column
    return _large_binary(column, *_texts_of_bytes(values, bounds - bounds[0]))


@compiled
def _texts_of_bytes(values, bounds):
    """(values + 1,) int64 bounds and the uint8 texts of values, of which some may be no texts."""
    digits = np.zeros(bounds.shape[0] - 1, np.bool_)
    ends = np.zeros(bounds.shape[0], np.int64)
    for i in range(digits.shape[0]):
        start, end = bounds[i], bounds[i + 1]
        # All or nothing for each value, never for the column: what a value is called must not depend on what stands
        # beside it.
        other = check_text(values, start, end) != OK
        for j in range(start, end):
            other = other or values[j] == 10 or values[j] == 0x1E or values[j] == 0x1F
        digits[i] = other
        ends[i + 1] = ends[i] + (2 + 2 * (end - start) if other else end - start)
    texts = np.empty(ends[-1], np.uint8)
    for i in range(digits.shape[0]):
        at = ends[i]
        if not digits[i]:
            texts[at : ends[i + 1]] = values[bounds[i] : bounds[i + 1]]
            continue
        texts[at], texts[at + 1] = 48, 120
        for j in range(bounds[i], bounds[i + 1]):
            at += 2
            texts[at], texts[at + 1] = _DIGITS[values[j] >> 4], _DIGITS[values[j] & 15]
    return ends, texts


def _large_binary(column: pa.Array, bounds: np.ndarray, texts: np.ndarray) -> pa.Array:
    """The texts as an array that is null where the column is."""
    import pyarrow as pa

    compute = arrow_compute()
    buffers = [None, pa.py_buffer(np.ascontiguousarray(bounds)), pa.py_buffer(np.ascontiguousarray(texts))]
    made = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(column), buffers)
    return compute.if_else(column.is_valid(), made, None) if column.null_count else made
