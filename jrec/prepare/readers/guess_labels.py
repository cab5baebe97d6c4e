"""Which column is the label, and which of its values are positive. For ``jrec.prepare.readers.guess``."""

from __future__ import annotations

import collections
import re
from collections.abc import Sequence

from jrec.data.schema import DatasetError
from jrec.prepare.readers.guess_columns import Column, ask, toml, words

_LABELS = words(
    "label target y click clicked is_click clk converted conversion is_buy bought buy purchase purchased install"
    " installed churn churned exited survived fraud isfraud is_fraud canceled cancelled is_canceled is_cancelled"
    " response responded subscribed watched viewed played opened revenue like liked is_like follow followed share"
    " shared income outcome class default"
)
OUTCOMES = {*_LABELS} - {*words("label target y response income outcome class default revenue")}
_RATINGS = ("rating", "stars", "overall", "score")
_MOST_STARS = 21
_YES = {"ja", "oui", "si", "sí", "sim", "true", "yes", "y", "t", "1"}
_NO = {"nein", "non", "no", "não", "nao", "false", "n", "f", "0", "-1"}
_PLAIN = {*words("0 1 true false True False")}  # need no [label] positive_values
# How words begin: clicked, purchases, bought.
_DONE = (
    "click|clk|tap|buy|bought|purchas|order|paid|conver|like|lov|good|positiv|success|accept|approv|subscri|instal"
    "|follow|shar|sav|watch|play|finish|complet|open|engag|interact|join|win|respond|repl|add|cart|book|deliver"
)
_POSITIVE = re.compile(_DONE)
_NEGATIVE = re.compile(
    rf"(no|not|non|none|never|without|\w+n't|bad|ham)$|(skip|dismiss|ignor|reject|refus|declin|den(y|ied)"
    rf"|fail|negativ|lost|lose|hide|hidden|bounce|abandon|nothing)|(no|not|non|un|dis|in)({_DONE})"
)
_WORD = re.compile(r"[^\W\d_]+(?:'t)?")


def guess_label(columns: Sequence[Column]) -> tuple[str, Column | None]:
    """The schema's text about the label, and the column that it is, None if none looks like one."""
    called = {c.plain.lower(): c for c in reversed(columns) if c.two and not c.blanks}
    named = [called[name] for name in _LABELS if name in called]
    if named:
        last = next((c for c in reversed(columns) if c.two), None)
        sure = len(named) == 1 and (last in (None, named[0]) or not (last and last.is_label))
        return _two_valued(named[0], "" if sure else f"is it the label? {_others(named[0], [*named, last])}"), named[0]
    for column in columns:
        rated = column.words[-1:] and column.words[-1] in _RATINGS and 2 < len(column.distinct) <= _MOST_STARS
        if rated and column.numeric and not column.blanks:
            high, low = max(column.numbers), min(column.numbers)
            bound = round(low + 0.75 * (high - low), 2)
            note = f'the numbers go from {low:g} to {high:g}; which are liked? Or predict the number: kind = "number"'
            return f"{ask(column, note)}\n[label]\ncolumn = {toml(column.name)}\npositive_at_least = {bound:g}", column
    for column in reversed(columns):
        if column.two and not (column.blanks or column.is_label) and _positive_of(column.values)[2]:
            return _two_valued(column, "is it the label? Its two values say what was done and what was not"), column
    ends = [c for c in columns if len(c.distinct) > 1 and not (c.rows or c.unique or c.unnamed)]
    for column in (ends[-1], ends[0]) if ends else ():
        if column.two and not column.blanks and not column.called_id:
            return _two_valued(column, "is it the label? It has two values and stands at an end"), column
    text = '\n# ? "label": no column looks like one. Name it here, or prepare with --no-labels.'
    if constant := [toml(c.name) for c in columns if c.plain.lower() in _LABELS and len(c.distinct) == 1]:
        text += f" Of {', '.join(constant)} there is one value, but a label has two."
    return f"{text}\n# [label]\n# column = ", None


def stated_label(column: Column, path: str, *, numeric: bool = False, several: bool = False) -> str:
    """The schema's text about a label that the user named.

    Args:
      column: The column.
      path: The log, for errors.
      numeric: Whether it is a number.
      several: Whether there are others, so that some lines may lack it.

    Raises:
      DatasetError: If its values cannot be a label's.
    """
    section = "[[labels]]" if several else "[label]"
    count, some = len(column.distinct), ", ".join(sorted(column.distinct)[:5])
    fault = ""
    if not column.values:
        fault = "has no value: the log is empty"
    elif column.lists:
        fault = "holds lists, and a label is one value"
    elif column.blanks and not several:
        fault = f"is missing{' or no finite number' if numeric else ''} in some lines; leave these lines out"
    elif numeric:
        fault = "" if column.numeric else f"is no number in all lines ({some}, …)"
    elif count > 2:
        fault = f"has {count:,} values or more ({some}, …), and a label has two; make it one first, as rating >= 4,"
        fault += ' or say that it is a number (numeric=True of jrec.fit, kind = "number" in [label]: docs/targets.md)'
    elif count == 1 and column.distinct.isdisjoint(_PLAIN):
        fault = f"is {some} in all of the first lines; sort them otherwise, so that both values are among them"
    if fault:
        raise DatasetError(f"{path}: the label {column.name!r} {fault}")
    if numeric:
        return f'\n{section}\ncolumn = {toml(column.name)}\nkind = "number"'
    # The first lines of a log in the order of its labels have one, and preparing refuses a log of one label.
    return _two_valued(column, "", section) if count == 2 else f"\n{section}\ncolumn = {toml(column.name)}"


def _others(chosen: Column, columns: Sequence[Column | None]) -> str:
    names = dict.fromkeys(toml(c.name) for c in columns if c is not None and c is not chosen)
    return f"{', '.join(names)} may be, too"


def _two_valued(column: Column, question: str, section: str = "[label]") -> str:
    lines = f"\n{section}\ncolumn = {toml(column.name)}"
    if not column.is_label:
        high, low, sure = _positive_of(column.values)
        if not sure:
            taken = f"{toml(high)} is taken for 1 and {toml(low)} for 0"
            taken += f"; for the reverse set positive_values = {toml([low])}"
            question = f"{question}. {taken}" if question else taken
        lines += f"\npositive_values = {toml([high])}  # of {toml(sorted(column.distinct))}"
    return ask(column, question) + lines


def _positive_of(values: Sequence[str]) -> tuple[str, str, bool]:
    """Which of two values is positive, the other one, and whether words say so; without words the rarer is.

    Args:
      values: A column's values, two distinct ones among them.
    """
    counts = collections.Counter(values)
    rare = counts.most_common()[-1][0]
    high, low = sorted(counts, key=lambda value: (_rank(value), value == rare), reverse=True)
    return high, low, _rank(high) - _rank(low) == 2


def _rank(value: str) -> int:
    """1 of a text that says that something was done, -1 of one that says it was not, 0 of others."""
    text = value.strip().lower()
    if text in _YES or text in _NO:
        return 1 if text in _YES else -1
    words = _WORD.findall(text)
    if any(map(_NEGATIVE.match, words)):
        return -1
    return int(any(map(_POSITIVE.match, words)))
