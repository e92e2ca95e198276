"""What a store has of a run's state: objects that belong together, named by a manifest that is written last.

Names hold the term of their writer, so that a process which has been taken over, and doesn't know it yet, overwrites
nothing of its successor's. The order of manifests is that of (term, number).
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from wan_diloco.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Manifest", "ShippedFile", "is_ours", "journal_name", "manifest_name", "manifest_names", "snapshot_name_of"]

_FORMAT: Final = 1
_MANIFEST: Final = re.compile(r"manifests/t([0-9]{10,})-([0-9]{10,})\.json")
_TERM: Final = re.compile(r"(?:manifests|journal|snapshots)/t([0-9]{10,})-.+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShippedFile:
    """A file of the state folder that is in the store.

    Attributes:
        path: In the state folder: "journal/0000000003.journal".
        name: Of the object.
        size_bytes: Of both.
        digest: xxh3 of 128 bits, of both.
    """

    path: str
    name: str
    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything that a restart needs, as of one moment.

    Attributes:
        term: Of the writer.
        number: Counts the writer's manifests.
        owner: Of the state folder that the files are from.
        snapshot: Its name in `snapshots/`.
        files: The snapshot's files, and the journal's segments from the oldest that it needs on.
    """

    term: int
    number: int
    owner: str
    snapshot: str
    files: tuple[ShippedFile, ...]

    @property
    def object_name(self) -> str:
        """Of the object that it is written to."""
        return manifest_name(self.term, self.number)

    def named(self) -> set[str]:
        """All objects that it needs, itself included."""
        return {self.object_name, *(file.name for file in self.files)}

    def encode(self) -> bytes:
        """As bytes; `decode` reads them."""
        value = {"format": _FORMAT, **asdict(self)}
        return json.dumps({**value, "sha256": _digest(value)}).encode() + b"\n"

    @classmethod
    def decode(cls, data: bytes, name: str) -> Manifest:
        """What `encode` wrote.

        Raises:
            CheckpointError: It is something else, or damaged.
        """
        try:
            value: dict[str, Any] = json.loads(data)
            claimed = value.pop("sha256")
            if value.get("format") != _FORMAT:
                raise CheckpointError(f"{name} has format {value.get('format')!r}, this version reads {_FORMAT}")
            if claimed != _digest(value):
                raise CheckpointError(f"{name} doesn't match its digest")
            del value["format"]
            files = tuple(ShippedFile(**file) for file in value.pop("files"))
            manifest = cls(**value, files=files)
            if manifest.object_name != name:
                raise CheckpointError(f"{name} holds the manifest {manifest.object_name}")
        except (ValueError, TypeError, AttributeError, KeyError) as exc:
            raise CheckpointError(f"{name} isn't a manifest: {exc}") from exc
        return manifest


def manifest_name(term: int, number: int) -> str:
    """The object of a manifest."""
    return f"manifests/t{term:010d}-{number:010d}.json"


def journal_name(term: int, file: str) -> str:
    """The object of a segment."""
    return f"journal/t{term:010d}-{file}"


def snapshot_name_of(term: int, snapshot: str, file: str) -> str:
    """The object of a snapshot's file."""
    return f"snapshots/t{term:010d}-{snapshot}/{file}"


def manifest_names(names: Iterable[str]) -> list[str]:
    """Those that are manifests, newest first."""
    found = [(int(match[1]), int(match[2]), name) for name in names if (match := _MANIFEST.fullmatch(name))]
    return [name for _, _, name in sorted(found, reverse=True)]


def is_ours(name: str, term: int) -> bool:
    """Whether an object was written by a syncer of this term or an earlier one; what is nobody's is not."""
    match = _TERM.fullmatch(name)
    return match is not None and int(match[1]) <= term


def _digest(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
