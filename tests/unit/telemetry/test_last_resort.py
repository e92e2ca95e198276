"""A process that was told to end and hangs is ended all the same, and says so; one that ends by itself isn't."""

from __future__ import annotations

from tests.support.cli import in_own_process

PROGRAM = """
import sys, threading
from functools import partial
from wan_diloco.clock import SystemClock
from wan_diloco.telemetry import configure_logging, get_logger
from wan_diloco.telemetry.last_resort import LastResort
configure_logging(SystemClock())
last = LastResort(143, get_logger("test"), within_s=0.05)
if "hang" in sys.argv:
    threading.Event().wait()
last.call_off()
last.call_off()
print("by itself")
"""


def test_who_hangs_is_ended_with_the_right_code_and_a_sentence() -> None:
    outcome = in_own_process(["-c", PROGRAM, "hang"])
    assert outcome.exit_code == 143
    assert "ended_by_force" in outcome.stdout + outcome.stderr
    assert "by itself" not in outcome.stdout


def test_who_ends_by_itself_is_let_go() -> None:
    outcome = in_own_process(["-c", PROGRAM])
    assert (outcome.exit_code, outcome.stdout) == (0, "by itself\n")


SIGNALLED = """
import os, signal, sys, threading
from functools import partial
import wan_diloco.learner.stop_signals as module
from wan_diloco.clock import SystemClock
from wan_diloco.telemetry import configure_logging
configure_logging(SystemClock())
module.LastResort = partial(module.LastResort, within_s=0.05)
with module.stop_signals() as signals:
    os.kill(os.getpid(), signal.SIGTERM)
    # A step that never ends.
    threading.Event().wait()
"""


def test_a_learner_that_hangs_in_a_step_when_it_is_told_to_end_is_ended() -> None:
    outcome = in_own_process(["-c", SIGNALLED])
    assert outcome.exit_code == 143
    assert "ended_by_force" in outcome.stdout + outcome.stderr
