"""One owner for a store: the real conditions of a real S3 server, and time that moves only by hand."""

from __future__ import annotations

import threading

import pytest

from tests.support.store import s3_server
from wan_diloco.clock import ManualClock
from wan_diloco.errors import ConfigError, StateTakenOver, StorageLocked, StoreError, StoreMissing
from wan_diloco.storage import LOCK_NAME, WATCH_S, LockNote, ObjectLock, ObjectStore


@pytest.fixture(scope="module")
def s3():
    with s3_server() as server:
        yield server


@pytest.fixture
def store(s3):
    return ObjectStore.open(s3.new_place(), s3.endpoint)


class Watcher:
    """A clock that moves while somebody waits, and what others do meanwhile."""

    def __init__(self, *meanwhile) -> None:
        self.clock = ManualClock()
        self.waits = 0
        self._meanwhile = meanwhile

    def pause(self, pause_s: float) -> None:
        self.clock.advance(pause_s)
        self.waits += 1
        for act in self._meanwhile:
            act()


def lock_of(store, owner: str, watcher: Watcher | None = None) -> ObjectLock:
    watcher = watcher or Watcher()
    return ObjectLock(store, owner, watcher.clock, watcher.pause)


def elsewhere(monkeypatch, name: str = "elsewhere") -> None:
    monkeypatch.setattr("socket.gethostname", lambda: name)


def test_the_first_has_it_at_once_and_says_who_it_is(store):
    watcher = Watcher()
    lock = lock_of(store, "one", watcher)
    assert lock.read() is None
    lock.acquire(take_over=False, alone=False)
    note = lock.read()
    assert note is not None
    assert (note.owner, note.term, note.released) == ("one", 1, False)
    assert str(note).startswith("the syncer with pid ")
    assert watcher.waits == 0


def test_an_owner_that_renews_is_alive_and_the_second_is_refused(store):
    first = lock_of(store, "one")
    first.acquire(take_over=False, alone=False)
    watcher = Watcher(first.renew)
    second = lock_of(store, "two", watcher)
    with pytest.raises(StorageLocked, match=r"in use by the syncer with pid .*, term 1; .*--take-over"):
        second.acquire(take_over=False, alone=False)
    assert not second.held
    # Long enough for one that was told to end.
    assert watcher.clock.now_s() >= 30
    first.renew()


@pytest.mark.parametrize("end", ["release", "remove"])
def test_an_owner_that_ends_while_it_is_watched_is_waited_for(store, end):
    first = lock_of(store, "one")
    first.acquire(take_over=False, alone=False)
    first.raise_to(term=7, epoch=3)

    def meanwhile():
        # It is still at its last merges, and then gives the store back.
        if watcher.waits < 20:
            first.renew()
        elif watcher.waits == 20:
            first.release() if end == "release" else store.remove(LOCK_NAME)

    watcher = Watcher(meanwhile)
    second = lock_of(store, "two", watcher)
    before = second.acquire(take_over=False, alone=False)
    assert watcher.waits == 20
    assert before is not None
    assert (before.owner, before.term, before.released) == ("one", 7, end == "release")
    assert (second.term, second.epoch) == (8, 3)
    second.renew()


def test_the_last_word_of_one_that_was_killed_is_no_sign_of_life(store):
    first = lock_of(store, "one")
    first.acquire(take_over=False, alone=False)
    watcher = Watcher(lambda: first.renew() if watcher.waits == 3 else None)
    second = lock_of(store, "two", watcher)
    second.acquire(take_over=False, alone=False)
    assert watcher.clock.now_s() >= 3 + WATCH_S
    with pytest.raises(StateTakenOver):
        first.renew()


def test_what_is_there_when_the_lock_is_taken_decides_whether_it_may_be(store):
    first = lock_of(store, "one")
    first.acquire(take_over=False, alone=False)

    def meanwhile():
        if watcher.waits == 2:
            other = lock_of(store, "other")
            other.acquire(take_over=True, alone=False)
            other.release()

    def require(there):
        if there is not None and there.owner != "one":
            raise ConfigError("it is another's")

    watcher = Watcher(meanwhile)
    second = lock_of(store, "two", watcher)
    with pytest.raises(ConfigError, match="another's"):
        second.acquire(take_over=False, alone=False, require=require)
    assert not second.held
    assert second.read().owner == "other"


def test_an_owner_that_is_silent_for_long_enough_is_taken_over(store):
    first = lock_of(store, "one")
    first.acquire(take_over=False, alone=False)
    watcher = Watcher()
    second = lock_of(store, "two", watcher)
    second.acquire(take_over=False, alone=False)
    assert watcher.clock.now_s() >= WATCH_S
    assert second.term == 2
    for _ in range(2):
        with pytest.raises(StateTakenOver, match=r"taken over by the syncer with pid .*, term 2"):
            first.renew()
    assert not first.held
    second.renew()


def test_who_is_told_to_takes_over_without_watching(store):
    first = lock_of(store, "one")
    first.acquire(take_over=False, alone=False)
    watcher = Watcher()
    second = lock_of(store, "two", watcher)
    second.acquire(take_over=True, alone=False)
    assert watcher.waits == 0
    with pytest.raises(StateTakenOver):
        first.raise_to(term=9, epoch=9)
    first.release()
    assert (second.read().term, second.read().released) == (2, False)


def test_what_was_released_is_nobodys_and_the_term_goes_on(store):
    first = lock_of(store, "one")
    first.acquire(take_over=False, alone=False)
    first.raise_to(term=7, epoch=3)
    first.release()
    first.release()
    watcher = Watcher()
    second = lock_of(store, "two", watcher)
    second.acquire(take_over=False, alone=False)
    assert watcher.waits == 0
    assert (second.term, second.epoch) == (8, 3)


def test_who_was_killed_has_it_again_at_once_on_the_same_machine_and_not_on_another(store, monkeypatch):
    lock_of(store, "one").acquire(take_over=False, alone=False)
    watcher = Watcher()
    lock_of(store, "one", watcher).acquire(take_over=False, alone=False)
    assert watcher.waits == 0
    elsewhere(monkeypatch)
    # A copy of the folder on another machine has the same name.
    lock_of(store, "one", watcher).acquire(take_over=False, alone=False)
    assert watcher.waits > 0


def test_of_many_who_come_at_once_one_has_it(store):
    barrier = threading.Barrier(4)
    had: list[ObjectLock] = []
    refused: list[StorageLocked] = []

    def come(owner: str) -> None:
        lock = lock_of(store, owner, Watcher())
        barrier.wait()
        try:
            lock.acquire(take_over=False, alone=False)
        except StorageLocked as exc:
            refused.append(exc)
        else:
            had.append(lock)

    threads = [threading.Thread(target=come, args=(f"owner {index}",)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Time passes at once here, so that who comes a moment later sees a silent owner: all terms differ all the same.
    terms = [lock.term for lock in had]
    assert len(set(terms)) == len(terms)
    assert len(had) + len(refused) == 4
    newest = max(had, key=lambda lock: lock.term)
    newest.renew()
    for lock in had:
        if lock is not newest:
            with pytest.raises(StateTakenOver):
                lock.renew()


class Lossy(ObjectStore):
    """Writes, and then has the answer get lost."""

    losing = False

    def write_if(self, name: str, data: bytes, expected: str | None) -> str | None:
        tag = super().write_if(name, data, expected)
        if self.losing:
            raise StoreError("no answer came")
        return tag


def test_an_answer_that_got_lost_does_not_make_an_owner_a_stranger(s3):
    store = Lossy.open(s3.new_place(), s3.endpoint)
    lock = lock_of(store, "one")
    lock.acquire(take_over=False, alone=False)
    store.losing = True
    for _ in range(2):
        with pytest.raises(StoreError):
            lock.renew()
    store.losing = False
    lock.renew()
    assert lock.held
    assert lock.read().owner == "one"


class Repeating(ObjectStore):
    """A library that asks again when no answer comes, although the first request was obeyed."""

    def write_if(self, name: str, data: bytes, expected: str | None) -> str | None:
        super().write_if(name, data, expected)
        return super().write_if(name, data, expected)


def test_a_request_that_is_repeated_behind_our_back_is_still_ours(s3):
    store = Repeating.open(s3.new_place(), s3.endpoint)
    lock = lock_of(store, "one")
    lock.acquire(take_over=False, alone=False)
    lock.renew()
    assert lock.held


class Careless(ObjectStore):
    """A server that doesn't know conditions and takes every put."""

    def write_if(self, name: str, data: bytes, expected: str | None) -> str | None:
        self.put_bytes(data, name)
        seen = self.read_versioned(name)
        assert seen is not None
        return seen.tag


def test_a_server_that_takes_conditions_for_comments_is_refused(s3):
    store = Careless.open(s3.new_place(), s3.endpoint)
    with pytest.raises(ConfigError, match="doesn't refuse a put whose condition fails"):
        lock_of(store, "one").acquire(take_over=False, alone=False)


def test_a_bucket_that_is_gone_is_an_outage_and_nobodys_take_over(s3):
    store = ObjectStore.open(s3.new_place(), s3.endpoint)
    lock = lock_of(store, "one")
    lock.acquire(take_over=False, alone=False)
    store.remove("lock.json")
    store._fs.rmdir(store.url.removeprefix("s3://").partition("/")[0])
    with pytest.raises(StoreMissing):
        lock.renew()
    assert lock.taken_over is None
    assert lock.held


def test_a_lock_that_somebody_removed_is_lost(store):
    lock = lock_of(store, "one")
    lock.acquire(take_over=False, alone=False)
    store.remove(LOCK_NAME)
    with pytest.raises(StateTakenOver, match="removed its lock"):
        lock.renew()


@pytest.mark.parametrize("data", [b"", b'{"format": 1, "anything": "else"}', b'{"format": 99}'])
def test_an_object_that_is_no_lock_is_not_overwritten_and_no_outage(store, data):
    lock = lock_of(store, "one")
    lock.acquire(take_over=False, alone=False)
    store.put_bytes(data, LOCK_NAME)
    for attempt in (lock_of(store, "two").read, lambda: lock_of(store, "two").acquire(take_over=True, alone=True)):
        with pytest.raises(ConfigError, match=r"lock\.json: is(n't the lock of a state| of another format)"):
            attempt()
    assert store.get_bytes(LOCK_NAME) == data
    # An owner isn't taken over by it, and says what is wrong.
    with pytest.raises(StoreError, match=r"lock\.json: is"):
        lock.renew()
    assert lock.held


def test_what_comes_late_finds_the_lock_given_back(store):
    lock = lock_of(store, "one")
    lock.acquire(take_over=False, alone=False)
    lock.release()
    before = store.get_bytes(LOCK_NAME)
    with pytest.raises(StoreError, match="was given back"):
        lock.renew()
    assert store.get_bytes(LOCK_NAME) == before


def test_a_note_comes_back_as_it_was():
    note = LockNote(owner="a", life="b", term=3, epoch=1, counter=9, host="c", pid=4, released=True)
    assert LockNote.decode(note.encode(), "here") == note


class Meanwhile(ObjectStore):
    """Something happens between a look at the lock and the write after it."""

    happens = None

    def read_versioned(self, name: str):
        seen = super().read_versioned(name)
        happens, self.happens = self.happens, None
        if happens is not None:
            happens()
        return seen


@pytest.mark.parametrize("take_over", [True, False])
def test_only_who_pushes_an_owner_aside_tries_again_when_it_renews_in_this_moment(s3, take_over):
    store = Meanwhile.open(s3.new_place(), s3.endpoint)
    first = lock_of(store, "one")
    first.acquire(take_over=False, alone=False)
    second = lock_of(store, "two")
    store.happens = first.renew
    if take_over:
        second.acquire(take_over=True, alone=False)
        with pytest.raises(StateTakenOver):
            first.renew()
    else:
        with pytest.raises(StorageLocked):
            second.acquire(take_over=False, alone=True)
        first.renew()
