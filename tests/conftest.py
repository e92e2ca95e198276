"""What all tests share: golden files and calm hypothesis settings."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.golden import Golden

# A shared machine stalls now and then; no law here is about time.
settings.register_profile("house", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write golden files anew, don't compare")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Compares text or JSON with a file in tests/golden: `golden.check_json("cli_surface.json", value)`."""
    return Golden(Path(__file__).parent / "golden", update=bool(request.config.getoption("--update-golden")))
