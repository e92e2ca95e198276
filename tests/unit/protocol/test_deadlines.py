"""One table of time limits: what it says is what is done, and limits that depend on one another are in order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wan_diloco.protocol import deadlines
from wan_diloco.protocol.deadlines import (
    Deadline,
    EndBudget,
    LinkFacts,
    heartbeat_s,
    in_words,
    learner_deadlines,
    member_lease_s,
    reconnects,
    syncer_deadlines,
)

GBIT = 125e6
END = EndBudget(within_s=27.0, renew_s=5.0, watch_s=20.0)
leases_s = st.floats(0.2, 1e6)
links = st.builds(
    LinkFacts,
    rate_bytes_per_s=st.none() | st.floats(1e4, 2e9),
    message_bytes=st.just(2**14),
    rtt_s=st.floats(0, 1.0),
)


def of_learner(lease_s: float = 10.0, link: LinkFacts | None = None, overlap_steps: int = 2) -> dict[str, Deadline]:
    uplink = link or LinkFacts(rate_bytes_per_s=GBIT, message_bytes=2**20)
    rows = learner_deadlines(lease_s=lease_s, overlap_steps=overlap_steps, uplink=uplink)
    return {row.name: row for row in rows}


def of_syncer(*, overlap_steps: int = 2, has_store: bool = True, **downlinks: LinkFacts) -> dict[str, Deadline]:
    rows = syncer_deadlines(
        lease_s=10.0,
        start_timeout_s=60.0,
        overlap_steps=overlap_steps,
        bound_steps=overlap_steps + 2,
        downlinks=downlinks or {"east": LinkFacts(rate_bytes_per_s=GBIT, message_bytes=2**20)},
        end=END,
        has_store=has_store,
    )
    return {row.name: row for row in rows}


@given(leases_s)
def test_three_heartbeats_and_two_reconnects_are_within_a_lease(lease_s: float) -> None:
    assert 3 * heartbeat_s(lease_s) < lease_s
    retry = reconnects(lease_s)
    assert 2 * retry.max_s <= lease_s or retry.max_s == deadlines.RECONNECT_FIRST_S
    # Whatever the lease: a syncer that is back isn't kept waiting.
    assert retry.max_s <= 5.0


@given(leases_s, st.floats(0, 1e4))
def test_a_lease_outlasts_five_steps(lease_s: float, step_time_s: float) -> None:
    assert member_lease_s(lease_s, step_time_s) >= max(lease_s, 5 * step_time_s)


def test_limits_are_in_order() -> None:
    keepalive_s = deadlines.KEEPALIVE_QUIET_S + deadlines.KEEPALIVE_ANSWER_S
    # A dead line is given up before anything that waits for who uses it.
    assert keepalive_s < 20.0
    assert keepalive_s + deadlines.RECONNECT_MAX_S + deadlines.CONNECT_S <= deadlines.DONOR_KEEP_S
    assert deadlines.DONOR_KEEP_S <= deadlines.MEET_S < deadlines.REJOIN_PATIENCE_S
    assert deadlines.CONNECT_S < deadlines.HELLO_S
    assert deadlines.CLOSE_S + deadlines.UPLINK_DYING_S < deadlines.GOODBYE_S
    assert deadlines.FIRST_WINDOW_S < deadlines.WINDOW_MAX_S


@given(links)
def test_a_transfer_is_given_up_by_the_links_own_measure(link: LinkFacts) -> None:
    assert of_learner(link=link)["upload_progress"].limit_s == link.progress_s
    slow = LinkFacts(rate_bytes_per_s=1e3, message_bytes=2**20)
    assert of_syncer(near=link, far=slow)["update_progress"].limit_s == max(link.progress_s, slow.progress_s)


def test_the_round_trip_that_was_measured_is_in_the_table() -> None:
    far = LinkFacts(rate_bytes_per_s=1e6, message_bytes=2**14, rtt_s=2.0)
    row = of_learner(link=far)["upload_progress"]
    assert row.limit_s > 8.0
    assert row.follows == "uplink: 8Mbit/s, a round trip of 2s"
    unknown = LinkFacts(rate_bytes_per_s=None, message_bytes=2**14)
    assert in_words([of_learner(link=unknown)["upload_progress"]]) == {
        "upload_progress": "8s: uplink: a link of unknown rate, no round trip measured yet"
    }


def test_what_counts_in_steps_says_so_and_lockstep_has_none_of_it() -> None:
    assert of_learner()["upload_spread"].limit == "1 step"
    assert of_syncer()["update_spread"].limit == "0.7 steps"
    assert of_syncer()["grace_max"].limit == "4 steps"
    assert "upload_spread" not in of_learner(overlap_steps=0)
    assert "update_spread" not in of_syncer(overlap_steps=0)


def test_a_store_that_is_not_there_has_no_limits() -> None:
    assert {"store_renew", "store_watch", "end_ship"} == of_syncer().keys() - of_syncer(has_store=False).keys()


@pytest.mark.parametrize("times", [{}, {"limit_s": -1.0}, {"limit_s": 1.0, "limit_steps": 1.0}])
def test_a_limit_is_a_time_in_seconds_or_in_steps(times: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="in seconds or in steps"):
        Deadline(name="none", follows="nothing", **times)
