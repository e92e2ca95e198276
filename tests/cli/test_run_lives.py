"""What exit codes mean, and how often a process is started again."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wan_diloco.cli.lives import Meaning, RestartPolicy, describe_exit, meaning_of
from wan_diloco.errors import (
    EXIT_AUTH,
    EXIT_CONFIG,
    EXIT_INTERNAL,
    EXIT_OK,
    EXIT_SIGTERM,
    EXIT_TEMPORARY,
    EXIT_UNAVAILABLE,
    EXIT_USAGE,
)
from wan_diloco.protocol.retry import RetryPolicy


@pytest.mark.parametrize(
    ("code", "meaning"),
    [
        (EXIT_OK, Meaning.FINISHED),
        (EXIT_TEMPORARY, Meaning.RESTART),
        (EXIT_UNAVAILABLE, Meaning.RESTART),
        (EXIT_INTERNAL, Meaning.RESTART),
        (EXIT_SIGTERM, Meaning.RESTART),
        (1, Meaning.RESTART),
        (-9, Meaning.RESTART),
        (-11, Meaning.RESTART),
        (EXIT_USAGE, Meaning.HOPELESS),
        (EXIT_AUTH, Meaning.HOPELESS),
        (EXIT_CONFIG, Meaning.HOPELESS),
    ],
)
def test_an_exit_code_says_whether_another_try_makes_sense(code: int, meaning: Meaning) -> None:
    assert meaning_of(code) is meaning


def test_exits_are_described_for_people() -> None:
    assert describe_exit(-9) == "killed by SIGKILL"
    assert describe_exit(-63) == "killed by signal 63"
    assert describe_exit(EXIT_TEMPORARY) == "asked to be restarted"
    assert describe_exit(70) == "exit code 70"


def test_quick_failures_in_a_row_end_in_giving_up() -> None:
    policy = RestartPolicy(retry=RetryPolicy(initial_s=1, max_s=4, jitter=0), quick_s=10, quick_failures_max=4)
    rng = random.Random(0)
    failures, delays = 0, []
    for _ in range(4):
        failures = policy.failures_after(failures, lived_s=9.9)
        delays.append(policy.delay_s(failures, rng))
    assert delays == [1, 2, 4, None]


@given(st.lists(st.floats(10, 1e6), min_size=1, max_size=50))
def test_deaths_late_in_life_are_never_the_last(lives_s: list[float]) -> None:
    policy = RestartPolicy(quick_s=10, quick_failures_max=2)
    failures = 0
    for lived_s in lives_s:
        failures = policy.failures_after(failures, lived_s)
        assert policy.delay_s(failures, random.Random(0)) is not None


@given(st.integers(1, 5), st.integers(0, 2**32))
def test_the_delay_is_bounded_and_depends_on_the_given_chance_only(failures: int, seed: int) -> None:
    policy = RestartPolicy()
    delay_s = policy.delay_s(failures, random.Random(seed))
    assert delay_s is not None
    assert 0 < delay_s <= policy.retry.max_s
    assert delay_s == policy.delay_s(failures, random.Random(seed))
