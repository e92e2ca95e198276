"""Lines over a socket that never blocks."""

from __future__ import annotations

import socket

import pytest

from wan_diloco.learner.channel import LineChannel


@pytest.fixture
def ends() -> tuple[LineChannel, socket.socket]:
    ours, theirs = socket.socketpair()
    theirs.settimeout(5)
    return LineChannel(ours), theirs


def read_lines(far: socket.socket) -> list[bytes]:
    """All that is there; the far end has been closed."""
    data = b""
    while part := far.recv(1 << 16):
        data += part
    return data.split(b"\n")[:-1]


def test_lines_arrive_whole_and_in_order(ends: tuple[LineChannel, socket.socket]) -> None:
    channel, far = ends
    far.sendall(b"one\ntwo\nthr")
    assert channel.receive() == [b"one", b"two"]
    assert channel.receive() == []
    far.sendall(b"ee\n")
    assert channel.receive() == [b"three"]
    assert not channel.ended


def test_what_was_said_before_the_end_is_still_heard(ends: tuple[LineChannel, socket.socket]) -> None:
    channel, far = ends
    far.sendall(b"last words\nand half a wo")
    far.close()
    assert channel.receive() == [b"last words"]
    assert channel.ended
    channel.send(b"too late")


def test_a_far_end_that_does_not_read_costs_one_waiting_line(ends: tuple[LineChannel, socket.socket]) -> None:
    """The newest report stands for those before it, however many there were."""
    channel, far = ends
    for number in range(20_000):
        channel.send(f"report {number} {'x' * 200}".encode(), replaceable=True)
    assert 1 <= channel.num_waiting <= 2
    far.setblocking(False)
    while channel.num_waiting:
        far.recv(1 << 16)
        channel.flush()
    far.settimeout(5)
    channel.close()
    assert read_lines(far)[-1].startswith(b"report 19999 ")


def test_lines_that_matter_are_never_replaced(ends: tuple[LineChannel, socket.socket]) -> None:
    channel, far = ends
    kept = [f"install {number} {'x' * 2000}".encode() for number in range(300)]
    for line in kept:
        channel.send(b"report " + b"y" * 2000, replaceable=True)
        channel.send(line)
    assert channel.num_waiting > 10
    received = b""
    while received.count(b"install") < len(kept) or channel.num_waiting or not received.endswith(b"\n"):
        received += far.recv(1 << 16)
        channel.flush()
    assert [line for line in received.split(b"\n") if line.startswith(b"install")] == kept
    assert received.count(b"report") < len(kept)
