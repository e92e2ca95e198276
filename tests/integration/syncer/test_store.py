"""Copies of the state in a store: shipped beside the run, taken up on another machine, and only ever by one syncer."""

from __future__ import annotations

import asyncio
import json
import shutil

import pytest
import torch

from tests.support.store import S3Server, damage, hurry, manifests, s3_environment, s3_server, until_there
from tests.support.syncer import close, maths_of, open_tiny, tiny_config
from tests.support.syncer_scene import WAIT_S, advance, learners, scene, syncer, until
from tests.support.values import bits_by_tensor, bits_of
from wan_diloco.clock import SystemClock
from wan_diloco.errors import ConfigError, StateDamaged, StateTakenOver, StorageLocked, StoreMissing
from wan_diloco.protocol.syncer_machine import SyncerMachine
from wan_diloco.storage import ObjectStore, object_lock
from wan_diloco.syncer.main import _cause, _machine_settings
from wan_diloco.syncer.proof import replay_run
from wan_diloco.syncer.store_link import open_link
from wan_diloco.transport.memory import MemoryNetwork


@pytest.fixture(scope="module")
def s3():
    with s3_server() as server:
        yield server


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    torch.set_num_threads(1)
    hurry(monkeypatch)
    # One renewal is enough to see that an owner lives.
    monkeypatch.setattr(object_lock, "_PATIENCE_S", 0.0)


def _config(s3: S3Server, place: str, **settings):
    table = {"store": place, "store_endpoint": s3.endpoint, "snapshot_every": "50ms", **settings}
    return tiny_config(syncer=table)


def _link(config, *, take_over: bool = False):
    return open_link(config, SystemClock(), take_over=take_over)


def _store(config) -> ObjectStore:
    settings = config.syncer
    return ObjectStore.open(settings.store, settings.store_endpoint, unlocked=settings.store_unlocked)


async def _train_and_stop(config, folder, steps: int = 9):
    """Train, stop, and say what there was at the end; all of it is in the store."""
    async with scene(config, folder, link=_link(config)) as (made, group):
        await advance(group, made, steps)
        await until_there(lambda: bool(manifests(_store(config))), WAIT_S)
        await made.stop()
        bits, versions = bits_of(made.restored.store), made.versions
    assert made.shipped
    assert min(versions) >= 2
    return bits, versions


async def _go_on(config, folder, bits, versions, *, epoch: int):
    """Take the run up in an empty folder, see that it is the same, and train on."""
    async with MemoryNetwork() as network, syncer(network, config, folder, resume=True, link=_link(config)) as made:
        assert bits == bits_of(made.restored.store)
        assert made.versions == versions
        await until(lambda: {version.epoch for version in made.service.state.versions} == {epoch})
        async with learners(config, network.connection) as group:
            await until(lambda: all([v.count for v in one.versions] == versions for one in group))
            await advance(group, made, 6)
            assert min(made.versions) > min(versions)
            for index, value in enumerate(made.restored.store.values()):
                await until(lambda at=index, want=value: torch.equal(group[0].values[at], want.published_N))
        assert made.service.status()["balance"] == 0
        assert made.service.state.epoch == epoch
        await made.stop()
        return bits_of(made.restored.store), made.versions


@pytest.mark.parametrize("kind", ["s3", "file", "memory"])
def test_another_machine_goes_on_with_the_very_bits_that_were_shipped(tmp_path, s3, kind):
    place = {"s3": s3.new_place, "file": (tmp_path / "store").as_uri, "memory": lambda: f"memory://{tmp_path.name}"}
    config = _config(s3, place[kind](), store_unlocked=kind == "memory")
    bits, versions = asyncio.run(_train_and_stop(config, tmp_path / "one"))
    # Twice, since what was fetched is shipped on.
    for epoch, name in enumerate(("two", "three"), start=1):
        bits, versions = asyncio.run(_go_on(config, tmp_path / name, bits, versions, epoch=epoch))


def test_what_was_under_way_when_the_machine_died_is_lost_and_the_ledger_says_so(tmp_path, s3):
    config = _config(s3, s3.new_place())

    async def first():
        async with scene(config, tmp_path / "one", link=_link(config)) as (made, group):
            await advance(group, made, 7)
            await until_there(lambda: any(max(_counts(found)) > 0 for found in _published(_store(config))), WAIT_S)
            await made.crash()

    asyncio.run(first())
    said = {}
    for line in map(json.loads, (tmp_path / "one" / "tape.jsonl").read_text().splitlines()):
        if line["type"] == "FragmentPublished":
            said[line["fragment_id"], line["version"]["count"]] = line["digest"]
    restored = open_tiny(tmp_path / "two" / "state", config, resume=True, link=(link := _link(config)))
    for fragment_id, value in enumerate(restored.store.values()):
        if value.version.count:
            assert said[fragment_id, value.version.count] == value.digest
    state = _started(config, restored)
    assert state.epoch == 1
    assert state.ledger.totals((1, 1)).balance == 0
    assert not any(state.pool)
    assert not state.closed
    link.leave()
    close(restored)


def _started(config, restored):
    """The state when a machine has taken it."""
    machine = SyncerMachine(_machine_settings(config, maths_of(config), restored), restored.state)
    machine.start(0.0)
    return machine.state


def test_an_epoch_that_was_to_begin_begins_after_a_crash_before_it(tmp_path, s3):
    config = _config(s3, s3.new_place())
    asyncio.run(_train_and_stop(config, tmp_path / "one"))
    terms, reasons = [], []
    for _ in range(2):
        # The first is killed when all is fetched, and before its machine has written a word.
        restored = open_tiny(tmp_path / "two" / "state", config, resume=True, link=(link := _link(config)))
        state = _started(config, restored)
        assert state.epoch == 1
        terms.append(state.term)
        reasons.append(restored.new_epoch)
        link.leave()
        close(restored)
    assert terms == [2, 3]
    assert reasons == [
        "the state is what the store had, which may be less than was done",
        "the start before this one, which was to begin it, was broken off",
    ]


def _published(store):
    for manifest in manifests(store):
        name = next(file.name for file in manifest.files if file.path.endswith("/manifest.json"))
        yield json.loads(store.get_bytes(name))["values"]["state"]


def _counts(state) -> list[int]:
    return [version["count"] for version in state["versions"]]


def test_what_has_no_name_of_a_states_is_left_alone_when_a_state_is_fetched(tmp_path, s3):
    config = _config(s3, s3.new_place())
    asyncio.run(_train_and_stop(config, tmp_path / "one"))
    folder = tmp_path / "two" / "state"
    (folder / "snapshots" / "state-7.bak").mkdir(parents=True)
    (folder / "journal").mkdir()
    kept = [folder / "snapshots" / "state-7.bak" / "tensors.safetensors", folder / "snapshots" / "state-7.tar.gz"]
    kept.append(folder / "journal" / "old.journal")
    for path in kept:
        path.write_text("somebody's own copy")
    restored = open_tiny(folder, config, resume=True, link=(link := _link(config)))
    assert [path.read_text() for path in kept] == ["somebody's own copy"] * 3
    assert any("state-7.bak" in note for note in restored.notes)
    link.leave()
    close(restored)


@pytest.mark.parametrize("what", ["manifests/", "tensors.safetensors", ".journal"])
def test_what_is_damaged_is_passed_over_for_the_manifest_before(tmp_path, s3, what):
    # One snapshot at the start and one at the end.
    config = _config(s3, s3.new_place(), snapshot_every="1h")
    asyncio.run(_train_and_stop(config, tmp_path / "one"))
    store = _store(config)
    newest, before = manifests(store)
    names = [name for name in sorted(newest.named() - before.named()) if what in name]
    damage(store, names[-1])
    # The same by hand: the files that the manifest before names, and nothing else.
    for file in before.files:
        path = tmp_path / "by hand" / "state" / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        assert store.get_file(file.name, path)
    expected = open_tiny(tmp_path / "by hand" / "state", config, resume=True)
    restored = open_tiny(tmp_path / "two" / "state", config, resume=True, link=(link := _link(config)))
    assert bits_of(expected.store) == bits_of(restored.store)
    assert any("passed over" in note for note in restored.notes)
    assert any(before.object_name in note for note in restored.notes)
    link.leave()
    close(restored)
    close(expected)


def test_a_store_in_which_nothing_is_good_never_leads_to_a_start_from_nothing(tmp_path, s3):
    config = _config(s3, s3.new_place())
    asyncio.run(_train_and_stop(config, tmp_path / "one"))
    store = _store(config)
    for manifest in manifests(store):
        damage(store, manifest.object_name)
    with pytest.raises(StateDamaged, match="nothing that s3://"):
        open_tiny(tmp_path / "two" / "state", config, resume=True, link=(link := _link(config)))
    link.leave()


def test_a_store_that_is_down_costs_the_run_nothing_and_gets_everything_later(tmp_path):
    with s3_environment():
        server = S3Server()
        config = _config(server, server.new_place())

        async def story():
            async with scene(config, tmp_path / "one", link=_link(config)) as (made, group):
                await advance(group, made, 3)
                await asyncio.to_thread(server.stop)
                before = min(made.versions)
                await until(lambda: "store" in made.service.status()["reasons"])
                await advance(group, made, 6)
                assert min(made.versions) > before
                status = made.service.status()
                assert "can't" in status["reasons"]["store"]
                assert status["store"]["failures"] > 0
                await asyncio.to_thread(server.start)
                await until(lambda: "store" not in made.service.status()["reasons"])
                await made.stop()
            assert made.shipped
            return bits_of(made.restored.store)

        bits = asyncio.run(story())
        restored = open_tiny(tmp_path / "two" / "state", config, resume=True, link=(link := _link(config)))
        assert bits == bits_of(restored.store)
        link.leave()
        close(restored)
        server.stop()


def _contents(store: ObjectStore, term: int) -> dict[str, bytes | None]:
    return {name: store.get_bytes(name) for name in store.names() if f"/t{term:010d}-" in name}


def test_of_two_syncers_one_has_the_store_and_who_is_pushed_aside_writes_nothing_more(tmp_path, s3):
    config = _config(s3, s3.new_place())
    store = _store(config)

    async def story():
        async with scene(config, tmp_path / "one", link=_link(config)) as (made, group):
            await advance(group, made, 3)
            await until_there(lambda: bool(manifests(store)), WAIT_S)
            second = _link(config)
            with pytest.raises(StorageLocked, match="in use by the syncer with pid"):
                await asyncio.to_thread(open_tiny, tmp_path / "two" / "state", config, resume=True, link=second)
            second.leave()
            await advance(group, made, 1)
            third = _link(config, take_over=True)
            restored = await asyncio.to_thread(open_tiny, tmp_path / "three" / "state", config, resume=True, link=third)
            assert made.task is not None
            with pytest.raises(BaseExceptionGroup) as caught:
                await made.task
            cause = _cause(caught.value)
            assert isinstance(cause, StateTakenOver)
            assert cause.exit_code == 77
            assert "taken over by the syncer with pid" in str(cause)
            before = _contents(store, 1)
        assert _contents(store, 1) == before
        third.leave()
        close(restored)

    asyncio.run(story())
    # And its folder is behind: the run went on elsewhere.
    link = _link(config)
    with pytest.raises(ConfigError, match="follows another state than this one"):
        open_tiny(tmp_path / "one" / "state", config, resume=True, link=link)
    link.leave()


def test_a_folder_store_has_one_syncer_by_the_kernels_lock(tmp_path, s3):
    config = _config(s3, (tmp_path / "store").as_uri())
    first = _link(config)
    restored = open_tiny(tmp_path / "one" / "state", config, link=first)
    second = _link(config, take_over=True)
    with pytest.raises(StorageLocked, match="is in use by the syncer with pid"):
        open_tiny(tmp_path / "two" / "state", config, resume=True, link=second)
    second.leave()
    first.leave()
    close(restored)


@pytest.mark.parametrize("resume", [False, True])
def test_a_bucket_that_nobody_made_is_no_outage_and_leaves_nothing_behind(tmp_path, s3, resume):
    config = _config(s3, "s3://nobody-made-this/one")
    link = _link(config)
    with pytest.raises(StoreMissing, match="there is no bucket nobody-made-this"):
        open_tiny(tmp_path / "run" / "state", config, resume=resume, link=link)
    link.leave()
    assert not (tmp_path / "run").exists()


def test_who_has_a_run_does_not_wait_for_a_bucket_that_nobody_made(tmp_path, s3):
    state = tmp_path / "run" / "state"
    close(open_tiny(state, tiny_config()))
    config = _config(s3, "s3://nobody-made-this/one")
    link = _link(config)
    with pytest.raises(StoreMissing, match="there is no bucket nobody-made-this"):
        open_tiny(state, config, resume=True, link=link)
    link.leave()


def test_a_store_with_a_run_is_only_taken_up_when_asked(tmp_path, s3):
    config = _config(s3, s3.new_place())
    asyncio.run(_train_and_stop(config, tmp_path / "one"))
    link = _link(config)
    with pytest.raises(ConfigError, match=r"there is a run in this store already.*--resume"):
        open_tiny(tmp_path / "two" / "state", config, link=link)
    link.leave()


@pytest.mark.parametrize("retention", ["since-snapshot", "all"])
def test_the_store_has_what_two_manifests_name_and_no_more(tmp_path, s3, retention):
    config = _config(s3, s3.new_place(), journal_retention=retention)
    bits, versions = asyncio.run(_train_and_stop(config, tmp_path / "one"))
    asyncio.run(_go_on(config, tmp_path / "two", bits, versions, epoch=1))
    store = _store(config)
    found = manifests(store)
    assert len(found) == 2
    assert set(store.names()) == set().union({"lock.json"}, *(manifest.named() for manifest in found))
    segments = sorted(file.path for file in found[0].files if file.path.startswith("journal/"))
    numbers = [int(path.removeprefix("journal/").removesuffix(".journal")) for path in segments]
    assert numbers == list(range(numbers[0], numbers[-1] + 1))
    assert (numbers[0] == 1) == (retention == "all")
    assert not any((tmp_path / "two" / "state" / "shipping").iterdir())


def test_all_merges_of_both_machines_can_be_done_again(tmp_path, s3):
    config = _config(s3, s3.new_place(), journal_retention="all")
    bits, versions = asyncio.run(_train_and_stop(config, tmp_path / "one"))
    asyncio.run(_go_on(config, tmp_path / "two", bits, versions, epoch=1))
    report = replay_run(tmp_path / "two", config)
    assert report.difference is None
    assert report.since == "the initial weights"
    assert {version.epoch for version in report.reached} == {1}
    assert report.versions > sum(versions)
    assert report.snapshots


def test_a_restart_finds_the_epoch_that_began_behind_what_was_fetched(tmp_path, s3):
    place = s3.new_place()
    bits, versions = asyncio.run(_train_and_stop(_config(s3, place), tmp_path / "one"))
    config = _config(s3, place, snapshot_every="1h")

    async def second():
        folder = tmp_path / "two"
        async with MemoryNetwork() as network, syncer(network, config, folder, resume=True, link=_link(config)) as made:
            async with learners(config, network.connection) as group:
                await until(lambda: all(v.epoch == 1 for one in group for v in one.versions))
                await advance(group, made, 6)
            await made.crash()
            return bits_of(made.restored.store), made.service.state.versions

    bits, versions = asyncio.run(second())
    # The only snapshot is the one that was fetched, and the epoch's beginning is on the tape behind it.
    restored = open_tiny(tmp_path / "two" / "state", config, resume=True)
    assert len(list((tmp_path / "two" / "state" / "snapshots").iterdir())) == 1
    assert bits == bits_of(restored.store)
    assert restored.state.versions == versions
    assert restored.state.epoch == 1
    assert restored.state.ledger.totals((1, 1)).balance == 0
    close(restored)


def test_what_a_killed_process_had_half_fetched_is_fetched_again(tmp_path, s3):
    config = _config(s3, s3.new_place())
    bits, versions = asyncio.run(_train_and_stop(config, tmp_path / "one"))
    state = tmp_path / "two" / "state"
    restored = open_tiny(state, config, resume=True, link=(link := _link(config)))
    link.leave()
    close(restored)
    # As if it had been killed before the last word was written, with a file cut short.
    identity = json.loads((state / "store.json").read_text())
    (state / "store.json").write_text(json.dumps({**identity, "entered": False}))
    newest = max((state / "snapshots").iterdir(), key=lambda path: int(path.name[6:]))
    shutil.rmtree(newest)
    segment = min((state / "journal").glob("*.journal"))
    segment.write_bytes(segment.read_bytes()[:40])
    # Nor is it ever taken for a run of its own.
    with pytest.raises(ConfigError, match="a state was being fetched into this folder"):
        open_tiny(state, tiny_config(), resume=True)
    bits, versions = asyncio.run(_go_on(config, tmp_path / "two", bits, versions, epoch=2))


def test_a_run_may_get_a_store_later(tmp_path, s3):
    plain = tiny_config(syncer={"snapshot_every": "50ms"})

    async def first():
        async with scene(plain, tmp_path / "one") as (made, group):
            await advance(group, made, 5)
            await made.stop()
            return bits_of(made.restored.store), made.versions

    async def second(config):
        async with MemoryNetwork() as network:
            async with syncer(network, config, tmp_path / "one", resume=True, link=_link(config)) as made:
                assert made.service.state.epoch == 0
            assert made.shipped

    bits, versions = asyncio.run(first())
    config = _config(s3, s3.new_place())
    asyncio.run(second(config))
    asyncio.run(_go_on(config, tmp_path / "two", bits, versions, epoch=1))


def test_another_machine_may_cut_the_values_anew_and_a_third_goes_on_with_the_cut(tmp_path, s3):
    place = s3.new_place()
    before = _config(s3, place)
    kept = {"store": place, "store_endpoint": s3.endpoint, "snapshot_every": "50ms"}
    after = tiny_config(syncer=kept, sync={"fragments": 4})
    store = _store(before)

    async def first():
        async with scene(before, tmp_path / "one", link=_link(before)) as (made, group):
            await advance(group, made, 9)
            await until_there(lambda: bool(manifests(store)), WAIT_S)
            await made.stop()
            bits = bits_by_tensor(maths_of(before).layout, made.restored.store.values())
        assert made.shipped
        return bits

    async def second(bits):
        shipped = manifests(store)[0]
        async with MemoryNetwork() as network:
            link = _link(after)
            async with syncer(network, after, tmp_path / "two", resume=True, refragment=True, link=link) as made:
                assert bits_by_tensor(maths_of(after).layout, made.restored.store.values()) == bits
                await until(lambda: made.service.state.term == 2)
                state = made.service.state
                # The store names the epoch that really begins, and what was fetched is as it was.
                assert state.epoch == link.lock.epoch == 2
                for file in shipped.files:
                    path = tmp_path / "two" / "state" / file.path
                    assert not path.exists() or path.stat().st_size == file.size_bytes
                async with learners(after, network.connection) as group:
                    await until(lambda: all(one.versions == state.versions for one in group))
                    await advance(group, made, 6)
                    assert made.service.status()["balance"] == 0
                await made.stop()
            assert made.shipped
            return bits_of(made.restored.store), made.versions

    bits, versions = asyncio.run(second(asyncio.run(first())))
    asyncio.run(_go_on(after, tmp_path / "three", bits, versions, epoch=3))


def test_learners_that_live_on_are_brought_to_what_was_shipped_whatever_they_were_given_since(tmp_path, s3):
    config = _config(s3, s3.new_place())

    async def first():
        async with scene(config, tmp_path / "one", link=_link(config)) as (made, group):
            await advance(group, made, 7)
            await until_there(lambda: any(max(_counts(found)) > 0 for found in _published(_store(config))), WAIT_S)
            await made.crash()
            return group

    async def second(earlier):
        # As if east's life had begun after the last manifest.
        earlier[0].incarnation += 1
        earlier[0].life_id = "a process"
        async with MemoryNetwork() as network:
            link = _link(config)
            async with syncer(network, config, tmp_path / "two", resume=True, link=link) as made:
                before = made.versions
                async with learners(config, network.connection, before=earlier) as group:
                    await until(lambda: all(v.epoch == 1 for one in group for v in one.versions))
                    await advance(group, made, 6)
                    assert all(max(one.resyncs) > 0 for one in group)
                assert min(made.versions) > min(before)
                assert made.service.state.incarnations == {"east": 3, "west": 1}, (
                    "a life that nobody knows of is given anew"
                )
                status = made.service.status()
                assert status["balance"] == 0
                assert status["epoch"] == 1

    asyncio.run(second(asyncio.run(first())))
