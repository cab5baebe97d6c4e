"""Long values such as UUIDs in ``jrec prepare``: CPU time a text and peak memory of the store that keeps them.

Distinct texts of 36 bytes go to a store in blocks as the parser makes them, are looked up in random order as a
vocabulary is written. A third of the additions repeats a text. Memory is how much the process's peak resident set grows
from before the first text, mapped files included; time is the store's alone.
"""

from __future__ import annotations

import pathlib
import resource
import tempfile
import time

import numpy as np

from benchmarks import harness
from jrec.data.long_texts import LongTexts
from jrec.data.texts import TextStore

BLOCK, LOOKED_UP = 100_000, 1 << 17
LENGTH = 36


def block_of(numbers: np.ndarray) -> LongTexts:
    """Texts of (n,) numbers: hexadecimal digits, as the parser gives them."""
    mixed = numbers[:, None] * np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], np.uint64)
    mixed ^= mixed >> np.uint64(29)
    nibbles = (mixed.view(np.uint8)[:, :, None] >> np.array([0, 4], np.uint8)) & 15
    digits = np.frombuffer(b"0123456789abcdef", np.uint8)[nibbles.reshape(len(numbers), -1)[:, :LENGTH]]
    ends = np.arange(len(numbers) + 1, dtype=np.int64) * LENGTH
    return LongTexts.among(digits.reshape(-1), ends[:-1], ends[1:], 0)[1]


def main() -> None:
    """Fills a store, closes it, and looks all texts up."""
    parser = harness.parser(__doc__)
    parser.add_argument("--texts", type=int, default=5_000_000, help="distinct texts (default 5,000,000)")
    arguments = parser.parse_args()
    with harness.Report(arguments, "long_texts") as report, tempfile.TemporaryDirectory() as folder:
        texts = arguments.texts // 10 if arguments.quick else arguments.texts
        for metric, value in _measured(pathlib.Path(folder), texts).items():
            report.add(f"{texts:,} texts", metric, value, "MB" if metric == "peak memory" else "µs a text")


def _measured(folder: pathlib.Path, texts: int) -> dict[str, float]:
    store = TextStore(folder / "texts", "t")
    warm = TextStore(folder / "warm", "t")
    warm.add(block_of(np.arange(10, dtype=np.uint64)))
    warm.close()
    warm.merge()
    warm.texts_of(block_of(np.arange(10, dtype=np.uint64)).keys)
    keys = np.ones(texts, np.uint64)  # the benchmark's own, as the rest of its memory before
    before = _peak()
    seconds = {"adding": 0.0, "closing": 0.0, "looking up": 0.0}
    for start in range(0, texts, BLOCK):
        numbers = np.arange(start, min(start + BLOCK, texts), dtype=np.uint64)
        block = block_of(numbers)
        keys[start : start + len(numbers)] = block.keys
        seconds["adding"] += _cpu(lambda block=block: store.add(block))
        again = block_of(numbers[::3] // 2)
        seconds["adding"] += _cpu(lambda again=again: store.add(again))
    seconds["closing"] = _cpu(store.close) + _cpu(store.merge)
    np.random.default_rng(0).shuffle(keys)
    for start in range(0, texts, LOOKED_UP):
        seconds["looking up"] += _cpu(lambda start=start: store.texts_of(keys[start : start + LOOKED_UP]))
    figures = {name: 1e6 * value / texts for name, value in seconds.items()}
    return {**figures, "CPU time": sum(figures.values()), "peak memory": (_peak() - before) / 1e6}


def _cpu(work) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def _peak() -> float:
    """The peak resident set of this process, in bytes."""
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main()
