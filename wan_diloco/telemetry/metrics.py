"""`metrics.jsonl`: one line a record, appended by any number of processes on this machine.

Metrics never stop training: a write that fails is counted, not raised. One `write` call a line on a
descriptor in append mode keeps the lines of two processes apart.
"""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from wan_diloco.errors import ConfigError
from wan_diloco.telemetry.records import Line, Record, decode_line, encode_line

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from wan_diloco.clock import Clock

__all__ = ["METRICS_FILE", "MetricsLog", "MetricsWriter", "read_metrics"]

METRICS_FILE: Final = "metrics.jsonl"

_TAIL_BYTES: Final = 256 * 1024
_LINE_BYTES_MAX: Final = 4 * 2**20


class MetricsWriter:
    """Appends records to a file, and keeps the newest in memory.

    Thread: any.

    Args:
        path: The file; created where missing.
        clock: Stamps each line.
        origin_s: The clock's `now_s()` at the start of the run. Where not given, a new file starts at zero and
            an old one goes on at its last line, so that elapsed time never falls over a restart. The monotonic clock
            is the machine's: processes that share a file are given the same origin.
        tail_lines: How many lines stay in memory.

    Raises:
        ConfigError: The file can't be opened.
    """

    def __init__(self, path: Path, clock: Clock, *, origin_s: float | None = None, tail_lines: int = 4096) -> None:
        """Open the file for appending."""
        self._clock = clock
        self._lock = threading.Lock()  # owns the two below
        self._dropped = 0
        self._tail: deque[Line] = deque(maxlen=tail_lines)
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            end = _read_end(self._descriptor)
        except OSError as exc:
            raise ConfigError(f"can't write the metrics file: {exc.strerror}", where=str(path)) from exc
        # A writer that was killed may have left half a line; it mustn't swallow the next one.
        self._needs_break = bool(end) and not end.endswith(b"\n")
        self._origin_s = clock.now_s() - _last_elapsed_s(end) if origin_s is None else origin_s

    @property
    def origin_s(self) -> float:
        """What the clock said, or would have said, when the run began."""
        return self._origin_s

    @property
    def dropped(self) -> int:
        """How many records could not be written."""
        with self._lock:
            return self._dropped

    def to_elapsed_s(self, now_s: float) -> float:
        """Seconds since the run began, of a time on the clock's scale."""
        return now_s - self._origin_s

    def write(self, record: Record) -> bool:
        """Stamp a record and append it.

        Returns:
            Whether it was written; a full disk costs the line and nothing else.
        """
        line = Line(elapsed_s=self.to_elapsed_s(self._clock.now_s()), wall_s=self._clock.wall_s(), record=record)
        data = encode_line(line)
        with self._lock:
            self._tail.append(line)
            if self._needs_break:
                data = b"\n" + data
            try:
                written = os.write(self._descriptor, data)
            except OSError:
                written = 0
            whole = written == len(data)
            if written:
                self._needs_break = not whole
            self._dropped += not whole
            return whole

    def tail(self) -> tuple[Line, ...]:
        """The newest lines of this writer, oldest first."""
        with self._lock:
            return tuple(self._tail)

    def close(self) -> None:
        """Close the file; later records are dropped."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        """The writer itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsLog:
    """What a metrics file says.

    Attributes:
        lines: In the order of the file.
        damaged: How many lines couldn't be understood; a torn last one counts.
    """

    lines: tuple[Line, ...]
    damaged: int


def read_metrics(path: Path) -> MetricsLog:
    """Read a metrics file, which may be growing, torn, or missing.

    Raises:
        ConfigError: The file is there and can't be read.
    """
    lines = []
    damaged = 0
    try:
        with path.open("rb") as file:
            while text := file.readline(_LINE_BYTES_MAX):
                if not text.strip():
                    continue
                line = decode_line(text)
                if line is None:
                    damaged += 1
                else:
                    lines.append(line)
    except FileNotFoundError:
        pass
    except OSError as exc:
        raise ConfigError(f"can't read the metrics file: {exc.strerror}", where=str(path)) from exc
    return MetricsLog(lines=tuple(lines), damaged=damaged)


def _read_end(descriptor: int) -> bytes:
    size = os.fstat(descriptor).st_size
    return os.pread(descriptor, _TAIL_BYTES, max(0, size - _TAIL_BYTES))


def _last_elapsed_s(end: bytes) -> float:
    times = [line.elapsed_s for line in map(decode_line, end.splitlines()) if line is not None]
    return max((time for time in times if math.isfinite(time)), default=0.0)
