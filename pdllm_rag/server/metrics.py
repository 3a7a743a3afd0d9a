"""Figures for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pdllm_store import StoreStats
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdllm_rag.answer import AnswerStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_RETRIEVAL = ("first_stage", "draft", "score")


class Metrics(Collector):
    """Counters of one server.

    Attributes:
        gauges: names, and what is read of them at each scrape.
    """

    def __init__(self, store_stats: Callable[[], StoreStats]) -> None:
        self._registry = registry = CollectorRegistry()
        self.gauges: dict[str, Callable[[], float]] = {}
        self._store_stats = store_stats
        self.requests = Counter(
            "pdllm_requests", "Requests answered.", ["method", "route", "status"], registry=registry
        )
        self.seconds = Histogram(
            "pdllm_request_seconds", "From a request to the end of its answer.", ["route"], buckets=_SECONDS,
            registry=registry,
        )  # fmt: skip
        self.ttft = Histogram(
            "pdllm_ttft_seconds", "From a question to its first final text.", buckets=_SECONDS, registry=registry
        )
        self._phases = Histogram(
            "pdllm_phase_seconds", "Of a question, by phase: retrieval, load, decode.", ["phase"], buckets=_SECONDS,
            registry=registry,
        )  # fmt: skip
        self.batch = Histogram(
            "pdllm_batch_questions", "Questions answered together.", buckets=(1, 2, 4, 8, 16, 32), registry=registry
        )
        self._nfe = Counter("pdllm_nfe", "Forward passes of decoding, summed over questions.", registry=registry)
        self._tokens = Counter("pdllm_tokens", "Tokens by kind.", ["kind"], registry=registry)
        self._chunks = Counter(
            "pdllm_chunks", "Chunks read: served from the store (hit) or computed (missed).", ["result"],
            registry=registry,
        )  # fmt: skip
        registry.register(self)

    def answered(self, stats: AnswerStats) -> None:
        """Count an answer."""
        self._phases.labels("retrieval").observe(sum(stats.ms[name] for name in _RETRIEVAL) / 1000)
        for phase in ("load", "decode"):
            self._phases.labels(phase).observe(stats.ms[phase] / 1000)
        self._nfe.inc(stats.nfe)
        counts = {"prompt": stats.prompt_tokens, "context": stats.context_tokens, "answer": stats.tokens}
        for kind, n_tokens in counts.items():
            self._tokens.labels(kind).inc(n_tokens)
        self._chunks.labels("hit").inc(stats.chunks.hit)
        self._chunks.labels("missed").inc(stats.chunks.recomputed)

    def page(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """Nothing is read before the first scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        """What is read at each scrape."""
        for name, read in self.gauges.items():
            yield GaugeMetricFamily(f"pdllm_{name}", f"Now: {name.replace('_', ' ')}.", value=read())
        stats = self._store_stats()
        sizes = GaugeMetricFamily("pdllm_store_bytes", "Of the store, by kind.", labels=["kind"])
        for kind in ("used", "free", "file", "max"):
            if (n_bytes := getattr(stats, f"{kind}_bytes")) is not None:
                sizes.add_metric([kind], n_bytes)
        yield sizes
        for name in ("documents", "chunks", "evicted"):
            yield GaugeMetricFamily(f"pdllm_store_{name}", f"In the store: {name}.", value=getattr(stats, name))
        yield CounterMetricFamily("pdllm_store_evictions", "Chunks evicted, ever.", value=stats.evictions)
        damaged = "Records and rows of the store that failed their check."
        yield CounterMetricFamily("pdllm_store_corrupt", damaged, value=stats.damaged)
