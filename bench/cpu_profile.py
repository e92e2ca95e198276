"""Where a process's processor time goes: a thread that looks at all the others, again and again.

What a thread has used since the last look is charged to where it is now: by processor time, not by wall time,
so that threads which wait cost nothing. Only as fine as it looks often, and it takes some time of its own.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType

_EVERY_S = 0.002
_SHOWN = 60
# How much of a stack tells one place from another.
_DEPTH = 4


class Profiler:
    """Samples from `start` to `stop`."""

    def __init__(self) -> None:
        """Not sampling yet."""
        self._places: Counter[str] = Counter()
        self._threads: Counter[str] = Counter()
        self._before_ns: dict[int, int] = {}
        self._began_ns = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="profiler", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._began_ns = time.process_time_ns()
        self._thread.start()

    def stop(self) -> str:
        """End, and say where the time went."""
        total = time.process_time_ns() - self._began_ns
        self._over.set()
        self._thread.join()
        self._threads["of gRPC, and others that Python doesn't know"] = total - sum(self._threads.values())
        rows = [f"{1e-9 * total:.2f} s of processor time"]
        for counter in (self._threads, self._places):
            rows += [f"{100 * used / total:5.1f} %  {name}" for name, used in counter.most_common(_SHOWN)]
        return "\n".join(rows)

    def _sample(self) -> None:
        while not self._over.wait(_EVERY_S):
            frames = sys._current_frames()  # noqa: SLF001 - the only way to see other threads
            for thread in threading.enumerate():
                ident = thread.ident or 0
                used_ns = time.clock_gettime_ns(time.pthread_getcpuclockid(ident))
                spent_ns = used_ns - self._before_ns.get(ident, used_ns)
                self._before_ns[ident] = used_ns
                if spent_ns > 0:
                    name = thread.name.partition("_")[0]
                    self._threads[name] += spent_ns
                    self._places[f"{name}: {_place(frames.get(ident))}"] += spent_ns


def _place(frame: FrameType | None) -> str:
    names = []
    while frame is not None and len(names) < _DEPTH:
        names.append(f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(names)
