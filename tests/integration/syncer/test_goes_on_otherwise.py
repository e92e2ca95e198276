"""A run whose next start has other regions, or another number of fragments: nothing is lost but what is said."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import torch

from tests.support.syncer import maths_of, tiny_config
from tests.support.syncer_scene import Learner, Syncer, advance, learners, scene, syncer, until
from tests.support.values import bits_by_tensor
from wan_diloco.cli.export import export_model
from wan_diloco.config import RunConfig, parse_config
from wan_diloco.protocol.ledger import DiscardReason
from wan_diloco.protocol.messages import Acknowledged, Pull
from wan_diloco.storage import read_json
from wan_diloco.syncer.conclusion import conclude
from wan_diloco.syncer.proof import replay_run
from wan_diloco.telemetry import read_metrics
from wan_diloco.telemetry.records import RoundRecord
from wan_diloco.transport.memory import MemoryNetwork
from wan_diloco.units import FragmentId

KEPT = {"journal_retention": "all", "snapshot_every": "1h"}


def _with_regions(config: RunConfig, *names: str, **tables: Any) -> RunConfig:
    tree = config.model_dump(mode="json", by_alias=True)
    for name, table in tables.items():
        tree[name] = {**tree[name], **table}
    return parse_config({**tree, "regions": [{"name": name} for name in names]})


def _tensors(made: Syncer, config: RunConfig) -> dict[str, dict[str, bytes]]:
    return bits_by_tensor(maths_of(config).layout, made.restored.store.values())


async def _caught_up(made: Syncer, group: list[Learner]) -> None:
    """Learners of the next start have what is published, before they take a step."""
    await until(lambda: all(one.versions == made.service.state.versions for one in group))


def _balanced(made: Syncer) -> dict[DiscardReason, float]:
    state = made.service.state
    totals = state.ledger.totals(state.parameters)
    assert totals.balance == 0
    return totals.discarded_tokens


def test_momentum_and_values_are_carried_into_other_fragments_and_training_goes_on(tmp_path: Path) -> None:
    before = tiny_config(sync={"fragments": 3}, syncer=KEPT)
    after = tiny_config(sync={"fragments": 5}, syncer=KEPT)

    async def story() -> None:
        async with scene(before, tmp_path) as (made, group):
            await advance(group, made, 11)
            # East contributes to a round that can't close: that is under way.
            group[0].step(1)
            await until(lambda: made.at_rest)
            carried, merged = _tensors(made, before), list(made.service.state.ledger.merged)
            await made.crash()
        assert any(any(part) for part in carried["momentum_N"].values())
        (tmp_path / "config.json").write_text(after.resolved_json())

        async with (
            MemoryNetwork() as network,
            syncer(network, after, tmp_path, resume=True, refragment=True) as made,
        ):
            state = made.service.state
            assert _tensors(made, after) == carried
            assert {str(version.epoch) for version in state.versions} == {"1"}
            assert _balanced(made)[DiscardReason.REFRAGMENTED] > 0
            merged_tokens = state.ledger.totals(state.parameters).merged_tokens
            assert min(amount.tokens for amount in merged) <= merged_tokens
            assert merged_tokens <= max(amount.tokens for amount in merged)
            async with learners(after, network.connection) as group:
                counts = made.versions
                await _caught_up(made, group)
                for one in group:
                    assert [bool(number) for number in one.resyncs] == [True] * len(one.resyncs)
                    for index, value_N in enumerate(one.values):
                        assert torch.equal(value_N, made.restored.store.value(FragmentId(index)).published_N)
                await advance(group, made, 8)
                assert all(now > then for now, then in zip(made.versions, counts, strict=True))
                assert state.ledger.totals(state.parameters).merged_tokens > merged_tokens
                _balanced(made)
                reached = made.versions
            await made.stop()
        report = replay_run(tmp_path, after)
        assert report.difference is None
        assert report.since == "the initial weights"
        assert [version.count for version in report.reached] == reached
        assert report.versions > sum(reached) - sum(counts)
        assert report.remarks == ("cut into 5 fragments on the way, with the same bits",)
        assert not any("cut into" in note for note in report.notes)

    asyncio.run(story())


def test_a_restart_between_the_cut_and_the_next_snapshot_is_bit_equal(tmp_path: Path) -> None:
    before = tiny_config(sync={"fragments": 2}, syncer=KEPT)
    after = tiny_config(sync={"fragments": 4}, syncer=KEPT)

    async def story() -> None:
        async with scene(before, tmp_path) as (made, group):
            await advance(group, made, 6)
            await made.crash()
        async with scene(after, tmp_path, resume=True, refragment=True) as (made, group):
            await _caught_up(made, group)
            await advance(group, made, 9)
            values, versions = _tensors(made, after), made.versions
            await made.crash()
        async with scene(after, tmp_path, resume=True) as (made, group):
            assert (_tensors(made, after), made.versions) == (values, versions)
            assert made.service.state.epoch == 1
            await _caught_up(made, group)
            await advance(group, made, 4)
            _balanced(made)

    asyncio.run(story())


def test_what_is_told_of_a_run_has_both_cuts_in_it_and_its_model_can_be_exported(tmp_path: Path) -> None:
    before, after = tiny_config(sync={"fragments": 4}, syncer=KEPT), tiny_config(syncer=KEPT)

    async def story() -> None:
        async with scene(before, tmp_path) as (made, group):
            await advance(group, made, 9)
        (tmp_path / "config.json").write_text(after.resolved_json())
        async with scene(after, tmp_path, resume=True, refragment=True) as (made, group):
            # The newest snapshot is of the cut before.
            export_model(tmp_path, tmp_path / "early", warn=lambda _: None)
            await _caught_up(made, group)
            await advance(group, made, 9)
            conclude(tmp_path, made.service.state, wall_s=1.0, finished=False, unevaluated="")

    asyncio.run(story())
    rounds = [line.record for line in read_metrics(tmp_path / "metrics.jsonl").lines]
    fragments = [record.fragment for record in rounds if isinstance(record, RoundRecord)]
    assert max(fragments) == 3
    assert set(fragments[-4:]) == {0, 1}
    assert read_json(tmp_path / "summary.json")["ledger_balance"] == 0
    export_model(tmp_path, tmp_path / "late", warn=lambda _: None)


def test_a_region_that_comes_later_reads_a_spare_shard_and_takes_part(tmp_path: Path) -> None:
    before = tiny_config(data={"shards": 3}, sync={"quorum": 2})
    after = _with_regions(before, "east", "west", "north", sync={"quorum": 3})

    async def story() -> None:
        async with scene(before, tmp_path) as (made, group):
            await advance(group, made, 6)
            total = made.service.status()["total_steps"]
        async with scene(after, tmp_path, resume=True) as (made, group):
            assert made.service.state.shards == {"east": 0, "west": 1, "north": 2}
            assert made.service.status()["total_steps"] == total, "T was fixed at the start"
            await _caught_up(made, group)
            await advance(group, made, 8)
            assert made.service.state.participation["north"] > 0
            assert DiscardReason.REMOVED not in _balanced(made)

    asyncio.run(story())


def test_what_was_journalled_of_a_region_that_is_gone_still_counts(tmp_path: Path) -> None:
    before = tiny_config(data={"shards": 2})
    after = _with_regions(before, "east", sync={"quorum": 1})

    async def silent(_pull: Pull) -> None:
        """East doesn't answer, and the round stays open."""

    async def story() -> None:
        async with scene(before, tmp_path) as (made, group):
            await advance(group, made, 4)
            group[0]._answer = silent
            await advance(group, made, 2, settle=False)
            west, pools = group[1], made.service.state.pool

            def unmerged() -> set[tuple[int, int]]:
                """What west was told is kept. A pool may hold more, which nobody counts on: it isn't durable yet."""
                pooled = {(key.fragment_id, key.step_lo) for pool in pools for key in pool if key.learner_id == "west"}
                told = [message for message in west.heard if isinstance(message, Acknowledged)]
                return {(one.fragment_id, one.step_hi) for one in told if (one.fragment_id, one.step_lo) in pooled}

            await until(lambda: bool(unmerged()))
            owed = unmerged()
            await made.crash()
        async with scene(after, tmp_path, resume=True) as (made, group):
            state = made.service.state
            assert state.listed == (("east", 0),)
            assert list(state.anchors) == ["east"]
            assert sum(DiscardReason.REMOVED in account for account in state.ledger.discarded) == 1
            await _caught_up(made, group)
            await advance(group, made, 8)
            merged = {
                (index, note.step_hi)
                for index, updates in enumerate(state.updates)
                for update in updates
                for note in update.merged
                if note.learner_id == "west"
            }
            assert owed <= merged
            assert not any(key.learner_id == "west" for pool in state.pool for key in pool)
            _balanced(made)
            assert state.shards == {"east": 0, "west": 1}
            assert ("west", 1) not in state.ledger.lives, "all of it has its fate"

    asyncio.run(story())
