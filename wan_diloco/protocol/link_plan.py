"""What a link's rate and round trip mean for those who send over it: windows, deadlines, number of connections.

All of it follows from what was measured or configured. No I/O: what the kernel says is an argument.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["CHANNELS_MAX", "WINDOW_BYTES_MAX", "TcpLimits", "channels_needed", "progress_timeout_s", "window_bytes"]

CHANNELS_MAX = 8
# Of a transfer whose link's rate nobody knows: 1 Gbit/s over 130 ms.
_WINDOW_BYTES_DEFAULT = 16 * 2**20
# 10 Gbit/s over 100 ms, twice; what one transfer may make an unlucky receiver hold.
WINDOW_BYTES_MAX = 256 * 2**20
# Twice what is on its way: acknowledgements come in steps, and travel too.
_WINDOW_ROUND_TRIPS = 2.0
# With fewer, the next message could never be written while one is on its way.
_WINDOW_MESSAGES_MIN = 2

# A lost packet or a busy machine costs a second or two; both ends must give a dead link up well within 20 s.
_PROGRESS_S_MIN = 8.0
_PROGRESS_S_MAX = 15.0
_PROGRESS_ROUND_TRIPS = 4.0
# An acknowledgement is due each quarter of a window. Others may have the link at the time.
_PROGRESS_WINDOWS = 4.0
# Of a link whose rate nobody knows: 1 Mbit/s. A slower one must be given a rate, which makes its messages small.
_RATE_MIN_BYTES_PER_S = 125_000.0

# Links of which no rate is known are taken for 1 Gbit/s.
_RATE_DEFAULT_BYTES_PER_S = 125e6
# The kernel counts its own bookkeeping into a buffer: about half of it is window. (At 1 Gbit/s and 40 ms, with 4 MiB to
# send from, one connection was seen to hold 2.8 MiB in flight.)
_BUFFER_USE = 0.5
# What one connection is trusted to keep in flight where a lost packet makes it slow down: cubic's mean at one loss in a
# hundred thousand packets and 100 ms is 1.5 MB, at twice that loss 0.9 MB (RFC 9438, section 5.1).
_LOSSY_WINDOW_BYTES = 2**20
# These take loss for what it is.
_UNDAUNTED = frozenset({"bbr", "bbr2", "bbr3"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpLimits:
    """What this machine's kernel lets a connection have; the far end's is taken for alike.

    Attributes:
        receive_bytes_max, send_bytes_max: The largest buffers that it makes by itself.
        congestion: The algorithm by which it slows down.
    """

    receive_bytes_max: int
    send_bytes_max: int
    congestion: str


def window_bytes(rate_bytes_per_s: float | None, rtt_s: float, message_bytes: int, lanes: int = 1) -> int:
    """How much a sender may have written to a stream that the receiving application hasn't acknowledged.

    Args:
        rate_bytes_per_s: Of the link; None if nobody knows.
        rtt_s: 0 if nobody knows.
        message_bytes: The longest message.
        lanes: Streams over which a transfer goes.
    """
    enough = _WINDOW_BYTES_DEFAULT
    if rate_bytes_per_s is not None and rtt_s > 0:
        enough = min(WINDOW_BYTES_MAX, math.ceil(_WINDOW_ROUND_TRIPS * rate_bytes_per_s * rtt_s))
    elif rate_bytes_per_s is not None:
        enough = min(enough, math.ceil(rate_bytes_per_s))
    return max(_WINDOW_MESSAGES_MIN * message_bytes, enough // lanes)


def progress_timeout_s(rate_bytes_per_s: float | None, rtt_s: float, window: int, message_bytes: int) -> float:
    """After how long without an acknowledgement a transfer counts as stuck.

    Args:
        rate_bytes_per_s: Of the link; None if nobody knows.
        rtt_s: 0 if nobody knows.
        window: See `window_bytes`.
        message_bytes: The longest message.
    """
    if rate_bytes_per_s is None:
        takes_s = min(_PROGRESS_S_MAX, _WINDOW_MESSAGES_MIN * message_bytes / _RATE_MIN_BYTES_PER_S)
    else:
        takes_s = _PROGRESS_WINDOWS * max(window / 4, message_bytes) / rate_bytes_per_s
    return max(_PROGRESS_S_MIN, _PROGRESS_ROUND_TRIPS * rtt_s + takes_s)


def channels_needed(rate_bytes_per_s: float | None, rtt_s: float, tcp: TcpLimits) -> int:
    """Over how many connections a transfer should go so that none's window is the limit; 1..CHANNELS_MAX.

    Args:
        rate_bytes_per_s: Of the link; None if nobody knows.
        rtt_s: 0 if nobody knows.
        tcp: Of this machine.
    """
    in_flight = rtt_s * (_RATE_DEFAULT_BYTES_PER_S if rate_bytes_per_s is None else rate_bytes_per_s)
    one = _BUFFER_USE * max(1, min(tcp.receive_bytes_max, tcp.send_bytes_max))
    if tcp.congestion not in _UNDAUNTED:
        one = min(one, _LOSSY_WINDOW_BYTES)
    return min(CHANNELS_MAX, max(1, math.ceil(in_flight / one)))
