"""What a simulated run must never show, and how it says so."""

from __future__ import annotations

__all__ = ["Violation", "must"]


class Violation(AssertionError):
    """An invariant doesn't hold: a bug of ours."""


def must(holds: bool, problem: str) -> None:
    """An invariant.

    Raises:
        Violation: It doesn't hold.
    """
    if not holds:
        raise Violation(problem)
