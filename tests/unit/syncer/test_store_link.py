"""Who may write to a store, and who begins from what is there: stores in memory and in folders, and time by hand."""

from __future__ import annotations

import json
import uuid

import pytest

from tests.support.store import manifests
from wan_diloco.clock import ManualClock
from wan_diloco.errors import ConfigError, StateTakenOver, StoreError
from wan_diloco.storage import LOCK_NAME, Manifest, ObjectStore, Versioned
from wan_diloco.syncer.store_link import StoreLink


class Waiting:
    """A clock that moves while somebody waits, and what happens after so many waits."""

    def __init__(self, after=0, happens=lambda: None) -> None:
        self.clock = ManualClock()
        self.waits = 0
        self._after, self._happens = after, happens

    def pause(self, pause_s: float) -> None:
        self.clock.advance(pause_s)
        self.waits += 1
        if self.waits == self._after:
            self._happens()


class Down(ObjectStore):
    """A store that is asked in vain."""

    is_down = True

    def read_versioned(self, name):
        if self.is_down:
            raise StoreError("nobody answers")
        return super().read_versioned(name)


class Careless(ObjectStore):
    """It says that it knows conditions, and takes every put."""

    @property
    def conditional(self):
        return True

    @conditional.setter
    def conditional(self, _):
        pass

    def read_versioned(self, name):
        data = self.get_bytes(name)
        return None if data is None else _versioned(data)

    def write_if(self, name, data, expected):
        self.put_bytes(data, name)
        return _versioned(data).tag


def _versioned(data):
    return Versioned(data=data, tag=str(hash(data)))


def _place() -> str:
    return f"memory://{uuid.uuid4().hex}"


def _link(store, waiting: Waiting | None = None, *, take_over: bool = False) -> StoreLink:
    waiting = waiting or Waiting()
    return StoreLink(store, waiting.clock, waiting.pause, take_over=take_over)


def _owner(folder) -> str:
    return json.loads((folder / "store.json").read_text())["owner"]


def test_a_run_whose_process_ends_before_it_has_settled_in_its_new_store_may_go_on(tmp_path):
    store = ObjectStore.open(_place(), unlocked=True)
    first = _link(store)
    first.enter(tmp_path, has_run=True, resume=True)
    # Killed: the lock isn't given back, and nothing is shipped.
    name = _owner(tmp_path)
    assert name == first.lock.read().owner
    again = _link(store)
    again.enter(tmp_path, has_run=True, resume=True)
    assert again.lock.owner == name
    again.settled(tmp_path, term=1, epoch=0)
    assert _owner(tmp_path) == name
    with pytest.raises(StateTakenOver):
        first.lock.renew()
    again.leave()
    first.leave()


def test_who_obeys_the_hint_about_a_server_without_conditions_is_let_in(tmp_path):
    place = _place()
    with pytest.raises(ConfigError, match=r"syncer\.store_unlocked = true"):
        _link(Careless.open(place)).enter(tmp_path, has_run=True, resume=True)
    link = _link(ObjectStore.open(place, unlocked=True))
    link.enter(tmp_path, has_run=True, resume=True)
    assert link.lock.held
    link.leave()


@pytest.mark.parametrize("has_shipped", [False, True])
def test_a_folder_that_is_behind_is_told_to_fetch_only_where_there_is_something(tmp_path, has_shipped):
    store = ObjectStore.open(_place(), unlocked=True)
    other = _link(store)
    other.enter(tmp_path / "other", has_run=True, resume=True)
    other.leave()
    if has_shipped:
        manifest = Manifest(term=1, number=1, owner=other.lock.owner, snapshot="state-0", files=())
        store.put_bytes(manifest.encode(), manifest.object_name)
        assert manifests(store) == [manifest]
    with pytest.raises(ConfigError, match=r"follows another state.*set syncer\.store to an empty place") as caught:
        _link(store).enter(tmp_path / "mine", has_run=True, resume=True)
    # With nothing there an empty folder would begin a new run.
    assert ("move the folder away" in str(caught.value)) == has_shipped


@pytest.mark.parametrize("has_run", [True, False])
def test_a_lock_that_makes_no_sense_is_not_waited_for(tmp_path, has_run):
    store = ObjectStore.open(_place(), unlocked=True)
    store.put_bytes(b"", LOCK_NAME)
    waiting = Waiting()
    with pytest.raises(ConfigError, match=r"lock\.json: isn't the lock of a state.*remove it, where no syncer uses"):
        _link(store, waiting).enter(tmp_path, has_run=has_run, resume=True)
    assert waiting.waits == 0
    store.remove(LOCK_NAME)
    link = _link(store)
    link.enter(tmp_path, has_run=has_run, resume=True)
    link.leave()


def test_who_waits_for_a_store_says_so_again_and_again(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr("wan_diloco.syncer.store_link._LOG.warning", lambda event, **_: said.append(event))
    store = Down.open(_place(), unlocked=True)
    waiting = Waiting(60, lambda: setattr(store, "is_down", False))
    link = _link(store, waiting)
    link.enter(tmp_path, has_run=True, resume=True)
    # Five minutes, and a word a minute.
    assert waiting.waits == 60
    assert said == ["store_unreachable"] * 5
    link.leave()


def test_who_watches_another_owner_says_so_once(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr("wan_diloco.syncer.store_link._LOG.info", lambda event, **_: said.append(event))
    store = ObjectStore.open(_place(), unlocked=True)
    first = _link(store)
    first.enter(tmp_path / "one", has_run=False, resume=True)
    assert said == []
    waiting = Waiting()
    # Its thread is slower than this clock: it is silent, as far as anybody can see.
    second = _link(store, waiting)
    second.enter(tmp_path / "two", has_run=False, resume=True)
    assert waiting.waits > 1
    assert said == ["store_watched"]
    second.leave()
    first.leave()


def test_a_folder_that_serves_as_a_store_is_tidied_when_it_is_entered(tmp_path):
    store = ObjectStore.open((tmp_path / "store").as_uri())
    store.put_bytes(b"one", "manifests/x")
    left = tmp_path / "store" / "manifests" / ".y.1.2.tmp"
    left.write_bytes(b"half")
    link = _link(store)
    link.enter(tmp_path / "state", has_run=True, resume=True)
    assert not left.exists()
    link.leave()
