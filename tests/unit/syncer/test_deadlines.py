"""The syncer's and the learner's limits are those that their parts go by, and their ends add up."""

from __future__ import annotations

from tests.support.syncer import maths_of, tiny_config
from wan_diloco.cli.supervise import Patience
from wan_diloco.learner import deadlines as learner_deadlines
from wan_diloco.protocol import deadlines
from wan_diloco.storage import object_lock
from wan_diloco.syncer.deadlines import deadlines_of
from wan_diloco.syncer.plan import line_rates, machine_settings
from wan_diloco.telemetry.last_resort import WITHIN_S
from wan_diloco.transport.grpc_common import channel_options
from wan_diloco.transport.options import ConnectionOptions, Keepalive, ServerLimits
from wan_diloco.transport.pacer import chunk_bytes_for
from wan_diloco.transport.window import WindowPlan

# Schedulers kill so long after they told a process to end.
KILLED_AFTER_S = 30.0


def test_a_syncer_that_is_told_to_end_has_done_it_before_it_is_killed() -> None:
    merges_and_snapshot_s = deadlines.DRAIN_S + deadlines.LAST_SNAPSHOT_S
    assert merges_and_snapshot_s + deadlines.SPARE_S < WITHIN_S < KILLED_AFTER_S
    # The store has what those leave, and something is left.
    assert WITHIN_S - deadlines.SPARE_S - merges_and_snapshot_s > 0
    assert deadlines.GOODBYE_S + deadlines.UPLINK_DYING_S < WITHIN_S
    # A learner's goodbye is within what `run` gives it before it tells the syncer.
    assert Patience().drain_s >= deadlines.GOODBYE_S + deadlines.UPLINK_DYING_S


def test_a_lock_is_renewed_three_times_before_anybody_takes_it() -> None:
    assert 3 * object_lock.RENEW_S < object_lock.WATCH_S


def test_what_the_table_says_is_what_the_parts_are_given() -> None:
    config = tiny_config(
        sync={"membership_lease": "3s"},
        syncer={"store": "file:///nowhere", "egress": "1mbit"},
        run={"start_timeout": "7s"},
    )
    rows = {row.name: row.limit_s for row in deadlines_of(config)}
    settings = machine_settings(config, maths_of(config), ("", ""))
    assert (rows["lease"], rows["start"]) == (settings.lease_s, settings.start_timeout_s) == (3.0, 7.0)
    assert rows["hello"] == ServerLimits().hello_timeout_s
    assert rows["keepalive"] == Keepalive().time_s + Keepalive().timeout_s
    assert (rows["connect"], rows["close"]) == (
        ConnectionOptions().connect_timeout_s,
        ConnectionOptions().close_timeout_s,
    )
    assert dict(channel_options(Keepalive()))["grpc.max_reconnect_backoff_ms"] == 1000 * deadlines.RECONNECT_MAX_S
    # 1 Mbit/s for all: the syncer's own cap.
    own = line_rates(config)
    message_bytes = chunk_bytes_for(own.egress_bytes_per_s, config.wire.chunk_bytes)
    assert rows["update_progress"] == WindowPlan.of(own.egress_bytes_per_s, 0.0, message_bytes).progress_timeout_s
    east = {row.name: row.limit_s for row in learner_deadlines.deadlines_of(config, "east", 0.5)}
    assert east["heartbeat"] == 0.75
    assert east["reconnect_max"] == 1.5
    uplink = config.region("east").uplink_bytes_per_s
    message_bytes = chunk_bytes_for(uplink, config.wire.chunk_bytes)
    assert east["upload_progress"] == WindowPlan.of(uplink, 0.5, message_bytes).progress_timeout_s
