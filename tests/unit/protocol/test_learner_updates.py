"""What a learner's machine does with what comes down."""

from __future__ import annotations

import pytest

from tests.support.protocol import EAST, version
from tests.support.uplink import F0, Uplink, applied, installed, of, said, update
from wan_diloco.protocol.events import (
    ApplyUpdate,
    InstallUpdate,
    SendToSyncer,
    UpdateArrived,
    UpdateBroken,
)
from wan_diloco.protocol.messages import (
    MergedNote,
    RefusalReason,
    Report,
    ResyncRequest,
    UpdateHeader,
    UpdateReceived,
)
from wan_diloco.units import Incarnation, LocalStep


def test_an_update_is_applied_acknowledged_and_installed(uplink: Uplink) -> None:
    header = update(1, from_count=0)
    assert uplink.tell(UpdateArrived(header=header)) == [ApplyUpdate(header=header)]
    effects = uplink.tell(applied(1))
    assert UpdateReceived(fragment_id=F0, version=version(1), resync=0) in said(effects)
    assert InstallUpdate(fragment_id=F0, version=version(1), resync=0, merged_hi=None) in effects
    report = of(Report, said(uplink.boundary()))[0]
    assert isinstance(report, Report)
    assert (report.fragments[0].version, report.fragments[0].pending) == (version(0), version(1))
    report = of(Report, said(uplink.boundary(installed=(installed(1, 2),))))[0]
    assert isinstance(report, Report)
    assert (report.fragments[0].version, report.fragments[0].pending) == (version(1), None)
    assert report.fragments[0].step_lo == 2


def test_an_update_tells_what_became_of_ones_own_work(uplink: Uplink) -> None:
    uplink.uploads()
    mine = MergedNote(learner_id=EAST, incarnation=Incarnation(1), step_lo=LocalStep(0), step_hi=LocalStep(1))
    uplink.tell(UpdateArrived(header=update(1, from_count=0, merged=(mine,))))
    install = of(InstallUpdate, uplink.tell(applied(1)))[0]
    assert isinstance(install, InstallUpdate)
    assert install.merged_hi == 1


@pytest.mark.parametrize(
    "header",
    [update(0), update(1, from_count=0), update(2, from_count=0), update(1, resync=0)],
    ids=["old", "known", "from elsewhere", "known value"],
)
def test_what_is_known_or_does_not_fit_is_only_acknowledged(uplink: Uplink, header: UpdateHeader) -> None:
    uplink.tell(UpdateArrived(header=update(1, from_count=0)))
    uplink.tell(applied(1))
    effects = uplink.tell(UpdateArrived(header=header))
    assert effects == [SendToSyncer(message=UpdateReceived(fragment_id=F0, version=version(1), resync=0))]


def test_a_second_update_waits_for_the_first_to_be_told(uplink: Uplink) -> None:
    uplink.tell(UpdateArrived(header=update(1, from_count=0)))
    assert not uplink.tell(UpdateArrived(header=update(2)))


def test_an_update_that_does_not_decode_is_asked_for_as_the_value(uplink: Uplink) -> None:
    uplink.tell(UpdateArrived(header=update(1, from_count=0)))
    effects = uplink.tell(UpdateBroken(fragment_id=F0, version=version(1), reason=RefusalReason.DIGEST))
    assert said(effects) == [ResyncRequest(fragment_id=F0, reason=RefusalReason.DIGEST)]
    assert of(ApplyUpdate, uplink.tell(UpdateArrived(header=update(1, resync=1))))


def test_a_resync_is_installed_though_the_version_is_there(uplink: Uplink) -> None:
    uplink.tell(UpdateArrived(header=update(0, resync=1)))
    effects = uplink.tell(applied(0, resync=1))
    assert InstallUpdate(fragment_id=F0, version=version(0), resync=1, merged_hi=None) in effects
    uplink.boundary(installed=(installed(0, 1, resync=1),))
    header = uplink.uploads()
    assert header.key.step_lo == 1
