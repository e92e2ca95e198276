"""Copies of a syncer's state on their way to its store: beside the run, and never in its way.

A snapshot that is on the disk is offered; the journal's growing segment is sealed, so that all that the snapshot needs
never changes any more, and the files are staged as hard links, so that the run may remove its own names at any time.
One thread ships: segments, then the snapshot, then the manifest that names them all; what no manifest of the last two
names is removed after that. One offer waits at most, the newest: a store that is slow or down costs copies, not memory
or disk without bound, and the run nothing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from wan_diloco.errors import CheckpointError, StateTakenOver, StorageError
from wan_diloco.storage import Journal, Manifest, ShippedFile
from wan_diloco.storage.filesystem import translated
from wan_diloco.storage.journal_reader import segment_name
from wan_diloco.storage.shipment import is_ours, journal_name, manifest_names, snapshot_name_of
from wan_diloco.storage.tensor_file import file_digest
from wan_diloco.syncer.fetching import read_manifest
from wan_diloco.syncer.store_link import StoreLink

__all__ = ["Shipper"]

_KEPT: Final = 2
_RETRY_FIRST_S: Final = 1.0
_RETRY_MAX_S: Final = 60.0
_STAGING: Final = "shipping"
_SNAPSHOT_FILES: Final = ("tensors.safetensors", "manifest.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Offer:
    """What is to be shipped.

    Attributes:
        snapshot: Its name.
        paths: All files that a restart needs, in the order in which they are shipped.
        room: Where those of them are staged that weren't shipped before.
    """

    snapshot: str
    paths: tuple[str, ...]
    room: Path


class Shipper:
    """Ships what it is offered.

    Args:
        link: Whose store it is; entered.
        folder: `state/`.
        journal: The one in it.
        keep_journal: Whether the store keeps all segments, or what the snapshots need.

    Attributes:
        tell: Told the trouble in one sentence, and "" when it is over.
        failures: Times that the store or the disk refused.
    """

    def __init__(self, link: StoreLink, folder: Path, journal: Journal, *, keep_journal: bool) -> None:
        """Ship nothing yet; what an earlier process had staged is forgotten."""
        self._link = link
        self._folder = folder
        self._journal = journal
        self._keep_journal = keep_journal
        self._calls: Callable[[Callable[[], None]], None] = lambda call: call()
        self._staging = folder / _STAGING
        shutil.rmtree(self._staging, ignore_errors=True)
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()  # owns what follows
        self._waiting: _Offer | None = None
        self._offered = ""
        self._stopping = False
        self._shipped: dict[str, ShippedFile] = {}
        self._troubles: dict[str, str] = {}
        self._shipped_bytes = 0
        self._newest = ""
        self.failures = 0
        self.tell: Callable[[str], None] = lambda _: None
        # The shipping thread's own. What may be in the store, and what must be.
        self._surveyed = False
        self._known: set[str] = set()
        self._manifests: list[Manifest] = []
        self._number = 0

    # ---- for the process -------------------------------------------------------------------------

    def start(self, calls: Callable[[Callable[[], None]], None], lost: Callable[[StateTakenOver], None]) -> None:
        """Begin to ship what is offered.

        Args:
            calls: Has a call run where `tell` is to be called.
            lost: Told, from another thread, that another process has the store: we must end.
        """
        self._calls = calls
        self._link.watch(lambda text: self._failed("lock", text) if text else self._trouble("lock", ""), lost)
        # It ends with the process, whatever the store does: a put can't be called off.
        self._thread = threading.Thread(target=self._run, name="shipping", daemon=True)
        self._thread.start()

    def offer(self, snapshot: str, floor: int) -> None:
        """Have a snapshot shipped, and what a restart from it needs of the journal.

        Thread: any, one at a time. Before anything of it is removed.

        Args:
            snapshot: Its name; it is durable.
            floor: The oldest segment that it needs.
        """
        with self._changed:
            self._offered = snapshot
        try:
            offer = self._stage(snapshot, 0 if self._keep_journal else floor)
        except StorageError as exc:
            shutil.rmtree(self._staging / snapshot, ignore_errors=True)
            self._failed("stage", str(exc))
            return
        self._trouble("stage", "")
        with self._changed:
            stale, self._waiting = self._waiting, offer
            self._changed.notify_all()
        if stale is not None:
            self._discard(stale)

    def finish(self, timeout_s: float) -> bool:
        """Ship what waits, if the store takes it in that time; then no more. May be called again, to wait longer.

        Returns:
            Whether the newest that was offered is in the store.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return False
        with self._changed:
            return self._newest == self._offered

    @property
    def shipping(self) -> bool:
        """Whether it may still get further: at a stop it ends when all is there, or at the first refusal."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def trouble(self) -> str:
        """What is wrong now, in one sentence; "" when nothing is.

        Thread: any.
        """
        with self._changed:
            return "; ".join(self._troubles.values())

    def status(self) -> dict[str, object]:
        """How shipping stands.

        Thread: any.
        """
        with self._changed:
            return {
                "place": self._link.store.url,
                "newest_snapshot": self._newest,
                "shipped_bytes": self._shipped_bytes,
                "failures": self.failures,
            }

    # ---- staging ---------------------------------------------------------------------------------

    def _stage(self, snapshot: str, floor: int) -> _Offer:
        self._journal.seal()
        if len(self._journal.segments) == 1:
            # Without a journal a snapshot is taken for the rest of a damaged state, also at the very beginning.
            self._journal.seal(even_empty=True)
        sealed = [number for number in self._journal.segments[:-1] if number >= floor]
        paths = [f"journal/{segment_name(number)}" for number in sealed]
        paths += [f"snapshots/{snapshot}/{name}" for name in _SNAPSHOT_FILES]
        room = self._staging / snapshot
        with self._changed:
            lacking = [path for path in paths if path not in self._shipped]
        with translated("can't link the files of a snapshot into", room):
            for path in lacking:
                (room / path).parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileExistsError):
                    os.link(self._folder / path, room / path)
        return _Offer(snapshot=snapshot, paths=tuple(paths), room=room)

    def _discard(self, offer: _Offer) -> None:
        # What can't be removed now is at the next start.
        shutil.rmtree(offer.room, ignore_errors=True)

    # ---- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._ship_offers()
        except Exception as exc:
            # A bug of ours; the run goes on, and somebody must know that its copies don't.
            self._failed("store", f"nothing is shipped any more: {type(exc).__name__}: {exc}")
            raise

    def _ship_offers(self) -> None:
        offer: _Offer | None = None
        delay_s = 0.0
        while (offer := self._next(offer, delay_s)) is not None:
            try:
                self._ship(offer)
                delay_s = 0.0
                self._trouble("store", "")
                self._discard(offer)
                offer = None
                self._tidy()
                self._trouble("tidy", "")
            except StateTakenOver as exc:
                self._link.fence(exc)
                return
            except StorageError as exc:
                if offer is None:
                    # All is there, and what is there too much goes after the next.
                    self._failed("tidy", str(exc))
                    continue
                delay_s = min(max(2 * delay_s, _RETRY_FIRST_S), _RETRY_MAX_S)
                self._failed("store", f"what a lost disk would lose grows: {exc}")

    def _next(self, failed: _Offer | None, delay_s: float) -> _Offer | None:
        """What to ship now: the newest there is. None to end: at a stop, when nothing waits or the store is down."""
        with self._changed:
            if failed is not None:
                self._changed.wait_for(lambda: self._stopping, delay_s)
                if self._stopping:
                    return None
            else:
                self._changed.wait_for(lambda: self._stopping or self._waiting is not None)
            newest, self._waiting = self._waiting, None
            if newest is not None and failed is not None:
                # Before another can be staged.
                self._discard(failed)
        return newest or failed

    def _ship(self, offer: _Offer) -> None:
        # Who has been taken over must not get any further than this.
        self._link.lock.renew()
        if not self._surveyed:
            self._survey()
        files = [self._put(offer, path) for path in offer.paths]
        self._link.lock.renew()
        self._number += 1
        manifest = Manifest(
            term=self._link.lock.term,
            number=self._number,
            owner=self._link.lock.owner,
            snapshot=offer.snapshot,
            files=tuple(files),
        )
        self._known.add(manifest.object_name)
        data = manifest.encode()
        self._link.store.put_bytes(data, manifest.object_name)
        self._manifests = [*self._manifests, manifest][-_KEPT:]
        with self._changed:
            self._newest = offer.snapshot
            self._shipped_bytes += len(data)

    def _put(self, offer: _Offer, path: str) -> ShippedFile:
        with self._changed:
            known = self._shipped.get(path)
        if known is not None:
            return known
        staged = offer.room / path
        term = self._link.lock.term
        folder, _, file = path.partition("/")
        name = journal_name(term, file) if folder == "journal" else snapshot_name_of(term, *file.split("/"))
        with translated("can't read", staged):
            shipped = ShippedFile(path=path, name=name, size_bytes=staged.stat().st_size, digest=file_digest(staged))
        self._known.add(name)
        self._link.store.put_file(staged, name)
        with self._changed:
            self._shipped[path] = shipped
            self._shipped_bytes += shipped.size_bytes
        return shipped

    def _survey(self) -> None:
        """See what is in the store already, and which of it is what we have on the disk."""
        names = self._link.store.names()
        manifests: list[Manifest] = []
        for name in manifest_names(names):
            with contextlib.suppress(CheckpointError):
                manifests.insert(0, read_manifest(self._link.store, name))
            if len(manifests) == _KEPT:
                break
        if self._link.fetched is not None:
            # A newer one was found damaged.
            manifests = [manifest for manifest in manifests if _age(manifest) <= _age(self._link.fetched)]
        same = [self._link.fetched] if self._link.fetched is not None else []
        same += [manifest for manifest in manifests if manifest.owner == self._link.lock.owner]
        with self._changed:
            for manifest in same:
                self._shipped |= {file.path: file for file in manifest.files if self._has(file)}
        self._manifests = manifests
        self._known |= set(names)
        self._surveyed = True

    def _has(self, file: ShippedFile) -> bool:
        # The run may remove it in this very moment.
        try:
            return (self._folder / file.path).stat().st_size == file.size_bytes
        except OSError:
            return False

    def _tidy(self) -> None:
        """Remove what neither of the last two manifests names; what a later term wrote isn't ours."""
        needed = set().union(*(manifest.named() for manifest in self._manifests))
        for name in sorted(self._known - needed):
            if is_ours(name, self._link.lock.term):
                self._link.store.remove(name)
            self._known.discard(name)
        with self._changed:
            self._shipped = {path: file for path, file in self._shipped.items() if file.name in needed}

    # ---- telling ---------------------------------------------------------------------------------

    def _failed(self, topic: str, text: str) -> None:
        with self._changed:
            self.failures += 1
        self._trouble(topic, text)

    def _trouble(self, topic: str, text: str) -> None:
        with self._changed:
            if self._troubles.get(topic, "") == text:
                return
            self._troubles.pop(topic, None)
            if text:
                self._troubles[topic] = text
            said = "; ".join(self._troubles.values())
        self._calls(lambda: self.tell(said))


def _age(manifest: Manifest) -> tuple[int, int]:
    return manifest.term, manifest.number
