"""A syncer's disk that loses what was on it: what is needed is missed, and nothing else."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.syncer import BATCH_TOKENS, close, open_tiny, tiny_config
from tests.support.syncer_scene import WAIT_S, advance, crash_after, learners, scene, syncer, until
from tests.support.values import values_of
from wan_diloco.errors import EXIT_CONFIG, JournalError, StateDamaged
from wan_diloco.protocol.tape import FragmentPublished, MergeEntry, RoundClosed
from wan_diloco.storage import Journal, JournalRef
from wan_diloco.syncer import spool
from wan_diloco.syncer.journal_keeper import KIND_PUBLICATION, KIND_TAPE, JournalKeeper, parse_ref
from wan_diloco.syncer.payloads import StoredPayload
from wan_diloco.transport.memory import MemoryNetwork


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def spoil(folder: Path, ref: JournalRef, at: int = -1) -> None:
    """Change one byte of a record where it lies; the last by default."""
    path = folder / "journal" / f"{ref.segment:010d}.journal"
    place = ref.offset + at % ref.length
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 0x40]))


def _tape(folder: Path) -> list[tuple[JournalRef, dict]]:
    with Journal.open(folder / "journal") as journal:
        return [(ref, json.loads(head.meta)) for ref, head in journal.records() if head.kind == KIND_TAPE]


@pytest.mark.parametrize("in_chunks", [False, True])
@pytest.mark.parametrize(("spoilt", "quorum"), [(("east",), 1), (("east",), 2), (("east", "west"), 1)])
def test_bytes_that_rot_before_their_merge_are_missed_and_the_run_goes_on(
    tmp_path, monkeypatch, in_chunks, spoilt, quorum
):
    if in_chunks:
        monkeypatch.setattr(spool, "_WHOLE_BYTES_MAX", 0)
    config = tiny_config()
    broken: list[MergeEntry] = []

    async def story():
        async with scene(config, tmp_path) as (made, group):
            run = made.service._merges._compute

            def spoilt_first(effect, value, chunk_bytes):
                if not broken:
                    # The round has both; how many of them are enough once some are lost is another matter.
                    context = made.service._machine.context
                    context.settings = replace(context.settings, policy=replace(context.settings.policy, quorum=quorum))
                    for entry in effect.entries:
                        if entry.header.key.learner_id in spoilt:
                            broken.append(entry)
                            sizes = made.maths.sizes(effect.fragment_id)
                            chunks = StoredPayload.open(made.restored.journal, entry.ref, sizes)._chunks
                            spoil(tmp_path / "state", chunks[-1].ref if chunks else parse_ref(entry.ref))
                return run(effect, value, chunk_bytes)

            monkeypatch.setattr(made.service._merges, "_compute", spoilt_first)
            await advance(group, made, 9, settle=False)
            await until(lambda: min(made.versions) >= 1 and made.at_rest)
            status = made.service.status()
            assert status["balance"] == 0
            await made.crash()
            return values_of(made.restored.store)

    before = asyncio.run(story())
    assert {entry.header.key.learner_id for entry in broken} == set(spoilt)
    tape = [record for _, record in _tape(tmp_path / "state")]
    (lost,) = [record for record in tape if record["type"] == "ContributionsLost"]
    assert [key["learner_id"] for key in lost["keys"]] == list(spoilt)
    published = [record["round_id"] for record in tape if record["type"] == "FragmentPublished"]
    assert lost["opened_anew"] == (2 - len(spoilt) < quorum)
    assert (lost["round_id"] in published) == (not lost["opened_anew"])
    events = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert any(line["kind"] == "event" and line["name"] == "contributions_lost" for line in events)
    restored = open_tiny(tmp_path / "state", config, resume=True)
    assert before == values_of(restored.store)
    close(restored)


def test_a_segment_that_is_taken_away_from_a_live_syncer_is_missed_and_the_run_goes_on(tmp_path):
    # Longer than anybody trains here, however slow the machine merges meanwhile.
    config = tiny_config(run={"tokens": BATCH_TOKENS * 2 * 100_000}, syncer={"snapshot_every": "10ms"})
    gone: list[Path] = []

    async def story():
        async with scene(config, tmp_path) as (made, group):
            merges, journal = made.service._merges, made.restored.journal
            compute = merges._compute

            def without_a_file(effect, value, chunk_bytes):
                if not gone:
                    journal.seal()
                    segment = parse_ref(effect.entries[0].ref).segment
                    gone.append(tmp_path / "state" / "journal" / f"{segment:010d}.journal")
                    gone[0].unlink()
                return compute(effect, value, chunk_bytes)

            merges._compute = without_a_file
            async with asyncio.timeout(WAIT_S):
                # It is dropped like any other, as soon as snapshots need it no more.
                while min(made.versions) < 2 or journal.segments[0] <= int(gone[0].stem):
                    for learner in group:
                        learner.step()
                    await asyncio.sleep(0.01)
            await until(lambda: made.at_rest)
            assert "snapshot" not in made.service.status()["reasons"]
            assert made.service.status()["balance"] == 0
            await made.crash()
            return values_of(made.restored.store)

    before = asyncio.run(story())
    lines = (tmp_path / "tape.jsonl").read_text().splitlines()
    assert "ContributionsLost" in {json.loads(line)["type"] for line in lines}
    restored = open_tiny(tmp_path / "state", config, resume=True)
    assert before == values_of(restored.store)
    close(restored)


def test_what_was_merged_is_published_whatever_befalls_its_parts_before_that(tmp_path, monkeypatch):
    """The value has all contributions in it: to declare one of them lost would have it merged again."""
    broken: list[MergeEntry] = []
    config = tiny_config()

    async def story():
        async with scene(config, tmp_path) as (made, group):
            merges, append = made.service._merges, JournalKeeper.append
            make = merges._make

            async def made_of(effect):
                merged = await make(effect)
                if not broken:
                    broken.append(effect.entries[0])
                    spoil(tmp_path / "state", parse_ref(effect.entries[0].ref))
                return merged

            refused = []

            async def refusing(keeper, kind, meta, parts, **options):
                if kind == KIND_PUBLICATION and not refused:
                    refused.append(kind)
                    raise JournalError("the disk is strange today")
                return await append(keeper, kind, meta, parts, **options)

            merges._make = made_of
            monkeypatch.setattr(JournalKeeper, "append", refusing)
            await advance(group, made, 9, settle=False)
            await until(lambda: min(made.versions) >= 1 and made.at_rest)
            assert refused
            assert made.service.status()["balance"] == 0
            await made.crash()

    asyncio.run(story())
    tape = [record["type"] for _, record in _tape(tmp_path / "state")]
    assert "ContributionsLost" not in tape


def test_a_learner_that_lags_gets_the_value_when_a_publication_can_not_be_read(tmp_path):
    config = tiny_config(sync={"quorum": 1})
    asyncio.run(crash_after(config, tmp_path, 9))
    restored = open_tiny(tmp_path / "state", config, resume=True)
    # In a snapshot: a restart does no merge again, and needs no publication.
    state, version = restored.state, [value.version.count for value in restored.store.values()]
    close(restored)

    async def drained():
        async with MemoryNetwork() as network, syncer(network, config, tmp_path, resume=True):
            pass

    asyncio.run(drained())
    for updates in state.updates:
        spoil(tmp_path / "state", parse_ref(updates[-1].ref))

    async def story():
        async with MemoryNetwork() as network, syncer(network, config, tmp_path, resume=True) as made:
            assert made.restored.notes, "the damage is in the last segment, which is read whole"
            async with learners(config, network.connection) as group:
                await until(lambda: all([v.count for v in one.versions] == version for one in group))

    asyncio.run(story())


def test_a_snapshot_that_is_damaged_is_passed_over_and_the_one_before_gives_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setattr(Journal.open.__func__, "__defaults__", (30_000,))
    config = tiny_config(syncer={"snapshot_every": "1ms", "keep_updates": 1})

    async def story():
        async with scene(config, tmp_path) as (made, group):
            await advance(group, made, 40)
            await until(lambda: made.restored.journal.segments[0] > 1)
            await made.crash()
            return values_of(made.restored.store)

    before = asyncio.run(story())
    folder = tmp_path / "state"
    older, newer = sorted((folder / "snapshots").glob("state-*"), key=lambda path: int(path.name.split("-")[1]))
    for damage in ("tensors", "manifest", "half"):
        shutil.copytree(folder, tmp_path / damage)
        snapshot = tmp_path / damage / "snapshots" / newer.name
        if damage == "half":
            (snapshot / "manifest.json").unlink()
        else:
            (path,) = snapshot.glob(f"{damage}.*")
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 0x10
            path.write_bytes(data)
        restored = open_tiny(tmp_path / damage, config, resume=True)
        assert before == values_of(restored.store)
        notes = " ".join(restored.notes)
        assert f"snapshot {newer.name} was passed over" in notes
        assert f"snapshot {older.name} is taken instead" in notes
        close(restored)


def test_damage_before_what_a_restart_needs_is_no_reason_to_refuse(tmp_path):
    config = tiny_config()
    asyncio.run(crash_after(config, tmp_path, 9))

    async def drained():
        async with MemoryNetwork() as network, syncer(network, config, tmp_path, resume=True) as made:
            return values_of(made.restored.store)

    before = asyncio.run(drained())
    folder = tmp_path / "state"
    tape = _tape(folder)
    rounds = [record for _, record in tape if record["type"] == RoundClosed.__name__]
    closed = [parse_ref(entry["ref"]) for record in rounds for entry in record["entries"]]
    # A contribution that was merged, and a record of the tape that is in the snapshot.
    spoil(folder, closed[0])
    spoil(folder, tape[3][0])
    restored = open_tiny(folder, config, resume=True)
    assert before == values_of(restored.store)
    assert sum("the journal is damaged in segment 1" in note for note in restored.notes) == 2
    close(restored)


@pytest.mark.parametrize("what", ["tape", "header", "contribution", "publication", "segment", "journal"])
def test_damage_to_what_a_restart_needs_ends_it_for_good_with_a_sentence_that_helps(tmp_path, what):
    config = tiny_config()
    asyncio.run(crash_after(config, tmp_path, 9))
    folder = tmp_path / "state"
    tape = _tape(folder)
    published = next(record for _, record in tape if record["type"] == FragmentPublished.__name__)
    closed = next(record for _, record in tape if record["type"] == RoundClosed.__name__)
    places = {
        "tape": (tape[3][0], -1),
        "header": (tape[3][0], 6),
        "contribution": (parse_ref(closed["entries"][0]["ref"]), -1),
        "publication": (parse_ref(published["ref"]), -1),
    }
    if what in places:
        ref, at = places[what]
        spoil(folder, ref, at)
        says = f"segment {ref.segment} at offset {ref.offset}: "
    else:
        says = "the journal in .* is gone"
        for path in (folder / "journal").iterdir():
            path.unlink()
        if what == "segment":
            says = "should hold segment 1"
            (folder / "journal" / "0000000002.journal").write_bytes(b"")
    before = {path: path.read_bytes() for path in (folder / "journal").iterdir()}
    for _ in range(2):
        with pytest.raises(StateDamaged, match=says) as refused:
            open_tiny(folder, config, resume=True)
        assert refused.value.exit_code == EXIT_CONFIG
        assert "wan-diloco export" in str(refused.value)
        assert str(folder) in str(refused.value)
    assert {path: path.read_bytes() for path in (folder / "journal").iterdir()} == before
