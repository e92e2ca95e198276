"""One owner for an object store, by an object that is only ever written on condition.

The object names its owner and counts how often it was renewed. Whoever wants the store watches the count for a while,
on its own clock: one that rises is alive, and no two machines' clocks are ever compared. One that is about to go gives
the store back, or falls silent, and is waited for a little longer. A new owner has a higher term.
The one before notices at its next renewal, whose condition fails, and writes nothing any more.

On a store that can't write on condition two who come in the same moment may both believe that they were first.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Final, Self

from wan_diloco.errors import ConfigError, StateTakenOver, StorageLocked, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable

    from wan_diloco.clock import Clock
    from wan_diloco.storage.object_store import ObjectStore, Versioned

__all__ = ["LOCK_NAME", "RENEW_S", "WATCH_S", "LockNote", "ObjectLock"]

LOCK_NAME: Final = "lock.json"
RENEW_S: Final = 5.0
# An owner that is silent for so long counts as dead: renewals take less than a second where the store answers. One that
# the store keeps waiting may live on all the same; then its next write is refused, and it ends.
WATCH_S: Final = 20.0
# One that has been told to end has gone after 30 s, or it isn't about to. The last word of one that was killed may have
# been on its way still when the watch began.
_PATIENCE_S: Final = 40.0

_LOOK_S: Final = 1.0
_FORMAT: Final = 1
# Against an owner that renews: it does so every few seconds.
_PUSHES_MAX: Final = 20
# At an object that we wrote, whatever the answers said.
_LOOKS_MAX: Final = 4
_NO_SUCH_TAG: Final = '"00000000000000000000000000000000"'


@dataclass(frozen=True, slots=True, kw_only=True)
class LockNote:
    """What the object says.

    Attributes:
        owner: Of whose state the store has copies: drawn by chance for each state folder.
        life: Of the process; drawn by chance.
        term, epoch: The highest that an owner has ever had.
        counter: How often it was renewed.
        host, pid: For people.
        released: Whether the owner has gone by itself.
    """

    owner: str
    life: str
    term: int
    epoch: int
    counter: int
    host: str
    pid: int
    released: bool = False

    def encode(self) -> bytes:
        """As bytes; `decode` reads them."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, sort_keys=True).encode() + b"\n"

    @classmethod
    def decode(cls, data: bytes, where: str) -> Self:
        """What `encode` wrote.

        Raises:
            ConfigError: It is something else, and will be: no time mends it.
        """
        try:
            value = json.loads(data)
            if value.pop("format") != _FORMAT:
                raise ConfigError("is of another format", where=where, hint="use the version that wrote it")
            note = cls(**value)
            if not all(isinstance(number, int) for number in (note.term, note.epoch, note.counter)):
                raise TypeError("a number isn't one")
        except (ValueError, TypeError, AttributeError, KeyError) as exc:
            raise ConfigError(
                f"isn't the lock of a state: {exc}",
                where=where,
                hint="remove it, where no syncer uses this store",
            ) from exc
        return note

    def __str__(self) -> str:
        """The owner, for people."""
        return f"the syncer with pid {self.pid} on {self.host}, term {self.term}"


class ObjectLock:
    """Holds a store for one state folder, from `acquire` to `release`.

    Thread: any.

    Args:
        store: To be held.
        owner: Of the state folder.
        clock: Measures how long another owner is watched.
        pause: Waits so many seconds.

    Attributes:
        owner: As given.
        taken_over: Why nothing may be written any more; None while it may.
    """

    def __init__(self, store: ObjectStore, owner: str, clock: Clock, pause: Callable[[float], object]) -> None:
        """Nothing is asked yet."""
        self._store = store
        self._clock = clock
        self._pause = pause
        self._where = f"{store.url}/{LOCK_NAME}"
        self._mutex = threading.Lock()  # owns everything below
        self._note = LockNote(
            owner=owner,
            life=secrets.token_hex(8),
            term=0,
            epoch=0,
            counter=0,
            host=socket.gethostname(),
            pid=os.getpid(),
        )
        self._tag: str | None = None
        self.owner = owner
        self.taken_over: StateTakenOver | None = None

    @property
    def held(self) -> bool:
        """Whether it was acquired, and neither lost nor released since, as far as we know."""
        return self._tag is not None and self.taken_over is None

    @property
    def term(self) -> int:
        """Ours."""
        return self._note.term

    @property
    def epoch(self) -> int:
        """The highest that this store has seen."""
        return self._note.epoch

    def read(self) -> LockNote | None:
        """What the object says now; None where there is none.

        Raises:
            ConfigError: The object is something else.
            StoreError: The store doesn't answer.
        """
        there = self._store.read_versioned(LOCK_NAME)
        return None if there is None else LockNote.decode(there.data, self._where)

    def acquire(
        self, *, take_over: bool, alone: bool, require: Callable[[LockNote | None], object] = lambda _: None
    ) -> LockNote | None:
        """Become the owner, with a term above all before.

        Args:
            take_over: Whether an owner that may be alive is pushed aside without being watched.
            alone: Whether another lock says already that no other process can be the owner now.
            require: Given what the object says, None where there is none, just before it is taken; raises where it must
                not be.

        Returns:
            What the object said before.

        Raises:
            StorageLocked: The owner is alive, or another was quicker.
            ConfigError: The store doesn't do what a lock needs, or the object is something else.
            StoreError: It doesn't answer, or refuses.
        """
        # Who pushes another aside may come between two of its renewals, or in the middle of one.
        for _ in range(_PUSHES_MAX if take_over else 1):
            there = self._store.read_versioned(LOCK_NAME)
            before = None if there is None else LockNote.decode(there.data, self._where)
            if there is not None and before is not None and not (take_over or alone or self._is_gone(before)):
                there, before = self._watch(there, before)
            require(before)
            if self._take(there, before):
                self._prove()
                return before
        raise StorageLocked(f"{self._store.url} was taken by another process in this very moment")

    def raise_to(self, *, term: int, epoch: int) -> None:
        """Say that we have got this far; smaller numbers than those that it says change nothing.

        Raises:
            StateTakenOver: Another process is the owner.
            StoreError: The store doesn't answer, or refuses.
        """
        with self._mutex:
            self._write(replace(self._note, term=max(term, self._note.term), epoch=max(epoch, self._note.epoch)))

    def renew(self) -> None:
        """Show that we are alive, and see that we are the owner.

        Raises:
            StateTakenOver: Another process is the owner.
            StoreError: The store doesn't answer, or refuses.
        """
        with self._mutex:
            self._write(self._note)

    def release(self) -> None:
        """Let the next owner have it at once; does nothing where it isn't held.

        Raises:
            StateTakenOver: Another process is the owner.
            StoreError: The store doesn't answer, or refuses; the next owner will watch for a while.
        """
        with self._mutex:
            if self.held:
                try:
                    self._write(replace(self._note, released=True))
                finally:
                    self._tag = None

    def _is_gone(self, note: LockNote) -> bool:
        """Whether that owner can't be alive: it said so, or it had the folder that is locked for us on this machine."""
        return note.released or (note.owner == self.owner and note.host == self._note.host)

    def _watch(self, there: Versioned, note: LockNote) -> tuple[Versioned | None, LockNote]:
        """Wait until that owner counts as dead, or goes by itself.

        Returns:
            What is there then, None when the object was removed; and what it said last.

        Raises:
            StorageLocked: It goes on.
        """
        begun_s = changed_s = self._clock.now_s()
        while self._clock.now_s() - changed_s < WATCH_S:
            self._pause(_LOOK_S)
            now = self._store.read_versioned(LOCK_NAME)
            if now is None:
                return None, note
            if now.tag != there.tag:
                there, note = now, LockNote.decode(now.data, self._where)
                changed_s = self._clock.now_s()
                if note.released:
                    break
                if changed_s - begun_s >= _PATIENCE_S:
                    raise StorageLocked(
                        f"{self._store.url} is in use by {note}; stop it, or give --take-over to have it end"
                    )
        return there, note

    def _take(self, there: Versioned | None, before: LockNote | None) -> bool:
        with self._mutex:
            if before is not None:
                self._note = replace(self._note, term=before.term, epoch=before.epoch)
            self._note = replace(self._note, term=self._note.term + 1)
            tag = self._store.write_if(LOCK_NAME, self._note.encode(), None if there is None else there.tag)
            # Or it was us, and the answer got lost on its way.
            self._tag = tag or self._own_tag()
            return self._tag is not None

    def _write(self, note: LockNote) -> None:
        if self.taken_over is not None:
            raise self.taken_over
        if self._tag is None:
            # Whoever is late with something must see it before the store does.
            raise StoreError(f"{self._where} was given back, and is nobody's")
        note = replace(note, counter=self._note.counter + 1)
        data = note.encode()
        tag = self._store.write_if(LOCK_NAME, data, self._tag)
        for _ in range(_LOOKS_MAX):
            if tag is not None:
                break
            there = self._store.read_versioned(LOCK_NAME)
            if there is None or self._read_of(there).life != self._note.life:
                self.taken_over = self._ended(there)
                raise self.taken_over
            # What we wrote is there although we were told otherwise: an answer got lost, this one or an earlier.
            tag = there.tag if there.data == data else self._store.write_if(LOCK_NAME, data, there.tag)
        if tag is None:
            raise StoreError(f"{self._where} changes while it is written, and nobody else is there")
        self._note, self._tag = note, tag

    def _own_tag(self) -> str | None:
        """The tag of what is there, if we wrote it."""
        there = self._store.read_versioned(LOCK_NAME)
        if there is None or LockNote.decode(there.data, self._where).life != self._note.life:
            return None
        return there.tag

    def _read_of(self, there: Versioned) -> LockNote:
        """What stands in our place; what makes no sense is no reason for an owner to end."""
        try:
            return LockNote.decode(there.data, self._where)
        except ConfigError as exc:
            raise StoreError(str(exc)) from exc

    def _ended(self, there: Versioned | None) -> StateTakenOver:
        who = "somebody, who removed its lock" if there is None else str(self._read_of(there))
        return StateTakenOver(f"{self._store.url} was taken over by {who}: this syncer ends, and ships nothing more")

    def _prove(self) -> None:
        """See that the store really refuses what it must: one that takes conditions for comments would share us out."""
        if not self._store.conditional:
            return
        for wrong in (None, _NO_SUCH_TAG):
            tag = self._store.write_if(LOCK_NAME, self._note.encode(), wrong)
            if tag is not None:
                self._tag = tag
                raise ConfigError(
                    f"{self._store.url} doesn't refuse a put whose condition fails, so that two syncers could have it",
                    where="syncer.store",
                    hint="take a server that knows If-Match and If-None-Match, or set syncer.store_unlocked = true "
                    "where nothing else ever starts a second syncer",
                )
