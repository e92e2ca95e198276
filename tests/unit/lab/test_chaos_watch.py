"""Whoever watches a run and has faults befall it never ends it, whatever it sees."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from tests.support.sources import REPOSITORY
from tests.support.transport import poll
from wan_diloco.config import load_config, parse_schedule
from wan_diloco.lab.chaos_scene import Scene
from wan_diloco.lab.chaos_watch import Watch
from wan_diloco.lab.links import GOOD, LinkState
from wan_diloco.lab.victims import Victim

WITHIN_S = 60.0


class Nobody:
    """A run without processes."""

    def syncer(self) -> Victim | None:
        return None

    def learner(self, region: str) -> Victim | None:
        return None

    def uplink(self, region: str) -> Victim | None:
        return None

    def link(self, region: str) -> LinkState:
        return GOOD

    def address(self) -> str:
        return ""


async def unreachable(address: str, timeout_s: float) -> dict[str, Any]:
    raise AssertionError(address)


def test_lines_that_are_torn_are_passed_over(tmp_path: Path) -> None:
    started = json.dumps({"type": "RunStarted"}).encode()
    ended = json.dumps({"type": "RunEnded"}).encode()
    (tmp_path / "tape.jsonl").write_bytes(b'{"type": "Run{"type"\n17\n\xff\n' + started + b"\n\n" + ended + b"\n")

    async def main() -> None:
        watch = Watch(tmp_path / "tape.jsonl", ("east",), Nobody(), unreachable)
        watch.look_at_tape()
        assert watch.seen.started_s is not None
        assert watch.seen.ended_s is not None

    asyncio.run(main())


class Broken:
    """A supervisor whose processes can't be asked for."""

    def __init__(self) -> None:
        self.held: frozenset[str] = frozenset()
        self.decided = asyncio.Event()

    def guardian(self, name: str) -> int | None:
        raise RuntimeError("the table of processes can't be read")

    def hold(self, regions: frozenset[str]) -> None:
        self.held = regions

    def release(self, region: str) -> None:
        raise AssertionError(region)

    def skew(self, name: str, offset_s: float) -> None:
        raise AssertionError(name)


def test_a_run_keeps_its_links_when_nobody_can_watch_it_any_more(tmp_path: Path) -> None:
    async def main() -> None:
        config = load_config([REPOSITORY / "deploy" / "demo.toml"], env={}).config
        faults = parse_schedule({"faults": [{"at": "1h", "kind": "kill", "target": "syncer"}]}, "test")
        scene = Scene(config, tmp_path, faults, fills=False)
        said: list[str] = []
        async with asyncio.timeout(WITHIN_S), asyncio.TaskGroup() as group:
            playing = group.create_task(scene.play(Broken(), said.append))
            await poll(lambda: bool(said))
            assert scene.problem == "RuntimeError: the table of processes can't be read"
            (sentence,) = said
            assert scene.problem in sentence
            assert scene.link("us-east") == GOOD
            host, _, port = scene.config.regions[0].address.partition(":")
            _, writer = await asyncio.open_connection(host, int(port))
            writer.close()
            assert not playing.done()
            assert (tmp_path / "links").exists()
            playing.cancel()
        assert not (tmp_path / "links").exists(), "nobody listens there any more"

    asyncio.run(main())


class Unstarted(Broken):
    """A supervisor that has started nobody."""

    def guardian(self, name: str) -> int | None:
        return None


def test_nothing_befalls_a_run_whose_last_step_is_done_or_that_is_told_to_end(tmp_path: Path) -> None:
    async def main(by_the_tape: bool) -> None:
        config = load_config([REPOSITORY / "deploy" / "demo.toml"], env={}).config
        cut = {"kind": "cut", "target": "link:us-east", "for": "1h"}
        faults = parse_schedule({"faults": [{"at": "0s", **cut}, {"at": "1h", **cut}]}, "test")
        scene, supervisor, tape = Scene(config, tmp_path, faults, fills=False), Unstarted(), tmp_path / "tape.jsonl"
        tape.write_text(json.dumps({"type": "RunStarted"}) + "\n")
        async with asyncio.timeout(WITHIN_S), asyncio.TaskGroup() as group:
            playing = group.create_task(scene.play(supervisor, lambda _: None))
            await poll(lambda: bool(scene.befallen[0].began_s))
            assert scene.link("us-east").cut
            if by_the_tape:
                with tape.open("a") as file:
                    file.write(json.dumps({"type": "RunEnded"}) + "\n")
            else:
                supervisor.decided.set()
            await poll(lambda: scene.link("us-east") == GOOD)
            assert not playing.done(), "links are served, and the end is seen"
            playing.cancel()
        assert [item.cut_short for item in scene.befallen] == [True, False]
        assert scene.befallen[1].began_s is None

    for by_the_tape in (True, False):
        asyncio.run(main(by_the_tape))
