"""The architecture and training loop of nanoGPT on the corpus of the default job, to compare the losses.

    python main_zero.py                      # the default job, which makes the corpus
    python benchmarks/nanogpt.py nanogpt     # the sizes and the schedule of the CPU command in nanoGPT's README
    python benchmarks/nanogpt.py default     # the layers, heads, width, tokens and steps of the default job

Own code for PyTorch (`pip install torch==2.13.0` is a small CPU build) in place of nanoGPT itself, which is no package:
learned positions, LayerNorm and products without bias, GELU, tied embeddings, scaled initialization of residual
projections, AdamW without decay of vectors, warmup and cosine, windows at random offsets. There is no dropout, as in
that command, no compilation and no checkpoint.

The last line is the mean loss in nats per byte over the whole validation set, in sequences of the model's context.
"""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import argparse
import math
import time
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zero.corpus import Rows

TRAIN, VALIDATION = "data/index/stdlib_train.index", "data/index/stdlib_validation.index"
ROW = 256  # bytes of the corpus's rows
VOCAB = 256


class Settings(NamedTuple):
    """The sizes of a model, and how it is trained."""

    layers: int
    heads: int
    width: int
    context: int
    batch: int
    steps: int
    warmup: int = 100
    peak_rate: float = 1e-3
    end_rate: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)


SETTINGS = {
    "nanogpt": Settings(layers=4, heads=4, width=128, context=64, batch=12, steps=2000),
    "default": Settings(layers=4, heads=6, width=192, context=256, batch=8, steps=960),
}


class Block(nn.Module):
    """Attention and MLP, each behind its norm and beside the residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.norm_mlp = nn.LayerNorm(width, bias=False)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q_BHTK, k_BHTK, v_BHTK = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm_attention(x_BTD)).chunk(3, dim=-1)
        )
        attended_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        x_BTD = x_BTD + self.attention_out(attended_BHTK.transpose(1, 2).flatten(-2))
        return x_BTD + self.mlp_out(F.gelu(self.mlp_in(self.norm_mlp(x_BTD))))


class GPT(nn.Module):
    """Tokens `(B, T)` in, the mean negative log-likelihood of the next ones out."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.empty(VOCAB, settings.width))
        self.positions = nn.Parameter(torch.empty(settings.context, settings.width))
        self.blocks = nn.ModuleList(Block(settings.width, settings.heads) for _ in range(settings.layers))
        self.norm = nn.LayerNorm(settings.width, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = math.sqrt(2 * settings.layers) if "_out." in name else 1
                nn.init.normal_(parameter, std=0.02 / residual)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        x_BTD = F.embedding(tokens_BT, self.tokens) + self.positions[: tokens_BT.shape[1]]
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV = F.linear(self.norm(x_BTD), self.tokens)
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def rows_of(index: str) -> Tensor:
    """All rows of a corpus in order, `(rows, ROW)`; -1 where the last batch has none."""
    batches = [np.asarray(batch) for batch in Rows(index, batch=8, context=ROW, seed=None, epochs=1)]
    rows = np.concatenate(batches)
    return torch.from_numpy(rows[(rows >= 0).all(axis=1)]).long()


def rate(settings: Settings, step: int) -> float:
    if step < settings.warmup:
        return settings.peak_rate * (step + 1) / (settings.warmup + 1)
    share = (step - settings.warmup) / (settings.steps - settings.warmup)
    return settings.end_rate + (settings.peak_rate - settings.end_rate) * (1 + math.cos(math.pi * share)) / 2


def train(settings: Settings, text: Tensor) -> GPT:
    """A model, trained on windows at random offsets of a text of tokens `(length,)`."""
    torch.manual_seed(1337)
    model = GPT(settings)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=settings.betas, fused=True)
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters", flush=True)
    started = time.perf_counter()
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(settings, step)
        offsets = torch.randint(len(text) - settings.context, (settings.batch, 1))
        window = text[offsets + torch.arange(settings.context + 1)]
        loss = model(window[:, :-1], window[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 100 == 0 or step + 1 == settings.steps:
            seconds = time.perf_counter() - started
            print(f"step {step + 1}: loss {loss.item():.3f}, {seconds:.0f} s", flush=True)
    return model


@torch.no_grad()
def loss_on(model: GPT, rows: Tensor, context: int) -> float:
    """Nats per byte over all sequences of the rows."""
    sequences = rows.reshape(-1, context)
    losses = [model(part[:, :-1], part[:, 1:]).item() * len(part) for part in sequences.split(64)]
    return sum(losses) / len(sequences)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", choices=SETTINGS)
    settings = SETTINGS[parser.parse_args().settings]
    train_rows, validation_rows = rows_of(TRAIN), rows_of(VALIDATION)
    print(f"{len(train_rows):,} rows of {ROW} bytes to train on, {len(validation_rows):,} to validate", flush=True)
    model = train(settings, train_rows.flatten())
    tokens = settings.steps * settings.batch * settings.context
    print(f"{tokens:,} tokens; validation: {loss_on(model, validation_rows, settings.context):.4f}")


if __name__ == "__main__":
    main()
