"""MovieLens' users and movies files, joined to interactions by id. They are small and held in memory."""

from __future__ import annotations

import csv
import gzip
import pathlib
import re
import zlib
from collections.abc import Iterator

import numpy as np

from jrec.data.columns import ListColumn
from jrec.data.long_texts import LongTexts
from jrec.data.schema import DatasetError
from jrec.prepare.readers.lines import GZIP

USER_FEATURES = ("gender", "age", "occupation", "zip_code")
_YEAR = re.compile(r"\((\d{4})(?:[\u2013-]\d{0,4})?\)\s*$")
NO_GENRES = "(no genres listed)"


class Users:
    """users.dat: ``user::gender::age::occupation::zip code``. ``keys`` are (users,) uint64 by feature, as ``ids``."""

    def __init__(self, path: str, seed: int):
        rows = list(_rows(path, 5))
        self.ids, order = _unique_ids(path, [fields[0] for fields in rows])
        self.keys: dict[str, np.ndarray] = {}
        self.texts: dict[str, LongTexts] = {}
        for at, name in enumerate(USER_FEATURES, 1):
            self.keys[name], self.texts[name] = encode_texts([rows[i][at] for i in order], seed)


class Movies:
    """movies.dat (``movie::title (year)::genre|genre``) or movies.csv: keys of year and genres, as ``ids``."""

    def __init__(self, path: str, seed: int):
        rows = list(_rows(path, 3))
        self.ids, order = _unique_ids(path, [fields[0] for fields in rows])
        years = [_YEAR.search(rows[i][1]) for i in order]
        self.years, _ = encode_texts([y[1] if y else "" for y in years], seed)
        genres = [[g for g in rows[i][2].split("|") if g and g != NO_GENRES] for i in order]
        values, self.texts = encode_texts([g for movie in genres for g in movie], seed)
        self.genres = ListColumn(np.cumsum([0, *map(len, genres)], dtype=np.int64), values)


def encode_texts(texts: list[str], seed: int) -> tuple[np.ndarray, LongTexts]:
    """(n,) uint64 keys of texts, and those texts whose keys are hashes."""
    encoded = [t.encode("utf-8") for t in texts]
    buffer = np.frombuffer(b"".join(encoded) + b"\0", np.uint8)
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    return LongTexts.among(buffer, ends[:-1], ends[1:], seed)


def positions(ids: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where (n,) ``wanted`` stand in sorted ``ids``, and which of them are not there."""
    at = np.minimum(np.searchsorted(ids, wanted), len(ids) - 1)
    return at, ids[at] != wanted


def _unique_ids(path: str, ids: list[str]) -> tuple[np.ndarray, list[int]]:
    if not ids:
        raise DatasetError(f"{path} is empty")
    values, first, counts = np.unique(np.array(ids, np.int64), return_index=True, return_counts=True)
    if (counts > 1).any():
        raise DatasetError(f"{path}: id {values[counts > 1][0]} occurs more than once")
    return values, first.tolist()


def _rows(path: str, width: int) -> Iterator[list[str]]:
    """The fields of every line, the first field an integer."""
    # Not by ``splitlines``, which also splits at characters inside of titles, such as the byte 0x85 of Latin-1.
    lines = _text(path).split("\n")
    for number, line in enumerate(lines if lines[-1] else lines[:-1], 1):
        line = line.removesuffix("\r")
        fields = line.split("::") if "::" in line else next(csv.reader([line]), [])
        if number == 1 and fields[:1] in (["movieId"], ["movie_id"], ["user_id"], ["userId"]):
            continue
        if len(fields) != width:
            raise DatasetError(
                f"{path}:{number}: the line has {len(fields)} field(s) where {width} are expected: {line!r}"
            )
        if not fields[0].isdecimal() or len(fields[0]) > 15:
            raise DatasetError(f"{path}:{number}: the id is {fields[0]!r}, which is not an integer")
        yield fields


def _text(path: str) -> str:
    """The whole file; MovieLens-1M is Latin-1, later ones are UTF-8."""
    try:
        content = pathlib.Path(path).read_bytes()
        if content.startswith(GZIP):
            content = gzip.decompress(content)
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error.strerror or error}") from error
    except (EOFError, zlib.error) as error:
        raise DatasetError(f"{path} is truncated or damaged ({error}); download or copy it again") from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return content.decode("latin-1")
