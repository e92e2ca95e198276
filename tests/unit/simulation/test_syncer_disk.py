"""A simulated disk keeps what was flushed, and nothing that a crash has torn."""

from __future__ import annotations

import random

from wan_diloco.protocol.events import Record
from wan_diloco.protocol.tape import RunStarted, SyncerStarted, TapeRecord
from wan_diloco.simulation.syncer_disk import SyncerDisk
from wan_diloco.simulation.world_settings import LinkProfile, WorldSettings
from wan_diloco.units import Epoch, LearnerId, Term

STARTED = SyncerStarted(term=Term(1), epoch=Epoch(0))
BEGUN = RunStarted(present=(LearnerId("m0"),), absent=())


def disk_with(told: list[TapeRecord]) -> SyncerDisk:
    disk = SyncerDisk(told.append)
    disk.snapshot(WorldSettings(links=(LinkProfile(),)).fresh_state())
    return disk


def test_what_is_durable_is_told_once_and_survives() -> None:
    told: list[TapeRecord] = []
    disk = disk_with(told)
    disk.write(Record(record=STARTED, durable=True))
    disk.crash(random.Random(1))
    assert told == [STARTED]
    assert disk.restore().term == 1


def test_a_record_that_a_crash_tore_is_as_if_it_had_never_been_written() -> None:
    torn = 0
    for seed in range(40):
        told: list[TapeRecord] = []
        disk = disk_with(told)
        disk.write(Record(record=STARTED, durable=True))
        disk.write(Record(record=BEGUN, durable=True), flushed=False)
        disk.crash(random.Random(seed))
        torn += disk.torn
        assert disk.restore().started == (BEGUN in told), "what survives is told, what doesn't isn't"
    assert torn > 10
