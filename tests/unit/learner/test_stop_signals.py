"""Signals of a training process: some end it, one has it read its configuration again."""

from __future__ import annotations

import os
import select
import signal

from wan_diloco.learner.stop_signals import stop_signals


def test_a_hangup_is_told_once_and_ends_nothing() -> None:
    with stop_signals() as signals:
        assert not signals.take_reload()
        os.kill(os.getpid(), signal.SIGHUP)
        assert signals.take_reload()
        assert not signals.take_reload()
        assert signals.received is None


def test_a_wait_ends_at_a_hangup_and_not_at_the_next_one_for_nothing() -> None:
    with stop_signals() as signals:
        os.kill(os.getpid(), signal.SIGHUP)
        signals.wait(None)
        assert signals.take_reload()
        assert not select.select([signals.fileno()], [], [], 0.0)[0], "what woke it is used up"


def test_a_wish_to_end_is_not_lost_with_a_hangup() -> None:
    with stop_signals() as signals:
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.take_reload()
        assert signals.received == signal.SIGTERM
        signals.wait(None)
