"""Hand-written models of the zoo, in the shapes their families have: small, complete, and free of
tricks.

Each ``forward`` returns the scalar loss, or ``(loss, outputs)``. Legend: B batch, C channels, H and
W height and width, S target sequence, T source sequence, D hidden, V vocabulary.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    """Regression with two hidden layers; returns ``(loss, prediction)``."""

    def __init__(
        self, in_size: int = 12, hidden_size: int = 16, out_size: int = 8, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.up = nn.Linear(in_size, hidden_size)
        self.middle = nn.Linear(hidden_size, hidden_size, bias=False)
        self.down = nn.Linear(hidden_size, out_size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        hidden = F.gelu(self.up(x))
        # A square residual: both sides of `middle` are one dim.
        hidden = hidden + torch.tanh(self.middle(hidden))
        prediction = self.down(self.dropout(hidden))
        return F.mse_loss(prediction, target), prediction


class ResNetBlock(nn.Module):
    """Two 3x3 convolutions with batch norm beside an identity or a 1x1 projection."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False),
                nn.BatchNorm2d(out_channels),
            )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)), inplace=True)
        out = self.norm2(self.conv2(out))
        out += self.shortcut(x)
        return F.relu(out)


class ResNet(nn.Module):
    """Classifier with batch norm in training mode; returns ``(loss, logits)``."""

    def __init__(self, channels: int = 8, num_classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
        )
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = ResNetBlock(channels, channels, stride=1)
        self.layer2 = ResNetBlock(channels, 2 * channels, stride=2)
        self.average = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(2 * channels, num_classes)

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.layer2(self.layer1(self.pool(self.stem(images))))
        logits = self.head(torch.flatten(self.average(x), 1))
        return F.cross_entropy(logits, labels), logits


class UNetBlock(nn.Module):
    """Group norm, SiLU, convolution, shifted by a time embedding."""

    def __init__(self, in_channels: int, out_channels: int, groups: int, time_size: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.norm = nn.GroupNorm(groups, out_channels)
        self.time = nn.Linear(time_size, out_channels)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return F.silu(self.norm(self.conv(x)) + self.time(time)[:, :, None, None])


class UNet(nn.Module):
    """Denoiser: one level down, one up, the skip joined by ``cat``; returns the loss."""

    def __init__(self, channels: int = 8, groups: int = 4, time_size: int = 8) -> None:
        super().__init__()
        self.time_size = time_size
        self.time = nn.Sequential(nn.Linear(time_size, time_size), nn.SiLU())
        self.enter = UNetBlock(3, channels, groups, time_size)
        self.down = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1)
        self.middle = UNetBlock(2 * channels, 2 * channels, groups, time_size)
        self.up = nn.ConvTranspose2d(2 * channels, channels, 2, stride=2)
        self.leave = UNetBlock(2 * channels, channels, groups, time_size)
        self.out = nn.Conv2d(channels, 3, 1)

    def forward(self, images: Tensor, steps: Tensor, noise: Tensor) -> Tensor:
        time = self.time(sinusoid(steps, self.time_size))
        skip = self.enter(images + noise, time)  # [B, C, H, W]
        x = self.middle(self.down(skip), time)  # [B, 2C, H/2, W/2]
        x = torch.cat([self.up(x), skip], dim=1)  # [B, 2C, H, W]
        return F.mse_loss(self.out(self.leave(x, time)), noise)


def sinusoid(steps: Tensor, size: int) -> Tensor:
    """Sinusoidal embedding of integer diffusion steps: [B] -> [B, size]."""
    frequencies = torch.exp(
        -math.log(10000.0)
        * torch.arange(size // 2, dtype=torch.float32, device=steps.device)
        / (size // 2)
    )
    angles = steps[:, None].float() * frequencies[None, :]
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class DiTBlock(nn.Module):
    """Transformer block whose norms are scaled and shifted by the conditioning (adaLN-zero)."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.proj = nn.Linear(hidden_size, hidden_size)
        self.norm2 = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(hidden_size, 4 * hidden_size),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * hidden_size, hidden_size),
        )
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 6 * hidden_size))

    def attention(self, x: Tensor) -> Tensor:
        batch, seq, hidden = x.shape
        qkv = (
            self.qkv(x)
            .reshape(batch, seq, 3, self.num_heads, hidden // self.num_heads)
            .permute(2, 0, 3, 1, 4)
        )
        query, key, value = qkv.unbind(0)
        return self.proj(
            F.scaled_dot_product_attention(query, key, value)
            .transpose(1, 2)
            .reshape(batch, seq, hidden)
        )

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition).chunk(6, dim=1)
        x = x + gate1.unsqueeze(1) * self.attention(modulate(self.norm1(x), shift1, scale1))
        return x + gate2.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift2, scale2))


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Scale and shift every token of [B, S, D] by its sample's [B, D]."""
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class DiT(nn.Module):
    """Diffusion transformer on image patches, conditioned on step and class; returns the loss."""

    def __init__(
        self,
        image_size: int = 8,
        patch_size: int = 2,
        hidden_size: int = 16,
        num_heads: int = 4,
        num_classes: int = 6,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.patch = nn.Conv2d(3, hidden_size, patch_size, stride=patch_size)
        self.position = nn.Parameter(
            0.02 * torch.randn(1, (image_size // patch_size) ** 2, hidden_size)
        )
        self.time = nn.Linear(hidden_size, hidden_size)
        self.label = nn.Embedding(num_classes, hidden_size)
        self.blocks = nn.ModuleList(DiTBlock(hidden_size, num_heads) for _ in range(2))
        self.norm = nn.LayerNorm(hidden_size, eps=1e-6)
        self.out = nn.Linear(hidden_size, 3 * patch_size**2)
        self.shuffle = nn.PixelShuffle(patch_size)

    def forward(self, images: Tensor, steps: Tensor, labels: Tensor, noise: Tensor) -> Tensor:
        x = self.patch(images + noise)  # [B, D, H/p, W/p]
        height, width = x.shape[-2:]
        x = x.flatten(2).transpose(1, 2) + self.position  # [B, S, D]
        condition = self.time(sinusoid(steps, self.hidden_size)) + self.label(labels)  # [B, D]
        for block in self.blocks:
            x = block(x, condition)
        # [B, 3pp, H/p, W/p].
        x = self.out(self.norm(x)).transpose(1, 2).unflatten(2, (height, width))
        return F.mse_loss(self.shuffle(x), noise)


class Attention(nn.Module):
    """Multi-head attention written out: scores, mask, softmax, weighted sum. Self-attention when
    ``memory`` is ``x``.
    """

    def __init__(self, hidden_size: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.head_size = num_heads, hidden_size // num_heads
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.out = nn.Linear(hidden_size, hidden_size)
        self.dropout = nn.Dropout(dropout)

    def heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], self.num_heads, self.head_size).transpose(1, 2)

    def forward(self, x: Tensor, memory: Tensor, allowed: Tensor) -> Tensor:
        query, key, value = (
            self.heads(self.query(x)),
            self.heads(self.key(memory)),
            self.heads(self.value(memory)),
        )
        # [B, heads, S, T].
        scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(self.head_size)
        weights = self.dropout(scores.masked_fill(~allowed, float("-inf")).softmax(dim=-1))
        mixed = torch.matmul(weights, value).transpose(1, 2).contiguous().view(x.shape)
        return self.out(mixed)


class FeedForward(nn.Sequential):
    """Two linears with a ReLU between."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(
            nn.Linear(hidden_size, 2 * hidden_size),
            nn.ReLU(),
            nn.Linear(2 * hidden_size, hidden_size),
        )


class EncoderLayer(nn.Module):
    """Pre-norm self-attention and feed-forward."""

    def __init__(self, hidden_size: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden_size), nn.LayerNorm(hidden_size)
        self.attention = Attention(hidden_size, num_heads, dropout)
        self.feed_forward = FeedForward(hidden_size)

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        normed = self.norm1(x)
        x = x + self.attention(normed, normed, allowed)
        return x + self.feed_forward(self.norm2(x))


class DecoderLayer(nn.Module):
    """Pre-norm causal self-attention, cross attention to the memory, feed-forward."""

    def __init__(self, hidden_size: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(hidden_size) for _ in range(3))
        self.attention = Attention(hidden_size, num_heads, dropout)
        self.cross = Attention(hidden_size, num_heads, dropout)
        self.feed_forward = FeedForward(hidden_size)

    def forward(self, x: Tensor, memory: Tensor, causal: Tensor, padding: Tensor) -> Tensor:
        normed = self.norm1(x)
        x = x + self.attention(normed, normed, causal)
        x = x + self.cross(self.norm2(x), memory, padding)
        return x + self.feed_forward(self.norm3(x))


class EncoderDecoder(nn.Module):
    """Sequence to sequence with cross attention, padded sources and tied embeddings; returns
    ``(loss, logits)``.
    """

    def __init__(
        self,
        vocab_size: int = 24,
        hidden_size: int = 16,
        num_heads: int = 4,
        max_length: int = 16,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, hidden_size, padding_idx=0)
        self.position = nn.Embedding(max_length, hidden_size)
        self.encoder = nn.ModuleList(
            EncoderLayer(hidden_size, num_heads, dropout) for _ in range(2)
        )
        self.decoder = nn.ModuleList(
            DecoderLayer(hidden_size, num_heads, dropout) for _ in range(2)
        )
        self.norm = nn.LayerNorm(hidden_size)
        self.head = nn.Linear(hidden_size, vocab_size, bias=False)
        self.head.weight = self.embedding.weight

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens) + self.position(
            torch.arange(tokens.shape[1], device=tokens.device)
        )

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        padding = (source != 0)[:, None, None, :]  # [B, 1, 1, T]
        causal = torch.ones(
            target.shape[1], target.shape[1], dtype=torch.bool, device=target.device
        ).tril()  # [S, S]
        memory = self.embed(source)
        for layer in self.encoder:
            memory = layer(memory, padding)
        x = self.embed(target)
        for layer in self.decoder:
            x = layer(x, memory, causal, padding)
        logits = self.head(self.norm(x))  # [B, S, V]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100), logits


class TorchTransformer(nn.Module):
    """``torch.nn.Transformer`` between an embedding and a head; returns the loss."""

    def __init__(
        self,
        vocab_size: int = 24,
        hidden_size: int = 16,
        num_heads: int = 4,
        norm_first: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.source = nn.Embedding(vocab_size, hidden_size)
        self.target = nn.Embedding(vocab_size, hidden_size)
        self.transformer = nn.Transformer(
            hidden_size,
            num_heads,
            2,
            2,
            2 * hidden_size,
            dropout=dropout,
            batch_first=True,
            norm_first=norm_first,
        )
        self.head = nn.Linear(hidden_size, vocab_size)

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        hidden = self.transformer(
            self.source(source), self.target(target), tgt_mask=mask, tgt_is_causal=True
        )
        # [B, V, S]: classes in dim 1.
        return F.cross_entropy(self.head(hidden).transpose(1, 2), labels)
