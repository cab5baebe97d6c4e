"""The order of examples: which example is the k-th of an epoch, as a pure function of seed, epoch and process.

An epoch permutes all blocks. The stream of their examples is cut into one contiguous share a process, whose sizes
differ by one at most. The blocks of a share, its first and last perhaps in part, are grouped into *windows* of
``window_blocks``, and every window's examples are permuted. Nothing depends on threads, so a position in the stream is
all that resuming needs.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jrec.data.packing_kernels import permutation

_BLOCKS, _EXAMPLES = 1, 2  # keep the random numbers of the two permutations apart


@dataclasses.dataclass(frozen=True, kw_only=True)
class OrderConfig:
    """What the order depends on, besides the sizes of the blocks."""

    shuffle: bool
    seed: int
    window_blocks: int
    process_index: int = 0
    process_count: int = 1
    first: int | None = None

    def share(self, examples: int) -> tuple[int, int]:
        """The bounds of this process's share of an epoch's stream, or of its first examples."""
        p, count, examples = self.process_index, self.process_count, self.read(examples)
        return p * examples // count, (p + 1) * examples // count

    def read(self, examples: int) -> int:
        """How many of an epoch's examples are read, by all processes together."""
        return examples if self.first is None else min(examples, self.first)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpochOrder:
    """One process's share of one epoch.

    Attributes:
      epoch: Its number.
      blocks: (pieces,) the blocks to read, in order.
      starts, stops: (pieces,) the examples of each block that belong to the share.
      window_starts: (windows + 1,) positions in the share at which windows begin.
    """

    config: OrderConfig
    epoch: int
    blocks: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    window_starts: np.ndarray

    @property
    def examples(self) -> int:
        """Examples in the share."""
        return int(self.window_starts[-1])

    def pieces(self, window: int) -> list[tuple[int, int, int]]:
        """(block, start, stop) of the parts of a window."""
        chosen = slice(window * self.config.window_blocks, (window + 1) * self.config.window_blocks)
        columns = self.blocks[chosen], self.starts[chosen], self.stops[chosen]
        return [(int(b), int(i), int(j)) for b, i, j in zip(*columns, strict=True)]

    def examples_of(self, window: int) -> np.ndarray:
        """The order of a window's examples, (n,) int32 positions in the window as it was read."""
        size = int(self.window_starts[window + 1] - self.window_starts[window])
        if not self.config.shuffle:
            return np.arange(size, dtype=np.int32)
        return permutation(size, self.config.seed, _EXAMPLES, self.epoch, self.config.process_index, window)

    def spans(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """The parts of windows that hold positions ``start`` to ``stop``: (window, first, last + 1)."""
        spans = []
        window = int(np.searchsorted(self.window_starts, start, side="right")) - 1
        while start < stop:
            begin, end = int(self.window_starts[window]), int(self.window_starts[window + 1])
            upto = min(stop, end)
            if upto > start:
                spans.append((window, start - begin, upto - begin))
            start, window = upto, window + 1
        return spans


def epoch_order(config: OrderConfig, block_examples: np.ndarray, epoch: int) -> EpochOrder:
    """The order of one epoch.

    Args:
      config: What it depends on.
      block_examples: (blocks,) int64, examples in every block of the split, in time order.
      epoch: Which epoch.
    """
    blocks = np.arange(len(block_examples), dtype=np.int32)
    if config.shuffle:
        blocks = permutation(len(block_examples), config.seed, _BLOCKS, epoch)
    bounds = np.zeros(len(blocks) + 1, np.int64)
    np.cumsum(block_examples[blocks], out=bounds[1:])
    low, high = config.share(int(bounds[-1]))
    starts = np.maximum(low - bounds[:-1], 0)
    stops = np.minimum(high - bounds[:-1], block_examples[blocks])
    shared = stops > starts
    blocks, starts, stops = blocks[shared], starts[shared], stops[shared]
    ends = np.concatenate([[0], np.cumsum(stops - starts)])
    window_starts = np.unique(np.append(ends[:: config.window_blocks], ends[-1]))
    return EpochOrder(
        config=config, epoch=epoch, blocks=blocks, starts=starts, stops=stops, window_starts=window_starts
    )
