"""What the product promises to learners that are far away, slow, or on a narrow link: real processes, real gRPC.

Only counts and shares of rounds are asserted, no times. Steps are stretched far beyond what they take, and a run that a
busy machine disturbed is played again, slower.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import psutil
import pytest

from tests.support.sources import REPOSITORY
from wan_diloco.algorithm.blocks import build_block_table
from wan_diloco.algorithm.codec import codec_by_name
from wan_diloco.config import load_config
from wan_diloco.lab.links import GOOD
from wan_diloco.lab.proxy import LinkProxy
from wan_diloco.models import run_layout

# About a minute each: steps are stretched far beyond what they take. tests/simulation/test_figures.py asserts the same
# of the same machines at every commit, in virtual time.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

# A machine that is busy with other things takes minutes to start so many Python processes; an idle one takes seconds.
_WITHIN_S = 450.0
BATCH_TOKENS = 32

CONFIG = """
[run]
name = "links"
tokens = {tokens}
start_timeout = "240s"
[model]
dim = {dim}
layers = {layers}
heads = 2
sequence_length = 32
[data]
source = "text:{corpus}"
[inner]
batch_tokens = {batch_tokens}
warmup_steps = 4
[sync]
fragments = {fragments}
period_steps = {fragments}
overlap_steps = 2
quorum = 1
grace_safety = {safety}
[wire]
codec = "int4"
[evaluation]
every_steps = 100_000
tokens = 64
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A learner of the run.

    Attributes:
        step_ms: Each step is stretched to this, so that how busy the machine is doesn't decide.
        delay_s: Each way, beyond what everybody has.
        uplink: Its cap, if any.
    """

    step_ms: int
    delay_s: float = 0.0
    uplink: str = "1gbit"

    def slower(self, factor: int) -> Region:
        """The same with all times that much longer."""
        return replace(self, step_ms=self.step_ms * factor, delay_s=self.delay_s * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Of the model and the run; as many fragments as steps in a period, so that one is due each step."""

    fragments: int
    dim: int
    layers: int
    steps: int
    safety: float = 0.9


def write_config(folder: Path, shape: Shape, regions: Mapping[str, Region]) -> Path:
    corpus = folder / "corpus.txt"
    corpus.write_text("".join(f"The {i}th day was much like the {i * i}th.\n\n" for i in range(2000)))
    text = CONFIG.format(
        tokens=shape.steps * BATCH_TOKENS * len(regions),
        batch_tokens=BATCH_TOKENS,
        corpus=corpus,
        fragments=shape.fragments,
        dim=shape.dim,
        layers=shape.layers,
        safety=shape.safety,
    )
    for name, region in regions.items():
        text += f'[[regions]]\nname = "{name}"\nstep_time_min = "{region.step_ms}ms"\nuplink = "{region.uplink}"\n'
    path = folder / "links.toml"
    path.write_text(text)
    return path


@asynccontextmanager
async def process(*arguments: str, log: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """`wan-diloco` with these arguments; nothing of it is left afterwards, whatever happened."""
    env = {name: text for name, text in os.environ.items() if not name.startswith("WAN_DILOCO_")}
    with log.open("wb") as output:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "wan_diloco", *arguments, cwd=REPOSITORY, env=env, stdout=output, stderr=output
        )
    try:
        yield child
    finally:
        if child.returncode is None:
            family = [child.pid, *(other.pid for other in psutil.Process(child.pid).children(recursive=True))]
            for pid in family:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await child.wait()


async def play(config: Path, run_folder: Path, regions: Mapping[str, Region]) -> None:
    """A whole run, from its start to its own end."""
    async with AsyncExitStack() as stack:
        logs = config.parent
        syncer = await stack.enter_async_context(
            process("syncer", str(config), "--run-folder", str(run_folder), log=logs / "syncer.log")
        )
        address = run_folder / "address"
        while not address.exists():
            assert syncer.returncode is None, (logs / "syncer.log").read_text()
            await asyncio.sleep(0.05)
        processes = [syncer]
        for name, region in regions.items():
            target = address.read_text().strip()
            if region.delay_s:
                link = await stack.enter_async_context(LinkProxy(partial(str, target), random.Random(0)))
                link.change(GOOD.having(delay_s=region.delay_s))
                target = link.address
            own = ("--run-folder", str(run_folder), "--region", name, "--syncer", target, "--threads", "1")
            processes.append(
                await stack.enter_async_context(process("learner", str(config), *own, log=logs / f"{name}.log"))
            )
        # The evaluation that follows the end says nothing about links.
        tape = run_folder / "tape.jsonl"
        async with asyncio.timeout(_WITHIN_S):
            while '"RunEnded"' not in (tape.read_text() if tape.exists() else ""):
                assert not [each for each in processes if each.returncode], "\n".join(
                    path.read_text() for path in logs.glob("*.log")
                )
                await asyncio.sleep(0.2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What the tape of a run tells.

    Attributes:
        rounds: Records of all closed rounds, in order.
        reached: The highest own step that each learner's contributions tell of.
    """

    shape: Shape
    rounds: list[dict[str, Any]]
    reached: dict[str, int]

    @property
    def settled(self) -> list[dict[str, Any]]:
        """Rounds after the first period, in which nothing is known about anybody yet."""
        return [record for record in self.rounds if record["global_step"] > self.shape.fragments]

    @property
    def quorum_s(self) -> float:
        """How long a round waited for its first answer, on average."""
        return mean(record["quorum_s"] for record in self.settled)

    def merges(self, learner: str, fragment_id: int, *, stale: bool = False) -> list[tuple[int, int]]:
        """(count of the version made, own step merged up to), of fresh ones, or of all."""
        return [
            (record["to_version"]["count"], entry["header"]["step_hi"])
            for record in self.rounds
            if record["fragment_id"] == fragment_id
            for entry in record["entries"]
            if entry["header"]["key"]["learner_id"] == learner and (stale or entry["staleness"] == 0)
        ]

    def freshness(self, learner: str) -> float:
        """Share of the settled rounds with that member that it was merged in with staleness 0."""
        rounds = [record for record in self.settled if learner in record["members"]]
        return sum(is_fresh(record, learner) for record in rounds) / len(rounds)

    def longest_without_a_merge(self, learner: str) -> int:
        """The most own steps that it trained without any fresh merge of a fragment, over all fragments."""
        steps = [
            [0, *(step for _, step in self.merges(learner, fragment)), self.reached[learner]]
            for fragment in range(self.shape.fragments)
        ]
        return max(later - earlier for each in steps for earlier, later in pairwise(each))


def is_fresh(record: dict[str, Any], learner: str) -> bool:
    return any(
        entry["header"]["key"]["learner_id"] == learner and entry["staleness"] == 0 for entry in record["entries"]
    )


def played(folder: Path, shape: Shape, regions: Callable[[int], Mapping[str, Region]]) -> Played:
    """A run that nothing but its links slowed down, as far as there is one.

    Args:
        folder: For everything.
        shape: Of the run.
        regions: All its learners, with all times longer by a factor. The one called near takes the next snapshot
            within a step, and on an idle machine its answer follows at once.
    """
    for factor in (1, 2, 4):
        place = folder / f"times {factor}"
        place.mkdir()
        chosen = regions(factor)
        asyncio.run(play(write_config(place, shape, chosen), place / "run", chosen))
        run = read(place / "run", shape)
        if run.quorum_s <= 1.15 * chosen["near"].step_ms / 1000:
            break
    return run


def read(run_folder: Path, shape: Shape) -> Played:
    records = [json.loads(line) for line in (run_folder / "tape.jsonl").read_text().splitlines()]
    reached: dict[str, int] = {}
    for record in records:
        if record["type"] == "ContributionJournalled":
            name, step = record["header"]["key"]["learner_id"], record["header"]["step_hi"]
            reached[name] = max(reached.get(name, 0), step)
    return Played(
        shape=shape, rounds=[record for record in records if record["type"] == "RoundClosed"], reached=reached
    )


# A step takes 300 ms: one of the far ones is a round trip of one step away from the others, the other one of two.
DISTANT = {
    "far": Region(step_ms=300, delay_s=0.15),
    "farther": Region(step_ms=300, delay_s=0.3),
    "near": Region(step_ms=300),
    "slow": Region(step_ms=600),
}


def distant(factor: int) -> dict[str, Region]:
    return {name: region.slower(factor) for name, region in DISTANT.items()}


SMALL = Shape(fragments=6, dim=32, layers=2, steps=72)


def test_the_far_and_the_slow_are_merged_fresh_and_nobody_is_left_out(tmp_path: Path) -> None:
    run = played(tmp_path, SMALL, distant)
    freshness = {name: run.freshness(name) for name in DISTANT}
    assert min(freshness.values()) >= 0.8, freshness
    longest = {name: run.longest_without_a_merge(name) for name in DISTANT}
    assert max(longest.values()) <= 3 * SMALL.fragments, longest


def test_without_grace_the_far_ones_would_be_left_behind(tmp_path: Path) -> None:
    run = played(tmp_path, replace(SMALL, safety=0.0, steps=30), distant)
    assert run.freshness("far") < 0.8
    assert run.freshness("farther") < 0.8


def needed_bits_per_s(folder: Path, shape: Shape, step_s: float) -> float:
    """What a learner sends that answers every question, before zstd and what protocols add; they nearly cancel out."""
    config = load_config([write_config(folder, shape, {"any": Region(step_ms=1)})], env={}).config
    layout, codec = run_layout(config), codec_by_name(config.wire.codec)
    assert layout.num_fragments == shape.fragments
    sizes = [codec.sizes(build_block_table(fragment)) for fragment in layout.fragments]
    # Control, some 500 bytes a step, must not matter.
    assert min(size.codes_bytes for size in sizes) > 20_000
    return 8 * sum(size.codes_bytes + size.scales_bytes for size in sizes) / (shape.fragments * step_s)


def test_a_link_of_a_quarter_of_what_is_needed_takes_part_in_every_nth_round_of_every_fragment(tmp_path: Path) -> None:
    shape = Shape(fragments=16, dim=96, layers=8, steps=192)
    kbit = needed_bits_per_s(tmp_path, shape, 0.2) / 4 / 1000

    def regions(factor: int) -> dict[str, Region]:
        near = Region(step_ms=200).slower(factor)
        return {"narrow": replace(near, uplink=f"{round(kbit / factor)}kbit"), "near": near}

    run = played(tmp_path, shape, regions)

    for fragment in range(shape.fragments):
        assert run.merges("narrow", fragment), f"fragment {fragment} is never merged fresh"
        counts = [0, *(count for count, _ in run.merges("narrow", fragment, stale=True))]
        gaps = [later - earlier for earlier, later in pairwise(counts)]
        assert max(gaps) <= 8, f"fragment {fragment} is merged in rounds {counts}"
    assert 1 / 8 <= run.freshness("narrow") <= 1 / 3
    # The other one is not held up: all rounds that fall due are held, at the step that they fall due at or nearly, and
    # it is in all of them.
    assert len(run.rounds) == shape.steps
    assert run.freshness("near") == 1.0
    for record in run.settled:
        (step,) = (
            entry["header"]["step_hi"] for entry in record["entries"] if entry["header"]["key"]["learner_id"] == "near"
        )
        assert step <= record["global_step"] + 2, record
