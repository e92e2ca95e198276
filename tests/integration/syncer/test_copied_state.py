"""A run's folder is copied, and both are resumed: what a learner has of one never gets into the other."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import torch

from tests.support.syncer import tiny_config
from tests.support.syncer_scene import WAIT_S, Learner, advance, crash_after, learners, syncer, until
from wan_diloco.protocol.messages import Welcome
from wan_diloco.telemetry import METRICS_FILE, WaitingRecord, read_metrics
from wan_diloco.transport.memory import MemoryNetwork
from wan_diloco.units import LearnerId

CONFIG = tiny_config(sync={"quorum": 1})
REASON = "another syncer has the same term 2: the state was copied and both were started"


def welcome_of(learner: Learner) -> Welcome:
    (welcome,) = [message for message in learner.heard if isinstance(message, Welcome)]
    return welcome


def goes_to(network: MemoryNetwork, before: Learner) -> Learner:
    """The same process, over another connection, with what it knows of the syncer that it met."""
    again = Learner(network.connection(LearnerId(before.name)), CONFIG, before.name, before.values)
    again.go_on(before)
    again.term, again.term_id = welcome_of(before).term, welcome_of(before).term_id
    return again


async def comes_back(folder: Path, before: Learner) -> tuple[int, int]:
    """A syncer is started again, and a learner comes to it and works; the life and the term that it is in then."""
    async with MemoryNetwork() as network, syncer(network, CONFIG, folder, resume=True) as made:
        again = goes_to(network, before)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(again.run())
            await asyncio.wait_for(again.started.wait(), WAIT_S)
            if again.incarnation > before.incarnation:
                await until(lambda: min(again.resyncs) > 0)
            await advance([again], made, 8)
            status = made.service.status()
            assert status["balance"] == 0
            assert "digest" not in status["rejected"], "it was told before it could find out"
            await again.leave()
        return again.incarnation, welcome_of(again).term


def test_a_learner_that_was_with_one_of_two_copies_is_not_taken_in_by_the_other(tmp_path):
    torch.set_num_threads(1)

    async def both(before):
        async with (
            MemoryNetwork() as here,
            MemoryNetwork() as there,
            syncer(here, CONFIG, tmp_path / "one", resume=True) as one,
            syncer(there, CONFIG, tmp_path / "another", resume=True) as another,
            learners(CONFIG, here.connection, before[:1], names=["east"]) as (east,),
            learners(CONFIG, there.connection, before[1:], names=["west"]) as (west,),
        ):
            assert welcome_of(east).term == welcome_of(west).term == 2
            assert welcome_of(east).term_id != welcome_of(west).term_id
            await advance([east], one, 8)
            await advance([west], another, 8)
            assert one.versions == another.versions, "by their numbers they are the same"
            values = [value.digest for value in one.restored.store.values()]
            assert values != [value.digest for value in another.restored.store.values()], "by their bits they aren't"
            # Another address is its syncer's now: a name was switched, say.
            await east.leave()
            merges = another.versions
            for times in (1, 2):
                stray = goes_to(there, east)
                await asyncio.wait_for(stray.run(), WAIT_S)
                assert stray.heard == [], "nothing is said to it, so that it comes to no harm"
                status = another.service.status()
                assert status["rejected"]["fenced"] == times
                assert status["reasons"]["copy:east"] == f"{REASON}; east is with it: not taken in"
            await advance([west], another, 8)
            assert another.versions > merges, "it goes on with the others"
            assert another.service.status()["balance"] == 0
        return east, west

    before = asyncio.run(crash_after(CONFIG, tmp_path / "one", 5))
    shutil.copytree(tmp_path / "one", tmp_path / "another")
    east, west = asyncio.run(both(before))
    records = [line.record for line in read_metrics(tmp_path / "another" / METRICS_FILE).lines]
    assert any(isinstance(record, WaitingRecord) and REASON in record.reason for record in records)
    assert asyncio.run(comes_back(tmp_path / "one", east)) == (1, 3), "in a higher term of its own its life stands"
    # To a later term of a syncer that it never met: it has other bits under the same numbers.
    assert asyncio.run(comes_back(tmp_path / "one", west)) == (2, 4), "it begins another life"
