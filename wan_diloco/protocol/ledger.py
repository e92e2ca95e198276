"""What became of each interval of each learner's steps, fragment by fragment.

A batch trains all fragments, which merge at P different times, so the account is kept per fragment. A
life's steps are cut into intervals by its installs: (step_lo, next step_lo]. Every step of every interval
is, at any time, exactly one of

    merged        in a published version
    discarded     overwritten or refused, with a reason
    outstanding   none of these yet

and `balance` proves it: trained minus the three is zero, in steps and in tokens. "Trained" is summed from the
learners' counters, the three from the structure below, so a step that is lost or counted twice shows.

Owner: `SyncerState`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from wan_diloco.protocol.messages import ContributionHeader, ContributionKey
from wan_diloco.units import FragmentId, Incarnation, LearnerId

__all__ = ["Amount", "DiscardReason", "Interval", "Ledger", "LedgerTotals", "Life", "Settled"]


class DiscardReason(StrEnum):
    """Why work was not merged."""

    OVERLAP = "overlap"
    LATE = "late"
    STALE_BASE = "stale_base"
    REFUSED = "refused"
    CRASHED = "crashed"
    LEASE_ENDED = "lease_ended"
    SYNCER_LOST = "syncer_lost"
    UNREADABLE = "unreadable"
    RUN_ENDED = "run_ended"
    REMOVED = "removed"
    REFRAGMENTED = "refragmented"


@dataclass(frozen=True, slots=True)
class Amount:
    """Work: steps and tokens. Also a cumulative position of a life, and the distance between two."""

    steps: int
    tokens: int

    def __add__(self, other: Amount) -> Amount:
        """Both added."""
        return Amount(self.steps + other.steps, self.tokens + other.tokens)

    def __sub__(self, other: Amount) -> Amount:
        """Both subtracted; may be negative, which `Ledger.balance` shows."""
        return Amount(self.steps - other.steps, self.tokens - other.tokens)


_NOTHING = Amount(0, 0)
# What work is lost for until a learner has taken the value of a new epoch.
_UNTIL_INSTALLED = frozenset({DiscardReason.SYNCER_LOST, DiscardReason.REFRAGMENTED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """What became of all work up to a moment at which none was outstanding, as means over the fragments of then.

    Attributes:
        balance: As it was.
    """

    trained: Amount = _NOTHING
    merged_tokens: float = 0.0
    discarded_tokens: dict[DiscardReason, float] = field(default_factory=dict)
    balance: int = 0


@dataclass(slots=True)
class Interval:
    """The work since an install, or, once `end` is there, up to the next one.

    Attributes:
        lo: Position of the install.
        settled: Up to here the work is merged or discarded already; `lo` when nothing is.
        journalled: Up to here a contribution is in the journal, not yet merged; None without one.
        end: Position of the next install; None while the interval runs.
        named: A close record names the contribution: nothing may replace it any more.
        remainder: What the work past `settled` and `journalled` becomes at the next install.
    """

    lo: Amount
    settled: Amount
    journalled: Amount | None = None
    end: Amount | None = None
    named: bool = False
    remainder: DiscardReason = DiscardReason.LATE


@dataclass(slots=True)
class Life:
    """One incarnation's counters and intervals.

    Attributes:
        position: Newest known.
        running: For each fragment, the interval that runs.
        ended: For each fragment, earlier intervals whose fate is open.
        sealed: For each fragment, (step_lo, step_hi) of the last few contributions that were settled, so
            that a repeated one is known for what it is.
        closed: Fenced or over: nothing is added to it any more.
    """

    position: Amount
    running: list[Interval]
    ended: list[list[Interval]]
    sealed: list[list[tuple[int, int]]]
    closed: bool = False


# A learner repeats only what wasn't acknowledged, which is at most what it has under way.
_SEALED_MAX = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerTotals:
    """Sums over all lives; byte-weighted means over fragments.

    Attributes:
        balance: Largest absolute imbalance of any fragment, in tokens and steps together; 0 or a bug.
    """

    trained_tokens: float
    merged_tokens: float
    outstanding_tokens: float
    discarded_tokens: dict[DiscardReason, float]
    balance: int


@dataclass(slots=True)
class Ledger:
    """The account of a run.

    Args:
        num_fragments: P.

    Attributes:
        earlier: Of the time before the parameters were cut into these fragments; all else, but `trained`, is since.
    """

    num_fragments: int
    trained: Amount = _NOTHING
    lives: dict[tuple[LearnerId, Incarnation], Life] = field(default_factory=dict)
    merged: list[Amount] = field(default_factory=list)
    discarded: list[dict[DiscardReason, Amount]] = field(default_factory=list)
    earlier: Settled = field(default_factory=Settled)

    def __post_init__(self) -> None:
        """Begin with nothing."""
        if not self.merged:
            self.merged = [_NOTHING] * self.num_fragments
            self.discarded = [{} for _ in range(self.num_fragments)]

    # ---- what is learned of the learners ---------------------------------------------------------

    def admit(self, learner_id: LearnerId, incarnation: Incarnation, position: Amount) -> None:
        """A new life begins at `position`; an older one of the same learner ends."""
        self.close(learner_id, DiscardReason.CRASHED)
        fragments = range(self.num_fragments)
        self.lives[learner_id, incarnation] = Life(
            position=position,
            running=[Interval(lo=position, settled=position) for _ in fragments],
            ended=[[] for _ in fragments],
            sealed=[[] for _ in fragments],
        )

    def observe(self, learner_id: LearnerId, incarnation: Incarnation, position: Amount) -> None:
        """A life's counters are at least there. Older news changes nothing."""
        life = self.lives.get((learner_id, incarnation))
        if life is None or life.closed or position.steps <= life.position.steps:
            return
        self.trained += position - life.position
        life.position = position

    def installed(self, learner_id: LearnerId, incarnation: Incarnation, fragment_id: FragmentId, lo: Amount) -> None:
        """A life's counters of a fragment restarted at `lo`.

        Known or older installs change nothing, and neither does one in the middle of work that a
        contribution contains, which no honest learner tells of.
        """
        life = self.lives.get((learner_id, incarnation))
        if life is None or life.closed:
            return
        running = life.running[fragment_id]
        if lo == running.lo and running.remainder in _UNTIL_INSTALLED:
            # It may have come at the very position that was known: what is done since then has fates of its own.
            running.remainder = DiscardReason.LATE
        if lo.steps <= running.lo.steps:
            return
        if not _lies_behind(life.running[fragment_id], lo):
            return
        self.observe(learner_id, incarnation, lo)
        # An interval that ended two installs ago without a contribution won't get one any more.
        self._give_up(life, fragment_id)
        self._end(life, fragment_id, lo)
        life.running[fragment_id] = Interval(lo=lo, settled=lo)

    # ---- fates -----------------------------------------------------------------------------------

    def accepts(self, header: ContributionHeader) -> bool:
        """Whether the work of a contribution is still without a fate."""
        key = header.key
        life = self.lives.get((key.learner_id, key.incarnation))
        if life is None:
            return False
        running = life.running[key.fragment_id]
        if key.step_lo > running.lo.steps:
            # An install that no report has told of yet.
            return not life.closed and _lies_behind(running, Amount(key.step_lo, header.tokens_lo))
        interval = self._find(key)
        if (
            interval is None
            or interval.named
            or interval.settled != interval.lo
            or interval.lo.tokens != header.tokens_lo
        ):
            return False
        return interval.end is None or header.step_hi <= interval.end.steps

    def is_repeated(self, header: ContributionHeader) -> bool:
        """Whether just this contribution, or a larger one of its key, was journalled before."""
        key = header.key
        life = self.lives.get((key.learner_id, key.incarnation))
        if life is None:
            return False
        interval = self._find(key)
        if interval is not None and interval.journalled is not None:
            return header.step_hi <= interval.journalled.steps
        return any(lo == key.step_lo and header.step_hi <= hi for lo, hi in life.sealed[key.fragment_id])

    def journalled(self, header: ContributionHeader) -> None:
        """A contribution is in the journal; a larger one replaces a smaller one of its key."""
        key = header.key
        lo, hi = Amount(key.step_lo, header.tokens_lo), Amount(header.step_hi, header.tokens_hi)
        self.installed(key.learner_id, key.incarnation, key.fragment_id, lo)
        self.observe(key.learner_id, key.incarnation, hi)
        interval = self._find(key)
        assert interval is not None
        assert interval.settled == interval.lo, "only open intervals take contributions"
        interval.journalled = hi
        if interval.end is not None:
            self._discard(key.fragment_id, DiscardReason.OVERLAP, interval.end - hi)
            interval.end = hi

    def named(self, header: ContributionHeader) -> None:
        """A close record names a contribution: a larger one of its key comes too late from now on."""
        interval = self._find(header.key)
        assert interval is not None
        interval.named = True

    def unnamed(self, header: ContributionHeader) -> None:
        """Its round is opened anew, and it waits again: a larger one of its key may replace it."""
        interval = self._find(header.key)
        assert interval is not None
        interval.named = False

    def settled(self, header: ContributionHeader, reason: DiscardReason | None) -> None:
        """A journalled contribution is merged (no reason) or discarded."""
        key = header.key
        amount = Amount(header.steps, header.tokens)
        if reason is None:
            self.merged[key.fragment_id] += amount
        else:
            self._discard(key.fragment_id, reason, amount)
        interval = self._find(key)
        assert interval is not None
        assert interval.journalled is not None, "only journalled work is settled"
        interval.journalled, interval.named = None, False
        interval.settled = Amount(header.step_hi, header.tokens_hi)
        life = self.lives[key.learner_id, key.incarnation]
        life.sealed[key.fragment_id] = [
            *life.sealed[key.fragment_id][1 - _SEALED_MAX :],
            (int(key.step_lo), int(header.step_hi)),
        ]
        if interval.end is not None:
            life.ended[key.fragment_id].remove(interval)
        self._forget_if_done(key.learner_id, key.incarnation)

    def unreadable(self, header: ContributionHeader) -> None:
        """A journalled contribution's bytes are lost.

        As long as its interval runs a later one of its key contains all of its work, and may come; or else, at the
        next install, that work is lost.
        """
        key = header.key
        interval = self._find(key)
        assert interval is not None
        assert interval.journalled is not None, "only what is journalled can't be read any more"
        if interval.end is not None:
            self.settled(header, DiscardReason.UNREADABLE)
            return
        interval.journalled, interval.named = None, False
        interval.remainder = DiscardReason.UNREADABLE

    def refused(self, key: ContributionKey) -> None:
        """A contribution was refused whole: unless a later one of its key comes in, its work is lost."""
        interval = self._find(key)
        if interval is not None and interval.journalled is None and interval.settled == interval.lo:
            interval.remainder = DiscardReason.REFUSED

    def recut(self, weights: tuple[int, ...], num_fragments: int) -> None:
        """Go on with other fragments.

        Ordering: after `lose`, so that all work has a fate.

        Args:
            weights: Bytes of each fragment until now.
            num_fragments: P from now on.
        """
        totals = self.totals(weights)
        self.earlier = Settled(
            trained=self.trained,
            merged_tokens=totals.merged_tokens,
            discarded_tokens=totals.discarded_tokens,
            balance=totals.balance,
        )
        self.num_fragments = num_fragments
        self.merged = [_NOTHING] * num_fragments
        self.discarded = [{} for _ in range(num_fragments)]
        for life in self.lives.values():
            assert not any(life.ended), "what is in the journal has a fate first"
            interval = life.running[0]
            life.running = [replace(interval) for _ in range(num_fragments)]
            life.ended = [[] for _ in range(num_fragments)]
            life.sealed = [[] for _ in range(num_fragments)]

    def close(self, learner_id: LearnerId, reason: DiscardReason) -> None:
        """A learner's open life is over. What it had journalled still counts."""
        for owner, incarnation in [name for name in self.lives if name[0] == learner_id]:
            life = self.lives[owner, incarnation]
            if life.closed:
                continue
            for index, interval in enumerate(life.running):
                fragment_id = FragmentId(index)
                for open_interval in (*life.ended[index], interval):
                    if open_interval.settled == open_interval.lo:
                        open_interval.remainder = reason
                self._give_up(life, fragment_id)
                self._end(life, fragment_id, life.position, reason)
                self._give_up(life, fragment_id)
                life.running[index] = Interval(lo=life.position, settled=life.position)
            life.closed = True
            self._forget_if_done(owner, incarnation)

    def lose(self, reason: DiscardReason) -> None:
        """All work without a fate is lost; learners that live go on from a new install each.

        What they do until that install is lost for the same reason.

        Ordering: no contribution is in the journal any more.
        """
        for life in self.lives.values():
            for index, interval in enumerate(life.running):
                assert interval.journalled is None, "what is in the journal has a fate first"
                for ended in life.ended[index]:
                    ended.remainder = reason
                self._give_up(life, FragmentId(index))
                assert not life.ended[index], "what is in the journal has a fate first"
                self._discard(FragmentId(index), reason, life.position - interval.settled)
                life.running[index] = Interval(lo=life.position, settled=life.position, remainder=reason)

    # ---- proof -----------------------------------------------------------------------------------

    def outstanding(self, fragment_id: FragmentId) -> Amount:
        """Work of a fragment that is neither merged nor discarded yet."""
        total = _NOTHING
        for life in self.lives.values():
            total += life.position - life.running[fragment_id].settled
            for interval in life.ended[fragment_id]:
                assert interval.end is not None
                total += interval.end - interval.settled
        return total

    def balance(self, fragment_id: FragmentId) -> Amount:
        """Trained less merged, discarded and outstanding: zero."""
        total = self.trained - self.earlier.trained - self.merged[fragment_id] - self.outstanding(fragment_id)
        for amount in self.discarded[fragment_id].values():
            total -= amount
        return total

    def totals(self, weights: tuple[int, ...]) -> LedgerTotals:
        """Headline figures.

        Args:
            weights: Bytes of each fragment.
        """
        fragments = [FragmentId(index) for index in range(self.num_fragments)]
        whole = sum(weights)

        def mean(values: list[int]) -> float:
            return sum(weight * value for weight, value in zip(weights, values, strict=True)) / whole

        before = self.earlier
        known = before.discarded_tokens.keys() | {reason for account in self.discarded for reason in account}
        reasons = [reason for reason in DiscardReason if reason in known]
        return LedgerTotals(
            trained_tokens=float(self.trained.tokens),
            merged_tokens=before.merged_tokens + mean([amount.tokens for amount in self.merged]),
            outstanding_tokens=mean([self.outstanding(fragment).tokens for fragment in fragments]),
            discarded_tokens={
                reason: before.discarded_tokens.get(reason, 0.0)
                + mean([account.get(reason, _NOTHING).tokens for account in self.discarded])
                for reason in reasons
            },
            balance=max(
                before.balance, *(abs(amount.steps) + abs(amount.tokens) for amount in map(self.balance, fragments))
            ),
        )

    # ---- inside ----------------------------------------------------------------------------------

    def _find(self, key: ContributionKey) -> Interval | None:
        life = self.lives.get((key.learner_id, key.incarnation))
        if life is None:
            return None
        for interval in (life.running[key.fragment_id], *life.ended[key.fragment_id]):
            if interval.lo.steps == key.step_lo and not (life.closed and interval.end is None):
                return interval
        return None

    def _discard(self, fragment_id: FragmentId, reason: DiscardReason, amount: Amount) -> None:
        if amount.steps:
            account = self.discarded[fragment_id]
            account[reason] = account.get(reason, _NOTHING) + amount

    def _end(
        self, life: Life, fragment_id: FragmentId, end: Amount, past: DiscardReason = DiscardReason.OVERLAP
    ) -> None:
        """The running interval ends; what lies past a contribution of it is lost, by default overwritten."""
        interval = life.running[fragment_id]
        interval.end = end
        if interval.journalled is not None:
            self._discard(fragment_id, past, end - interval.journalled)
            interval.end = interval.journalled
        elif interval.settled != interval.lo:
            self._discard(fragment_id, past, end - interval.settled)
            return
        life.ended[fragment_id].append(interval)

    def _give_up(self, life: Life, fragment_id: FragmentId) -> None:
        """Ended intervals without a contribution get none any more; those in the journal still count."""
        for interval in life.ended[fragment_id]:
            if interval.journalled is None:
                assert interval.end is not None
                self._discard(fragment_id, interval.remainder, interval.end - interval.settled)
        life.ended[fragment_id] = [interval for interval in life.ended[fragment_id] if interval.journalled is not None]

    def _forget_if_done(self, learner_id: LearnerId, incarnation: Incarnation) -> None:
        """Drop a closed life of which nothing is outstanding: it is in the sums."""
        life = self.lives[learner_id, incarnation]
        if life.closed and not any(life.ended):
            del self.lives[learner_id, incarnation]


def _lies_behind(interval: Interval, lo: Amount) -> bool:
    """Whether an install at `lo` comes after all of an interval's work that has a fate or is in the journal."""
    last = interval.journalled or interval.settled
    return lo.steps >= last.steps and lo.tokens >= last.tokens
