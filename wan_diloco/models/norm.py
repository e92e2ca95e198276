"""RMSNorm with its gradient written out, since torch composes it of small operations on a CPU.

On the CPU that makes a whole training step of a small model about a tenth faster; elsewhere torch's own is used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

__all__ = ["RMSNorm"]


class _CpuRMSNorm(torch.autograd.Function):
    """y = w * x / rms(x), keeping x / rms(x) for the way back instead of five intermediate tensors."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight_C: torch.Tensor, eps: float) -> torch.Tensor:
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        normed = x * scale
        ctx.save_for_backward(normed, weight_C, scale)
        out: torch.Tensor = normed * weight_C
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        normed, weight_C, scale = ctx.saved_tensors
        (grad,) = grads
        # dx = scale * (g w - n mean(g w n)), where n is the normed input: what moves x along n changes no output.
        products_NC = (grad * normed).flatten(0, -2)
        along = torch.mv(products_NC, weight_C).div_(weight_C.numel()).view_as(scale)
        grad_x = torch.addcmul(grad * weight_C, normed, along, value=-1).mul_(scale)
        return grad_x, products_NC.sum(0), None


class RMSNorm(nn.Module):
    """Divide each vector by its root mean square, then scale each channel by a learned gain.

    Args:
        dim: Channels, the last dimension.
        eps: Added to the mean square.
    """

    def __init__(self, dim: int, *, eps: float) -> None:
        """Start with gains of 1."""
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The normed input, of the same shape.

        Args:
            x: At least two dimensions, the last of size `dim`.
        """
        if x.is_cpu and x.dtype == torch.float32:
            normed: torch.Tensor = _CpuRMSNorm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
            return normed
        return functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
