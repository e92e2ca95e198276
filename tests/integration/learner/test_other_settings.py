"""A learner that was given other settings than the syncer: real processes on both sides."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

from tests.integration.learner.stub_syncer import learner
from tests.integration.syncer.test_process import WAIT_S, syncer_process
from tests.support.syncer_scene import begun_by_one, learners, trains_on
from wan_diloco.errors import EXIT_CONFIG
from wan_diloco.transport.grpc_client import grpc_connection


async def refused(config: Path, address: str, setting: str) -> str:
    """Its one sentence; that its pipe has ended says that no process of it is left."""
    folder = config.parent / "elsewhere"
    async with (
        asyncio.timeout(WAIT_S),
        learner(config, folder, "--syncer", address, "--set", setting, stderr=PIPE) as process,
    ):
        lines = (await process.said()).splitlines()
        assert await process.exit_code() == EXIT_CONFIG, lines
    assert lines[-1:] == [line for line in lines if line.startswith("wan-diloco: ")]
    assert not list(folder.rglob("checkpoint")), "it took no step"
    return lines[-1]


def test_it_ends_with_one_sentence_that_has_both_values_and_the_others_train_on(tmp_path: Path) -> None:
    config = begun_by_one(tmp_path)
    given = tmp_path / "given.json"
    given.write_text(config.resolved_json())

    async def story() -> dict[str, Any]:
        async with syncer_process(tmp_path) as process:
            address = await process.address()
            async with learners(config, lambda _: grpc_connection(address), names=["west"]) as (west,):
                await trains_on(address, west)
                # Its layout and its weights differ too; what is named is what somebody wrote.
                assert await refused(given, address, "model.dim=32") == (
                    "wan-diloco: east: refused (other_settings): model.dim is 16 at the syncer and 32 at the learner"
                )
                await trains_on(address, west)
                async with learners(config, lambda _: grpc_connection(address), names=["east"]) as (east,):
                    await trains_on(address, west, east)
                    # Another one of the same name, which would fence the first if it was taken in.
                    assert await refused(given, address, "sync.period_steps=6") == (
                        "wan-diloco: east: refused (other_settings): "
                        "sync.period_steps is 4 at the syncer and 6 at the learner"
                    )
                    status = await trains_on(address, west, east)
            assert "east: other_settings: model.dim is 16 at" in process.log.read_text(), "its operator is told as well"
            return status

    status = asyncio.run(story())
    assert {one["learner_id"]: one["incarnation"] for one in status["learners"]} == {"east": 1, "west": 1}
    assert status["rejected"] == {"other_settings": 2}
    assert (status["balance"], status["repeated_units"]) == (0, 0)
