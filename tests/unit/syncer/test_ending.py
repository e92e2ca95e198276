"""How much of a stop is left for what comes at its end."""

from __future__ import annotations

import signal

from wan_diloco.syncer.ending import Ending
from wan_diloco.telemetry.last_resort import WITHIN_S


def test_who_was_not_told_to_end_takes_its_time() -> None:
    assert Ending().left_s(10.0, spare_s=5.0) == 10.0


def test_what_comes_last_ends_before_it_is_ended_by_force() -> None:
    ending = Ending()
    ending.signalled(signal.SIGTERM)
    assert ending.exit_code == 143
    assert ending.left_s(WITHIN_S, spare_s=5.0) <= WITHIN_S - 5.0
    assert ending.left_s(10.0, spare_s=WITHIN_S) == 0.0
