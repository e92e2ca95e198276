"""The queue before the machine."""

from __future__ import annotations

import asyncio

from wan_diloco.protocol.events import LearnerConnected, LearnerSaid, SessionId
from wan_diloco.protocol.messages import Goodbye, Report
from wan_diloco.syncer.inbox import Inbox
from wan_diloco.units import LocalStep


def _report(step: int) -> Report:
    return Report(local_step=LocalStep(step), tokens=step, step_time_s=0.1, loss=None, learning_rate=0.0, fragments=())


def _said(session: int, message) -> LearnerSaid:
    return LearnerSaid(session=SessionId(session), message=message)


def test_a_newer_report_of_a_session_replaces_the_one_that_waits():
    inbox = Inbox()
    first, other = _said(1, Goodbye(reason="x")), _said(2, _report(7))
    for event in (_said(1, _report(1)), first, other, _said(1, _report(2))):
        assert inbox.put(event)
    assert inbox.take() == [first, other, _said(1, _report(2))]
    assert not len(inbox)


def test_reports_are_not_replaced_once_they_were_taken():
    inbox = Inbox()
    inbox.put(_said(1, _report(1)))
    assert inbox.take() == [_said(1, _report(1))]
    inbox.put(_said(1, _report(2)))
    assert inbox.take() == [_said(1, _report(2))]


def test_a_session_that_says_too_much_is_cut_off_and_others_are_not():
    inbox = Inbox()
    flood = [inbox.put(_said(1, Goodbye(reason="x"))) for _ in range(1100)]
    assert flood.count(False) == 100
    assert inbox.put(_said(2, Goodbye(reason="x")))
    assert inbox.put(LearnerConnected(session=SessionId(3)))
    assert len(inbox) == 1002


def test_endless_reports_take_no_memory_while_nobody_handles_them():
    inbox = Inbox()
    assert all(inbox.put(_said(1, _report(step))) for step in range(5000))
    assert len(inbox) == 1


def test_waiting_ends_when_something_comes_or_the_time_is_over():
    async def scene() -> None:
        inbox = Inbox()
        await inbox.wait(0.0)
        assert inbox.take() == []
        inbox.put(LearnerConnected(session=SessionId(1)))
        await inbox.wait(None)
        assert len(inbox.take()) == 1

    asyncio.run(scene())
