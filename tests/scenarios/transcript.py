"""A tiny language for stories about the machines, and the log that they leave.

A story is a text file of blocks. Each has commands, one a line, then `----`, then what happened, up to an empty
line. Lines that begin with # are for the reader.

    world links=step:1,delay:0.02;step:2 quorum=2 fragments=1 period=4 steps=8
    run until=6.5        play up to that time
    run                  play to the end
    lose ack | update    lose the next acknowledgement, or the next update
    cut m0 | kill m0 | revive m0 | twin m0
    hang m0 for=10
    restart after=1      crash the syncer, and start it again
    status               what the operator is shown
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wan_diloco.protocol.events import (
    ExitLearner,
    LearnerDisconnected,
    LearnerSaid,
    MergeFinished,
    Record,
    SendToLearner,
    SendUpdate,
    SessionId,
    ShowReason,
    SyncerEffect,
    UploadOffered,
)
from wan_diloco.protocol.messages import (
    Acknowledged,
    ContributionHeader,
    ContributionRefused,
    Declined,
    Hello,
    Pull,
    Refused,
    Start,
    Stop,
    UpdateReceived,
    Welcome,
)
from wan_diloco.protocol.status import status_of
from wan_diloco.protocol.tape import (
    ContributionDiscarded,
    ContributionJournalled,
    FragmentPublished,
    LearnerAdmitted,
    RoundClosed,
    RunEnded,
    RunStarted,
    SyncerStarted,
)
from wan_diloco.simulation.machines import LinkProfile, MachineWorld, Said, WorldSettings
from wan_diloco.units import LearnerId

__all__ = ["play_story"]

_SETTINGS = {
    "fragments": "num_fragments",
    "period": "period_steps",
    "overlap": "overlap_steps",
    "quorum": "quorum",
    "steps": "total_steps",
}


def play_story(text: str) -> str:
    """The same story, with what happens in it today."""
    teller = _Teller()
    blocks = []
    for block in text.strip().split("\n\n"):
        commands = block.split("\n----")[0]
        words = [line.split() for line in commands.splitlines() if line and not line.startswith("#")]
        if not words:
            blocks.append(commands)
            continue
        for command, *arguments in words:
            teller.do(command, arguments)
        blocks.append("\n".join([commands, "----", *teller.take()]))
    return "\n\n".join(blocks) + "\n"


class _Teller:
    def __init__(self) -> None:
        self._world: MachineWorld | None = None
        self._lines: list[str] = []
        self._sessions: dict[SessionId, str] = {}
        self._lose: str = ""

    @property
    def world(self) -> MachineWorld:
        assert self._world is not None, "a story begins with `world`"
        return self._world

    def take(self) -> list[str]:
        lines, self._lines = self._lines, []
        return lines or ["(nothing)"]

    def do(self, command: str, arguments: list[str]) -> None:
        named = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
        plain = [argument for argument in arguments if "=" not in argument]
        commands: dict[str, Callable[[], object]] = {
            "world": lambda: self._begin(named),
            "run": lambda: self.world.run(until_s=float(named.get("until", "inf"))),
            "lose": lambda: self._lose_next(plain[0]),
            "cut": lambda: self.world.cut(self._node(plain)),
            "kill": lambda: self.world.kill(self._node(plain)),
            "revive": lambda: self.world.revive(self._node(plain)),
            "twin": lambda: self.world.join(LearnerId(plain[0]), self._node(plain).link),
            "hang": lambda: self._node(plain).freeze(float(named["for"])),
            "restart": lambda: self.world.restart_syncer(float(named["after"])),
            "status": self._status,
        }
        commands[command]()

    def _node(self, plain: list[str]) -> Any:
        return self.world.nodes[LearnerId(plain[0])]

    def _begin(self, named: dict[str, str]) -> None:
        links = []
        for text in named.pop("links").split(";"):
            pairs = [pair.split(":") for pair in text.split(",")]
            links.append(LinkProfile(**{f"{name}_s": float(value) for name, value in pairs}))
        chosen = {_SETTINGS[name]: int(value) for name, value in named.items()}
        self._world = MachineWorld(WorldSettings(links=tuple(links), **chosen), seed=1)  # type: ignore[arg-type]
        self._world.watch = self._saw
        self._world.loses = self._loses

    def _lose_next(self, what: str) -> None:
        self._lose = what

    def _loses(self, effect: SyncerEffect) -> bool:
        kinds = {"ack": SendToLearner, "update": SendUpdate}
        if not self._lose or not isinstance(effect, kinds[self._lose]):
            return False
        self._note(f"   (the last line is lost: {self._lose})")
        self._lose = ""
        return True

    def _status(self) -> None:
        status = status_of(self.world.syncer, self.world.now_s)
        self._note(f"step {status.global_step} of {status.total_steps}, {status.rounds} rounds")
        for learner in status.learners:
            state = "live" if learner.live else "away"
            self._note(f"  {learner.learner_id} {state}, incarnation {learner.incarnation}, step {learner.local_step}")
        for round_ in status.rounds_open:
            self._note(f"  round {round_.round_id}, attempt {round_.attempt}: {round_.reason}")
        for topic, text in status.waiting.items():
            self._note(f"  {topic}: {text}")

    # ---- the log ---------------------------------------------------------------------------------

    def _note(self, text: str) -> None:
        self._lines.append(f"{self.world.now_s:7.2f} {text}")

    def _saw(self, said: Said) -> None:
        if isinstance(said, LearnerSaid) and isinstance(said.message, Hello):
            self._sessions[said.session] = said.message.learner_id
        text = self._told(said)
        if text:
            self._note(text)

    def _who(self, session: SessionId) -> str:
        return self._sessions.get(session, "somebody")

    def _told(self, said: Said) -> str:
        match said:
            case LearnerSaid():
                return self._heard(self._who(said.session), said.message)
            case SendToLearner():
                return self._answered(self._who(said.session), said.message)
            case UploadOffered():
                return f"{self._who(said.session)} > {_work(said.header)} for round {said.header.round_id}"
            case SendUpdate():
                resync = f", resync {said.header.resync}" if said.header.resync else ""
                to = said.header.to_version.count
                return f"{self._who(said.session)} < fragment {said.header.fragment_id} at version {to}{resync}"
            case Record():
                return _recorded(said.record)
            case LearnerDisconnected():
                return f"{self._who(said.session)} is disconnected"
            case ShowReason():
                return f"shown: {said.topic}: {said.text}" if said.text else ""
            case ExitLearner():
                return f"a learner exits with {said.exit_code}: {said.reason}"
            case MergeFinished():
                return f"round {said.round_id} is merged"
            case _:
                return ""

    def _heard(self, who: str, message: Any) -> str:
        match message:
            case Hello():
                life = f"incarnation {message.incarnation}" if message.incarnation else "a new life"
                return f"{who} > Hello, {life}"
            case Declined():
                return f"{who} > declines round {message.round_id}: {message.reason}"
            case UpdateReceived():
                return f"{who} > has fragment {message.fragment_id} at version {message.version.count}"
            case _:
                return ""

    def _answered(self, who: str, message: Any) -> str:
        match message:
            case Welcome():
                return f"{who} < Welcome, incarnation {message.incarnation}"
            case Refused():
                return f"{who} < refused: {message.detail}"
            case Start():
                return f"{who} < Start"
            case Pull():
                return f"{who} < pull of fragment {message.fragment_id}, round {message.round_id}.{message.attempt}"
            case Acknowledged():
                return f"{who} < acknowledged ({message.step_lo}, {message.step_hi}]"
            case ContributionRefused():
                return f"{who} < ({message.step_lo}, {message.step_hi}] refused: {message.reason}"
            case Stop():
                return f"{who} < Stop"
            case _:
                return ""


def _work(header: ContributionHeader) -> str:
    return f"({header.key.step_lo}, {header.step_hi}] of fragment {header.key.fragment_id}"


def _recorded(record: object) -> str:
    match record:
        case SyncerStarted():
            return f"= syncer started, term {record.term}"
        case LearnerAdmitted():
            return f"= {record.learner_id} is admitted, incarnation {record.incarnation}"
        case RunStarted():
            return "= run started"
        case ContributionJournalled():
            return f"= {record.header.key.learner_id}'s {_work(record.header)} is journalled"
        case ContributionDiscarded():
            return f"= {record.header.key.learner_id}'s {_work(record.header)} is discarded: {record.reason}"
        case RoundClosed():
            entries = [f"{entry.header.key.learner_id}{' late' if entry.staleness else ''}" for entry in record.entries]
            missing = [f"{missing.learner_id} {missing.reason}" for missing in record.missing]
            without = f", without {', '.join(missing)}" if missing else ""
            return f"= round {record.round_id}.{record.attempt} closes with {', '.join(entries)}{without}"
        case FragmentPublished():
            return f"= fragment {record.fragment_id} is at version {record.version.count}"
        case RunEnded():
            return "= run ended"
        case _:
            return ""
