"""Updates of a model of 1.0 M parameters: the trainer against the bare lines that do the same, losses equal."""

import time
from itertools import count

import torch
from common import compare

from llmlab.core.batch import Batch
from llmlab.model.objectives import NextToken
from llmlab.model.transformer import ModelConfig, Transformer
from llmlab.train.optimizer import clip_gradients, make_optimizer
from llmlab.train.trainer import TrainConfig, Trainer

CONFIG = ModelConfig(vocab_size=2048, hidden_size=128, num_layers=4, num_heads=4, context=128)
TURN = 2    # updates a measurement


class Rows:
    "Two micro-batches of 8 rows, made beforehand: data are not what is measured."

    def __init__(self):
        g = torch.Generator().manual_seed(0)
        ids = torch.randint(0, 2048, (16, 129), generator=g)
        batch = Batch(ids[:, :-1], ids[:, 1:], torch.ones(16, 128, dtype=torch.bool))
        self.batches = batch.split(8)

    def update(self, step): return self.batches


def bare_loop(rows):
    "A function that makes updates by hand and returns their losses."
    model, objective, config = Transformer(CONFIG), NextToken(), TrainConfig(10_000)
    optimizer, rate, step = make_optimizer(model, 2e-3), config.rate(), count()

    def updates():
        losses = []
        for _ in range(TURN):
            at = next(step)
            optimizer.zero_grad()
            batches = rows.update(at)
            n, total = sum(b.n_targets for b in batches), 0.0
            for b in batches:
                loss = objective(model, b)["loss"].sum / n
                loss.backward()
                total += loss.item()
            clip_gradients(model.parameters(), 1.0)
            for group in optimizer.param_groups: group["lr"] = rate(at)
            optimizer.step()
            losses.append(total)
        return losses
    return updates


def run():
    "One row, on one thread, in CPU time."
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = Rows()
        trainer, theirs = Trainer(Transformer(CONFIG), NextToken(), rows, TrainConfig(10_000)), bare_loop(rows)

        def ours(): return [trainer._advance()["loss"] for _ in range(TURN)]

        gap = max(abs(a - b) for a, b in zip(ours(), theirs(), strict=True))
        assert gap < 1e-5, f"losses differ by {gap}"
        return [compare("trainer_overhead", "bare_loop", ours, theirs, amount=TURN * 16 * 128, unit="tokens/s", repeat=15, warmup=2,
                        clock=time.process_time)]
    finally: torch.set_num_threads(threads)


if __name__ == "__main__":
    for r in run(): print(r)
