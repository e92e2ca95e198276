"""Every event as the machine was given it, with its time: enough to do a run's decisions again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, Any

from wan_diloco.errors import ConfigError
from wan_diloco.protocol import serial
from wan_diloco.protocol.events import SyncerEvent

__all__ = ["InputLog"]


class InputLog:
    """A file of lines {"now_s": seconds, "event": event}; the event null stands for the machine's start.

    Owner: the event loop. For debugging only, so nothing is flushed to the disk, and a full one ends the log.

    Args:
        path: `input.jsonl`; appended to.

    Raises:
        ConfigError: The file can't be opened.
    """

    def __init__(self, path: Path) -> None:
        """Open the file."""
        try:
            self._file: IO[str] | None = path.open("a", buffering=1)
        except OSError as exc:
            raise ConfigError(f"can't write the input log: {exc.strerror}", where=str(path)) from exc

    def write(self, event: SyncerEvent | None, now_s: float) -> None:
        """Add an event, before the machine handles it."""
        if self._file is None:
            return
        line: dict[str, Any] = {"now_s": now_s, "event": None if event is None else serial.to_json(event)}
        try:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        except OSError:
            self.close()

    def close(self) -> None:
        """Close the file; later events are dropped."""
        if self._file is not None:
            file, self._file = self._file, None
            file.close()
