"""What several tests of the machines begin with."""

from __future__ import annotations

import pytest

from tests.support.desk import Desk, E, W
from tests.support.protocol import EAST, WEST
from tests.support.uplink import Uplink


@pytest.fixture
def uplink() -> Uplink:
    """Joined, started, at its first step."""
    uplink = Uplink()
    uplink.machine.start()
    uplink.joins()
    return uplink


@pytest.fixture
def desk() -> Desk:
    """Two learners, started, no step taken yet."""
    desk = Desk()
    desk.joins(E, EAST)
    desk.joins(W, WEST)
    return desk
