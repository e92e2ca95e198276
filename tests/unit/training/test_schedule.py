"""The learning rate depends on the global step alone."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wan_diloco.models import DecoderConfig, build_decoder
from wan_diloco.training import build_adamw, learning_rate, set_learning_rate

schedule = functools.partial(learning_rate, peak=1e-3, warmup_steps=100, total_steps=1000)


def test_a_learner_that_rejoins_at_step_700_trains_at_the_rate_of_step_700_in_every_group() -> None:
    model = build_decoder(DecoderConfig(dim=16, num_layers=1, num_heads=2), 1)
    optimizer = build_adamw(model, learning_rate=schedule(0))
    assert len(optimizer.param_groups) == 2
    for global_step in (700, 701):
        set_learning_rate(optimizer, schedule(global_step))
        assert {group["lr"] for group in optimizer.param_groups} == {schedule(global_step)}
    assert schedule(700) == pytest.approx(2.5e-4, rel=1e-6)
    assert schedule(701) < schedule(700)
    assert schedule(700) not in {schedule(0), schedule(233)}


def test_the_warm_up_is_linear_wastes_no_step_and_meets_the_fall_at_the_peak() -> None:
    assert schedule(0) == pytest.approx(1e-5)
    assert schedule(49) == pytest.approx(5e-4)
    assert schedule(99) == schedule(100) == 1e-3


@given(step=st.integers(min_value=100, max_value=2000), final_fraction=st.floats(min_value=0, max_value=1))
def test_the_fall_never_rises_and_ends_at_the_final_fraction(step: int, final_fraction: float) -> None:
    now = schedule(step, final_fraction=final_fraction)
    assert schedule(step + 1, final_fraction=final_fraction) <= now * (1 + 1e-12)
    assert now >= 1e-3 * final_fraction * (1 - 1e-12)
    if step >= 1000:
        assert now == 1e-3 * final_fraction


@pytest.mark.parametrize(("warmup_steps", "total_steps"), [(0, 0), (0, 5), (10, 10), (10, 5)])
def test_degenerate_lengths_still_have_a_rate(warmup_steps: int, total_steps: int) -> None:
    rates = [learning_rate(t, peak=1.0, warmup_steps=warmup_steps, total_steps=total_steps) for t in range(20)]
    assert all(0 <= rate <= 1 for rate in rates)
    assert rates[-1] == 0


def test_a_rate_near_the_largest_number_is_still_a_number() -> None:
    rates = [learning_rate(step, peak=1e308, warmup_steps=50, total_steps=100) for step in range(50)]
    assert all(0 < rate <= 1e308 for rate in rates)
