"""What Prometheus reads at ``/metrics``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from jrec.serving.http.batcher import Batcher
    from jrec.serving.http.follower import Follower
    from jrec.serving.http.memory import Memory

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)

disable_created_metrics()  # a line more for each that says when it was made


class _OfModel(Collector):
    """What the model that is served counts itself."""

    def __init__(self, follower: Follower):
        self._follower = follower


class _UnknownValues(_OfModel):
    """How many values of requests training did not see, by feature."""

    def collect(self) -> Iterator[Metric]:
        if (counts := self._follower.model.unknown) is None:
            return
        values = CounterMetricFamily("jrec_values", "Values of categorical features that were read", labels=["feature"])
        unknown = CounterMetricFamily(
            "jrec_unknown_values", "Of them, those that training did not see", labels=["feature"]
        )
        trained = GaugeMetricFamily(
            "jrec_trained_unknown_share", "Of training's values, those without a row of their own", labels=["feature"]
        )
        # A list: the first request that names candidates adds a feature, in the thread that scores.
        for name, of_feature in list(counts.features.items()):
            values.add_metric([name], of_feature.values)
            unknown.add_metric([name], of_feature.unknown)
            if of_feature.trained is not None:
                trained.add_metric([name], of_feature.trained)
        yield from (values, unknown, trained)


class _Histories(_OfModel):
    """What it remembers of histories."""

    def collect(self) -> Iterator[Metric]:
        if (cache := self._follower.model.history_cache) is None:
            return
        items = CounterMetricFamily(
            "jrec_history_items", "Items of histories, by whether they were computed or kept", labels=["how"]
        )
        items.add_metric(["computed"], cache.computed)
        items.add_metric(["kept"], cache.kept)
        yield items
        yield GaugeMetricFamily("jrec_history_cache_bytes", "Bytes kept of histories", cache.nbytes)
        yield GaugeMetricFamily("jrec_history_cache_histories", "Histories of which something is kept", cache.histories)


class Metrics:
    """Counters of a server. Any thread may count."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "jrec_requests", "Answered requests for scores, by HTTP status", ["code"], registry=self._registry
        )
        self._errors = Counter(
            "jrec_errors", "Requests for scores without scores, by kind", ["kind"], registry=self._registry
        )
        self._rows = Counter("jrec_rows", "Rows that were scored", registry=self._registry)
        self._seconds = self._histogram("jrec_request_seconds", "From a request's arrival to its answer", _SECONDS)
        self._batch_seconds = self._histogram("jrec_batch_seconds", "The model's time for a batch", _SECONDS)
        self._batch_rows = self._histogram("jrec_batch_rows", "Rows of a batch", _ROWS)
        self._batch_requests = self._histogram("jrec_batch_requests", "Requests of a batch", _ROWS)
        self._takeovers = Counter(
            "jrec_takeovers", "Exports and deltas that were taken over or failed", ["outcome"], registry=self._registry
        )
        for outcome in ("taken", "failed"):
            self._takeovers.labels(outcome)

    def watch(self, batcher: Batcher, follower: Follower, memory: Memory) -> None:
        """Shows the queue's length, what requests take, and which export is served; call once."""
        taken = Gauge("jrec_request_bytes", "Bytes that requests take together", registry=self._registry)
        taken.set_function(lambda: memory.taken)
        queue = Gauge("jrec_queue_rows", "Rows that wait for the model", registry=self._registry)
        queue.set_function(lambda: batcher.queued_rows)
        requests = Gauge("jrec_queue_requests", "Requests that wait for the model", registry=self._registry)
        requests.set_function(lambda: batcher.queued_requests)
        step = Gauge("jrec_export_step", "Training steps of the export that is served", registry=self._registry)
        step.set_function(lambda: follower.model.manifest.step)
        age = Gauge("jrec_export_age_seconds", "Since the export that is served was written", registry=self._registry)
        age.set_function(lambda: time.time() - follower.written)
        self._registry.register(_UnknownValues(follower))
        self._registry.register(_Histories(follower))
        self._served = Gauge(
            "jrec_export_info", "The export that is served: 1", ["version", "run"], registry=self._registry
        )

    def answered(self, code: int, kind: str, seconds: float) -> None:
        """Counts a request: its HTTP status, the kind of its error or "", and its time."""
        self._requests.labels(str(code)).inc()
        self._seconds.observe(seconds)
        if kind:
            self._errors.labels(kind).inc()

    def batch(self, *, rows: int, requests: int, seconds: float) -> None:
        """Counts a batch."""
        self._rows.inc(rows)
        self._batch_rows.observe(rows)
        self._batch_requests.observe(requests)
        self._batch_seconds.observe(seconds)

    def takeover(self, count: int, *, failed: bool = False) -> None:
        """Counts exports and deltas."""
        self._takeovers.labels("failed" if failed else "taken").inc(count)

    def text(self, *, version: str, run: str) -> bytes:
        """All of them in Prometheus's text format."""
        self._served.clear()
        self._served.labels(version, run).set(1)
        return generate_latest(self._registry)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, help, registry=self._registry, buckets=buckets)
