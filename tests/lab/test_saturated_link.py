"""A link of 1 Mbit/s, full of bulk: control goes past it, and nobody is taken for dead.

The kernel drops what exceeds the link. Both tests need root and namespaces of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.support.sources import REPOSITORY
from tests.support.text import write_text_corpus
from wan_diloco.clock import SystemClock
from wan_diloco.lab.namespaces import Shaper, WirePair, why_not

pytestmark = [pytest.mark.lab, pytest.mark.timeout(400)]

RATE_BYTES_PER_S = 1e6 / 8
LEASE_S = 4
WITHIN_S = 240.0

# A fragment of about 0.8 MB takes the link for longer than a lease.
CONFIG = """
[run]
name = "narrow"
tokens = 512
[model]
dim = 256
layers = 4
heads = 4
sequence_length = 32
[data]
source = "text:{corpus}"
[inner]
batch_tokens = 32
warmup_steps = 2
[sync]
fragments = 2
period_steps = 8
membership_lease = "{lease_s}s"
[syncer]
listen = "{address}"
insecure = true
[evaluation]
every_steps = 100_000
tokens = 64
[[regions]]
name = "east"
uplink = "1mbit"
downlink = "1mbit"
step_time_min = "1s"
"""


@pytest.fixture(autouse=True)
def _namespaces() -> None:
    if reason := why_not():
        pytest.skip(reason)


@contextmanager
def process(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """One that is gone afterwards, with all that it started."""
    env = {name: text for name, text in os.environ.items() if not name.startswith("WAN_DILOCO_")}
    with log.open("wb") as output:
        child = subprocess.Popen(command, cwd=REPOSITORY, env=env, stdout=output, stderr=output)
    try:
        yield child
    finally:
        if child.poll() is None:
            child.terminate()
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                child.kill()
        child.wait()


def records(folder: Path, kind: str) -> list[dict[str, object]]:
    path = folder / "tape.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [record for record in map(json.loads, lines) if record["type"] == kind]


def test_who_sends_for_longer_than_a_lease_is_not_taken_for_dead(tmp_path: Path) -> None:
    shaper = Shaper(rate_bytes_per_s=RATE_BYTES_PER_S)
    with WirePair("wdl", subnet=1, left=shaper, right=shaper) as pair, ExitStack() as stack:
        config = tmp_path / "narrow.toml"
        corpus = write_text_corpus(tmp_path / "text.txt")
        address = f"{pair.right_address}:7411"
        config.write_text(CONFIG.format(corpus=corpus, lease_s=LEASE_S, address=address))
        program = (sys.executable, "-m", "wan_diloco")
        folder, log = tmp_path / "run", tmp_path / "syncer.log"
        words = ("syncer", str(config), "--run-folder", str(folder))
        syncer = stack.enter_context(process(pair.command(pair.right, *program, *words), log))
        clock, never = SystemClock(), threading.Event()
        end_s = clock.now_s() + WITHIN_S
        while not (folder / "address").exists():
            assert syncer.poll() is None, log.read_text()
            assert clock.now_s() < end_s
            never.wait(0.1)
        words = ("learner", str(config), "--region", "east", "--run-folder", str(tmp_path / "east"))
        learner = stack.enter_context(
            process(
                pair.command(pair.left, *program, *words, "--syncer", address, "--threads", "1"),
                tmp_path / "east.log",
            )
        )
        while not records(folder, "RunEnded"):
            assert syncer.poll() is None, log.read_text()
            assert learner.poll() is None, (tmp_path / "east.log").read_text()
            assert clock.now_s() < end_s, log.read_text()
            never.wait(0.2)
    contributions = records(folder, "ContributionJournalled")
    assert contributions, "something went over the link"
    # Each of these alone is on its way for longer than the lease.
    assert min(record["payload_bytes"] for record in contributions) > LEASE_S * RATE_BYTES_PER_S  # type: ignore[type-var,operator]
    assert "nothing was heard of" not in log.read_text()
    # Membership changed once: when the learner came.
    assert len(records(folder, "MembershipChanged")) == 1
    assert len(records(folder, "LearnerAdmitted")) == 1


def test_control_goes_there_and_back_while_bulk_fills_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPOSITORY / "bench")
    import pacing_wire

    found = pacing_wire.one("up", 8.0, shaped=True, cap_bytes_per_s=RATE_BYTES_PER_S)
    assert found["mean_over_cap"] > 0.5, "the link was full"
    # A lease is ten seconds by default, with four heartbeats in it: this is what keeps it.
    assert found["heartbeat_p99_ms"] < 2500
