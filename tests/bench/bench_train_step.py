"""One training step of a model of 8.75 M parameters, 8 rows of 256 tokens: ours against transformers' Llama, same weights, same losses."""

import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from common import compare

from llmlab.core.batch import next_token_batch
from llmlab.model.objectives import NextToken
from llmlab.model.transformer import ModelConfig, Transformer

sys.path.append(str(Path(__file__).parents[1] / "model"))
from llama_reference import make_llama

CONFIG = ModelConfig(vocab_size=4096, hidden_size=320, num_layers=6, num_heads=5, context=256)


def steps(precision, batch, compiled=False):
    "Two functions that make one update each, and return the loss before it."
    ours = Transformer(CONFIG)
    theirs = make_llama(ours, "sdpa")
    theirs.config.use_cache = False
    assert sum(p.numel() for p in theirs.parameters()) == ours.num_parameters == 8_749_120
    llama = torch.compile(theirs) if compiled else theirs
    objective = NextToken()

    def our_loss():
        term = objective(ours, batch)["loss"]
        return term.sum / term.count

    targets = batch.targets.contiguous()

    def their_loss(): return llama(input_ids=batch.ids, labels=targets, shift_labels=targets).loss

    def step(loss_of, optimizer):
        with torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else nullcontext(): loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, fused=True) for m in (ours, theirs)]
    return lambda: step(our_loss, optimizers[0]), lambda: step(their_loss, optimizers[1])


def row(precision, peer="transformers", repeat=7, rows=8):
    "One comparison; the losses of three updates must be equal before anything is timed."
    ids = torch.randint(CONFIG.vocab_size, (rows, CONFIG.context + 1), generator=torch.Generator().manual_seed(0))
    ours, theirs = steps(precision, next_token_batch(ids), peer == "transformers_compiled")
    for _ in range(3 if rows == 8 else 1):
        a, b = ours(), theirs()
        assert abs(a - b) < (1e-3 if precision == "fp32" else 3e-2), f"losses differ: {a} and {b}"
    tokens = rows * CONFIG.context
    return compare(f"train_step_{precision}", peer, ours, theirs, amount=tokens, unit="tokens/s", repeat=repeat, clock=time.process_time,
                   packages=("transformers",))


def run():
    "Rows on one thread, in CPU time. Without bfloat16 units its rows take a single row of tokens: a step takes many times longer there."
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        has_bf16 = torch.cpu.get_capabilities().get("avx512_bf16", False)
        result = [row("fp32")]
        if has_bf16: result += [row("bf16"), row("bf16", "transformers_compiled")]
        else: result.append(row("bf16", repeat=3, rows=1) | {"note": "this CPU has no bfloat16 units; 1 row of tokens"})
        return result
    finally: torch.set_num_threads(threads)


if __name__ == "__main__":
    for r in run(): print(r)
