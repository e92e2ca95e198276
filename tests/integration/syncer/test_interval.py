"""With `durability = "interval"` a restart gives up what it can't be sure of, and a new epoch begins."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
import torch

from tests.support.syncer import BATCH_TOKENS, tiny_config
from tests.support.syncer_scene import WAIT_S, advance, learners, scene, syncer, until
from wan_diloco.errors import TransportError
from wan_diloco.protocol import syncer_rounds
from wan_diloco.protocol.events import Record
from wan_diloco.protocol.ledger import DiscardReason
from wan_diloco.protocol.messages import RefusalReason
from wan_diloco.storage import Journal
from wan_diloco.syncer.journal_keeper import JournalKeeper
from wan_diloco.syncer.service import SyncerService
from wan_diloco.transport.memory import MemoryNetwork
from wan_diloco.units import FragmentId

CONFIG = tiny_config(syncer={"snapshot_every": "1h", "durability": "interval"})


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setattr(syncer_rounds, "FIRST_WINDOW_S", 0.2)


def test_a_restart_begins_a_new_epoch_and_brings_everybody_into_it(tmp_path):
    async def first():
        async with scene(CONFIG, tmp_path) as (made, group):
            await advance(group, made, 9)
            for learner in group:
                learner.step()
            await made.crash()
        return group, made.versions

    async def second(before, versions):
        async with MemoryNetwork() as network, syncer(network, CONFIG, tmp_path, resume=True) as made:
            await until(lambda: made.service.state.epoch == 1)
            assert made.versions == versions, "a killed process loses nothing that was written"
            async with learners(CONFIG, network.connection, before) as group:
                assert {one.incarnation for one in group} == {1}, "lives stand"
                await until(lambda: all(one.versions == made.service.state.versions for one in group))
                async with asyncio.timeout(WAIT_S):
                    while min(made.versions) <= max(versions):
                        for learner in group:
                            learner.step()
                        await asyncio.sleep(0.01)
            ledger = made.service.state.ledger
            assert made.service.status()["balance"] == 0
            assert ledger.discarded[FragmentId(0)]["syncer_lost"].tokens > 0

    asyncio.run(second(*asyncio.run(first())))


def test_work_on_a_version_of_the_epoch_before_is_refused_and_its_sender_resynced(tmp_path):
    async def first():
        async with scene(CONFIG, tmp_path) as (made, group):
            await advance(group, made, 9)
            await made.crash()
        return group, [list(one.versions) for one in group]

    async def second(before, bases):
        async with (
            MemoryNetwork() as network,
            syncer(network, CONFIG, tmp_path, resume=True) as made,
            learners(CONFIG, network.connection, before) as group,
        ):
            await until(lambda: all(min(one.resyncs) > 0 for one in group))
            state = made.service.state
            assert all(one.versions == state.versions for one in group)
            east, index = group[0], FragmentId(0)
            resynced = list(east.resyncs)
            east.step()
            await until(lambda: made.service._machine.context.membership.members["east"].local_step == east.local_step)
            lost = _lost_tokens(state, index)
            # As if the resync had not reached it yet.
            assert bases[0][index].epoch == 0
            with contextlib.suppress(TransportError):  # refused while it was still writing
                await east.contribute(index, bases[0][index])
            await until(lambda: bool(east.refusals()))
            (refusal,) = east.refusals()
            assert (refusal.reason, refusal.fragment_id) == (RefusalReason.FOREIGN_EPOCH, index)
            await until(lambda: east.resyncs[index] > resynced[index])
            await until(lambda: _lost_tokens(state, index) == lost + BATCH_TOKENS)
            assert not state.pool[index]
            assert made.service.status()["balance"] == 0

    asyncio.run(second(*asyncio.run(first())))


def _lost_tokens(state, fragment_id):
    discarded = state.ledger.discarded[fragment_id]
    return discarded[DiscardReason.SYNCER_LOST].tokens if DiscardReason.SYNCER_LOST in discarded else 0


def test_nothing_is_flushed_for_a_merge_but_for_a_life(tmp_path, monkeypatch):
    flushed, performed = [], []
    record, perform = JournalKeeper.record, SyncerService._perform

    async def recorded(keeper, records, *, durable):
        flushed.append((tuple(type(each).__name__ for each in records), durable))
        await record(keeper, records, durable=durable)

    def performing(service, effect):
        performed.append(effect)
        perform(service, effect)

    monkeypatch.setattr(JournalKeeper, "record", recorded)
    monkeypatch.setattr(SyncerService, "_perform", performing)

    async def story():
        async with scene(CONFIG, tmp_path) as (made, group):
            await advance(group, made, 5)

    asyncio.run(story())
    durable = {type(effect.record).__name__ for effect in performed if isinstance(effect, Record) and effect.durable}
    assert durable == {"SyncerStarted", "ShardsAssigned", "LearnerAdmitted", "RunStarted"}
    assert any("RoundClosed" in names and not flush for names, flush in flushed)


def test_what_is_written_is_flushed_now_and_then(tmp_path, monkeypatch):
    flushes = 0
    sync = Journal.sync

    def counted(journal):
        nonlocal flushes
        flushes += 1
        sync(journal)

    monkeypatch.setattr(Journal, "sync", counted)
    config = tiny_config(syncer={"snapshot_every": "1h", "durability": "interval", "flush_every": "1ms"})

    async def story():
        async with scene(config, tmp_path) as (_, _group):
            before = flushes
            await until(lambda: flushes >= before + 3)

    asyncio.run(story())
