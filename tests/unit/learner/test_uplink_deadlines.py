"""What an uplink says of its time limits: all of them once, and once what the first round trip changes."""

from __future__ import annotations

from structlog.testing import capture_logs

from tests.unit.learner.conftest import MakeConfig
from wan_diloco.learner.uplink import _tell_deadlines


def test_limits_are_said_at_the_start_and_when_the_round_trip_is_known(make_config: MakeConfig) -> None:
    config = make_config()
    with capture_logs() as logs:
        measured = _tell_deadlines(config, "east")
        measured(3.0)
        measured(4.0)
    start, later = logs
    assert start["event"] == "deadlines"
    assert start["heartbeat"] == "2.5s: sync.membership_lease / 4"
    assert start["upload_progress"] == "8s: uplink: 200Mbit/s, no round trip measured yet"
    assert later["event"] == "deadlines_measured"
    assert later["upload_progress"].endswith("s: uplink: 200Mbit/s, a round trip of 3s")
    assert later.keys() == {"event", "log_level", "upload_progress"}
