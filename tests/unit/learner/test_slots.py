"""Shared fragments: who sees what, and what is left of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from wan_diloco.learner.slots import FragmentSlots

SIZES = [5, 64, 1]


def test_slots_do_not_overlap() -> None:
    slots = FragmentSlots.private(SIZES)
    views = [view for f in range(3) for view in (slots.published(f, 0), slots.published(f, 1), slots.outbox(f))]
    for number, view in enumerate(views):
        view.fill_(number)
    assert [len(view) for view in views] == [size for size in SIZES for _ in range(3)]
    assert all(torch.equal(view, torch.full_like(view, number)) for number, view in enumerate(views))


def test_another_process_sees_the_same_memory() -> None:
    slots = FragmentSlots.create(SIZES)
    slots.published(1, 0).copy_(torch.arange(64.0))
    script = (
        "import sys; from wan_diloco.learner.slots import FragmentSlots;"
        f"slots = FragmentSlots.attach(int(sys.argv[1]), {SIZES});"
        "slots.outbox(1).copy_(slots.published(1, 0) + 1)"
    )
    subprocess.run(
        [sys.executable, "-c", script, str(slots.descriptor)], pass_fds=(slots.descriptor,), check=True, timeout=60
    )
    assert torch.equal(slots.outbox(1), torch.arange(64.0) + 1)


def test_no_name_is_left_that_a_killed_process_could_leak() -> None:
    before = set(Path("/dev/shm").iterdir())
    slots = FragmentSlots.create(SIZES)
    assert set(Path("/dev/shm").iterdir()) == before
    assert os.fstat(slots.descriptor).st_nlink == 0


def test_only_two_published_slots_exist() -> None:
    with pytest.raises(ValueError, match="no published slot 2"):
        FragmentSlots.private(SIZES).published(0, 2)


def test_memory_that_is_too_small_is_refused() -> None:
    slots = FragmentSlots.create(SIZES)
    with pytest.raises(ValueError, match="greater than file size"):
        FragmentSlots.attach(slots.descriptor, [10_000])


def test_room_for_a_state_takes_memory_only_while_something_is_in_it() -> None:
    size = 2**20 + 12
    slots = FragmentSlots.create(SIZES, size)
    empty = os.fstat(slots.descriptor).st_blocks
    slots.outbox(2).fill_(7.0)
    slots.state[:] = 5
    other = FragmentSlots.attach(slots.descriptor, SIZES, size)
    assert int(other.state.sum()) == 5 * size
    assert os.fstat(slots.descriptor).st_blocks > empty + size // 1024
    other.release_state()
    assert os.fstat(slots.descriptor).st_blocks < empty + 100
    assert not slots.state.any()
    assert float(slots.outbox(2)[0]) == 7.0, "fragments are left alone"
