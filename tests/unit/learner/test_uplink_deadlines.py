"""What an uplink says of its waits, and where its time limits are: those that the first round trip changes are said."""

from __future__ import annotations

from structlog.testing import capture_logs

from tests.unit.learner.conftest import MakeConfig
from wan_diloco.learner.deadlines import deadlines_of
from wan_diloco.learner.uplink import _show, _tell_deadlines
from wan_diloco.protocol.events import ShowReason


def test_limits_are_said_at_the_start_and_when_the_round_trip_is_known(make_config: MakeConfig) -> None:
    config = make_config()
    with capture_logs() as logs:
        measured = _tell_deadlines(config, "east")
        measured(3.0)
        measured(4.0)
    start, later = logs
    assert start["event"] == "deadlines"
    assert "config show CONFIG --deadlines" in start["detail"]
    assert all(f"{row.name} {row.limit}" in start["limits"] for row in deadlines_of(config, "east"))
    assert later["event"] == "deadlines_measured"
    assert later["upload_progress"].endswith("s: uplink: 200Mbit/s, a round trip of 3s")
    assert later.keys() == {"event", "log_level", "upload_progress"}


def test_the_end_of_waiting_says_what_became_of_it() -> None:
    with capture_logs() as logs:
        show = _show()
        for text in ("the syncer can't be reached: reset", ""):
            show(ShowReason(topic="syncer", text=text))
    assert [line["reason"] for line in logs] == ["the syncer can't be reached: reset", "connected, and welcomed"]
