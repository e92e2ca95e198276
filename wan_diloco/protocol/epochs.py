"""A new epoch: what the state has been built on is not what learners have, so that all begin anew from what is there.

Within an epoch a version is the same bits everywhere. Where the state went back, or is cut otherwise than it was, that
can't be said any more; a new epoch says so to everybody, without a message of its own: whoever holds a version of
another epoch is sent the value, and what it contributes to one is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wan_diloco.protocol.ledger import DiscardReason
from wan_diloco.units import Epoch, Version

if TYPE_CHECKING:
    from wan_diloco.protocol.syncer_state import SyncerState
    from wan_diloco.protocol.tape import Refragmented

__all__ = ["begin_epoch", "next_epoch", "refragment"]


def begin_epoch(state: SyncerState, epoch: Epoch, reason: DiscardReason) -> None:
    """Let a state go on in another epoch; a function of its arguments, as all that records do to a state.

    Values, counts and counters stay. What isn't merged is lost: contributions in the journal, named by a close record
    or not, and what learners have done since. A round that was closed and not published is due still.

    Args:
        state: Is changed.
        epoch: Above the state's.
        reason: What the ledger says of the work that is lost, also of what learners still do until they are resynced.
    """
    assert epoch > state.epoch, f"epoch {epoch} after {state.epoch}"
    state.epoch = epoch
    state.versions = [Version(epoch, version.count) for version in state.versions]
    # No chain leads from a version of one epoch to one of another.
    state.updates = [[] for _ in state.updates]
    for pool in state.pool:
        for journalled in pool.values():
            state.ledger.settled(journalled.header, reason)
        pool.clear()
    for fragment_id, closed in state.closed.items():
        for entry in closed.entries:
            state.ledger.settled(entry.header, reason)
        state.due_steps[fragment_id] = closed.global_step - 1
    state.closed.clear()
    state.ledger.lose(reason)


def refragment(state: SyncerState, record: Refragmented) -> None:
    """Let a state go on with other fragments, in a new epoch; the values are somebody else's affair.

    Every new fragment was merged at least as often as the old one that was merged least.
    """
    begin_epoch(state, record.epoch, DiscardReason.REFRAGMENTED)
    count = len(record.parameters)
    state.ledger.recut(state.parameters, count)
    state.unit_book.recut(count)
    state.parameters = record.parameters
    state.initial_digests = record.initial_digests
    state.versions = [Version(record.epoch, number) for number in record.counts]
    state.digests = list(record.digests)
    state.updates = [[] for _ in range(count)]
    state.pool = [{} for _ in range(count)]
    state.due_steps = list(record.due_steps)
    state.merges = [min(state.merges)] * count


def next_epoch(state: SyncerState, epoch_min: Epoch) -> Epoch:
    """The epoch that the next process begins with.

    Args:
        state: Of the process before.
        epoch_min: Where copies of another state were taken up, above all that it can have had.
    """
    if state.ended:
        # Nothing is merged any more.
        return state.epoch
    # Whether something was lost that wasn't flushed can't be told from what is there.
    return Epoch(max(state.epoch + (not state.durable), epoch_min))
