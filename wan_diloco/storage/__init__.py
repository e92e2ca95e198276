"""Durable things: atomic files, folder locks, the journal, snapshots.

Whole objects (files, snapshots) are only ever put and read as a whole, and a sealed journal segment
never changes: so both can live on an object store, which also has a lock of its own. What grows needs a local disk.
"""

from wan_diloco.storage.atomic import (
    read_json,
    remove_leftovers,
    write_bytes,
    write_json,
    write_text,
)
from wan_diloco.storage.journal import SEGMENT_BYTES, Journal, JournalRef, Record, RecordHead, TornTail
from wan_diloco.storage.journal_reader import JournalReader
from wan_diloco.storage.journal_reading import Damage
from wan_diloco.storage.lock import FolderLock, owner_of
from wan_diloco.storage.object_lock import LOCK_NAME, RENEW_S, WATCH_S, LockNote, ObjectLock
from wan_diloco.storage.object_store import ObjectStore, Versioned
from wan_diloco.storage.shipment import Manifest, ShippedFile, manifest_names
from wan_diloco.storage.snapshot import (
    LatestSnapshot,
    SkippedSnapshot,
    Snapshot,
    good_snapshots,
    keep_last,
    latest_snapshot,
    load_snapshot,
    newest_manifest,
    trusted_manifests,
)

__all__ = [
    "LOCK_NAME",
    "RENEW_S",
    "SEGMENT_BYTES",
    "WATCH_S",
    "Damage",
    "FolderLock",
    "Journal",
    "JournalReader",
    "JournalRef",
    "LatestSnapshot",
    "LockNote",
    "Manifest",
    "ObjectLock",
    "ObjectStore",
    "Record",
    "RecordHead",
    "ShippedFile",
    "SkippedSnapshot",
    "Snapshot",
    "TornTail",
    "Versioned",
    "good_snapshots",
    "keep_last",
    "latest_snapshot",
    "load_snapshot",
    "manifest_names",
    "newest_manifest",
    "owner_of",
    "read_json",
    "remove_leftovers",
    "trusted_manifests",
    "write_bytes",
    "write_json",
    "write_text",
]
