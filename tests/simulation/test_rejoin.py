"""Who comes back takes its moments from a peer: real machines on an invented network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from wan_diloco.protocol.events import LearnerSaid, Record, SendToLearner, ShowReason
from wan_diloco.protocol.rejoin_messages import Donate, MomentsSource, NoDonor, StateOffered, StateSettled
from wan_diloco.protocol.status import status_of
from wan_diloco.protocol.tape import MembershipChanged
from wan_diloco.simulation.machines import LinkProfile, MachineWorld, Said, WorldSettings
from wan_diloco.units import LearnerId


class Watched:
    """A world in which everybody is proven by 10 s, and what is said of moments since."""

    def __init__(self, learners: int, *, upload_s: float = 0.05) -> None:
        link = LinkProfile(upload_s=upload_s, step_s=0.5)
        self.world = MachineWorld(WorldSettings(links=(link,) * learners, total_steps=200), seed=3)
        self.world.run(until_s=10.0)
        self.settled: list[StateSettled] = []
        self.settled_s: list[float] = []
        self.given: list[Donate] = []
        self.offers: list[StateOffered] = []
        self.refused = 0
        self.silent: list[str] = []
        self.membership_changes: list[float] = []
        self.on_offer: Callable[[StateOffered], None] = lambda _: None
        self.world.watch = self._saw

    def _saw(self, said: Said) -> None:
        match said:
            case LearnerSaid(message=StateSettled() as message):
                self.settled.append(message)
                self.settled_s.append(self.world.now_s)
            case SendToLearner(message=Donate() as message):
                self.given.append(message)
            case SendToLearner(message=StateOffered() as message):
                self.offers.append(message)
                self.on_offer(message)
            case SendToLearner(message=NoDonor()):
                self.refused += 1
            case ShowReason(topic=topic, text=text) if topic.startswith("member:") and text:
                self.silent.append(text)
            case Record(record=MembershipChanged()):
                self.membership_changes.append(self.world.now_s)
            case _:
                pass

    def back(self, *names: str) -> None:
        for name in names:
            self.world.kill(self.world.nodes[LearnerId(name)])
        for name in names:
            self.world.revive(self.world.nodes[LearnerId(name)])


def test_who_comes_back_has_a_peers_moments_and_is_merged_again() -> None:
    watched = Watched(2)
    before = watched.world.syncer.state.participation[LearnerId("m0")]
    watched.back("m0")
    watched.world.run(until_s=20.0)
    (settled,) = watched.settled
    assert (settled.source, settled.donor) == (MomentsSource.PEER, "m1")
    node = watched.world.nodes[LearnerId("m0")]
    assert node.moments == f"m1@{settled.global_step}"
    assert node.digests == watched.world.syncer.state.digests
    assert watched.world.syncer.state.participation[LearnerId("m0")] > before
    assert status_of(watched.world.syncer, 20.0).learners[0].moments == "peer of m1"


@pytest.mark.parametrize("after_s", [0.08, 0.4, 0.75])
def test_a_killed_donor_is_replaced_by_another(after_s: float) -> None:
    watched = Watched(3)

    def kill_donor(offer: StateOffered) -> None:
        watched.on_offer = lambda _: None
        node = watched.world.nodes[offer.donor]
        watched.world.agenda.after(after_s, lambda: watched.world.kill(node))

    watched.on_offer = kill_donor
    watched.back("m0")
    watched.world.run(until_s=20.0)
    (settled,) = watched.settled
    assert settled.source is MomentsSource.PEER
    assert [offer.donor for offer in watched.offers] == ["m1", "m2"]
    assert settled.donor == "m2"


def test_without_any_donor_it_begins_with_none_and_trains() -> None:
    watched = Watched(2)
    watched.back("m0", "m1")
    watched.world.run(until_s=20.0)
    assert watched.refused == 2
    assert {settled.source for settled in watched.settled} == {MomentsSource.NONE}
    assert all(watched.world.nodes[LearnerId(name)].local_step > 5 for name in ("m0", "m1"))


def test_eight_joiners_share_one_donor_two_at_a_time() -> None:
    """And the last of them, who wait for longer than a lease, are members all the while."""
    watched = Watched(9, upload_s=0.3)
    most: Counter[str] = Counter()
    begun_s = watched.world.now_s

    def count(_: StateOffered) -> None:
        most.update(Counter(node.learner_id for node, _ in watched.world.states.gives.values()) - most)

    watched.on_offer = count
    watched.back(*(f"m{number}" for number in range(8)))
    watched.world.run(until_s=60.0)
    assert len(watched.settled) == 8
    assert {settled.source for settled in watched.settled} == {MomentsSource.PEER}
    assert most
    assert max(most.values()) <= 2
    assert not [topic for topic in watched.world.syncer.context.waiting if topic.startswith("donor")]
    assert watched.settled_s[-1] - begun_s > watched.world.settings.lease_s
    assert watched.silent == []
    assert max(watched.membership_changes) < begun_s + 1.0, "they came, and nobody has gone since"


def test_a_syncer_that_crashes_during_a_transfer_is_asked_again() -> None:
    watched = Watched(2)
    watched.on_offer = lambda _: watched.world.doom_syncer(0, 2.0)
    watched.back("m0")
    watched.world.run(until_s=11.0)
    watched.on_offer = lambda _: None
    watched.world.run(until_s=30.0)
    assert watched.settled[-1].source is MomentsSource.PEER
    assert watched.world.nodes[LearnerId("m0")].local_step > 5
