"""What goes wrong in a simulated run, and how it befalls a world."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from wan_diloco.protocol.events import CallsRefused, IngressChanged
from wan_diloco.protocol.grants import Ingress
from wan_diloco.protocol.messages import RefusalReason
from wan_diloco.simulation.learner_node import LearnerNode
from wan_diloco.simulation.lies import tell_lie
from wan_diloco.simulation.machines import MachineWorld
from wan_diloco.units import LearnerId

__all__ = ["SYNCER_ENDS", "Fault", "FaultKind", "befall"]

_UP, _DOWN = 0, 1
_CLOCK_STEP_S = 7200.0


class FaultKind(StrEnum):
    """What goes wrong."""

    CUT = "cut"
    KILL = "kill"
    HANG = "hang"
    TWIN = "twin"
    RESTART = "restart"
    CRASH = "crash"
    CRASH_AT_END = "crash_at_end"
    LOSE_DISK = "lose_disk"
    SHIP = "ship"
    SNAPSHOT = "snapshot"
    HALF_OPEN = "half_open"
    ONE_WAY_UP = "one_way_up"
    ONE_WAY_DOWN = "one_way_down"
    SLOW_LINK = "slow_link"
    SLOW_STEPS = "slow_steps"
    SLOW_DISK = "slow_disk"
    FULL_DISK = "full_disk"
    JOIN_LATE = "join_late"
    LEAVE = "leave"
    UPLINK = "uplink"
    NAN = "nan"
    CLOCK = "clock"
    NEW_CAPS = "new_caps"
    LIE = "lie"


# The syncer's process ends, and another takes its state up.
SYNCER_ENDS = frozenset({FaultKind.RESTART, FaultKind.CRASH, FaultKind.CRASH_AT_END, FaultKind.LOSE_DISK})
# What befalls a process of the syncer's, and nobody while there is none.
_OF_PROCESS = frozenset(
    {FaultKind.SLOW_DISK, FaultKind.FULL_DISK, FaultKind.CLOCK, FaultKind.CRASH_AT_END, FaultKind.NEW_CAPS}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        at_s: When.
        learner_id: Whom it befalls; of no meaning for the syncer's.
        lasts_s: How long: until a killed one is back, a hanging one wakes, the syncer starts again, a link is as
            usual, or one end notices the cut.
        amount: At a cut, whether the syncer (0) or the learner (1) notices it late; at a crash, in the
            middle of how many effects from then; how many times slower; which lie.
    """

    at_s: float
    kind: FaultKind
    learner_id: LearnerId
    lasts_s: float
    amount: int


def befall(world: MachineWorld, fault: Fault) -> bool:
    """Have it go wrong.

    Returns:
        Whether anything did: who isn't there can't be killed.
    """
    node = world.nodes.get(fault.learner_id)
    done = _of_syncer(world, fault)
    if done is None:
        done = _of_learner(world, fault, node) if node is not None else _absent(world, fault)
    if done:
        world.liveliness.disturbed(world.now_s)
    return done


def _absent(world: MachineWorld, fault: Fault) -> bool:
    """A learner that wasn't there at the start."""
    if fault.kind is not FaultKind.JOIN_LATE:
        return False
    world.join(fault.learner_id, world.settings.link(fault.learner_id))
    return True


def _of_syncer(world: MachineWorld, fault: Fault) -> bool | None:
    """A fault of the syncer's; None for another."""
    if fault.kind in _OF_PROCESS and not world.syncer_up:
        return False
    match fault.kind:
        case FaultKind.RESTART:
            return world.restart_syncer(fault.lasts_s)
        case FaultKind.CRASH:
            return world.doom_syncer(fault.amount, fault.lasts_s)
        case FaultKind.CRASH_AT_END:
            world.node.doom_end(before=fault.amount % 2 == 0, down_s=fault.lasts_s)
        case FaultKind.LOSE_DISK:
            # Who has heard of the end doesn't come back for another.
            return not world.ended and world.node.lose_disk(fault.lasts_s)
        case FaultKind.SNAPSHOT | FaultKind.SHIP:
            # While a write takes its time the state is ahead of the tape, and no driver takes one then.
            settled = world.syncer_up and not world.node.stalled
            if settled and (fault.kind is FaultKind.SNAPSHOT or fault.amount % 2):
                world.disk.snapshot(world.syncer.state)
            if settled and fault.kind is FaultKind.SHIP:
                world.disk.ship()
            return settled
        case FaultKind.SLOW_DISK:
            world.node.slow_disk(0.02 * (1 + fault.amount), fault.lasts_s)
        case FaultKind.FULL_DISK:
            world.node.full_disk(fault.lasts_s)
        case FaultKind.CLOCK:
            # Whoever starts from now on has a clock that begins there, before or after all that went by the old.
            world.clock_step_s += (fault.amount - 10) * _CLOCK_STEP_S
        case FaultKind.NEW_CAPS:
            _new_caps(world, fault)
        case _:
            return None
    return True


def _new_caps(world: MachineWorld, fault: Fault) -> None:
    """The operator gives another cap, and takes it back; somebody knocks at the wrong door meanwhile."""
    cap = Ingress(cap_bytes_per_s=100.0 * (1 + fault.amount), uplinks=dict.fromkeys(world.settings.learners, 1000.0))
    world.tell(IngressChanged(ingress=cap))
    world.tell(CallsRefused(reason=RefusalReason.TOO_MANY_CALLS, number=3))
    world.tell(CallsRefused(reason=RefusalReason.NO_HELLO, number=1))
    world.agenda.after(fault.lasts_s, lambda: world.tell(IngressChanged(ingress=Ingress())))


def _of_learner(world: MachineWorld, fault: Fault, node: LearnerNode) -> bool:
    connected = node.runs and node.session is not None
    match fault.kind:
        case FaultKind.CUT if connected and fault.amount % 2:
            world.cut(node, learner_notices_s=fault.lasts_s)
        case FaultKind.CUT if connected:
            world.cut(node, syncer_notices_s=fault.lasts_s)
        case FaultKind.HALF_OPEN if connected:
            world.cut(node, syncer_notices_s=fault.lasts_s, learner_notices_s=fault.lasts_s * fault.amount / 10)
        case FaultKind.ONE_WAY_UP if connected:
            world.part(node, _UP, fault.lasts_s)
        case FaultKind.ONE_WAY_DOWN if connected:
            world.part(node, _DOWN, fault.lasts_s)
        case FaultKind.KILL if node.runs:
            world.kill(node)
            world.agenda.after(fault.lasts_s, lambda: world.start_again(node))
        case FaultKind.LEAVE if connected and not node.is_frozen:
            node.leave()
            world.agenda.after(fault.lasts_s, lambda: world.start_again(node))
        case FaultKind.UPLINK if node.runs and not node.is_frozen:
            world.restart_uplink(node)
        case FaultKind.HANG:
            return node.freeze(fault.lasts_s)
        case FaultKind.TWIN if node.runs:
            world.join(node.learner_id, node.usual_link)
        case FaultKind.SLOW_LINK if node.runs:
            world.change_link(node, slower=1.0 + fault.amount / 4, steps_slower=1.0, lasts_s=fault.lasts_s)
        case FaultKind.SLOW_STEPS if node.runs:
            world.change_link(node, slower=1.0, steps_slower=1.0 + fault.amount / 4, lasts_s=fault.lasts_s)
        case FaultKind.NAN if node.runs:
            # Now and then for good; in lockstep the run would then never end, and says so.
            for_good = fault.amount > 15 and world.settings.overlap_steps > 0
            node.go_barren(float("inf") if for_good else fault.lasts_s)
        case FaultKind.LIE if connected and node.machine.incarnation > 0:
            return tell_lie(world, node, fault.amount)
        case _:
            return False
    return True
