"""Who may take part: the checks at Hello, as one pure function.

Two ends that differ in layout, settings or initial weights would merge garbage without any error, so the
first difference is named and the session refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from wan_diloco.protocol.fence import are_two
from wan_diloco.protocol.messages import PROTOCOL_VERSION, Hello, RefusalReason, Refused
from wan_diloco.units import Incarnation, LearnerId, Term, is_region_name

__all__ = [
    "Standing",
    "Terms",
    "differing_setting",
    "examine",
    "is_of_a_copy",
    "is_of_another_state",
    "is_taken_over",
]

_NO_LIFE = Incarnation(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a learner must agree with.

    Attributes:
        learners: Names that the configuration lists; each has a shard of the data for good.
        unlisted_max: How many other names may take part over the whole run; 0 for none.
    """

    run: str
    learners: tuple[LearnerId, ...]
    layout: tuple[str, ...]
    settings: tuple[tuple[str, str], ...]
    initial_digests: tuple[str, ...]
    unlisted_max: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What is known of a name when its Hello comes.

    Attributes:
        incarnation: The highest that it was ever given; 0 for none.
        life_id: Of the process that lives it; empty where that isn't known.
        unlisted: How many names that nobody ever listed have taken part so far.
        once_listed: It is one of a region that was listed once; those count for nobody.
        went_back: Whether the state may have gone back once, so that lives were given which nothing is known of.
        strayed: Whether it was last with another process, on a copy of this state; that one may have given lives too.
    """

    incarnation: Incarnation = _NO_LIFE
    life_id: str = ""
    unlisted: int = 0
    once_listed: bool = False
    went_back: bool = False
    strayed: bool = False

    def lives(self, hello: Hello) -> bool:
        """Whether the process that says it lives the life that stands, also when it hasn't heard of it yet."""
        if hello.life_id and hello.life_id == self.life_id:
            return hello.incarnation <= self.incarnation
        # Of a life that was forgotten the number may be given again: who can be told from its process isn't it.
        return 0 < hello.incarnation == self.incarnation and not (hello.life_id and self.life_id)

    def forgot(self, hello: Hello) -> bool:
        """Whether it may be a life that was given, and that nothing is known of any more: its process gets another.

        Only a process that can be told from others: what it says again before it has heard of that one is its own.
        """
        return (self.went_back or self.strayed) and hello.incarnation > self.incarnation and bool(hello.life_id)

    def is_another(self, hello: Hello) -> bool:
        """Whether it lives the life that stands, with another state's bits: it gets another life, once."""
        return self.strayed and self.lives(hello) and hello.incarnation == self.incarnation


def examine(terms: Terms, hello: Hello, standing: Standing) -> Refused | None:
    """Why a Hello must be refused; None when it may be taken in.

    Args:
        terms: What it must agree with.
        hello: What it says.
        standing: What is known of its name.
    """
    if hello.protocol_version != PROTOCOL_VERSION:
        detail = f"the syncer speaks protocol {PROTOCOL_VERSION}, the learner {hello.protocol_version}"
        return _no(RefusalReason.PROTOCOL_VERSION, detail)
    if hello.run != terms.run:
        return _no(RefusalReason.OTHER_RUN, f"this syncer runs {terms.run!r}, the learner {hello.run!r}")
    if hello.learner_id not in terms.learners and (refused := _unlisted(terms, hello, standing)) is not None:
        return refused
    if hello.incarnation and not (standing.lives(hello) or standing.forgot(hello)):
        return _no(RefusalReason.FENCED, _why_over(hello, standing))
    return _differs(terms, hello)


def is_taken_over(terms: Terms, hello: Hello, term: Term) -> bool:
    """Whether a Hello proves that another process has this run: its sender was welcomed in a later term than this one.

    Only of a learner of this very run; strangers, and garbage, end nothing.

    Args:
        terms: What it must agree with.
        hello: What it says.
        term: Of this process.
    """
    return hello.term > term and _is_of_this_run(terms, hello)


def is_of_a_copy(terms: Terms, hello: Hello, term: Term, term_id: str) -> bool:
    """Whether a Hello proves that another process began this term too: both were started from copies of one state.

    Which of the two goes on, only who started them knows.

    Args:
        terms: What it must agree with.
        hello: What it says.
        term: Of this process.
        term_id: Drawn by this process; empty for none.
    """
    return hello.term == term and are_two(term_id, hello.term_id) and _is_of_this_run(terms, hello)


def is_of_another_state(terms: Terms, hello: Hello, standing: Standing) -> bool:
    """Whether a Hello proves that there is another state of this run: its sender took part, and here it never did.

    Args:
        terms: What it must agree with.
        hello: What it says.
        standing: What is known of its name.
    """
    took_part = hello.incarnation > 0 or hello.local_step > 0
    is_unknown = not (standing.incarnation or standing.went_back or standing.strayed)
    return took_part and is_unknown and _is_of_this_run(terms, hello)


def _is_of_this_run(terms: Terms, hello: Hello) -> bool:
    is_known = hello.learner_id in terms.learners or bool(terms.unlisted_max)
    same = (hello.protocol_version, hello.run) == (PROTOCOL_VERSION, terms.run)
    return same and is_known and _differs(terms, hello) is None


def differing_setting(mine: Iterable[tuple[str, str]], theirs: Mapping[str, str]) -> tuple[str, str] | None:
    """The first setting, and my value, that isn't the same on the other side; None when all are."""
    return next(((key, value) for key, value in mine if theirs.get(key) != value), None)


def _why_over(hello: Hello, standing: Standing) -> str:
    if hello.incarnation == standing.incarnation:
        return f"incarnation {hello.incarnation} of {hello.learner_id} is another process"
    return f"incarnation {hello.incarnation} of {hello.learner_id} is over, {standing.incarnation} stands"


def _unlisted(terms: Terms, hello: Hello, standing: Standing) -> Refused | None:
    """Why a name that nobody listed may not take part."""
    if not terms.unlisted_max:
        known = ", ".join(terms.learners)
        return _no(RefusalReason.UNKNOWN_LEARNER, f"no region {hello.learner_id!r} is configured, only {known}")
    if not is_region_name(hello.learner_id):
        return _no(RefusalReason.UNKNOWN_LEARNER, f"{hello.learner_id!r} isn't a region's name")
    is_new = not (standing.incarnation or standing.once_listed)
    if is_new and standing.unlisted >= terms.unlisted_max:
        detail = f"{standing.unlisted} names beside the configured ones have taken part, and no more may"
        return _no(RefusalReason.TOO_MANY_LEARNERS, detail)
    return None


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
