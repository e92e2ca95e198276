"""What no honest learner says: broken, hostile or mistaken peers, each with what must become of their words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from wan_diloco.protocol.events import LearnerSaid, UploadFailed, UploadOffered
from wan_diloco.protocol.messages import (
    PROTOCOL_VERSION,
    ContributionHeader,
    ContributionKey,
    Declined,
    DeclineReason,
    Hello,
    LearnerMessage,
    RefusalReason,
    Report,
    ResyncRequest,
    UpdateReceived,
)
from wan_diloco.protocol.rejoin_messages import (
    MomentsSource,
    StateDeclined,
    StateManifest,
    StateReady,
    StateRefusal,
    StateSettled,
    StateWanted,
)
from wan_diloco.simulation.learner_node import LearnerNode
from wan_diloco.simulation.machines import MachineWorld
from wan_diloco.simulation.world_settings import BATCH_TOKENS
from wan_diloco.units import (
    Epoch,
    FragmentId,
    GlobalStep,
    Incarnation,
    LearnerId,
    LocalStep,
    RoundId,
    TransferId,
    Version,
)

__all__ = ["NUM_LIES", "tell_lie"]

_FIRST = FragmentId(0)
_NO_FRAGMENT = FragmentId(99)
_NO_TRANSFER = TransferId(99)
# Beyond all that a session may claim at once.
_LEAP_STEPS = 10**6


def tell_lie(world: MachineWorld, node: LearnerNode, number: int) -> bool:
    """Have somebody lie: a stranger, or somebody on a learner's own connection.

    Args:
        world: Where.
        node: A connected learner that was welcomed before.
        number: Which lie; beyond the last they begin again.

    Returns:
        Whether anybody heard it.
    """
    # Before its Hello is taken in, a session is anybody's: whoever says one there is another life of that name.
    if not world.syncer_up or node.session is None or world.syncer.context.membership.of(node.session) is None:
        return False
    return _LIES[number % NUM_LIES](world, node)


Lie = Callable[[MachineWorld, LearnerNode], bool]


def _hello(world: MachineWorld, node: LearnerNode) -> Hello:
    identity = world.settings.identity(node.learner_id)
    return Hello(
        protocol_version=PROTOCOL_VERSION,
        run=identity.run,
        learner_id=identity.learner_id,
        incarnation=Incarnation(0),
        layout=identity.layout,
        settings=identity.settings,
        initial_digests=identity.initial_digests,
        local_step=LocalStep(0),
        tokens=0,
    )


def _report(node: LearnerNode, steps: int) -> Report:
    return Report(
        local_step=LocalStep(node.local_step + steps),
        tokens=node.tokens + steps * BATCH_TOKENS,
        step_time_s=1.0,
        loss=None,
        learning_rate=0.0,
        fragments=(),
    )


def _stranger(**changes: Any) -> Lie:
    """Somebody knocks with a Hello that is wrong in one thing."""
    return lambda world, node: world.stranger([replace(_hello(world, node), **changes)])


def _twice(world: MachineWorld, node: LearnerNode) -> bool:
    """A session that is refused, and says what would be right."""
    hello = _hello(world, node)
    return world.stranger([replace(hello, run="another"), hello])


def _without_hello(message: LearnerMessage) -> Lie:
    """Somebody says what only who was welcomed may say."""
    return lambda world, _: world.stranger([message])


def _says(message: Callable[[MachineWorld, LearnerNode], LearnerMessage]) -> Lie:
    """A message on the learner's own control stream."""

    def tell(world: MachineWorld, node: LearnerNode) -> bool:
        assert node.session is not None
        world.tell(LearnerSaid(session=node.session, message=message(world, node)))
        return True

    return tell


def _header(world: MachineWorld, node: LearnerNode) -> ContributionHeader:
    """One that would be taken, of the next step."""
    size, (since, tokens) = world.settings.sizes[_FIRST], node.installed_at[_FIRST]
    return ContributionHeader(
        key=ContributionKey(
            learner_id=node.learner_id,
            incarnation=node.machine.incarnation,
            fragment_id=_FIRST,
            step_lo=LocalStep(since),
        ),
        round_id=RoundId(0),
        attempt=1,
        base=world.syncer.state.versions[_FIRST],
        step_hi=LocalStep(node.local_step + 1),
        tokens_lo=tokens,
        tokens_hi=node.tokens + BATCH_TOKENS,
        unit_hi=node.unit + 1,
        codec=world.settings.for_learner().codec,
        codes_bytes=size.codes_bytes,
        scales_bytes=size.scales_bytes,
    )


def _offers(change: Callable[[ContributionHeader], ContributionHeader]) -> Lie:
    """A contribution that is wrong in one thing."""

    def tell(world: MachineWorld, node: LearnerNode) -> bool:
        assert node.session is not None
        world.tell(UploadOffered(session=node.session, header=change(_header(world, node))))
        return True

    return tell


def _spoilt(reason: RefusalReason, **changes: Any) -> Lie:
    """A contribution whose bytes aren't what its header says."""

    def tell(world: MachineWorld, node: LearnerNode) -> bool:
        assert node.session is not None
        header = _key(**changes)(_header(world, node))
        world.tell(UploadFailed(session=node.session, header=header, reason=reason, detail="as a test"))
        return True

    return tell


def _key(**changes: Any) -> Callable[[ContributionHeader], ContributionHeader]:
    return lambda header: replace(header, key=replace(header.key, **changes))


def _far(header: ContributionHeader) -> ContributionHeader:
    return replace(
        header,
        step_hi=LocalStep(header.step_hi + _LEAP_STEPS),
        tokens_hi=header.tokens_hi + _LEAP_STEPS * BATCH_TOKENS,
    )


_STATE = StateManifest(global_step=GlobalStep(0), versions=(), layout="a layout", size_bytes=8, digest="d")
_OF_WELCOMED: tuple[LearnerMessage, ...] = (
    Report(local_step=LocalStep(0), tokens=0, step_time_s=1.0, loss=None, learning_rate=0.0, fragments=()),
    Declined(round_id=RoundId(0), attempt=1, fragment_id=_FIRST, reason=DeclineReason.BUSY),
    UpdateReceived(fragment_id=_FIRST, version=Version(Epoch(0), 0), resync=0),
    ResyncRequest(fragment_id=_FIRST, reason=RefusalReason.DIGEST),
    StateWanted(failed=_NO_TRANSFER, digest=""),
    StateReady(transfer=_NO_TRANSFER, manifest=_STATE),
    StateDeclined(transfer=_NO_TRANSFER, reason=StateRefusal.BUSY),
    StateSettled(source=MomentsSource.NONE, donor=LearnerId(""), global_step=GlobalStep(0)),
)

_LIES: tuple[Lie, ...] = (
    _stranger(learner_id=LearnerId("no region")),
    _stranger(incarnation=Incarnation(99)),
    _stranger(protocol_version=PROTOCOL_VERSION + 1),
    _stranger(run="another"),
    _stranger(layout=("another layout",)),
    _stranger(settings=(("a", "different setting"),)),
    _stranger(settings=(("a", "setting"), ("b", "one more"))),
    _stranger(initial_digests=("other weights",)),
    *(_without_hello(message) for message in _OF_WELCOMED),
    _twice,
    _says(_hello),
    _says(lambda _, node: _report(node, _LEAP_STEPS)),
    _says(lambda _world, _node: ResyncRequest(fragment_id=_NO_FRAGMENT, reason=RefusalReason.DIGEST)),
    _says(lambda _world, _node: StateReady(transfer=_NO_TRANSFER, manifest=_STATE)),
    _says(lambda _world, _node: StateDeclined(transfer=_NO_TRANSFER, reason=StateRefusal.BUSY)),
    _offers(_key(learner_id=LearnerId("nobody"))),
    _offers(_key(incarnation=Incarnation(99))),
    _offers(_key(fragment_id=_NO_FRAGMENT)),
    _offers(lambda header: replace(header, codec="morse")),
    _offers(lambda header: replace(header, codes_bytes=header.codes_bytes + 1)),
    _offers(lambda header: replace(header, step_hi=header.key.step_lo, tokens_hi=header.tokens_lo)),
    _offers(lambda header: replace(header, tokens_hi=header.tokens_hi + BATCH_TOKENS)),
    _offers(lambda header: replace(header, base=Version(header.base.epoch, header.base.count + 5))),
    _offers(lambda header: replace(header, base=Version(Epoch(header.base.epoch + 1), header.base.count))),
    _offers(_far),
    _spoilt(RefusalReason.BAD_CHECKSUM),
    _spoilt(RefusalReason.GARBAGE),
    _spoilt(RefusalReason.BAD_CHECKSUM, incarnation=Incarnation(99)),
)
NUM_LIES = len(_LIES)
