"""How a learner's inner state gets to one that comes back, in a simulated world: whole, or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from wan_diloco.protocol.events import EndGiving, FetchState, GiveState, StateBroken, StateFetched, StateProgress
from wan_diloco.simulation.checkers import must

if TYPE_CHECKING:
    from wan_diloco.protocol.events import SessionId
    from wan_diloco.protocol.syncer_machine import SyncerMachine
    from wan_diloco.simulation.agenda import Agenda
    from wan_diloco.simulation.learner_node import LearnerNode
    from wan_diloco.simulation.world_settings import WorldSettings
    from wan_diloco.units import TransferId

__all__ = ["StateExchange"]

# A state takes as long as that many contributions.
_STATE_UPLOADS = 16


class _World(Protocol):
    settings: WorldSettings
    agenda: Agenda

    @property
    def syncer(self) -> SyncerMachine: ...

    @property
    def syncer_up(self) -> bool: ...

    def delay_s(self, node: LearnerNode) -> float: ...

    def happens(self, chance: float) -> bool: ...


class StateExchange:
    """All transfers of states.

    Args:
        world: In which they take place.

    Attributes:
        gives: Who gives which state, and on which of its sessions.
    """

    def __init__(self, world: _World) -> None:
        """Nobody gives anything."""
        self.gives: dict[TransferId, tuple[LearnerNode, SessionId]] = {}
        self._world = world

    def give(self, node: LearnerNode, effect: GiveState | EndGiving) -> None:
        """A learner begins to give its state, or stops."""
        if isinstance(effect, EndGiving) or node.session is None:
            self.gives.pop(effect.transfer, None)
        else:
            self.gives[effect.transfer] = (node, node.session)

    def fetch(self, node: LearnerNode, effect: FetchState) -> None:
        """A learner takes a state, for as long as several contributions take: whole, or not, or it comes to a stop."""
        session, transfer = node.session, effect.offer.transfer
        world = self._world
        duration_s = _STATE_UPLOADS * node.link.upload_s + 2 * world.delay_s(node)

        def advance() -> None:
            if node.session == session:
                node.handle(StateProgress(transfer=transfer))

        def end() -> None:
            giver, giving = self.gives.pop(transfer, (None, None))
            whole = giver is not None and giver.runs and giver.session == giving and node.session == session
            if whole and session is not None and self._joins(session, transfer):
                assert giver is not None
                must(
                    giver.pinned == effect.offer.manifest.digest, f"{giver.learner_id} gives other moments than it said"
                )
                node.handle(StateFetched(transfer=transfer))
            else:
                node.handle(StateBroken(transfer=transfer, reason="lost"))

        world.agenda.after(duration_s / 2, advance)
        if not world.happens(world.settings.drop / 2):
            world.agenda.after(duration_s, end)

    def _joins(self, session: SessionId, transfer: TransferId) -> bool:
        world = self._world
        allowed = world.syncer_up and world.syncer.donors.allows(session, transfer, giving=False)
        return allowed and not world.happens(world.settings.drop)
