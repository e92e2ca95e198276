"""What the observer writes down of the run's turns."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from tests.support.desk import Desk, E
from wan_diloco.clock import ManualClock
from wan_diloco.protocol.rejoin_messages import MomentsSource, StateSettled, StateWanted
from wan_diloco.protocol.status import status_of
from wan_diloco.protocol.tape import LearnerAdmitted, MembershipChanged, RunEnded, SyncerStarted
from wan_diloco.syncer.observer import Observer
from wan_diloco.telemetry import EvaluationRecord, EventRecord, MetricsWriter
from wan_diloco.units import Epoch, GlobalStep, Incarnation, LearnerId, LocalStep, RoundId, Term, TransferId

EAST, WEST = LearnerId("east"), LearnerId("west")


@pytest.fixture
def metrics(tmp_path):
    with MetricsWriter(tmp_path / "metrics.jsonl", ManualClock(), origin_s=0.0) as writer:
        yield writer


def _admitted(learner_id: LearnerId, incarnation: int) -> LearnerAdmitted:
    return LearnerAdmitted(
        learner_id=learner_id, incarnation=Incarnation(incarnation), local_step=LocalStep(0), tokens=0
    )


def _live(*learners: LearnerId) -> MembershipChanged:
    return MembershipChanged(global_step=GlobalStep(1), anchors=tuple((learner, 0) for learner in learners))


def _events(metrics) -> list[str]:
    records = [line.record for line in metrics.tail()]
    return [f"{item.name} {item.detail.split()[0].strip(',:')}" for item in records if isinstance(item, EventRecord)]


def _details(metrics) -> list[str]:
    return [line.record.detail for line in metrics.tail() if isinstance(line.record, EventRecord)]


def test_deaths_and_returns_are_events(metrics):
    observer = Observer(metrics, ManualClock(), (EAST, WEST), (10,))
    for record in (
        SyncerStarted(term=Term(1), epoch=Epoch(0), next_round=RoundId(0)),
        _admitted(EAST, 1),
        _live(EAST),
        _admitted(WEST, 1),
        _live(EAST, WEST),
        _live(WEST),
        _live(EAST, WEST),
        _admitted(EAST, 2),
        _live(EAST, WEST),
        RunEnded(global_step=GlobalStep(9), reason="done"),
    ):
        observer.recorded(record)
    assert _events(metrics) == [
        "learner_joined east",
        "learner_joined west",
        "learner_away east",
        "learner_back east",
        "learner_rejoined east",
        "run_ended done",
    ]


def test_a_restarted_syncer_is_an_event_and_nobody_that_stayed_comes_back(metrics):
    observer = Observer(metrics, ManualClock(), (EAST, WEST), (10,), live=(EAST, WEST))
    observer.recorded(SyncerStarted(term=Term(2), epoch=Epoch(0), next_round=RoundId(5)))
    observer.recorded(_live(EAST))
    assert [event.split()[0] for event in _events(metrics)] == ["syncer_restarted", "learner_away"]
    assert _details(metrics)[0] == "it goes on where it was, in term 2"


def test_a_restart_that_begins_a_new_epoch_says_so_and_why(metrics):
    observer = Observer(metrics, ManualClock(), (EAST,), (10,), new_epoch="the state is an older one")
    observer.recorded(SyncerStarted(term=Term(4), epoch=Epoch(2), next_round=RoundId(5)))
    (said,) = _details(metrics)
    assert said == (
        "a new epoch begins (2, in term 4), since the state is an older one; learners take the published values anew, "
        "and work under way is discarded"
    )


SETTLED = StateSettled(source=MomentsSource.PEER, donor=WEST, global_step=GlobalStep(107))


def test_what_a_life_settled_before_the_restart_is_no_news(metrics):
    observer = Observer(metrics, ManualClock(), (EAST, WEST), (10,), live=(EAST, WEST))
    observer.recorded(SyncerStarted(term=Term(2), epoch=Epoch(0), next_round=RoundId(5)))
    observer.said(EAST, SETTLED, GlobalStep(130))
    assert _events(metrics) == ["syncer_restarted it"]


@pytest.mark.parametrize("tells", ["it began with this process", "it asked this process"])
def test_what_a_life_settles_while_the_syncer_serves_is_said_once(metrics, tells):
    observer = Observer(metrics, ManualClock(), (EAST, WEST), (10,))
    if tells == "it began with this process":
        observer.recorded(_admitted(EAST, 2))
    else:
        observer.said(EAST, StateWanted(failed=TransferId(0), digest=""), GlobalStep(130))
    for _ in range(2):
        # As after a link that broke: it may have been lost.
        observer.said(EAST, SETTLED, GlobalStep(130))
    assert [detail for detail in _details(metrics) if "begins" in detail] == [
        "east begins with those of west, as of step 107"
    ]


def test_who_began_at_zero_with_the_run_does_not_begin_when_its_link_breaks_later(metrics):
    observer = Observer(metrics, ManualClock(), (EAST,), (10,))
    observer.recorded(_admitted(EAST, 1))
    none = StateSettled(source=MomentsSource.NONE, donor=LearnerId(""), global_step=GlobalStep(0))
    observer.said(EAST, none, GlobalStep(0))
    observer.said(EAST, none, GlobalStep(107))
    assert _events(metrics) == ["learner_joined east"]


def test_a_score_says_whether_it_is_the_runs_and_when_its_model_was_published(metrics):
    observer = Observer(metrics, ManualClock(), (EAST,), (10,))
    point = {"tokens": 5, "global_step": 6, "published_s": 7.0, "validation_loss": 1.5, "final": False}
    observer.evaluated(point)
    observer.evaluating(0.5)
    assert observer.status()["evaluated_share"] == 0.5
    observer.evaluated({**point, "test_loss": 1.6, "final": True})
    records = [line.record for line in metrics.tail()]
    scores = [item for item in records if isinstance(item, EvaluationRecord)]
    assert [(item.split, item.final, item.published_s) for item in scores] == [
        ("validation", False, 7.0),
        ("validation", True, 7.0),
        ("test", True, 7.0),
    ]


def test_the_log_says_how_the_run_stands(metrics):
    desk = Desk()
    desk.joins(E, EAST)
    with capture_logs() as logs:
        Observer(metrics, ManualClock(), (EAST, WEST), (10,)).progress(status_of(desk.machine, 0.0))
    assert [(line["event"], line["global_step"], line["live"], line["rounds"]) for line in logs] == [
        ("progress", 0, [EAST], 0)
    ]


def test_the_end_of_waiting_says_what_became_of_it(metrics):
    observer = Observer(metrics, ManualClock(), (EAST,), (10,))
    with capture_logs() as logs:
        for text in ("waiting for east before the first step", ""):
            observer.reason("start", text)
    assert [line["reason"] for line in logs] == ["waiting for east before the first step", "the run has started"]
