"""A small GPT-2 over bytes, and the manual of Python as its text: for the pipeline examples."""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

LENGTH = 64
VOCABULARY = 128


class Text(Dataset[dict[str, Tensor]]):
    """Windows of ``LENGTH`` characters, at random places; every tenth page of the manual is for validation."""

    def __init__(self, num_samples: int, *, is_validation: bool = False) -> None:
        pages = [page for number, page in enumerate(topics.values()) if (number % 10 == 0) == is_validation]
        text = "\n\n".join(pages).encode("ascii", errors="ignore")
        self.tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        generator = torch.Generator().manual_seed(int(is_validation))
        self.starts = torch.randint(len(self.tokens) - LENGTH, (num_samples,), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self.tokens[self.starts[index] :][:LENGTH]
        return {"input_ids": window, "labels": window}


def model() -> GPT2LMHeadModel:
    """Eight layers with tied embeddings, equal on all ranks."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=96, n_layer=8, n_head=4, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config)


def complete(gpt: torch.nn.Module, prompt: str, num_characters: int = 60) -> str:
    """``prompt`` and the most probable characters after it. In a pipeline every rank must call it."""
    tokens = torch.tensor([list(prompt.encode())])
    with torch.no_grad():
        for _ in range(num_characters):
            following = gpt(input_ids=tokens[:, -LENGTH:]).logits[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, following.to(tokens)], dim=1)
    return bytes(tokens[0].tolist()).decode()
