"""The Prometheus metrics of a process, in a registry of its own.

Names end in base units, counters in `_total`; labels come from small sets (region, learner, phase,
reason), never from rounds or steps. Nothing here serves HTTP.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from prometheus_client import Counter, Gauge, Histogram, generate_latest

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["CumulativeCounter", "PrometheusMetrics"]

_PREFIX: Final = "wan_diloco"
# A round takes from milliseconds on a test machine to minutes over a bad link; a step likewise.
_BUCKETS_S: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class CumulativeCounter:
    """A counter whose source keeps the total, as the ledger and the transport do.

    It follows the total upwards and never falls, so that a source which starts again at zero, or at
    what a snapshot said, doesn't take anything back.

    Thread: any.
    """

    def __init__(self, counter: Counter) -> None:
        """Take over a counter that nobody else increments."""
        self._counter = counter
        self._lock = threading.Lock()
        self._totals: dict[tuple[str, ...], int] = {}

    def advance_to(self, total: int, *labels: str) -> None:
        """Raise the child with these labels to a total; a smaller one changes nothing."""
        with self._lock:
            before = self._totals.get(labels, 0)
            child = self._counter.labels(*labels)
            if total > before:
                child.inc(total - before)
                self._totals[labels] = total


class PrometheusMetrics:
    """Every metric of the process.

    Args:
        registry: Injected, so that two of these can live in one process.
        version: The package's version.
        git: The commit, or "unknown".
        proto: The version of the wire contract.
    """

    def __init__(self, registry: CollectorRegistry, *, version: str, git: str, proto: str) -> None:
        """Register all of them."""
        self._registry = registry
        self.rounds_total = Counter(
            f"{_PREFIX}_rounds_total", "Rounds by what became of them", ["outcome"], registry=registry
        )
        self.rejected_total = Counter(
            f"{_PREFIX}_rejected_total", "Messages and contributions refused", ["reason"], registry=registry
        )
        self.wire_bytes_total = CumulativeCounter(
            Counter(
                f"{_PREFIX}_wire_bytes_total",
                "Bytes over the wide-area link",
                ["direction", "region"],
                registry=registry,
            )
        )
        self.tokens_total = CumulativeCounter(
            Counter(f"{_PREFIX}_tokens_total", "Tokens trained", ["learner"], registry=registry)
        )
        self.round_duration_seconds = Histogram(
            f"{_PREFIX}_round_duration_seconds",
            "Time that a phase of a round took",
            ["phase"],
            buckets=_BUCKETS_S,
            registry=registry,
        )
        self.train_step_seconds = Histogram(
            f"{_PREFIX}_train_step_seconds", "Time of an inner step", ["learner"], buckets=_BUCKETS_S, registry=registry
        )
        self.learners_live = Gauge(f"{_PREFIX}_learners_live", "Learners whose lease stands", registry=registry)
        self.quorum_size = Gauge(
            f"{_PREFIX}_quorum_size", "Distinct learners with which the last round closed", registry=registry
        )
        build = Gauge(f"{_PREFIX}_build_info", "Always 1", ["version", "git", "proto"], registry=registry)
        build.labels(version, git, proto).set(1)

    def exposition(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self._registry)
