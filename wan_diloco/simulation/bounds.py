"""Bounded memory: what the machines keep has bounds that follow from the run's settings, not from its length.

With M learners (the listed ones, and as many others as may join), P fragments, U uploads under way a learner, and R
rounds in progress:

    rounds in progress, verdicts, retries       R          queue                     P
    stored updates of a fragment                keep_updates
    what is remembered of a round               attempts remembered x M
    journalled work of a fragment               3 a life: on the current base, on the one before, and on the one before
                                                that, which came while its round was merged without it, until the next
                                                round closes; and 1 for each time that it took the published value anew
    lives in the ledger                         M, and those of which journalled work is left
    intervals of a life and fragment            1 running, 2 ended, and those with such work; sealed 4
    data: leases, units, spans of a fragment    M, a shard, a shard
    sessions that are ending                    those whose end the driver hasn't told yet
    reasons shown                               5 a learner, 1 a fragment, 5 of the run
    a learner's fragments                       P, of which U are busy

A life that brought work can't be forgotten before a round takes it: what was acknowledged is merged. So the pool grows
with lives that come and go while no quorum is reached, by an upload each; nothing else does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from wan_diloco.protocol.learner_machine import LearnerMachine
from wan_diloco.protocol.rounds import REMEMBERED_ATTEMPTS
from wan_diloco.protocol.syncer_machine import SyncerMachine
from wan_diloco.simulation.checkers import must
from wan_diloco.simulation.world_settings import WorldSettings

__all__ = ["check_learner", "check_syncer"]

_ENDED_MAX = 3
_SEALED_MAX = 4
_KEYS_A_LIFE = 3
_REASONS_A_LEARNER = 5
_REASONS = 5
_ASKED_ROUNDS = 4


def check_syncer(machine: SyncerMachine, settings: WorldSettings, sessions: int, resyncs: Sequence[int]) -> None:
    """Of a syncer.

    Args:
        machine: It.
        settings: The run.
        sessions: Connections of which the machine wasn't told that they ended.
        resyncs: Of each fragment, how often learners took the published value whatever they had.

    Raises:
        Violation: Something is larger than it may ever be.
    """
    for name, size, most in _sizes(machine, settings, sessions, resyncs):
        must(size <= most, f"the syncer keeps {size} of {name}, at most {most} may be")


def check_learner(machine: LearnerMachine, uploads_max: int) -> None:
    """Of a learner.

    Args:
        machine: It.
        uploads_max: U.

    Raises:
        Violation: Something is larger than it may ever be.
    """
    busy = sum(slot.is_busy for slot in machine.context.slots)
    must(busy <= uploads_max, f"a learner has {busy} uploads under way of {uploads_max}")
    must(not machine.context.effects, "a learner keeps effects that it has given")


def _sizes(
    machine: SyncerMachine, settings: WorldSettings, sessions: int, resyncs: Sequence[int]
) -> Iterator[tuple[str, int, int]]:
    context, conductor, state = machine.context, machine.conductor, machine.state
    learners, fragments = len(settings.learners) + settings.unlisted_max, settings.num_fragments
    shards = len(settings.learners) + settings.num_spare_shards
    rounds = context.settings.rounds_max
    yield "rounds open", len(conductor.open) + len(state.closed), rounds
    yield "rounds due", len(conductor.queue), fragments
    for remembered in conductor.asked.values():
        yield "rounds remembered", len(remembered), _ASKED_ROUNDS
        for round_ in remembered:
            yield "attempts remembered", len(round_.attempts), REMEMBERED_ATTEMPTS
            yield "answers remembered", len(round_.unmeasured), REMEMBERED_ATTEMPTS * learners
    yield "reasons", len(context.waiting), learners * _REASONS_A_LEARNER + fragments + _REASONS
    yield "echoes", len(context.echoes), learners
    yield "effects", len(context.effects), 0
    yield "sessions that are ending", len(context.closing), sessions
    yield "members", len(context.membership.members), learners
    yield "sessions", len(context.membership.sessions), sessions
    for books in (state.incarnations, state.anchors, state.leases, state.participation):
        yield "learners", len(books), learners
    yield "shards", len(state.units), shards
    for index in range(fragments):
        yield f"updates of fragment {index}", len(state.updates[index]), settings.keep_updates
        yield f"units of fragment {index}", len(state.unit_book.last[index]), shards
        lives = {(key.learner_id, key.incarnation) for key in state.pool[index]}
        yield f"work of fragment {index}", len(state.pool[index]), _KEYS_A_LIFE * len(lives) + resyncs[index]
    owing = {(key.learner_id, key.incarnation) for pool in state.pool for key in pool}
    owing |= {
        (entry.header.key.learner_id, entry.header.key.incarnation)
        for closed in state.closed.values()
        for entry in closed.entries
    }
    yield "lives", len(set(state.ledger.lives) - owing), learners
    for life in state.ledger.lives.values():
        for index, ended in enumerate(life.ended):
            yield f"intervals of fragment {index}", len(ended), _ENDED_MAX + resyncs[index]
        yield "sealed intervals", max(map(len, life.sealed)), _SEALED_MAX
