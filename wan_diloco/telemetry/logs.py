"""Structured logs on stderr: for a person at a terminal, as JSON lines otherwise.

Events are snake_case nouns with fields (`fragment_merged`, `round_id=812`); a thing that is *not* done
has its reason logged once per change. The libraries' own loggers go the same way. Tracebacks never
show local variables, since those may hold secrets. Nothing here reads the environment.
"""

from __future__ import annotations

import logging
import sys
from collections import OrderedDict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Literal, TextIO

import structlog

if TYPE_CHECKING:
    from collections.abc import Mapping

    from structlog.typing import EventDict, Processor, WrappedLogger

    from wan_diloco.clock import Clock

__all__ = ["ChangeLogger", "Logger", "configure_logging", "get_logger", "route_library_loggers"]

Logger = structlog.stdlib.BoundLogger

_LIBRARIES: Final = ("torch", "grpc", "asyncio", "concurrent", "numba", "py.warnings")
# Where numba and asyncio talk to their own developers.
_QUIETER: Final = {"numba": logging.WARNING, "asyncio": logging.WARNING}
# Of gRPC's own loop, with a traceback: a peer that was killed can't be told how its call ended, which is no news.
_SERVICER_LOGGER: Final = "grpc._cython.cygrpc"
_STATUS_UNSENT: Final = "ExecuteBatchError raised in core by servicer method"
_KEYS_MAX: Final = 1024


def _calm_unsent_status(record: logging.LogRecord) -> bool:
    """Make one line for developers of what says only that a call's status could not be sent any more."""
    if not record.getMessage().startswith(_STATUS_UNSENT):
        return True
    record.levelno, record.levelname = logging.DEBUG, logging.getLevelName(logging.DEBUG)
    record.exc_info = record.exc_text = None
    return logging.getLogger(record.name).isEnabledFor(logging.DEBUG)


class _Stamp:
    """Adds the wall time of an event, from the clock that the program uses, and what the process is."""

    def __init__(self, clock: Clock, fields: Mapping[str, str | int]) -> None:
        self._clock = clock
        self._fields = dict(fields)

    def __call__(self, logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        del logger, method
        for key, value in self._fields.items():
            event.setdefault(key, value)
        moment = datetime.fromtimestamp(self._clock.wall_s(), tz=UTC)
        event["timestamp"] = moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        return event


def configure_logging(
    clock: Clock,
    *,
    level: str = "INFO",
    style: Literal["auto", "console", "json"] = "auto",
    color: bool | None = None,
    stream: TextIO | None = None,
    fields: Mapping[str, str | int] | None = None,
) -> None:
    """Set up the process's logs; calling it again replaces what was set up.

    Args:
        clock: Gives the wall time of each event.
        level: The lowest level that is shown: "DEBUG", "INFO", "WARNING", "ERROR".
        style: "auto" is "console" at a terminal and "json" elsewhere.
        color: For NO_COLOR (False) and FORCE_COLOR (True); None decides by the stream.
        stream: stderr where not given.
        fields: In every event of the process, whatever its thread: run, region, learner_id.
    """
    target = sys.stderr if stream is None else stream
    tty = target.isatty()
    console = style == "console" or (style == "auto" and tty)
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.PositionalArgumentsFormatter(),
        _Stamp(clock, fields or {}),
        structlog.processors.StackInfoRenderer(),
        structlog.processors.UnicodeDecoder(),
    ]
    last: list[Processor]
    if console:
        last = [
            structlog.dev.ConsoleRenderer(
                colors=tty if color is None else color, exception_formatter=structlog.dev.plain_traceback
            )
        ]
    else:
        last = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
    )
    handler = logging.StreamHandler(target)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)
    logging.captureWarnings(capture=True)
    route_library_loggers()


def route_library_loggers() -> None:
    """Take the handlers away that libraries gave to their own loggers, so that ours is the only one.

    Ordering: again after a library is imported that adds some at import, as torch does.
    """
    for name in list(logging.root.manager.loggerDict):
        # torch's trace logger writes an artifact and has to stay apart.
        if name.split(".")[0] not in _LIBRARIES or name.startswith("torch.__trace"):
            continue
        logger = logging.getLogger(name)
        for handler in list(logger.handlers):
            logger.removeHandler(handler)
        logger.propagate = True
    for name, level in _QUIETER.items():
        logging.getLogger(name).setLevel(max(level, logging.root.level))
    logging.getLogger(_SERVICER_LOGGER).addFilter(_calm_unsent_status)


def get_logger(name: str, **fields: str | int) -> Logger:
    """A logger by the module's name, with fields that every event of it carries."""
    return structlog.stdlib.get_logger(name, **fields)


class ChangeLogger:
    """Logs the reason for a state once per change, however often it is told.

    Thread: one. Owns the last state of each key; the oldest keys are forgotten beyond 1024.

    Args:
        logger: Where changes go.
    """

    def __init__(self, logger: Logger) -> None:
        """Know nothing yet."""
        self._logger = logger
        self._last: OrderedDict[str, str] = OrderedDict()

    def note(self, key: str, reason: str, *, state: str | None = None, **fields: Any) -> bool:
        """Say why a thing is as it is.

        Args:
            key: What it is about, and the event's name: "round_waiting".
            reason: The sentence for a person.
            state: What counts as a change; the reason itself where not given. Needed where the sentence holds
                numbers that always move ("silent 4.1 s").
            fields: More fields of the event.

        Returns:
            Whether it was logged.
        """
        current = reason if state is None else state
        changed = self._last.get(key) != current
        self._last[key] = current
        self._last.move_to_end(key)
        if len(self._last) > _KEYS_MAX:
            self._last.popitem(last=False)
        if changed:
            self._logger.info(key, reason=reason, **fields)
        return changed

    def clear(self, key: str) -> None:
        """Forget a key, so that the next reason is logged even if it is the same again."""
        self._last.pop(key, None)
