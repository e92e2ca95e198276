"""A run that is as small as one can be, for tests of the syncer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from wan_diloco.algorithm.codec import Payload
from wan_diloco.config import RunConfig, parse_config
from wan_diloco.models import build_model, model_tensors, run_layout
from wan_diloco.protocol.messages import ContributionHeader, ContributionKey
from wan_diloco.syncer.fragments_store import Maths
from wan_diloco.syncer.plan import cutting_for, run_maths
from wan_diloco.syncer.restore import Restored, open_state
from wan_diloco.syncer.store_link import StoreLink
from wan_diloco.units import FragmentId, Incarnation, LearnerId, LocalStep, RoundId, Version

BATCH_TOKENS = 32


def tiny_config(**tables: dict[str, Any]) -> RunConfig:
    """A tiny run of two regions; keyword arguments are laid over its tables."""
    tree: dict[str, Any] = {
        "run": {"name": "tiny", "tokens": BATCH_TOKENS * 2 * 100},
        "model": {"dim": 16, "layers": 1, "heads": 2, "sequence_length": 16},
        "inner": {"batch_tokens": BATCH_TOKENS},
        "outer": {"lr": 0.7, "momentum": 0.5, "merge": "rda"},
        "sync": {"fragments": 2, "period_steps": 4, "overlap_steps": 2, "quorum": 2, "membership_lease": "1h"},
        "regions": [{"name": "east"}, {"name": "west"}],
    }
    for name, table in tables.items():
        tree[name] = {**tree.get(name, {}), **table}
    return parse_config(tree)


def maths_of(config: RunConfig) -> Maths:
    """The maths of a run."""
    return run_maths(config, run_layout(config))


def open_tiny(
    folder: Path,
    config: RunConfig,
    *,
    resume: bool = False,
    refragment: bool = False,
    link: StoreLink | None = None,
) -> Restored:
    """Open a state folder as the syncer's process does."""
    return open_state(
        folder,
        resume=resume,
        maths=maths_of(config),
        cutting=cutting_for(config, allowed=refragment),
        initial=lambda: model_tensors(build_model(config)),
        keep_updates=config.syncer.keep_updates,
        agreement=config.agreement(),
        link=link,
    )


def close(restored: Restored) -> None:
    """What the process does at its end."""
    restored.journal.close()
    restored.lock.release()


def small_delta(maths: Maths, fragment_id: FragmentId, seed: int) -> Payload:
    """An encoded delta that nobody else has."""
    values_N = torch.randn(maths.fragment(fragment_id).numel, generator=torch.Generator().manual_seed(seed)) * 1e-2
    return maths.codec.encode(values_N, maths.table(fragment_id))


def contribution(
    maths: Maths,
    learner: str,
    fragment_id: FragmentId,
    *,
    step_lo: int,
    step_hi: int,
    base: Version,
    round_id: int = 0,
    attempt: int = 1,
    incarnation: int = 1,
    units_before: int = 0,
) -> ContributionHeader:
    """The header of a full-batch contribution; its life began with its steps so many units before."""
    sizes = maths.codec.sizes(maths.table(fragment_id))
    return ContributionHeader(
        key=ContributionKey(
            learner_id=LearnerId(learner),
            incarnation=Incarnation(incarnation),
            fragment_id=fragment_id,
            step_lo=LocalStep(step_lo),
        ),
        round_id=RoundId(round_id),
        attempt=attempt,
        base=base,
        step_hi=LocalStep(step_hi),
        tokens_lo=step_lo * BATCH_TOKENS,
        tokens_hi=step_hi * BATCH_TOKENS,
        unit_hi=step_hi + units_before,
        codec=maths.codec.name,
        codes_bytes=sizes.codes_bytes,
        scales_bytes=sizes.scales_bytes,
    )
