"""Bodies of requests and answers: JSON and Arrow's stream format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute

from jrec.data.arrow_values import is_list
from jrec.errors import JrecError
from jrec.json_values import JsonObject
from jrec.serving.answers import Answer
from jrec.serving.http.arrow import table_of
from jrec.serving.http.batcher import Rows

JSON, ARROW = "application/json", "application/vnd.apache.arrow.stream"
MOST_ITEMS = 1_000
_ITEMS = 10  # that a request without k gets
_MANY_ROWS = 16  # of as many values as may be in one column: what takes longer to read than others should wait
_compute: ModuleType = pyarrow.compute  # whose functions exist at run time only
_SIGNATURE = "serving_default"  # by which clients of TensorFlow Serving ask for what there is
_FORMS = 'give {"rows": [{"COLUMN": VALUE, ...}, ...]} or {"columns": {"COLUMN": [VALUE, ...], ...}}'


class MalformedError(JrecError):
    """A body that is not what its content type says."""


class UnfitError(JrecError):
    """A body in the right format with the wrong content; the message names column and row."""


class TooManyRowsError(JrecError):
    """A request of more rows than the server takes."""


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    rows: list[JsonObject] | None = None
    columns: dict[str, list[Any]] | None = None
    instances: list[JsonObject] | None = None
    signature_name: str = _SIGNATURE
    parameters: JsonObject | None = None


_ROWS = ("rows", "columns", "instances")
_decoder = msgspec.json.Decoder(_Body)
_encoder = msgspec.json.Encoder()


def rows_of(
    content: bytes, kind: str, *, max_rows: int, max_bytes: int, max_values: int = 65_536, names: Sequence[str] = ()
) -> Rows:
    """The raw values of a request's body.

    Args:
      content: The body.
      kind: ``JSON`` or ``ARROW``.
      max_rows: The most rows that it may have.
      max_bytes: The most bytes that a column may take in memory, which an Arrow body may exceed.
      max_values: The most values that a row may have in one column.
      names: The columns of ``"rows": []``, which says none.

    Raises:
      MalformedError: If it cannot be read.
      UnfitError: If it is JSON of another form, or columns are not equally long.
      UnreadableError: If it is an Arrow stream of types that no feature has, or much larger in memory than it is.
      TooManyRowsError: If it has more rows than that.
    """
    # Before it is decoded: a value of two bytes becomes an object of tens, and all but the last have a comma behind
    # them.
    if kind == JSON and (commas := content.count(b",")) > (most := _MANY_ROWS * max_values):
        raise TooManyRowsError(f"the request has {commas:,} commas, but at most {most:,} values may be; send several")
    rows = _of_arrow(content, max_rows, max_bytes) if kind == ARROW else _of_json(content, names)
    _check_count(rows.count, max_rows)
    _check_values(rows.columns, max_values)
    return rows


def _of_json(content: bytes, names: Sequence[str]) -> Rows:
    try:
        body = _decoder.decode(content)
    except msgspec.ValidationError as problem:
        raise UnfitError(f"the JSON body is of another form ({problem}); {_FORMS}") from problem
    except (msgspec.DecodeError, UnicodeError, RecursionError) as problem:
        raise MalformedError(f"the body is not JSON ({problem}); {_FORMS}") from problem
    # What clients of TensorFlow Serving and Vertex AI send beside the instances, whether or not it says something.
    if body.signature_name != _SIGNATURE:
        raise UnfitError(
            f"signature_name is {body.signature_name[:40]!r}, but there is only {_SIGNATURE!r}; leave it out"
        )
    if body.parameters:
        raise UnfitError(f"the model takes no parameters, such as {next(iter(body.parameters))[:40]!r}; leave them out")
    named = [name for name in _ROWS if getattr(body, name) is not None]
    if len(named) != 1:
        raise UnfitError(f"the JSON body has {' and '.join(named) or 'neither rows nor columns'}; {_FORMS}")
    rows = body.rows if body.instances is None else body.instances
    if rows is not None:
        return Rows(columns=_transposed(rows, names), count=len(rows), instances=body.instances is not None)
    columns = body.columns or {}
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        low, high = min(lengths, key=lengths.__getitem__), max(lengths, key=lengths.__getitem__)
        raise UnfitError(
            f"column {low!r} has {lengths[low]:,} values, but column {high!r} {lengths[high]:,}; give one a row in each"
        )
    return Rows(columns=columns, count=next(iter(lengths.values()), 0))


def _transposed(rows: list[JsonObject], names: Sequence[str]) -> Mapping[str, list[Any]]:
    columns = rows[0].keys() if rows else dict.fromkeys(names).keys()
    for number, row in enumerate(rows):
        if row.keys() != columns:
            odd = sorted(columns ^ row.keys())[0]
            has, lacks = (0, number) if odd in columns else (number, 0)
            raise UnfitError(
                f"row {lacks} has no column {odd!r}, but row {has} has; give every row the same columns, and null for a"
                " missing value"
            )
    return {name: [row[name] for row in rows] for name in columns}


def _of_arrow(content: bytes, max_rows: int, max_bytes: int) -> Rows:
    try:
        table = table_of(content, limit=max_bytes, check_count=lambda count: _check_count(count, max_rows))
    except (pa.ArrowException, OSError, ValueError) as problem:  # of damaged streams, which Arrow also calls OSError
        raise MalformedError(f"the body is no Arrow stream ({problem}); write it by Arrow's stream format") from problem
    return Rows(columns=table, count=table.num_rows)


def _check_values(columns: Mapping[str, list[Any]] | pa.Table, most: int) -> None:
    if isinstance(columns, Mapping):
        for name, column in columns.items():
            _refuse_longer(name, max((len(value) for value in column if type(value) is list), default=0), most)
        return
    for name, column in zip(columns.column_names, columns.columns, strict=True):
        if is_list(column.type):
            lengths = _compute.list_value_length(column)
            _refuse_longer(name, _compute.max(lengths).as_py() or 0, most)
            if (values := _compute.sum(lengths).as_py() or 0) > _MANY_ROWS * most:
                raise TooManyRowsError(
                    f"column {name!r} has {values:,} values, but at most {_MANY_ROWS * most:,} may be; send several"
                )


def _refuse_longer(name: str, longest: int, most: int) -> None:
    if longest > most:
        raise TooManyRowsError(
            f"column {name!r} has {longest:,} values in a row, but at most {most:,} may be; send the last ones"
        )


def _check_count(count: int, max_rows: int) -> None:
    if count > max_rows:
        raise TooManyRowsError(f"the request has {count:,} rows, but at most {max_rows:,} may be; send several")


def answer(result: Answer, version: str, kind: str, *, instances: bool = False) -> bytes:
    """The body of an answer: in JSON ``{"scores": [...], "version": "..."}``, in Arrow a float32 column ``score``.

    Of several tasks JSON's scores are ``{"TASK": [...], ...}``, and Arrow's columns ``score_TASK``. Of a model that
    ranks items scores are lists, the best first, beside the lists "items", in Arrow ``item``; of candidates that a
    request named lists of a score each, null of an item that is not ranked. Of a model of numbers scores are called
    "predictions", and in Arrow ``prediction``.

    Args:
      result: The scores, or the best items.
      version: What computed them.
      kind: ``JSON`` or ``ARROW``.
      instances: Whether JSON has ``{"predictions": [...]}``, one for each row: a score, or an object of its scores by
        task or of its items and their scores.
    """
    if kind == ARROW:
        return _stream(result.arrays(), version)
    columns = {"predictions": result.predictions()} if instances else result.columns()
    return encode({**columns, "version": version})


def _stream(columns: Mapping[str, pa.Array], version: str) -> bytes:
    schema = pa.schema([(name, column.type) for name, column in columns.items()], metadata={"version": version})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(pa.record_batch(list(columns.values()), schema=schema))
    return sink.getvalue().to_pybytes()


def wanted_items(k: str | None) -> int:
    """How many items a request's parameter ``k`` asks for; 10 without one.

    Raises:
      UnfitError: If it is no number from 1 to ``MOST_ITEMS``.
    """
    if k is None:
        return _ITEMS
    if not k.isdecimal() or not 1 <= int(k[:9]) <= MOST_ITEMS or len(k) > len(str(MOST_ITEMS)):
        raise UnfitError(f"k={k[:40]!r} must be a number from 1 to {MOST_ITEMS:,}, as in /predict?k=20")
    return int(k)


def failure(message: str, kind: str) -> bytes:
    """The body of an answer without scores, in JSON."""
    return encode({"error": message, "kind": kind})


def encode(content: JsonObject) -> bytes:
    """Content as JSON."""
    return _encoder.encode(content)
