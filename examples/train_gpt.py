"""Train a small transformer on the bytes of any text with DiLoCo: ``kvmpi run -n 4 -c 2 -s 2 train_gpt.py book.txt``.

Clients are islands: inside one, workers sum gradients after every batch; between islands differences of weights travel
every INTERVAL batches. The last line says how many bytes that is for each byte of text, beside plain data parallelism
(``--algorithm mpi-sgd``). Started with plain ``python`` it runs as a job of one worker.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from training_report import at_least

import kvmpi
from kvmpi.torch import DiLoCo, DistributedOptimizer


class Block(nn.Module):
    """Attention to earlier bytes, then two linear layers; each is added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.think = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.attend(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.think(self.norm2(x))


class ByteGPT(nn.Module):
    """Predicts each byte from those before it: bytes of shape (batch, length) to logits (batch, length, 256)."""

    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:  # what is added to the sum of all layers begins small (GPT-2)
                last = name.endswith(("project.weight", "think.2.weight"))
                nn.init.normal_(p, std=0.02 / (2 * layers) ** 0.5 if last else 0.02)

    def forward(self, x: Tensor) -> Tensor:
        h = self.bytes(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        return self.out(self.norm(h))


def dealt(model: ByteGPT, count: int) -> list[list[nn.Parameter]]:
    """Fragments for streaming: layers dealt out like cards, which the paper found better than neighbours together."""
    layers: list[nn.Module] = [model.bytes, *model.blocks, model.norm, model.out, model.places]
    return [[p for layer in layers[i::count] for p in layer.parameters()] for i in range(count)]


def read_text(path: str) -> np.ndarray:
    """The bytes of a file; without one, the descriptions of data sets that come with scikit-learn."""
    if path:
        return np.fromfile(path, np.uint8)
    found = importlib.util.find_spec("sklearn")
    if found is None or found.origin is None:
        sys.exit("train_gpt.py: name a text file (without one, the program reads texts of scikit-learn: not installed)")
    files = sorted(Path(found.origin).parent.glob("datasets/descr/*.rst"))
    return np.concatenate([np.fromfile(file, np.uint8) for file in files])


def batch_of(text: np.ndarray, count: int, context: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """``count`` random pieces of ``context`` bytes, and the same pieces one byte later."""
    starts = rng.integers(0, len(text) - context, count)
    pieces = torch.from_numpy(text[starts[:, None] + np.arange(context + 1)].astype(np.int64))
    return pieces[:, :-1], pieces[:, 1:]


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Mean cross-entropy in nats a byte."""
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


def held_out_loss(model: nn.Module, text: np.ndarray, context: int) -> float:
    """The loss on pieces that nobody trains with, the same ones every time."""
    rng = np.random.default_rng(0)
    with torch.no_grad():
        return float(np.mean([loss_of(model, *batch_of(text, 32, context, rng)).item() for _ in range(8)]))


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("text", nargs="?", default="", help="any file (default: texts that come with scikit-learn)")
    add("--algorithm", choices=("diloco", "mpi-sgd"), default="diloco", help="mpi-sgd: gradients after every batch")
    add("--steps", type=at_least(1), default=400, help="batches of each worker (default 400)")
    add("--batch-size", type=at_least(1), default=16, help="pieces of text in a batch (default 16)")
    add("--context", type=at_least(1), default=64, help="bytes in a piece (default 64)")
    add("--width", type=at_least(1), default=64, help="default 64")
    add("--layers", type=at_least(1), default=4, help="default 4")
    add("--heads", type=at_least(1), default=4, help="default 4")
    add("--lr", type=float, default=3e-3, help="of AdamW (default 0.003)")
    add("--interval", type=at_least(1), default=50, help="batches between two exchanges of a parameter (default 50)")
    add("--outer-lr", type=float, default=0.7, help="default 0.7")
    add("--outer-momentum", type=float, default=0.9, help="default 0.9")
    add("--fragments", type=at_least(1), default=1, help="parts of the model with an exchange each (default 1: all)")
    add("--overlap", type=int, default=0, help="batches done while an exchange is under way (default 0: wait for it)")
    add("--mixing", type=float, help="of local weights in a merge (default 0.5, without overlap 0)")
    add("--bfloat16", action="store_true", help="push differences in half the bytes")
    add("--seed", type=int, default=0, help="default 0")
    add("--reports", type=at_least(1), default=8, help="lines to print (default 8)")
    args = parser.parse_args(argv)
    if args.width % args.heads:
        parser.error(f"--width {args.width} is no multiple of --heads {args.heads}")
    args.interval = min(args.interval, args.steps)  # or a short trial would exchange nothing
    return args


def train(args: argparse.Namespace, kv: kvmpi.KVStore) -> None:
    """All steps, and what there is to say of them."""
    torch.set_num_threads(1)  # several workers share the cores
    torch.manual_seed(args.seed)
    text = read_text(args.text)
    train_text, held_out = np.split(text, [len(text) * 9 // 10])
    share = np.array_split(train_text, kv.num_workers)[kv.rank]  # every worker reads a part of its own
    if min(len(held_out), len(share)) <= args.context:
        sys.exit(f"train_gpt.py: {len(text)} bytes of text are too few for {kv.num_workers} workers")
    rng = np.random.default_rng([args.seed, kv.rank])
    model = ByteGPT(args.width, args.layers, args.heads, args.context)
    # AdamW steps in every worker, on the mean of the gradients of its island; or of all, which the servers add up.
    optimizer: torch.optim.Optimizer
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    optimizer = DistributedOptimizer(optimizer, kv.client if args.algorithm == "diloco" else kv, model)

    diloco = None
    if args.algorithm == "diloco":  # the servers do the outer step on what islands push
        diloco = DiLoCo(
            model.parameters(), kv, args.interval, args.outer_lr, args.outer_momentum,
            fragments=dealt(model, args.fragments), overlap=args.overlap, mixing=args.mixing,
            pseudo_gradient_dtype=torch.bfloat16 if args.bfloat16 else None,
        )  # fmt: skip

    # The center has seen these steps, if the job is one that goes on; what AdamW remembered is gone.
    done = min(args.steps, kv.resumed_step * args.interval) if diloco else 0
    # Half a cosine over all steps.
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: (1 + math.cos(math.pi * (done + step) / args.steps)) / 2
    )

    num_values = sum(p.numel() for p in model.parameters())
    deployed = copy.deepcopy(model)
    tokens_a_step = args.batch_size * args.context * kv.num_workers
    if kv.rank == 0:
        print(
            f"{args.algorithm}: workers {kv.num_workers}, clients {kv.num_clients}, servers {kv.num_servers}; "
            f"{num_values:,} parameters, {len(text):,} bytes of text, {tokens_a_step} a step"
            + (f"; goes on after step {done}" if done else "")
        )
        print(f"{'step':>6}  {'tokens':>10}  {'train loss':>10}  {'val loss':>8}  {'tokens/s':>9}", flush=True)
    every = -(-args.steps // args.reports)
    for _ in range(done):
        batch_of(share, args.batch_size, args.context, rng)  # which has been trained with
    kv.barrier()
    training_s, total_loss, reported, start_s = 0.0, 0.0, done, time.perf_counter()

    def held_out_loss_now() -> float:
        """Of what this job would be trained for: the center, where there is one. All workers ask for it."""
        if diloco:
            diloco.pull_center(deployed.parameters())
        return held_out_loss(deployed if diloco else model, held_out, args.context) if kv.rank == 0 else 0.0

    for step in range(done + 1, args.steps + 1):
        optimizer.zero_grad()
        loss = loss_of(model, *batch_of(share, args.batch_size, args.context, rng))
        loss.backward()
        optimizer.step()
        if diloco:
            diloco.step()
        schedule.step()
        kv.clock()
        total_loss += loss.item()
        if step % every == 0 or step == args.steps:
            if step == args.steps and diloco:
                diloco.finish()  # what is still under way
            training_s += time.perf_counter() - start_s
            val_loss = held_out_loss_now()
            if kv.rank == 0:
                train_loss = total_loss / (step - reported)
                print(
                    f"{step:>6}  {step * tokens_a_step:>10}  {train_loss:>10.4f}  {val_loss:>8.4f}  "
                    f"{(step - done) * tokens_a_step / training_s:>9.0f}",
                    flush=True,
                )
            kv.barrier()
            total_loss, reported, start_s = 0.0, step, time.perf_counter()
    if done == args.steps:
        val_loss = held_out_loss_now()
        if kv.rank == 0:
            print(f"all {args.steps} steps were done before, nothing is left to do: val loss {val_loss:.4f}")
    elif kv.rank == 0:
        tokens = (args.steps - done) * args.batch_size * args.context * kv.mpi_size  # of this client
        sent = kv.stats()["phases"].get("push", {"bytes": 0})["bytes"] / tokens
        plain = 4 * num_values / (args.batch_size * args.context * kv.mpi_size)
        less = f", {plain / sent:.3g} times as many" if 0 < sent < 0.99 * plain else ""
        print(f"sent to servers by a client: {sent:.3g} bytes a token; gradients after every batch: {plain:.3g}{less}")


def main(argv: list[str] | None = None) -> int:
    """The exit status."""
    args = arguments(argv)
    try:
        with kvmpi.create("dist_sync_mpi") as kv:
            train(args, kv)
    except kvmpi.errors.ConfigError as error:  # numbers that do not go together
        print(f"train_gpt.py: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"train_gpt.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
