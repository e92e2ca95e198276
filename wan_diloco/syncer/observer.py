"""What the service shows of itself: metrics, logs, and the extra figures of the status answer.

Decides nothing, and is told everything; what it can't write is counted by the metrics' writer.

Owner: the event loop.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from wan_diloco.clock import Clock
from wan_diloco.protocol.messages import Report
from wan_diloco.protocol.rejoin_messages import MomentsSource, StateSettled, StateWanted
from wan_diloco.protocol.status import Status
from wan_diloco.protocol.tape import (
    ContributionsLost,
    FragmentPublished,
    LearnerAdmitted,
    LeaseEnded,
    MembershipChanged,
    Refragmented,
    RoundClosed,
    RunEnded,
    ShardsAssigned,
    SyncerStarted,
    TapeRecord,
)
from wan_diloco.telemetry.logs import ChangeLogger, get_logger
from wan_diloco.telemetry.metrics import MetricsWriter
from wan_diloco.telemetry.records import (
    EvaluationRecord,
    EventRecord,
    LearnerRecord,
    Line,
    MergedContribution,
    MissingLearner,
    RoundRecord,
    TrafficRecord,
    WaitingRecord,
)
from wan_diloco.transport.interface import Counters
from wan_diloco.units import GlobalStep, LearnerId, RoundId

__all__ = ["Observer"]

# A learner's curve: about a point a second, and every so many steps also where steps are slow or quick.
_LEARNER_EVERY_S: Final = 1.0
_LEARNER_EVERY_STEPS: Final = 100
_SPEED_WINDOW_S: Final = 15.0
# What became of that which was waited for.
_OVER: Final = {
    "donor": "it has its moments, asks no more, or is gone",
    "end": "the last rounds are done",
    "finite": "losses are finite again",
    "fragment": "its round is closed",
    "journal": "the disk takes the journal again",
    "leap": "its steps are told one after the other again",
    "member": "it is heard again",
    "quorum": "a quorum is live",
    "snapshot": "snapshots are written again",
    "start": "the run has started",
    "storage": "merges are done again",
    "store": "the store has what it should",
}


@dataclass(slots=True)
class _Round:
    closed: RoundClosed
    closed_s: float
    merged_s: float | None = None


class Observer:
    """Writes down what happens.

    Args:
        metrics: Of the run.
        clock: As the service's.
        learners: All that are configured, and all others that have taken part.
        parameters: Of each fragment, until records say otherwise.
        earlier: Lines that an earlier life of this syncer wrote, so that totals go on where they were.
        live: Who was, when that life ended.
        new_epoch: Why this start begins a new epoch, as what follows "since"; empty where it begins none.

    Attributes:
        store: How it stands with the copies of the state; None where there are none.
    """

    def __init__(
        self,
        metrics: MetricsWriter,
        clock: Clock,
        learners: tuple[LearnerId, ...],
        parameters: tuple[int, ...],
        earlier: tuple[Line, ...] = (),
        live: Collection[LearnerId] = (),
        new_epoch: str = "",
    ) -> None:
        """Take up the totals of earlier lines."""
        self._metrics = metrics
        self._clock = clock
        self._parameters = parameters
        self._new_epoch = new_epoch
        self._logger = get_logger(__name__)
        self._changes = ChangeLogger(self._logger)
        self._reasons: dict[str, str] = {}
        self._rounds: dict[RoundId, _Round] = {}
        self._shown: dict[LearnerId, tuple[float, int]] = {}
        self._newest: dict[LearnerId, tuple[Report, GlobalStep]] = {}
        self._tokens: dict[LearnerId, int] = {}
        self._speed: deque[tuple[float, int]] = deque()
        self._traffic = {learner: Counters() for learner in learners}
        self._written: dict[LearnerId, tuple[int, int, int]] = {}
        self._evaluation: dict[str, Any] | None = None
        self._evaluated_share: float | None = None
        self._live: set[LearnerId] = set(live)
        self._new: set[LearnerId] = set()
        self._unleased: set[LearnerId] = set()
        self._moments: dict[LearnerId, str] = {}
        # Whose word about its moments is news: it began its life with this process, or asked it for them.
        self._unsettled: set[LearnerId] = set()
        self.store: Callable[[], Mapping[str, object]] | None = None
        for line in earlier:
            self._take_up(line)

    def reason(self, topic: str, text: str) -> None:
        """Why something doesn't happen; an empty text ends the topic."""
        if self._reasons.get(topic, "") == text:
            return
        if text:
            self._reasons[topic] = text
        else:
            self._reasons.pop(topic, None)
        kind = topic.partition(":")[0]
        over = _OVER.get(kind, "it is over")
        self._changes.note(f"{kind}_waiting", text or over, state=f"{topic} {text}", topic=topic)
        self._metrics.write(WaitingRecord(reason="; ".join(self._reasons.values())))

    def event(self, name: str, detail: str) -> None:
        """Something that happened once."""
        self._metrics.write(EventRecord(name=name, detail=detail))
        self._logger.info(name, detail=detail)

    def said(
        self, learner_id: LearnerId, message: Report | StateWanted | StateSettled, global_step: GlobalStep
    ) -> None:
        """What a learner says of itself."""
        match message:
            case Report():
                self.reported(learner_id, message, global_step)
            case StateWanted():
                self._unsettled.add(learner_id)
            case StateSettled():
                self.rejoined(learner_id, message, global_step)

    def reported(self, learner_id: LearnerId, report: Report, global_step: GlobalStep) -> None:
        """A learner's progress; not every report becomes a record."""
        self._newest[learner_id] = (report, global_step)
        self._tokens[learner_id] = max(report.tokens, self._tokens.get(learner_id, 0))
        shown_s, shown_step = self._shown.get(learner_id, (-math.inf, 0))
        crossed = report.local_step // _LEARNER_EVERY_STEPS != shown_step // _LEARNER_EVERY_STEPS
        if crossed or self._clock.now_s() - shown_s >= _LEARNER_EVERY_S:
            self._show(learner_id)

    def rejoined(self, learner_id: LearnerId, settled: StateSettled, global_step: GlobalStep) -> None:
        """A new life says where its inner moments are from; it says so again whenever it connects again."""
        match settled.source:
            case MomentsSource.PEER:
                text = f"those of {settled.donor}, as of step {settled.global_step}"
            case MomentsSource.OWN:
                text = f"its own, as of step {settled.global_step}"
            case MomentsSource.NONE:
                text = "none: they begin at zero"
        known = self._moments.get(learner_id)
        # Where nothing is known, and it doesn't begin, an earlier process of the syncer was told.
        is_news = known != text and (known is not None or learner_id in self._unsettled)
        self._moments[learner_id] = text
        self._unsettled.discard(learner_id)
        # At the run's beginning all begin at zero, and nobody needs to be told.
        if is_news and global_step > 0:
            self.event("moments", f"{learner_id} begins with {text}")

    def recorded(self, record: TapeRecord) -> None:
        """A record of the tape is down."""
        match record:
            case SyncerStarted() if record.term > 1:
                self.event("syncer_restarted", self._restarted(record))
            case RunEnded():
                self.event("run_ended", record.reason)
            case ShardsAssigned():
                shards = ", ".join(f"{learner} {shard}" for learner, shard in record.shards)
                self.event("shards_assigned", f"the training text's parts: {shards}")
            case Refragmented():
                self._parameters = record.parameters
            case LearnerAdmitted():
                self._admitted(record)
            case LeaseEnded():
                self._unleased.add(record.learner_id)
                text = f"{record.learner_id} was away, and another learner goes on with its data, shard {record.shard}"
                self.event("lease_ended", text)
            case MembershipChanged():
                self._membership({learner_id for learner_id, _ in record.anchors})
            case RoundClosed():
                self._rounds[record.round_id] = _Round(closed=record, closed_s=self._clock.now_s())
            case ContributionsLost():
                self._lost(record)
            case FragmentPublished():
                self._published(record)
            case _:
                pass

    def merged(self, round_id: RoundId) -> None:
        """A round's maths is done."""
        if round_id in self._rounds:
            self._rounds[round_id].merged_s = self._clock.now_s()

    def evaluated(self, answer: Mapping[str, Any]) -> None:
        """The evaluator has answered."""
        splits = {"validation": "validation_loss", "test": "test_loss"}
        for split, key in splits.items():
            if key in answer:
                self._metrics.write(
                    EvaluationRecord(
                        tokens=answer["tokens"],
                        global_step=answer["global_step"],
                        split=split,
                        nats_per_byte=answer[key],
                        final=answer["final"],
                        published_s=answer["published_s"],
                    )
                )
        self._evaluation = {"global_step": answer["global_step"], "nats_per_byte": answer["validation_loss"]}
        self._logger.info("model_evaluated", **self._evaluation)

    def evaluating(self, share: float) -> None:
        """How much of the final evaluation is done, 0 to 1."""
        self._evaluated_share = share

    def to_elapsed_s(self, now_s: float) -> float:
        """Seconds since the run began, of a time on the clock's scale."""
        return self._metrics.to_elapsed_s(now_s)

    def tick(self, open_sessions: Mapping[LearnerId, Counters]) -> None:
        """About once a second: traffic, and the run's speed.

        Args:
            open_sessions: What sessions that are open now have moved.
        """
        for learner_id, closed in self._traffic.items():
            now = open_sessions.get(learner_id, Counters())
            total = (
                closed.uplink_bytes + now.uplink_bytes,
                closed.downlink_bytes + now.downlink_bytes,
                closed.control_bytes + now.control_bytes,
            )
            if total != self._written.get(learner_id, (0, 0, 0)):
                self._written[learner_id] = total
                uplink, downlink, control = total
                self._metrics.write(
                    TrafficRecord(
                        region=learner_id, uplink_bytes=uplink, downlink_bytes=downlink, control_bytes=control
                    )
                )
        now_s = self._clock.now_s()
        self._speed.append((now_s, sum(self._tokens.values())))
        while now_s - self._speed[0][0] > _SPEED_WINDOW_S:
            self._speed.popleft()

    def progress(self, status: Status) -> None:
        """How the run stands, for whoever reads the log: now and then."""
        self._logger.info(
            "progress",
            global_step=status.global_step,
            total_steps=status.total_steps,
            rounds=status.rounds,
            participation=round(status.participation, 3),
            live=[learner.learner_id for learner in status.learners if learner.live],
            tokens_per_s=round(self._tokens_per_s()),
        )

    def session_ended(self, learner_id: LearnerId, counters: Counters) -> None:
        """What a session moved goes into the learner's totals; its last report is shown."""
        if learner_id in self._newest:
            self._show(learner_id)
        total = self._traffic.get(learner_id)
        if total is not None:
            total.add(counters)

    def status(self) -> dict[str, object]:
        """What the machine doesn't know."""
        elapsed_s = self.to_elapsed_s(self._clock.now_s())
        return {
            "elapsed_s": elapsed_s,
            "tokens_per_s": self._tokens_per_s(),
            "traffic": {
                learner: {"uplink_bytes": up, "downlink_bytes": down, "control_bytes": control}
                for learner, (up, down, control) in self._written.items()
            },
            "evaluation": self._evaluation,
            "evaluated_share": self._evaluated_share,
            "reasons": dict(self._reasons),
            "metrics_dropped": self._metrics.dropped,
            "store": None if self.store is None else dict(self.store()),
        }

    def _show(self, learner_id: LearnerId) -> None:
        report, global_step = self._newest[learner_id]
        if report.local_step == self._shown.get(learner_id, (0.0, 0))[1]:
            return
        self._shown[learner_id] = (self._clock.now_s(), report.local_step)
        self._metrics.write(
            LearnerRecord(
                region=learner_id,
                local_step=report.local_step,
                global_step=global_step,
                tokens=report.tokens,
                loss=math.nan if report.loss is None else report.loss,
                step_time_s=report.step_time_s,
                learning_rate=report.learning_rate,
            )
        )

    def _tokens_per_s(self) -> float:
        if len(self._speed) < 2:
            return 0.0
        (from_s, before), (to_s, after) = self._speed[0], self._speed[-1]
        return max(0.0, (after - before) / (to_s - from_s)) if to_s > from_s else 0.0

    def _restarted(self, record: SyncerStarted) -> str:
        if not self._new_epoch:
            return f"it goes on where it was, in term {record.term}"
        return (
            f"a new epoch begins ({record.epoch}, in term {record.term}), since {self._new_epoch}; learners take the "
            "published values anew, and work under way is discarded"
        )

    def _admitted(self, record: LearnerAdmitted) -> None:
        learner_id = record.learner_id
        self._new.add(learner_id)
        self._unsettled.add(learner_id)
        self._moments.pop(learner_id, None)
        self._traffic.setdefault(learner_id, Counters())
        if record.incarnation == 1:
            self.event("learner_joined", f"{learner_id}, incarnation 1, data of shard {record.shard}")
            return
        why = "its data had gone to another" if learner_id in self._unleased else "its process was started again"
        if record.local_step and learner_id not in self._unleased:
            why += " from a checkpoint, or nothing is known of its life any more"
        self._unleased.discard(learner_id)
        self.event("learner_rejoined", f"{learner_id}, incarnation {record.incarnation}: {why}")

    def _membership(self, live: set[LearnerId]) -> None:
        """Who counts as live changed."""
        for learner_id in sorted(self._live - live):
            self.event(
                "learner_away", f"{learner_id}: it left, or was silent for its whole lease; rounds go on without it"
            )
        for learner_id in sorted(live - self._live - self._new):
            self.event("learner_back", f"{learner_id}: heard again, the same life")
        self._live, self._new = live, set()

    def _lost(self, record: ContributionsLost) -> None:
        names = ", ".join(key.learner_id for key in record.keys)
        then = "the round is opened anew" if record.opened_anew else "the others are merged"
        text = f"round {record.round_id}: what came from {names} can't be read from the disk any more; {then}"
        self.event("contributions_lost", text)
        if (round_ := self._rounds.get(record.round_id)) is not None:
            left = tuple(entry for entry in round_.closed.entries if entry.header.key not in record.keys)
            round_.closed = replace(round_.closed, entries=left)
            if record.opened_anew:
                del self._rounds[record.round_id]

    def _published(self, record: FragmentPublished) -> None:
        known = self._rounds.pop(record.round_id, None)
        if known is None:
            return  # closed by an earlier process: its times are on another clock
        closed = known.closed
        now_s = self.to_elapsed_s(self._clock.now_s())
        closed_s = self.to_elapsed_s(known.closed_s)
        merged_s = now_s if known.merged_s is None else self.to_elapsed_s(known.merged_s)
        upload_bytes: dict[str, int] = {}
        for entry in closed.entries:
            learner = entry.header.key.learner_id
            upload_bytes[learner] = upload_bytes.get(learner, 0) + entry.payload_bytes
        self._metrics.write(
            RoundRecord(
                round_id=record.round_id,
                fragment=record.fragment_id,
                version=record.version.count,
                attempt=closed.attempt,
                opened_s=closed_s - closed.grace_s - closed.quorum_s,
                quorate_s=closed_s - closed.grace_s,
                closed_s=closed_s,
                merged_s=merged_s,
                published_s=now_s,
                members=closed.members,
                merged=tuple(
                    MergedContribution(
                        learner=entry.header.key.learner_id,
                        staleness=entry.staleness,
                        steps=entry.header.steps,
                        tokens=entry.header.tokens,
                    )
                    for entry in closed.entries
                ),
                missing=tuple(MissingLearner(learner=item.learner_id, reason=item.reason) for item in closed.missing),
                grace_s=closed.grace_s,
                update_bytes=record.update_bytes,
                upload_bytes=upload_bytes,
                parameters=self._parameters[record.fragment_id],
            )
        )
        self._logger.debug("fragment_published", round_id=record.round_id, fragment=record.fragment_id)

    def _take_up(self, line: Line) -> None:
        record = line.record
        match record:
            case TrafficRecord() if LearnerId(record.region) in self._traffic:
                learner_id = LearnerId(record.region)
                self._traffic[learner_id] = Counters(
                    uplink_bytes=record.uplink_bytes,
                    downlink_bytes=record.downlink_bytes,
                    control_bytes=record.control_bytes,
                )
                self._written[learner_id] = (record.uplink_bytes, record.downlink_bytes, record.control_bytes)
            case EvaluationRecord() if record.split == "validation":
                self._evaluation = {"global_step": record.global_step, "nats_per_byte": record.nats_per_byte}
            case LearnerRecord():
                self._tokens[LearnerId(record.region)] = record.tokens
            case _:
                pass
