"""A syncer's durable state as JSON, for snapshots, and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sized
from typing import Any

from wan_diloco.errors import DecodeError
from wan_diloco.protocol.leases import Lease
from wan_diloco.protocol.ledger import Amount, DiscardReason, Ledger, Life, Settled
from wan_diloco.protocol.messages import RefusalReason
from wan_diloco.protocol.serial import from_json, to_json
from wan_diloco.protocol.syncer_state import Journalled, StoredUpdate, SyncerState, Totals
from wan_diloco.protocol.tape import RoundClosed
from wan_diloco.protocol.unit_book import UnitBook
from wan_diloco.units import Epoch, Incarnation, LearnerId, ShardId, Term, Version

__all__ = ["state_from_json", "state_to_json"]

# Rises with any change of this form; an unknown one is refused rather than guessed at.
_FORMAT = 4


def state_to_json(state: SyncerState) -> dict[str, Any]:
    """A JSON-able form that `state_from_json` reads."""
    return {
        "format": _FORMAT,
        "parameters": list(state.parameters),
        "initial_digests": list(state.initial_digests),
        "keep_updates": state.keep_updates,
        "term": state.term,
        "term_ids": to_json(state.term_ids),
        "epoch": state.epoch,
        "durable": state.durable,
        "started": state.started,
        "ended": state.ended,
        "global_step": state.global_step,
        "next_round": state.next_round,
        "incarnations": to_json(state.incarnations),
        "life_ids": to_json(state.life_ids),
        "anchors": to_json(state.anchors),
        "versions": to_json(state.versions),
        "digests": list(state.digests),
        "updates": to_json(state.updates),
        "pool": [to_json(list(pool.values())) for pool in state.pool],
        "closed": to_json(list(state.closed.values())),
        "leases": to_json(state.leases),
        "units": to_json(state.units),
        "shards": to_json(state.shards),
        "listed": to_json(state.listed),
        "total_steps": state.total_steps,
        "unit_book": to_json(state.unit_book),
        "due_steps": list(state.due_steps),
        "merges": list(state.merges),
        "participation": to_json(dict(state.participation)),
        "rejected": {reason.value: count for reason, count in state.rejected.items()},
        "totals": to_json(state.totals),
        "ledger": _ledger_to_json(state.ledger),
    }


def state_from_json(data: dict[str, Any]) -> SyncerState:
    """The state that `state_to_json` wrote.

    Raises:
        DecodeError: It isn't one.
    """
    if data.get("format") != _FORMAT:
        raise DecodeError("garbage", f"a syncer's state of format {data.get('format')!r} isn't known here")
    try:
        state = SyncerState(
            parameters=tuple(data["parameters"]),
            initial_digests=tuple(data["initial_digests"]),
            keep_updates=int(data["keep_updates"]),
            term=Term(data["term"]),
            epoch=Epoch(data["epoch"]),
            durable=bool(data["durable"]),
            started=bool(data["started"]),
            ended=bool(data["ended"]),
            global_step=int(data["global_step"]),
            next_round=int(data["next_round"]),
        )
        state.incarnations = from_json(dict[LearnerId, Incarnation], data["incarnations"])
        state.term_ids = from_json(dict[Term, str], data["term_ids"])
        state.life_ids = from_json(dict[LearnerId, str], data["life_ids"])
        state.anchors = from_json(dict[LearnerId, int], data["anchors"])
        state.versions = list(from_json(tuple[Version, ...], data["versions"]))
        state.digests = list(from_json(tuple[str, ...], data["digests"]))
        state.updates = [list(chain) for chain in from_json(tuple[tuple[StoredUpdate, ...], ...], data["updates"])]
        pools = from_json(tuple[tuple[Journalled, ...], ...], data["pool"])
        state.pool = [{entry.header.key: entry for entry in pool} for pool in pools]
        state.closed = {record.fragment_id: record for record in from_json(tuple[RoundClosed, ...], data["closed"])}
        state.leases = from_json(dict[LearnerId, Lease], data["leases"])
        state.units = from_json(dict[ShardId, int], data["units"])
        state.unit_book = from_json(UnitBook, data["unit_book"])
        state.shards = from_json(dict[LearnerId, ShardId], data["shards"])
        state.listed = from_json(tuple[tuple[LearnerId, ShardId], ...], data["listed"])
        state.total_steps = int(data["total_steps"])
        state.due_steps = list(from_json(tuple[int, ...], data["due_steps"]))
        state.merges = list(from_json(tuple[int, ...], data["merges"]))
        state.participation = Counter(from_json(dict[LearnerId, int], data["participation"]))
        state.rejected = Counter(from_json(dict[RefusalReason, int], data["rejected"]))
        state.totals = from_json(Totals, data["totals"])
        state.ledger = _ledger_from_json(data["ledger"], len(state.parameters))
    except (KeyError, TypeError, ValueError, OverflowError) as exc:
        raise DecodeError("garbage", f"a syncer's state lacks or mistakes {exc}") from exc
    _check_sizes(state)
    return state


def _check_sizes(state: SyncerState) -> None:
    """Refuse a state whose lists aren't of one length: it would fail much later, in the middle of a run."""
    ledger = state.ledger
    per_fragment: list[Sized] = [state.initial_digests, state.versions, state.digests, state.updates, state.pool]
    per_fragment += [state.due_steps, state.merges, state.unit_book.last, ledger.merged, ledger.discarded]
    for life in ledger.lives.values():
        per_fragment += [life.running, life.ended, life.sealed]
    count = len(state.parameters)
    if any(len(items) != count for items in per_fragment) or any(fragment >= count for fragment in state.closed):
        raise DecodeError("garbage", f"a syncer's state isn't one of {count} fragments throughout")


def _ledger_to_json(ledger: Ledger) -> dict[str, Any]:
    return {
        "trained": to_json(ledger.trained),
        "earlier": to_json(ledger.earlier),
        "merged": to_json(ledger.merged),
        "discarded": [
            {reason.value: to_json(amount) for reason, amount in account.items()} for account in ledger.discarded
        ],
        "lives": [
            {"learner": learner, "incarnation": incarnation, "life": to_json(life)}
            for (learner, incarnation), life in ledger.lives.items()
        ],
    }


def _ledger_from_json(data: dict[str, Any], num_fragments: int) -> Ledger:
    ledger = Ledger(num_fragments)
    ledger.trained = from_json(Amount, data["trained"])
    ledger.earlier = from_json(Settled, data["earlier"])
    ledger.merged = list(from_json(tuple[Amount, ...], data["merged"]))
    ledger.discarded = [from_json(dict[DiscardReason, Amount], account) for account in data["discarded"]]
    for item in data["lives"]:
        life: Life = from_json(Life, item["life"])
        ledger.lives[LearnerId(item["learner"]), Incarnation(item["incarnation"])] = life
    return ledger
