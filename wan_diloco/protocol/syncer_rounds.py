"""Conducting rounds: opening them when due, asking, deciding, closing, merging.

Part of the syncer's machine; `quorum.decide` says when a round closes, this says what follows from it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping

from wan_diloco.errors import LocalProtocolError
from wan_diloco.protocol.deadlines import FIRST_WINDOW_S, WINDOW_MAX_S, WORK_RETRY_S
from wan_diloco.protocol.events import ContributionsUnreadable, MergeFailed, MergeFinished, StartMerge
from wan_diloco.protocol.membership import Member
from wan_diloco.protocol.messages import (
    ContributionHeader,
    Declined,
    DeclineReason,
    Pull,
    RefusalReason,
    UpdateReceived,
)
from wan_diloco.protocol.pacing import UPLINK_SHARE
from wan_diloco.protocol.quorum import RoundView, Verdict, decide, smooth
from wan_diloco.protocol.rounds import Candidates, OpenRound, RoundQueue, answers, candidates, missing
from wan_diloco.protocol.syncer_context import SyncerContext
from wan_diloco.protocol.tape import ContributionDiscarded, ContributionsLost, FragmentPublished, RoundClosed
from wan_diloco.units import FragmentId, LearnerId, RoundId

__all__ = ["RoundConductor"]

# Attempts that are given up soon when a member lacks steps.
_QUICK_ATTEMPTS = 3
# Answers that come later than the next question are still measured; much later ones are of no use for estimates.
_REMEMBERED = 4


class RoundConductor:
    """All rounds in progress.

    Args:
        context: Of the machine that this is a part of.
    """

    def __init__(self, context: SyncerContext) -> None:
        """No round is open."""
        self.context = context
        self.open: dict[FragmentId, OpenRound] = {}
        self.queue = RoundQueue()
        self.asked: dict[FragmentId, deque[OpenRound]] = {}
        self._verdicts: dict[FragmentId, Verdict] = {}
        self._retries: dict[FragmentId, float] = {}
        self._closed_s: dict[FragmentId, float] = {}
        self._joined = False

    @property
    def is_idle(self) -> bool:
        """Nothing is due, open or being merged."""
        return not (self.open or self.context.state.closed or len(self.queue))

    @property
    def is_barren(self) -> bool:
        """What is open can't close with the members of now: the losses of too many aren't finite."""
        quorum = self.context.settings.policy.quorum
        return bool(self.open) and all(round_.is_barren(quorum) for round_ in self.open.values())

    def next_stop(self) -> int:
        """The global step up to which no round is passed over: of the next that is due, or of one in progress."""
        step = self.context.membership.global_step
        return self.context.settings.schedule.next_due_step(step) if self.is_idle else step

    def reason(self, fragment_id: FragmentId) -> str:
        """Why an open round of the fragment is not closed yet."""
        verdict = self._verdicts.get(fragment_id)
        return verdict.reason if verdict is not None else ""

    def restart(self, now_s: float) -> None:
        """Merge what an earlier process closed and didn't publish; open anew what it didn't close."""
        state, schedule = self.context.state, self.context.settings.schedule
        for closed in list(state.closed.values()):
            self._start_merge(closed, now_s)
        if state.ended:
            return
        step = min(state.global_step, self.context.settings.total_steps)
        due = [(schedule.last_due_step(FragmentId(index), step), index) for index in range(len(state.due_steps))]
        for due_step, index in sorted(due):
            if due_step > state.due_steps[index]:
                self.queue.add(FragmentId(index), due_step)

    def deadlines_s(self) -> list[float]:
        """When something is due by time alone."""
        times = [round_.gives_up_s for round_ in self.open.values() if round_.quorate_s is None]
        times += [verdict.close_s for verdict in self._verdicts.values() if verdict.close_s is not None]
        return [*(time_s for time_s in times if math.isfinite(time_s)), *self._retries.values()]

    def fall_due(self, after: int, until: int, now_s: float) -> None:
        """The global step went on: rounds of (after, until] are due."""
        for due_step, fragment_id in self.context.settings.schedule.due_between(after, until):
            round_ = self.open.get(fragment_id)
            if round_ is None:
                self.queue.add(fragment_id, due_step)
                continue
            # A new question would make the answers to this one old, and who is slow would never be in time; so it
            # is asked only when none is on its way. Who is busy has put the question in its queue.
            round_.due_step = due_step
            found = self._candidates(round_)
            busy = {learner for learner, reason in round_.declined.items() if reason is DeclineReason.BUSY}
            if round_.quorate_s is None and not self._awaited(round_, found) and busy <= found.fresh:
                self._ask(round_, now_s)

    def ask_again(self) -> None:
        """A member joined: rounds without a quorum begin a new attempt, when it is known who else is still there."""
        self._joined = True

    def settle(self, now_s: float) -> None:
        """Ask, open, decide, close and retry whatever can be."""
        if self._joined:
            self._joined = False
            for round_ in self.open.values():
                if round_.quorate_s is None:
                    self._ask(round_, now_s)
        self._open_rounds(now_s)
        for fragment_id in list(self.open):
            self._decide(self.open[fragment_id], now_s)
        # A close makes room for the next in the queue; it is asked at once, not at the next event.
        self._open_rounds(now_s)
        for fragment_id, retry_s in list(self._retries.items()):
            if now_s >= retry_s:
                del self._retries[fragment_id]
                self._start_merge(self.context.state.closed[fragment_id], now_s)

    def declined(self, member: Member, message: Declined) -> None:
        """A member answered without a contribution."""
        round_ = self.open.get(message.fragment_id)
        if round_ is None or (round_.round_id, round_.attempt) != (message.round_id, message.attempt):
            return
        if round_.asked.get(member.learner_id) == member.incarnation:
            round_.decline(member.learner_id, message.reason)
        if message.reason is DeclineReason.NO_TOKENS:
            text = "its loss or gradients are not finite any more, and its steps count for nothing"
            self.context.show(f"finite:{member.learner_id}", f"{member.learner_id}: {text}")

    def offered(self, header: ContributionHeader) -> None:
        """A contribution is on its way, and may take long."""
        round_ = self.open.get(header.key.fragment_id)
        if round_ is not None and round_.round_id == header.round_id:
            round_.contributes(header.key.learner_id)

    def refused(self, header: ContributionHeader, *, finite: bool) -> None:
        """A contribution is no use; perhaps since its values aren't numbers."""
        round_ = self.open.get(header.key.fragment_id)
        if round_ is not None:
            round_.refuse(header, finite=finite)

    def spoiled(self, learner_id: LearnerId, fragment_id: FragmentId) -> None:
        """A learner found by itself that what it has isn't finite, and begins anew with the published value."""
        if (round_ := self.open.get(fragment_id)) is not None:
            round_.spoil(learner_id)

    def merged(self, event: MergeFinished) -> None:
        """A merge is done: the new version exists, and everybody is sent it.

        Raises:
            LocalProtocolError: No such round is being merged.
        """
        closed = self._merging(event.round_id)
        record = FragmentPublished(
            round_id=event.round_id,
            fragment_id=closed.fragment_id,
            version=closed.to_version,
            digest=event.digest,
            ref=event.ref,
            codes_bytes=event.codes_bytes,
            scales_bytes=event.scales_bytes,
            update_bytes=event.update_bytes,
        )
        self.context.record(record, durable=True)
        self.context.show("storage", "")
        for member in self.context.membership.live():
            self.context.send_updates(member)

    def merge_failed(self, event: MergeFailed, now_s: float) -> None:
        """A merge could not be done; its round stays closed, and is tried again."""
        for fragment_id, record in self.context.state.closed.items():
            if record.round_id == event.round_id:
                self._retries[fragment_id] = now_s + WORK_RETRY_S
        self.context.show("storage", f"a merge could not be done and is tried again: {event.reason}")

    def unreadable(self, event: ContributionsUnreadable, now_s: float) -> None:
        """Contributions of a round are lost: the others are merged; where they are no quorum it is opened anew.

        Raises:
            LocalProtocolError: No such round is being merged, or not with these.
        """
        closed = self._merging(event.round_id)
        if not event.keys or not set(event.keys) <= {entry.header.key for entry in closed.entries}:
            raise LocalProtocolError(f"round {event.round_id} doesn't merge {event.keys}")
        fragment_id, reachable = closed.fragment_id, self.context.membership.reachable
        fresh = {
            entry.header.key.learner_id
            for entry in closed.entries
            if entry.header.key not in event.keys
            and entry.staleness == 0
            and answers(entry.header, closed.round_id, closed.attempt, reachable)
        }
        opened_anew = len(fresh) < self.context.settings.policy.quorum
        lost = ContributionsLost(
            round_id=closed.round_id, fragment_id=fragment_id, keys=event.keys, opened_anew=opened_anew
        )
        self.context.record(lost, durable=True)
        senders = ", ".join(sorted({key.learner_id for key in event.keys}))
        then = f"{len(fresh)} fresh ones are left, and it is opened anew" if opened_anew else "the others are merged"
        text = f"round {closed.round_id}: what came from {senders} can't be read from the disk any more; {then}"
        self.context.show("storage", text)
        if opened_anew:
            self.queue.add(fragment_id, closed.global_step)
        else:
            self._start_merge(self.context.state.closed[fragment_id], now_s)

    def _merging(self, round_id: RoundId) -> RoundClosed:
        for closed in self.context.state.closed.values():
            if closed.round_id == round_id:
                return closed
        raise LocalProtocolError(f"round {round_id} is not being merged")

    def observe_response(self, header: ContributionHeader, now_s: float) -> None:
        """How long a learner took, in time or late; but not how long it stood in its own queue."""
        for round_ in self.asked.get(header.key.fragment_id, ()):
            if round_.round_id == header.round_id:
                response_s = round_.response_s(header.key.learner_id, header.attempt, now_s)
                if response_s is not None:
                    self.context.responses.observe(header.key.learner_id, response_s)

    def observe_sync(self, message: UpdateReceived, now_s: float) -> None:
        """How long merge and downlink took."""
        closed_s = self._closed_s.get(message.fragment_id)
        if closed_s is not None and message.version == self.context.state.versions[message.fragment_id]:
            self.context.sync_s = smooth(self.context.sync_s, now_s - closed_s)

    def _open_rounds(self, now_s: float) -> None:
        while len(self.open) + len(self.context.state.closed) < self.context.settings.rounds_max:
            due = self.queue.pop(
                lambda fragment: fragment not in self.open and fragment not in self.context.state.closed
            )
            if due is None:
                return
            fragment_id, due_step = due
            round_ = OpenRound(
                round_id=RoundId(self.context.state.next_round),
                fragment_id=fragment_id,
                due_step=due_step,
                opened_s=now_s,
            )
            self.context.state.next_round += 1
            self.open[fragment_id] = round_
            self.asked.setdefault(fragment_id, deque(maxlen=_REMEMBERED)).append(round_)
            self._ask(round_, now_s)

    def _ask(self, round_: OpenRound, now_s: float) -> None:
        """Begin an attempt: freeze the members of now, and ask them all."""
        members = {member.learner_id: member.incarnation for member in self.context.membership.live()}
        step_s = self.context.membership.step_s()
        policy = self.context.settings.policy
        extra_s = self._extra_s(round_.fragment_id, members)
        patience_s = policy.bound_steps * step_s if step_s is not None else FIRST_WINDOW_S
        window_s = self._window_s(members, extra_s, patience_s, attempt=round_.attempt)
        # Who lacks work is asked again soon; but not for ever before others' answers, which take longer, can be here.
        impatient_s = patience_s * 2.0 ** min(max(0, round_.attempt - _QUICK_ATTEMPTS), 16)
        patience_s = max(patience_s, min(2 * self._slowest_s(members, extra_s), impatient_s))
        round_.ask(members, now_s, patience_s=patience_s, window_s=window_s, extra_s=extra_s)
        late_s = max(extra_s.values(), default=0.0)
        for member in self.context.membership.live():
            if member.session is not None:
                pull = Pull(
                    round_id=round_.round_id,
                    attempt=round_.attempt,
                    fragment_id=round_.fragment_id,
                    version=self.context.state.versions[round_.fragment_id],
                    window_s=policy.bound_steps * step_s + late_s if step_s is not None else 0.0,
                    upload_s=self._spread_s(),
                )
                self.context.send(member.session, pull)

    def cap_changed(self) -> None:
        """What the syncer takes in is another amount now: who was asked before may be as quick as that lets it be."""
        for round_ in self.open.values():
            extra_s = self._extra_s(round_.fragment_id, round_.asked)
            window_s = self._window_s(round_.asked, extra_s, round_.patience_s, attempt=round_.attempt - 1)
            round_.grant_anew(window_s=window_s, extra_s=extra_s)

    def _window_s(
        self, asked: Iterable[LearnerId], extra_s: Mapping[LearnerId, float], patience_s: float, *, attempt: int
    ) -> float:
        """How long an attempt is given, after so many others."""
        slowest_s = self._slowest_s(asked, extra_s)
        window_s = min(WINDOW_MAX_S, max(patience_s, 2 * slowest_s) * 2.0 ** min(attempt, 16))
        return max(window_s, 2 * slowest_s)

    def _slowest_s(self, asked: Iterable[LearnerId], extra_s: Mapping[LearnerId, float]) -> float:
        """Within which even the slowest usually answers."""
        usual = self.context.responses.estimates()
        slowest_s = max((usual[learner].usual_s for learner in asked if learner in usual), default=0.0)
        return slowest_s + max(extra_s.values(), default=0.0)

    def _extra_s(self, fragment_id: FragmentId, asked: Iterable[LearnerId]) -> dict[LearnerId, float]:
        """By how much the syncer's cap makes the answer of each that is asked later."""
        senders = (member.learner_id for member in self.context.membership.senders())
        size = self.context.settings.intake.fragments[fragment_id]
        extras_s = self.context.ingress.extras_s(senders, size.codes_bytes + size.scales_bytes, self._spread_s())
        return {learner: extras_s[learner] for learner in asked if learner in extras_s}

    def _spread_s(self) -> float:
        """The uplink's share of the window.

        What the syncer's cap makes of it follows from the rates in `Pace`, which change when the cap does; a time that
        was told once would stand.
        """
        return UPLINK_SHARE * self.context.settings.policy.overlap_steps * (self.context.membership.step_s() or 0.0)

    def _decide(self, round_: OpenRound, now_s: float) -> None:
        fragment_id = round_.fragment_id
        found = self._candidates(round_)
        for learner in found.fresh:
            round_.taken(learner)
        quorate = len(found.fresh) >= self.context.settings.policy.quorum
        if quorate and round_.quorate_s is None:
            round_.quorate_s = now_s
        elif not quorate:
            round_.quorate_s = None
        view = RoundView(
            opened_s=round_.asked_s,
            quorate_s=round_.quorate_s,
            fresh=found.fresh,
            awaited=self._awaited(round_, found),
            extra_s=round_.extra_s,
        )
        verdict = decide(self.context.settings.policy, self.context.estimates(), view, now_s)
        self._verdicts[fragment_id] = verdict
        if verdict.close:
            self._close(round_, found, now_s)
        elif round_.quorate_s is None and now_s >= round_.gives_up_s:
            quorum = self.context.settings.policy.quorum
            known = dict.fromkeys((*self.context.settings.terms.learners, *sorted(round_.asked)))
            silent = ", ".join(learner for learner in known if learner not in found.fresh)
            text = f"round {round_.round_id}: {len(found.fresh)} of {quorum} learners, lacking {silent}"
            self.context.show(f"fragment:{fragment_id}", text)
            self._ask(round_, now_s)

    def _candidates(self, round_: OpenRound) -> Candidates:
        state, fragment_id = self.context.state, round_.fragment_id
        pool = list(state.pool[fragment_id].values())
        return candidates(round_, pool, state.versions[fragment_id], self.context.membership.reachable)

    def _awaited(self, round_: OpenRound, found: Candidates) -> frozenset[LearnerId]:
        """Members that were asked, can be reached, and have not answered."""
        return frozenset(
            learner
            for learner, incarnation in round_.asked.items()
            if learner not in found.fresh
            and learner not in round_.declined
            and learner not in round_.refused
            and self.context.membership.reachable(learner, incarnation)
        )

    def _close(self, round_: OpenRound, found: Candidates, now_s: float) -> None:
        fragment_id = round_.fragment_id
        for item in found.too_old:
            record = ContributionDiscarded(header=item.header, reason=RefusalReason.STALE_BASE)
            self.context.record(record, durable=False)
        assert round_.quorate_s is not None
        version = self.context.state.versions[fragment_id]
        closed = RoundClosed(
            round_id=round_.round_id,
            attempt=round_.attempt,
            fragment_id=fragment_id,
            from_version=version,
            to_version=version.next(),
            global_step=round_.due_step,
            members=tuple(sorted(round_.asked)),
            entries=found.entries,
            missing=missing(round_, found.entries, self.context.membership.reachable),
            quorum_s=round_.quorate_s - round_.opened_s,
            grace_s=now_s - round_.quorate_s,
        )
        self.context.record(closed, durable=True)
        del self.open[fragment_id]
        self._verdicts.pop(fragment_id, None)
        self.context.show(f"fragment:{fragment_id}", "")
        self._start_merge(closed, now_s)

    def _start_merge(self, closed: RoundClosed, now_s: float) -> None:
        self._closed_s[closed.fragment_id] = now_s
        effect = StartMerge(
            round_id=closed.round_id,
            fragment_id=closed.fragment_id,
            from_version=closed.from_version,
            to_version=closed.to_version,
            global_step=closed.global_step,
            entries=closed.entries,
        )
        self.context.effects.append(effect)
