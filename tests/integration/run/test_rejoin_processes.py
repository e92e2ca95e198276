"""A killed learner comes back while its donor is killed, too: real processes over gRPC, by the program of bench/."""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path
from typing import Any

import pytest

from tests.support.sources import REPOSITORY


@pytest.mark.slow
@pytest.mark.parametrize("kill_percent", [None, 10, 50, 90])
def test_it_trains_again_with_the_moments_of_a_peer_that_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kill_percent: int | None
) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "bench"))
    program: Any = importlib.import_module("rejoin")
    # 14 MB of model and links that take seconds for its moments: a status a second tells how far they are.
    run = program.Run(tmp_path, layers=1, rate="20mbit")
    try:
        result = asyncio.run(program.measure(run, kill_percent))
    finally:
        run.stop()
    # `measure` itself sees to it that they aren't those of the donor that was killed.
    assert result["moments"] in {"peer of north", "peer of west"}
