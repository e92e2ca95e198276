"""zstd, used so that it can't hurt: own contexts, known sizes, bounded output.

Level 1 only: on quantised updates higher levels are slower and no smaller.
"""

from __future__ import annotations

import threading

import zstandard

from wan_diloco.errors import DecodeError

__all__ = ["compress", "decompress"]

_LEVEL = 1
# Level 1 never uses a window above this; a frame that asks for more is somebody else's.
_WINDOW_BYTES_MAX = 8 * 2**20
# A block of 128 KiB can shrink to 4 bytes: so much input makes at most 8 MiB of output.
_BITE_BYTES = 256


class _Contexts(threading.local):
    """One pair a thread: a context used by two threads at once returns wrong bytes or kills the process."""

    def __init__(self) -> None:
        # Our own frame header carries length and checksum already.
        self.compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES_MAX)


_contexts = _Contexts()


def compress(raw: bytes | memoryview) -> bytes:
    """One zstd frame of these bytes.

    Thread: any; each thread has a context of its own.
    """
    return _contexts.compressor.compress(raw)


def decompress(stored: bytes | memoryview, raw_bytes: int) -> bytes:
    """The bytes whose compressed form this is; one zstd frame or several, with or without a content size.

    Never allocates more than a few MiB beyond `raw_bytes`.

    Args:
        stored: The whole compressed form, nothing after it.
        raw_bytes: The exact length that must come out, >= 1.

    Thread: any.

    Raises:
        DecodeError: It isn't zstd, it is cut short, there is something after it, or the length differs.
    """
    try:
        if zstandard.frame_content_size(stored) == raw_bytes:
            return _contexts.decompressor.decompress(stored, max_output_size=raw_bytes, allow_extra_data=False)
        return _decompress_frames(memoryview(stored), raw_bytes)
    except zstandard.ZstdError as problem:
        raise DecodeError("garbage", f"zstd: {problem}") from problem


def _decompress_frames(stored: memoryview, raw_bytes: int) -> bytes:
    """The slow way, for frames that carry no size or only a part's: bite by bite, so that a bomb is noticed early."""
    parts: list[bytes] = []
    total, position = 0, 0
    frame = _contexts.decompressor.decompressobj()
    while position < len(stored):
        if frame.eof:
            frame = _contexts.decompressor.decompressobj()
        bite = stored[position : position + _BITE_BYTES]
        part = frame.decompress(bite)
        position += len(bite) - len(frame.unused_data)
        total += len(part)
        if total > raw_bytes:
            raise DecodeError("wrong_length", f"a chunk holds more than its {raw_bytes} bytes")
        parts.append(part)
    if not frame.eof:
        raise DecodeError("garbage", "zstd: the last frame is cut short")
    if total != raw_bytes:
        raise DecodeError("wrong_length", f"a chunk should hold {raw_bytes} bytes but holds only {total}")
    return b"".join(parts)
