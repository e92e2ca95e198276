"""What the syncer allows is never less than what an honest learner does."""

from __future__ import annotations

import pytest

from tests.support.syncer import maths_of, tiny_config
from wan_diloco.config.relations import ignored_settings
from wan_diloco.protocol.schedule import Schedule
from wan_diloco.syncer.plan import machine_settings, server_limits


@pytest.mark.parametrize(
    ("fragments", "period_steps", "overlap_steps"), [(2, 4, 2), (24, 24, 2), (200, 4, 2), (1024, 4, 3), (24, 12, 0)]
)
@pytest.mark.parametrize("travelling_steps", [0, 1, 5, 10**6])
def test_a_learner_may_have_under_way_what_the_protocol_has_it_send(
    fragments: int, period_steps: int, overlap_steps: int, travelling_steps: int
) -> None:
    sync = {"fragments": fragments, "period_steps": period_steps, "overlap_steps": overlap_steps}
    config = tiny_config(sync=sync)
    schedule = Schedule(num_fragments=fragments, period_steps=period_steps)
    most = schedule.uploads_max(overlap_steps, travelling_steps)
    # As many again: those of a stream that broke, and whose end was not noticed yet.
    assert server_limits(config).uploads_max >= 2 * most
    assert server_limits(config).partials_max >= most


def test_the_layouts_fragments_are_no_more_than_those_asked_for() -> None:
    config = tiny_config(sync={"fragments": 1000, "period_steps": 4})
    made = machine_settings(config, maths_of(config), ("",) * 1000).schedule
    assert made.num_fragments <= 1000
    assert server_limits(config).uploads_max >= made.uploads_max(config.sync.overlap_steps)


def test_far_more_fragments_than_steps_in_a_period_are_warned_of() -> None:
    assert not [text for text in ignored_settings(tiny_config()) if "fall due at once" in text]
    config = tiny_config(sync={"fragments": 200, "period_steps": 4})
    assert [text for text in ignored_settings(config) if "50 rounds fall due at once" in text]
