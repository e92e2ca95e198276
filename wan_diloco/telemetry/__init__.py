"""What people and machines see of a run: logs, metrics, the summary, the report."""

from wan_diloco.telemetry.logs import ChangeLogger, Logger, configure_logging, get_logger, route_library_loggers
from wan_diloco.telemetry.metrics import METRICS_FILE, MetricsLog, MetricsWriter, read_metrics
from wan_diloco.telemetry.prometheus import CumulativeCounter, PrometheusMetrics
from wan_diloco.telemetry.records import (
    EvaluationRecord,
    EventRecord,
    LearnerRecord,
    Line,
    MergedContribution,
    MissingLearner,
    Record,
    RoundRecord,
    TrafficRecord,
    WaitingRecord,
)
from wan_diloco.telemetry.summary import SUMMARY_FILE, summarise

__all__ = [
    "METRICS_FILE",
    "SUMMARY_FILE",
    "ChangeLogger",
    "CumulativeCounter",
    "EvaluationRecord",
    "EventRecord",
    "LearnerRecord",
    "Line",
    "Logger",
    "MergedContribution",
    "MetricsLog",
    "MetricsWriter",
    "MissingLearner",
    "PrometheusMetrics",
    "Record",
    "RoundRecord",
    "TrafficRecord",
    "WaitingRecord",
    "configure_logging",
    "get_logger",
    "read_metrics",
    "route_library_loggers",
    "summarise",
]
