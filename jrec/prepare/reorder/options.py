"""The options of ``jrec reorder``."""

from __future__ import annotations

import dataclasses
import math

from jrec.prepare.reorder.communities import METHODS, Method


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReorderOptions:
    """How rows are reordered.

    Attributes:
      tables: The tables to reorder; None for all of at least ``min_rows``.
      min_rows: Smaller tables are left as they are.
      hot_ratio: Share of a table's rows, the most frequent ones, that stay on top in order of frequency.
      batch_size: Examples in a batch of the access log; take training's.
      window_blocks: How training reads: 0 for the order of time, else its ``data.window_blocks``.
      degree: Partners that a row of a batch draws in the index graph; infinity for all pairs.
      max_edges: Edges of a table's graph at most, which bounds memory.
      method: How communities are found.
      min_gain: Share of the unique prefixes that a table's new order has to save on training batches to be kept; None
        keeps every order.
      seed: The seed of the sampled edges, of the communities, and of training's permutations.
      report_batch_sizes: The batch sizes of the report.
      report_batches: Batches that each of its figures is a mean of, at most.
      threads: How many threads read.
    """

    tables: tuple[str, ...] | None = None
    min_rows: int = 10_000
    hot_ratio: float = 0.1
    batch_size: int = 4096
    window_blocks: int = 0
    degree: float = 16.0
    max_edges: int = 8_000_000
    method: Method = "leiden"
    min_gain: float | None = 0.01
    seed: int = 0
    report_batch_sizes: tuple[int, ...] = (1024, 4096, 16384)
    report_batches: int = 32
    threads: int = 2

    def __post_init__(self) -> None:
        least = (
            ("min_rows", 1),
            ("batch_size", 2),
            ("window_blocks", 0),
            ("max_edges", 1),
            ("seed", 0),
            ("report_batches", 1),
            ("threads", 0),
        )
        for name, low in least:
            if getattr(self, name) < low:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {low}")
        if not 0 <= self.hot_ratio < 1:
            raise ValueError(f"hot_ratio is {self.hot_ratio}; it must be at least 0 and below 1")
        if not self.degree > 0:
            raise ValueError(f"degree is {self.degree}; it must be above 0, or infinite for all pairs")
        if self.method not in METHODS:
            raise ValueError(f"method is {self.method!r}; choose one of {', '.join(METHODS)}")
        if self.min_gain is not None and not (math.isfinite(self.min_gain) and self.min_gain < 1):
            raise ValueError(f"min_gain is {self.min_gain}; it must be below 1")
        if not self.report_batch_sizes or min(self.report_batch_sizes) < 1:
            raise ValueError(f"report_batch_sizes are {list(self.report_batch_sizes)}; name some, each at least 1")
