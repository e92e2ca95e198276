"""Text from a byte-level model, so that a person sees what a run has learned."""

from __future__ import annotations

import torch

from wan_diloco.models.decoder import Decoder

__all__ = ["generate"]


@torch.inference_mode()
def generate(model: Decoder, prompt: bytes, num_tokens: int, *, temperature: float, seed: int) -> bytes:
    """Continue a prompt, one byte at a time.

    The model sees at most its own sequence length back; nothing is cached between bytes, which is fast enough for
    the few hundred that a person reads.

    Args:
        model: A model over bytes; its mode and weights are left alone.
        prompt: At least one byte.
        num_tokens: How many bytes to add.
        temperature: 0 takes the likeliest byte; 1 draws as the model believes.
        seed: The only source of chance.

    Returns:
        The new bytes, without the prompt.

    Raises:
        ValueError: The prompt is empty, or the temperature negative.
    """
    if not prompt:
        raise ValueError("a model can't continue an empty prompt")
    if temperature < 0:
        raise ValueError(f"temperature must be 0 or more, not {temperature}")
    device = model.embed.weight.device
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(num_tokens):
        context_BT = torch.tensor([tokens[-model.config.sequence_length :]], device=device)
        logits_V = model(context_BT)[0, -1].float().cpu()
        if temperature == 0:
            tokens.append(int(logits_V.argmax()))
        else:
            chances_V = torch.softmax(logits_V / temperature, dim=-1)
            tokens.append(int(torch.multinomial(chances_V, 1, generator=generator)))
    return bytes(tokens[len(prompt) :])
