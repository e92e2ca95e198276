"""Windows, deadlines and numbers of connections, from rates and round trips."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wan_diloco.protocol.link_plan import (
    CHANNELS_MAX,
    WINDOW_BYTES_MAX,
    TcpLimits,
    channels_needed,
    progress_timeout_s,
    window_bytes,
)

MIB = 2**20
USUAL = TcpLimits(receive_bytes_max=6 * MIB, send_bytes_max=4 * MIB, congestion="bbr")
CUBIC = TcpLimits(receive_bytes_max=6 * MIB, send_bytes_max=4 * MIB, congestion="cubic")
WIDE = TcpLimits(receive_bytes_max=64 * MIB, send_bytes_max=64 * MIB, congestion="bbr")
GBIT = 125e6
rates = st.none() | st.floats(1e3, 2e9)
round_trips = st.floats(0, 2)
messages = st.integers(1, 4 * MIB)


@pytest.mark.parametrize(
    ("rate", "rtt_s", "tcp", "channels"),
    [
        # One connection fills a short link, and any link of which nothing is known.
        (GBIT, 0.0, USUAL, 1),
        (GBIT, 0.001, USUAL, 1),
        (None, 0.0, CUBIC, 1),
        (200e6 / 8, 0.04, USUAL, 1),
        # As measured: at 1 Gbit/s and 40 ms one connection with ordinary buffers gets 0.57, with wide ones all of it.
        (GBIT, 0.04, USUAL, 3),
        (GBIT, 0.04, WIDE, 1),
        # What slows down at each loss isn't trusted with more than a mebibyte in flight, whatever its buffers.
        (200e6 / 8, 0.04, CUBIC, 1),
        (GBIT, 0.04, CUBIC, 5),
        (GBIT, 0.2, CUBIC, CHANNELS_MAX),
        (5 * GBIT, 0.2, USUAL, CHANNELS_MAX),
        (None, 0.1, USUAL, 6),
    ],
)
def test_as_many_connections_as_the_link_needs(rate: float | None, rtt_s: float, tcp: TcpLimits, channels: int) -> None:
    assert channels_needed(rate, rtt_s, tcp) == channels


@given(rates, round_trips, st.integers(0, 2**31), st.integers(0, 2**31), st.sampled_from(["bbr", "cubic", "reno", ""]))
def test_the_number_of_connections_is_bounded_and_never_falls_with_distance(
    rate: float | None, rtt_s: float, receive: int, send: int, congestion: str
) -> None:
    tcp = TcpLimits(receive_bytes_max=receive, send_bytes_max=send, congestion=congestion)
    near, far = channels_needed(rate, rtt_s, tcp), channels_needed(rate, 2 * rtt_s, tcp)
    assert 1 <= near <= far <= CHANNELS_MAX


@given(rates, round_trips, messages, st.integers(1, CHANNELS_MAX))
def test_a_window_is_bounded_and_never_stops_a_link(
    rate: float | None, rtt_s: float, message_bytes: int, lanes: int
) -> None:
    window = window_bytes(rate, rtt_s, message_bytes, lanes)
    assert 2 * message_bytes <= window <= max(2 * message_bytes, WINDOW_BYTES_MAX)
    # An acknowledgement is on its way each quarter: three quarters are there to be filled meanwhile.
    if rate is not None and rtt_s > 0 and rate * rtt_s < WINDOW_BYTES_MAX / 2:
        assert lanes * (window + 1) * 0.75 >= rate * rtt_s


@given(rates, round_trips, messages)
def test_a_deadline_outlasts_what_the_window_takes(rate: float | None, rtt_s: float, message_bytes: int) -> None:
    window = window_bytes(rate, rtt_s, message_bytes)
    timeout_s = progress_timeout_s(rate, rtt_s, window, message_bytes)
    assert timeout_s >= 8.0
    if rate is not None:
        assert timeout_s >= rtt_s + window / 4 / rate


def test_a_dead_link_is_given_up_within_twenty_seconds() -> None:
    for rtt_s in (0.0, 0.2):
        for rate in (None, 1e6 / 8, GBIT):
            message_bytes = MIB if rate is None or rate > 1e7 else 16 * 1024
            window = window_bytes(rate, rtt_s, message_bytes)
            assert progress_timeout_s(rate, rtt_s, window, message_bytes) < 20.0
