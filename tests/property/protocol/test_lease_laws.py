"""No unit of data is in two contributions of a fragment, whatever joins, dies, falls silent and wakes.

Learners here know what their steps read. What the syncer lends reaches a training loop some time after the Welcome, and
before any question that follows it; until then it trains and installs as before. Nobody here waits until its fragments
have come anew, so that some that wake bring old work, or work on weights that contain some. And the state may go back,
in a new epoch, to one that was saved: whoever was given a life since then is believed all the same.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.desk import Desk, messages, records
from tests.support.protocol import TERMS, contribution, hello, report, syncer_settings, version
from wan_diloco.protocol.events import LearnerConnected, LearnerDisconnected, SessionId, TimerFired
from wan_diloco.protocol.leases import Lease
from wan_diloco.protocol.messages import ContributionKey, Goodbye, RefusalReason, Refused, Welcome
from wan_diloco.protocol.state_json import state_from_json, state_to_json
from wan_diloco.protocol.status import status_of
from wan_diloco.protocol.tape import ContributionJournalled
from wan_diloco.units import Epoch, Incarnation, LearnerId, ShardId, Term

NAMES = tuple(map(LearnerId, ("east", "west", "a", "b", "c")))
LEASE_S = 10.0


@dataclass
class Process:
    """A training process: its counters, what each of its steps read, and its connection."""

    name: LearnerId
    life_id: str
    session: SessionId | None = None
    incarnation: int = 0
    lent: Lease | None = None
    shard: ShardId | None = None
    unit: int = 0
    step: int = 0
    installed: int = 0
    epoch: int = 0
    read: list[tuple[ShardId, int]] = field(default_factory=list)

    def takes(self) -> None:
        """The training loop goes on with what was lent."""
        if self.lent is not None:
            self.shard, self.unit, self.lent = self.lent.shard, self.lent.first_unit, None


class Scene:
    """A syncer that merges nothing, so that all that is journalled stays; and the newest process of each name."""

    def __init__(self, num_spare: int, unlisted_max: int) -> None:
        quorum = len(NAMES) + 1
        spare = tuple(ShardId(2 + number) for number in range(num_spare))
        given = replace(syncer_settings(quorum=quorum), spare_shards=spare)
        self.settings = replace(given, terms=replace(TERMS, unlisted_max=unlisted_max))
        self.desk = Desk(self.settings)
        self.tape: list[object] = []
        self.processes: dict[LearnerId, Process] = {}
        self.made: dict[tuple[ContributionKey, int], tuple[tuple[ShardId, int], ...]] = {}
        self.sessions = 0
        self.saves()

    def saves(self) -> None:
        """Keep what there is, for who goes back."""
        self.tape += records(self.desk.effects)
        self.desk.effects.clear()
        self.saved = json.dumps(state_to_json(self.desk.machine.state)), len(self.tape)

    def goes_back(self) -> None:
        """The disk is lost: another syncer goes on with what was kept, and knows of nothing that came after."""
        state, (saved, length) = self.desk.machine.state, self.saved
        term_min, epoch_min = Term(state.term + 1), Epoch(state.epoch + 1)
        refused = state.rejected[RefusalReason.IMPLAUSIBLE]
        assert not refused, "an honest learner is believed"
        settings = replace(self.settings, term_min=term_min, epoch_min=epoch_min)
        self.desk, now_s = Desk(settings, state_from_json(json.loads(saved))), self.desk.now_s
        self.desk.now_s = now_s
        del self.tape[length:]
        for process in self.processes.values():
            process.session = None

    def starts(self, name: LearnerId) -> None:
        """A new process, in place of any."""
        self.sessions += 1
        self.processes[name] = Process(name, f"life {self.sessions}")
        self.connects(name)

    def connects(self, name: LearnerId) -> None:
        """The process says Hello on a new connection; its old one ends at some time, or never."""
        process = self.processes.get(name)
        if process is None:
            return
        self.sessions += 1
        session = SessionId(self.sessions)
        self.desk.tell(LearnerConnected(session=session))
        said = hello(name, incarnation=process.incarnation, local_step=process.step, life_id=process.life_id)
        answers = messages(self.desk.says(session, said), session)
        if any(isinstance(answer, Refused) for answer in answers):
            del self.processes[name]
            return
        welcome = next(answer for answer in answers if isinstance(answer, Welcome))
        process.session = session
        if welcome.incarnation != process.incarnation:
            process.incarnation = welcome.incarnation
            process.lent = Lease(shard=welcome.data_shard, first_unit=welcome.next_unit)
        if process.shard is None:
            process.takes()
        self.reports(process)

    def breaks(self, name: LearnerId) -> None:
        """A connection ends, and both ends know it."""
        process = self.processes.get(name)
        if process is not None and process.session is not None:
            self.desk.tell(LearnerDisconnected(session=process.session, reason="cut"))
            process.session = None

    def leaves(self, name: LearnerId) -> None:
        process = self.processes.get(name)
        if process is not None and process.session is not None:
            self.desk.says(process.session, Goodbye(reason="enough"))

    def trains(self, name: LearnerId, steps: int) -> None:
        process = self.processes.get(name)
        for _ in range(steps if process is not None and process.shard is not None else 0):
            assert process is not None
            assert process.shard is not None
            process.read.append((process.shard, process.unit))
            process.step, process.unit = process.step + 1, process.unit + 1

    def reports(self, process: Process) -> None:
        if process.session is not None:
            self.desk.says(process.session, report(process.step, step_lo=process.installed))

    def installs(self, name: LearnerId) -> None:
        process = self.processes.get(name)
        if process is not None:
            process.installed, process.epoch = process.step, self.desk.machine.state.epoch
            self.reports(process)

    def gives(self, name: LearnerId, fragment_id: int) -> None:
        """Send what was learned since the last install, whatever it is."""
        process = self.processes.get(name)
        if process is None or process.session is None or process.step == process.installed:
            return
        process.takes()
        header = contribution(
            name,
            process.installed,
            process.step,
            incarnation=process.incarnation,
            fragment_id=fragment_id,
            base=version(0, process.epoch),
        )
        header = replace(header, unit_hi=process.unit)
        self.made[header.key, header.step_hi] = tuple(process.read[process.installed : process.step])
        self.desk.stores(process.session, header)

    def is_robbed(self, name: LearnerId, by: LearnerId, steps: int, installs: bool) -> None:
        """It is away, and another reads its data, and is away itself when it wakes; it trains on, and gives."""
        self.is_silent([])
        self.starts(by)
        self.trains(by, 2)
        self.gives(by, 0)
        self.is_silent([])
        self.connects(name)
        if installs:
            self.installs(name)
        self.trains(name, steps)
        self.gives(name, 0)

    def is_forgotten(self, name: LearnerId, steps: int, installs: bool) -> None:
        """It begins a life after what is kept, where another had ended, and nobody knows of either; it gives."""
        self.trains(name, steps + 1)
        self.gives(name, 0)
        self.starts(name)
        self.trains(name, steps)
        self.goes_back()
        self.connects(name)
        if installs:
            self.installs(name)
        self.trains(name, 2)
        self.gives(name, 0)

    def is_silent(self, spoken: Sequence[LearnerId]) -> None:
        """For longer than a lease only these say anything."""
        for _ in range(4):
            self.desk.now_s += LEASE_S / 3
            for name in spoken:
                if (process := self.processes.get(name)) is not None:
                    self.reports(process)
        self.desk.tell(TimerFired())


names = st.sampled_from(NAMES)
acts = st.one_of(
    st.tuples(st.just("starts"), names),
    st.tuples(st.just("connects"), names),
    st.tuples(st.just("breaks"), names),
    st.tuples(st.just("leaves"), names),
    st.tuples(st.just("trains"), names, st.integers(1, 4)),
    st.tuples(st.just("installs"), names),
    st.tuples(st.just("gives"), names, st.integers(0, 1)),
    st.tuples(st.just("is_robbed"), names, names, st.integers(0, 3), st.booleans()),
    st.tuples(st.just("is_forgotten"), names, st.integers(0, 3), st.booleans()),
    st.tuples(st.just("saves")),
    st.tuples(st.just("goes_back")),
    st.tuples(st.just("is_silent"), st.lists(names, max_size=3)),
)


@settings(max_examples=300, deadline=None)
@given(num_spare=st.integers(1, 2), unlisted_max=st.integers(1, 3), played=st.lists(acts, max_size=40))
def test_no_unit_is_in_two_contributions_of_a_fragment_whatever_joins_dies_and_wakes(
    num_spare: int, unlisted_max: int, played: list[tuple[object, ...]]
) -> None:
    scene = Scene(num_spare, unlisted_max)
    for name in NAMES:
        scene.starts(name)
    for act, *arguments in played:
        getattr(scene, str(act))(*arguments)
        state = scene.desk.machine.state
        shards = [lease.shard for lease in state.leases.values()]
        assert len(shards) == len(set(shards)), "a shard has one reader"
        assert sum(name not in TERMS.learners for name in state.incarnations) <= unlisted_max
    brought: dict[tuple[int, tuple[ShardId, int]], ContributionKey] = {}
    for record in (*scene.tape, *records(scene.desk.effects)):
        if isinstance(record, ContributionJournalled):
            key = record.header.key
            for unit in scene.made[key, record.header.step_hi]:
                assert brought.setdefault((key.fragment_id, unit), key) == key, f"{unit} comes twice"
    status = status_of(scene.desk.machine, scene.desk.now_s)
    assert status.repeated_units == status.balance == 0
    assert status.rejected.get(RefusalReason.IMPLAUSIBLE, 0) == 0, "an honest learner is believed"
    assert set(scene.desk.machine.state.incarnations) <= set(NAMES)
    assert Incarnation(0) not in scene.desk.machine.state.incarnations.values()
