"""A first schema for a file that has none, guessed of its first lines: for people to look at, never used unseen."""

from __future__ import annotations

import csv
import dataclasses
import json
import pathlib
import re
import statistics
from collections.abc import Callable, Sequence

from jrec.data.readers.lines import first_line, read_blocks
from jrec.data.readers.parquet import is_parquet, sample
from jrec.data.readers.streams import is_stream
from jrec.data.schema import DatasetError

_SAMPLE_BYTES, _SAMPLE_ROWS = 1 << 20, 10_000
_DELIMITERS = ("\t", "::", ",", ";", "|")
_SEPARATORS = ("|", ";", ",", " ")
_FEW = 20  # distinct numbers that are taken for categories
_TAIL = 20  # how many times the median the largest value of a long tail is
_SIDES = ("user", "item")
_RECBOLE = ("token", "float", "token_seq", "float_seq")
_LABELS = ("label", "click", "clicked", "is_click", "clk", "target", "y", "conversion", "converted", "is_buy", "bought",
           "buy", "purchase", "purchased", "install", "like", "liked", "is_like")  # fmt: skip
_RATINGS = ("rating", "stars", "score")
_TIMES = (
    "timestamp",
    "time",
    "datetime",
    "date",
    "ts",
    "event_time",
    "created_at",
    "at",
    "timestamp_s",
    "timestamp_ms",
)
_MISSING = ("NaN", "nan", "NAN", "NA", "N/A", "n/a", "NULL", "null", "None", "none", "\\N", "?", "-", "<NA>", "#N/A")
_WORDS = ({"true", "false"}, {"t", "f"}, {"yes", "no"}, {"y", "n"}, {"0", "1"}, {"-1", "1"}, {"0.0", "1.0"})
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_ISO = re.compile(r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d.*)?")
_IDS = ("id|ids|key|code|zip|zipcode|user|item|movie|song|artist|track|video|book|product|ad|campaign|advertiser|site"
        "|app|device|brand|shop|store|seller|category|cate|page|query|city|country|region|author")  # fmt: skip
_ID = re.compile(rf"(^|_|\b)({_IDS})$|[a-z]Id$|ID$")
_IDENTIFIER = re.compile(r"[A-Za-z_][\w .:\-]*")
_EPOCHS = ((1e17, "nanoseconds"), (1e14, "microseconds"), (1e11, "milliseconds"), (1e8, "seconds"))


@dataclasses.dataclass
class _Column:
    """A column's sampled values, and what is seen in them.

    Attributes:
      name: As the file has it.
      values: Texts that are not missing.
      blanks: Whether some are missing.
      missing: Texts that stand for a missing number.
      lists: Whether the file itself has lists; ``values`` are their elements.
      hint: RecBole's type of the column; "" elsewhere.
    """

    name: str
    values: list[str]
    blanks: bool
    missing: tuple[str, ...] = ()
    lists: bool = False
    hint: str = ""

    def __post_init__(self) -> None:
        self.plain = self.name.rsplit(":", 1)[0] if self.hint else self.name
        named = [v for v in self.values if v not in _MISSING]
        if len(named) < len(self.values) and named and all(map(_NUMBER.fullmatch, named)):
            self.missing = tuple(sorted(set(self.values) - set(named)))
            self.values, self.blanks = named, True
        self.distinct = set(self.values)
        self.numeric = bool(self.values) and all(map(_NUMBER.fullmatch, self.values)) and not self.lists
        self.numbers = [float(v) for v in self.values] if self.numeric else []
        self.whole = self.numeric and all(n.is_integer() for n in self.numbers)

    @property
    def separator(self) -> str:
        """What separates the elements of lists, if the column has some."""
        if self.hint.endswith("_seq"):
            return " "
        for mark in _SEPARATORS if not (self.numeric or self.lists or self.hint) else ():
            pieces = [piece for value in self.values for piece in value.split(mark)]
            many = sum(mark in value for value in self.values) >= 0.2 * len(self.values)
            repeated = len(set(pieces)) <= 0.5 * len(pieces)
            if many and repeated and (mark != " " or all(p.isdecimal() for p in pieces)):
                return mark
        return ""


def guess_schema(path: str) -> str:
    """The text of a schema file for a log, each guess with its reason as a comment.

    Args:
      path: The log's first file, text or Parquet; its first lines are read.

    Raises:
      DatasetError: If the file cannot be read again, as a pipe, or has no lines of at least two fields.
    """
    if is_stream(path):
        raise DatasetError(
            f"a schema cannot be guessed from the pipe {path}, which can be read only once; give --schema"
        )
    head: list[str] = []
    if is_parquet(path):
        columns = [
            _Column(name, [v for v in values if v], blanks="" in values, lists=many)
            for name, values, many in sample(path, _SAMPLE_ROWS)
        ]
    else:
        head, columns = _of_text(path)
    joins, joined = _joins(path, columns)
    missing = sorted({text for column in (*columns, *joined) for text in column.missing})
    if missing:
        head.append(f"missing_values = {_toml(['', *missing])}")
    tables, left = [], list(columns)
    for pick in (_label, _time):
        text, column = pick(left)
        tables.append(text)
        left = [c for c in left if c is not column]
    return "\n".join(
        [f"# Guessed from the first lines of {path}: look at every line.", *head, *tables, *map(_feature, left), *joins]
    )


def _joins(path: str, log: Sequence[_Column]) -> tuple[list[str], list[_Column]]:
    """RecBole's files of users and items beside one of interactions, as tables of the schema, and their columns."""
    place, tables, columns = pathlib.Path(path), [], []
    taken = {"label", *(name for column in log for name in (column.name, column.plain))}
    sides = [place.with_suffix(f".{kind}") for kind in _SIDES] if place.suffix == ".inter" else []
    for side in (side for side in sides if side.is_file()):
        try:
            head, own = _of_text(str(side), quoting=False)
        except DatasetError as error:
            tables.append(f"\n# {side} is not joined: {error}")
            continue
        key = next((column for column in own if any(column.name == c.name for c in log)), None)
        if key is None:
            tables.append(f"\n# {side} is not joined: it has no column of the log.")
            continue
        own.remove(key)
        kind = side.suffix[1:]
        for column in own:
            column.plain = f"{kind}_{column.plain}" if column.plain in taken else column.plain
            taken.add(column.plain)
        features = [_feature(column, "join.", always=True) for column in own]
        if not any("[[" in text for text in features):
            tables.append(f"\n# {side} is not joined: it has no column to make a feature of.")
            continue
        marks = [] if any(line.startswith("delimiter") for line in head) else ['delimiter = ","']
        stated = [f"file = {_toml(str(side.absolute()))}", f"key = {_toml(key.name)}", f"name = {_toml(kind)}"]
        tables += ["\n".join(["\n[[join]]", *stated, *marks, *head, "quoting = false"]), *features]
        columns += own
    return tables, columns


def _of_text(path: str, *, quoting: bool = True) -> tuple[list[str], list[_Column]]:
    block = next(read_blocks(path, block_bytes=_SAMPLE_BYTES), None)
    if block is None:
        raise DatasetError(f"{path} is empty; a schema cannot be guessed from it")
    lines = block.text.tobytes().decode("utf-8", errors="replace").splitlines()[:_SAMPLE_ROWS]
    delimiter = max(_DELIMITERS, key=lambda mark: _agreement(lines, mark, quoting))
    rows = [row for row in _split(lines, delimiter, quoting) if row]
    width = statistics.mode(len(row) for row in rows)
    rows = [row for row in rows if len(row) == width]
    if width < 2:
        raise DatasetError(
            f"{path}: no delimiter splits its first line, {first_line(path).decode(errors='replace')[:80]!r}, into"
            " columns; write a schema with its delimiter"
        )
    header = _has_header(rows)
    names = rows.pop(0) if header else [f"c{i}" for i in range(width)]
    head = [] if delimiter == "," else [f"delimiter = {_toml(delimiter)}"]
    if not header:
        head.append(f"columns = {_toml(names)}  # the file has no header: name them")
    columns = []
    for name, values in zip(names, map(list, zip(*rows, strict=True)) if rows else [[]] * width, strict=True):
        suffix = name.rpartition(":")[2] if ":" in name else ""
        filled = [v for v in values if v]
        columns.append(_Column(name, filled, len(filled) < len(values), hint=suffix if suffix in _RECBOLE else ""))
    return head, columns


def _split(lines: Sequence[str], mark: str, quoting: bool) -> list[list[str]]:
    quoted = quoting and len(mark) == 1
    return list(csv.reader(lines, delimiter=mark)) if quoted else [line.split(mark) for line in lines]


def _agreement(lines: Sequence[str], mark: str, quoting: bool) -> tuple[bool, int]:
    """Whether almost all lines have as many fields by a delimiter, more than one, and how many."""
    widths = [len(row) for row in _split(lines[:200], mark, quoting)]
    width = statistics.mode(widths)
    return width > 1 and widths.count(width) >= 0.9 * len(widths), width


def _has_header(rows: Sequence[Sequence[str]]) -> bool:
    first, rest = rows[0], rows[1:]
    if len(set(first)) < len(first) or any(_NUMBER.fullmatch(v) or not v for v in first):
        return False
    columns = list(zip(*rest, strict=True))
    if any(all(_NUMBER.fullmatch(v) or _ISO.fullmatch(v) for v in column if v) for column in columns):
        return not any(map(_ISO.fullmatch, first))
    return all(map(_IDENTIFIER.fullmatch, first)) and not any(v in c for v, c in zip(first, columns, strict=True))


def _label(columns: Sequence[_Column]) -> tuple[str, _Column | None]:
    def two(column: _Column) -> bool:
        return bool(column.distinct) and any({v.lower() for v in column.distinct} <= words for words in _WORDS)

    rated: Callable[[_Column], bool] = lambda c: c.plain.lower() in _RATINGS and c.numeric and len(c.distinct) > 2  # noqa: E731
    for column in (c for c in columns if c.plain.lower() in _LABELS and two(c)):
        return f"\n[label]\ncolumn = {_toml(column.name)}", column
    for column in filter(rated, columns):
        high, low = max(column.numbers), min(column.numbers)
        bound = round(low + 0.75 * (high - low), 2)
        note = f"# the numbers go from {low:g} to {high:g}; which are liked?"
        return f"\n[label]\ncolumn = {_toml(column.name)}\npositive_at_least = {bound:g}  {note}", column
    for column in (c for c in columns if two(c) and len(c.distinct) == 2):
        return (
            f"\n[label]\ncolumn = {_toml(column.name)}  # the first column of two values that a label may have",
            column,
        )
    return "\n# No column looks like a label: name one here, or prepare with --no-labels.\n# [label]\n# column = ", None


def _time(columns: Sequence[_Column]) -> tuple[str, _Column | None]:
    dated = [c for c in columns if c.values and not c.blanks and not c.lists and all(map(_ISO.fullmatch, c.values))]
    numbered = [c for c in columns if c.plain.lower() in _TIMES and c.numeric and not c.blanks and min(c.numbers) >= 0]
    chosen = next((c for c in dated if c.plain.lower() in _TIMES), None) or next(iter([*numbered, *dated]), None)
    if chosen is None:
        return "\n# No column looks like a time: the lines are taken to be in order of time.", None
    form = "iso" if chosen in dated else next((u for least, u in _EPOCHS if max(chosen.numbers) >= least), "integer")
    if form == "integer" and not chosen.whole:
        form = "seconds"
    name = _toml(chosen.name)
    parts = [] if form == "integer" else ["weekday"]
    if parts and any(len(v) > len("2024-05-01") or form != "iso" for v in chosen.values):
        parts.insert(0, "hour")
    named = f"{chosen.plain}_{{}}"
    return "\n".join([
        f'\n[time]\ncolumn = {name}\nformat = "{form}"',
        *(f'\n[[categorical]]\ncolumn = {name}\nname = {_toml(named.format(p))}\npart = "{p}"' for p in parts),
    ]), chosen  # fmt: skip


def _feature(column: _Column, place: str = "", *, always: bool = False) -> str:
    """A column as a table of the schema, or a comment where it is left out.

    Args:
      column: The column.
      place: What the table's name begins with, as "join.".
      always: Whether numbers may be missing where no blank was seen, as those of keys that a joined file lacks.
    """
    kinds = f"{len(column.distinct):,} distinct of {len(column.values):,} values"
    if len(column.distinct) < 2 and not column.lists:
        return f"\n# {_toml(column.name)} is left out: it has {len(column.distinct)} value(s)."
    unique = len(column.distinct) == len(column.values) >= 100
    if unique and column.plain.lower() in ("id", "index", "", "unnamed: 0", "row", "row_id"):
        return f"\n# {_toml(column.name)} is left out: every line has another value."
    if column.hint == "float_seq":
        return f"\n# {_toml(column.name)} is left out: lists of numbers are no feature; they can be weights of a list."
    named = f"\nname = {_toml(column.plain)}" if column.plain != column.name else ""
    few = len(column.distinct) <= min(_FEW, len(column.values) / 2)
    measured = column.hint == "float" or not (
        column.hint or _ID.search(column.plain) or _ID.search(column.plain.lower()) or few
    )
    if column.numeric and measured:
        middle = statistics.median(column.numbers)
        tailed = min(column.numbers) >= 0 and max(column.numbers) > _TAIL * max(middle, 1)
        absent = (0 if tailed else middle) if column.blanks or always else None
        lines = [f"\n[[{place}dense]]\ncolumn = {_toml(column.name)}{named}"]
        lines[0] += f'\ntransform = "{"log1p" if tailed else "standardize"}"'
        lines[0] += f"  # {min(column.numbers):g} to {max(column.numbers):g}, median {middle:g}"
        lines += [f"missing = {absent:g}"] if absent is not None else []
        return "\n".join(lines)
    text = f"\n[[{place}categorical]]\ncolumn = {_toml(column.name)}{named}  # {kinds}"
    if column.lists:
        return f"{text}\nlists = true"
    return f"{text}\nseparator = {_toml(mark)}" if (mark := column.separator) else text


def _toml(value: str | Sequence[str]) -> str:
    return json.dumps(value, ensure_ascii=False)
