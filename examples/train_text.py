"""Train a classifier of sentences on several workers: ``kvmpi run -n 4 -c 2 -s 2 train_text.py --data DIR``.

The network of Kim 2014 (arXiv:1408.5882): word vectors, convolutions of widths 3, 4 and 5, the maximum over the
sentence, dropout, a linear layer. A mini-batch has few of all words, so the gradient of the word vectors is sparse, and
only rows of words that occur travel. DIR has rt-polarity.pos and rt-polarity.neg, the sentence polarity data set of
https://www.cs.cornell.edu/people/pabo/movie-review-data; without it the program makes sentences of its own. Started
with plain ``python`` it is a job of one worker.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from os.path import expanduser
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from training_report import Report, at_least, count

import kvmpi
from kvmpi.config import Config
from kvmpi.torch import ElasticAveraging, Trainer

STORES = {
    "local": "local", "mpi-sgd": "dist_sync_mpi", "dist-asgd": "dist_async", "mpi-asgd": "dist_async_mpi",
    "dist-ssp": "dist_ssp", "mpi-ssp": "dist_ssp_mpi", "dist-softsync": "dist_softsync",
    "mpi-softsync": "dist_softsync_mpi", "mpi-esgd": "dist_async_mpi",
}  # fmt: skip
PAD = 0  # the word that fills short sentences up


class Classifier(nn.Module):
    """Class scores of shape ``(n, 2)`` for sentences of shape ``(n, length)``."""

    def __init__(self, num_words: int, dimension: int, maps: int, dropout: float) -> None:
        super().__init__()
        self.words = nn.Embedding(num_words, dimension, padding_idx=PAD, sparse=True)
        nn.init.uniform_(self.words.weight, -0.25, 0.25)
        self.convolutions = nn.ModuleList(nn.Conv1d(dimension, maps, width, padding=width - 1) for width in (3, 4, 5))
        self.dropout, self.linear = nn.Dropout(dropout), nn.Linear(3 * maps, 2)

    def forward(self, sentences: Tensor) -> Tensor:
        longest = max(1, int((sentences != PAD).sum(1).max()))
        x = self.words(sentences[:, :longest]).transpose(1, 2)
        features = [torch.relu(convolution(x)).amax(2) for convolution in self.convolutions]
        return self.linear(self.dropout(torch.cat(features, 1)))


class GradientExchange:
    """Every batch: gradients to the store, which updates the weights; new weights back."""

    def __init__(self, kv: kvmpi.KVStore, model: Classifier, args: Any) -> None:
        self._trainer = Trainer(model.named_parameters(), kvmpi.optim.Adagrad(args.lr), kv)
        # A store sums; the loss is a mean over this worker's batch. See train_images.py.
        self._divisor = kv.mpi_size * kv.pushes_per_update if kv.is_capable("async") else kv.num_workers
        self._words = model.words.weight if kv.is_capable("async") else None

    def before(self, sentences: Tensor) -> None:
        """In an asynchronous store others change words of this batch, at any time."""
        if self._words is not None:
            self._trainer.pull_rows(self._words, sentences)

    def step(self) -> None:
        self._trainer.step(self._divisor)

    def batches_done(self, kv: kvmpi.KVStore) -> int:
        """How many batches the weights have seen that the store gave us: after a restart or a resume, some."""
        return kv.resumed_step

    def skip(self) -> None:
        """Instead of ``step``, for one of these."""
        self._trainer.skip(self._divisor)


class ElasticExchange:
    """Synchronous training inside the client; every INTERVAL batches its weights and a center pull at each other."""

    def __init__(self, kv: kvmpi.KVStore, model: Classifier, args: Any) -> None:
        optimizer = torch.optim.Adagrad(model.parameters(), args.lr)  # in this process: sparse gradients come back
        self._inside, self._client_size = Trainer(model.named_parameters(), optimizer, kv.client), kv.mpi_size
        self._outside = ElasticAveraging(model.named_parameters(), kv, 0.9 / kv.num_clients, args.interval)
        self._interval = args.interval

    def before(self, sentences: Tensor) -> None:
        pass

    def step(self) -> None:
        self._inside.step(self._client_size)
        self._outside.step()

    def batches_done(self, kv: kvmpi.KVStore) -> int:
        return kv.resumed_step * int(self._interval)

    def skip(self) -> None:
        self._inside.skip(self._client_size)


def rt_polarity(folder: str) -> tuple[list[list[str]], np.ndarray]:
    """Sentences and their classes."""
    sentences, labels = [], []
    for label, name in enumerate(("rt-polarity.neg", "rt-polarity.pos")):
        path = os.path.join(folder, name)
        if not os.path.exists(path):
            sys.exit(f"--data {folder}: no {name} there")
        with open(path, encoding="latin-1") as file:
            lines = [line.split() for line in file]
        sentences += lines
        labels += [label] * len(lines)
    return sentences, np.array(labels)


def made_up(count: int = 1000) -> tuple[list[list[str]], np.ndarray]:
    """Sentences of words without meaning, of which a few say the class, unless ``not`` is in front of them."""
    rng = np.random.default_rng(3)
    sentences, labels = [], rng.integers(0, 2, count)
    for label in labels.tolist():
        words = [f"w{number}" for number in (400 * rng.random(rng.integers(5, 15)) ** 2).astype(int)]
        negated = rng.random() < 0.3
        said = f"{'good' if label != negated else 'bad'}{rng.integers(10)}"
        place = int(rng.integers(len(words)))
        words[place:place] = ["not", said] if negated else [said]
        sentences.append(words)
    return sentences, labels


def load(folder: str, limit: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """Training sentences and classes, those for testing, and how many words there are; one in ten is for testing."""
    sentences, labels = rt_polarity(folder) if folder else made_up()
    order = np.random.default_rng(0).permutation(len(sentences))[: limit or None]
    apart, train = np.split(order, [len(order) // 10])
    numbers: dict[str, int] = {}
    for i in train.tolist():
        for word in sentences[i]:
            numbers.setdefault(word, len(numbers) + 2)  # after the padding, and what only test sentences have
    length = max(map(len, sentences))
    table = torch.full((len(sentences), length), PAD)
    for i, sentence in enumerate(sentences):
        table[i, : len(sentence)] = torch.tensor([numbers.get(word, 1) for word in sentence])
    classes = torch.from_numpy(labels).long()
    return table[train], classes[train], table[apart], classes[apart], len(numbers) + 2


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add(
        "--algorithm",
        choices=list(STORES),
        default="mpi-sgd",
        metavar="NAME",
        help=f"{', '.join(STORES)} (default mpi-sgd)",
    )
    add(
        "--data",
        type=expanduser,
        default="",
        metavar="DIR",
        help="folder of rt-polarity.pos and .neg; without it sentences are made up",
    )
    add("--limit", type=at_least(0), default=0, metavar="N", help="use N sentences only")
    add("--epochs", type=at_least(1), default=5, help="default 5")
    add("--batch-size", type=at_least(1), default=2, help="sentences of each worker between two exchanges (default 2)")
    add("--lr", type=float, default=0.01, help="learning rate of Adagrad (default 0.01)")
    add("--dimension", type=at_least(1), default=64, help="numbers of a word (default 64)")
    add("--maps", type=at_least(1), default=50, help="of each convolution (default 50)")
    add("--dropout", type=float, default=0.5, help="default 0.5")
    add("--interval", type=at_least(1), default=16, help="mpi-esgd: batches between exchanges of weights (default 16)")
    add("--seed", type=int, default=0, help="of weights and order (default 0)")
    add(
        "--log",
        type=expanduser,
        default="",
        metavar="FILE",
        help="write JSON lines: the settings, then an object for each epoch",
    )
    args = parser.parse_args(argv)
    return args


def train(args: argparse.Namespace, kv: kvmpi.KVStore, report: Report) -> float:
    """All epochs; the last accuracy, on every worker."""
    sentences, classes, test, test_classes, num_words = load(args.data, args.limit)
    torch.manual_seed(args.seed)
    model = Classifier(num_words, args.dimension, args.maps, args.dropout)
    torch.manual_seed(args.seed * kv.num_workers + kv.rank)  # of the dropout
    loop = (ElasticExchange if args.algorithm == "mpi-esgd" else GradientExchange)(kv, model, args)
    num_batches = len(sentences) // kv.num_workers // args.batch_size
    if not num_batches or not len(test):
        few = f"{len(sentences)} sentences for training and {len(test)} for testing are too few"
        sys.exit(f"{few} for batches of {args.batch_size} on {kv.num_workers} workers")
    done = loop.batches_done(kv)
    again = f"; goes on after batch {done}" if done else ""
    report.header(
        f"{args.algorithm}: {count(kv.num_workers, 'worker')}, {count(kv.num_clients, 'client')}, "
        f"{count(kv.num_servers, 'server')} ({kv.type}); "
        f"{len(sentences)} sentences of {num_words} words, {num_batches} batches of {args.batch_size} per worker"
        f"{again}",
        {**vars(args), "workers": kv.num_workers, "clients": kv.num_clients, "store": kv.type},
        again=bool(done),
    )
    elapsed_s = accuracy = 0.0

    def measure() -> float:
        loop.before(test)
        model.eval()
        with torch.no_grad():
            right = [(model(x).argmax(1) == y) for x, y in zip(test.split(200), test_classes.split(200), strict=True)]
        model.train()
        return float(torch.cat(right).float().mean())

    for epoch in range(1, args.epochs + 1):
        order = np.random.default_rng([args.seed, epoch]).permutation(len(sentences))[kv.rank :: kv.num_workers]
        kv.barrier()
        start_s, total = time.perf_counter(), 0.0
        report.start(epoch, num_batches)
        for i in range(num_batches):
            if num_batches * (epoch - 1) + i < done:
                loop.skip()
                continue
            chosen = torch.from_numpy(order[i * args.batch_size : (i + 1) * args.batch_size])
            loop.before(sentences[chosen])
            model.zero_grad()
            loss = nn.functional.cross_entropy(model(sentences[chosen]), classes[chosen])
            loss.backward()
            loop.step()
            kv.clock()
            total += loss.item()
            report.advance(loss.item())
        kv.barrier()
        epoch_s = time.perf_counter() - start_s
        elapsed_s += epoch_s
        report.finish()
        if num_batches * epoch <= done:  # was only for the barriers
            continue
        accuracy = measure()
        num_trained = min(num_batches, num_batches * epoch - done)
        report.epoch(epoch, total / num_trained, accuracy, epoch_s, elapsed_s)
    if done >= num_batches * args.epochs:
        accuracy = measure()
        report.say(
            f"all {count(args.epochs, 'epoch')} were done before, nothing is left to do: accuracy {accuracy:.2%}"
        )
    phases = kv.stats()["phases"]
    if kv.rank == 0 and "push" in phases and not isinstance(loop, ElasticExchange):
        batches = max(0, args.epochs * num_batches - done)
        dense = sum(p.numel() * p.element_size() for p in model.parameters()) * batches
        print(
            f"the master pushed {phases['push']['bytes'] / 1e6:.3f} MB; dense it would have been {dense / 1e6:.3f} MB"
        )
    return accuracy


def main(argv: list[str] | None = None) -> float:
    """The accuracy on the sentences that were kept apart."""
    args = arguments(argv)
    torch.set_num_threads(1)  # workers share the cores of a host
    torch.sparse.check_sparse_tensor_invariants.disable()  # torch asks for a word on that
    config = Config.from_env()
    if args.algorithm == "local" and config.num_workers > 1:
        sys.exit("--algorithm local is for one worker: start it with plain python, or with -n 1")
    with kvmpi.create(STORES[args.algorithm]) as kv:
        with contextlib.closing(Report(active=kv.rank == 0, tty=config.tty, log=args.log)) as report:
            return train(args, kv, report)


if __name__ == "__main__":
    main()
