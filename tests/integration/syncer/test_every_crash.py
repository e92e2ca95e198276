"""A syncer that dies at any call of its write path comes back to the same bits, with all that it had promised.

One run is watched; of each moment of it, what a kill would leave and what a power cut would is taken up again.
"""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.crashes import FileSystemRecorder, Image, lay_out
from tests.support.syncer import close, maths_of, tiny_config
from tests.support.syncer_scene import advance, learners, scene, syncer, until
from wan_diloco.config import RunConfig
from wan_diloco.models import build_model, model_tensors
from wan_diloco.protocol.events import Record, SendUpdate
from wan_diloco.protocol.state_json import state_from_json, state_to_json
from wan_diloco.protocol.syncer_machine import SyncerMachine
from wan_diloco.protocol.syncer_state import SyncerState
from wan_diloco.protocol.tape import ContributionJournalled, LearnerAdmitted, TapeRecord
from wan_diloco.storage import Journal, good_snapshots
from wan_diloco.syncer import spool
from wan_diloco.syncer.fragments_store import FragmentStore, FragmentValue
from wan_diloco.syncer.journal_keeper import JournalKeeper
from wan_diloco.syncer.merges import Merges
from wan_diloco.syncer.plan import machine_settings
from wan_diloco.syncer.restore import Restored, open_state
from wan_diloco.syncer.service import SyncerService
from wan_diloco.syncer.snapshots import SnapshotKeeper
from wan_diloco.syncer.workers import Workers
from wan_diloco.transport.memory import MemoryNetwork
from wan_diloco.units import Epoch, Version

CONFIG = tiny_config(syncer={"snapshot_every": "1h", "keep_updates": 1})
INTERVAL = tiny_config(syncer={"snapshot_every": "1h", "keep_updates": 1, "durability": "interval"})
MATHS = maths_of(CONFIG)
INITIAL = model_tensors(build_model(CONFIG))
SEGMENT_BYTES = 6_000
SNAPSHOT_AFTER = (3, 6, 9)
STEPS = 10


@dataclass
class Watched:
    """What the run that wasn't killed did, in order.

    Attributes:
        tape: Its records.
        performed: Its effects, as they were carried out.
        values: Bits of each fragment's versions.
        captured: State of each snapshot, and how many records are in it.
    """

    tape: list[TapeRecord] = field(default_factory=list)
    performed: list[Any] = field(default_factory=list)
    values: dict[tuple[int, int], tuple[torch.Tensor, ...]] = field(default_factory=dict)
    captured: list[tuple[dict[str, Any], int]] = field(default_factory=list)

    def look(self, patch: pytest.MonkeyPatch) -> None:
        record, perform = JournalKeeper.record, SyncerService._perform
        install, capture = Merges.install, SnapshotKeeper.capture

        async def recorded(keeper, records, *, durable):
            self.tape += records
            await record(keeper, records, durable=durable)

        def performed(service, effect):
            self.performed.append(effect)
            perform(service, effect)

        def installed(merges, published):
            install(merges, published)
            self.keep(published.fragment_id, merges._store.value(published.fragment_id))

        def captured(keeper, state, store):
            made = capture(keeper, state, store)
            if made is not None:
                self.captured.append((state_to_json(state), len(self.tape)))
            return made

        patch.setattr(JournalKeeper, "record", recorded)
        patch.setattr(SyncerService, "_perform", performed)
        patch.setattr(Merges, "install", installed)
        patch.setattr(SnapshotKeeper, "capture", captured)

    def keep(self, fragment_id: int, value: Any) -> None:
        bits = (value.exact_N, value.published_N, value.momentum_N)
        self.values[fragment_id, value.version.count] = tuple(part.clone() for part in bits)


def _open(folder: Path) -> Restored:
    return open_state(
        folder,
        resume=True,
        maths=MATHS,
        initial=lambda: INITIAL,
        keep_updates=CONFIG.syncer.keep_updates,
        agreement=CONFIG.agreement(),
    )


def _fresh_values() -> tuple[FragmentValue, ...]:
    return FragmentStore.fresh(MATHS.layout, INITIAL).values()


def _run(folder: Path, patch: pytest.MonkeyPatch, config: RunConfig = CONFIG) -> tuple[Watched, FileSystemRecorder]:
    seen = Watched()
    seen.look(patch)
    recorder = FileSystemRecorder(folder, lambda: len(seen.performed))

    async def story():
        async with scene(config, folder, workers=Workers.inline()) as (made, group):
            for index, value in enumerate(_fresh_values()):
                seen.keep(index, value)
            for step in range(1, STEPS + 1):
                await advance(group, made, 1)
                if step in SNAPSHOT_AFTER:
                    number = len(seen.captured)
                    made.service._next_snapshot_s = 0.0
                    made.service._inbox.wake.set()
                    keeper = made.service._parts.snapshots
                    await until(lambda before=number, one=keeper: len(seen.captured) > before and not one._busy)
            await made.crash()

    with recorder.recording():
        asyncio.run(story())
    return seen, recorder


def _check(restored: Restored, seen: Watched, mark: int, newest: str | None, *, every_merge: bool) -> None:
    """What came back is the run at a moment at which nothing that it had promised is missing."""
    performed = seen.performed[:mark]
    promised = [index for index, effect in enumerate(performed) if isinstance(effect, Record) and effect.durable]
    assert restored.resumed or not promised
    least = sum(isinstance(effect, Record) for effect in performed[: promised[-1] + 1]) if promised else 0
    number = int(newest.removeprefix("state-")) if newest is not None else 0
    before, count = seen.captured[number - 1] if number else (None, 0)
    behind = list(restored.tape)
    assert count + len(behind) >= least, "a record that others rely on is missing"
    assert behind == seen.tape[count : count + len(behind)], "the tape is another one"
    expected = _fresh(restored) if before is None else state_from_json(before)
    for record in behind:
        expected.apply(record)
    assert state_to_json(restored.state) == state_to_json(expected)
    assert restored.state.ledger.totals(restored.state.parameters).balance == 0
    for index, value in enumerate(restored.store.values()):
        bits = seen.values[index, value.version.count]
        for ours, theirs in zip((value.exact_N, value.published_N, value.momentum_N), bits, strict=True):
            assert torch.equal(ours, theirs)
    for effect in performed:
        if isinstance(effect, SendUpdate) and every_merge:
            assert restored.state.versions[effect.header.fragment_id] >= effect.header.to_version
    _check_promises([effect.record for effect in performed if isinstance(effect, Record) and effect.durable], restored)


def _fresh(restored: Restored) -> SyncerState:
    state = restored.state
    return SyncerState(
        parameters=state.parameters, initial_digests=state.initial_digests, keep_updates=state.keep_updates
    )


def _check_promises(records: list[TapeRecord], restored: Restored) -> None:
    """Contributions are known again, and lives stand."""
    newest: dict[tuple[str, int], ContributionJournalled] = {}
    for record in records:
        if isinstance(record, ContributionJournalled):
            newest[record.header.key.learner_id, record.header.key.fragment_id] = record
        if isinstance(record, LearnerAdmitted):
            assert restored.state.incarnations[record.learner_id] >= record.incarnation
    for record in newest.values():
        assert restored.state.ledger.is_repeated(record.header)


def _begin_again(restored: Restored, config: RunConfig) -> None:
    """The next process decides what counts."""
    before = list(restored.state.versions)
    machine = SyncerMachine(machine_settings(config, MATHS, restored.state.initial_digests), restored.state)
    lives, lost = dict(machine.state.incarnations), machine.state.term > 0 and config.syncer.durability == "interval"
    machine.start(0.0)
    assert machine.state.versions == [Version(Epoch(int(lost)), version.count) for version in before]
    assert machine.state.incarnations == lives
    assert machine.state.ledger.totals(machine.state.parameters).balance == 0
    if lost:
        assert not any(machine.state.pool)
        assert not machine.state.closed


def _restarted(image: Image, folder: Path, seen: Watched, mark: int, config: RunConfig) -> None:
    lay_out(image, folder)
    snapshots = folder / "state" / "snapshots"
    newest = list(good_snapshots(snapshots))[-1:] if snapshots.is_dir() else []
    restored = _open(folder / "state")
    try:
        every_merge = config.syncer.durability == "every-merge"
        _check(restored, seen, mark, newest[0] if newest else None, every_merge=every_merge)
        _begin_again(restored, config)
    finally:
        close(restored)
        shutil.rmtree(folder)


@pytest.mark.parametrize(("config", "in_chunks"), [(CONFIG, False), (CONFIG, True), (INTERVAL, False)])
def test_at_every_call_of_the_write_path_a_kill_and_a_power_cut_leave_all_that_was_promised(
    tmp_path, monkeypatch, config, in_chunks
):
    torch.set_num_threads(1)
    monkeypatch.setattr(Journal.open.__func__, "__defaults__", (SEGMENT_BYTES,))
    if in_chunks:
        monkeypatch.setattr(spool, "_WHOLE_BYTES_MAX", 0)
    (tmp_path / "run").mkdir()
    with monkeypatch.context() as patch:
        seen, recorder = _run(tmp_path / "run", patch, config)
    assert set(recorder.calls) >= {
        "open",
        "pwritev",
        "fsync",
        "fdatasync",
        "rename",
        "replace",
        "unlink",
        "rmdir",
        "mkdir",
    }
    assert len(seen.captured) == len(SNAPSHOT_AFTER)
    last = [name for name in recorder.moments[-1].killed if name.endswith(".journal")]
    assert "state/journal/0000000001.journal" not in last, "segments were dropped"
    images = {}
    for moment in recorder.moments:
        for kind, image in (("kill", moment.killed), ("cut", moment.cut)):
            # What is on the disk is the same for long; what was promised meanwhile is more at the last moment.
            images[kind, tuple(sorted(image.items()))] = (moment, image)
    assert len(images) > 200
    for (kind, _), (moment, image) in images.items():
        try:
            _restarted(image, tmp_path / "again", seen, moment.mark, config)
        except Exception as error:
            error.add_note(f"a {kind} at {moment.call}, after {moment.mark} effects")
            raise


def test_after_a_crash_at_any_of_some_calls_the_run_goes_on(tmp_path, monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setattr(Journal.open.__func__, "__defaults__", (SEGMENT_BYTES,))
    (tmp_path / "run").mkdir()
    with monkeypatch.context() as patch:
        _, recorder = _run(tmp_path / "run", patch)
    total = len(recorder.moments)
    for number, moment in enumerate(recorder.moments[total // 5 :: total // 3]):
        folder = tmp_path / f"again-{number}"
        lay_out(moment.killed, folder)

        async def story(folder: Path = folder):
            async with MemoryNetwork() as network, syncer(network, CONFIG, folder, resume=True) as made:
                old = made.versions
                async with learners(CONFIG, network.connection) as group:
                    await until(lambda: all([v.count for v in one.versions] == made.versions for one in group))
                    await advance(group, made, 5)
                assert min(made.versions) > min(old)
                assert made.service.status()["balance"] == 0

        asyncio.run(story())
