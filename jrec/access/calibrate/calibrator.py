"""FAE's calibrator: from which number of accesses on a row is hot, such that hot rows fit a budget (FAE, §III-A)."""

from __future__ import annotations

import bisect
import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from jrec.access.calibrate.file import Calibration, HotInputs, TableResult
from jrec.access.calibrate.sample import RandEmBox, SampleOptions, hot_rows, sample_accesses
from jrec.access.count import Block, block_examples, exact_profile, sample_blocks
from jrec.access.profile import AccessProfile, TableProfile
from jrec.data.bijection import load_order
from jrec.data.schema import Schema, Table
from jrec.errors import ConfigError
from jrec.progress import Progress

_SILENT = Progress(show=False)
_TIE = 1e-9
_JUDGED = 0.05  # of the blocks: on these the share of hot inputs is told where accesses are counted exactly


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    """How to calibrate.

    Attributes:
      budget: Bytes that hot rows and their slots may take on a device, the paper's L.
      row_bytes: The bytes of a row with its optimizer's slots; 68 are 16 float32 and row-wise Adagrad's float32.
      small_bytes: Tables of fewer bytes are hot as a whole.
      smooth: Take the mean of neighbours for rows that were counted rarely; right where rows descend by frequency, as
        they do in datasets of `jrec prepare` and `jrec synth`. It takes the noise from counts, and divides the many
        rows of a single access, which else are hot all or none. The paper takes counts as they are.
      sample: Decide as the paper does, by a sample of the inputs and the Rand-Em Box's bounds. None counts exactly: by
        the counts that ``jrec prepare`` and ``jrec synth`` leave, or by reading all where there are none.
    """

    budget: float = 256e6
    row_bytes: int = 68
    small_bytes: float = 1e6
    smooth: bool = True
    sample: SampleOptions | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.budget) and self.budget >= 0):
            raise ConfigError(f"the budget is {self.budget} bytes; it must be at least 0")
        if self.row_bytes < 1 or self.small_bytes < 0:
            raise ConfigError(f"row_bytes {self.row_bytes} and small_bytes {self.small_bytes} must be at least 1 and 0")

    def is_large(self, table: Table) -> bool:
        """Whether the threshold holds for a table."""
        return table.rows * self.row_bytes >= self.small_bytes


def calibrate(
    folder: str | os.PathLike[str],
    options: CalibrateOptions | None = None,
    *,
    schema: Schema | None = None,
    progress: Progress = _SILENT,
) -> Calibration:
    """Finds the hot rows of a dataset: as many of the most accessed ones as fit the budget.

    Args:
      folder: The dataset's folder.
      options: How to calibrate; None for the defaults.
      schema: Its description; None reads and checks it.
      progress: Shows how far the calibration is.

    Raises:
      DatasetError: If the dataset cannot be read or has no training examples.
      ConfigError: If the tables that are always hot do not fit the budget, or a sample has too few blocks.
    """
    options = options or CalibrateOptions()
    schema = Schema.load(folder) if schema is None else schema
    schema.check_labels()
    schema.check_numbered("`jrec fae calibrate` chooses rows by their counts")
    small = _small_rows(schema, options)
    profile, judged = count_accesses(folder, schema, options, progress=progress)
    large = {t.name: profile.table(t.name) for t in schema.tables if options.is_large(t)}
    if options.sample is None:
        counts_hot = [lambda cutoff, one=one: hot_rows(one, cutoff) for one in large.values()]
    else:
        counts_hot = [
            lambda cutoff, box=box: box.estimate(cutoff).bound for box in boxes_of(schema, large, options.sample)
        ]
    cutoff = _least_cutoff(
        large.values(),
        lambda cutoff: options.row_bytes * (small + sum(count(cutoff) for count in counts_hot)) <= options.budget,
    )
    rows = {t.name: _rows_of(profile.table(t.name), cutoff if t.name in large else 0.0) for t in schema.tables}
    none_large = math.isinf(cutoff)
    return Calibration(
        name=schema.name,
        dataset=schema.identity,
        options=dataclasses.asdict(options),
        source=profile.source,
        inputs=schema.splits["train"].examples,
        counted_inputs=int(profile.examples),
        threshold=None if none_large else cutoff / profile.examples,
        cutoff=None if none_large else cutoff,
        row_bytes=options.row_bytes,
        tables=tuple(
            TableResult(name=t.name, rows=t.rows, large=t.name in large, hot=len(rows[t.name])) for t in schema.tables
        ),
        hot_inputs=_hot_inputs(folder, schema, judged, rows),
        rows={t.name: _as_loaded(folder, t, rows[t.name]) for t in schema.tables},
    )


def count_accesses(
    folder: str | os.PathLike[str], schema: Schema, options: CalibrateOptions, *, progress: Progress = _SILENT
) -> tuple[AccessProfile, Sequence[Block]]:
    """The accesses of rows as they are stored, and the blocks on which the share of hot inputs is told."""
    if options.sample is None:
        profile = exact_profile(folder, schema, progress=progress)
        tables = tuple(t.smoothed() for t in profile.tables) if options.smooth else profile.tables
        judged = sample_blocks(schema, "train", fraction=_JUDGED, seed=0)
    else:
        profile, judged = sample_accesses(folder, schema, options.sample, smooth=options.smooth, progress=progress)
        tables = profile.tables
    tables = tuple(map(_graded, tables)) if options.smooth else tables
    return dataclasses.replace(profile, tables=tables), judged


def boxes_of(schema: Schema, large: Mapping[str, TableProfile], options: SampleOptions) -> list[RandEmBox]:
    """The Rand-Em Boxes of the large tables."""
    numbers = {t.name: number for number, t in enumerate(schema.tables)}
    return [RandEmBox(profile, options, number=numbers[name]) for name, profile in large.items()]


def _small_rows(schema: Schema, options: CalibrateOptions) -> int:
    """How many rows the tables that are hot as a whole have."""
    rows = sum(t.rows for t in schema.tables if not options.is_large(t))
    if rows * options.row_bytes > options.budget:
        raise ConfigError(
            f"the tables below {options.small_bytes / 1e6:g} MB, whose rows are all hot, take"
            f" {rows * options.row_bytes / 1e6:,.3f} MB, more than the budget of {options.budget / 1e6:,.3f} MB; give"
            " more (--budget), or take fewer tables as small (--small)"
        )
    return rows


def _graded(profile: TableProfile) -> TableProfile:
    """The profile with ties broken: of rows with equal counts, the first in a table is hottest, by next to nothing."""
    return dataclasses.replace(profile, counts=profile.counts * (1 - _TIE * profile.starts[:-1] / profile.rows))


def _least_cutoff(profiles: Iterable[TableProfile], fits: Callable[[float], bool]) -> float:
    """The least count that occurs and fits: 0 where all rows do, infinity where none does."""
    cutoffs = np.unique(np.concatenate([np.zeros(1), *(np.unique(p.counts) for p in profiles)])).tolist()
    # The higher the cutoff, the fewer rows: what fits, fits from some cutoff on.
    first = bisect.bisect_left(cutoffs, True, key=fits)
    return cutoffs[first] if first < len(cutoffs) else math.inf


def _rows_of(profile: TableProfile, cutoff: float) -> np.ndarray:
    """(hot,) uint32 ascending: the embedding classifier."""
    if cutoff <= 0:
        return np.arange(profile.rows, dtype=np.uint32)
    hot = profile.counts >= cutoff
    starts, lengths = profile.starts[:-1][hot], np.diff(profile.starts)[hot]
    before = np.repeat(np.cumsum(lengths) - lengths, lengths)
    return (np.repeat(starts, lengths) + np.arange(int(lengths.sum())) - before).astype(np.uint32)


def _hot_inputs(
    folder: str | os.PathLike[str], schema: Schema, blocks: Sequence[Block], rows: Mapping[str, np.ndarray]
) -> HotInputs:
    """The share of hot inputs in some blocks, and its standard error over them."""
    from jrec.data.blocks import ShardReader
    from jrec.data.fae.examples import hot_examples, read_blocks, row_set

    readers = [ShardReader(folder, shard) for shard in schema.splits["train"].shards]
    sets = {t.name: row_set(t, rows[t.name]) for t in schema.tables}
    hot = np.zeros(len(blocks))
    for number, (shard, block) in enumerate(blocks):
        hot[number] = hot_examples(read_blocks(readers[shard], schema, block, block + 1), schema, sets).sum()
    sizes = np.array([block_examples(schema, "train", block) for block in blocks])
    share, inputs = float(hot.sum() / sizes.sum()), int(sizes.sum())
    if len(blocks) == 1:
        return HotInputs(share=share, error=None, inputs=inputs)
    spread = ((hot - share * sizes) ** 2).sum() / (len(blocks) - 1) * len(blocks)
    return HotInputs(share=share, error=float(np.sqrt(spread) / inputs), inputs=inputs)


def _as_loaded(folder: str | os.PathLike[str], table: Table, rows: np.ndarray) -> np.ndarray:
    """The numbers that the loader gives to stored rows, ascending."""
    order = None if len(rows) in (0, table.rows) else load_order(folder, table)
    return rows if order is None else np.sort(order[rows])
