"""Whatever asks and changes, no window over a link or over all of them holds more than the caps; none starves."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tests.property.transport.test_pacing_laws import worst
from wan_diloco.protocol.pacing import Cap
from wan_diloco.protocol.sharing import Flow, SharedLink, Trunk


@dataclass(eq=False)
class Asking:
    """A message that wants to leave, and where."""

    link: int
    flow: int
    amount: int


@dataclass
class Scene:
    """A trunk in a time of its own; `left` is what left, and `spent` what went past it, per link."""

    trunk: Trunk[Asking]
    links: list[SharedLink[Asking]]
    now_s: float = 0.0
    left: list[tuple[float, Asking]] = field(default_factory=list)
    spent: list[tuple[float, int, int]] = field(default_factory=list)

    def release(self) -> list[Asking]:
        found = self.trunk.release(self.now_s)
        self.left += [(self.now_s, asking) for asking in found]
        return found

    def of(self, link: int | None) -> list[tuple[float, int]]:
        """All bytes over a link, or over all, in order of time."""
        bulk = [(at_s, asking.amount) for at_s, asking in self.left if link in (None, asking.link)]
        control = [(at_s, amount) for at_s, which, amount in self.spent if link in (None, which)]
        return sorted(bulk + control)


def caps_between(rng: random.Random, low: float, high: float) -> Cap:
    return Cap.of(rng.uniform(low, high))


@given(rng=st.randoms(use_true_random=False))
def test_the_caps_hold_over_every_window(rng: random.Random) -> None:
    """Links come and go, ask, withdraw, are changed, and speak: as the two ends of a run do."""
    high = 1e6
    total = caps_between(rng, 1e5, high)
    scene = Scene(Trunk(total), [SharedLink(None) for _ in range(rng.randint(1, 4))])
    caps = [caps_between(rng, 2e4, high) for _ in scene.links]
    rates = [cap.rate_bytes_per_s for cap in caps]
    for link, cap in zip(scene.links, caps, strict=True):
        scene.trunk.set_link_cap(link, cap, 0.0)
    flows = [[Flow[Asking](rng.uniform(0, 5)) for _ in range(3)] for _ in scene.links]
    total_rate = total.rate_bytes_per_s
    for _ in range(120):
        which = rng.randrange(len(scene.links))
        link, flow = scene.links[which], rng.choice(flows[which])
        match rng.choice(["ask", "ask", "ask", "wait", "wait", "speak", "change", "total", "withdraw"]):
            case "ask":
                # No message is above the burst of any cap on its way, and bursts only grow with the rate.
                asking = Asking(which, 0, rng.randint(1, 8 * 1024))
                scene.trunk.ask(link, flow, asking.amount, asking)
            case "wait":
                wait_s = scene.trunk.wait_s(scene.now_s)
                scene.now_s += rng.uniform(0, 0.1) if wait_s is None else wait_s * rng.choice([0.5, 1.0, 1.5])
            case "speak":
                amount = rng.randint(1, 100)
                scene.now_s += 0.02
                scene.spent.append((scene.now_s, which, amount))
                scene.trunk.spend(link, amount, scene.now_s)
            case "change":
                cap = caps_between(rng, 2e4, high)
                rates[which] = max(rates[which], cap.rate_bytes_per_s)
                scene.trunk.set_link_cap(link, cap, scene.now_s)
            case "total":
                total = caps_between(rng, 1e5, high)
                total_rate = max(total_rate, total.rate_bytes_per_s)
                scene.trunk.set_cap(total, scene.now_s)
            case "withdraw":
                if flow.waiting:
                    scene.trunk.withdraw(link, flow, rng.choice([ticket for _, ticket in flow.waiting]))
        scene.release()
    burst = Cap.of(high).burst_bytes
    for which, rate in enumerate(rates):
        if scene.of(which):
            assert worst(scene.of(which), rate) <= burst + 1e-3
    if scene.of(None):
        assert worst(scene.of(None), total_rate) <= burst + 1e-3


def drain(scene: Scene, refill: dict[int, tuple[SharedLink[Asking], Flow[Asking], Asking]], until_s: float) -> None:
    """Play until then; who has left asks for the next message of the same size at once."""
    for link, flow, asking in refill.values():
        scene.trunk.ask(link, flow, asking.amount, asking)
    while scene.now_s < until_s:
        for asking in scene.release():
            link, flow, _ = refill[asking.flow]
            again = Asking(asking.link, asking.flow, asking.amount)
            scene.trunk.ask(link, flow, again.amount, again)
        wait_s = scene.trunk.wait_s(scene.now_s)
        assert wait_s is not None
        scene.now_s += max(wait_s, 1e-6)


@given(
    sizes=st.lists(st.integers(500, 8 * 1024), min_size=2, max_size=6),
    transfers=st.lists(st.integers(1, 4), min_size=6, max_size=6),
)
def test_sessions_share_a_total_evenly_however_much_each_asks(sizes: list[int], transfers: list[int]) -> None:
    trunk: Trunk[Asking] = Trunk(Cap.of(1e6))
    scene = Scene(trunk, [SharedLink(None) for _ in sizes])
    refill = {}
    for which, (size, count) in enumerate(zip(sizes, transfers, strict=False)):
        for _ in range(count):
            number = len(refill)
            refill[number] = (scene.links[which], Flow[Asking](0.0), Asking(which, number, size))
    drain(scene, refill, 2.0)
    totals = [sum(amount for _, amount in scene.of(which)) for which in range(len(sizes))]
    # Each is at most one message of either apart from the fair share.
    assert max(totals) - min(totals) <= 2 * max(sizes) + 2 * 8 * 1024


@given(others=st.integers(1, 6), sizes=st.lists(st.integers(500, 8 * 1024), min_size=7, max_size=7))
def test_the_transfer_that_is_due_first_gets_most_and_none_starves(others: int, sizes: list[int]) -> None:
    trunk: Trunk[Asking] = Trunk()
    link: SharedLink[Asking] = SharedLink(None)
    trunk.set_link_cap(link, Cap.of(1e6), 0.0)
    scene = Scene(trunk, [link])
    dues_s = [5.0 + index for index in range(others)]
    refill = {0: (link, Flow[Asking](1.0), Asking(0, 0, sizes[0]))}
    for number, due_s in enumerate(dues_s, start=1):
        refill[number] = (link, Flow[Asking](due_s), Asking(0, number, sizes[number]))
    drain(scene, refill, 5.0)
    sent = [sum(asking.amount for _, asking in scene.left if asking.flow == number) for number in refill]
    everything = sum(sent)
    slack = 10 * 8 * 1024
    assert sent[0] >= everything * 8 / (8 + others) - slack
    for later in sent[1:]:
        assert later >= everything / (8 + others) - slack
    # None waits for long: what is between two messages of any is bounded.
    for number in refill:
        times_s = [at_s for at_s, asking in scene.left if asking.flow == number]
        bound_s = (8 + others) * 3 * 8 * 1024 / 1e6
        assert max(later - earlier for earlier, later in pairwise(times_s)) <= bound_s


def test_small_messages_of_one_session_do_not_keep_the_large_ones_of_another_waiting() -> None:
    trunk: Trunk[Asking] = Trunk(Cap.of(1e6))
    scene = Scene(trunk, [SharedLink(None), SharedLink(None)])
    refill = {
        0: (scene.links[0], Flow[Asking](0.0), Asking(0, 0, 100)),
        1: (scene.links[1], Flow[Asking](0.0), Asking(1, 1, 8 * 1024)),
    }
    drain(scene, refill, 2.0)
    totals = [sum(amount for _, amount in scene.of(which)) for which in range(2)]
    assert abs(totals[0] - totals[1]) <= 3 * 8 * 1024
