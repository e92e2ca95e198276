"""The process group of a region or a baseline: who is in it, and averages over it. gloo, on CPUs.

Outside torchrun a process is a group by itself; under torchrun, or anything that sets its variables, the
variables decide.
"""

from __future__ import annotations

import datetime as dt
import os
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined] # re-exported without saying so
    FileStore,
    HashStore,
    Store,
    TCPStore,
)

from wan_diloco.errors import ConfigError, TransportError
from wan_diloco.protocol.deadlines import GROUP_MEET_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

__all__ = ["Meeting", "Region", "file_group", "learner_group", "torchrun_meeting", "torchrun_variables"]

_TIMEOUT: Final = dt.timedelta(seconds=GROUP_MEET_S)
_VARIABLES: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_AGENT_STORE: Final = "TORCHELASTIC_USE_AGENT_STORE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """This process's place in its group."""

    rank: int
    world_size: int

    def average(self, parameters: list[torch.Tensor], loss: float) -> float:
        """Replace each gradient by the mean over the group, in one message.

        Returns:
            The mean of the losses.

        Raises:
            TransportError: Somebody of the group is gone.
        """
        if self.world_size == 1:
            return loss
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flat = torch.cat([torch.tensor([loss]), *(gradient.flatten() for gradient in gradients)])
        try:
            dist.all_reduce(flat)
        except RuntimeError as exc:
            raise TransportError(f"a process of the group is gone: {exc}") from exc
        flat /= self.world_size
        start = 1
        for gradient in gradients:
            gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
            start += gradient.numel()
        return float(flat[0])


def torchrun_variables() -> dict[str, str]:
    """The variables of torchrun that this process was started with; empty outside it."""
    return {name: os.environ[name] for name in (*_VARIABLES, _AGENT_STORE) if name in os.environ}


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where torchrun has the processes of a region meet.

    Attributes:
        rank, world_size: This process's number among how many.
        address, port: Of the store.
        is_master: Whether the store is this process's.
    """

    rank: int
    world_size: int
    address: str
    port: int
    is_master: bool


def torchrun_meeting(variables: Mapping[str, str]) -> Meeting | None:
    """What torchrun's variables say; None outside it. Nobody is waited for.

    Args:
        variables: See `torchrun_variables`.

    Raises:
        ConfigError: Some are missing, or aren't numbers.
    """
    if not variables:
        return None
    missing = [name for name in _VARIABLES if name not in variables]
    if missing:
        raise ConfigError(f"{', '.join(missing)} isn't set, but {', '.join(variables)} is", where="torchrun")
    try:
        rank, world_size, port = (int(variables[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    except ValueError as exc:
        raise ConfigError("RANK, WORLD_SIZE and MASTER_PORT are numbers", where="torchrun") from exc
    return Meeting(
        rank=rank,
        world_size=world_size,
        address=variables["MASTER_ADDR"],
        port=port,
        # torchrun's agent holds the store itself and says so; without it, rank 0 does.
        is_master=rank == 0 and variables.get(_AGENT_STORE) != "True",
    )


@contextmanager
def learner_group(meeting: Meeting | None) -> Iterator[Region]:
    """Join the group that meets there, or form one alone.

    Args:
        meeting: None outside torchrun.

    Raises:
        TransportError: Not all of them came.
    """
    if meeting is None:
        with _joined(HashStore, 0, 1) as region:
            yield region
        return
    store = partial(
        TCPStore, meeting.address, meeting.port, meeting.world_size, is_master=meeting.is_master, timeout=_TIMEOUT
    )
    with _joined(store, meeting.rank, meeting.world_size) as region:
        yield region


@contextmanager
def file_group(path: Path, rank: int, world_size: int) -> Iterator[Region]:
    """Join a group of processes on this machine that meet at a file, which mustn't exist before the first comes.

    Raises:
        TransportError: Not all of them came.
    """
    with _joined(partial(FileStore, str(path), world_size), rank, world_size) as region:
        yield region


@contextmanager
def _joined(open_store: Callable[[], Store], rank: int, world_size: int) -> Iterator[Region]:
    try:
        dist.init_process_group("gloo", store=open_store(), rank=rank, world_size=world_size, timeout=_TIMEOUT)
    except RuntimeError as exc:
        # What follows in its text is a trace through C++.
        problem = str(exc).partition("\n")[0]
        raise TransportError(f"the group of {world_size} doesn't meet: {problem}") from exc
    try:
        yield Region(rank=rank, world_size=world_size)
    finally:
        dist.destroy_process_group()
