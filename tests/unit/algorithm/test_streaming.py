"""Two fragments, two learners, overlap and mixing: the whole chain against known numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.merging import Delta as Contribution
from tests.support.merging import merge_fragment
from tests.support.merging import step_outer as outer_step
from wan_diloco.algorithm.codec import codec_by_name
from wan_diloco.algorithm.publication import mix

PERIOD = 6


def simulate(make_fragment, *, tau: int, alpha: float, num_steps: int) -> dict[str, Any]:
    """One scalar a fragment; every step both learners move down by 2."""
    pieces = [make_fragment((1,)) for _ in range(2)]
    published, local = [torch.ones(1), torch.ones(1)], [torch.ones(1), torch.ones(1)]
    merged: list[torch.Tensor | None] = [None, None]
    history: dict[str, Any] = {"local": [[1.0], [1.0]], "global": [[], []]}
    for step in range(1, num_steps + 1):
        for index, (fragment, table) in enumerate(pieces):
            local[index] = local[index] - 2.0
            due = 3 * (index + 1)
            if step >= due - tau and (step - due + tau) % PERIOD == 0:
                each = Contribution(delta=published[index] - local[index], tokens=8, steps=PERIOD)
                merged[index] = merge_fragment(fragment, table, codec_by_name("f32"), [each, each])
            if step >= due and (step - due) % PERIOD == 0:
                outer_gradient = merged[index]
                assert outer_gradient is not None
                published[index], _ = outer_step(published[index], torch.zeros(1), outer_gradient, lr=2.0, momentum=0.0)
                local[index] = mix(local[index], published[index], alpha)
                history["global"][index].append(published[index].item())
            history["local"][index].append(local[index].item())
    return history


@pytest.mark.parametrize("index", range(3))
def test_streaming_fragments_follow_the_known_trajectories(make_fragment, vectors, index):
    case = vectors["streaming_two_fragments"]["cases"][index]
    history = simulate(make_fragment, tau=case["tau"], alpha=case["alpha"], num_steps=len(case["fragment0_local"]) - 1)
    assert history["local"][0] == pytest.approx(case["fragment0_local"], abs=1e-5)
    assert history["local"][1] == pytest.approx(case["fragment1_local"], abs=1e-5)
    for fragment in (0, 1):
        (expected,) = [value for key, value in case.items() if key.startswith(f"global{fragment}_after")]
        assert history["global"][fragment][: len(expected)] == pytest.approx(expected, abs=1e-5)
