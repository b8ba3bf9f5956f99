"""One DPO update, 8.75 M parameters, 4 pairs (prompts of 32 tokens, answers of 96 and 160): ours against trl's trainer, losses equal.

Ours reads the reference's log-probabilities, which are computed once; trl does that when asked (`trl_precomputed`), and by default runs the
reference in every update (`trl`)."""

import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from common import compare

from llmlab.align.dpo import DPO, reference_logprobs
from llmlab.align.preferences import Pair, pair_batch
from llmlab.model.transformer import ModelConfig, Transformer

sys.path.append(str(Path(__file__).parents[1] / "model"))
sys.path.append(str(Path(__file__).parents[1] / "align"))
from llama_reference import make_llama
from test_dpo import trl_inputs, trl_trainer

CONFIG = ModelConfig(vocab_size=4096, hidden_size=320, num_layers=6, num_heads=5, context=256)
BETA = 0.3  # as in the trainer that the tests build


def pairs_of():
    g = torch.Generator().manual_seed(0)
    draw = lambda k: tuple(torch.randint(CONFIG.vocab_size, (k,), generator=g).tolist())
    return [Pair(draw(32), draw(96), draw(160)) for _ in range(4)]


def steps(peer, folder):
    "Two functions that make one update each, and return the loss before it."
    ours, pairs = Transformer(CONFIG), pairs_of()
    ref = reference_logprobs(ours, pairs)
    batch, objective, theirs = pair_batch(pairs, extra={"ref": ref}), DPO(BETA), make_llama(ours, "sdpa")
    trainer, inputs = trl_trainer(theirs, make_llama(ours, "sdpa"), folder), trl_inputs(batch)
    trainer.model.train()
    if peer == "trl_precomputed":
        trainer.precompute_ref_logps = True
        inputs |= {"ref_chosen_logps": ref[:, 0].float(), "ref_rejected_logps": ref[:, 1].float()}

    def our_loss():
        term = objective(ours, batch)["dpo"]
        return term.sum / term.count

    def step(loss_of, optimizer):
        loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-4, fused=True) for m in (ours, theirs)]
    return lambda: step(our_loss, optimizers[0]), lambda: step(lambda: trainer.compute_loss(trainer.model, inputs), optimizers[1])


def row(peer):
    "One comparison; the losses of three updates must be equal before anything is timed."
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours, theirs = steps(peer, Path(folder))
        for _ in range(3):
            a, b = ours(), theirs()
            assert abs(a - b) < 1e-3, f"losses differ: {a} and {b}"
        return compare("dpo_step", peer, ours, theirs, repeat=7, clock=time.process_time, packages=("trl", "transformers"))


def run():
    "Rows on one thread, in CPU time."
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [row("trl"), row("trl_precomputed")]
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    for r in run():
        print(r)
