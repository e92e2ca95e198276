"""All transitions of the machines in the star: what each event can lead to, by what the machines' code can do."""

from __future__ import annotations

__all__ = ["BY_SETTLING", "CLOSES", "LEARNER", "MISSING", "RESTARTS", "SHOWN", "SYNCER", "UNREACHABLE", "UPDATES"]

# One publication; several; the value, to who lags too far; the value, whatever is there.
UPDATES = ("update difference", "update chain", "update value", "update resync")
_MEMBERS = ("record MembershipChanged", "say Pace")
# Who was silent for a lease speaks again: rounds without a quorum ask anew, with it.
_HEARD = (*_MEMBERS, "say Pull")
_CLOSES = ("record RoundClosed", "StartMerge")
_ENDS = ("record RunEnded", "say Stop", "EndRun")
# Whoever waits for inner moments is given a donor as soon as one is there, and told when there is none.
_DONORS = ("say Donate", "say NoDonor", "say DonationOver")

SYNCER: dict[str, tuple[str, ...]] = {
    "start": ("record SyncerStarted", "record ShardsAssigned", "StartMerge", "record RunEnded", "EndRun"),
    "LearnerConnected": ("nothing",),
    "LearnerDisconnected": ("nothing", "say DonationOver", *_CLOSES),
    "Hello": (
        "nothing",
        "record LearnerAdmitted",
        "record LeaseEnded",
        "say Welcome",
        "say Refused",
        "CloseSession",
        "record RunStarted",
        "say Start",
        "say DonationOver",
        *_HEARD,
        *_CLOSES,
        *_ENDS,
    ),
    # A second report tells of the first step, with which a grace that had no bound is over.
    "Report": ("nothing", *_HEARD, *UPDATES, "CloseSession", *_CLOSES, *_ENDS),
    "Declined": ("nothing", *_HEARD, *_CLOSES, *_ENDS, "CloseSession"),
    "UpdateReceived": ("nothing", *_HEARD, *UPDATES, "CloseSession"),
    "ResyncRequest": ("nothing", "update resync", "CloseSession"),
    "StateWanted": ("nothing", *_DONORS, "CloseSession"),
    "StateReady": ("nothing", "say StateOffered", "CloseSession"),
    "StateDeclined": ("nothing", *_DONORS, "CloseSession"),
    "StateSettled": ("nothing", *_DONORS[:1], "say DonationOver", "CloseSession"),
    "Goodbye": ("nothing", "CloseSession", "say DonationOver", *_MEMBERS, *_CLOSES),
    "CallsRefused": ("nothing",),
    "UploadOffered": (
        "AcceptUpload",
        "RefuseUpload",
        "record ContributionJournalled",
        "say Acknowledged",
        "say ContributionRefused",
        "update resync",
        "CloseSession",
        *_HEARD,
        *_CLOSES,
    ),
    "UploadStored": (
        "nothing",
        "record ContributionJournalled",
        "say Acknowledged",
        "say ContributionRefused",
        "record ContributionDiscarded",
        *_CLOSES,
    ),
    "UploadFailed": ("nothing", "say ContributionRefused", *UPDATES),
    "MergeFinished": ("record FragmentPublished", *UPDATES[:3], "say Pull", *_ENDS),
    "MergeFailed": ("nothing",),
    "ContributionsUnreadable": ("record ContributionsLost", "StartMerge", "say Pull"),
    "TransferBroken": ("nothing", *UPDATES),
    "IngressChanged": ("nothing", "say Pace"),
    "TimerFired": ("nothing", *_HEARD, *_CLOSES, "record RunStarted", "say Start", "say NoDonor", "say DonationOver"),
}

_MOMENTS = ("say StateWanted", "say StateSettled")
_GIVES = ("say StateReady", "GiveState")

LEARNER: dict[str, tuple[str, ...]] = {
    "Connected": ("say Hello",),
    "ConnectionLost": ("nothing",),
    "Welcome": (
        "SetPace",
        "say Report",
        "StartUpload",
        "DropUpload",
        "AllowSteps",
        "SetRoundTrip",
        "RequestSnapshot",
        *_MOMENTS,
    ),
    "Refused": ("ExitLearner",),
    # The pace only where the start is told again, after a disk was lost: learners have taken steps since the first.
    "Start": ("nothing", "SetPace", "AllowSteps"),
    "Pace": ("nothing", "SetPace", "LimitUplink", "AllowSteps", "SetRoundTrip"),
    "Pull": ("nothing", "RequestSnapshot", "say Declined"),
    "Acknowledged": ("nothing", "DropUpload", "RequestSnapshot"),
    "ContributionRefused": ("nothing", "DropUpload", "RequestSnapshot"),
    "StateOffered": ("nothing", "FetchState", "say StateWanted"),
    "NoDonor": ("nothing", "say StateSettled", "ReleaseState", "AllowSteps"),
    "Donate": ("nothing", "PinState", *_GIVES, "say StateDeclined"),
    "DonationOver": ("nothing", "EndGiving"),
    "Stop": ("ExitLearner",),
    "BoundaryPassed": (
        "nothing",
        "say Report",
        "StartUpload",
        "say Declined",
        "AllowSteps",
        "RequestSnapshot",
        "DescribeState",
        "ReleaseState",
        "say StateSettled",
    ),
    "UpdateArrived": ("nothing", "ApplyUpdate", "say UpdateReceived"),
    "UpdateApplied": ("say UpdateReceived", "InstallUpdate"),
    "UpdateBroken": ("nothing", "say ResyncRequest"),
    "UploadBroken": ("nothing",),
    "StateDescribed": ("nothing", *_GIVES, "say StateDeclined", "ReleaseState"),
    "StateProgress": ("nothing",),
    "StateFetched": ("nothing", "InstallMoments"),
    "StateBroken": ("nothing", "say StateWanted"),
    "TimerFired": ("Connect", "say Report", "StartUpload", "ReleaseState", "say StateSettled"),
}

# What the machines do once more after every event, so that any may show it at a timer's instant, or after silence.
BY_SETTLING: dict[str, frozenset[str]] = {
    "syncer": frozenset(
        (*_HEARD, *_CLOSES, *_DONORS, "record ContributionDiscarded", "record RunStarted", "say Start")
    ),
    "learner": frozenset(
        ("StartUpload", "RequestSnapshot", "AllowSteps", "SetRoundTrip", "say Report", "Connect", "ReleaseState")
    ),
}

# How the reasons with which a session is ended begin.
CLOSES = (
    "refused",
    "no standing session",
    "a second Hello",
    "the run has ended",
    "a newer session of the same learner",
    "goodbye",
    "a contribution in another's name",
    "a report that can't be true",
    "its data lease has ended",
)
# Why a member isn't fresh in a round, besides that it declined.
MISSING = ("late", "away", "refused")
RESTARTS = (
    "rounds closed and not published",
    "rounds due and not closed",
    "work journalled and not merged",
    "after the end",
    "a torn record",
)
SHOWN = (
    "start",
    "step",
    "quorum",
    "member",
    "leap",
    "lease",
    "fragment",
    "finite",
    "storage",
    "end",
    "syncer",
    "donor",
    "moments",
    "foreign",
    "copy",
)

# What can't be in the star, and why.
UNREACHABLE: dict[str, str] = {
    "declined: round_closed": "no machine says it: work that answers a closed round rides along in the next",
    "missing: round_closed": "as above",
    "discarded: removed": "regions are taken out of a run between two starts, and here all have one configuration",
    "discarded: refragmented": "as above",
    "syncer: -> record Refragmented": "its driver writes it, where the values are, before the machine begins",
    "syncer: -> TakenOver": "a world has one syncer at a time: nobody was welcomed in a later term than its own",
    "learner: -> RefuseSyncer": "as above",
    "syncer: -> StateMissing": "a disk that is lost in a world has a copy elsewhere: no syncer knows less than that",
    "shown: foreign": "as above",
    "shown: copy": "a world has one syncer at a time, and a process that starts again begins a higher term",
    "learner: -> say Goodbye": "its driver says it, at SIGTERM",
}
