"""Durable things: atomic files, folder locks, the journal, snapshots.

Whole objects (files, snapshots) are only ever put and read as a whole, and a sealed journal segment
never changes: so both can live on an object store. What grows or locks needs a local disk.
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
from wan_diloco.storage.snapshot import (
    LatestSnapshot,
    SkippedSnapshot,
    Snapshot,
    good_snapshots,
    keep_last,
    latest_snapshot,
    load_snapshot,
)

__all__ = [
    "SEGMENT_BYTES",
    "Damage",
    "FolderLock",
    "Journal",
    "JournalReader",
    "JournalRef",
    "LatestSnapshot",
    "Record",
    "RecordHead",
    "SkippedSnapshot",
    "Snapshot",
    "TornTail",
    "good_snapshots",
    "keep_last",
    "latest_snapshot",
    "load_snapshot",
    "owner_of",
    "read_json",
    "remove_leftovers",
    "write_bytes",
    "write_json",
    "write_text",
]
