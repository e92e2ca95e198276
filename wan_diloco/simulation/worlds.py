"""Worlds: one number, one run, with enough going on in it, and enough going wrong.

A world has at least `MERGES_MIN` merges and `FAULTS_MIN` faults that befell it; every second one has a crash of the
syncer. One that turns out too short for that is drawn again from the same number, with twice the steps.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from wan_diloco.simulation.checkers import Violation
from wan_diloco.simulation.faults import SYNCER_ENDS, Fault, FaultKind
from wan_diloco.simulation.learner_node import Note
from wan_diloco.simulation.lies import NUM_LIES
from wan_diloco.simulation.transitions import Transitions
from wan_diloco.simulation.trials import Trial, play
from wan_diloco.simulation.world_settings import LinkProfile, WorldSettings
from wan_diloco.units import LearnerId

__all__ = ["FAULTS_MIN", "MERGES_MIN", "WorldResult", "draw_world", "play_world"]

MERGES_MIN = 10
FAULTS_MIN = 3
# How many times as long as usual, the longest upload, and the most that is lost: who waits for narrow and lossy links
# for most of a run merges little.
_TRIES = ((1, 12.0, 0.3), (2, 2.0, 0.1), (8, 0.2, 0.02))
# What an operator does isn't a fault.
_HARMLESS = frozenset({FaultKind.SNAPSHOT, FaultKind.SHIP, FaultKind.NEW_CAPS})
_OFTEN = (FaultKind.SNAPSHOT, FaultKind.NEW_CAPS, FaultKind.LIE)
_OF_SYNCER = (FaultKind.CRASH, FaultKind.CRASH, FaultKind.RESTART)
_OTHERS = tuple(kind for kind in FaultKind if kind not in SYNCER_ENDS | _HARMLESS | {FaultKind.JOIN_LATE})
# The share of worlds in which learners join whom nobody listed, and what befalls those, whose data others need.
_JOINED = 0.35
_OF_JOINERS = (
    FaultKind.HANG,
    FaultKind.HANG,
    FaultKind.KILL,
    FaultKind.LEAVE,
    FaultKind.HALF_OPEN,
    FaultKind.ONE_WAY_UP,
    FaultKind.TWIN,
    FaultKind.UPLINK,
)
# Faults come within this share of a run; what is left shows that all is well again.
_TROUBLED = 0.65


@dataclass(slots=True)
class WorldResult:
    """What a world showed.

    Attributes:
        merges: Versions published.
        faults: What befell, by kind; `mishap` is what chance had lost, repeated, spoiled or fail.
        befell: How many faults that are, without chance's and the operator's.
        crashes: Processes of the syncer that crashed.
        events: That the syncer's machine handled.
        violation: What didn't hold; empty when everything did.
        seen, undeclared: Transitions: see `transitions`.
    """

    seed: int
    merges: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    befell: int = 0
    crashes: int = 0
    events: int = 0
    violation: str = ""
    seen: frozenset[str] = frozenset()
    undeclared: frozenset[str] = frozenset()


def play_world(seed: int, note: Note | None = None) -> WorldResult:
    """Play the world of a number to its end, or to what doesn't hold.

    Args:
        seed: The number.
        note: See `trials.play`; a world that turns out too small is played again, from the syncer's start.
    """
    for attempt in range(len(_TRIES)):
        result = _play_attempt(seed, attempt, note)
        enough = result.merges >= MERGES_MIN and result.befell >= FAULTS_MIN and (seed % 2 or result.crashes)
        if result.violation or enough:
            return result
    result.violation = f"the world stays too small: {result.merges} merges, faults {dict(result.faults)}"
    return result


def _play_attempt(seed: int, attempt: int, note: Note | None) -> WorldResult:
    result, transitions = WorldResult(seed), Transitions()

    def noted(who: str, event: object, effects: Sequence[object]) -> None:
        transitions.note(who, event, effects)
        if note is not None:
            note(who, event, effects)

    try:
        world = play(draw_world(seed, attempt), noted)
    except Exception as problem:  # noqa: BLE001 - whatever a world raises is what is looked for
        kind = "" if isinstance(problem, Violation) else f"{type(problem).__name__}: "
        result.violation = f"{kind}{problem}"
    else:
        transitions.ended(world)
        result.merges, result.events = world.invariants.published, len(world.inputs)
        result.faults = Counter({str(kind): number for kind, number in world.befell.items()})
        result.befell = sum(number for kind, number in world.befell.items() if kind not in _HARMLESS)
        result.faults["mishap"] = world.mishaps
        result.crashes = world.node.crashes
    result.seen, result.undeclared = transitions.result()
    return result


def draw_world(seed: int, attempt: int = 0) -> Trial:
    """The world of a number.

    Args:
        seed: An even one has a crash of the syncer, an odd one none.
        attempt: After a world that turned out too small: longer, and with wider links.
    """
    stretch, upload_max_s, drop_max = _TRIES[attempt]
    rng = random.Random(seed)
    num_learners = rng.choice([1, 2, 2, 3, 3, 3, 4])
    lockstep = rng.random() < 0.12
    quorum = num_learners if lockstep else rng.randint(1, num_learners)
    period = rng.randint(2, 5)
    num_fragments = rng.randint(math.ceil(period / 2), 6)
    total_steps = stretch * max(3 * period, math.ceil(20 * period / num_fragments))
    links = tuple(_link(rng, upload_max_s) for _ in range(num_learners))
    length_s = total_steps * sorted(link.step_s for link in links)[quorum - 1]
    late = tuple(LearnerId(f"m{index}") for index in range(1, num_learners) if rng.random() < 0.12)
    settings = WorldSettings(
        links=links,
        num_fragments=num_fragments,
        period_steps=period,
        overlap_steps=0 if lockstep else rng.randint(1, 3),
        quorum=quorum,
        safety=rng.choice([0.0, 0.5, 0.9, 0.9]),
        bound_steps=2.0 if lockstep else rng.choice([2.0, 4.0]),
        total_steps=total_steps,
        lease_s=rng.choice([2.0, 10.0]),
        merge_s=rng.choice([0.0, 0.02, 0.02, 1.5]),
        drop=min(drop_max, rng.choice([0.0, 0.0, 0.1, 0.3])),
        repeat=rng.choice([0.0, 0.0, 0.2]),
        poison=rng.choice([0.0, 0.0, 0.0, 0.1]),
        merge_fails=rng.choice([0.0, 0.0, 0.0, 0.3]),
        rot=rng.choice([0.0, 0.0, 0.0, 0.05]),
        echo=rng.choice([0.0, 0.0, 0.2]),
        calm_s=_TROUBLED * length_s,
        bulk_jitter_s=rng.choice([0.0, 0.0, 0.2, 1.0]),
        keep_updates=rng.choice([2, 8, 8]),
        decode_s=rng.choice([0.0, 0.05, 0.5]),
        skewed=rng.random() < 0.5,
        late=late,
        start_timeout_s=rng.choice([2.0, 5.0]) if late or rng.random() < 0.1 else 60.0,
        joiners_max=rng.choice([1, 2]),
        durable=lockstep or rng.random() < 0.85,
        flush_s=rng.choice([0.2, 2.0, 20.0]),
    )
    trial = Trial(
        settings=settings,
        faults=_faults(rng, seed, settings, lasting=attempt == 0),
        seed=rng.getrandbits(32),
        insists=True,
    )
    return _joined(trial, random.Random(f"{seed} joiners"), upload_max_s)


def _joined(trial: Trial, rng: random.Random, upload_max_s: float) -> Trial:
    """The same, where in some worlds learners join under names that nobody listed: drawn apart from all else."""
    settings = trial.settings
    if settings.overlap_steps == 0 or rng.random() > _JOINED:
        return trial
    number = rng.choice([1, 2, 2, 3, 3])
    links = [_link(rng, upload_max_s) for _ in range(number)]
    # Who is quicker than the listed ones would have the run over before its faults have come.
    quickest_s = sorted(link.step_s for link in settings.links)[settings.quorum - 1]
    settings = replace(
        settings,
        unlisted=tuple(replace(link, step_s=max(link.step_s, quickest_s)) for link in links),
        unlisted_max=max(1, number - (rng.random() < 0.2)),
        num_spare_shards=rng.choice([1, 1, number]),
        lease_s=2.0,
    )
    faults = [_fault(rng, FaultKind.JOIN_LATE, learner_id, 0.6 * settings.calm_s) for learner_id in settings.joiners]
    kinds = [rng.choice(_OF_JOINERS) for _ in range(rng.randint(2, 3 * number))]
    for kind in kinds:
        fault = _fault(rng, kind, rng.choice(settings.joiners), settings.calm_s)
        # Others need its data only when it is away for longer than a lease.
        faults.append(replace(fault, lasts_s=settings.lease_s * rng.choice([0.5, 2.5, 5.0])))
    return replace(
        trial, settings=settings, faults=tuple(sorted([*trial.faults, *faults], key=lambda fault: fault.at_s))
    )


def _link(rng: random.Random, upload_max_s: float) -> LinkProfile:
    if rng.random() < 0.6:
        return LinkProfile(
            step_s=rng.choice([0.7, 1.0, 1.3]),
            delay_s=rng.choice([0.001, 0.02, 0.1]),
            jitter_s=rng.choice([0.0, 0.02]),
            upload_s=rng.choice([0.01, 0.05, 0.2]),
        )
    return LinkProfile(
        step_s=rng.choice([0.5, 1.0, 2.0]),
        delay_s=rng.choice([0.05, 0.3, 1.5]),
        jitter_s=rng.choice([0.0, 0.1, 1.0]),
        upload_s=min(upload_max_s, rng.choice([0.5, 2.0, 4.0, 12.0])),
    )


def _faults(rng: random.Random, seed: int, settings: WorldSettings, *, lasting: bool) -> tuple[Fault, ...]:
    kinds = [rng.choice(_OTHERS) for _ in range(rng.randint(FAULTS_MIN, FAULTS_MIN + 3))]
    kinds += [kind for kind in _OFTEN if rng.random() < 0.35]
    if seed % 2 == 0:
        kinds += [rng.choice(_OF_SYNCER) for _ in range(rng.choice([1, 1, 2]))]
        kinds += [FaultKind.CRASH_AT_END] * (rng.random() < 0.2)
    faults = [_fault(rng, kind, rng.choice(settings.learners), settings.calm_s) for kind in kinds]
    faults += _lost_disks(seed, settings)
    joins = [_fault(rng, FaultKind.JOIN_LATE, learner_id, settings.calm_s) for learner_id in settings.late]
    if not lasting:
        faults = [replace(fault, amount=0) if fault.kind is FaultKind.NAN else fault for fault in faults]
    return tuple(sorted([*faults, *joins], key=lambda fault: fault.at_s))


def _lost_disks(seed: int, settings: WorldSettings) -> list[Fault]:
    """In every tenth world the syncer's machine dies with its disk, once or twice, and copies outlive it."""
    if seed % 10 != 4:
        return []
    # From a source of its own, so that the other worlds are what they were.
    rng = random.Random(f"lost disks of {seed}")
    kinds = [FaultKind.SHIP] * rng.randint(0, 4) + [FaultKind.LOSE_DISK] * rng.choice([1, 1, 2])
    return [_fault(rng, kind, settings.learners[0], settings.calm_s) for kind in kinds]


def _fault(rng: random.Random, kind: FaultKind, learner_id: LearnerId, until_s: float) -> Fault:
    return Fault(
        at_s=rng.uniform(0.05, 1.0) * until_s,
        kind=kind,
        learner_id=learner_id,
        lasts_s=rng.choice([0.2, 1.0, 3.0, 6.0, 12.0, 20.0 if kind is FaultKind.HANG else 12.0]),
        amount=rng.randrange(NUM_LIES) if kind is FaultKind.LIE else rng.randint(0, 20),
    )
