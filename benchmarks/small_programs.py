"""Six small trainings as users write them: what one changed line does to them is measured by ``muon_rate.py``.

Each has data of a real kind that every machine has (Python's own reference manual, scanned digits), a model, a loss,
and held-out data on which it is measured.
"""

from __future__ import annotations

import itertools
import math
import pydoc_data.topics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

Batch = tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class Program:
    """A supervised training."""

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Batch], Tensor]
    batches: Callable[[torch.Generator], Iterator[Batch]]
    held_out: Callable[[], list[Batch]]  # The merit is the mean loss on these.
    steps: int = 400
    decays: bool = False  # Whether the rate warms up and falls along a cosine.
    weight_decay: float = 0.01


@cache
def characters() -> Tensor:
    """Python's reference manual as numbers of characters: about 700,000 of them, 96 different ones."""
    text = "".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    return torch.tensor([min(max(ord(char) - 31, 0), 95) for char in text])


def windows(generator: torch.Generator, *, size: int, batch: int = 16, held_out: bool = False) -> Tensor:
    """``(batch, size)``; the last tenth of the text is held out."""
    text, border = characters(), len(characters()) * 9 // 10
    low, high = (border, len(text) - size) if held_out else (0, border - size)
    starts = torch.randint(low, high, (batch, 1), generator=generator)
    return text[starts + torch.arange(size)]


def text_batches(generator: torch.Generator, *, size: int, batch: int = 16) -> Iterator[Batch]:
    while True:
        yield (windows(generator, size=size, batch=batch),)


def held_out_text(*, size: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(77)
    return [(windows(generator, size=size, batch=64, held_out=True),) for _ in range(4)]


def decoder() -> nn.Module:
    """GPT-2 with tied embeddings, 0.4 million parameters."""
    config = GPT2Config(n_positions=64, n_embd=96, n_layer=3, n_head=4, vocab_size=96, eos_token_id=0, bos_token_id=0)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return GPT2LMHeadModel(config)


def decoder_loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(input_ids=batch[0], labels=batch[0]).loss


def encoder_decoder() -> nn.Module:
    """T5 with 0.5 million parameters."""
    config = T5Config(vocab_size=96, d_model=64, d_kv=16, d_ff=192, num_layers=3, num_heads=4, dropout_rate=0.0)
    config.decoder_start_token_id = config.pad_token_id = 0
    return T5ForConditionalGeneration(config)


def encoder_decoder_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The second half of a piece of text after its first half."""
    source, target = batch[0].chunk(2, dim=1)
    return model(input_ids=source, labels=target.contiguous()).loss


@cache
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """1,797 scanned digits, 8 x 8: (training images, labels, held-out images, labels)."""
    from sklearn.datasets import load_digits

    images, labels = (torch.as_tensor(array) for array in load_digits(return_X_y=True))
    images = (images.float().reshape(-1, 1, 8, 8) - 4.9) / 6
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(5))
    images, labels = images[order], labels[order]
    return images[:1400], labels[:1400], images[1400:], labels[1400:]


def image_batches(generator: torch.Generator, *, batch: int = 64) -> Iterator[Batch]:
    """Shifted by up to a pixel, with noise, so that 1,400 images last."""
    images, labels, *_ = digits()
    while True:
        chosen = torch.randint(len(images), (batch,), generator=generator)
        row, column = torch.randint(3, (2,), generator=generator).tolist()
        shifted = F.pad(images[chosen], (1, 1, 1, 1), value=-4.9 / 6)[..., row : row + 8, column : column + 8]
        yield shifted + 0.5 * torch.randn(shifted.shape, generator=generator), labels[chosen]


def held_out_images() -> list[Batch]:
    images, labels = digits()[2:]
    return [(images + 0.5 * torch.randn(images.shape, generator=torch.Generator().manual_seed(3)), labels)]


def classification_loss(model: nn.Module, batch: Batch) -> Tensor:
    out = model(batch[0])
    return F.cross_entropy(out if isinstance(out, Tensor) else out.logits, batch[1])


def convolutions() -> nn.Module:
    """A CNN with batch norms, 0.1 million parameters."""
    layers: list[nn.Module] = []
    for inputs, outputs, stride in ((1, 32, 1), (32, 64, 2), (64, 96, 2)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 10))


def vision_transformer() -> nn.Module:
    """ViT on patches of 2 x 2, 0.2 million parameters."""
    config = ViTConfig(image_size=8, patch_size=2, num_channels=1, hidden_size=64, num_attention_heads=4, num_labels=10)
    config.num_hidden_layers, config.intermediate_size = 4, 192
    return ViTForImageClassification(config)


def autoencoder() -> nn.Module:
    """An MLP through 12 numbers."""
    sizes = (64, 256, 256, 12, 256, 256, 64)
    layers = [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair), nn.GELU())]
    return nn.Sequential(nn.Flatten(), *layers[:-1])


def reconstruction_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[0].flatten(1))


PROGRAMS = {
    "decoder": Program(
        model=decoder,
        loss=decoder_loss,
        batches=lambda generator: text_batches(generator, size=64),
        held_out=lambda: held_out_text(size=64),
        decays=True,
    ),
    "encoder-decoder": Program(
        model=encoder_decoder,
        loss=encoder_decoder_loss,
        batches=lambda generator: text_batches(generator, size=96, batch=12),
        held_out=lambda: held_out_text(size=96),
        decays=True,
    ),
    "CNN": Program(
        model=convolutions,
        loss=classification_loss,
        batches=image_batches,
        held_out=held_out_images,
        steps=300,
    ),
    "ViT": Program(
        model=vision_transformer,
        loss=classification_loss,
        batches=image_batches,
        held_out=held_out_images,
        decays=True,
    ),
    "MLP": Program(
        model=autoencoder,
        loss=reconstruction_loss,
        batches=image_batches,
        held_out=held_out_images,
        steps=600,
    ),
}


def rate_at(step: int, program: Program) -> float:
    """Factor of the learning rate in a step, counted from 0."""
    if not program.decays:
        return 1.0
    warmup = program.steps // 20
    return min(1.0, (step + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * step / program.steps))


def ring(generator: torch.Generator, size: int) -> Tensor:
    """Points near eight places on a circle, ``(size, 2)``: what the GAN learns to draw."""
    angle = torch.randint(8, (size,), generator=generator) * (math.pi / 4)
    return torch.stack([angle.cos(), angle.sin()], dim=1) + 0.03 * torch.randn((size, 2), generator=generator)


def sample_error(found: Tensor, real: Tensor) -> float:
    """Sliced Wasserstein distance of two clouds of equally many points."""
    angle = torch.arange(16) * (math.pi / 16)
    directions = torch.stack([angle.cos(), angle.sin()])
    return float(((found @ directions).sort(dim=0).values - (real @ directions).sort(dim=0).values).abs().mean())


def player(inputs: int, outputs: int) -> nn.Module:
    """Generator or discriminator."""
    return nn.Sequential(
        *(nn.Linear(inputs, 128), nn.LeakyReLU(0.2), nn.Linear(128, 128), nn.LeakyReLU(0.2), nn.Linear(128, outputs))
    )
