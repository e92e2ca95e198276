"""A syncer that hears from a learner that its run has gone on elsewhere ends, as one does whose store was taken."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.syncer import tiny_config
from tests.support.syncer_scene import Learner, advance, scene
from wan_diloco.errors import StateTakenOver
from wan_diloco.syncer.main import _cause
from wan_diloco.units import LearnerId, Term


def test_a_learner_that_was_welcomed_in_a_later_term_ends_the_syncer(tmp_path):
    config = tiny_config()

    async def story():
        async with scene(config, tmp_path) as (made, group):
            await advance(group, made, 3)
            before = group[0]
            again = Learner(made.network.connection(LearnerId(before.name)), config, before.name, before.values)
            again.go_on(before)
            again.term, again._initial_digests = Term(9), before._initial_digests
            assert made.task is not None
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(again.run())
                with pytest.raises(BaseExceptionGroup) as caught:
                    await made.task
                await again.leave()
            cause = _cause(caught.value)
            assert isinstance(cause, StateTakenOver)
            assert cause.exit_code == 77
            assert "was welcomed by a syncer of term 9, and this one's is 1" in str(cause)

    asyncio.run(story())
