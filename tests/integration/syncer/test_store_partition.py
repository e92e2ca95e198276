"""A syncer that is cut off from its store and not from its learners: two go on, and the store has one history."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
import torch

from tests.support.store import hurry, manifests, s3_server
from tests.support.syncer import close, open_tiny, tiny_config
from tests.support.syncer_scene import WAIT_S, advance, learners, syncer, until
from wan_diloco.clock import SystemClock
from wan_diloco.errors import StateTakenOver, StoreError
from wan_diloco.storage import ObjectStore, object_lock
from wan_diloco.syncer.main import _cause
from wan_diloco.syncer.store_link import StoreLink, open_link
from wan_diloco.transport.memory import MemoryNetwork


@pytest.fixture
def s3():
    with s3_server() as server:
        yield server


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    torch.set_num_threads(1)
    hurry(monkeypatch)
    monkeypatch.setattr(object_lock, "WATCH_S", 0.5)


class Gate(ObjectStore):
    """A store that one syncer can be cut off from, and what that syncer has changed in it since it last was."""

    shut = False

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.changed: list[str] = []

    def names(self):
        self._pass()
        return super().names()

    def get_bytes(self, name):
        self._pass()
        return super().get_bytes(name)

    def read_versioned(self, name):
        self._pass()
        return super().read_versioned(name)

    def put_file(self, path, name):
        self._pass()
        super().put_file(path, name)
        self.changed.append(name)

    def put_bytes(self, data, name):
        self._pass()
        super().put_bytes(data, name)
        self.changed.append(name)

    def remove(self, name):
        self._pass()
        super().remove(name)
        self.changed.append(name)

    def write_if(self, name, data, expected):
        self._pass()
        tag = super().write_if(name, data, expected)
        if tag is not None:
            self.changed.append(name)
        return tag

    def _pass(self):
        if self.shut:
            self.changed.clear()
            raise StoreError("nobody answers")


def _bits(store):
    return [
        (value.digest, *(part_N.numpy().tobytes() for part_N in (value.exact_N, value.published_N, value.momentum_N)))
        for value in store.values()
    ]


async def _until_there(condition):
    """Until something is so in the store, which is asked from another thread: both syncers go on meanwhile."""
    async with asyncio.timeout(WAIT_S):
        while not await asyncio.to_thread(condition):  # noqa: ASYNC110 -- nobody says so
            await asyncio.sleep(0.05)


def _has_merges(store):
    """Whether the newest copy is of a run that has merged something."""
    for manifest in manifests(store)[:1]:
        name = next(file.name for file in manifest.files if file.path.endswith("/manifest.json"))
        return max(json.loads(store.get_bytes(name))["values"]["state"]["merges"]) > 0
    return False


def test_of_two_syncers_that_both_have_learners_the_store_has_one_history(tmp_path, s3):
    """One is cut off from the store, not from its learners; by its silence another takes over; then all is healed."""
    config = tiny_config(
        sync={"quorum": 1}, syncer={"store": s3.new_place(), "store_endpoint": s3.endpoint, "snapshot_every": "50ms"}
    )
    clock, place = SystemClock(), (config.syncer.store, config.syncer.store_endpoint)
    store, gate = ObjectStore.open(*place), Gate.open(*place)
    link = StoreLink(gate, clock, threading.Event().wait, take_over=False)
    other, again = (open_link(config, clock, take_over=False) for _ in range(2))

    async def story():
        async with MemoryNetwork() as near, syncer(near, config, tmp_path / "one", link=link) as first:
            async with learners(config, near.connection) as (east, west):
                await advance([east, west], first, 4)
                await _until_there(lambda: _has_merges(store))
            gate.shut = True
            # Nothing of it is under way any more.
            await until(lambda: "renewed" in first.service.status()["reasons"].get("store", ""))
            async with learners(config, near.connection, [east], names=["east"]) as (east,):
                before = first.versions
                await advance([east], first, 6)
                assert min(first.versions) > min(before), "it goes on for whom it can reach"
                async with (
                    MemoryNetwork() as far,
                    syncer(far, config, tmp_path / "two", resume=True, link=other) as second,
                ):
                    async with learners(config, far.connection, [west], names=["west"]) as (west,):
                        await _both_go_on(first, second, east, west)
                        await _until_there(lambda: manifests(store)[0].term == 2)
                        gate.shut = False
                        await until(first.task.done)
                        cause = _cause(first.task.exception())
                        assert isinstance(cause, StateTakenOver)
                        assert cause.exit_code == 77
                        assert gate.changed == []
                        assert manifests(store)[0].term == 2
                    before = second.versions
                    async with learners(config, far.connection, [east, west]) as group:
                        # A round that is due when they have just been resynced has nothing to merge until the next.
                        await advance(group, second, 8, settle=False)
                        await until(lambda: min(second.versions) > max(before) and second.at_rest)
                        assert {one.incarnation for one in group} == {1}
                    assert second.service.status()["balance"] == 0
                    await second.stop()
                    return _bits(second.restored.store)

    bits = asyncio.run(story())
    restored = open_tiny(tmp_path / "three" / "state", config, resume=True, link=again)
    assert _bits(restored.store) == bits
    assert again.lock.term == 3
    assert restored.state.ledger.totals(restored.state.parameters).balance == 0
    again.leave()
    close(restored)


async def _both_go_on(first, second, east, west):
    """Either merges for its own learner, and they are no longer one run."""
    assert (first.service.state.term, second.service.state.term) == (1, 2)
    before = [first.versions, second.versions]
    await advance([east], first, 4)
    await advance([west], second, 4)
    assert min(first.versions) > min(before[0])
    assert min(second.versions) > min(before[1])
    assert {version.epoch for version in second.service.state.versions} == {1}
    assert first.service.state.epoch == 0
