"""A contribution that was taken without its sender knowing, and comes again: it is merged once, and its sender told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch

from tests.support.syncer import BATCH_TOKENS, maths_of, tiny_config
from tests.support.syncer_scene import Learner, Syncer, syncer, until
from wan_diloco.models import build_model, model_tensors
from wan_diloco.protocol.messages import Acknowledged, ContributionHeader, Pull
from wan_diloco.syncer.fragments_store import FragmentStore
from wan_diloco.transport.memory import MemoryNetwork
from wan_diloco.units import FragmentId, LearnerId
from wan_diloco.wire.frames import pack

FIRST = FragmentId(0)
CONFIG = tiny_config(wire={"codec": "f32"}, outer={"merge": "mean", "lr": 1.0, "momentum": 0.0}, sync={"fragments": 1})
MATHS = maths_of(CONFIG)


class Sender(Learner):
    """Has the same delta for every parameter, keeps the header under which it sent it, and sends when it is told."""

    def __init__(self, network: MemoryNetwork, name: str, delta: float, earlier: Sender | None = None) -> None:
        store = FragmentStore.fresh(MATHS.layout, model_tensors(build_model(CONFIG)))
        connection = network.connection(LearnerId(name))
        super().__init__(connection, CONFIG, name, [value.published_N for value in store.values()])
        self.network = network
        self.may_send = asyncio.Event()
        self.header: ContributionHeader | None = None
        payload = MATHS.codec.encode(torch.full((MATHS.fragment(FIRST).numel,), delta), MATHS.table(FIRST))
        self.frames = pack(payload.codes, payload.scales)
        self.spoil = lambda _: payload
        if earlier is not None:
            self.local_step, self.incarnation, self.header = earlier.local_step, earlier.incarnation, earlier.header
        upload = connection.upload

        async def noted(header, frames, spread_s, *, unasked=False):  # type: ignore[no-untyped-def]
            self.header = header
            return await upload(header, frames, spread_s, unasked=unasked)

        connection.upload = noted  # type: ignore[method-assign]

    @property
    def is_acknowledged(self) -> bool:
        return any(isinstance(message, Acknowledged) for message in self.heard)

    async def _answer(self, pull: Pull) -> None:
        await self.may_send.wait()
        await super()._answer(pull)

    async def send_again(self) -> None:
        assert self.header is not None
        await self._connection.upload(self.header, self.frames, 0.0)


@asynccontextmanager
async def both(east: Sender, west: Sender) -> AsyncIterator[None]:
    """Two learners for as long as it takes."""
    tasks = [asyncio.get_running_loop().create_task(each.run()) for each in (east, west)]
    await until(lambda: east.started.is_set() and west.started.is_set())
    try:
        yield
    finally:
        for each in (east, west):
            each.may_send.set()
            await each.leave()
        await asyncio.gather(*tasks)


async def conclude(made: Syncer, east: Sender, west: Sender) -> None:
    """East sends what it sent before; then west what it has, and the round closes."""
    await east.send_again()
    await until(lambda: east.is_acknowledged)
    # A syncer that was restarted asks everybody again, so that it comes a third time.
    east.may_send.set()
    west.may_send.set()
    await until(lambda: made.versions == [1] and made.at_rest)


@pytest.mark.parametrize("killed", [False, True])
def test_a_contribution_whose_acknowledgement_was_lost_is_merged_once(tmp_path, *, killed: bool) -> None:
    async def story() -> tuple[torch.Tensor, torch.Tensor, Syncer]:
        async with MemoryNetwork() as network:
            east, west = Sender(network, "east", 1.0), Sender(network, "west", 3.0)
            async with syncer(network, CONFIG, tmp_path) as made, both(east, west):
                before_N = made.restored.store.value(FIRST).published_N.clone()
                network.drop_next(LearnerId("east"), lambda message: isinstance(message, Acknowledged))
                east.may_send.set()
                for _ in range(4):
                    east.step()
                    west.step()
                await until(lambda: not network.line(LearnerId("east")).drops)
                assert not east.is_acknowledged
                if killed:
                    await made.crash()
                else:
                    await conclude(made, east, west)
            if killed:
                east, west = Sender(network, "east", 1.0, east), Sender(network, "west", 3.0, west)
                async with syncer(network, CONFIG, tmp_path, resume=True) as made, both(east, west):
                    await conclude(made, east, west)
            return before_N, made.restored.store.value(FIRST).published_N.clone(), made

    before_N, after_N, made = asyncio.run(story())
    # The mean of 1 and 3; with the first counted twice it would be 5 / 3.
    assert torch.allclose(before_N - after_N, torch.full_like(before_N, 2.0), atol=1e-6)
    assert made.service.state.ledger.merged[FIRST].tokens == 2 * 4 * BATCH_TOKENS
