"""When the stages of a pipeline worked: totals for the report, and a trace for Perfetto or chrome://tracing."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import threading
import time
from collections.abc import Iterator

from jrec.json_values import JsonObject
from jrec.outputs import write_file

MAX_EVENTS = 500_000
"""Spans a trace keeps: the latest, some 100 bytes each."""


@dataclasses.dataclass
class _Stage:
    busy: float = 0.0
    wait: float = 0.0
    batches: int = 0


@dataclasses.dataclass
class _Depth:
    total: int = 0
    count: int = 0
    most: int = 0


@dataclasses.dataclass
class _Rows:
    unique: int = 0
    cached: int = 0
    to_device: int = 0
    to_host: int = 0


class Timeline:
    """Collects the work, waits and traffic of all threads of a pipeline.

    Args:
      trace: Whether to keep every span, for ``write_trace``, and not only the totals.
    """

    def __init__(self, *, trace: bool = False):
        self.trace = trace
        self._lock = threading.Lock()
        # A bounded deque drops the oldest by itself: a trace of a long run keeps its end, and no memory grows with the
        # run.
        self._events: collections.deque[tuple[str, int, float, float]] = collections.deque(maxlen=MAX_EVENTS)
        self._depth_events: collections.deque[tuple[str, float, int]] = collections.deque(maxlen=MAX_EVENTS)
        self._origin = time.perf_counter()
        self.reset()

    def reset(self) -> None:
        """Forgets the totals (not the trace), so that they begin after a warm-up."""
        with self._lock:
            self._stages: collections.defaultdict[str, _Stage] = collections.defaultdict(_Stage)
            self._depths: collections.defaultdict[str, _Depth] = collections.defaultdict(_Depth)
            self._rows: collections.defaultdict[str, _Rows] = collections.defaultdict(_Rows)
            self._batch_bytes = 0

    @contextlib.contextmanager
    def working(self, stage: str, batch: int) -> Iterator[None]:
        """Around a stage's work on a batch; work that fails does not count."""
        start = time.perf_counter()
        yield
        self.worked(stage, batch, start, time.perf_counter())

    def worked(self, stage: str, batch: int, start: float, stop: float) -> None:
        """Records that a stage worked on a batch from ``start`` to ``stop``, seconds of ``time.perf_counter``."""
        with self._lock:
            total = self._stages[stage]
            total.busy += stop - start
            total.batches += 1
            if self.trace:
                self._events.append((stage, batch, start, stop))

    def waited(self, stage: str, seconds: float) -> None:
        """Records that a stage waited for its neighbours."""
        with self._lock:
            self._stages[stage].wait += seconds

    def depth(self, channel: str, items: int) -> None:
        """Records how many items a channel held when one was taken, including the taken one."""
        with self._lock:
            depths = self._depths[channel]
            depths.total += items
            depths.count += 1
            depths.most = max(depths.most, items)
            if self.trace:
                self._depth_events.append((channel, time.perf_counter(), items))

    def rows(self, stack: str, *, unique: int, cached: int) -> None:
        """Records how many unique rows a batch has, and how many of them the device holds already."""
        with self._lock:
            total = self._rows[stack]
            total.unique += unique
            total.cached += cached

    def moved(self, stack: str, *, to_device: int = 0, to_host: int = 0) -> None:
        """Records bytes of rows and slots that travel, including the padding of their static sizes."""
        with self._lock:
            total = self._rows[stack]
            total.to_device += to_device
            total.to_host += to_host

    def sent_batch(self, size: int) -> None:
        """Records bytes of a batch, without rows and slots, on their way to the device."""
        with self._lock:
            self._batch_bytes += size

    def summary(self, seconds: float) -> JsonObject:
        """Totals since the last ``reset``, in JSON types.

        Args:
          seconds: Seconds of training that they cover.

        Returns:
          By stage, its busy and waiting seconds; ``overlap_efficiency``, the busiest stage's share of ``seconds`` (1
          where all other work overlaps with it), and its name; by stack, the unique rows, how many of them the device
          held, and bytes of rows and slots that travelled; bytes of the batches themselves; by channel, its mean and
          greatest depth.
        """
        with self._lock:
            stages = {
                name: {"busy_seconds": total.busy, "wait_seconds": total.wait, "batches": total.batches}
                for name, total in self._stages.items()
            }
            busiest = max(self._stages, key=lambda name: self._stages[name].busy, default=None)
            return {
                "seconds": seconds,
                "stages": stages,
                "busiest_stage": busiest,
                "overlap_efficiency": self._stages[busiest].busy / seconds if busiest and seconds else None,
                "rows": {
                    name: {
                        "unique": total.unique,
                        "cached_on_device": total.cached,
                        "fetched": total.unique - total.cached,
                        "hit_rate": total.cached / total.unique if total.unique else None,
                        "bytes_to_device": total.to_device,
                        "bytes_to_host": total.to_host,
                    }
                    for name, total in self._rows.items()
                },
                "batch_bytes_to_device": self._batch_bytes,
                "queue_depths": {
                    name: {"mean": depths.total / depths.count, "max": depths.most}
                    for name, depths in self._depths.items()
                },
            }

    def write_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes the spans and queue depths as Chrome trace events (JSON), which https://ui.perfetto.dev opens."""
        with self._lock:
            # Copies under the lock, for stages may still work; the file is written without it, which may take seconds.
            events, depths = list(self._events), list(self._depth_events)
        stages = list(dict.fromkeys(stage for stage, _, _, _ in events))
        names: list[JsonObject] = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": i, "args": {"name": stage}}
            for i, stage in enumerate(stages)
        ]
        spans = [
            {
                "name": f"{stage} {batch}",
                "cat": stage,
                "ph": "X",
                "pid": 0,
                "tid": stages.index(stage),
                "ts": self._microseconds(start),
                "dur": 1e6 * (stop - start),
                "args": {"batch": batch},
            }
            for stage, batch, start, stop in events
        ]
        counters = [
            {"name": f"queue {channel}", "ph": "C", "pid": 0, "ts": self._microseconds(at), "args": {"items": items}}
            for channel, at, items in depths
        ]
        write_file(path, json.dumps({"traceEvents": names + spans + counters, "displayTimeUnit": "ms"}))

    def _microseconds(self, at: float) -> float:
        return 1e6 * (at - self._origin)
