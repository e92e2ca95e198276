"""Which of the fragments that were asked for is sent next, when the uplink can't carry all of them.

A slow region is to take part in every n-th round of *each* fragment, not in all rounds of some and none of the
others; what it sends should come in time to be merged fresh; and it should carry as much work as it can.
In that order:

1. fragments whose bytes can be there before their round closes, or before their next one opens, come first;
2. then those that were not sent for the most periods;
3. then the oldest base, which has the most work on it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from wan_diloco.units import FragmentId

__all__ = ["UploadChoice", "choose_upload"]

# An upload waits for its step boundary, and shares the link with another. Without room for that the same fragment comes
# a little too late in each period, since periods repeat; with much, hardly any is in time, and the same few always are.
_ROOM = 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadChoice:
    """A fragment that was asked for and waits.

    Attributes:
        remaining_s: Time until its round is expected to close; None when the round is closed already, as
            the installed version tells.
        due_s: Time until its next round opens.
        periods: Whole periods since it was last sent.
        steps: Local steps since its install.
    """

    fragment_id: FragmentId
    remaining_s: float | None
    due_s: float
    periods: int
    steps: int

    def is_in_time(self, upload_s: float) -> bool:
        """Whether bytes that usually need `upload_s` would surely be merged fresh."""
        return _ROOM * upload_s <= (self.due_s if self.remaining_s is None else self.remaining_s)


def choose_upload(waiting: Iterable[UploadChoice], upload_s: float) -> FragmentId | None:
    """The fragment to send next; None when none waits.

    Args:
        waiting: All that wait.
        upload_s: How long an upload usually takes; 0 while unknown.
    """
    best = max(
        waiting,
        key=lambda choice: (choice.is_in_time(upload_s), choice.periods, choice.steps, -choice.fragment_id),
        default=None,
    )
    return None if best is None else best.fragment_id
