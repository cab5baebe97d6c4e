"""The options of ``jrec prepare``, in a module that is quick to import."""

from __future__ import annotations

import dataclasses
import os

from jrec.data.schema import DatasetError

LEAVE_ONE_OUT = "leave-one-out"
SPLIT_BY = ("time", "random", LEAVE_ONE_OUT)
_SPLIT = (0.8, 0.1, 0.1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """How to prepare any log.

    Attributes:
      split: The fractions of the examples, in order of time, for train, valid and test.
      split_by: "time" for the first examples, the next and the last ones; "random" to draw each one by its number;
        "leave-one-out" for each user's last example as test, the one before as validation, and the one before that to
        train on, whose history holds all earlier ones.
      split_seed: The seed of the draws of "random".
      min_count: A rarer value in training goes to the out-of-vocabulary row. At 1 that row would never be
        trained, so the default is 2.
      max_rows: Tables that would have more rows are hashed to this many.
      growing: Tables whose values the examples hold as 64-bit keys, for a run to give them rows as they come
        (``jrec.data.growing``); ("all",) for all of them. ``min_count`` and ``max_rows`` do not concern these.
      labels: Whether examples have labels; False ignores the log's labels, if it has any.
      on_bad_line: "error", or "skip" to write bad lines aside.
      block_size, shard_examples: Examples per block, and at most per shard (a multiple of it).
      keep_order: Take the inputs as given even if the numbers in their names are in another order.
      key_seed: The seed of long values' hashes; another one helps where two values collide.
      threads: How many cores to use.
      overwrite: Replace a finished dataset.
      vocabulary_from: An earlier dataset, whose rows values get instead of rows of their own: see docs/data.md. It
        decides ``min_count``, ``max_rows``, ``growing`` and ``key_seed``, which must not be given.
    """

    split: tuple[float, float, float] = _SPLIT
    split_by: str = "time"
    split_seed: int = 0
    min_count: int = 2
    max_rows: int | None = None
    growing: tuple[str, ...] = ()
    labels: bool = True
    on_bad_line: str = "error"
    block_size: int = 8192
    shard_examples: int = 1 << 20
    keep_order: bool = False
    key_seed: int = 0
    threads: int = dataclasses.field(default_factory=lambda: min(8, len(os.sched_getaffinity(0))))
    overwrite: bool = False
    vocabulary_from: str | None = None

    def __post_init__(self) -> None:
        if len(self.split) != 3 or not all(0 <= f <= 1 for f in self.split) or abs(sum(self.split) - 1) > 1e-6:
            raise DatasetError(f"--split is {self.split}; give three fractions that add up to 1, like 0.8,0.1,0.1")
        if self.split_by not in SPLIT_BY:
            raise DatasetError(f"--split-by is {self.split_by!r}; choose {', '.join(SPLIT_BY[:-1])} or {SPLIT_BY[-1]}")
        if self.split_by == LEAVE_ONE_OUT and self.split != _SPLIT:
            raise DatasetError(f"--split with --split-by {LEAVE_ONE_OUT}, which has no fractions; leave --split out")
        if self.split_seed and self.split_by != "random":
            raise DatasetError(
                f"--split-seed is of --split-by random, but the log is split by {self.split_by}; leave it out"
            )
        if self.split[0] == 0 and self.vocabulary_from is None:
            raise DatasetError(
                "--split leaves nothing to train on; its first fraction must be above 0, unless rows come from"
                " --vocabulary-from"
            )
        if self.vocabulary_from is not None:
            for name, default in (("min_count", 2), ("max_rows", None), ("growing", ()), ("key_seed", 0)):
                if getattr(self, name) != default:
                    raise refuse_learned(name, self.vocabulary_from)
        for name, least in (
            ("min_count", 1),
            ("max_rows", 1),
            ("block_size", 1),
            ("threads", 1),
            ("key_seed", 0),
            ("split_seed", 0),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise DatasetError(f"--{name.replace('_', '-')} is {value}; it must be at least {least}")
        if self.key_seed >= 2**64:
            raise DatasetError(
                f"--key-seed is {self.key_seed}; it must be below 2^64, since keys are hashed in 64 bits"
            )
        if self.on_bad_line not in ("error", "skip"):
            raise DatasetError(f"--on-bad-line is {self.on_bad_line!r}; choose error or skip")
        if self.shard_examples < 1 or self.shard_examples % self.block_size:
            raise DatasetError(
                f"--shard-examples is {self.shard_examples}; it must be a positive multiple of --block-size,"
                f" {self.block_size}"
            )


def refuse_learned(name: str, vocabulary_from: str) -> DatasetError:
    """The error about an option of which the earlier dataset decides."""
    option = f"--{name.replace('_', '-')}"
    return DatasetError(
        f"{option} and --vocabulary-from cannot be given together: rows are those of {vocabulary_from}; leave {option}"
        " out"
    )
