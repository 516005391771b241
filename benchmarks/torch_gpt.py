"""PyTorch on the GPT of benchmarks/step.py: one process with all cores, or FSDP2 in two gloo processes of one core.

    python benchmarks/torch_gpt.py {one,fsdp2} {none,full} D VOCAB HEADS STACK CONTEXT SEQUENCES ROUNDS

step.py calls it where torch is installed (`pip install torch==2.13.0` is a small CPU build). The same model, float32,
every block checkpointed if `full`, AdamW with the same decay mask, clipping by global norm, and the same tokens;
attention and AdamW are torch's fused kernels. `one` takes a step for each line on standard input and answers with its
loss; `fsdp2` takes all steps and prints a line of the table. Checked once with our weights copied in (D 48, 3 heads,
2 layers, 4 sequences of 32 tokens): over three steps losses and gradient norms were those of our model under plain
optax to a relative 3e-7.
"""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import argparse
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

PROCESSES = 2
LIMIT = 600  # seconds that a process may run


class Block(nn.Module):
    """`TransformerLayer` of zero without dropout; with `remat` the backward pass computes it again."""

    def __init__(self, dim: int, heads: int, remat: bool) -> None:
        super().__init__()
        self.heads, self.remat = heads, remat
        self.norm_attention = nn.LayerNorm(dim, eps=1e-6)
        self.query, self.key, self.value, self.attention_out = (nn.Linear(dim, dim) for _ in range(4))
        self.norm_mlp = nn.LayerNorm(dim, eps=1e-6)
        self.mlp_in, self.mlp_out = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x_BTD: Tensor, alibi_HTT: Tensor) -> Tensor:
        if self.remat:
            return checkpoint(self.compute, x_BTD, alibi_HTT, use_reentrant=False)
        return self.compute(x_BTD, alibi_HTT)

    def compute(self, x_BTD: Tensor, alibi_HTT: Tensor) -> Tensor:
        h_BTD = self.norm_attention(x_BTD)
        q_BHTK, k_BHTK, v_BHTK = (
            linear(h_BTD).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        attended_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, attn_mask=alibi_HTT)
        x_BTD = x_BTD + self.attention_out(attended_BHTK.transpose(1, 2).flatten(-2))
        return x_BTD + self.mlp_out(F.gelu(self.mlp_in(self.norm_mlp(x_BTD)), approximate="tanh"))


class GPT(nn.Module):
    """zero.models.gpt.GPT: tokens `(B, T)` in, the mean negative log-likelihood of the next ones out."""

    def __init__(self, dim: int, vocab: int, heads: int, layers: int, context: int, remat: bool) -> None:
        super().__init__()
        self.vocabulary = nn.Parameter(torch.empty(vocab, dim))
        self.blocks = nn.ModuleList(Block(dim, heads, remat) for _ in range(layers))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.alibi_HTT = alibi(heads, context)
        nn.init.normal_(self.vocabulary, std=0.02)
        for name, parameter in self.blocks.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif "norm" not in name:
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * layers) if "_out." in name else 1))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = F.embedding(tokens_BT, self.vocabulary)
        for block in self.blocks:
            x_BTD = block(x_BTD, self.alibi_HTT)
        logits_BTV = F.linear(self.norm(x_BTD[:, :-1]), self.vocabulary)
        return F.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten())


def alibi(heads: int, context: int) -> Tensor:
    """The bias of scores, minus infinity for later positions; slopes as in zero.models.attention.scores."""
    power = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    slopes += [2 ** (-4 * i / power) for i in range(1, 2 * (heads - power), 2)]
    position = torch.arange(context)
    distance_TT = position[None, :] - position[:, None]
    return (torch.tensor(slopes)[:, None, None] * distance_TT).masked_fill(distance_TT > 0, -torch.inf)


def shard(model: GPT) -> None:
    """FSDP2 as its documentation has it: each block, then the rest. Call in every process."""
    mesh = init_device_mesh("cpu", (PROCESSES,))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)


def make_step(model: GPT) -> Callable[[Tensor, int], tuple[Tensor, Tensor]]:
    """One update from this process's rows, after 50 steps of warmup at rate 3e-3; its loss and the gradient norm."""
    parameters = dict(model.named_parameters())
    decayed = [name for name in parameters if "norm" not in name and not name.endswith("bias")]
    groups = [
        {"params": [parameters[name] for name in decayed], "weight_decay": 0.1},
        {"params": [parameters[name] for name in parameters if name not in decayed], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)

    def step(tokens: Tensor, index: int) -> tuple[Tensor, Tensor]:
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1, (index + 1) / 50)
        optimizer.zero_grad()
        loss = model(tokens)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach(), norm

    return step


def connect(rank: int, store: str) -> None:
    """Joins the other process, only on the loopback interface; ends this one with its parent, or at a time limit."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # what torch has Linux send to the child of a parent that died
    signal.alarm(LIMIT)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=PROCESSES)


def make_model(sizes: list[int], remat: bool, sequences: int) -> tuple[GPT, Tensor]:
    """The model, the same in every process, and the tokens of the global batch."""
    torch.manual_seed(0)
    dim, vocab, heads, layers, context = sizes
    tokens = np.random.default_rng(0).integers(0, vocab, (sequences, context), np.int32)
    return GPT(dim, vocab, heads, layers, context, remat), torch.from_numpy(tokens).long()


def serve(sizes: list[int], remat: bool, sequences: int) -> None:
    """One process: a step for each line that is read, answered by its loss."""
    model, tokens = make_model(sizes, remat, sequences)
    step = make_step(model)
    for index, _ in enumerate(sys.stdin):
        loss, _ = step(tokens, index)
        print(loss.item(), flush=True)


def run(rank: int, store: str, sizes: list[int], remat: bool, sequences: int, rounds: int) -> None:
    """One of two processes; the first prints the line of the table."""
    connect(rank, store)
    model, tokens = make_model(sizes, remat, sequences)
    shard(model)
    step = make_step(model)
    seconds = []
    for index in range(rounds + 2):
        started = time.perf_counter()
        loss, _ = step(tokens.chunk(PROCESSES)[rank], index)
        seconds.append(time.perf_counter() - started)
    dist.all_reduce(loss)
    if rank == 0:
        speed = tokens.numel() / statistics.median(seconds[2:])
        blank = f"{'-':>8} {'-':>9} {'-':>9} {'-':>10} {'-':>9}"
        print(f"{'FSDP2 (gloo)':<14} {speed:>9,.0f} {blank} {loss.item() / PROCESSES:>8.4f}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("one", "fsdp2"))
    parser.add_argument("remat", choices=("none", "full"))
    for name in ("D", "VOCAB", "HEADS", "STACK", "CONTEXT", "SEQUENCES", "ROUNDS"):
        parser.add_argument(name, type=int)
    kind, remat, *sizes, sequences, rounds = vars(parser.parse_args()).values()
    if kind == "one":
        serve(sizes, remat == "full", sequences)
        return
    parent = os.getppid()
    with tempfile.TemporaryDirectory() as directory:
        arguments = (f"{directory}/store", sizes, remat == "full", sequences, rounds)
        context = torch.multiprocessing.spawn(run, arguments, PROCESSES, join=False)
        while not context.join(timeout=1):
            if os.getppid() != parent:
                for process in context.processes:
                    process.kill()
                sys.exit("torch_gpt.py: stopped with its parent")
    print(
        f"FSDP2: {PROCESSES} processes of one core each, timed after the table.\n"
        "Its kernels for CPU are torch's, theirs are XLA's: a ratio to it compares those as well as the sharding."
    )


if __name__ == "__main__":
    main()
