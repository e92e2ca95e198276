"""What a configuration means for the syncer: the model, its fragments, the maths on them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wan_diloco.algorithm.codec import codec_by_name
from wan_diloco.algorithm.layout import Layout, MergeRule, build_layout
from wan_diloco.algorithm.parameters import tensor_specs, unique_parameters
from wan_diloco.config import RunConfig
from wan_diloco.models import Decoder, DecoderConfig, build_decoder
from wan_diloco.protocol.admission import Terms
from wan_diloco.protocol.intake import FragmentSizes, IntakeRules
from wan_diloco.protocol.quorum import GracePolicy
from wan_diloco.protocol.schedule import Schedule
from wan_diloco.protocol.syncer_machine import SyncerSettings
from wan_diloco.syncer.fragments_store import Maths, OuterRule
from wan_diloco.units import FragmentId, GlobalStep, LearnerId

if TYPE_CHECKING:
    import torch

__all__ = ["decoder_config", "initial_model", "machine_settings", "model_layout", "model_tensors", "run_maths"]


def decoder_config(config: RunConfig) -> DecoderConfig:
    """The shape of the run's model."""
    return DecoderConfig(
        dim=config.model.dim,
        num_layers=config.model.layers,
        num_heads=config.model.heads,
        vocab_size=config.model.vocab,
        hidden_dim=config.model.hidden,
        tied=config.model.tied,
        rope_theta=config.model.rope_theta,
        sequence_length=config.model.sequence_length,
    )


def initial_model(config: RunConfig) -> Decoder:
    """The model with its initial weights: the same bits here and at every learner."""
    return build_decoder(decoder_config(config), config.run.seed)


def model_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The model's trainable tensors by their canonical names; they share the model's memory."""
    return {name: parameter.detach() for name, parameter in unique_parameters(model)}


def model_layout(config: RunConfig, model: torch.nn.Module) -> Layout:
    """How the model's tensors are divided into fragments."""
    return build_layout(
        tensor_specs(unique_parameters(model)),
        num_fragments=config.sync.fragments,
        merge=MergeRule(config.outer.merge),
        # The configuration says "whose name contains"; the layout takes shell patterns.
        mean_patterns=tuple(f"*{part}*" for part in config.outer.mean_patterns),
    )


def run_maths(config: RunConfig, layout: Layout) -> Maths:
    """Codec and outer optimizer of the run."""
    outer = OuterRule(
        lr=config.outer.lr, momentum=config.outer.momentum, warmup_steps=config.outer.momentum_warmup_steps
    )
    return Maths(layout, codec_by_name(config.wire.codec), outer)


def machine_settings(config: RunConfig, maths: Maths, initial_digests: tuple[str, ...]) -> SyncerSettings:
    """What the syncer's machine is given.

    Args:
        config: The run's.
        maths: Of the run's layout.
        initial_digests: Of each fragment of the initial weights.
    """
    learners = tuple(LearnerId(region.name) for region in config.regions)
    layout = maths.layout
    sizes = [maths.codec.sizes(maths.table(FragmentId(index))) for index in range(layout.num_fragments)]
    fragments = tuple(
        FragmentSizes(parameters=fragment.numel, codes_bytes=size.codes_bytes, scales_bytes=size.scales_bytes)
        for fragment, size in zip(layout.fragments, sizes, strict=True)
    )
    return SyncerSettings(
        terms=Terms(
            run=config.run.name,
            learners=learners,
            layout=layout.lines(),
            settings=config.agreement(),
            initial_digests=initial_digests,
        ),
        schedule=Schedule(num_fragments=layout.num_fragments, period_steps=config.sync.period_steps),
        policy=GracePolicy(
            quorum=config.sync.quorum,
            overlap_steps=config.sync.overlap_steps,
            safety=config.sync.grace_safety,
            bound_steps=config.sync.overwritten_steps_max,
        ),
        intake=IntakeRules(
            codec=config.wire.codec,
            fragments=fragments,
            batch_tokens=dict.fromkeys(learners, config.inner.batch_tokens),
        ),
        total_steps=GlobalStep(config.total_steps),
        lease_s=config.sync.membership_lease_s,
        start_timeout_s=config.run.start_timeout_s,
        shards=("",) * layout.num_fragments,
        lossless=maths.codec.lossless,
    )
