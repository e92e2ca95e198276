"""Both ends of the real transport with nothing behind them, for the benches of pacing; not run by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from wan_diloco.protocol.messages import PROTOCOL_VERSION, ContributionHeader, ContributionKey, Hello
from wan_diloco.units import Epoch, FragmentId, Incarnation, LearnerId, LocalStep, RoundId, Version

if TYPE_CHECKING:
    from numpy.typing import NDArray

LEARNER = LearnerId("bench")


def noise(size: int) -> NDArray[np.uint8]:
    """Bytes that can't be compressed."""
    return np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)


def hello(learner_id: LearnerId = LEARNER) -> Hello:
    """A Hello that nobody examines."""
    return Hello(
        protocol_version=PROTOCOL_VERSION,
        run="bench",
        learner_id=learner_id,
        incarnation=Incarnation(0),
        layout=(),
        settings=(),
        initial_digests=(),
        local_step=LocalStep(0),
        tokens=0,
    )


def contribution(fragment: int, number: int, codes_bytes: int, scales_bytes: int) -> ContributionHeader:
    """The header of a contribution that nobody examines."""
    return ContributionHeader(
        key=ContributionKey(
            learner_id=LEARNER,
            incarnation=Incarnation(1),
            fragment_id=FragmentId(fragment),
            step_lo=LocalStep(number),
        ),
        round_id=RoundId(number),
        attempt=1,
        base=Version(Epoch(0), 1),
        step_hi=LocalStep(number + 1),
        tokens_lo=0,
        tokens_hi=1,
        unit_hi=1,
        codec="int4",
        codes_bytes=codes_bytes,
        scales_bytes=scales_bytes,
    )
