"""A process that was told to end and hangs is ended all the same, and says so; one that ends by itself isn't."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import pytest

from tests.support.cli import in_own_process

PROGRAM = """
import ctypes, os, signal, sys, threading, time
import wan_diloco.learner.stop_signals as module
import wan_diloco.telemetry.last_resort as last_resort
from functools import partial
from wan_diloco.clock import SystemClock
from wan_diloco.telemetry import configure_logging, get_logger
configure_logging(SystemClock())
within_s = 0.05
module.LastResort = partial(module.LastResort, within_s=within_s)

def tell():
    os.kill(os.getpid(), signal.SIGTERM)

def hang_in_c():
    # Another thread sends the signal while this one is in a call that signals don't end.
    lock = ctypes.create_string_buffer(256)
    c = ctypes.CDLL(None)
    c.pthread_mutex_init(lock, None)
    c.pthread_mutex_lock(lock)
    threading.Timer(0.2, tell).start()
    c.pthread_mutex_lock(lock)
"""


def ended(scene: str) -> str:
    """What a process says that is ended by force in a scene."""
    outcome = in_own_process(["-c", PROGRAM + scene])
    assert outcome.exit_code == 143, outcome.stderr
    assert "by itself" not in outcome.stdout
    return outcome.stdout + outcome.stderr


@pytest.mark.parametrize("hang", ["tell(); threading.Event().wait()", "hang_in_c()"])
def test_who_hangs_is_ended_with_the_right_code_and_a_sentence(hang: str) -> None:
    said = ended(f"with module.stop_signals():\n    {hang}\nprint('by itself')")
    assert "ended_by_force" in said


def test_a_syncer_whose_loop_is_stuck_is_ended() -> None:
    scene = """
import asyncio, uvloop
from wan_diloco.syncer.ending import ending_signals
async def serve(ending):
    ending.serve(lambda: None)
    hang_in_c()
with ending_signals(within_s) as ending, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(serve(ending))
"""
    assert "ended_by_force" in ended(scene)


def test_a_syncer_hears_signals_while_it_serves_and_after_it_has() -> None:
    scene = """
import asyncio, uvloop
from wan_diloco.syncer.ending import ending_signals
async def serve(ending):
    told, reloaded = asyncio.Event(), asyncio.Event()
    ending.serve(told.set)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reloaded.set)
    os.kill(os.getpid(), signal.SIGHUP)
    await reloaded.wait()
    tell()
    await told.wait()
with ending_signals(60.0) as ending:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(ending))
    tell()
    ending.served()
    tell()
    print(ending.exit_code, "by itself")
"""
    outcome = in_own_process(["-c", PROGRAM + scene])
    assert (outcome.exit_code, outcome.stdout) == (0, "143 by itself\n"), outcome.stderr


def test_a_syncer_that_has_served_and_hangs_is_ended() -> None:
    scene = """
import asyncio, uvloop
from wan_diloco.syncer.ending import ending_signals
async def serve(ending):
    ending.serve(lambda: None)
with ending_signals(within_s) as ending:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(ending))
    ending.served()
    hang_in_c()
"""
    assert "ended_by_force" in ended(scene)


@pytest.mark.parametrize("told", [True, False])
def test_who_ends_by_itself_is_let_go(told: bool) -> None:
    scene = f"""
module.LastResort = partial(last_resort.LastResort, within_s=60.0)
with module.stop_signals() as signals:
    if {told}:
        tell()
        signals.wait(None)
print("by itself")
"""
    outcome = in_own_process(["-c", PROGRAM + scene])
    assert (outcome.exit_code, outcome.stdout) == (0, "by itself\n"), outcome.stderr


@pytest.mark.parametrize("words", ["nobody has the pipe any more", "nobody reads a full pipe", "the stream is closed"])
def test_nobody_is_kept_by_last_words(words: str) -> None:
    reading, writing = os.pipe()
    if words == "nobody has the pipe any more":
        os.close(reading)
    elif words == "nobody reads a full pipe":
        os.set_blocking(writing, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writing, bytes(2**12))
        os.set_blocking(writing, True)
    first = "sys.stdout.close()" if words == "the stream is closed" else "sys.stdout.write('x')"
    scene = f"{first}\nwith module.stop_signals():\n    tell()\n    threading.Event().wait()"
    # What it wrote is to be in its buffer still.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen([sys.executable, "-c", PROGRAM + scene], env=env, stdout=writing, stderr=writing)
    os.close(writing)
    try:
        assert process.wait(60) == 143
    finally:
        process.kill()
        process.wait()
        if words != "nobody has the pipe any more":
            os.close(reading)


def test_what_a_child_of_a_fork_is_told_is_not_told_to_its_parent() -> None:
    scene = """
with module.stop_signals() as signals:
    began, begins = os.pipe()
    child = os.fork()
    if not child:
        os.write(begins, b"x")
        while True:
            signal.pause()
    os.read(began, 1)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGTERM, status
    assert signals.received is None
    threading.Event().wait(10 * within_s)
print("by itself")
"""
    outcome = in_own_process(["-c", PROGRAM + scene])
    assert (outcome.exit_code, outcome.stdout) == (0, "by itself\n"), outcome.stderr
