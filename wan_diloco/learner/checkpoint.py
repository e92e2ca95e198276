"""A learner's own checkpoint: inner moments and counters in one file, the old one or the new one, never a mix.

Weights aren't in it: they come from the syncer, since what a learner had of its own since the last merge would
be counted twice or not at all. A checkpoint that can't be used is a warning, not an end.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import safetensors
import safetensors.torch

from wan_diloco.errors import CheckpointError, DecodeError, StorageError
from wan_diloco.protocol import serial
from wan_diloco.storage import write_bytes
from wan_diloco.units import LocalStep

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import torch

__all__ = ["CheckpointWriter", "LearnerCounters", "load_checkpoint", "save_checkpoint"]

_FILE: Final = "moments.safetensors"
_COUNTERS: Final = "counters"
_DIGEST: Final = "blake2b"


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerCounters:
    """What a learner has done since its first life.

    Attributes:
        run: Whose checkpoint it is.
        unit: The next data unit.
        global_step: Of the run, when this was so.
    """

    run: str
    local_step: LocalStep
    tokens: int
    unit: int
    global_step: int

    def __post_init__(self) -> None:
        """Refuse negative counters."""
        if min(self.local_step, self.tokens, self.unit, self.global_step) < 0:
            raise ValueError("counters are never negative")


def save_checkpoint(folder: Path, counters: LearnerCounters, tensors: Mapping[str, torch.Tensor]) -> None:
    """Replace the folder's checkpoint.

    Raises:
        StorageError: The disk is full or the system refused; the old one stands.
    """
    _write(folder, _pack(counters, tensors))


def load_checkpoint(folder: Path, run: str) -> tuple[LearnerCounters, dict[str, torch.Tensor]] | None:
    """The folder's checkpoint, or None when there is none.

    Raises:
        CheckpointError: It is damaged, or another run's.
    """
    path = folder / _FILE
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise CheckpointError(f"can't read {path}: {exc.strerror}") from exc
    try:
        tensors = safetensors.torch.load(data)
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        counters = serial.loads(LearnerCounters, metadata.get(_COUNTERS, ""))
    except (safetensors.SafetensorError, DecodeError, OSError) as exc:
        raise CheckpointError(f"{path} is damaged: {exc}") from exc
    if metadata.get(_DIGEST) != _digest(tensors):
        raise CheckpointError(f"{path} is damaged: its tensors aren't those that were saved")
    if counters.run != run:
        raise CheckpointError(f"{path} belongs to the run {counters.run!r}, not {run!r}")
    return counters, tensors


class CheckpointWriter:
    """Writes checkpoints beside the training.

    Owner: the training thread. The values are copied before `save` returns; only the disk is left to the thread.

    Args:
        folder: Made when it isn't there.
        report: Told in one sentence why a checkpoint wasn't written; called on the training thread.
    """

    def __init__(self, folder: Path, report: Callable[[str], None]) -> None:
        """Write nothing yet."""
        self._folder = folder
        self._report = report
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def save(self, counters: LearnerCounters, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Begin to write a checkpoint of this moment, unless one is still being written.

        Returns:
            Whether it was begun.
        """
        if self._writing is not None and not self._writing.done():
            return False
        self._settle()
        self._writing = self._thread.submit(_write, self._folder, _pack(counters, tensors))
        return True

    def close(self) -> None:
        """Wait for what is being written."""
        self._settle()
        self._thread.shutdown()

    def _settle(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            try:
                writing.result()
            except StorageError as exc:
                self._report(f"no checkpoint was written, the last one stands: {exc}")


def _write(folder: Path, data: bytes) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise StorageError(f"can't make the folder {folder}: {exc.strerror}") from exc
    write_bytes(folder / _FILE, data)


def _pack(counters: LearnerCounters, tensors: Mapping[str, torch.Tensor]) -> bytes:
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return safetensors.torch.save(whole, {_COUNTERS: serial.dumps(counters).decode(), _DIGEST: _digest(whole)})


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].reshape(-1).numpy().tobytes())
    return digest.hexdigest()
