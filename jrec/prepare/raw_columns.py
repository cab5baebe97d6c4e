"""Columns of raw values, as a service or a DataFrame has them, in the form in which a parsed log has them.

So what a format does to a log's lines (transforms, missing values, cut lists, derived features), it does to columns.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jrec.data.arrow_values import arrow_compute
from jrec.data.column_forms import Form, brief, by_name, form_of
from jrec.data.columns import Column, ListColumn, count_examples
from jrec.data.keys import MISSING, Spans, hex8_keys, value_keys
from jrec.data.scan import OK
from jrec.data.schema import DatasetError
from jrec.data.spans import numbers_of, time_reason, times_of
from jrec.prepare.readers.columnar import as_float64, split_texts, without_lone_blanks
from jrec.prepare.readers.lines import Block
from jrec.prepare.readers.parse import Dialect, Field, ParsedBlock, without_missing

if TYPE_CHECKING:
    import pyarrow as pa

_NO_BLOCK = Block(path="", line=0, text=b"", bytes_read=0)


class RawColumns(ParsedBlock):
    """A parsed block of columns: what a format rejects raises."""

    def reject(self, wrong: np.ndarray, name: str, reason: str) -> None:
        """Raises DatasetError for the first example where ``wrong`` is true."""
        if wrong.any():
            raise DatasetError(f"column {name!r} of example {int(wrong.argmax())} {reason}")


def parsed_columns(fields: Sequence[Field], columns: object, key_seed: int) -> RawColumns:
    """Reads columns as a format's fields.

    Args:
      fields: The fields that features are made of, by column name; others are ignored.
      columns: A mapping by column name, an Arrow table, or a DataFrame. Numbers and texts are (examples,) arrays or
        lists; lists of values are ragged, or texts with the field's separator. Missing is null, None, NaN or "".
      key_seed: The seed of the hash of long values.

    Raises:
      DatasetError: If a column is missing, or a value cannot be what its field is.
      ValueError: If a column has no such form, or columns are of unequal lengths.
    """
    named = by_name(columns)
    if lacking := [f.name for f in fields if f.name not in named]:
        raise DatasetError(
            f"column(s) {', '.join(lacking)} are missing; there are {', '.join(map(str, named)) or 'none'}. Give every"
            " column that the dataset's features are made of"
        )
    alike: dict[tuple[object, ...], list[Field]] = {}
    for field in fields:
        alike.setdefault((field.kind, field.blank, field.missing, field.decimal), []).append(field)
    read: dict[str, Column] = {}
    for some in alike.values():
        read |= _read_alike(some, [named[f.name] for f in some], key_seed)
    lengths = {name: count_examples(column) for name, column in read.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"columns must be equally long, but have {lengths}")
    return RawColumns(
        dialect=Dialect(fields=tuple(fields)),
        columns=read,
        lines=np.empty(next(iter(lengths.values()), 0), np.int64),
        bad=[],
        long_texts=None,
        block=_NO_BLOCK,
    )


def keys_of_lists(field: Field, column: object, key_seed: int) -> ListColumn:
    """The uint64 keys of a column of lists, whose elements are what the field's values are; null is an empty list.

    Raises:
      DatasetError: If it has no lists, or an element cannot be what the field is.
      ValueError: If the column has no such form.
    """
    form = form_of(field.name, column, categories=True)
    if form.offsets is None:
        if _is_nothing(form):
            return ListColumn(np.zeros(len(form.values) + 1, np.int64), np.empty(0, np.uint64))
        raise DatasetError(f"column {field.name!r} holds one value an example, but lists are wanted")
    return ListColumn(form.bounds.copy(), _keys(field, form, key_seed))


def _read_alike(fields: Sequence[Field], columns: Sequence[Any], key_seed: int) -> Mapping[str, Column]:
    """Reads columns of which the same is to be made; equally long lists as one, one behind the other.

    A request of one row takes as long as it has calls, and so there are as many as kinds of columns. Whatever is wrong
    is said by the columns one by one, and so is what means something else beside other types.
    """
    kind, rows = fields[0].kind, len(columns[0]) if isinstance(columns[0], list) else 0
    if kind in ("number", "hex", "text") and all(type(c) is list and len(c) == rows for c in columns):
        with contextlib.suppress(DatasetError, ValueError):
            form = form_of("", [*itertools.chain.from_iterable(columns)], categories=kind != "number")
            if form.offsets is None and (form.is_text or kind == "number"):  # integers beside booleans would be equal
                values = _read(fields[0], form, key_seed)
                assert isinstance(values, np.ndarray)  # of these kinds
                return {field.name: values[rows * k : rows * (k + 1)] for k, field in enumerate(fields)}
    forms = [_form(field, column) for field, column in zip(fields, columns, strict=True)]
    return {field.name: _read(field, form, key_seed) for field, form in zip(fields, forms, strict=True)}


def _form(field: Field, column: Any) -> Form:
    """A column in the one form; what Arrow has no number for, as integers past 64 bits, as the text of a log."""
    if field.kind not in ("hex", "text", "texts"):
        with contextlib.suppress(ValueError):
            return form_of(field.name, column)
    return form_of(field.name, column, categories=True)


def _read(field: Field, form: Form, key_seed: int) -> Column:
    many = field.kind in ("texts", "weights")
    printed = many and form.offsets is None and not field.separator
    if many and form.offsets is None:
        form = _split(field, form)
    if many and not printed:  # of a list that is printed, as ["a"], a log has the null, too
        form = _without_lone_blanks(form)
    if not many and form.offsets is not None:
        raise DatasetError(f"column {field.name!r} holds lists, but it has one value an example")
    if field.kind in ("number", "weights"):
        values = _numbers(field, form)
    elif field.kind == "integer":
        values = _integers(field, form)
    elif field.kind == "time":
        values = _times(field, form)
    else:
        values = _keys(field, form, key_seed)
    column = ListColumn(form.bounds.copy(), values) if many else values  # the bounds may be the caller's
    return without_missing(column, field, key_seed) if field.kind in ("text", "texts") and field.missing else column


def _without_lone_blanks(form: Form) -> Form:
    """The same lists, of which those of one blank are empty, as preparation makes them (``columnar``)."""
    assert form.offsets is not None  # of lists
    if not (np.diff(form.offsets) == 1).any():  # a request of a row has no time for what follows
        return form
    if form.is_text:
        blank = arrow_compute().binary_length(form.values).fill_null(0).to_numpy(zero_copy_only=False) == 0
    else:
        blank = np.isnan(form.values) if form.values.dtype.kind == "f" else np.zeros(len(form.values), bool)
        blank = blank if form.present is None else blank | ~form.present
    if (shorter := without_lone_blanks(form.offsets, blank)) is None:
        return form
    kept, offsets = shorter
    values = form.values.filter(kept) if form.is_text else form.values[kept]
    return Form(values, offsets, None if form.present is None else form.present[kept])


def _is_nothing(form: Form) -> bool:
    """Whether no value is there, which has no type either."""
    return not len(form.values) or (form.present is not None and not form.present.any())


def _split(field: Field, form: Form) -> Form:
    """Lists that are texts with separators; a blank is the empty list."""
    if not form.is_text and _is_nothing(form):
        return Form(np.empty(0, np.int64), np.zeros(len(form.values) + 1, np.int64))
    if not form.is_text:
        raise DatasetError(
            f"column {field.name!r} holds one {form.values.dtype} an example, but lists are wanted: give ragged lists,"
            f" or texts with the separator {field.separator!r}"
        )
    texts = form.values.fill_null(b"")
    if not field.separator:
        lists = [_elements(field, k, text.as_py().decode()) for k, text in enumerate(texts)]
        return form_of(field.name, lists, categories=field.kind == "texts")
    lengths, elements = split_texts(texts, field.separator)
    return Form(elements, np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))


def _elements(field: Field, example: int, text: str) -> list[str]:
    """The elements of a list as JSON or Python prints it; none of a blank or null."""
    elements: object = None
    # Numbers stay as they are written; what is nested too deep for Python is no list of values either.
    for read in (functools.partial(json.loads, parse_float=str, parse_int=str), ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            elements = read(text) if text.strip() not in ("", "null", "None") else []
            break
    if not isinstance(elements, list) or any(isinstance(one, list | dict) for one in elements):
        raise DatasetError(
            f'column {field.name!r} holds {brief(text)} in example {example}, which is no list such as ["a", "b"]; give'
            " ragged lists, or texts as the log has them"
        )
    return ["" if one is None else one if isinstance(one, str) else json.dumps(one) for one in elements]


def _numbers(field: Field, form: Form) -> np.ndarray:
    """(values,) float64, NaN where missing."""
    if form.is_text:
        codes, values = numbers_of(*Spans.of(_filled(form.values)), field.missing, field.decimal)
        if (wrong := codes != OK).any():
            k = int(wrong.argmax())
            raise _refused(field, form, k, form.values[k].as_py(), "is not a finite number")
    elif form.values.dtype.kind not in "fiub":
        raise DatasetError(f"column {field.name!r} holds {form.values.dtype}, but numbers are wanted; cast it")
    else:
        values = as_float64(form.values)
        if form.present is not None:
            values[~form.present] = np.nan
    if (infinite := np.isinf(values)).any():
        k = int(infinite.argmax())
        raise _refused(field, form, k, values[k], "is not a finite number")
    if (not field.blank or field.kind == "weights") and (missing := np.isnan(values)).any():
        raise _refused(field, form, int(missing.argmax()), "no value", "is missing; give one")
    return values


def _integers(field: Field, form: Form) -> np.ndarray:
    """(values,) int64."""
    values = _numbers(Field(name=field.name, kind="number", blank=False), form)
    if not form.is_text and form.values.dtype.kind in "iu":
        return form.values.astype(np.int64)
    whole = (values == np.floor(values)) & (np.abs(values) < 2**53)
    if not whole.all():
        k = int((~whole).argmax())
        raise _refused(field, form, k, values[k], "is not an integer")
    return values.astype(np.int64)


def _times(field: Field, form: Form) -> np.ndarray:
    """(values,) int64 microseconds since 1970 of times in the field's unit, or of NumPy's datetimes."""
    if not form.is_text and form.values.dtype.kind == "M":
        try:
            values = form.values.astype("datetime64[us]")
        except OverflowError as error:
            raise DatasetError(
                f"column {field.name!r} holds times in {form.values.dtype} that microseconds of 64 bits cannot hold"
            ) from error
        if (absent := np.isnat(values)).any() and not field.blank:
            raise _refused(field, form, int(absent.argmax()), "no value", "is missing; give one")
        return values.astype(np.int64)  # NaT is NO_TIME
    texts = form.values
    if not form.is_text:
        import pyarrow as pa

        absent = None if form.present is None else ~form.present
        texts = pa.array(form.values, mask=absent, from_pandas=True).cast(pa.large_string())  # NaN is null
    absent = field.missing if field.blank else None
    codes, values = times_of(*Spans.of(texts.fill_null(b"" if form.is_text else "")), field.unit, absent)
    if (wrong := codes != OK).any():
        k = int(wrong.argmax())
        raise _refused(field, form, k, texts[k].as_py(), time_reason(field.unit))
    return values


def _filled(texts: pa.Array) -> pa.Array:
    """Texts with "" in place of nulls. Arrow takes a while even where there are none."""
    return texts.fill_null(b"") if texts.null_count else texts


def _keys(field: Field, form: Form, key_seed: int) -> np.ndarray:
    """(values,) uint64 keys; an integer has the key of its decimal text."""
    values = form.values
    if not form.is_text and values.dtype.kind == "b":
        import pyarrow as pa

        values = pa.array(values).cast(pa.large_string())  # "true" and "false", as of a log's
    elif form.is_text:
        values = _filled(values)
    if field.kind == "hex":
        return _hex_keys(field, form, values)
    keys = value_keys(values, key_seed, canonical=field.canonical)
    if form.present is not None:
        keys[~form.present] = MISSING
    return keys


def _hex_keys(field: Field, form: Form, values: np.ndarray | pa.Array) -> np.ndarray:
    if isinstance(values, np.ndarray):
        if form.present is None or form.present.any():
            raise DatasetError(
                f"column {field.name!r} holds integers; give texts of 8 hexadecimal digits, as the log has"
            )
        return np.full(len(values), MISSING, np.uint64)
    keys, valid = hex8_keys(*Spans.of(values))
    if not valid.all():
        k = int((~valid).argmax())
        raise _refused(field, form, k, values[k].as_py(), "is not 8 hexadecimal digits")
    return keys


def _refused(field: Field, form: Form, k: int, value: object, reason: str) -> DatasetError:
    text = value.decode(errors="replace") if isinstance(value, bytes) else value
    return DatasetError(f"column {field.name!r} holds {brief(text)} in example {form.example_of(k)}, which {reason}")
