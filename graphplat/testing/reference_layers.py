"""The weights and layers of the reference decoder.

Kernels are few, since the decoder is benchmarked: queries, keys and values come from one product,
and the products add the residuals themselves.
"""

from __future__ import annotations

import math

import attrs
import torch
from torch.nn import functional

from graphplat.errors import ConfigError


@attrs.frozen(kw_only=True)
class ReferenceShape:
    """The sizes of a Llama-like decoder."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    tied: bool = True
    """Whether the head shares the embedding's weight."""
    rope_theta: float = 10000.0
    eps: float = 1e-5

    def __attrs_post_init__(self) -> None:
        if self.hidden % self.heads or self.heads % self.kv_heads or self.head_dim % 2:
            raise ConfigError(
                f"{self.heads} heads and {self.kv_heads} key-value heads do not divide {self.hidden} evenly",
                field="heads",
            )

    @property
    def head_dim(self) -> int:
        """Features of one head."""
        return self.hidden // self.heads

    @property
    def qkv_heads(self) -> int:
        """Heads of one fused projection: queries, keys, values."""
        return self.heads + 2 * self.kv_heads

    @property
    def parameters(self) -> int:
        """Weights of the whole decoder."""
        per_layer = self.hidden * (self.head_dim * (self.qkv_heads + self.heads) + 3 * self.intermediate + 2)
        return self.layers * per_layer + self.hidden * (1 + self.vocab * (1 if self.tied else 2))


SHAPES = {
    "tiny": ReferenceShape(layers=2, hidden=32, heads=4, kv_heads=2, intermediate=64, vocab=96),
    "135M": ReferenceShape(layers=30, hidden=576, heads=9, kv_heads=3, intermediate=1536, vocab=49152),
    "8B": ReferenceShape(
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        intermediate=14336,
        vocab=128256,
        tied=False,
        rope_theta=500000.0,
    ),
}
"""Shapes by name: one for tests, SmolLM2-135M's, Llama-3-8B's."""


class Layer(torch.nn.Module):
    """One decoder layer's weights, and what it does before and after attention."""

    def __init__(self, shape: ReferenceShape) -> None:
        super().__init__()
        dim = shape.head_dim
        self.shape = shape
        self.input_norm = _weight(shape.hidden)
        self.qkv = _weight(shape.qkv_heads * dim, shape.hidden)
        self.output = _weight(shape.hidden, shape.heads * dim)
        self.post_norm = _weight(shape.hidden)
        self.gate_up = _weight(2 * shape.intermediate, shape.hidden)
        self.down = _weight(shape.hidden, shape.intermediate)

    def project(self, hidden: torch.Tensor, rope: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        """Rotated queries and keys, and values: ``(tokens, heads + 2 * kv_heads, head_dim)``.

        They lie in *out*, ``(tokens, (heads + 2 * kv_heads) * head_dim)``, if that is given.
        """
        normed = functional.rms_norm(hidden, self.input_norm.shape, self.input_norm, self.shape.eps)
        flat = torch.mm(normed, self.qkv.t(), out=out)
        qkv = flat.view(-1, self.shape.qkv_heads, self.shape.head_dim)
        rotate(qkv[:, : self.shape.heads + self.shape.kv_heads], rope)
        return qkv

    def finish(self, hidden: torch.Tensor, attended: torch.Tensor) -> None:
        """Add the attention's output and then the feed-forward's to *hidden*, in place."""
        hidden.addmm_(attended, self.output.t())
        normed = functional.rms_norm(hidden, self.post_norm.shape, self.post_norm, self.shape.eps)
        gate, up = functional.linear(normed, self.gate_up).chunk(2, -1)
        hidden.addmm_(functional.silu(gate).mul_(up), self.down.t())


class ReferenceDecoder(torch.nn.Module):
    """The weights of a decoder of *shape*, random from *seed*.

    Up to a billion of them are drawn on the host in float32, so that every device and
    dtype gets the same ones; more are drawn on *device*.
    """

    rope: torch.Tensor

    def __init__(
        self, shape: ReferenceShape, *, max_len: int, device: torch.device, dtype: torch.dtype, seed: int
    ) -> None:
        super().__init__()
        self.shape = shape
        with torch.device("meta"):
            self.embedding = _weight(shape.vocab, shape.hidden)
            self.stack = tuple(Layer(shape) for _ in range(shape.layers))
            self.layers = torch.nn.ModuleList(self.stack)
            self.norm = _weight(shape.hidden)
            self.head = self.embedding if shape.tied else _weight(shape.vocab, shape.hidden)
        source = torch.device("cpu") if shape.parameters <= 1_000_000_000 else device
        generator = torch.Generator(source).manual_seed(seed)
        for module in self.modules():
            for name, meta in list(module.named_parameters(recurse=False)):
                drawn = _drawn(meta.shape, generator, source, dtype).to(device)
                setattr(module, name, torch.nn.Parameter(drawn, requires_grad=False))
        if shape.tied:
            self.head = self.embedding
        table = rope_table(max_len, shape.head_dim, shape.rope_theta)
        self.register_buffer("rope", table.to(device=device, dtype=dtype), persistent=False)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``(rows, vocab)`` from ``(rows, hidden)``."""
        normed = functional.rms_norm(hidden, self.norm.shape, self.norm, self.shape.eps)
        return functional.linear(normed, self.head)

    @torch.no_grad()
    def dense(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits ``(tokens, vocab)`` of one whole prompt, without any cache: what all else is compared to."""
        shape = self.shape
        hidden = functional.embedding(tokens, self.embedding)
        rope = self.rope[: tokens.shape[0]]
        for layer in self.stack:
            heads = layer.project(hidden, rope, None).transpose(0, 1)
            query, key, value = torch.split(heads, [shape.heads, shape.kv_heads, shape.kv_heads])
            repeats = shape.heads // shape.kv_heads
            key, value = key.repeat_interleave(repeats, 0), value.repeat_interleave(repeats, 0)
            found = functional.scaled_dot_product_attention(
                query[None], key[None], value[None], is_causal=True
            )
            layer.finish(hidden, found[0].transpose(0, 1).flatten(1))
        return self.logits(hidden)


def _weight(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(shape), requires_grad=False)


def _drawn(
    shape: torch.Size, generator: torch.Generator, source: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """Norm weights near one; others of a spread that keeps activations near one."""
    fan_in = shape[-1] if len(shape) > 1 else 100
    drawn: torch.Tensor = torch.randn(shape, generator=generator, device=source) / math.sqrt(fan_in)
    return (drawn if len(shape) > 1 else drawn + 1).to(dtype)


def rope_table(max_len: int, head_dim: int, theta: float) -> torch.Tensor:
    """Cosines, and sines with the sign that :func:`rotate` needs: ``(max_len, 2, 1, head_dim)``."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(max_len, dtype=torch.float64), frequencies)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)), 1)[:, :, None].float()


def rotate(heads: torch.Tensor, rope: torch.Tensor) -> None:
    """Rotate ``(tokens, heads, head_dim)`` in place by ``(tokens, 2, 1, head_dim)``."""
    turned = heads.roll(heads.shape[-1] // 2, -1)
    heads.mul_(rope[:, 0]).addcmul_(turned, rope[:, 1])
