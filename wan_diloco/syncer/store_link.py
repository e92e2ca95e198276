"""A syncer and the store that has copies of its state: who may write there, and who begins from what is there.

The state on the disk is the run; the store follows one state folder at a time. A folder that the store doesn't follow
any more is behind: the run went on elsewhere since. An empty folder begins with what the store has.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from wan_diloco.clock import Clock
from wan_diloco.config import RunConfig
from wan_diloco.errors import ConfigError, StateTakenOver, StorageError, StoreError, StoreMissing
from wan_diloco.storage import (
    RENEW_S,
    FolderLock,
    LockNote,
    Manifest,
    ObjectLock,
    ObjectStore,
    manifest_names,
    read_json,
    write_json,
)
from wan_diloco.storage.filesystem import ensure_folder, translated
from wan_diloco.storage.journal_reader import find_segments
from wan_diloco.syncer.fetching import fetch_newest
from wan_diloco.telemetry import get_logger

__all__ = ["StoreLink", "open_link", "require_whole"]

_LOG: Final = get_logger(__name__)

# In the state folder: whose copy the store has, and whether all of it is here.
_IDENTITY: Final = "store.json"
_PARTS: Final = ("snapshots", "journal", "shipping")
# Between two questions to a store that is down, and between two words about it.
_ASK_S: Final = 5.0
_SAY_S: Final = 60.0
# What the last words to a store that doesn't answer may take of a stop.
_LEAVE_S: Final = 3.0


def open_link(config: RunConfig, clock: Clock, *, take_over: bool) -> StoreLink | None:
    """The store of a run; None where it has none. Nobody is asked anything yet.

    Args:
        config: The run's.
        clock: Measures how long another owner is watched.
        take_over: Whether an owner that may be alive is pushed aside.

    Raises:
        ConfigError: The address can't be used.
    """
    settings = config.syncer
    if not settings.store:
        return None
    store = ObjectStore.open(settings.store, settings.store_endpoint, unlocked=settings.store_unlocked)
    return StoreLink(store, clock, threading.Event().wait, take_over=take_over)


class StoreLink:
    """A store, and our right to write to it.

    Owner: the main thread; a thread of its own renews the lock.

    Args:
        store: Of the run.
        clock: Measures how long another owner is watched.
        pause: Waits so many seconds.
        take_over: Whether an owner that may be alive is pushed aside.

    Attributes:
        store: As given.
        fetched: Of what the folder began with; None when it had a run already, or begins one.
        begins_epoch: Whether the state has gone back, or another has been, so that a new epoch must begin.
        notes: What the operator should know, one sentence each.
    """

    def __init__(self, store: ObjectStore, clock: Clock, pause: Callable[[float], object], *, take_over: bool) -> None:
        """Ask nobody yet."""
        self.store = store
        self.fetched: Manifest | None = None
        self.begins_epoch = False
        self.notes: list[str] = []
        self._clock = clock
        self._pause = pause
        self._take_over = take_over
        self._folder_lock = None if store.folder is None else FolderLock(store.folder, "syncer")
        self._lock: ObjectLock | None = None
        self._keeping: threading.Thread | None = None
        self._watching = False
        # The name of a folder that was never whole.
        self._earlier = ""
        self._leaving = threading.Event()
        self._mutex = threading.Lock()  # owns everything below
        self._lost: StateTakenOver | None = None
        self._report: Callable[[str], None] = lambda _: None
        self._tell_lost: Callable[[StateTakenOver], None] = lambda _: None

    @property
    def lock(self) -> ObjectLock:
        """Ours, from `enter` on."""
        assert self._lock is not None, "the store is entered first"
        return self._lock

    # ---- beginning -------------------------------------------------------------------------------

    def require_there(self) -> None:
        """See that the store answers, before anything is made for it.

        Raises:
            StoreMissing: Its bucket doesn't exist.
            StoreError: It doesn't answer, or refuses.
            ConfigError: Its lock is something else.
        """
        if self.store.folder is None:
            ObjectLock(self.store, "", self._clock, self._watch).read()

    def tidy(self, folder: Path) -> None:
        """Remove what a process left that was killed before it had fetched all: as good as nothing.

        Raises:
            StorageError: The system refused.
        """
        if _is_half_entered(folder):
            self._earlier = _owner(folder)
            with translated("can't tidy", folder):
                for part in _PARTS:
                    if (folder / part).exists():
                        shutil.rmtree(folder / part)
                (folder / _IDENTITY).unlink()

    def enter(self, folder: Path, *, has_run: bool, resume: bool) -> None:
        """Become the owner of the store, and fetch what it has where the folder has no run.

        Ordering: after `tidy`, while the folder's own lock is held.

        Args:
            folder: `state/`.
            has_run: Whether there is a run in it.
            resume: Whether a run that is in the store may be taken up.

        Raises:
            StorageLocked: Another syncer has the store.
            ConfigError: The run went on elsewhere since; or the store has a run, and `resume` is false; or it doesn't
                do what a lock needs.
            StateDamaged: Nothing that the store has is good.
            StoreMissing: Its bucket doesn't exist.
            StorageError: The store or the system refused.
        """
        owner = _owner(folder) if has_run else self._earlier
        if self._folder_lock is not None:
            self._folder_lock.acquire()
        self._lock = ObjectLock(self.store, owner or secrets.token_hex(8), self._clock, self._watch)
        if has_run and not owner:
            # The folder is whole. It must know its name before the store does: were the process killed in between,
            # the next one would be taken for another folder's.
            self._remember(folder, entered=True)
        before = self._acquire(
            self._lock, lambda there: self._require_fit(folder, there, has_run=has_run, resume=resume), patient=has_run
        )
        self._keeping = threading.Thread(target=self._keep, name="store-lock", daemon=True)
        self._keeping.start()
        if has_run:
            return
        # From here on until `settled` the folder counts for nothing.
        self._remember(folder, entered=False)
        self.fetched, self.notes = fetch_newest(self.store, folder)
        self.begins_epoch = before is not None or self.fetched is not None
        if self.fetched is not None:
            self.notes.append(
                f"the state was fetched from {self.store.url}, as {self.fetched.object_name} has it; what wasn't "
                "shipped before is lost, and a new epoch begins"
            )

    def settled(self, folder: Path, *, term: int, epoch: int) -> None:
        """The folder has a whole state: from here on the store follows it.

        Args:
            folder: `state/`.
            term: That the machine will begin with.
            epoch: Of the state.

        Raises:
            StateTakenOver: Another process was quicker.
            StorageError: The store or the system refused.
        """
        self.lock.raise_to(term=term, epoch=epoch)
        self._remember(folder, entered=True)

    def _acquire(
        self, lock: ObjectLock, require: Callable[[LockNote | None], None], *, patient: bool
    ) -> LockNote | None:
        """Take the lock, and say what it said before; who is patient waits for a store that is down."""
        said, said_s = "", 0.0
        while True:
            try:
                if self._folder_lock is not None:
                    self.store.remove_leftovers()
                # Before its owner is watched, which takes a while.
                require(lock.read())
                return lock.acquire(take_over=self._take_over, alone=self._folder_lock is not None, require=require)
            except StoreMissing:
                # No wait makes a bucket, and whoever sees a run wait doesn't look at its configuration.
                raise
            except StoreError as exc:
                if not patient:
                    raise
                now_s = self._clock.now_s()
                if str(exc) != said or now_s - said_s >= _SAY_S:
                    said, said_s = str(exc), now_s
                    detail = f"{said}; it is asked again, since only it can tell whether the run went on elsewhere"
                    _LOG.warning("store_unreachable", detail=detail)
                self._pause(_ASK_S)

    def _watch(self, pause_s: float) -> None:
        """Pause between two looks at another owner."""
        if not self._watching:
            self._watching = True
            detail = f"another syncer has {self.store.url}, or was killed: whether it lives is seen within a minute"
            _LOG.info("store_watched", detail=detail)
        self._pause(pause_s)

    def _require_fit(self, folder: Path, before: LockNote | None, *, has_run: bool, resume: bool) -> None:
        if has_run:
            if before is not None and before.owner != self.lock.owner:
                hint = "set syncer.store to an empty place"
                # With nothing to fetch a new run would begin in an empty folder.
                if manifest_names(self.store.names()):
                    hint = f"move the folder away, and --resume fetches what the store has; or {hint}"
                raise ConfigError(
                    f"{self.store.url} follows another state than this one: {before} has it, or had it last, so that "
                    "the run may have gone on without what is here",
                    where=str(folder),
                    hint=hint,
                )
            return
        if (folder / "journal").is_dir() and find_segments(folder / "journal"):
            raise ConfigError("there is a journal and no snapshot", where=str(folder), hint="move the folder away")
        if not resume and manifest_names(self.store.names()):
            raise ConfigError(
                "there is a run in this store already",
                where=self.store.url,
                hint="give --resume to go on with it, or set syncer.store to an empty place",
            )

    def _remember(self, folder: Path, *, entered: bool) -> None:
        ensure_folder(folder)
        write_json(folder / _IDENTITY, {"owner": self.lock.owner, "store": self.store.url, "entered": entered})

    # ---- while it lasts --------------------------------------------------------------------------

    def watch(self, report: Callable[[str], None], lost: Callable[[StateTakenOver], None]) -> None:
        """Say who is told what.

        Thread: both are called from others.

        Args:
            report: The trouble with the lock in one sentence, and "" when it is over.
            lost: That another process has the store now; at once, when it is so already.
        """
        with self._mutex:
            self._report, self._tell_lost = report, lost
            already = self._lost
        if already is not None:
            lost(already)

    def fence(self, problem: StateTakenOver) -> None:
        """Somebody found out that another process has the store.

        Thread: any.
        """
        with self._mutex:
            known, self._lost = self._lost, problem
            tell = self._tell_lost
        if known is None:
            tell(problem)

    def leave(self) -> None:
        """Give the store back; idempotent. One that doesn't answer isn't waited for."""
        self._leaving.set()
        if self._keeping is not None:
            self._keeping.join(_LEAVE_S)
        if self._folder_lock is not None:
            self._folder_lock.release()

    def _keep(self) -> None:
        while not self._leaving.wait(RENEW_S):
            try:
                self.lock.renew()
            except StoreError as exc:
                self._report(f"the lock can't be renewed: {exc}")
            except StateTakenOver as exc:
                self.fence(exc)
                return
            else:
                self._report("")
        with contextlib.suppress(StoreError, StateTakenOver):
            self.lock.release()


def require_whole(folder: Path) -> None:
    """See that no part of a fetched state is taken for a run, where no store is given that could give the rest.

    Raises:
        ConfigError: It would be.
    """
    if _is_half_entered(folder):
        raise ConfigError(
            "a state was being fetched into this folder, and not all of it is here",
            where=str(folder),
            hint="give syncer.store again, or move the folder away",
        )


def _is_half_entered(folder: Path) -> bool:
    try:
        return read_json(folder / _IDENTITY).get("entered") is False
    except StorageError:
        return False


def _owner(folder: Path) -> str:
    """The name under which a store follows this folder; "" when none ever has."""
    if not (folder / _IDENTITY).exists():
        return ""
    owner = read_json(folder / _IDENTITY).get("owner")
    return owner if isinstance(owner, str) else ""
