"""Why one end says no to the other.

Part of `messages`, which says what all of them have in common.
"""

from __future__ import annotations

from enum import StrEnum

__all__ = ["DeclineReason", "RefusalReason"]


class DeclineReason(StrEnum):
    """Why a learner answers a pull without a contribution."""

    ZERO_STEPS = "zero_steps"
    BUSY = "busy"
    ROUND_CLOSED = "round_closed"
    # Steps were taken, and none had a loss and gradients that are finite.
    NO_TOKENS = "no_tokens"


class RefusalReason(StrEnum):
    """Why a syncer refuses a learner, a contribution or a call; each is a label of `rejected_total`."""

    # A learner, at Hello.
    UNKNOWN_LEARNER = "unknown_learner"
    FENCED = "fenced"
    PROTOCOL_VERSION = "protocol_version"
    OTHER_RUN = "other_run"
    OTHER_LAYOUT = "other_layout"
    OTHER_SETTINGS = "other_settings"
    OTHER_WEIGHTS = "other_weights"
    # Of learners that nobody listed: as many names as may be have taken part; all their data are lent to live ones.
    TOO_MANY_LEARNERS = "too_many_learners"
    NO_SHARD = "no_shard"
    # A contribution.
    NON_FINITE = "non_finite"
    WRONG_LENGTH = "wrong_length"
    WRONG_CODEC = "wrong_codec"
    WRONG_VERSION = "wrong_version"
    FOREIGN_EPOCH = "foreign_epoch"
    STALE_BASE = "stale_base"
    LATE = "late"
    TOO_MANY_TOKENS = "too_many_tokens"
    NO_STEPS = "no_steps"
    BAD_CHECKSUM = "bad_checksum"
    GARBAGE = "garbage"
    DIGEST = "digest"
    # More than its sender can have done, or than it said before.
    IMPLAUSIBLE = "implausible"
    # It contains data that its life was not given: of an earlier life of its sender.
    OTHER_DATA = "other_data"
    # A call.
    OTHER_LEARNER = "other_learner"
    NO_HELLO = "no_hello"
    TOO_MANY_CALLS = "too_many_calls"
