"""FAE's calibrator: from which share of accesses on a row is hot, such that hot rows fit a budget (FAE, §III-A).

The sparse input sampler counts the accesses in some blocks of the training split and reads no others; the embedding
logger is those counts; the statistical optimizer asks the Rand-Em Box how many rows are hot at one threshold after the
other, until the least one is found whose hot rows fit. The paper's names: ``L`` the budget, ``x`` the sampled fraction,
``S_I`` the inputs counted, ``t`` the threshold, ``H_zt = t S_I`` the cutoff.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import os
import time
from collections.abc import Mapping, Sequence

import numpy as np

from jrec.access.calibrate.box import CHUNK_ROWS, CHUNKS, RandEmBox, hot_rows
from jrec.access.calibrate.file import Calibration, HotInputs, Step, TableResult
from jrec.access.calibrate.inputs import InputSample
from jrec.access.count import Block, block_examples, count_blocks, exact_profile, sample_blocks, split_blocks
from jrec.access.profile import TableProfile
from jrec.data.reorder.file import load_order
from jrec.data.schema import Schema, Table
from jrec.errors import ConfigError
from jrec.progress import Progress

_SILENT = Progress(show=False)
_TIE = 1e-9
_FEW_BLOCKS = 10  # a smaller sample would tell more of these blocks than of the dataset; all of it is counted soon
_FRACTION = 0.05
_LEAST_HELD_OUT = 2  # blocks, for their spread to tell the error


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    """How to calibrate.

    Attributes:
      budget: bytes that hot rows and their slots may take on a device, the paper's L.
      fraction: The share of the training blocks that is read, the paper's x. None reads none where the dataset has the
        counts of its training split, which ``jrec prepare`` and ``jrec synth`` leave, and 5 % elsewhere.
      confidence: The one-sided confidence that hot rows fit, for every table.
      seed: The seed with which blocks and the Rand-Em Box's rows are drawn.
      exact: Count all accesses, by the dataset's own counts where it has them.
      smooth: Take the mean of neighbours for rows that were counted rarely; right where rows descend by frequency, as
        they do in datasets of `jrec prepare` and `jrec synth`. It takes the noise from counts, and divides the many
        rows of a single access, which else are hot all or none. The paper takes counts as they are.
      tighten: When the rows are tagged and their true number is known, lower the threshold into the room that the
        Rand-Em Box's bounds left. The paper keeps its threshold.
      row_bytes: The bytes of a row with its optimizer's slots; 68 are 16 float32 and row-wise Adagrad's float32.
      small_bytes: Tables of fewer bytes are hot as a whole.
      held_out: The share of the sample that is not counted, for an unbiased estimate of the share of hot inputs.
      chunks, chunk_rows: The Rand-Em Box's n and m.
    """

    budget: float = 256e6
    fraction: float | None = None
    confidence: float = 0.999
    seed: int = 0
    exact: bool = False
    smooth: bool = True
    tighten: bool = True
    row_bytes: int = 68
    small_bytes: float = 1e6
    held_out: float = 0.1
    chunks: int = CHUNKS
    chunk_rows: int = CHUNK_ROWS

    def __post_init__(self) -> None:
        if not (math.isfinite(self.budget) and self.budget >= 0):
            raise ConfigError(f"the budget is {self.budget} bytes; it must be at least 0")
        if self.fraction is not None and not 0 < self.fraction <= 1:
            raise ConfigError(f"the sampled fraction is {self.fraction}; give one above 0, up to 1")
        if not 0.5 <= self.confidence < 1:
            raise ConfigError(f"the confidence is {self.confidence}; it must be at least 0.5 and below 1")
        if self.row_bytes < 1 or self.small_bytes < 0 or self.seed < 0:
            raise ConfigError(
                f"row_bytes {self.row_bytes}, small_bytes {self.small_bytes} and seed {self.seed} must be at least 1, 0"
                " and 0"
            )
        if not 0 < self.held_out < 1:
            raise ConfigError(f"held_out is {self.held_out}; it must be above 0 and below 1")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Counted:
    """The embedding logger's result.

    Attributes:
      profiles: Accesses of every table, rows as they are stored.
      inputs: How many inputs were counted.
      source: How they were counted, for people.
      test_blocks: The blocks on which the share of hot inputs is estimated.
      held_out: Whether these blocks were left out of the counts.
    """

    profiles: Mapping[str, TableProfile]
    inputs: int
    source: str
    test_blocks: Sequence[Block]
    held_out: bool


def calibrate(
    folder: str | os.PathLike[str],
    options: CalibrateOptions | None = None,
    *,
    schema: Schema | None = None,
    progress: Progress = _SILENT,
) -> Calibration:
    """Finds the hot rows of a dataset.

    Args:
      folder: The dataset's folder.
      options: How to calibrate; None for the defaults.
      schema: Its description; None reads and checks it.
      progress: Shows how far the calibration is.

    Raises:
      DatasetError: If the dataset cannot be read or has no training examples.
      ConfigError: If the tables that are always hot do not fit the budget.
    """
    return calibrate_and_count(folder, options, schema=schema, progress=progress)[0]


def calibrate_and_count(
    folder: str | os.PathLike[str],
    options: CalibrateOptions | None = None,
    *,
    schema: Schema | None = None,
    progress: Progress = _SILENT,
) -> tuple[Calibration, Counted]:
    """As ``calibrate``, with the counts, for figures."""
    start = time.perf_counter()
    asked = options or CalibrateOptions()
    schema = Schema.load(folder) if schema is None else schema
    schema.check_labels()
    schema.check_numbered("`jrec fae calibrate` chooses rows by their counts")
    _check_small(schema, asked)
    exact = asked.exact or (asked.fraction is None and _has_counts(schema))
    fraction = _FRACTION if asked.fraction is None else asked.fraction
    tiny = not exact and len(sample_blocks(schema, "train", fraction=fraction, seed=0)) < _FEW_BLOCKS
    options = dataclasses.replace(asked, exact=exact or tiny, fraction=1.0 if tiny else fraction)
    counted = _count(folder, schema, options, progress)
    large = [t for t in schema.tables if is_large(t, options)]
    boxes = {t.name: box_of(counted.profiles[t.name], options, k) for k, t in enumerate(schema.tables) if t in large}
    cutoff, steps = _optimize(schema, boxes, counted.inputs, options)
    cutoff, corrected = _settled(schema, boxes, cutoff, options)
    stored = {t.name: _rows_of(counted.profiles[t.name], cutoff if t in large else 0.0) for t in schema.tables}
    share, error = InputSample(
        folder, schema, counted.test_blocks, {t.name: counted.profiles[t.name] for t in large}
    ).share(cutoff)
    calibration = Calibration(
        name=schema.name,
        dataset=schema.identity,
        options=dataclasses.asdict(asked),
        source=counted.source,
        inputs=schema.splits["train"].examples,
        counted_inputs=counted.inputs,
        threshold=None if math.isinf(cutoff) else cutoff / counted.inputs,
        cutoff=None if math.isinf(cutoff) else cutoff,
        row_bytes=options.row_bytes,
        tables=tuple(_result(t, boxes.get(t.name), cutoff, len(stored[t.name])) for t in schema.tables),
        steps=steps,
        hot_inputs=HotInputs(
            share=share,
            error=error,
            inputs=sum(block_examples(schema, "train", b) for b in counted.test_blocks),
            held_out=counted.held_out,
        ),
        notes=_notes(schema, dataclasses.replace(asked, exact=exact), boxes, tiny, corrected),
        seconds=0.0,
        rows={t.name: _as_loaded(folder, t, stored[t.name]) for t in schema.tables},
    )
    return dataclasses.replace(calibration, seconds=time.perf_counter() - start), counted


def is_large(table: Table, options: CalibrateOptions) -> bool:
    """Whether the threshold holds for a table."""
    return table.rows * options.row_bytes >= options.small_bytes


def _check_small(schema: Schema, options: CalibrateOptions) -> None:
    small = sum(t.rows for t in schema.tables if not is_large(t, options)) * options.row_bytes
    if small > options.budget:
        raise ConfigError(
            f"the tables below {options.small_bytes / 1e6:g} MB, whose rows are all hot, take {small / 1e6:,.3f} MB,"
            f" more than the budget of {options.budget / 1e6:,.3f} MB; give more (--budget), or take fewer tables"
            " as small (--small)"
        )


def _has_counts(schema: Schema) -> bool:
    return all(t.counts is not None for t in schema.tables)


def _count(folder: str | os.PathLike[str], schema: Schema, options: CalibrateOptions, progress: Progress) -> Counted:
    assert options.fraction is not None
    sample = sample_blocks(schema, "train", fraction=options.fraction, seed=options.seed)
    total = schema.splits["train"].examples
    if options.exact and _has_counts(schema):
        profile = exact_profile(folder, schema, progress=progress)
        profiles = {t.name: _graded(t.smoothed()) if options.smooth else t for t in profile.tables}
        return Counted(profiles=profiles, inputs=total, source=profile.source, test_blocks=sample, held_out=False)
    if options.exact:
        used, test = split_blocks(schema, "train"), sample
    else:
        shuffled = [sample[i] for i in np.random.default_rng((options.seed, 1)).permutation(len(sample))]
        aside = max(_LEAST_HELD_OUT, round(options.held_out * len(sample)))
        test, used = sorted(shuffled[:aside]), sorted(shuffled[aside:])
    inputs = sum(block_examples(schema, "train", block) for block in used)
    tables = count_blocks(folder, schema, "train", used, smooth=options.smooth, progress=progress)
    return Counted(
        profiles={t.name: _graded(t) if options.smooth else t for t in tables},
        inputs=inputs,
        source=f"{inputs:,} of {total:,} inputs, in {len(used):,} blocks drawn with seed {options.seed}",
        test_blocks=test,
        held_out=not options.exact,
    )


def _graded(profile: TableProfile) -> TableProfile:
    """Of rows with equal counts, the first in their tables are made the hottest, by next to nothing."""
    return dataclasses.replace(profile, counts=profile.counts * (1 - _TIE * profile.starts[:-1] / profile.rows))


def box_of(profile: TableProfile, options: CalibrateOptions, number: int) -> RandEmBox:
    """The Rand-Em Box of the dataset's table of this number."""
    return RandEmBox(
        profile,
        confidence=options.confidence,
        seed=(options.seed, number),
        chunks=options.chunks,
        chunk_rows=options.chunk_rows,
        exact=options.exact,
    )


def _optimize(
    schema: Schema, boxes: Mapping[str, RandEmBox], inputs: int, options: CalibrateOptions
) -> tuple[float, tuple[Step, ...]]:
    """The least cutoff whose hot rows fit the budget by the Rand-Em Box's bounds: all, none, or a count that occurs."""
    small = sum(t.rows for t in schema.tables if t.name not in boxes)
    steps: list[Step] = []

    def fits(cutoff: float) -> bool:
        estimates = [box.estimate(cutoff) for box in boxes.values()]
        bytes_of = options.row_bytes
        step = Step(
            threshold=cutoff / inputs,
            estimated_bytes=bytes_of * (small + sum(e.rows for e in estimates)),
            bound_bytes=bytes_of * (small + sum(e.bound for e in estimates)),
        )
        steps.append(step)
        return step.bound_bytes <= options.budget

    cutoffs = _cutoffs(boxes)
    if fits(0.0):
        return 0.0, tuple(steps)
    low, high = 0, len(cutoffs)  # the last stands for no row at all, which fits
    while low < high:
        middle = (low + high) // 2
        if fits(cutoffs[middle]):
            high = middle
        else:
            low = middle + 1
    return (cutoffs[low] if low < len(cutoffs) else math.inf), tuple(steps)


def _cutoffs(boxes: Mapping[str, RandEmBox]) -> list[float]:
    """The counts that occur, ascending."""
    counts = np.concatenate([np.empty(0), *(np.unique(box.profile.counts) for box in boxes.values())])
    return np.unique(counts[counts > 0]).tolist()


def _settled(
    schema: Schema, boxes: Mapping[str, RandEmBox], cutoff: float, options: CalibrateOptions
) -> tuple[float, bool]:
    """The cutoff with which the rows that are tagged fit: raised if a bound did not hold, else lowered into the room
    that the bounds left (``tighten``). And whether it had to be raised.
    """
    small = sum(t.rows for t in schema.tables if t.name not in boxes)

    def fits(at: float) -> bool:
        rows = small + sum(hot_rows(box.profile, at) for box in boxes.values())
        return rows * options.row_bytes <= options.budget

    holds = fits(cutoff)
    if cutoff <= 0 or (holds and not options.tighten):
        return cutoff, False
    cutoffs = [c for c in _cutoffs(boxes) if (c <= cutoff) == holds]
    first = bisect.bisect_left(cutoffs, True, key=fits)
    return (cutoffs[first] if first < len(cutoffs) else math.inf if not holds else cutoff), not holds


def _rows_of(profile: TableProfile, cutoff: float) -> np.ndarray:
    """(hot,) uint32 ascending: the embedding classifier."""
    if cutoff <= 0:
        return np.arange(profile.rows, dtype=np.uint32)
    hot = profile.counts >= cutoff
    starts, lengths = profile.starts[:-1][hot], np.diff(profile.starts)[hot]
    before = np.repeat(np.cumsum(lengths) - lengths, lengths)
    return (np.repeat(starts, lengths) + np.arange(int(lengths.sum())) - before).astype(np.uint32)


def _as_loaded(folder: str | os.PathLike[str], table: Table, rows: np.ndarray) -> np.ndarray:
    """The numbers that the loader gives to stored rows, ascending."""
    order = None if len(rows) in (0, table.rows) else load_order(folder, table)
    return rows if order is None else np.sort(order[rows])


def _result(table: Table, box: RandEmBox | None, cutoff: float, hot: int) -> TableResult:
    if box is None:
        return TableResult(name=table.name, rows=table.rows, large=False, hot=hot, estimate=hot, bound=hot, how="whole")
    estimate = box.estimate(cutoff)
    return TableResult(
        name=table.name,
        rows=table.rows,
        large=True,
        hot=hot,
        estimate=estimate.rows,
        bound=estimate.bound,
        how=estimate.how,
    )


def _notes(
    schema: Schema, asked: CalibrateOptions, boxes: Mapping[str, RandEmBox], tiny: bool, corrected: bool
) -> tuple[str, ...]:
    notes = []
    small = [name for name, box in boxes.items() if box.counted and not (asked.exact or tiny)]
    if small:
        notes.append(
            f"{len(small)} large table(s) have fewer rows than {asked.chunks} chunks of {asked.chunk_rows:,} and"
            f" are counted whole: {', '.join(small)}"
        )
    if tiny:
        notes.append(
            f"{len(split_blocks(schema, 'train'))} training block(s) are too few for a sample of"
            f" {100 * (asked.fraction or _FRACTION):g} %: all accesses are counted"
        )
    if corrected:
        notes.append("a bound of the Rand-Em Box did not hold; the threshold was raised until the rows fit the budget")
    return tuple(notes)
