"""The forms in which users have columns, NumPy, Arrow, DataFrames, tensors and Python lists, brought into one.

What follows works on NumPy arrays and offsets; only texts stay Arrow's. Arrays of NumPy and lists of the loader pass
through at once. The others go through Arrow: its C stream interface for polars and pandas, its builder for Python
lists, 40 µs per 1,000 ids.
"""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jrec.data.arrow_values import PRINTED, arrow_compute, is_list, plain, plain_type, texts_of
from jrec.data.columns import ListColumn
from jrec.optional_packages import explains_missing

if TYPE_CHECKING:
    import pyarrow as pa

_REMEDY = "give NumPy arrays, Arrow or DataFrame columns, or Python lists of integers or texts"


class Form(NamedTuple):
    """A column in the one form.

    Attributes:
      values: (values,) of NumPy, or texts as a LargeBinaryArray of Arrow.
      offsets: (examples + 1,) int64, which values are whose; None where each example has one.
      present: (values,) bool, which are not null; None where all are.
    """

    values: Any
    offsets: np.ndarray | None = None
    present: np.ndarray | None = None

    @property
    def is_text(self) -> bool:
        """Whether the values are texts."""
        return not isinstance(self.values, np.ndarray)

    @property
    def bounds(self) -> np.ndarray:
        """The offsets; without lists, offsets with one value an example."""
        return np.arange(len(self.values) + 1, dtype=np.int64) if self.offsets is None else self.offsets

    def example_of(self, position: int) -> int:
        """The example that has a value."""
        return position if self.offsets is None else int(np.searchsorted(self.offsets, position, side="right")) - 1


def brief(value: object, most: int = 60) -> str:
    """A value in a message, cut short: it may be anybody's, of any length."""
    text = repr(value[: most + 1]) if isinstance(value, str | bytes) else repr(value)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def by_name(columns: Any) -> Mapping[str, Any]:
    """Columns by name, of a mapping, an Arrow table, a DataFrame or a structured array.

    Raises:
      ValueError: If they are none of these.
    """
    if isinstance(columns, Mapping):
        return columns
    if hasattr(columns, "collect"):
        raise ValueError(f"columns are a {_name(columns)}, which is lazy; give what its collect() returns")
    if hasattr(columns, "to_frame"):
        raise ValueError(f"columns are a {_name(columns)}, one column or row; give a DataFrame, such as df.iloc[[0]]")
    if (names := getattr(getattr(columns, "dtype", None), "names", None)) is not None:  # a structured array
        return {name: columns[name] for name in names}
    if hasattr(columns, "schema") and hasattr(columns, "column"):  # Arrow's tables and record batches
        return dict(zip(columns.schema.names, columns.columns, strict=True))
    if hasattr(columns, "columns") and hasattr(columns, "__getitem__"):
        return {str(name): columns[name] for name in columns.columns}
    if hasattr(columns, "__arrow_c_stream__"):
        import pyarrow as pa

        return by_name(pa.table(columns))
    raise ValueError(
        f"columns must be a mapping from names to arrays, an Arrow table or a DataFrame, but are a {_name(columns)};"
        " pass one batch of a dataset at a time"
    )


@explains_missing
def form_of(name: str, column: Any, *, categories: bool = False) -> Form:
    """A column of ids or weights in the one form.

    Args:
      name: The column's name, for messages.
      column: A column in any form that ``pack_batch`` takes.
      categories: Whether values are a log's categories: those that are neither integers, booleans nor texts become the
        texts that a log has of them, and values of several types may stand in one column.

    Raises:
      ValueError: If it has no such form, naming the column and, where one is to blame, the example.
    """
    if isinstance(column, ListColumn):
        return _of_lists(name, column, categories)
    if isinstance(column, np.ndarray):
        return _of_array(name, column, categories)
    if type(column).__module__.startswith("pyarrow"):
        return _of_arrow(name, column, categories)
    if isinstance(column, list | tuple):
        return _of_sequence(name, column, categories)
    import pyarrow as pa

    # Arrow would make one type of the column's values, so that 7 beside 7.5 became 7.0: each is printed by itself.
    if categories and type(column).__module__.startswith("pandas") and column.dtype == object:
        return _of_sequence(name, column.tolist(), categories)
    if hasattr(column, "__arrow_c_stream__"):
        return _of_arrow(name, _built(name, lambda: pa.chunked_array(column)), categories)
    if hasattr(column, "__arrow_array__") or type(column).__module__.startswith("pandas"):
        return _of_arrow(name, _built(name, lambda: pa.array(column, from_pandas=True)), categories)
    if hasattr(column, "row_splits") and hasattr(column, "values"):  # a tf.RaggedTensor
        lists = ListColumn(array_of(name, column.row_splits), array_of(name, column.values))
        return _of_lists(name, lists, categories)
    return _of_array(name, array_of(name, column), categories)


def array_of(name: str, column: Any) -> np.ndarray:
    """An array of JAX, NumPy, TensorFlow or PyTorch, or anything else with ``__array__`` or ``__dlpack__``, as NumPy's.

    Masked numbers become NaN.

    Raises:
      ValueError: If it cannot be read from the host.
    """
    if isinstance(column, np.ma.MaskedArray):
        return np.asarray(np.ma.filled(column.astype(np.float32), np.nan))
    if type(column).__module__.startswith("pyarrow"):
        import pyarrow as pa

        if pa.types.is_interval(plain_type(column.type)):  # whose conversion to NumPy ends the process (pyarrow 26)
            raise ValueError(f"column {name!r} holds {column.type}, which is no number; give its parts as columns")
    try:
        if hasattr(column, "__array__") or not hasattr(column, "__dlpack__"):
            return np.asarray(column)
        return np.from_dlpack(column)
    except Exception as error:  # of another library, such as torch's TypeError for tensors on a GPU
        raise ValueError(
            f"column {name!r}, a {_name(column)}, is no array on the host ({error}); {_REMEDY}, on the host"
        ) from error


def _of_lists(name: str, column: ListColumn, categories: bool) -> Form:
    offsets, values = column
    if offsets.dtype.kind not in "iu" or offsets.ndim != 1 or values.ndim != 1:
        raise ValueError(
            f"a ListColumn of {name!r} has integer offsets and values of one axis, but offsets"
            f" {offsets.dtype}{list(offsets.shape)} and values {values.dtype}{list(values.shape)}"
        )
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(values) or (offsets[1:] < offsets[:-1]).any():
        raise ValueError(f"offsets of {name!r} must ascend from 0 to the number of its values, {len(values)}")
    return _of_values(name, values, np.require(offsets, np.int64, ["C", "W"]), None, categories)


def _of_array(name: str, column: np.ndarray, categories: bool) -> Form:
    if column.ndim not in (1, 2):
        raise ValueError(
            f"column {name!r} must be (examples,), (examples, length) or lists, but is"
            f" {column.dtype}{list(column.shape)}; give each feature a column of its own"
        )
    if column.dtype.kind in "OUST":
        return _of_sequence(name, column.tolist(), categories)
    present = ~np.ma.getmaskarray(column).reshape(-1) if isinstance(column, np.ma.MaskedArray) else None
    values = np.asarray(column)
    offsets = None if values.ndim == 1 else np.arange(len(values) + 1, dtype=np.int64) * values.shape[1]
    return _of_values(name, values.reshape(-1), offsets, present, categories)


def _of_values(
    name: str, values: np.ndarray, offsets: np.ndarray | None, present: np.ndarray | None, categories: bool
) -> Form:
    """The form of NumPy's values, (n,)."""
    if not categories or values.dtype.kind in "iub":
        return Form(values, offsets, present)
    import pyarrow as pa

    texts = _of_arrow(name, _built(name, lambda: pa.array(values, mask=None if present is None else ~present)), True)
    return texts._replace(offsets=offsets)


def _of_sequence(name: str, column: Sequence[Any], categories: bool) -> Form:
    import pyarrow as pa

    # By exact types: a subclass of str may print otherwise than it reads.
    if str in (types := {*map(type, column)}) and types <= {str, type(None)}:
        # At once to what `plain` gives texts: its two casts took a third of a request's time of one row.
        texts = _built(name, lambda: pa.array(column, pa.large_binary()))
        return Form(texts, present=None if not texts.null_count else texts.is_valid().to_numpy(zero_copy_only=False))
    if column and all(isinstance(one, np.ndarray) and one.ndim == 1 and one.dtype.kind in "iuf" for one in column):
        filled = [one for one in column if one.size]  # empty arrays are float64 unless their type is named
        values = np.concatenate(filled) if filled else np.zeros(0, np.int64)
        return _of_values(name, values, np.cumsum([0, *map(len, column)], dtype=np.int64), None, categories)

    if categories and not types <= {int, type(None)} and not types <= {bool, type(None)}:
        return _of_categories(name, column)

    def described(error: Exception) -> str:
        low, high = 0, len(column)  # the first example up to which they cannot be built
        while low + 1 < high:
            middle = (low + high) // 2
            try:
                pa.array(column[:middle])
                low = middle
            except (pa.ArrowException, OverflowError):
                high = middle
        return f", at example {low}: {brief(column[low])} ({brief(str(error), 200)})"

    def array() -> pa.Array:
        try:
            return pa.array(column)
        except ValueError:  # of pandas' NaT among times, which Arrow takes for a datetime unless it is told of pandas
            return pa.array(column, from_pandas=True)

    if not categories:
        return _of_arrow(name, _built(name, array, described), categories)
    try:
        return _of_arrow(name, pa.array(column), categories)
    except OverflowError:  # integers past 64 bits
        return _of_categories(name, column)


def _of_categories(name: str, column: Sequence[Any]) -> Form:
    """Values of any types, each as the text that a log has of it whatever stands beside it; or lists of them."""
    import pyarrow as pa

    if any(isinstance(value, list | tuple | np.ndarray) for value in column):
        return _of_category_lists(name, [() if _is_null(value) else value for value in column])
    texts: list[str | None] = [None] * len(column)
    by_type: dict[type, list[int]] = {}
    for k, value in enumerate(column):
        if _is_null(value):
            continue
        if (text := _text_of(value)) is None:
            by_type.setdefault(type(value), []).append(k)
        texts[k] = text
    for where in by_type.values():  # such as bytes, UUIDs and NumPy's scalars
        values = [column[k] for k in where]

        def described(error: Exception, values: Sequence[Any] = values, first: int = where[0]) -> str:
            return f", at example {first}: {brief(values[0])} ({brief(str(error), 200)})"

        built = _built(name, lambda values=values: texts_of(plain(pa.array(values))), described)
        for k, text in zip(where, built.to_pylist(), strict=True):
            texts[k] = None if text is None else text.decode()
    return _of_arrow(name, pa.array(texts, pa.large_string()), True)


def _of_category_lists(name: str, column: Sequence[Any]) -> Form:
    for example, value in enumerate(column):
        if not isinstance(value, list | tuple | np.ndarray):
            raise ValueError(
                f"column {name!r} has lists, but {brief(value)} in example {example}; give each example a list"
            )
    values = [value for one in column for value in one]
    if any(isinstance(value, list | tuple | np.ndarray | dict) for value in values):
        raise ValueError(f"column {name!r} has lists in its lists; {_REMEDY}")
    return _of_sequence(name, values, True)._replace(offsets=np.cumsum([0, *map(len, column)], dtype=np.int64))


def _is_null(value: object) -> bool:
    """Whether a value stands for none: None, NaN, and pandas' NA and NaT."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, float | np.floating) and bool(np.isnan(value))


def _text_of(value: object) -> str | None:
    """The text of a value of Python's own types; None of others."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, float) and not isinstance(value, np.generic):
        return str(int(value)) if value.is_integer() and abs(value) < PRINTED else repr(value)
    if isinstance(value, decimal.Decimal):
        return f"{value:f}"
    return str(value) if isinstance(value, datetime.date | datetime.time) else None


def _built(name: str, build: Callable[[], pa.Array], described: Callable[[Exception], str] = "; {}".format) -> pa.Array:
    import pyarrow as pa

    try:
        return build()
    except (pa.ArrowException, OverflowError, TypeError) as error:
        raise ValueError(f"column {name!r} is neither ids nor lists of them{described(error)}; {_REMEDY}") from error


def _of_arrow(name: str, column: pa.Array | pa.ChunkedArray, categories: bool) -> Form:
    import pyarrow as pa

    compute = arrow_compute()
    column = _built(name, lambda: plain(column))
    kinds, offsets = pa.types, None
    if is_list(column.type):
        lengths = compute.list_value_length(column).fill_null(0)  # a null is an empty list
        offsets = np.zeros(len(column) + 1, np.int64)
        np.cumsum(lengths.to_numpy(zero_copy_only=False), out=offsets[1:])
        values = column.flatten()
        column = _built(name, lambda: plain(values))
    if categories and any(of_type(column.type) for of_type in _printed_types()):
        column = _built(name, lambda: texts_of(column))
    present = None if not column.null_count else column.is_valid().to_numpy(zero_copy_only=False)
    dtype = column.type
    if kinds.is_null(dtype):
        return Form(np.zeros(len(column), np.int64), offsets, np.zeros(len(column), bool))
    if kinds.is_integer(dtype) or kinds.is_boolean(dtype):
        nothing = False if kinds.is_boolean(dtype) else 0
        values = column.fill_null(nothing) if column.null_count else column
        return Form(values.to_numpy(zero_copy_only=False), offsets, present)
    if kinds.is_decimal(dtype):
        column = column.cast(pa.large_string()).cast(pa.float64())  # the nearest one, as of a log's text
    if kinds.is_timestamp(dtype) or kinds.is_date(dtype):
        column = column.cast(pa.timestamp("ms" if kinds.is_date(dtype) else dtype.unit))  # in UTC
    if kinds.is_floating(column.type) or kinds.is_timestamp(column.type):
        return Form(column.to_numpy(zero_copy_only=False), offsets, present)
    if kinds.is_large_binary(dtype):
        return Form(column, offsets, present)
    raise ValueError(f"column {name!r} holds {dtype}, which are neither ids nor lists of them; {_REMEDY}")


def _printed_types() -> list[Callable[[pa.DataType], bool]]:
    """Types of categories that a log has as texts; it has integers, booleans and texts as what they are."""
    import pyarrow as pa

    kinds = pa.types
    return [kinds.is_floating, kinds.is_decimal, kinds.is_timestamp, kinds.is_date, kinds.is_time]


def _name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
