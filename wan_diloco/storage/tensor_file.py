"""Tensors in a file, written one by one so that each can be let go of as soon as it is there.

The format is that of safetensors, whose library reads it: a length, a JSON header, then the bytes of all
tensors without a gap. That library's own writer wants all of them until the end.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Final

import xxhash

from wan_diloco.storage.filesystem import write_all

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

__all__ = ["file_digest", "write_tensors"]

_TYPES: Final = {
    "float64": "F64",
    "int64": "I64",
    "float32": "F32",
    "int32": "I32",
    "bfloat16": "BF16",
    "float16": "F16",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
# Readers map the file and want each tensor where its elements' size divides the offset.
_ALIGNMENT: Final = 8
_PIECE_BYTES: Final = 2**20


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], written: Callable[[str], None] | None = None) -> str:
    """Write tensors to a new file, durably.

    Args:
        path: Nothing is there yet.
        tensors: On the CPU. Taken out one by one as they are written: empty at the end.
        written: Told each tensor's name when it isn't needed any more; among those of one type in the order of
            `tensors`.

    Returns:
        What `file_digest` gives of the file.

    Raises:
        OSError: The system refused.
        KeyError: A tensor is of a type that the format doesn't know.
    """
    import torch  # noqa: PLC0415 - see `snapshot`

    # The largest elements first, so that every offset fits its tensor.
    names = sorted(tensors, key=lambda name: -tensors[name].element_size())
    hasher = xxhash.xxh3_128()
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    try:
        head = _header(tensors, names)
        hasher.update(head)
        place = write_all(descriptor, [head], 0)
        for name in names:
            data = tensors.pop(name).detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
            hasher.update(data)
            place += write_all(descriptor, [data], place)
            if written is not None:
                written(name)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return hasher.hexdigest()


def file_digest(path: Path) -> str:
    """xxh3 of a file's bytes, 128 bits in hex: against accidents, not against anybody.

    Raises:
        OSError: It is missing or can't be read.
    """
    hasher = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        piece = bytearray(_PIECE_BYTES)
        while length := file.readinto(piece):
            hasher.update(memoryview(piece)[:length])
    return hasher.hexdigest()


def _header(tensors: dict[str, torch.Tensor], names: list[str]) -> bytes:
    entries = {}
    begin = 0
    for name in names:
        tensor = tensors[name]
        end = begin + tensor.numel() * tensor.element_size()
        kind = _TYPES[str(tensor.dtype).removeprefix("torch.")]
        entries[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
