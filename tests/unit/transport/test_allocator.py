"""Memory of messages is kept for the next ones, and where it isn't, that is said."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from types import SimpleNamespace

import pytest

from wan_diloco.transport import allocator
from wan_diloco.transport.allocator import keep_freed_memory

# Pages that bursts of sixteen messages of 1 MiB, each let go before the next, take from the system. (A single block is
# used again by default: it takes several for the heap's end to be given back.)
COUNT_FAULTS = """
import resource, sys
from wan_diloco.transport.allocator import keep_freed_memory
problem = keep_freed_memory() if sys.argv[1] == "kept" else ""
if problem:
    print(f"unavailable: {problem}")
    sys.exit()
def messages(number):
    for _ in range(number):
        [bytes(2**20 + index) + b"!" for index in range(16)]
messages(3)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
messages(20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def counted(program: str, *arguments: str) -> list[int]:
    """What a program in a process of its own printed; skips where the C library has another allocator."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    if done.stdout.startswith("unavailable"):
        pytest.skip(done.stdout.strip())
    return [int(word) for word in done.stdout.split()]


def test_messages_use_the_memory_of_earlier_ones() -> None:
    (kept,), (default,) = counted(COUNT_FAULTS, "kept"), counted(COUNT_FAULTS, "default")
    assert kept < 512, "less than one message's"
    assert default > 10_000


# How much memory is there once what was big, in many pieces with something small behind each, is let go.
COUNT_KEPT = """
import sys
from pathlib import Path
from wan_diloco.transport.allocator import give_back_freed_memory, keep_freed_memory
problem = keep_freed_memory()
if problem:
    print(f"unavailable: {problem}")
    sys.exit()
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
before = resident()
big, small = [], []
for _ in range(200):
    big.append(b"!" * 2**20)
    small.append(bytes(600))
big.clear()
kept = resident() - before
give_back_freed_memory()
print(kept, resident() - before)
"""


def test_what_will_not_come_again_is_given_back() -> None:
    kept, left = counted(COUNT_KEPT)
    assert kept > 150 * 2**20
    assert left < 20 * 2**20


class Library:
    """A C library of which a part can be missing."""

    def __init__(self, *, takes: bool = True, kept: bool = True) -> None:
        self.takes, self.kept = takes, kept
        self.allocated = 0
        self.mallopt = lambda parameter, value: int(self.takes)
        self.mallinfo2 = Call(lambda: SimpleNamespace(uordblks=self.allocated if self.kept else 0, hblkhd=0))
        self.malloc = Call(self.allocate)
        self.free = Call(lambda block: None)

    def allocate(self, size: int) -> int:
        self.allocated += size
        return 1


class Call:
    """A foreign function, which takes attributes."""

    def __init__(self, function) -> None:  # type: ignore[no-untyped-def]
        self.function = function

    def __call__(self, *arguments: object) -> object:
        return self.function(*arguments)


@pytest.mark.parametrize(
    ("library", "said"),
    [
        (Library(), ""),
        (SimpleNamespace(), "isn't glibc"),
        (Library(takes=False), "refused"),
        (Library(kept=False), "another allocator"),
    ],
)
def test_it_says_why_it_has_no_effect(monkeypatch: pytest.MonkeyPatch, library: object, said: str) -> None:
    monkeypatch.setattr(allocator, "ctypes", SimpleNamespace(**{**vars(ctypes), "CDLL": lambda name: library}))
    problem = keep_freed_memory()
    assert bool(problem) == bool(said)
    assert said in problem
