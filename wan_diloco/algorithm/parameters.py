"""A model's trainable parameters, each once, under the name that every learner knows it by.

Compiling, DDP, FSDP and activation checkpointing wrap modules and so change names; tied weights give
one storage two names. Neither may reach the layout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Final

import torch
from torch import nn

from wan_diloco.algorithm.layout import TensorSpec
from wan_diloco.errors import ConfigError

__all__ = ["canonical_name", "tensor_specs", "unique_parameters"]

# Names that only wrappers give to what they wrap, wherever they stand.
_WRAPPED: Final = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def canonical_name(name: str) -> str:
    """A parameter's name without what wrappers put into it.

    "module" is a wrapper's name only at the front (DDP wraps whole models); a user's own
    `encoder.module.w` stays. A bare name can't tell a wrapper from a model whose outermost submodule is
    called "module": `unique_parameters` looks at the modules themselves and can.

    Raises:
        ConfigError: Nothing is left of the name.
    """
    parts = [part for part in name.split(".") if part not in _WRAPPED]
    while len(parts) > 1 and parts[0] == "module":
        del parts[0]
    if not any(parts):
        raise ConfigError("the parameter's name consists of wrappers only", where=name)
    return ".".join(parts)


def _named(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Parameter | torch.Tensor]]:
    """Parameters and buffers in order of registration, duplicates included, wrappers left out of the names."""
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        yield prefix + name, parameter
    for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
        yield prefix + name, buffer
    is_parallel = isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel)
    for name, child in module.named_children():
        is_wrapper = name in _WRAPPED or (is_parallel and name == "module")
        yield from _named(child, prefix if is_wrapper else f"{prefix}{name}.")


def _span(parameter: nn.Parameter) -> tuple[int, int] | None:
    """First and last address of a rank's own elements, or None if it has none in memory."""
    # A sharded parameter (DTensor) has no storage of its own; its local part has.
    local: torch.Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter.detach()
    if local.numel() == 0 or local.is_meta:
        return None
    extent = sum((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True)) + 1
    return local.data_ptr(), local.data_ptr() + extent * local.element_size()


def unique_parameters(module: nn.Module, *, allow_meta: bool = False) -> list[tuple[str, nn.Parameter]]:
    """All parameters that are trained, in order of registration, each storage once.

    Tied weights appear under the name that is registered first. Frozen parameters don't appear.

    Args:
        module: The model, wrapped or not; a wrapped one gives the same names as a plain one.
        allow_meta: Accept tensors without values, for who only wants names and shapes.

    Raises:
        ConfigError: A parameter or buffer is on the meta device, two parameters share a part of their
            storage, or two different ones have one name; the message names them.
    """
    chosen: list[tuple[str, nn.Parameter]] = []
    seen: set[int] = set()
    spans: dict[tuple[int, int], str] = {}
    for name, tensor in _named(module, ""):
        if tensor.is_meta and not allow_meta:
            raise ConfigError("the tensor is on the meta device and has no values", where=name)
        if not isinstance(tensor, nn.Parameter) or not tensor.requires_grad or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        span = _span(tensor)
        if span is not None:
            if span in spans:
                continue
            spans[span] = name
        chosen.append((name, tensor))
    for (left, left_name), (right, right_name) in pairwise(sorted(spans.items())):
        if left[1] > right[0]:
            raise ConfigError(f"it shares a part of its storage with {right_name}", where=left_name)
    for name, count in Counter(name for name, _ in chosen).items():
        if count > 1:
            raise ConfigError("two parameters have this name once wrappers are left out", where=name)
    return chosen


def tensor_specs(parameters: Iterable[tuple[str, torch.Tensor]]) -> list[TensorSpec]:
    """What `build_layout` needs to know of named parameters.

    Args:
        parameters: As from `unique_parameters`; shapes are whole, also of sharded ones.
    """
    return [
        TensorSpec(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
        for name, tensor in parameters
    ]
