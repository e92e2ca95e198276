"""What a service is put together from."""

from __future__ import annotations

from dataclasses import dataclass

from wan_diloco.clock import Clock
from wan_diloco.protocol.syncer_machine import SyncerMachine
from wan_diloco.syncer.evaluation import Curve
from wan_diloco.syncer.fragments_store import FragmentStore, Maths
from wan_diloco.syncer.input_log import InputLog
from wan_diloco.syncer.journal_keeper import JournalKeeper
from wan_diloco.syncer.observer import Observer
from wan_diloco.syncer.plan import LineRates
from wan_diloco.syncer.snapshots import SnapshotKeeper
from wan_diloco.syncer.updates import Packing
from wan_diloco.syncer.workers import Workers

__all__ = ["Parts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of one service.

    Attributes:
        flush_every_s: Between two flushes of the journal, where records don't wait for one; None where they do.
        rates: All caps at the start.
        curve: Evaluations; None for none.
        input_log: None for none.
    """

    machine: SyncerMachine
    store: FragmentStore
    maths: Maths
    keeper: JournalKeeper
    snapshots: SnapshotKeeper
    observer: Observer
    workers: Workers
    clock: Clock
    packing: Packing
    snapshot_every_s: float
    flush_every_s: float | None
    rates: LineRates
    curve: Curve | None
    input_log: InputLog | None
