"""Whose word counts where two processes have one run: the higher term's, and of two with the same the one met first.

A term tells processes apart that were started one after the other from one state. Two that were started from two copies
of it have the same, and only the number that each drew by chance tells them apart.
"""

from __future__ import annotations

from wan_diloco.units import Term

__all__ = ["are_two", "is_over", "same_term"]


def are_two(mine: str, theirs: str) -> bool:
    """Whether two ids of one term are known to be of two processes; an empty one isn't known, and differs from none.

    Args:
        mine: As heard, or drawn, here.
        theirs: As the other end says it.
    """
    return bool(mine) and bool(theirs) and mine != theirs


def is_over(term: Term, term_id: str, *, heard: Term, heard_id: str) -> bool:
    """Whether a syncer isn't the one to be believed, for who has heard of another.

    Args:
        term: Of the syncer that speaks.
        term_id: Of the process that began it there.
        heard: The term that was heard last.
        heard_id: Of the process that began that one.
    """
    return term < heard or (term == heard and are_two(heard_id, term_id))


def same_term(term: Term) -> str:
    """What is said of two syncers of one term, in one sentence."""
    return f"another syncer has the same term {term}: the state was copied and both were started"
