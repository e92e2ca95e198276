"""A syncer's process that kills itself at one call or another of its write path, with SIGKILL."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys

import pytest
import torch

from tests.support.sources import REPOSITORY
from tests.support.syncer import tiny_config
from tests.support.syncer_scene import learners, syncer, until
from wan_diloco.syncer.proof import replay_run
from wan_diloco.transport.memory import MemoryNetwork

CONFIG = tiny_config(syncer={"snapshot_every": "50ms", "keep_updates": 2, "journal_retention": "all"})
# What was promised goes to a file that isn't the syncer's, before the learners hear of it.
PROGRAM = """
import asyncio, json, os, signal, sys
from pathlib import Path
from tests.integration.syncer.test_real_kills import CONFIG
from tests.support.syncer_scene import advance, scene
from wan_diloco.protocol.events import SendToLearner, SendUpdate
from wan_diloco.protocol.messages import Acknowledged
from wan_diloco.storage import Journal
from wan_diloco.syncer.service import SyncerService

folder, left = Path(sys.argv[1]), int(sys.argv[2])
Journal.open.__func__.__defaults__ = (20_000,)
said = (folder / "promised").open("a", buffering=1)
perform = SyncerService._perform

def promised(service, effect):
    if isinstance(effect, SendUpdate):
        said.write(json.dumps([int(effect.header.fragment_id), effect.header.to_version.count]) + "\\n")
    if isinstance(effect, SendToLearner) and isinstance(effect.message, Acknowledged):
        membership = service._machine.context.membership
        name = service._named.learner(effect.session) or membership.of(effect.session).learner_id
        message = effect.message
        said.write(json.dumps([name, int(message.fragment_id), int(message.step_lo), int(message.step_hi)]) + "\\n")
    perform(service, effect)

SyncerService._perform = promised

def deadly(name):
    real = getattr(os, name)
    def call(*args, **options):
        global left
        left -= 1
        if left == 0:
            if name == "pwritev":
                real(args[0], [b"".join(args[1])[:11]], args[2])
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **options)
    setattr(os, name, call)

async def story():
    async with scene(CONFIG, folder) as (made, group):
        for name in ("pwritev", "fsync", "fdatasync", "rename", "replace", "unlink", "rmdir", "mkdir"):
            deadly(name)
        await advance(group, made, 200)

asyncio.run(story())
"""


@pytest.mark.slow
@pytest.mark.parametrize("call", [1, 9, 40, 77, 131, 200, 333, 600])
def test_a_process_that_is_killed_within_a_call_comes_back_with_all_that_it_promised(tmp_path, call):
    torch.set_num_threads(1)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), str(call)], cwd=REPOSITORY, capture_output=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()[-2000:]
    promised = [json.loads(line) for line in (tmp_path / "promised").read_text().splitlines()]

    async def story():
        async with MemoryNetwork() as network, syncer(network, CONFIG, tmp_path, resume=True) as made:
            state = made.service.state
            for item in promised:
                if len(item) == 2:
                    assert state.versions[item[0]].count >= item[1]
            seen = [(record.header.key, int(record.header.step_hi)) for record in _contributions(tmp_path)]
            for learner, fragment, low, high in (item for item in promised if len(item) == 4):
                reached = [
                    step_hi
                    for key, step_hi in seen
                    if (key.learner_id, key.fragment_id, key.step_lo) == (learner, fragment, low)
                ]
                assert max(reached) >= high
            assert made.service.status()["balance"] == 0
            async with learners(CONFIG, network.connection) as group:
                await until(lambda: all([v.count for v in one.versions] == made.versions for one in group))

    asyncio.run(story())
    report = replay_run(tmp_path, CONFIG)
    assert report.difference is None
    assert report.since == "the initial weights"


def _contributions(folder):
    from wan_diloco.protocol.serial import loads
    from wan_diloco.protocol.tape import ContributionJournalled, TapeRecord
    from wan_diloco.storage import JournalReader
    from wan_diloco.syncer.journal_keeper import KIND_TAPE

    with JournalReader.open(folder / "state" / "journal") as journal:
        tape = [loads(TapeRecord, head.meta) for _, head in journal.records() if head.kind == KIND_TAPE]
    return [record for record in tape if isinstance(record, ContributionJournalled)]
