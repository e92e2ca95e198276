"""The syncer's service with real bytes and real maths, over the memory transport."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
import threading

import pytest
import torch

from tests.support.syncer import close, open_tiny, tiny_config
from tests.support.syncer_scene import Learner, advance, learners, scene, syncer, until
from tests.support.values import values_of
from wan_diloco.algorithm.codec import Payload
from wan_diloco.errors import StorageError
from wan_diloco.protocol import serial
from wan_diloco.protocol.events import SyncerEvent
from wan_diloco.protocol.messages import RefusalReason, ResyncRequest, Stop
from wan_diloco.protocol.syncer_machine import SyncerMachine
from wan_diloco.protocol.syncer_state import SyncerState
from wan_diloco.protocol.tape import FragmentPublished, TapeRecord
from wan_diloco.storage import Snapshot
from wan_diloco.storage.journal import Journal
from wan_diloco.syncer import journal_keeper, spool
from wan_diloco.syncer.journal_keeper import KIND_TAPE
from wan_diloco.syncer.workers import Workers
from wan_diloco.transport.memory import MemoryNetwork
from wan_diloco.units import FragmentId, LearnerId


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setattr(journal_keeper, "JOURNAL_RETRY_FIRST_S", 0.01)


def _lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rounds_close_and_every_learner_holds_the_published_bits(tmp_path):
    async def story():
        async with scene(tiny_config(), tmp_path) as (made, group):
            await advance(group, made, 9)
            for learner in group:
                await until(lambda one=learner: [v.count for v in one.versions] == made.versions)
                for index, value in enumerate(made.restored.store.values()):
                    assert torch.equal(learner.values[index], value.published_N)
            return made.service.status(), made.versions

    status, versions = asyncio.run(story())
    assert min(versions) >= 2
    assert status["balance"] == 0
    assert status["rounds"] == sum(versions)
    assert status["participation"] == 1.0
    assert status["rejected"] == {}
    lines = _lines(tmp_path / "metrics.jsonl")
    rounds = [line for line in lines if line["kind"] == "round"]
    assert len(rounds) == sum(versions)
    assert {item["learner"] for line in rounds for item in line["merged"]} == {"east", "west"}
    assert all(line["opened_s"] <= line["quorate_s"] <= line["closed_s"] <= line["published_s"] for line in rounds)
    traffic = {line["region"]: line for line in lines if line["kind"] == "traffic"}
    assert min(traffic["east"][key] for key in ("uplink_bytes", "downlink_bytes", "control_bytes")) > 0
    newest = {line["region"]: line["local_step"] for line in lines if line["kind"] == "learner"}
    assert newest == {"east": 9, "west": 9}
    kinds = {line["type"] for line in _lines(tmp_path / "tape.jsonl")}
    assert {"SyncerStarted", "RunStarted", "RoundClosed", "FragmentPublished"} <= kinds


@pytest.mark.parametrize(("codec", "in_chunks"), [("int4", False), ("int4", True), ("f32", True)])
def test_a_killed_syncer_comes_back_to_the_same_bits_and_goes_on(tmp_path, monkeypatch, codec, in_chunks):
    config = tiny_config(wire={"codec": codec})
    if in_chunks:
        monkeypatch.setattr(spool, "_WHOLE_BYTES_MAX", 0)

    async def first():
        async with scene(config, tmp_path) as (made, group):
            await advance(group, made, 9)
            await made.crash()
        return values_of(made.restored.store), made.service.state

    async def second(before, state):
        async with MemoryNetwork() as network, syncer(network, config, tmp_path, resume=True) as made:
            assert before == values_of(made.restored.store)
            assert made.service.state.versions == state.versions
            assert made.service.state.units == state.units
            old = made.versions
            # Learners in a new life, with nothing but the initial weights: they are brought up to date first.
            async with learners(config, network.connection) as group:
                await until(lambda: all([v.count for v in one.versions] == old for one in group))
                await advance(group, made, 5)
                assert {one.incarnation for one in group} == {2}
            assert min(made.versions) > min(old)
            assert made.service.state.term == 2
            assert made.service.status()["balance"] == 0
            return sum(made.versions)

    before, state = asyncio.run(first())
    assert min(value[0].count for value in before) >= 2
    metrics = tmp_path / "metrics.jsonl"
    # The last round that was published before the kill didn't make it into the metrics.
    kept = [line for line in metrics.read_text().splitlines(keepends=True) if '"kind":"round"' not in line]
    metrics.write_text("".join(kept))
    published = asyncio.run(second(before, state))
    assert len({line["round_id"] for line in _lines(metrics) if line["kind"] == "round"}) == published


@pytest.mark.parametrize("one_is_due", [False, True])
def test_a_drained_syncer_leaves_a_snapshot_with_everything_in_it(tmp_path, one_is_due):
    config = tiny_config()

    async def first():
        async with scene(config, tmp_path) as (made, group):
            await advance(group, made, 5)
            if one_is_due:
                made.service._next_snapshot_s = 0.0
            await made.stop()
            return values_of(made.restored.store)

    before = asyncio.run(first())
    assert max(value[0].count for value in before) >= 1
    restored = open_tiny(tmp_path / "state", config, resume=True)
    assert before == values_of(restored.store)
    assert restored.tape == ()
    close(restored)


@pytest.mark.parametrize("in_chunks", [False, True])
def test_wherever_the_journal_is_cut_the_state_before_the_cut_comes_back(tmp_path, monkeypatch, in_chunks):
    config = tiny_config()
    if in_chunks:
        monkeypatch.setattr(spool, "_WHOLE_BYTES_MAX", 0)

    async def first():
        async with scene(config, tmp_path / "run") as (made, group):
            await advance(group, made, 5)
            await made.crash()
            return values_of(made.restored.store)

    (tmp_path / "run").mkdir()
    at_end = asyncio.run(first())
    folder = tmp_path / "run" / "state"
    segment = folder / "journal" / "0000000001.journal"
    whole = segment.read_bytes()
    with Journal.open(folder / "journal") as journal:
        records = [(ref, head) for ref, head in journal.records() if head.kind == KIND_TAPE]
    published = 0
    for ref, head in records:
        # Cut inside the record, then right behind it.
        for end, more in ((ref.offset + ref.length - 3, 0), (ref.offset + ref.length, 1)):
            shutil.copytree(folder, tmp_path / "cut")
            (tmp_path / "cut" / "journal" / segment.name).write_bytes(whole[:end])
            restored = open_tiny(tmp_path / "cut", config, resume=True)
            record = serial.from_json(TapeRecord, json.loads(head.meta))
            expected = published + (more and isinstance(record, FragmentPublished))
            assert sum(value.version.count for value in restored.store.values()) == expected
            assert [value.digest for value in restored.store.values()] == restored.state.digests
            assert sum(map(abs, (restored.state.ledger.totals(restored.state.parameters).balance,))) == 0
            if end == records[-1][0].offset + records[-1][0].length:
                assert at_end == values_of(restored.store)
            close(restored)
            shutil.rmtree(tmp_path / "cut")
        published = expected
    assert published == sum(value[0].count for value in at_end) >= 2


class FullDisk:
    """A journal that takes nothing while `full`."""

    def __init__(self, journal) -> None:
        self._journal = journal
        self.full = False
        self.refused = 0

    def append(self, kind, meta, payload=()):
        if self.full:
            self.refused += 1
            raise StorageError("can't append: the disk or the quota is full; free some space")
        return self._journal.append(kind, meta, payload)

    def __getattr__(self, name):
        return getattr(self._journal, name)


class LostDisk(FullDisk):
    """A journal that can't flush."""

    def append(self, kind, meta, payload=()):
        return self._journal.append(kind, meta, payload)

    def sync(self):
        if self.full:
            raise StorageError("the journal couldn't be flushed and must be opened anew")
        self._journal.sync()


def _on(disk_class, disks):
    def prepare(restored):
        disks.append(disk_class(restored.journal))
        return dataclasses.replace(restored, journal=disks[0])

    return prepare


def test_while_the_disk_is_full_the_syncer_answers_and_afterwards_goes_on(tmp_path):
    disks = []

    async def story():
        async with scene(tiny_config(), tmp_path, prepare=_on(FullDisk, disks)) as (made, group):
            await advance(group, made, 1)
            disks[0].full = True
            for learner in group:
                learner.step(4)
            await until(lambda: "the disk" in made.service.status()["reasons"].get("journal", ""))
            refused = disks[0].refused
            await until(lambda: disks[0].refused >= refused + 3)
            assert made.versions == [0, 0]
            disks[0].full = False
            await until(lambda: max(made.versions) >= 1)
            assert "journal" not in made.service.status()["reasons"]

    asyncio.run(story())
    waits = [line["reason"] for line in _lines(tmp_path / "metrics.jsonl") if line["kind"] == "waiting"]
    assert any("disk" in reason for reason in waits)


def test_a_syncer_that_is_stopped_does_not_wait_for_space(tmp_path):
    disks = []

    async def story():
        async with scene(tiny_config(), tmp_path, prepare=_on(FullDisk, disks)) as (made, group):
            await advance(group, made, 1)
            disks[0].full = True
            await group[0].leave()
            await until(lambda: len(made.service._sessions) == 1)
            again = Learner(made.network.connection(group[0].name), tiny_config(), group[0].name, group[0].values)
            task = asyncio.get_running_loop().create_task(again.run())
            # Its new life must be on the disk before it is welcomed.
            await until(lambda: "journal" in made.service.status()["reasons"])
            made.service.stop()
            await until(made.task.done)
            assert made.task.exception().subgroup(StorageError) is not None
            await again.leave()
            await task

    asyncio.run(story())


def test_a_merge_whose_publication_does_not_fit_is_published_later_and_merged_once(tmp_path):
    class NoRoomForPublications(FullDisk):
        def append(self, kind, meta, payload=()):
            return super().append(kind, meta, payload) if kind == 3 else self._journal.append(kind, meta, payload)

    disks = []

    async def story():
        async with scene(tiny_config(), tmp_path, prepare=_on(NoRoomForPublications, disks)) as (made, group):
            disks[0].full = True
            for learner in group:
                learner.step(4)
            await until(lambda: disks[0].refused >= 2)
            await until(lambda: "storage" in made.service.status()["waiting"])
            disks[0].full = False
            await until(lambda: max(made.versions) >= 1 and made.at_rest)
            assert made.service.status()["balance"] == 0
            return values_of(made.restored.store)

    after = asyncio.run(story())
    # The journal's contributions, merged once by a replay from the very beginning, give these values.
    shutil.rmtree(max((tmp_path / "state" / "snapshots").iterdir()))
    restored = open_tiny(tmp_path / "state", tiny_config(), resume=True)
    assert restored.tape
    assert after == values_of(restored.store)
    close(restored)


def test_a_journal_that_lost_track_ends_the_service(tmp_path):
    disks = []

    async def story():
        async with scene(tiny_config(), tmp_path, prepare=_on(LostDisk, disks)) as (made, group):
            disks[0].full = True
            for learner in group:
                learner.step(5)
            await until(made.task.done)
            assert made.task.exception().subgroup(StorageError) is not None

    asyncio.run(story())


def test_a_contribution_with_a_nan_is_refused_whole_and_its_sender_resynced(tmp_path):
    def spoil(payload: Payload) -> Payload:
        scales = payload.scales.copy()
        scales[:2] = 0xFF
        return Payload(codes=payload.codes, scales=scales)

    async def story():
        async with scene(tiny_config(), tmp_path) as (made, group):
            west = group[1]
            west.spoil = spoil
            await advance(group, made, 3, settle=False)
            await until(lambda: len(west.refusals()) >= 1)
            assert west.refusals()[0].reason is RefusalReason.NON_FINITE
            # Alone the other makes no quorum: a refused contribution is nobody's.
            assert made.versions == [0, 0]
            assert made.service.status()["rejected"]["non_finite"] >= 1
            await until(lambda: max(west.resyncs) >= 1)
            west.spoil = lambda payload: payload
            await advance(group, made, 2, settle=False)
            await until(lambda: max(made.versions) >= 1)

    asyncio.run(story())
    events = [line for line in _lines(tmp_path / "metrics.jsonl") if line["kind"] == "event"]
    assert any(line["name"] == "contribution_rejected" and "west" in line["detail"] for line in events)


def test_what_strangers_say_is_counted_said_and_known_after_a_crash(tmp_path):
    config = tiny_config()

    async def first():
        async with MemoryNetwork() as network, syncer(network, config, tmp_path) as made:
            stranger = network.connection(LearnerId("nobody"))
            await stranger.connect()
            stranger.send(ResyncRequest(fragment_id=FragmentId(0), reason=RefusalReason.DIGEST))
            await until(lambda: made.service.status()["rejected"] == {"garbage": 1})
            # It is noted in the background, and a crash right now would lose it.
            await until(lambda: "garbage" in (tmp_path / "tape.jsonl").read_text())
            await stranger.close()
            await made.crash()

    async def second():
        async with MemoryNetwork() as network, syncer(network, config, tmp_path, resume=True) as made:
            return made.service.status()["rejected"]

    asyncio.run(first())
    events = [line for line in _lines(tmp_path / "metrics.jsonl") if line["kind"] == "event"]
    assert [line["name"] for line in events if "before any Hello" in line["detail"]] == ["call_refused"]
    assert asyncio.run(second()) == {"garbage": 1}


def test_a_learner_that_was_away_is_brought_up_to_date_by_the_value(tmp_path):
    config = tiny_config(sync={"quorum": 1}, syncer={"keep_updates": 1})

    async def story():
        async with MemoryNetwork() as network, syncer(network, config, tmp_path) as made:
            async with learners(config, network.connection) as group:
                await advance(group, made, 9)
            assert min(made.versions) >= 2
            async with learners(config, network.connection) as group:
                await until(lambda: all([v.count for v in one.versions] == made.versions for one in group))
                for index, value in enumerate(made.restored.store.values()):
                    assert torch.equal(group[0].values[index], value.published_N)

    asyncio.run(story())


def test_the_input_log_makes_a_fresh_machine_decide_the_same(tmp_path):
    async def story():
        async with scene(tiny_config(), tmp_path, workers=Workers.inline(), input_log=True) as (made, group):
            await advance(group, made, 6)
            await made.stop()
            return made.service

    service = asyncio.run(story())
    state = SyncerState(
        parameters=service.state.parameters,
        initial_digests=service.state.initial_digests,
        keep_updates=service.state.keep_updates,
    )
    machine = SyncerMachine(service._machine.context.settings, state)
    for line in _lines(tmp_path / "input.jsonl"):
        if line["event"] is None:
            machine.start(line["now_s"])
        else:
            machine.handle(serial.from_json(SyncerEvent, line["event"]), line["now_s"])
    assert sum(version.count for version in state.versions) >= 2
    assert state.digests == service.state.digests
    assert state.totals == service.state.totals


def test_snapshots_drop_the_journal_that_nothing_needs(tmp_path, monkeypatch):
    monkeypatch.setattr(Journal.open.__func__, "__defaults__", (30_000,))
    config = tiny_config(syncer={"snapshot_every": "1ms", "keep_updates": 1})

    async def story():
        async with scene(config, tmp_path) as (made, group):
            await advance(group, made, 40)
            await until(lambda: made.restored.journal.segments[0] > 1)
            await made.crash()
            return values_of(made.restored.store)

    before = asyncio.run(story())
    assert len(list((tmp_path / "state" / "snapshots").glob("state-*"))) == 2
    restored = open_tiny(tmp_path / "state", config, resume=True)
    assert before == values_of(restored.store)
    close(restored)


def test_the_run_ends_at_its_last_step_and_the_learners_are_told(tmp_path):
    async def story():
        async with scene(tiny_config(run={"tokens": 32 * 2 * 8}), tmp_path) as (made, group):
            await advance(group, made, 8)
            await asyncio.wait_for(asyncio.shield(made.task), 20)
            assert made.service.finished
            assert all(any(isinstance(message, Stop) for message in learner.heard) for learner in group)
            assert made.service.status()["balance"] == 0

    asyncio.run(story())


def test_a_snapshot_that_is_being_written_at_the_end_is_not_written_twice(tmp_path, monkeypatch):
    """Given up half way it would be on the disk, and the last one would be another of the same moment."""
    written, go_on = [], threading.Event()
    write = Snapshot.write

    def slow(snapshot, folder, name, *more):
        assert go_on.wait(30.0)
        written.append(snapshot.manifest["last_tape"])
        write(snapshot, folder, name, *more)

    async def story():
        async with scene(tiny_config(syncer={"snapshot_every": "1h"}), tmp_path) as (made, group):
            await advance(group, made, 5)
            monkeypatch.setattr(Snapshot, "write", slow)
            made.service._next_snapshot_s = 0.0
            made.service._inbox.wake.set()
            await until(lambda: made.service._snapshotting is not None)
            made.service.stop()
            await until(made.service._deciding.done)
            go_on.set()
            await made.task

    asyncio.run(story())
    assert written
    assert len(written) == len({tuple(place) for place in written})


@pytest.mark.parametrize("how", ["cancelled", "failed"])
def test_an_upload_that_ends_after_the_service_is_let_go_of(tmp_path, monkeypatch, how):
    # Its stream belongs to the transport, which closes later.
    complete = spool.Spool.complete
    held: list[tuple] = []
    released: list[spool.Spool] = []
    monkeypatch.setattr(spool.Spool, "complete", lambda *said: held.append(said))

    async def story():
        async with scene(tiny_config(), tmp_path) as (made, group):
            await advance(group, made, 9, settle=False)
            await until(lambda: held)
            if how == "failed":
                made.service._storage_failed(StorageError("the journal has lost track"))
                await asyncio.wait([made.task])
            else:
                await made.crash()
            with monkeypatch.context() as patch:
                patch.setattr(held[0][0], "abandon", lambda: released.append(held[0][0]))
                complete(*held[0])

    asyncio.run(story())
    assert released == [held[0][0]]
