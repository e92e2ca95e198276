"""Messages that make no sense by themselves can't be built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf, nan

import pytest

from tests.support.protocol import contribution, hello, report, version
from wan_diloco.protocol.messages import (
    ContributionKey,
    FragmentReport,
    SegmentKind,
    UpdateHeader,
    UpdateSegment,
)
from wan_diloco.units import FragmentId, Incarnation, LearnerId, LocalStep


def segment(kind: SegmentKind, from_count: int, to_count: int, *, codes_bytes: int = 1) -> UpdateSegment:
    return UpdateSegment(
        kind=kind,
        from_version=version(from_count),
        to_version=version(to_count),
        digest="d",
        codec="int4",
        codes_bytes=codes_bytes,
        scales_bytes=1,
        merged=(),
    )


def difference(from_count: int, to_count: int) -> UpdateSegment:
    return segment(SegmentKind.DIFFERENCE, from_count, to_count)


def value(to_count: int) -> UpdateSegment:
    return segment(SegmentKind.VALUE, to_count, to_count)


def update(*segments: UpdateSegment, fragment_id: int = 0, resync: int = 0) -> UpdateHeader:
    return UpdateHeader(fragment_id=FragmentId(fragment_id), resync=resync, segments=segments)


def key(learner_id: str = "east", incarnation: int = 1, fragment_id: int = 0, step_lo: int = 0) -> ContributionKey:
    return ContributionKey(
        learner_id=LearnerId(learner_id),
        incarnation=Incarnation(incarnation),
        fragment_id=FragmentId(fragment_id),
        step_lo=LocalStep(step_lo),
    )


def fragment_report(fragment_id: int = 0, resync: int = 0, step_lo: int = 0, tokens_lo: int = 0) -> FragmentReport:
    return FragmentReport(
        fragment_id=FragmentId(fragment_id),
        version=version(0),
        pending=None,
        resync=resync,
        step_lo=LocalStep(step_lo),
        tokens_lo=tokens_lo,
    )


NONSENSE: list[Callable[[], object]] = [
    lambda: key(learner_id=""),
    lambda: key(incarnation=0),
    lambda: key(fragment_id=-1),
    lambda: key(step_lo=-1),
    lambda: hello(LearnerId("")),
    lambda: hello(run=""),
    lambda: hello(incarnation=-1),
    lambda: hello(local_step=-1),
    lambda: fragment_report(fragment_id=-1),
    lambda: fragment_report(resync=-1),
    lambda: fragment_report(step_lo=-1),
    lambda: fragment_report(tokens_lo=-1),
    lambda: report(-1),
    lambda: report(1, tokens=-1),
    lambda: report(1, step_time_s=-0.1),
    lambda: report(1, step_time_s=inf),
    lambda: report(1, step_time_s=nan),
    lambda: contribution(step_lo=5, step_hi=4),
    lambda: contribution(tokens_lo=5, tokens_hi=4),
    lambda: contribution(tokens_lo=-1),
    lambda: contribution(codes_bytes=-1),
    lambda: contribution(scales_bytes=-1),
    lambda: replace(contribution(), unit_hi=-1),
    lambda: segment(SegmentKind.VALUE, 0, 1, codes_bytes=-1),
    lambda: difference(1, 1),
    lambda: difference(2, 1),
    update,
    lambda: update(value(1), fragment_id=-1),
    lambda: update(value(1), resync=-1),
    lambda: update(difference(0, 1), value(2)),
    lambda: update(difference(0, 1), difference(2, 3)),
    lambda: version(-1),
    lambda: version(0, epoch=-1),
]


@pytest.mark.parametrize("number", range(len(NONSENSE)))
def test_nonsense_is_refused_at_birth(number: int) -> None:
    with pytest.raises(ValueError, match=r"never|names|start|finite|backwards|newer|segment|gaps"):
        NONSENSE[number]()


def test_a_chain_leads_where_its_last_segment_leads() -> None:
    assert update(value(2), difference(2, 3), difference(3, 5)).to_version == version(5)


def test_steps_and_tokens_are_what_lies_between_the_counters() -> None:
    header = contribution(step_lo=3, step_hi=10, tokens_lo=300, tokens_hi=950)
    assert (header.steps, header.tokens) == (7, 650)


def test_totals_beyond_32_bits_stay_whole() -> None:
    assert contribution(tokens_lo=0, tokens_hi=10_251_184_259).tokens == 10_251_184_259
