"""One flush makes many contributions durable: counted, with many learners at once."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import threading

import torch

from tests.support.syncer import BATCH_TOKENS, tiny_config
from tests.support.syncer_scene import scene, until
from wan_diloco.config import parse_config
from wan_diloco.protocol.messages import Acknowledged
from wan_diloco.syncer.workers import Workers

LEARNERS = 24


def _acknowledged(group) -> int:
    return sum(isinstance(message, Acknowledged) for learner in group for message in learner.heard)


def test_while_one_flush_lasts_the_contributions_of_all_others_gather_for_the_next(tmp_path, monkeypatch):
    torch.set_num_threads(1)
    tree = json.loads(tiny_config(sync={"fragments": 1}, syncer={"snapshot_every": "1h"}).resolved_json())
    tree["regions"] = [{"name": f"r{index}"} for index in range(LEARNERS)]
    tree["sync"]["quorum"] = LEARNERS
    tree["run"]["tokens"] = BATCH_TOKENS * LEARNERS * 100
    config = parse_config(tree)
    flush = os.fdatasync
    flushes = 0
    goes_on = threading.Event()
    goes_on.set()

    def counted(descriptor: int) -> None:
        nonlocal flushes
        flushes += 1
        goes_on.wait()
        flush(descriptor)

    async def story():
        async with scene(config, tmp_path, workers=Workers.threads(1)) as (made, group):
            monkeypatch.setattr(os, "fdatasync", counted)
            asked, all_asked = set(), asyncio.Event()

            async def together(name, contribute, *args, **kwargs):
                # Whoever is asked while a record waits for the disk is asked only after it. A slow machine asks twice.
                asked.add(name)
                if len(asked) == LEARNERS and not all_asked.is_set():
                    goes_on.clear()
                    all_asked.set()
                await all_asked.wait()
                await contribute(*args, **kwargs)

            for learner in group:
                monkeypatch.setattr(
                    learner, "contribute", functools.partial(together, learner.name, learner.contribute)
                )
                learner.step(4)
            stored = made.service._parts.keeper
            try:
                await until(lambda: len(stored._unrecorded) >= LEARNERS - 1)
                before, begun = _acknowledged(group), flushes
            finally:
                goes_on.set()
            await until(lambda: _acknowledged(group) >= LEARNERS)
            return _acknowledged(group) - before, flushes - begun

    acknowledged, flushed = asyncio.run(story())
    assert acknowledged >= LEARNERS - 1
    # The one that ended, the one for all that had gathered, and the close record's.
    assert flushed <= 3
