"""Shipping by itself: a store that can be told to refuse, and files that look like a state's."""

from __future__ import annotations

import signal
import threading
import uuid

import pytest

from tests.support.store import manifests
from wan_diloco.clock import SystemClock
from wan_diloco.errors import StateTakenOver, StoreError
from wan_diloco.storage import Journal, ObjectStore
from wan_diloco.syncer import main, shipping
from wan_diloco.syncer.shipping import Shipper
from wan_diloco.syncer.store_link import StoreLink

WAIT_S = 30.0


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(shipping, "_RETRY_FIRST_S", 0.01)
    monkeypatch.setattr(shipping, "_RETRY_MAX_S", 0.05)


class Gate(ObjectStore):
    """A store in memory that refuses what it is told to, and hangs where it is told to."""

    refused: tuple[str, ...] = ()
    hanging = ""
    puts = 0

    def hang(self, word: str) -> None:
        self.hanging, self.hangs, self.goes_on = word, threading.Event(), threading.Event()

    def put_file(self, path, name):
        self._see("put", name)
        super().put_file(path, name)

    def put_bytes(self, data, name):
        self._see("put", name)
        super().put_bytes(data, name)

    def remove(self, name):
        self._see("remove", name)
        super().remove(name)

    def _see(self, action, name):
        if self.hanging and self.hanging in f"{action} {name}":
            self.hangs.set()
            assert self.goes_on.wait(WAIT_S)
        if any(word in f"{action} {name}" for word in self.refused):
            raise StoreError(f"can't {action} {name}: it is told to refuse")
        if "lock.json" not in name:
            self.puts += action == "put"


class Told:
    """What a shipper says."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.words: list[str] = []

    def __call__(self, text: str) -> None:
        with self._changed:
            self.words.append(text)
            self._changed.notify_all()

    def wait(self, wanted) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: bool(self.words) and wanted(self.words[-1]), WAIT_S), self.words


class Scene:
    """A state folder, its store, and a shipper between them."""

    def __init__(self, folder, place: str, *, keep_journal: bool = False) -> None:
        self.folder = folder
        (folder / "snapshots").mkdir(parents=True)
        self.journal = Journal.open(folder / "journal")
        self.store = Gate.open(place, unlocked=True)
        waiting = threading.Event()
        self.link = StoreLink(self.store, SystemClock(), waiting.wait, take_over=False)
        self.link.enter(folder, has_run=True, resume=True)
        self.link.settled(folder, term=1, epoch=0)
        self.shipper = Shipper(self.link, folder, self.journal, keep_journal=keep_journal)
        self.told = Told()
        self.shipper.tell = self.told
        self.lost: list[StateTakenOver] = []
        self._made = 0

    def start(self) -> None:
        self.shipper.start(lambda call: call(), self.lost.append)

    def snapshot(self) -> str:
        """A new one, with a record of the journal behind it."""
        self._made += 1
        name = f"state-{self._made}"
        self.journal.append(1, name.encode())
        self.journal.sync()
        (self.folder / "snapshots" / name).mkdir()
        for file in ("tensors.safetensors", "manifest.json"):
            (self.folder / "snapshots" / name / file).write_bytes(f"{name} {file}".encode())
        return name

    def forget(self, name: str) -> None:
        """As the run does when it needs them no more."""
        for path in (self.folder / "snapshots" / name).iterdir():
            path.unlink()
        self.journal.drop_segments_before(self.journal.segments[-1])

    def rooms(self) -> list[str]:
        staging = self.folder / "shipping"
        return sorted(path.name for path in staging.iterdir()) if staging.exists() else []

    def close(self) -> None:
        self.shipper.finish(WAIT_S)
        self.link.leave()
        self.journal.close()


@pytest.fixture
def made(tmp_path):
    scene = Scene(tmp_path / "state", f"memory://{uuid.uuid4().hex}")
    yield scene
    scene.close()


def test_what_the_run_removes_meanwhile_is_shipped_all_the_same(made):
    name = made.snapshot()
    made.shipper.offer(name, 1)
    made.forget(name)
    made.start()
    assert made.shipper.finish(WAIT_S)
    (manifest,) = manifests(made.store)
    assert manifest.snapshot == name
    assert [file.path for file in manifest.files] == [
        "journal/0000000001.journal",
        f"snapshots/{name}/tensors.safetensors",
        f"snapshots/{name}/manifest.json",
    ]
    assert all(made.store.get_bytes(file.name) is not None for file in manifest.files)
    assert made.rooms() == []


def test_a_store_that_refuses_costs_two_stages_at_most_and_gets_the_newest_in_the_end(made):
    made.store.refused = ("put snapshots/",)
    made.start()
    floor = 1
    for _ in range(6):
        name = made.snapshot()
        made.shipper.offer(name, floor)
        floor = made.journal.segments[-1]
        made.told.wait(lambda text: "told to refuse" in text)
        assert len(made.rooms()) <= 2
    assert made.shipper.failures > 0
    assert manifests(made.store) == []
    made.store.refused = ()
    made.told.wait(lambda text: text == "")
    assert made.shipper.finish(WAIT_S)
    # One that was being shipped when the store came back may be there too.
    found = manifests(made.store)
    assert found[0].snapshot == name
    assert len(found) <= 2
    # What was put for others is nobody's.
    assert set(made.store.names()) == {"lock.json"}.union(*(manifest.named() for manifest in found))


def test_what_is_superfluous_and_can_not_be_removed_is_removed_after_the_next(made):
    made.start()
    for _ in range(3):
        made.shipper.offer(made.snapshot(), made.journal.segments[-1])
        _shipped(made)
    made.store.refused = ("remove",)
    made.shipper.offer(made.snapshot(), made.journal.segments[-1])
    made.told.wait(lambda text: "can't remove" in text)
    assert [manifest.snapshot for manifest in manifests(made.store)] == ["state-4", "state-3", "state-2"]
    made.store.refused = ()
    made.shipper.offer(made.snapshot(), made.journal.segments[-1])
    made.told.wait(lambda text: text == "")
    assert made.shipper.finish(WAIT_S)
    found = manifests(made.store)
    assert [manifest.snapshot for manifest in found] == ["state-5", "state-4"]
    assert set(made.store.names()) == {"lock.json"}.union(*(manifest.named() for manifest in found))


def _shipped(made) -> None:
    deadline = threading.Event()
    for _ in range(int(WAIT_S / 0.005)):
        is_there = made.shipper.status()["newest_snapshot"] == f"state-{made._made}"
        if is_there and len(manifests(made.store)) <= 2:
            return
        deadline.wait(0.005)
    raise AssertionError("it wasn't shipped")


def test_who_was_taken_over_ships_nothing_more_and_says_so_once(made):
    other = StoreLink(made.store, SystemClock(), threading.Event().wait, take_over=True)
    other.enter(made.folder.parent / "other", has_run=False, resume=True)
    made.store.puts = 0
    made.shipper.offer(made.snapshot(), 1)
    made.start()
    assert not made.shipper.finish(WAIT_S)
    assert made.store.puts == 0
    assert len(made.lost) == 1
    other.leave()


def test_a_stop_does_not_wait_for_a_store_that_is_down(made):
    made.store.refused = ("put",)
    made.shipper.offer(made.snapshot(), 1)
    made.start()
    made.told.wait(lambda text: "told to refuse" in text)
    assert not made.shipper.finish(WAIT_S)


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_put_that_hangs_at_a_stop_is_left_behind_and_leads_to_nothing(made):
    made.store.hang("put snapshots/")
    made.shipper.offer(made.snapshot(), 1)
    made.start()
    assert made.store.hangs.wait(WAIT_S)
    assert not made.shipper.finish(0.0)
    made.link.leave()
    made.store.goes_on.set()
    # The process would have ended by now. The lock is given back, so that another may have it.
    assert not made.shipper.finish(WAIT_S)
    assert not made.shipper.shipping
    assert manifests(made.store) == []
    assert "was given back" in made.shipper.trouble


class Ends:
    """The process's end: nobody has asked for it, or somebody has, and there is no time left."""

    received: signal.Signals | None = None

    def left_s(self, most_s: float, *, spare_s: float) -> float:
        return 0.0


@pytest.fixture
def said(monkeypatch):
    words = []
    monkeypatch.setattr(main._LOG, "warning", lambda event, **fields: words.append((event, fields)))
    monkeypatch.setattr(main, "_LOOK_S", 0.001)
    return words


def _ending(made, ends) -> threading.Thread:
    thread = threading.Thread(target=main._ship_last, args=(made.shipper, ends))
    thread.start()
    return thread


def test_the_end_of_a_run_is_waited_for_as_long_as_the_store_takes_it(made, said):
    made.store.hang("put snapshots/")
    name = made.snapshot()
    made.shipper.offer(name, 1)
    made.start()
    assert made.store.hangs.wait(WAIT_S)
    thread = _ending(made, Ends())
    made.store.goes_on.set()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert manifests(made.store)[0].snapshot == name
    assert said == []


def test_a_signal_ends_the_wait_for_a_store_that_hangs(made, said):
    made.store.hang("put snapshots/")
    made.shipper.offer(made.snapshot(), 1)
    made.start()
    assert made.store.hangs.wait(WAIT_S)
    ends = Ends()
    thread = _ending(made, ends)
    ends.received = signal.SIGTERM
    thread.join(WAIT_S)
    assert not thread.is_alive()
    ((event, fields),) = said
    assert (event, fields["reason"]) == ("store_behind", "there was no time for it")
    made.store.goes_on.set()


def test_a_store_that_refuses_the_end_of_a_run_is_not_waited_for_and_the_reason_is_said(made, said):
    made.store.refused = ("put",)
    made.shipper.offer(made.snapshot(), 1)
    made.start()
    thread = _ending(made, Ends())
    thread.join(WAIT_S)
    assert not thread.is_alive()
    ((event, fields),) = said
    assert event == "store_behind"
    assert "told to refuse" in fields["reason"]


def test_a_run_that_goes_on_waits_for_a_store_that_is_down_and_one_that_begins_does_not(tmp_path):
    store = Gate.open(f"memory://{uuid.uuid4().hex}", unlocked=True)
    store.refused = ("put lock.json",)
    waits = []

    def pause(pause_s: float) -> None:
        waits.append(pause_s)
        if len(waits) == 3:
            store.refused = ()

    beginning = StoreLink(store, SystemClock(), pause, take_over=False)
    with pytest.raises(StoreError):
        beginning.enter(tmp_path / "new", has_run=False, resume=True)
    assert waits == []
    going_on = StoreLink(store, SystemClock(), pause, take_over=False)
    going_on.enter(tmp_path / "old", has_run=True, resume=True)
    assert going_on.lock.held
    assert len(waits) == 3
    going_on.leave()


def test_all_segments_stay_in_the_store_where_the_journal_is_kept(tmp_path):
    scene = Scene(tmp_path / "state", f"memory://{uuid.uuid4().hex}", keep_journal=True)
    scene.start()
    for _ in range(5):
        scene.shipper.offer(scene.snapshot(), scene.journal.segments[-1])
        _shipped(scene)
    newest = manifests(scene.store)[0]
    segments = [file.path for file in newest.files if file.path.startswith("journal/")]
    assert segments == [f"journal/{number:010d}.journal" for number in range(1, 6)]
    scene.close()


def test_a_process_that_goes_on_ships_nothing_twice(tmp_path):
    place = f"memory://{uuid.uuid4().hex}"
    scene = Scene(tmp_path / "state", place)
    name = scene.snapshot()
    scene.shipper.offer(name, 1)
    scene.start()
    scene.close()
    (first,) = manifests(scene.store)
    again = Scene.__new__(Scene)
    (tmp_path / "state" / "snapshots").rename(tmp_path / "kept")
    again.__init__(tmp_path / "state", place)
    (tmp_path / "state" / "snapshots").rmdir()
    (tmp_path / "kept").rename(tmp_path / "state" / "snapshots")
    again.store.puts = 0
    again.shipper.offer(name, 1)
    again.start()
    again.close()
    newest = manifests(again.store)[0]
    assert newest.files == first.files
    assert newest.term == 2
    assert again.store.puts == 1


def test_what_can_not_be_staged_is_said_and_leaves_nothing_and_the_next_is_shipped(made):
    made.start()
    gone = made.snapshot()
    made.forget(gone)
    made.shipper.offer(gone, 1)
    made.told.wait(lambda text: "can't link the files of a snapshot" in text)
    assert made.rooms() == []
    name = made.snapshot()
    made.shipper.offer(name, made.journal.segments[0])
    made.told.wait(lambda text: text == "")
    assert made.shipper.finish(WAIT_S)
    assert manifests(made.store)[0].snapshot == name


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_that_ends_shipping_is_said(made, monkeypatch):
    monkeypatch.setattr(Shipper, "_ship", lambda _self, _offer: 1 // 0)
    made.shipper.offer(made.snapshot(), 1)
    made.start()
    made.told.wait(lambda text: "nothing is shipped any more: ZeroDivisionError" in text)
    assert not made.shipper.finish(WAIT_S)
