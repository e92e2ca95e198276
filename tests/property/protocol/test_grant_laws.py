"""What is granted to learners never exceeds what the syncer takes in, whoever comes and goes."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from tests.support.desk import Desk, E, W
from tests.support.protocol import EAST, WEST, hello, report
from wan_diloco.protocol.events import (
    IngressChanged,
    LearnerConnected,
    LearnerDisconnected,
    LearnerSaid,
    SendToLearner,
    SessionId,
    SyncerEffect,
    TimerFired,
)
from wan_diloco.protocol.grants import Ingress, fair_shares
from wan_diloco.protocol.messages import Goodbye, Pace
from wan_diloco.units import LearnerId

NAMES = [LearnerId(name) for name in "abcdefgh"]
WANTS = st.dictionaries(st.sampled_from(NAMES), st.floats(1.0, 1e9) | st.just(float("inf")), min_size=1)


@given(total=st.floats(1.0, 1e9), wants=WANTS)
def test_shares_are_fair(total: float, wants: dict[LearnerId, float]) -> None:
    shares = fair_shares(total, wants)
    assert shares.keys() == wants.keys()
    assert sum(shares.values()) <= total * (1 + 1e-9)
    # All is given away unless all are content.
    assert sum(shares.values()) >= min(total, sum(wants.values())) * (1 - 1e-9)
    most = max(shares.values())
    for name, share in shares.items():
        assert share <= wants[name]
        assert share == wants[name] or share >= most * (1 - 1e-9)


@given(
    cap=st.just(0.0) | st.floats(1.0, 1e9),
    uplinks=st.dictionaries(st.sampled_from(NAMES), st.floats(1.0, 1e9)),
    payload_bytes=st.integers(0, 10**9),
    spread_s=st.floats(0, 10),
)
def test_what_the_cap_makes_later_is_what_its_rate_needs_and_the_own_link_does_not(
    cap: float, uplinks: dict[LearnerId, float], payload_bytes: int, spread_s: float
) -> None:
    ingress = Ingress(cap_bytes_per_s=cap, uplinks=uplinks)
    rates = ingress.rates(NAMES)
    for name, extra_s in ingress.extras_s(NAMES, payload_bytes, spread_s).items():
        assert extra_s >= 0
        if not rates:
            assert extra_s == 0
            continue
        own = uplinks.get(name, float("inf"))
        own_s = max(spread_s, payload_bytes / own)
        assert payload_bytes <= rates[name] * (own_s + extra_s) * 1.061
        # Whose own link is the narrower one isn't held up by the cap.
        assert extra_s == 0 or rates[name] < own


class Witness:
    """What each learner was told last, over its sessions: it goes by that until it is told otherwise."""

    def __init__(self) -> None:
        self.names = {E: EAST, W: WEST}
        self.granted: dict[LearnerId, float] = {}

    def hear(self, effects: list[SyncerEffect]) -> None:
        for effect in effects:
            if isinstance(effect, SendToLearner) and isinstance(effect.message, Pace):
                self.granted[self.names[effect.session]] = effect.message.rate_bytes_per_s


@given(rng=st.randoms(use_true_random=False))
def test_the_sum_of_what_learners_were_told_stays_under_the_cap(rng: random.Random) -> None:
    uplinks = {EAST: 400.0, WEST: 1000.0}
    desk, witness = Desk(), Witness()
    cap = 0.0
    sessions: dict[LearnerId, SessionId | None] = {EAST: None, WEST: None}
    lives, steps = {EAST: 0, WEST: 0}, {EAST: 0, WEST: 0}
    last_session = 0
    for _ in range(60):
        name = rng.choice([EAST, WEST])
        session = sessions[name]
        action = rng.choice(["join", "step", "step", "step", "lose", "leave", "cap", "sleep"])
        effects: list[SyncerEffect] = []
        if action == "join" and session is None:
            last_session += 1
            sessions[name] = session = SessionId(last_session)
            witness.names[session] = name
            effects = desk.tell(LearnerConnected(session=session))
            # A new process of the learner knows no cap, one that only lost its connection goes by the last.
            again = lives[name] if rng.random() < 0.5 else 0
            lives[name] = again or lives[name] + 1
            effects += desk.says(session, hello(name, incarnation=again, local_step=steps[name]))
        elif action == "step" and session is not None:
            steps[name] += 1
            effects = desk.tell(LearnerSaid(session=session, message=report(steps[name], step_lo=0)), after_s=1.0)
        elif action == "lose" and session is not None:
            sessions[name] = None
            effects = desk.tell(LearnerDisconnected(session=session, reason="lost"))
        elif action == "leave" and session is not None:
            sessions[name] = None
            effects = desk.says(session, Goodbye(reason="done"))
            effects += desk.tell(LearnerDisconnected(session=session, reason="goodbye"))
        elif action == "cap":
            cap = rng.choice([0.0, 50.0, 300.0, 1000.0])
            effects = desk.tell(IngressChanged(ingress=Ingress(cap_bytes_per_s=cap, uplinks=uplinks)))
        elif action == "sleep":
            effects = desk.tell(TimerFired(), after_s=rng.choice([1.0, 20.0]))
        witness.hear(effects)
        if cap and desk.machine.state.started:
            told = [witness.granted.get(name, 0.0) for name, session in sessions.items() if session is not None]
            assert all(told), "who may send was told how fast"
            assert sum(told) <= cap * (1 + 1e-9)
