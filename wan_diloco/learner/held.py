"""What an uplink holds of each fragment: the base, what has come since, and what is on its way to the trainer.

Legend: N elements of the fragment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from wan_diloco.algorithm.blocks import BlockTable, build_block_table
from wan_diloco.algorithm.codec import Payload, codec_by_name
from wan_diloco.algorithm.publication import apply_update, digest
from wan_diloco.errors import ConfigError, DecodeError
from wan_diloco.learner.ipc import FragmentPosition, InstallValue
from wan_diloco.protocol.events import Installed, InstallUpdate
from wan_diloco.protocol.messages import SegmentKind, UpdateHeader
from wan_diloco.wire.frames import Buffers, pack_chunks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from wan_diloco.algorithm.layout import Fragment
    from wan_diloco.config import WireSettings
    from wan_diloco.learner.slots import FragmentSlots
    from wan_diloco.units import Version

__all__ = ["HeldFragment"]


class HeldFragment:
    """One fragment, as its uplink knows it.

    Owner: the uplink's event loop. Jobs that a method returns run on the one worker thread, in the order in which
    they were asked for: so a base that a job reads isn't overwritten by a later one.

    Args:
        fragment: Which.
        position: Where the trainer stands with it.
        slots: The memory shared with the trainer.
    """

    def __init__(self, fragment: Fragment, position: FragmentPosition, slots: FragmentSlots) -> None:
        """Take the installed value for the newest there is."""
        self._id = fragment.fragment_id
        self._table: BlockTable = build_block_table(fragment)
        self._slots = slots
        self._slot = position.slot
        self._version, self._resync = position.version, position.resync
        self._base_N = slots.published(self._id, self._slot)
        # What updates are added to; only jobs touch it.
        self._newest_N = self._base_N
        self._applied: tuple[Version, torch.Tensor] | None = None
        self._next: tuple[InstallUpdate, torch.Tensor] | None = None
        self._sent: InstallValue | None = None
        self.outbox_busy = False
        """Whether the last snapshot hasn't been read yet, so that no other may be asked for."""

    def encode_job(self, wire: WireSettings) -> Callable[[], list[bytes]]:
        """Frames of base - snapshot, where the base is what is installed at this moment.

        The job raises NonFiniteError when the difference isn't finite.
        """
        base_N, snapshot_N, table = self._base_N, self._slots.outbox(self._id), self._table

        def encode() -> list[bytes]:
            codec = codec_by_name(wire.codec)
            scales = np.empty(codec.sizes(table).scales_bytes, np.uint8)
            # Only what is packed is ever there as a whole; neither the difference nor its codes are.
            codes = codec.encode_chunks(base_N, table, scales, wire.chunk_bytes, snapshot_N)
            return pack_chunks(codes, scales, chunk_bytes=wire.chunk_bytes, zstd=wire.zstd)

        return encode

    def apply_job(self, header: UpdateHeader, segments: Sequence[Buffers]) -> Callable[[], torch.Tensor]:
        """The value that an update leads to, from the newest held; it is the newest then.

        The job raises DecodeError or NonFiniteError, and the newest stays, when the update can't be used.
        """

        def apply() -> torch.Tensor:
            value_N = self._newest_N
            for segment, buffers in zip(header.segments, segments, strict=True):
                payload = Payload(codes=buffers.codes, scales=buffers.scales)
                try:
                    codec = codec_by_name(segment.codec)
                except ConfigError as exc:
                    raise DecodeError("wrong_codec", str(exc)) from exc
                if segment.kind is SegmentKind.VALUE and not codec.lossless:
                    raise DecodeError("wrong_codec", f"a value doesn't travel as {codec.name}")
                value_N = apply_update(value_N, payload, codec, self._table)
                if digest(value_N) != segment.digest:
                    raise DecodeError("digest", f"fragment {self._id} at {segment.to_version}")
            self._newest_N = value_N
            return value_N

        return apply

    def applied(self, version: Version, value_N: torch.Tensor) -> None:
        """Keep the value that an update led to, until something newer comes."""
        self._applied = (version, value_N)

    def wish(self, install: InstallUpdate) -> None:
        """Have the applied value installed, before long; a later wish takes the place of one that wasn't sent."""
        known = install.version <= self._version and install.resync <= self._resync
        if known or self._applied is None or self._applied[0] != install.version:
            return
        self._next, self._applied = (install, self._applied[1]), None

    def send_job(self) -> tuple[Callable[[], object], InstallValue] | None:
        """Put the wished value into the free slot, then tell the trainer; None when that must wait or isn't wished."""
        if self._next is None or self._sent is not None:
            return None
        (install, value_N), self._next = self._next, None
        slot = 1 - self._slot
        self._sent = InstallValue(install=install, slot=slot)
        free_N = self._slots.published(self._id, slot)
        return (lambda: free_N.copy_(value_N)), self._sent

    def confirmed(self, installed: Installed) -> None:
        """The trainer has installed what was sent; it is the base from now on, and the other slot is free."""
        sent = self._sent
        assert sent is not None, "only what was sent can be installed"
        assert sent.install.version == installed.version, f"{installed.version} isn't {sent.install.version}"
        self._sent = None
        self._slot = sent.slot
        self._version, self._resync = sent.install.version, max(self._resync, sent.install.resync)
        self._base_N = self._slots.published(self._id, self._slot)
