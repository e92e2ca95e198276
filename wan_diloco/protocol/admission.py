"""Who may take part: the checks at Hello, as one pure function.

Two ends that differ in layout, settings or initial weights would merge garbage without any error, so the
first difference is named and the session refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from wan_diloco.protocol.messages import PROTOCOL_VERSION, Hello, RefusalReason, Refused
from wan_diloco.units import Incarnation, LearnerId

__all__ = ["Terms", "differing_setting", "examine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a learner must agree with.

    Attributes:
        learners: Names that may take part.
    """

    run: str
    learners: tuple[LearnerId, ...]
    layout: tuple[str, ...]
    settings: tuple[tuple[str, str], ...]
    initial_digests: tuple[str, ...]


def examine(
    terms: Terms, hello: Hello, standing: Incarnation, *, life_id: str = "", went_back: bool = False
) -> Refused | None:
    """Why a Hello must be refused; None when it may be taken in.

    Args:
        terms: What it must agree with.
        hello: What it says.
        standing: The highest incarnation ever given to this learner; 0 for none.
        life_id: Of the process that lives it; empty where that isn't known.
        went_back: Whether the state went back once, so that lives may have been given which it knows nothing of.
    """
    if hello.protocol_version != PROTOCOL_VERSION:
        detail = f"the syncer speaks protocol {PROTOCOL_VERSION}, the learner {hello.protocol_version}"
        return _no(RefusalReason.PROTOCOL_VERSION, detail)
    if hello.run != terms.run:
        return _no(RefusalReason.OTHER_RUN, f"this syncer runs {terms.run!r}, the learner {hello.run!r}")
    if hello.learner_id not in terms.learners:
        known = ", ".join(terms.learners)
        return _no(RefusalReason.UNKNOWN_LEARNER, f"no region {hello.learner_id!r} is configured, only {known}")
    # Only of a process that can be told from others: whoever else has the number is refused from then on.
    is_forgotten = went_back and hello.incarnation > standing and bool(hello.life_id)
    if hello.incarnation and hello.incarnation != standing and not is_forgotten:
        detail = f"incarnation {hello.incarnation} of {hello.learner_id} is over, {standing} stands"
        return _no(RefusalReason.FENCED, detail)
    if hello.incarnation == standing and life_id and hello.life_id and life_id != hello.life_id:
        # Of a life that was forgotten the number may have been given again.
        return _no(RefusalReason.FENCED, f"incarnation {standing} of {hello.learner_id} is another process")
    return _differs(terms, hello)


def differing_setting(mine: Iterable[tuple[str, str]], theirs: Mapping[str, str]) -> tuple[str, str] | None:
    """The first setting, and my value, that isn't the same on the other side; None when all are."""
    return next(((key, value) for key, value in mine if theirs.get(key) != value), None)


def _differs(terms: Terms, hello: Hello) -> Refused | None:
    theirs = dict(hello.settings)
    setting = differing_setting(terms.settings, theirs)
    if setting is not None:
        key, mine = setting
        detail = f"{key} is {mine} at the syncer and {theirs.get(key, 'not set')} at the learner"
        return _no(RefusalReason.OTHER_SETTINGS, detail)
    extra = sorted(set(theirs) - {key for key, _ in terms.settings})
    if extra:
        detail = f"{extra[0]} is {theirs[extra[0]]} at the learner and not set at the syncer"
        return _no(RefusalReason.OTHER_SETTINGS, detail)
    difference = _first_difference(terms.layout, hello.layout)
    if difference is not None:
        return _no(RefusalReason.OTHER_LAYOUT, difference)
    difference = _first_difference(terms.initial_digests, hello.initial_digests, name="initial weights of fragment")
    if difference is not None:
        return _no(RefusalReason.OTHER_WEIGHTS, difference)
    return None


def _first_difference(mine: Sequence[str], theirs: Sequence[str], name: str = "line") -> str | None:
    for index, (left, right) in enumerate(zip_longest(mine, theirs, fillvalue="nothing")):
        if left != right:
            return f"{name} {index}: {left} at the syncer, {right} at the learner"
    return None


def _no(reason: RefusalReason, detail: str) -> Refused:
    return Refused(reason=reason, detail=detail[:500])
