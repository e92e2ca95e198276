"""AdamW, its learning rate, and its state as named tensors: what a peer or a checkpoint is given, without pickle.

State exists from the start, at zero, so that its layout never depends on whether a step has been taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from wan_diloco.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

__all__ = [
    "build_adamw",
    "load_optimizer_tensors",
    "optimizer_tensors",
    "set_learning_rate",
    "zero_nonfinite_moments",
]

_STEP = "step"
_MOMENTS = ("exp_avg", "exp_avg_sq")


def build_adamw(
    model: nn.Module,
    *,
    learning_rate: float,
    weight_decay: float = 0.1,
    beta1: float = 0.9,
    beta2: float = 0.95,
    eps: float = 1e-8,
) -> torch.optim.AdamW:
    """AdamW over a model's trainable parameters, in one fused kernel.

    Args:
        model: Whose parameters to train, on the device where they'll stay.
        learning_rate: Until `set_learning_rate` says otherwise.
        weight_decay: For tensors of two dimensions and more; gains of norms aren't pulled to zero.
        beta1: Memory of the first moment.
        beta2: Memory of the second moment.
        eps: Added to the root of the second moment.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in parameters if parameter.dim() > 1], "weight_decay": weight_decay},
        {"params": [parameter for parameter in parameters if parameter.dim() <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(beta1, beta2), eps=eps, fused=True)
    for parameter in parameters:
        state: dict[str, torch.Tensor] = {_STEP: torch.zeros((), dtype=torch.float32, device=parameter.device)}
        state |= {moment: torch.zeros_like(parameter) for moment in _MOMENTS}
        optimizer.state[parameter] = state
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every parameter group this rate, before the step that it is for."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, torch.Tensor]:
    """The optimizer's state by name, `exp_avg.layers.0.ffn.w_up.weight` for one; the tensors themselves, not copies.

    Hyperparameters aren't in it: the configuration and the schedule are where they come from.

    Args:
        optimizer: From `build_adamw`.
        model: The model that it trains, for the names.
    """
    return {
        f"{key}.{name}": optimizer.state[parameter][key]
        for name, parameter in _trained(model)
        for key in (_STEP, *_MOMENTS)
    }


@torch.no_grad()
def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Put back what `optimizer_tensors` gave: all of it, or, when something is wrong, nothing.

    Args:
        optimizer: From `build_adamw`.
        model: The model that it trains.
        tensors: Copied from, on any device.

    Raises:
        CheckpointError: A tensor is missing, unknown, or has another shape or dtype.
    """
    own = optimizer_tensors(optimizer, model)
    if own.keys() != tensors.keys():
        missing, unknown = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
        raise CheckpointError(f"optimizer state doesn't fit the model: missing {missing[:3]}, unknown {unknown[:3]}")
    for name, tensor in own.items():
        given = tensors[name]
        if (given.shape, given.dtype) != (tensor.shape, tensor.dtype):
            raise CheckpointError(
                f"optimizer state {name} is {given.dtype} {tuple(given.shape)}, "
                f"the model wants {tensor.dtype} {tuple(tensor.shape)}"
            )
    for name, tensor in own.items():
        tensor.copy_(tensors[name])


@torch.no_grad()
def zero_nonfinite_moments(optimizer: torch.optim.Optimizer, model: nn.Module) -> tuple[str, ...]:
    """Start the moments of a parameter over where they hold a NaN or an infinity; a resync asks for it.

    Args:
        optimizer: From `build_adamw`.
        model: The model that it trains.

    Returns:
        Names of the parameters concerned; their step count starts over too, as the bias correction goes by it.
    """
    zeroed = []
    for name, parameter in _trained(model):
        state = optimizer.state[parameter]
        if not all(bool(torch.isfinite(state[moment]).all()) for moment in _MOMENTS):
            for key in (_STEP, *_MOMENTS):
                state[key].zero_()
            zeroed.append(name)
    return tuple(zeroed)


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
