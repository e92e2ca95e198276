"""Logs: JSON where nobody looks, one event per change, and the libraries' loggers along with ours."""

from __future__ import annotations

import io
import json
import logging
import threading
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import structlog

from wan_diloco.clock import ManualClock
from wan_diloco.telemetry import ChangeLogger, configure_logging, get_logger, route_library_loggers

if TYPE_CHECKING:
    from collections.abc import Iterator


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    logging.captureWarnings(capture=False)
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def events(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def configured(**options: Any) -> io.StringIO:
    stream = options.pop("stream", None) or io.StringIO()
    configure_logging(ManualClock(wall_s=1_600_000_000.25), stream=stream, **options)
    return stream


def test_an_event_is_one_json_line_with_its_fields_and_the_injected_time() -> None:
    stream = configured(fields={"run": "sotu", "region": "us-east"})
    get_logger("wan_diloco.syncer", incarnation=3).info("fragment_merged", round_id=812)
    assert events(stream) == [
        {
            "event": "fragment_merged",
            "incarnation": 3,
            "level": "info",
            "logger": "wan_diloco.syncer",
            "region": "us-east",
            "round_id": 812,
            "run": "sotu",
            "timestamp": "2020-09-13T12:26:40.250Z",
        }
    ]


def test_fields_of_the_process_are_there_in_every_thread() -> None:
    stream = configured(fields={"region": "us-east"})
    thread = threading.Thread(target=lambda: get_logger("x").info("uploaded"))
    thread.start()
    thread.join()
    assert events(stream)[0]["region"] == "us-east"


@pytest.mark.parametrize("name", ["torch.distributed", "grpc._channel", "asyncio", "some.library"])
def test_the_libraries_loggers_go_the_same_way_once(name: str) -> None:
    library = logging.getLogger(name)
    own = io.StringIO()
    library.addHandler(logging.StreamHandler(own))
    library.propagate = name == "some.library"
    stream = configured()
    library.warning("peer %s is gone", "eu-west")
    (event,) = events(stream)
    assert (event["event"], event["level"], event["logger"]) == ("peer eu-west is gone", "warning", name)
    assert (own.getvalue() == "") == (name != "some.library")


def test_a_library_that_adds_its_handler_late_is_taken_back() -> None:
    stream = configured()
    library = logging.getLogger("torch.late")
    own = io.StringIO()
    library.addHandler(logging.StreamHandler(own))
    route_library_loggers()
    library.error("x")
    assert own.getvalue() == ""
    assert len(events(stream)) == 1


def test_python_warnings_are_events() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        stream = configured()
        warnings.warn("old habit", stacklevel=1)
        logging.captureWarnings(capture=False)
    assert "old habit" in events(stream)[0]["event"]


def test_levels_below_the_threshold_are_silent() -> None:
    stream = configured(level="WARNING")
    get_logger("x").info("quiet")
    logging.getLogger("y").info("quiet")
    get_logger("x").warning("loud")
    assert [event["event"] for event in events(stream)] == ["loud"]


@pytest.mark.parametrize(("color", "tty", "colored"), [(None, True, True), (False, True, False), (True, False, True)])
def test_colors_follow_the_argument_and_else_the_terminal(color: bool | None, tty: bool, colored: bool) -> None:
    stream = Terminal() if tty else io.StringIO()
    configured(stream=stream, style="console", color=color)
    get_logger("x").info("fragment_merged")
    assert "fragment_merged" in stream.getvalue()
    assert ("\x1b[" in stream.getvalue()) == colored


def test_a_terminal_gets_no_json_unless_it_is_asked_for() -> None:
    person = configured(stream=Terminal(), color=False)
    get_logger("x").info("fragment_merged", round_id=812)
    assert "round_id=812" in person.getvalue()
    machine = configured(stream=Terminal(), style="json")
    get_logger("x").info("fragment_merged")
    assert events(machine)[0]["event"] == "fragment_merged"


@pytest.mark.parametrize("style", ["console", "json"])
def test_tracebacks_never_show_local_variables(style: str) -> None:
    stream = configured(style=style, color=False)

    def fails() -> None:
        token = "hunter2" + "-secret"
        raise ValueError(len(token))

    try:
        fails()
    except ValueError:
        get_logger("x").exception("crashed")
    assert "ValueError" in stream.getvalue()
    assert "hunter2-secret" not in stream.getvalue()


def test_a_reason_is_logged_once_per_change() -> None:
    stream = configured()
    changes = ChangeLogger(get_logger("x"))
    told = [changes.note("round_waiting", reason, round_id=812) for reason in ("1 of 2", "1 of 2", "2 of 2", "1 of 2")]
    assert told == [True, False, True, True]
    assert [(event["event"], event["reason"]) for event in events(stream)] == [
        ("round_waiting", "1 of 2"),
        ("round_waiting", "2 of 2"),
        ("round_waiting", "1 of 2"),
    ]


def test_a_moving_number_in_the_sentence_is_no_change() -> None:
    stream = configured()
    changes = ChangeLogger(get_logger("x"))
    for silent_s in range(5):
        changes.note("round_waiting", f"eu-west silent {silent_s} s", state="eu-west")
    assert len(events(stream)) == 1
    changes.clear("round_waiting")
    assert changes.note("round_waiting", "eu-west silent 9 s", state="eu-west")


def test_the_memory_of_reasons_is_bounded() -> None:
    configured(level="ERROR")
    changes = ChangeLogger(get_logger("x"))
    for index in range(3000):
        changes.note(f"key{index}", "same")
    assert len(changes._last) == 1024


@pytest.mark.parametrize("level", ["INFO", "DEBUG"])
def test_a_status_that_reaches_nobody_any_more_is_no_error_of_ours(level: str) -> None:
    stream = configured(level=level)
    grpcs = logging.getLogger("grpc._cython.cygrpc")
    try:
        raise ValueError("Failed grpc_call_start_batch: 8")
    except ValueError:
        grpcs.exception("ExecuteBatchError raised in core by servicer method [%s]", "/wan_diloco.v1.BulkService/Upload")
        grpcs.exception("Unexpected [ValueError] raised by servicer method [/x/Y]")
    *told, bug = events(stream)
    assert (bug["level"], "Traceback" in bug["exception"]) == ("error", True)
    assert [(line["level"], "exception" in line) for line in told] == [("debug", False)] * (level == "DEBUG")
