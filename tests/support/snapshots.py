"""Snapshots for tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from wan_diloco.storage import Snapshot

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


def save_snapshot(
    folder: Path, name: str, tensors: Mapping[str, torch.Tensor | npt.NDArray[np.generic]], manifest: Mapping[str, Any]
) -> Path:
    """Write copies, and leave the caller's tensors to the caller."""
    copies = {key: torch.as_tensor(value).detach().clone().contiguous() for key, value in tensors.items()}
    return Snapshot(tensors=copies, manifest=manifest).write(folder, name)
