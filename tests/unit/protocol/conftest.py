"""What several tests of the machines begin with."""

from __future__ import annotations

import pytest

from tests.support.uplink import Uplink


@pytest.fixture
def uplink() -> Uplink:
    """Joined, started, at its first step."""
    uplink = Uplink()
    uplink.machine.start()
    uplink.joins()
    return uplink
