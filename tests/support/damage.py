"""What befalls files on a disk."""

from __future__ import annotations

from pathlib import Path


def segment_file(folder: Path, segment: int = 1) -> Path:
    """Where a journal keeps a segment."""
    return folder / f"{segment:010d}.journal"


def flip(path: Path, offset: int) -> None:
    """Change one bit."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x40
    path.write_bytes(data)
