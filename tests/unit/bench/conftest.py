"""Programs of bench/ are no package: they are imported as they import one another."""

from __future__ import annotations

import pytest

from tests.support.sources import REPOSITORY


@pytest.fixture(autouse=True)
def _programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "bench"))
