"""The syncer's service with real bytes and real maths, over the memory transport."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import pytest
import torch

from tests.integration.syncer.bench import Learner, advance, learners, syncer, until
from tests.support.syncer import tiny_config
from wan_diloco.algorithm.codec import Payload
from wan_diloco.errors import StorageError
from wan_diloco.protocol import serial
from wan_diloco.protocol.events import SyncerEvent
from wan_diloco.protocol.messages import RefusalReason
from wan_diloco.protocol.syncer_machine import SyncerMachine
from wan_diloco.syncer import journal_keeper
from wan_diloco.syncer.workers import Workers
from wan_diloco.transport.memory import MemoryNetwork


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setattr(journal_keeper, "_RETRY_FIRST_S", 0.01)


def _tensors(store):
    return [(value.version, value.digest, value.exact_N, value.published_N, value.momentum_N) for value in store.values()]


def _assert_same(left, right):
    for one, other in zip(left, right, strict=True):
        assert one[:2] == other[:2]
        assert all(torch.equal(a, b) for a, b in zip(one[2:], other[2:], strict=True))


def _lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rounds_close_and_every_learner_holds_the_published_bits(tmp_path):
    async def scene():
        config = tiny_config()
        async with MemoryNetwork() as network, syncer(network, config, tmp_path) as made:
            async with learners(network, config, made, "east", "west") as group:
                await advance(group, made, 9)
                await until(lambda: min(made.versions) >= 2)
                for learner in group:
                    await until(lambda one=learner: [v.count for v in one.versions] == made.versions)
                    for index, value in enumerate(made.restored.store.values()):
                        assert torch.equal(learner.values[index], value.published_N)
                status = made.service.status()
        assert status["balance"] == 0
        assert status["rounds"] == sum(made.versions)
        assert status["participation"] == 1.0
        assert status["rejected"] == {}

    asyncio.run(scene())
    rounds = [line for line in _lines(tmp_path / "metrics.jsonl") if line["kind"] == "round"]
    assert {item["learner"] for line in rounds for item in line["merged"]} == {"east", "west"}
    assert all(line["opened_s"] <= line["quorate_s"] <= line["closed_s"] <= line["published_s"] for line in rounds)
    traffic = {line["region"]: line for line in _lines(tmp_path / "metrics.jsonl") if line["kind"] == "traffic"}
    assert min(traffic["east"][key] for key in ("uplink_bytes", "downlink_bytes", "control_bytes")) > 0
    kinds = {line["type"] for line in _lines(tmp_path / "tape.jsonl")}
    assert {"SyncerStarted", "RunStarted", "RoundClosed", "FragmentPublished"} <= kinds


@pytest.mark.parametrize("codec", ["int4", "f32"])
def test_a_killed_syncer_comes_back_to_the_same_bits_and_goes_on(tmp_path, codec):
    async def first(config):
        async with MemoryNetwork() as network, syncer(network, config, tmp_path) as made:
            async with learners(network, config, made, "east", "west") as group:
                await advance(group, made, 9)
                await until(lambda: min(made.versions) >= 2)
                await made.crash()
            return _tensors(made.restored.store), made.service.state

    async def second(config, before, state):
        async with MemoryNetwork() as network, syncer(network, config, tmp_path, resume=True) as made:
            _assert_same(before, _tensors(made.restored.store))
            assert made.service.state.versions == state.versions
            assert made.service.state.units == state.units
            old = made.versions
            async with learners(network, config, made, "east", "west") as group:
                await until(lambda: all([v.count for v in one.versions] == old for one in group))
                await advance(group, made, 9)
                await until(lambda: min(made.versions) >= min(old) + 1)
                assert {one.incarnation for one in group} == {2}
            assert made.service.state.term == 2

    config = tiny_config(wire={"codec": codec})
    before, state = asyncio.run(first(config))
    assert min(value[0].count for value in before) >= 2
    asyncio.run(second(config, before, state))


def test_a_drained_syncer_leaves_a_snapshot_with_everything_in_it(tmp_path):
    async def first(config):
        async with MemoryNetwork() as network, syncer(network, config, tmp_path) as made:
            async with learners(network, config, made, "east", "west") as group:
                await advance(group, made, 5)
                await until(lambda: max(made.versions) >= 1)
            await made.stop()
            return _tensors(made.restored.store)

    async def second(config, before):
        async with MemoryNetwork() as network, syncer(network, config, tmp_path, resume=True) as made:
            _assert_same(before, _tensors(made.restored.store))
            assert made.restored.tape == ()

    config = tiny_config()
    before = asyncio.run(first(config))
    asyncio.run(second(config, before))


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


def test_while_the_disk_is_full_the_syncer_answers_and_afterwards_goes_on(tmp_path):
    disks = []

    def prepare(restored):
        disks.append(FullDisk(restored.journal))
        return dataclasses.replace(restored, journal=disks[0])

    async def scene():
        config = tiny_config()
        async with MemoryNetwork() as network, syncer(network, config, tmp_path, prepare=prepare) as made:
            async with learners(network, config, made, "east", "west") as group:
                await advance(group, made, 1)
                disks[0].full = True
                for learner in group:
                    learner.step(4)
                await until(lambda: "the disk" in network.fetch_status()["reasons"].get("journal", ""))
                refused = disks[0].refused
                await until(lambda: disks[0].refused >= refused + 3)
                assert made.versions == [0, 0]
                disks[0].full = False
                await until(lambda: max(made.versions) >= 1)
                assert "journal" not in network.fetch_status()["reasons"]

    asyncio.run(scene())
    waits = [line["reason"] for line in _lines(tmp_path / "metrics.jsonl") if line["kind"] == "waiting"]
    assert any("disk" in reason for reason in waits)


def test_a_journal_that_lost_track_ends_the_service(tmp_path):
    class Broken(FullDisk):
        def sync(self):
            if self.full:
                raise StorageError("the journal couldn't be flushed and must be opened anew")
            self._journal.sync()

    disks = []

    def prepare(restored):
        disks.append(Broken(restored.journal))
        return dataclasses.replace(restored, journal=disks[0])

    async def scene():
        config = tiny_config()
        async with MemoryNetwork() as network, syncer(network, config, tmp_path, prepare=prepare) as made:
            async with learners(network, config, made, "east", "west") as group:
                disks[0].full = True
                for learner in group:
                    learner.step(5)
                await until(made.task.done)
                assert made.task.exception().subgroup(StorageError) is not None

    asyncio.run(scene())


@pytest.mark.parametrize("quorum", [2])
def test_a_contribution_with_a_nan_is_refused_whole_and_its_sender_resynced(tmp_path, quorum):
    def spoil(payload: Payload) -> Payload:
        scales = payload.scales.copy()
        scales[:2] = 0xFF
        return Payload(codes=payload.codes, scales=scales)

    async def scene():
        config = tiny_config(sync={"quorum": quorum})
        async with MemoryNetwork() as network, syncer(network, config, tmp_path) as made:
            async with learners(network, config, made, "east", "west") as group:
                west: Learner = group[1]
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

    asyncio.run(scene())
    events = [line for line in _lines(tmp_path / "metrics.jsonl") if line["kind"] == "event"]
    assert any(line["name"] == "contribution_rejected" and "west" in line["detail"] for line in events)


def test_the_input_log_makes_a_fresh_machine_decide_the_same(tmp_path):
    async def scene():
        config = tiny_config()
        async with (
            MemoryNetwork() as network,
            syncer(network, config, tmp_path, workers=Workers.inline(), input_log=True) as made,
        ):
            async with learners(network, config, made, "east", "west") as group:
                await advance(group, made, 6)
                await until(lambda: max(made.versions) >= 1)
            await made.stop()
            return made

    made = asyncio.run(scene())
    state = type(made.service.state)(
        parameters=made.service.state.parameters,
        initial_digests=made.service.state.initial_digests,
        keep_updates=made.service.state.keep_updates,
    )
    machine = SyncerMachine(made.service._machine.context.settings, state)
    for line in _lines(tmp_path / "input.jsonl"):
        if line["event"] is None:
            machine.start(line["now_s"])
        else:
            machine.handle(serial.from_json(SyncerEvent, line["event"]), line["now_s"])
    assert state.versions == made.service.state.versions
    assert state.digests == made.service.state.digests
    assert state.totals == made.service.state.totals


def test_snapshots_drop_the_journal_that_nothing_needs(tmp_path, monkeypatch):
    from wan_diloco.storage import journal

    monkeypatch.setattr(journal, "SEGMENT_BYTES", 30_000)
    monkeypatch.setattr(journal.Journal.open.__func__, "__defaults__", (30_000,))

    async def scene():
        config = tiny_config(syncer={"snapshot_every": "1ms", "keep_updates": 1})
        async with MemoryNetwork() as network, syncer(network, config, tmp_path) as made:
            async with learners(network, config, made, "east", "west") as group:
                for _ in range(12):
                    await advance(group, made, 4)
                await until(lambda: made.restored.journal.segments[0] > 1)
            await made.stop()
            return _tensors(made.restored.store)

    before = asyncio.run(scene())
    assert len(list((tmp_path / "state" / "snapshots").iterdir())) == 2

    async def again():
        async with MemoryNetwork() as network, syncer(network, tiny_config(syncer={"snapshot_every": "1ms", "keep_updates": 1}), tmp_path, resume=True) as made:
            _assert_same(before, _tensors(made.restored.store))

    asyncio.run(again())


def test_the_run_ends_at_its_last_step_and_the_learners_are_told(tmp_path):
    async def scene():
        config = tiny_config(run={"tokens": 32 * 2 * 8})
        async with MemoryNetwork() as network, syncer(network, config, tmp_path) as made:
            async with learners(network, config, made, "east", "west") as group:
                await advance(group, made, 8)
                await asyncio.wait_for(asyncio.shield(made.task), 20)
                assert made.service.finished
                assert any(type(message).__name__ == "Stop" for message in group[0].heard)
                assert made.service.status()["balance"] == 0

    asyncio.run(scene())
