"""A first schema for a file that has none, guessed of its first lines: for people to look at, never used unseen.

What is doubtful is a question, a comment that begins with "# ?"; ``questions`` finds them.
"""

from __future__ import annotations

import csv
import difflib
import pathlib
import re
import statistics
from collections.abc import Collection, Sequence

from jrec.data.blocks import LABEL
from jrec.data.schema import DatasetError
from jrec.prepare.readers.delimited_schema import feature_name
from jrec.prepare.readers.guess_columns import Column, ask, decimal_comma, is_number, toml
from jrec.prepare.readers.guess_labels import OUTCOMES, guess_label, stated_label
from jrec.prepare.readers.guess_times import could_swap, date_patterns, time_format
from jrec.prepare.readers.lines import first_line, read_blocks, refuse_json
from jrec.prepare.readers.streams import is_stream
from jrec.prepare.readers.tables import is_table, partition, sample, unreadable

_SAMPLE_BYTES, _SAMPLE_ROWS = 1 << 20, 10_000
_DELIMITERS = ("\t", "::", ", ", ",", ";", "|")
_SIDES = ("user", "item")
_RECBOLE = ("token", "float", "token_seq", "float_seq")
_OF_FOLDERS = "folders name it, so that all lines of a file have the same: is it {}?"
_HEADED = 3  # lines that have to differ from a first one that is there again, for it to be a header
_IDENTIFIER = re.compile(r"[A-Za-z_][\w .:()/%#\-]*")
_LIBSVM = re.compile(r"[+-]?\d+(\.\d+)?( \d+:[^ :]+)+ *")


def guess_schema(
    path: str,
    other_files: Sequence[str] = (),
    *,
    labels: Sequence[str] = (),
    numeric: Collection[str] = (),
    time: str = "",
    weight: str = "",
) -> str:
    """The text of a schema file for a log, each guess with its reason as a comment.

    Args:
      path: The log's first file, text or Parquet; its first lines are read.
      other_files: The log's other files, of which only the names of their folders matter.
      labels: The columns that are labels; none to guess one.
      numeric: Which of them are numbers.
      time: The column that says when a line was; "" to guess whether there is one.
      weight: The column of the examples' weights; "" for none.

    Raises:
      DatasetError: If the file cannot be read again, as a pipe, or has no lines of at least two fields; if it lacks
        a label, ``time`` or ``weight``, or the values of one cannot be a label or times.
    """
    if is_stream(path):
        raise DatasetError(
            f"a schema cannot be guessed from the pipe {path}, which can be read only once; give --schema"
        )
    title = f"# Guessed from the first lines of {path}: look at every line."
    head: list[str] = []
    unread: list[str] = []
    table = is_table(path)
    if table:
        columns = [
            Column(name, [v for v in values if v], blanks="" in values, lists=many)
            for name, values, many in sample(path, _SAMPLE_ROWS)
        ]
        unread = [f"\n# {toml(name)} is left out: {reason}." for name, reason in unreadable(path).items()]
    else:
        lines, encoding = _first_lines(path)
        if all(map(_LIBSVM.fullmatch, lines)):
            return "\n".join([title, *_libsvm(lines)])
        head, columns = _of_text(path, lines)
        head = [*encoding, *head]
    folders = _folders([path, *other_files], {column.name for column in columns})
    joins, joined = _joins(path, columns)
    missing = sorted({text for column in (*columns, *joined) for text in column.missing})
    if missing:
        head.append(f"missing_values = {toml(['', *missing])}")
    left = list(columns)
    if weight:
        left.remove(_column(left, weight, path))
        head.append(f"\n[weight]\ncolumn = {toml(weight)}")
    if labels:
        stated = [_column(left, name, path) for name in labels]
        options = {"several": len(labels) > 1}
        label = "\n".join(stated_label(c, path, numeric=c.name in numeric, **options) for c in stated)
    else:
        label, column = guess_label(left)
        stated = [column]
    left = [c for c in left if c not in stated]
    time, column = _stated_time(_column(left, time, path), path) if time else _time(left)
    left = [c for c in left if c is not column]
    if column is None and table:
        time, column = _time(folders)
        time = f"{ask(column, _OF_FOLDERS.format('the time of their lines'))}{time}" if column else time
    left_out = [_of_folders(c, table) for c in folders if c is not column]
    _name_features(left)
    features = list(map(_feature, left))
    if not any("categorical]]" in text for text in (time, *features, *joins)):
        dense = next((k for k, text in enumerate(features) if "[[dense]]" in text), None)
        if dense is None:
            features.append('\n# ? "categorical": no column is a category, and one has to be. Name one here.')
        else:
            features[dense] = _buckets(left[dense])
    return "\n".join([title, *head, label, time, *features, *left_out, *unread, *joins])


def questions(text: str) -> list[str]:
    """What a guessed schema asks about: the column, and what is doubtful."""
    return [line.removeprefix("# ? ") for line in text.splitlines() if line.startswith("# ? ")]


def _joins(path: str, log: Sequence[Column]) -> tuple[list[str], list[Column]]:
    """RecBole's files of users and items beside one of interactions, as tables of the schema, and their columns."""
    place, tables, columns = pathlib.Path(path), [], []
    taken = {"label", *(name for column in log for name in (column.name, column.plain))}
    sides = [place.with_suffix(f".{kind}") for kind in _SIDES] if place.suffix == ".inter" else []
    for side in (side for side in sides if side.is_file()):
        try:
            lines, encoding = _first_lines(str(side))
            head, own = _of_text(str(side), lines, quoting=False)
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
        features = [_feature(column, "join.") for column in own]
        if not any("[[" in text for text in features):
            tables.append(f"\n# {side} is not joined: it has no column to make a feature of.")
            continue
        marks = [] if any(line.startswith("delimiter") for line in head) else ['delimiter = ","']
        stated = [f"file = {toml(str(side.absolute()))}", f"key = {toml(key.name)}", f"name = {toml(kind)}"]
        tables += ["\n".join(["\n[[join]]", *stated, *marks, *encoding, *head, "quoting = false"]), *features]
        columns += own
    return tables, columns


def _first_lines(path: str) -> tuple[list[str], list[str]]:
    """A file's first lines, and what the schema has to say of their encoding."""
    block = next(read_blocks(path, block_bytes=_SAMPLE_BYTES), None)
    if block is None:
        raise DatasetError(f"{path} is empty; a schema cannot be guessed from it")
    refuse_json(path)
    encoding, stated = _encoding_of(block.text)
    lines = block.text.decode(encoding, errors="replace").split("\n")[:-1]
    return [line.removesuffix("\r") for line in lines[:_SAMPLE_ROWS]], stated


def _encoding_of(content: bytes) -> tuple[str, list[str]]:
    """The encoding of a text, and what the schema has to say of it."""
    text = content.decode("utf-8", errors="replace")
    not_ascii = len(text) - len(text.encode("ascii", errors="ignore"))
    if 2 * (text.count("\ufffd") - content.count("\ufffd".encode())) <= not_ascii:  # UTF-8, but for some damage
        return "utf-8", []
    # Windows has characters where Latin-1 has controls, which no text holds.
    encoding = "cp1252" if any(0x80 <= byte < 0xA0 for byte in set(content)) else "latin-1"
    words = (word for word in re.findall(r"\w+", content.decode(encoding, errors="replace")) if not word.isascii())
    shown = toml(next(words, ""))
    question = f'\n# ? "encoding": the file is not UTF-8; is {encoding} right, in which it has the text {shown}?'
    return encoding, [f"{question}\nencoding = {toml(encoding)}"]


def _of_text(path: str, lines: Sequence[str], *, quoting: bool = True) -> tuple[list[str], list[Column]]:
    delimiter = max(_DELIMITERS, key=lambda mark: _agreement(lines, mark, quoting))
    if not _agreement(lines, delimiter, quoting)[0] and _agreement(lines, " ", quoting)[0]:
        delimiter = " "
    rows = [row for row in _split(lines, delimiter, quoting) if row]
    width = statistics.mode(len(row) for row in rows)
    rows = [row for row in rows if len(row) == width]
    if width < 2:
        raise DatasetError(
            f"{path}: no delimiter splits its first line, {first_line(path).decode(errors='replace')[:80]!r}, into"
            " columns; write a schema with its delimiter"
        )
    header = _has_header(rows)
    if not header:
        _check_header(path, lines, rows)
    names = rows.pop(0) if header else [f"c{i}" for i in range(width)]
    head = [] if delimiter == "," else [f"delimiter = {toml(delimiter)}"]
    if not header:
        head.append(f"columns = {toml(names)}  # the file has no header: name them")
    cells = [list(values) for values in zip(*rows, strict=True)] if rows else [[] for _ in names]
    comma = decimal_comma(cells, delimiter)
    if comma:
        head.append('decimal = ","')
    columns = []
    for name, values in zip(names, cells, strict=True):
        suffix = name.rpartition(":")[2] if ":" in name else ""
        hint = suffix if suffix in _RECBOLE else ""
        filled = [v for v in values if v]
        columns.append(Column(name, filled, len(filled) < len(values), hint=hint, comma=comma, named=header))
    return head, columns


def _split(lines: Sequence[str], mark: str, quoting: bool) -> list[list[str]]:
    quoted = quoting and len(mark) == 1
    return list(csv.reader(lines, delimiter=mark)) if quoted else [line.split(mark) for line in lines]


def _agreement(lines: Sequence[str], mark: str, quoting: bool) -> tuple[bool, int]:
    """Whether the first and almost all lines have as many fields by a delimiter, more than one, and how many."""
    widths = [len(row) for row in _split(lines[:200], mark, quoting)]
    width = statistics.mode(widths)
    return width > 1 and widths[0] == width and widths.count(width) >= 0.9 * len(widths), width


def _has_header(rows: Sequence[Sequence[str]]) -> bool:
    first, rest = rows[0], rows[1:]
    names = [name for name in first if name]  # DataFrame.to_csv() does not name the index
    if len(set(names)) < len(names) or len(names) < len(first) - 1 or any(date_patterns(v) for v in names):
        return False
    if any(map(is_number, names)):
        return list(names) == [str(k) for k in range(len(names))]
    columns = list(zip(*rest, strict=True))
    filled = [[v for v in column if v] for column in columns]
    if any(v and all(is_number(x.replace(",", ".")) or date_patterns(x) for x in v) for v in filled):
        return True
    named = all(map(_IDENTIFIER.fullmatch, names)) and all(first[1:])
    return named and not any(v in c for v, c in zip(first, columns, strict=True))


def _check_header(path: str, lines: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Refuses a file whose first row would be a header, were it not there again, or a name twice in it."""
    first, rest = rows[0], [row for row in rows[1:] if row != rows[0]]
    if repeated := sorted({name for name in first if first.count(name) > 1}):
        if _has_header([[name * (first.index(name) == k) or f"column {k}" for k, name in enumerate(first)], *rest]):
            names = ", ".join(name or "without a name" for name in repeated)
            raise DatasetError(f"{path}:1: the header has column(s) {names} more than once; rename all but one of them")
    elif len(rest) < len(rows) - 1 and len(rest) >= _HEADED and _has_header([first, *rest]):
        line = lines.index(lines[0], 1) + 1 if lines[0] in lines[1:] else 1
        raise DatasetError(
            f"{path}:{line}: the header is repeated, as where files were put together; give the files apart, in order,"
            " or take out all such lines but the first: awk 'NR == 1 {first = $0} NR == 1 || $0 != first' FILE"
        )


def _libsvm(lines: Sequence[str]) -> list[str]:
    """The schema of lines as libsvm has them."""
    labels = sorted({float(line.split(" ", 1)[0]) for line in lines})
    weighted = any(pair.rpartition(":")[2] not in ("1", "1.0") for line in lines for pair in line.split()[1:])
    head = ['layout = "libsvm"', '\n[label]\ncolumn = "label"']
    if not set(labels) <= {0.0, 1.0} and not set(labels) <= {-1.0, 1.0}:
        bound = (labels[0] + labels[-1]) / 2
        head[1:] = [f'\n# ? "label": the numbers go from {labels[0]:g} to {labels[-1]:g}; which are positive?{head[1]}']
        head.append(f"positive_at_least = {bound:g}")
    head.append('\n[[categorical]]\ncolumn = "features"')
    return [*head, 'weights = "values"'] if weighted else head


def _column(columns: Sequence[Column], name: str, path: str) -> Column:
    """The column of a name that the user gave."""
    names = [column.name for column in columns]
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        advice = f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(names[:20])}"
        raise DatasetError(f"{path}: there is no column {name!r}{advice}")
    return columns[names.index(name)]


def _stated_time(column: Column, path: str) -> tuple[str, Column | None]:
    """As ``_time`` of a column that the user named: whole numbers need not look like times."""
    if column.blanks or not (column.whole or time_format(column)):
        fault = "has lines without a time" if column.blanks else f"has values such as {column.values[:1]}, no times"
        raise DatasetError(
            f"{path}: the time {column.name!r} {fault}; give dates as 2024-05-01 12:30:00, or numbers that ascend with"
            " time, one for each line"
        )
    return _time([column], default="integer")


def _time(columns: Sequence[Column], default: str = "") -> tuple[str, Column | None]:
    forms = {id(c): time_format(c) or default for c in columns if not c.blanks}
    dated = [c for c in columns if forms.get(id(c))]
    dated.sort(key=lambda c: forms[id(c)] == "integer")  # stable: the first one otherwise
    if not dated:
        return "\n# No column looks like a time: the lines are taken to be in order of time.", None
    chosen = dated[0]
    form, name = forms[id(chosen)], toml(chosen.name)
    parts = [] if form == "integer" else ["weekday"]
    daily = "%H" not in form and "%I" not in form if "%" in form else form == "iso" and len(max(chosen.values)) <= 10
    if parts and not daily:
        parts.insert(0, "hour")
    named = f"{chosen.plain}_{{}}"
    question = "is the month or the day the first number?" if could_swap(chosen, form) else ""
    return "\n".join([
        f'{ask(chosen, question)}\n[time]\ncolumn = {name}\nformat = {toml(form)}',
        *(f'\n[[categorical]]\ncolumn = {name}\nname = {toml(named.format(p))}\npart = "{p}"' for p in parts),
    ]), chosen  # fmt: skip


def _name_features(columns: Sequence[Column]) -> None:
    """Gives columns that no feature can be called after names like theirs."""
    odd = [column for column in columns if column.plain == LABEL or feature_name(column.plain) != column.plain]
    taken = {LABEL, *(column.plain for column in columns if column not in odd)}
    for column in odd:
        column.plain = feature_name(column.plain)
        while column.plain in taken:
            column.plain += "_"
        taken.add(column.plain)


def _feature(column: Column, place: str = "") -> str:
    """A column as a table of the schema, or a comment where it is left out.

    Args:
      column: The column.
      place: What the table's name begins with, as "join.".
    """
    name = toml(column.name)
    if reason := _reason_to_leave_out(column, bool(place)):
        left = f"\n# {name} is left out: {reason[0]}"
        return ask(column, reason[1]) + left
    named = _name_of(column)
    measured, doubt = column.measured() if column.numeric else (False, "")
    if column.odd:
        doubt = f"is {toml(column.odd)}, the only text among its numbers, a missing value?"
    if measured:
        middle = statistics.median(column.numbers)
        transform = "log1p" if column.tailed else "standardize"
        spread = f"{min(column.numbers):g} to {max(column.numbers):g}, median {middle:g}"
        spread += "" if column.blanks else "; none is missing here"
        lines = f'{ask(column, doubt)}\n[[{place}dense]]\ncolumn = {name}{named}\ntransform = "{transform}"  # {spread}'
        return f"{lines}\nmissing = {0 if column.tailed else middle:g}"
    separator = column.separator
    if separator is None and not column.numeric and not column.hint and column.many_distinct:
        doubt = doubt or "nearly every line has another value, and values seen once have no row of their own"
    kinds = f"{len(column.distinct):,} distinct of {len(column.values):,} values"
    text = f"{ask(column, doubt)}\n[[{place}categorical]]\ncolumn = {name}{named}  # {kinds}"
    if column.lists or separator == "":
        return f"{text}\nlists = true"
    return f"{text}\nseparator = {toml(separator)}" if separator else text


def _name_of(column: Column) -> str:
    """The line that names a column's feature; "" where its name is the column's."""
    return f"\nname = {toml(column.plain)}" if column.plain != column.name else ""


def _folders(paths: Sequence[str], own: Collection[str]) -> list[Column]:
    """The columns that the folders of all files name (``day=3/``) and no file has, with their distinct values."""
    named = [partition(path) for path in paths]
    shared = [name for name in named[0] if name not in own and all(name in one for one in named)]
    values = {name: list(dict.fromkeys(one[name] for one in named)) for name in shared}
    return [Column(name, [v for v in some if v], blanks=None in some) for name, some in values.items()]


def _of_folders(column: Column, table: bool) -> str:
    """A column that folders name, as a table of the schema or a comment."""
    name = toml(column.name)
    left = f"\n# {name} is left out: folders name it ({column.name}={next(iter(column.values), '')}/)"
    if not table:
        return f"{left}, which makes a column of Parquet and Arrow files only."
    if len(column.distinct) < 2:
        return f"{left}, and it has no other value here."
    if time_format(column):
        return f"{left}, it is a time, and [time] is one column."
    return f"{ask(column, _OF_FOLDERS.format('known before the label is'))}\n[[categorical]]\ncolumn = {name}"


def _buckets(column: Column) -> str:
    """A column of numbers as categories."""
    question = "no column is a category, and one has to be: do buckets of its numbers say enough?"
    return f"{ask(column, question)}\n[[categorical]]\ncolumn = {toml(column.name)}{_name_of(column)}\nquantiles = 64"


def _reason_to_leave_out(column: Column, joined: bool) -> tuple[str, str] | None:
    """Why a column is no feature, and what is doubtful about that; None if it is one."""
    if len(column.distinct) < 2 and not column.lists:
        return f"it has {len(column.distinct)} value(s).", ""
    if column.unnamed and not (column.rows or time_format(column)):
        if column.whole and len(column.distinct) == len(column.values):
            return "it has no name of its own, and its integers are distinct, as those of an index.", ""
        return "it has no name.", "what is it? Name it in the header to make a feature of it"
    if column.hint == "float_seq":
        return "lists of numbers are no feature; they can be weights of a list.", ""
    if column.hint or column.lists or joined:
        return None
    if column.rows:
        return "it numbers the lines.", ""
    if column.plain.lower() in OUTCOMES and column.two and column.is_label:
        return "it looks like another outcome.", "is it known before the label is? Then make it a feature"
    if time_format(column):
        return "it is a time.", "[time] is one column; jrec has no feature of others"
    if column.amount:
        clean = f"texts such as {toml(column.amount)} are no numbers: write them as 1234.5, without signs and thousands"
        return "its values are amounts with signs.", f"{clean} separators, or name the column a [[categorical]]"
    if column.unique and not (column.numeric and column.measured()[0]):
        return "every line has another value.", "add it if later lines repeat its values"
    if column.free_text:
        return "it is text of which hardly two are the same.", "add it if later lines repeat its values"
    return None
