"""Time limits stand in one module, where they are derived and shown; elsewhere there are only pauses and habits."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.support.sources import Module, all_modules

# Whose time limits are those of a run.
PARTS = ("protocol/", "transport/", "learner/", "syncer/")
MODULES = all_modules()
TABLE = "protocol/deadlines.py"
# Not limits: how often something is looked at or said, how long a pause between two tries is, and what time is measured
# in. And limits that a table is not for: what a store's last words may take.
HABITS = {
    "_ASK_S",
    "_BROKEN_PAUSE_S",
    "_BURST_S",
    "_END_S",
    "_GRACE_S",
    "_HEALTHY_LIFE_S",
    "_LEAVE_S",
    "_LOOK_S",
    "_LOST_S",
    "_NOTE_S",
    "_POLL_S",
    "_RETRY_FIRST_S",
    "_RETRY_MAX_S",
    "_SAY_S",
    "_SILENCE_S",
    "_SPEED_WINDOW_S",
    "_STRIPE_PAUSE_S",
    "_TICK_S",
    "TICK_S",
}


def is_limit(name: str) -> bool:
    return name.endswith("_S") and not name.endswith(("_EVERY_S", "_PER_S")) and name not in HABITS


def own_limits(module: Module) -> Iterator[str]:
    """Constants in seconds that a module sets by itself."""
    for node in module.tree.body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant())
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant())
            ) if is_limit(name):
                yield f"{module.path}:{node.lineno}: {name} is a time limit: its place is {TABLE}"


@pytest.mark.parametrize("snippet", ["_HELLO_S = 30.0", "_HELLO_S: Final = 30.0"])
def test_a_limit_elsewhere_is_found(snippet: str) -> None:
    assert len(list(own_limits(Module.of(snippet)))) == 1


@pytest.mark.parametrize(
    "snippet", ["_SAID_EVERY_S = 1.0", "_POLL_S: Final = 0.1", "_HELLO_S: Final = HELLO_S", "A = 1"]
)
def test_what_is_no_limit_is_left_alone(snippet: str) -> None:
    assert list(own_limits(Module.of(snippet))) == []


def test_all_time_limits_of_a_run_are_in_the_table() -> None:
    modules = [module for module in MODULES if module.path.startswith(PARTS) and module.path != TABLE]
    assert [found for module in modules for found in own_limits(module)] == []


def test_every_limit_of_the_table_is_used() -> None:
    """By the table for the operator, and by whoever goes by it."""
    table = next(module for module in MODULES if module.path == TABLE)
    inside = {"RECONNECT_FIRST_S", "LINK_BACK_S"}
    limits = {
        name
        for node in table.tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        for name in (node.targets[0].id,)
        if name.endswith("_S") and name not in inside
    }
    used = {
        node.id
        for module in MODULES
        if module.path != TABLE
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Name)
    }
    assert limits <= used
