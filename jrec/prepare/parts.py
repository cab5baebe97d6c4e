"""Reading a log in parts, by workers that share the file system: each parses a range of a file into a spill of its own.

The parts' columns stay where the workers wrote them and are read one after another, so that what follows, and the
dataset, is what one process makes.
"""

from __future__ import annotations

import concurrent.futures
import copy
import dataclasses
import itertools
import pathlib
import shutil
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from jrec.data.schema import DatasetError
from jrec.data.texts import TextStore, budget_of
from jrec.prepare.ingest import TIME, BadLines, Log, fill_spill, new_spill
from jrec.prepare.readers import places
from jrec.prepare.readers.lines import is_compressed
from jrec.prepare.readers.log_format import LogFormat
from jrec.prepare.readers.parse import BadLine
from jrec.prepare.readers.streams import Input
from jrec.prepare.readers.tables import is_table
from jrec.prepare.spill import Spill
from jrec.prepare.tasks import Task, running
from jrec.progress import Advance

PART_BYTES = 256 << 20
"""Of a plain text file that one worker reads at a time; one worker reads the whole of any other file."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Read:
    """What a worker made of a part: see ``_read_part``."""

    spill: Spill
    ordered: bool
    texts: dict[str, TextStore]
    bad: list[BadLine]
    lines: int
    source: LogFormat


class _Aside(BadLines):
    """Keeps bad lines for the process that has the other parts; reads no further where they are mistakes."""

    def __init__(self, *, skip: bool):
        super().__init__(pathlib.Path(), skip)
        self.lines: list[BadLine] = []

    def take(self, lines: list[BadLine]) -> None:
        self.lines += lines
        if lines and not self.skip:
            raise _StopReading


class _StopReading(Exception):  # noqa: N818
    """The first bad line is found."""


def read_parts(
    source: LogFormat,
    inputs: Sequence[Input],
    work: pathlib.Path,
    texts: Mapping[str, TextStore],
    bad: BadLines,
    *,
    key_seed: int,
    executor: concurrent.futures.Executor,
    attempts: int,
    advance: Advance,
) -> tuple[Spill, bool]:
    """Reads a log by the executor's workers.

    Args:
      source: The log's format, which must be divisible.
      inputs: The files, in order.
      work: A folder that all workers see.
      texts: Takes the long texts, by table.
      bad: Takes the bad lines.
      key_seed: The seed of long values' hashes.
      executor: Has the workers.
      attempts: How often a part is tried.
      advance: Told the bytes read.

    Returns:
      The examples, and whether they are in order of time already.

    Raises:
      DatasetError: On bad input, or where a part has failed ``attempts`` times; names its file and bytes.
    """
    parts = [part for one in inputs for part in _parts(one)]
    remedies = {name: store.remedy for name, store in texts.items()}
    tasks = [
        Task(
            f"reading {part.name}, {_bytes(part)}",
            _read_part,
            (source, part, work / f"part-{i:06d}", remedies, bad.skip, key_seed),
        )
        for i, part in enumerate(parts)
    ]
    read, done, before = [], 0, 0
    with running(executor, tasks, attempts=attempts) as all_read:
        for part, one in zip(parts, all_read, strict=True):
            before = 0 if part.start == 0 else before  # lines of the file that come before this part
            # A part counts lines from its own beginning; only here is it known how many come before it.
            bad.take([line._replace(line=line.line + before) for line in one.bad])
            before += one.lines
            for name, store in one.texts.items():
                for stored in store.stored():
                    texts[name].add(stored)
            read.append(one)
            done += (part.bytes if part.stop is None else part.stop) - part.start
            advance(done)
    source.check_parts([one.source for one in read])
    # Without empty ones, which have no first and last moment to compare.
    spills = [one.spill for one in read if one.spill.rows] or [read[0].spill]
    ordered = all(one.ordered for one in read) and (not source.timed or _in_order(spills))
    return Spill.joined(spills), ordered


def _parts(one: Input) -> Iterator[Input]:
    """Ranges of a plain text file, or the whole file."""
    # Only of a plain local text can a worker begin in the middle.
    if is_table(one.file) or is_compressed(one.file) or places.is_remote(one.file) or one.bytes <= PART_BYTES:
        yield one
        return
    for start in range(0, one.bytes, PART_BYTES):
        yield dataclasses.replace(one, start=start, stop=min(start + PART_BYTES, one.bytes))


def _bytes(part: Input) -> str:
    return f"bytes {part.start:,} to {part.bytes if part.stop is None else part.stop:,}"


def _read_part(
    source: LogFormat, part: Input, folder: pathlib.Path, remedies: Mapping[str, str], skip: bool, key_seed: int
) -> _Read:
    shutil.rmtree(folder, ignore_errors=True)  # of a worker that died
    folder.mkdir()
    # What assembling notes, such as whether labels are 0 or -1, is this part's, and is compared at the end.
    source = copy.copy(source)
    texts = {}
    for i, (name, remedy) in enumerate(remedies.items()):
        texts[name] = TextStore(folder / f"{i:04d}.texts", name, budget=budget_of(len(remedies)))
        texts[name].remedy = remedy
    spill, bad, ordered = new_spill(source, folder / "columns"), _Aside(skip=skip), True
    log = Log(source, [part], key_seed=key_seed, threads=1)
    try:
        ordered = fill_spill(source, source.assemble(log.converted(lambda done: None, bad)), spill, texts)
    except _StopReading:
        pass
    except DatasetError as error:
        if part.start and f"{part.name}:" in str(error):
            raise DatasetError(f"{error} (lines are counted from byte {part.start:,} of the file)") from error
        raise
    finally:
        spill.close()
        for store in texts.values():
            store.close()
    return _Read(spill=spill, ordered=ordered, texts=texts, bad=bad.lines, lines=log.lines, source=source)


def _in_order(spills: Sequence[Spill]) -> bool:
    """Whether each begins no earlier than the one before ends."""
    columns = [spill.plain(TIME) for spill in spills]
    times = np.array([[c.read(0, 1)[0], c.read(c.rows - 1, c.rows)[0]] for c in columns]) if spills[0].rows else []
    return all(before[1] <= after[0] for before, after in itertools.pairwise(times))
