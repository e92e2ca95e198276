"""The tree of errors, their sentences and their exit codes."""

from __future__ import annotations

import re

import pytest

from tests.support.sources import REPOSITORY
from wan_diloco import errors
from wan_diloco.errors import (
    AuthError,
    CheckpointError,
    ConfigError,
    DataError,
    DeadlineExceeded,
    DecodeError,
    JournalError,
    LayoutMismatch,
    LocalProtocolError,
    NonFiniteError,
    PeerUnavailable,
    ProtocolError,
    RemoteProtocolError,
    StateTakenOver,
    StorageError,
    StorageLocked,
    StoreError,
    StoreMissing,
    TransportError,
    UnitError,
    UsageError,
    WanDilocoError,
)


@pytest.mark.parametrize(
    ("kind", "exit_code"),
    [
        (WanDilocoError, 70),
        (UsageError, 2),
        (ConfigError, 78),
        (UnitError, 78),
        (DataError, 78),
        (LocalProtocolError, 70),
        (RemoteProtocolError, 70),
        (DecodeError, 70),
        (NonFiniteError, 70),
        (LayoutMismatch, 78),
        (TransportError, 75),
        (DeadlineExceeded, 75),
        (PeerUnavailable, 69),
        (AuthError, 77),
        (StorageError, 75),
        (JournalError, 75),
        (CheckpointError, 75),
        (StorageLocked, 78),
        (StateTakenOver, 77),
        (StoreError, 75),
        (StoreMissing, 78),
    ],
)
def test_each_error_has_the_exit_code_that_supervisors_act_on(kind: type[WanDilocoError], exit_code: int) -> None:
    assert kind.exit_code == exit_code
    assert kind("why").exit_code == exit_code


def test_everything_raised_on_purpose_is_in_one_tree() -> None:
    classes = [value for name in errors.__all__ if isinstance(value := getattr(errors, name), type)]
    assert classes
    assert all(issubclass(kind, WanDilocoError) for kind in classes)


def test_every_exit_code_is_documented_with_its_number() -> None:
    page = (REPOSITORY / "docs/reference/exit-codes.md").read_text(encoding="utf-8")
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", page, flags=re.MULTILINE)}
    codes = {
        value for name in errors.__all__ if name.startswith("EXIT_") and isinstance(value := getattr(errors, name), int)
    }
    assert documented == codes


def test_a_protocol_error_must_say_whose_fault_it_is() -> None:
    with pytest.raises(TypeError, match="LocalProtocolError or RemoteProtocolError"):
        ProtocolError("somebody's")


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (ConfigError("is unknown"), "is unknown"),
        (ConfigError("is unknown", where="sync.evry"), "sync.evry: is unknown"),
        (ConfigError("is unknown", where="a.b", hint="did you mean a.c"), "a.b: is unknown (did you mean a.c)"),
        (RemoteProtocolError("wrong_length"), "wrong_length"),
        (RemoteProtocolError("wrong_length", "3 bytes, not 4"), "wrong_length: 3 bytes, not 4"),
        (NonFiniteError("tensor w"), "non_finite: tensor w"),
    ],
)
def test_the_text_of_an_error_is_one_sentence(error: WanDilocoError, sentence: str) -> None:
    assert str(error) == sentence


def test_the_reason_of_a_peers_fault_is_fit_for_a_label() -> None:
    assert RemoteProtocolError("wrong_length", "3 bytes").reason == "wrong_length"
    assert NonFiniteError("w").reason == "non_finite"
