"""Runs scenarios in each world."""

from __future__ import annotations

from functools import partial

import pytest
import uvloop

from tests.support.transport_worlds import Runner, run_in_memory, run_over_grpc

RUNNERS: dict[str, Runner] = {
    "memory": run_in_memory,
    "grpc": run_over_grpc,
    "grpc-uvloop": partial(run_over_grpc, loop_factory=uvloop.new_event_loop),
}


@pytest.fixture(params=list(RUNNERS))
def run(request: pytest.FixtureRequest) -> Runner:
    return RUNNERS[request.param]


@pytest.fixture(autouse=True)
def _quiet_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPC_VERBOSITY", "ERROR")
