"""That things go on: rounds close while a quorum can be reached, and nobody who can be reached is left out.

Both are said of stretches in which nothing goes wrong: any fault, loss or end of a connection begins a new one.

**Progress.** If K learners can reach the syncer for T seconds, a round closes. T is what the settings allow at most:

    start_timeout + lease       before the first step, and until who is gone is known to be gone
    + 5 s                       the longest pause between two attempts to connect
    + (H/P + 2 + bound) steps   until a fragment is due, its snapshot is taken, and grace is over
    + max(120 s, 6 L)           the longest window of the attempt that stands: twice what answers usually take (mean and
                                two deviations), and none of that exceeds three times the longest, L
    + 10 s + 5 L                an upload whose acknowledgement was lost before is sent again, and takes its time
    + R (merge + 1 s)           merges that are ahead of it in the queue, and a failed one's retry

where L is the longest time from a question to its answer: the longest that was seen, or what the links say.

**No starvation.** No learner trains for more than 3 H steps without a fresh merge of any fragment, while 2 P rounds
are closed without it: rounds that nobody closes are the other law's affair. Exceptions, by physics:

- a learner whose answer (a step, three ways, as many uploads as may be under way) takes longer than a round may be held
  open (bound x the quickest step);
- a run whose period is shorter than such an answer, a merge, and the way back (a way, decoding, up to a step until the
  next boundary): its rounds follow each other so closely that who has just installed has no step to give;
- merges that aren't durable yet, which the books learn of later;
- losses that aren't finite, which are worth nothing; and with `grace_safety` 0 nothing is promised.
"""

from __future__ import annotations

from collections.abc import Iterable

from wan_diloco.simulation.checkers import Invariants, must
from wan_diloco.simulation.learner_node import LearnerNode
from wan_diloco.simulation.syncer_node import SyncerNode
from wan_diloco.simulation.talk import Talk
from wan_diloco.simulation.world_settings import LinkProfile, WorldSettings
from wan_diloco.units import LearnerId

__all__ = ["Liveliness", "answer_s", "progress_s"]

_RECONNECT_S = 5.0
_WINDOW_S = 120.0
_RESEND_S = 10.0
_LOOK_EVERY_S = 1.0


def answer_s(settings: WorldSettings, link: LinkProfile) -> float:
    """The longest that a learner needs from a question to an answer in the journal, by its link alone."""
    way_s = link.delay_s + link.jitter_s + settings.bulk_jitter_s
    return link.step_s + 3 * way_s + settings.uploads_max * link.upload_s


def progress_s(settings: WorldSettings, step_s: float, longest_s: float) -> float:
    """T, see the module.

    Args:
        settings: The run.
        step_s: Of the slowest of those that count.
        longest_s: L.
    """
    steps = settings.period_steps / settings.num_fragments + 2 + settings.bound_steps
    rounds = settings.for_syncer().rounds_max
    return (
        settings.start_timeout_s
        + settings.lease_s
        + _RECONNECT_S
        + steps * step_s
        + max(_WINDOW_S, 6 * longest_s)
        + _RESEND_S
        + 5 * longest_s
        + rounds * (settings.merge_s + 1.0)
    )


class Liveliness:
    """The books of one run.

    Args:
        settings: The run.
        invariants: The books of what is merged.
        talk: The books of who was asked.
    """

    def __init__(self, settings: WorldSettings, invariants: Invariants, talk: Talk) -> None:
        """Nothing has happened."""
        self._settings = settings
        self._invariants = invariants
        self._talk = talk
        self._look_s = 0.0
        self._since_s = 0.0
        self._closed = 0
        self._able: frozenset[tuple[LearnerId, int]] = frozenset()
        # Of each learner: merges, own step, and closed rounds, when its stretch began.
        self._stretches: dict[LearnerId, tuple[int, int, int]] = {}

    def disturbed(self, now_s: float) -> None:
        """Something goes wrong, or stops to: what comes is another stretch."""
        self._since_s = now_s
        self._stretches.clear()

    def look(self, now_s: float, syncer: SyncerNode, nodes: Iterable[LearnerNode]) -> None:
        """See how it goes, once in a while.

        Raises:
            Violation: It doesn't.
        """
        if now_s < self._look_s or syncer.ended:
            return
        self._look_s = now_s + _LOOK_EVERY_S
        able = [node for node in nodes if node.is_able]
        names = frozenset((node.learner_id, int(node.machine.incarnation)) for node in able)
        if names != self._able or not syncer.up or syncer.stalled:
            self._able = names
            self.disturbed(now_s)
            return
        if len(self._invariants.closed) != self._closed or len(able) < self._settings.quorum:
            self._closed = len(self._invariants.closed)
            self._since_s = now_s
        elif able:
            self._progress(now_s, able, syncer)
        for node in able:
            self._starves(node, min(other.link.step_s for other in able))

    def _progress(self, now_s: float, able: list[LearnerNode], syncer: SyncerNode) -> None:
        longest_s = max(self._talk.longest_s, *(answer_s(self._settings, node.link) for node in able))
        most_s = progress_s(self._settings, max(node.link.step_s for node in able), longest_s)
        stood_s = now_s - self._since_s
        waits = dict(syncer.machine.context.waiting)
        must(stood_s <= most_s, f"{len(able)} are there, and no round closed for {stood_s:.0f} s: {waits}")

    def _starves(self, node: LearnerNode, step_s: float) -> None:
        settings, learner_id = self._settings, node.learner_id
        merges = len(self._invariants.fresh_in.get(learner_id, ()))
        first_merges, first_step, first_closed = self._stretches.get(learner_id, (-1, 0, 0))
        if merges != first_merges:
            self._stretches[learner_id] = (merges, node.local_step, len(self._invariants.closed))
            return
        steps = node.local_step - first_step
        rounds = len(self._invariants.closed) - first_closed
        longest_s = answer_s(settings, node.link)
        in_time = longest_s <= settings.bound_steps * step_s
        back_s = node.link.delay_s + node.link.jitter_s + settings.bulk_jitter_s + settings.decode_s + node.link.step_s
        in_turn = longest_s + settings.merge_s + back_s <= settings.period_steps * step_s
        is_promised = settings.safety > 0 and in_time and in_turn and settings.durable
        if is_promised and rounds >= 2 * settings.num_fragments:
            text = f"{learner_id} has trained {steps} steps, {rounds} rounds were closed, and none had fresh work of it"
            must(steps <= 3 * settings.period_steps, text)
