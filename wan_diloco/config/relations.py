"""Rules between settings: what is refused, and what is accepted but has no effect.

Ranges of single settings are in `schema`. All broken relations are reported together, so that a
configuration is mended in one go.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from wan_diloco.config.addresses import exposed
from wan_diloco.errors import ConfigError
from wan_diloco.units import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wan_diloco.config.schema import RunConfig

__all__ = [
    "automatic_hidden",
    "automatic_overwritten_steps",
    "ignored_settings",
    "join_problems",
    "require_relations",
]


# Where a lock can be had: puts on condition, or the kernel's locks.
_STORES_LOCKED = frozenset({"s3", "s3a", "file"})
# Each round costs a few messages a learner and a flush of the disk; that many fit into a step of 100 ms.
_FRAGMENTS_A_STEP_MAX = 8
# Of a parameter in the journal, where nothing is compressed; scales included.
_CODEC_BITS = {"f32": 32.0, "bf16": 16.0, "int8": 8.125, "int4": 4.125, "e3m0": 4.125}


def automatic_hidden(dim: int, multiple: int) -> int:
    """8/3 of `dim`, rounded up to a multiple: a gated layer with as many parameters as a plain one of 4 `dim`."""
    return -(-8 * dim // (3 * multiple)) * multiple


def automatic_overwritten_steps(overlap_steps: int) -> int:
    """The overlap, and two steps for what comes late."""
    return overlap_steps + 2


def join_problems(problems: list[ConfigError]) -> ConfigError:
    """One error that says them all; a single problem stays as it is."""
    if len(problems) == 1:
        return problems[0]
    return ConfigError("; ".join(str(problem) for problem in problems))


def require_relations(config: RunConfig) -> None:
    """Check what involves more than one setting.

    Raises:
        ConfigError: At least one relation is broken; the text names every one.
    """
    problems = [*_model_problems(config), *_batch_problems(config), *_sync_problems(config), *_region_problems(config)]
    problems += _unlisted_problems(config)
    problem = exposed(config.syncer.listen, insecure=config.syncer.insecure)
    if problem is not None:
        problems.append(problem)
    problems += _store_problems(config)
    if problems:
        raise join_problems(problems)


def _model_problems(config: RunConfig) -> Iterator[ConfigError]:
    model = config.model
    if model.dim % model.heads:
        yield ConfigError(
            f"{model.dim} isn't a multiple of {model.heads} heads", where="model.dim", hint="model.heads must divide it"
        )
    elif (model.dim // model.heads) % 2:
        yield ConfigError(
            f"{model.dim} over {model.heads} heads leaves {model.dim // model.heads} for each, which is odd",
            where="model.dim",
            hint="the rotary embedding turns pairs",
        )


def _batch_problems(config: RunConfig) -> Iterator[ConfigError]:
    batch, length, passes = config.inner.batch_tokens, config.model.sequence_length, config.inner.accumulation
    if batch % (length * passes):
        yield ConfigError(
            f"{batch} isn't a multiple of {length * passes}",
            where="inner.batch_tokens",
            hint=f"model.sequence_length {length} times inner.accumulation {passes}",
        )
        return
    sequences = batch // (length * passes)
    ranks = {f"regions.{region.name}.ranks": region.ranks for region in config.regions}
    for where, num_ranks in {**ranks, "unlisted.ranks": config.unlisted.ranks}.items():
        if sequences % num_ranks:
            yield ConfigError(
                f"{num_ranks} ranks can't share {sequences} sequences evenly",
                where=where,
                hint="inner.batch_tokens / model.sequence_length / inner.accumulation must be a multiple of it",
            )
    if config.total_steps < 1:
        yield ConfigError(
            f"{config.run.tokens} tokens are less than one step",
            where="run.tokens",
            hint=f"a step of {len(config.regions)} regions takes {config.tokens_per_step}",
        )


def _sync_problems(config: RunConfig) -> Iterator[ConfigError]:
    sync, num_regions = config.sync, len(config.regions)
    if sync.quorum > num_regions:
        yield ConfigError(
            f"{sync.quorum} is more than the number of regions, {num_regions}",
            where="sync.quorum",
            hint=f"1 to {num_regions}",
        )
    elif config.lockstep and sync.quorum != num_regions:
        yield ConfigError(
            f"lockstep (sync.overlap_steps = 0) needs all {num_regions} regions, not {sync.quorum}",
            where="sync.quorum",
            hint=f"set it to {num_regions}, or sync.overlap_steps to 1 or more",
        )
    if config.lockstep and config.syncer.durability != "every-merge":
        yield ConfigError(
            f"{config.syncer.durability} gives versions up at a restart, and in lockstep learners wait for each",
            where="syncer.durability",
            hint="set it to every-merge, or sync.overlap_steps to 1 or more",
        )
    if sync.overlap_steps >= sync.period_steps:
        yield ConfigError(
            f"{sync.overlap_steps} isn't less than sync.period_steps, {sync.period_steps}",
            where="sync.overlap_steps",
            hint="a fragment must be installed before it is due again",
        )
    if sync.overwritten_steps_max < sync.overlap_steps:
        yield ConfigError(
            f"{sync.overwritten_steps_max} is less than sync.overlap_steps, {sync.overlap_steps}",
            where="sync.overwritten_steps_max",
            hint="an install overwrites at least the overlap; 0 means overlap + 2",
        )


def _region_problems(config: RunConfig) -> Iterator[ConfigError]:
    for name, times in Counter(region.name for region in config.regions).items():
        if times > 1:
            yield ConfigError(f"{times} regions are called {name!r}", where="regions", hint="names are identities")
    yield from _shard_problems(config)


def _shard_problems(config: RunConfig) -> Iterator[ConfigError]:
    num_regions, num_shards = len(config.regions), config.num_shards
    if num_shards < num_regions:
        yield ConfigError(
            f"{num_shards} shards aren't enough for {num_regions} regions",
            where="data.shards",
            hint=f"{num_regions} or more; what a run was begun with stays",
        )
        return
    owners: dict[int, list[str]] = {}
    for name, shard in config.shards.items():
        owners.setdefault(shard, []).append(name)
    for shard, names in sorted(owners.items()):
        if shard >= num_shards:
            yield ConfigError(
                f"there is no shard {shard}", where=f"regions.{names[0]}.shard", hint=f"0 to {num_shards - 1}"
            )
        elif len(names) > 1:
            yield ConfigError(
                f"shard {shard} is that of {' and '.join(names)}",
                where=f"regions.{names[-1]}.shard",
                hint="each region has one of its own; where none is given, it is that of its place in the list",
            )


def _unlisted_problems(config: RunConfig) -> Iterator[ConfigError]:
    if config.unlisted.learners_max and not config.spare_shards:
        yield ConfigError(
            f"must be more than {len(config.regions)} where unlisted.learners_max lets others in",
            where="data.shards",
            hint="each of them reads a part of the data that no region has",
        )
    if config.unlisted.learners_max and config.lockstep:
        yield ConfigError(
            "must be 0 in lockstep (sync.overlap_steps = 0)",
            where="unlisted.learners_max",
            hint="lockstep equals synchronous training of the listed regions",
        )


def _store_problems(config: RunConfig) -> Iterator[ConfigError]:
    syncer = config.syncer
    scheme = syncer.store.partition("://")[0]
    if syncer.store and scheme not in _STORES_LOCKED and not syncer.store_unlocked:
        yield ConfigError(
            f"{scheme}:// has no puts on condition, so that nothing would keep a second syncer from writing there",
            where="syncer.store",
            hint="take s3:// or file://, or set syncer.store_unlocked = true where nobody ever starts a second one",
        )


def ignored_settings(config: RunConfig) -> tuple[str, ...]:
    """One sentence for each setting that has no effect, or not the effect one would expect.

    Settings are compared with their defaults, so that a resolved configuration, where all are given, is as quiet
    as the one it came from.
    """
    return (*_sync_warnings(config), *_other_warnings(config))


def _sync_warnings(config: RunConfig) -> Iterator[str]:
    sync = config.sync
    defaults = type(sync)(overlap_steps=sync.overlap_steps)
    if config.lockstep:
        for key in ("grace_safety", "overwritten_steps_max", "alpha", "install"):
            if getattr(sync, key) != getattr(defaults, key):
                yield f"sync.{key} has no effect in lockstep (sync.overlap_steps = 0)"
    elif sync.install == "rebase":
        yield "sync.install = rebase keeps the overlap's work, which may then be merged twice: exactly-once is given up"
        if sync.alpha:
            yield "sync.alpha has no effect with sync.install = rebase"
    at_once = -(-sync.fragments // sync.period_steps)
    if at_once > _FRAGMENTS_A_STEP_MAX:
        yield (
            f"sync.fragments is {sync.fragments} and sync.period_steps {sync.period_steps}, so that {at_once} rounds "
            "fall due at once: where they can't keep up, fragments are merged less often than every period"
        )
    if sync.period_steps > config.total_steps:
        yield (
            f"sync.period_steps is {sync.period_steps} and the run has {config.total_steps} steps, "
            "so that some fragments are never merged"
        )


def _journal_bytes(config: RunConfig) -> int:
    """The most that a run writes into its journal: each learner's contributions, and the publications."""
    bits = _CODEC_BITS[config.wire.codec]
    merges = config.total_steps / config.sync.period_steps
    learners = len(config.regions) + min(config.unlisted.learners_max, len(config.spare_shards))
    return int(config.model.num_parameters * bits / 8 * merges * (learners + 1))


def _other_warnings(config: RunConfig) -> Iterator[str]:
    outer, model = config.outer, config.model
    if outer.momentum_warmup_steps and not outer.momentum:
        yield "outer.momentum_warmup_steps has no effect while outer.momentum is 0"
    if outer.merge == "mean" and outer.mean_patterns != type(outer)().mean_patterns:
        yield "outer.mean_patterns has no effect with outer.merge = mean"
    syncer = type(config.syncer)()
    if config.syncer.durability == "every-merge" and config.syncer.flush_every_s != syncer.flush_every_s:
        yield "syncer.flush_every has no effect with syncer.durability = every-merge"
    if config.syncer.journal_retention == "all":
        size = format_size(_journal_bytes(config))
        yield f"syncer.journal_retention = all drops nothing of the journal: about {size} by the end of the run"
    if config.syncer.store_endpoint and not config.syncer.store.startswith("s3"):
        yield "syncer.store_endpoint has no effect without a syncer.store on s3://"
    if config.syncer.store_unlocked and not config.syncer.store:
        yield "syncer.store_unlocked has no effect without syncer.store"
    given = model.hidden != automatic_hidden(model.dim, model.ffn_multiple)
    if given and model.ffn_multiple != type(model)().ffn_multiple:
        yield "model.ffn_multiple has no effect when model.hidden is given"
    if config.data.split == "era" and config.num_shards == 1:
        yield "data.split = era has no effect with one region"
    if config.num_shards > len(config.regions) and not config.unlisted.learners_max:
        yield (
            f"data.shards is {config.num_shards} and there are {len(config.regions)} regions: the shards of nobody are "
            "kept for regions that come later, and not read"
        )
    if config.inner.warmup_steps >= config.total_steps:
        yield (
            f"inner.warmup_steps is {config.inner.warmup_steps} and the run has {config.total_steps} steps, "
            "so that it never reaches inner.lr"
        )
