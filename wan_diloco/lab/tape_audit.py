"""An account of a run's contributions from its tape alone, apart from the books that the syncer's machine keeps.

It reads `tape.jsonl` line by line, as a stranger would: only the form of the records is known, no code of the machine's
is used. So a mistake in the machine's own account can't hide itself here.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["TapeAudit", "audit_tape"]

_SENTENCES_MAX: Final = 50

# Learner, incarnation, fragment, and the step at which the work begins.
_Key = tuple[str, int, int, int]
# The step up to which work goes, and its base: epoch and count.
_Work = tuple[int, tuple[int, int]]


@dataclass(slots=True, kw_only=True)
class TapeAudit:
    """What a tape proves.

    Attributes:
        acknowledged: Contributions that were journalled; that is what is acknowledged.
        merged: Of them, in a published round.
        discarded: Of them, with a reason; those that the run's end found unmerged included.
        replaced: Of them, by a larger one of the same work.
        outstanding: Of them, whose fate was still open where the tape ends.
        double_merges: Steps' work that was merged more than once.
        repeated_units: Units of data that a fragment has from more than one contribution.
        lost_acknowledged: Journalled work that was passed over though it could have been merged, or that a close named
            and no publication followed.
        unaccounted: Other things that can't be: merged without being journalled, versions that aren't contiguous.
        rounds, published: How many were closed, and published.
        terms: Lives of the syncer.
        ended: Whether the run's end is on the tape.
        damaged_lines: That the file has beside; it is a copy, and may be torn by a kill.
        sentences: What exactly is wrong; the first so many.
    """

    acknowledged: int = 0
    merged: int = 0
    discarded: dict[str, int] = field(default_factory=dict)
    replaced: int = 0
    outstanding: int = 0
    double_merges: int = 0
    repeated_units: int = 0
    lost_acknowledged: int = 0
    unaccounted: int = 0
    rounds: int = 0
    published: int = 0
    terms: int = 0
    ended: bool = False
    damaged_lines: int = 0
    sentences: list[str] = field(default_factory=list)


def audit_tape(lines: Iterable[bytes]) -> TapeAudit:
    """Go through a tape.

    Args:
        lines: Of `tape.jsonl`, in order.
    """
    auditor = _Auditor()
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            auditor.audit.damaged_lines += 1
            continue
        auditor.take(record)
    return auditor.finish()


class _Auditor:
    """Holds what is journalled and not yet decided, fragment by fragment."""

    def __init__(self) -> None:
        self.audit = TapeAudit()
        # Of each piece of work, the step up to which it is journalled, and its base.
        self._waiting: dict[int, dict[_Key, _Work]] = defaultdict(dict)
        # Steps of each life and fragment that are in a close record.
        self._covered: dict[tuple[str, int, int], list[tuple[int, int]]] = defaultdict(list)
        # Of each round that is closed and not published, its fragment and what it merges: up to which step, on which
        # base.
        self._closed: dict[int, tuple[int, dict[_Key, _Work]]] = {}
        self._versions: dict[int, tuple[int, int]] = {}
        self._rounds: set[int] = set()
        self._epoch = 0
        # Of each life, the shard of the data that it reads; of each shard and fragment, the units that were merged.
        self._shards: dict[tuple[str, int], int] = {}
        self._units: dict[tuple[int, int], list[tuple[int, int, _Key]]] = defaultdict(list)

    def take(self, record: Mapping[str, Any]) -> None:
        match record.get("type"):
            case "SyncerStarted":
                self._started(int(record.get("epoch", 0)))
            case "LearnerAdmitted":
                self._shards[str(record["learner_id"]), int(record["incarnation"])] = int(record["shard"])
            case "ContributionJournalled":
                self._journalled(record["header"])
            case "ContributionDiscarded":
                self._discarded(record["header"], str(record["reason"]))
            case "ContributionsLost":
                self._lost(record)
            case "RoundClosed":
                self._close(record)
            case "FragmentPublished":
                self._publish(record)
            case "RunEnded":
                self.audit.ended = True
            case _:
                pass

    def finish(self) -> TapeAudit:
        """The account, with what is left over."""
        left = sum(map(len, self._waiting.values()))
        for round_id, (fragment, entries) in self._closed.items():
            if self.audit.ended:
                self.audit.lost_acknowledged += len(entries)
                self._wrong(f"round {round_id} of fragment {fragment} was closed, and never published")
        if self.audit.ended:
            if left:
                self.audit.discarded["run_ended"] = self.audit.discarded.get("run_ended", 0) + left
        else:
            self.audit.outstanding = left + sum(len(entries) for _, entries in self._closed.values())
        return self.audit

    def _journalled(self, header: Mapping[str, Any]) -> None:
        key, step_hi = _key(header), int(header["step_hi"])
        waiting = self._waiting[key[2]]
        standing = waiting.get(key)
        if standing is not None and step_hi == standing[0]:
            # Counted for a newer attempt: the same work, the same bytes.
            return
        if any(lo < step_hi and key[3] < hi for lo, hi in self._covered[key[:3]]):
            self.audit.unaccounted += 1
            self._wrong(f"{_said(key, step_hi)} was journalled after it had been merged")
        self.audit.acknowledged += 1
        if standing is not None:
            self.audit.replaced += 1
            if step_hi < standing[0]:
                self.audit.lost_acknowledged += 1
                self._wrong(f"{_said(key, standing[0])} was replaced by less: up to step {step_hi}")
        waiting[key] = (step_hi, _version(header["base"]))

    def _discarded(self, header: Mapping[str, Any], reason: str) -> None:
        key = _key(header)
        named = next((entries for _, entries in self._closed.values() if key in entries), None)
        if named is not None:
            # A close named it, and then it couldn't be merged.
            self._undo(key, named.pop(key)[0])
        elif self._waiting[key[2]].pop(key, None) is None:
            self.audit.unaccounted += 1
            self._wrong(f"{_said(key, int(header['step_hi']))} was discarded ({reason}) without waiting for anything")
            return
        self.audit.discarded[reason] = self.audit.discarded.get(reason, 0) + 1

    def _started(self, epoch: int) -> None:
        self.audit.terms += 1
        if epoch == self._epoch:
            return
        # What wasn't merged before a new epoch isn't merged in it.
        self._epoch = epoch
        lost = sum(map(len, self._waiting.values())) + sum(len(entries) for _, entries in self._closed.values())
        if lost:
            self.audit.discarded["syncer_lost"] = self.audit.discarded.get("syncer_lost", 0) + lost
        self._waiting.clear()
        for _, entries in self._closed.values():
            for key, (step_hi, _) in entries.items():
                self._undo(key, step_hi)
        self._closed.clear()
        self._versions = {fragment: (epoch, count) for fragment, (_, count) in self._versions.items()}

    def _lost(self, record: Mapping[str, Any]) -> None:
        """A close named them, and they can't be read; a later one of the same key has all of their work."""
        round_id = int(record["round_id"])
        fragment, entries = self._closed.get(round_id, (0, {}))
        for item in record["keys"]:
            key = _key({"key": item})
            if key not in entries:
                self.audit.unaccounted += 1
                self._wrong(f"round {round_id} loses what it doesn't merge: {key}")
                continue
            self._undo(key, entries.pop(key)[0])
            self.audit.discarded["unreadable"] = self.audit.discarded.get("unreadable", 0) + 1
        if record["opened_anew"]:
            for key, work in entries.items():
                self._undo(key, work[0])
                self._waiting[fragment][key] = work
            self._closed.pop(round_id, None)

    def _close(self, record: Mapping[str, Any]) -> None:
        round_id, fragment = int(record["round_id"]), int(record["fragment_id"])
        if round_id in self._rounds:
            self.audit.unaccounted += 1
            self._wrong(f"round {round_id} is closed twice")
        self._rounds.add(round_id)
        self.audit.rounds += 1
        waiting, current = self._waiting[fragment], _version(record["from_version"])
        if current != (newest := self._versions.get(fragment, (current[0], 0))):
            self.audit.unaccounted += 1
            self._wrong(f"round {round_id} merges into version {current}, and {newest} is published")
        headers = [entry["header"] for entry in record["entries"]]
        for header in headers:
            self._merge(round_id, header, waiting)
        self._closed[round_id] = (
            fragment,
            {_key(header): (int(header["step_hi"]), _version(header["base"])) for header in headers},
        )
        for key, (step_hi, base) in list(waiting.items()):
            # Current or one behind can be merged, and is; the older ones are discarded by records of their own.
            if base[0] == current[0] and 0 <= current[1] - base[1] <= 1:
                self.audit.lost_acknowledged += 1
                self._wrong(f"round {round_id} passed over {_said(key, step_hi)}")
                del waiting[key]

    def _merge(self, round_id: int, header: Mapping[str, Any], waiting: dict[_Key, _Work]) -> None:
        key, step_hi = _key(header), int(header["step_hi"])
        covered = self._covered[key[:3]]
        if any(lo < step_hi and key[3] < hi for lo, hi in covered):
            self.audit.double_merges += 1
            self._wrong(f"round {round_id} merges {_said(key, step_hi)} again")
        covered.append((key[3], step_hi))
        if (shard := self._shards.get(key[:2])) is not None:
            self._read(round_id, key, step_hi, shard, int(header["unit_hi"]))
        standing = waiting.pop(key, None)
        if standing is None or standing[0] != step_hi:
            self.audit.unaccounted += 1
            self._wrong(f"round {round_id} merges {_said(key, step_hi)}, which isn't what was journalled")

    def _read(self, round_id: int, key: _Key, step_hi: int, shard: int, unit_hi: int) -> None:
        """A step takes one unit: what a contribution covers says which units are in it."""
        unit_lo = unit_hi - (step_hi - key[3])
        merged = self._units[shard, key[2]]
        again = sum(max(0, min(unit_hi, hi) - max(unit_lo, lo)) for lo, hi, other in merged if other != key)
        if again:
            self.audit.repeated_units += again
            self._wrong(f"round {round_id} merges {_said(key, step_hi)}: {again} units of data for the second time")
        merged.append((unit_lo, unit_hi, key))

    def _undo(self, key: _Key, step_hi: int) -> None:
        """What a close named isn't merged after all: neither its steps nor its units are."""
        self._covered[key[:3]].remove((key[3], step_hi))
        if (shard := self._shards.get(key[:2])) is not None:
            read = self._units[shard, key[2]]
            read[:] = [found for found in read if found[2] != key]

    def _publish(self, record: Mapping[str, Any]) -> None:
        round_id, fragment, version = int(record["round_id"]), int(record["fragment_id"]), _version(record["version"])
        before = self._versions.get(fragment, (version[0], 0))
        if version != (before[0], before[1] + 1):
            self.audit.unaccounted += 1
            self._wrong(f"fragment {fragment} goes from {before} to {version}")
        self._versions[fragment] = version
        closed = self._closed.pop(round_id, None)
        if closed is None:
            self.audit.unaccounted += 1
            self._wrong(f"round {round_id} is published without having been closed")
            return
        self.audit.published += 1
        self.audit.merged += len(closed[1])

    def _wrong(self, sentence: str) -> None:
        if len(self.audit.sentences) < _SENTENCES_MAX:
            self.audit.sentences.append(sentence)


def _key(header: Mapping[str, Any]) -> _Key:
    key = header["key"]
    return str(key["learner_id"]), int(key["incarnation"]), int(key["fragment_id"]), int(key["step_lo"])


def _version(version: Mapping[str, Any]) -> tuple[int, int]:
    return int(version["epoch"]), int(version["count"])


def _said(key: _Key, step_hi: int) -> str:
    learner, incarnation, fragment, step_lo = key
    return f"steps {step_lo + 1} to {step_hi} of {learner}'s life {incarnation}, fragment {fragment}"
