"""Greedy generation, one prompt of 32 tokens, 128 new ones, 8.75 M parameters: ours against transformers' generate, ids equal."""

import sys
import time
from pathlib import Path

import torch
from common import compare

from llmlab.model.generate import generate
from llmlab.model.transformer import ModelConfig, Transformer

sys.path.append(str(Path(__file__).parents[1] / "model"))
from llama_reference import make_llama

CONFIG = ModelConfig(vocab_size=4096, hidden_size=320, num_layers=6, num_heads=5, context=256)
NEW = 128


def run():
    "Rows on one thread, in CPU time."
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = Transformer(CONFIG)
        llama = make_llama(model, "sdpa").eval()
        ids = torch.randint(CONFIG.vocab_size, (1, 32), generator=torch.Generator().manual_seed(0))
        ours = lambda: generate(model, ids, NEW)
        theirs = lambda: llama.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
        assert ours() == theirs()[:, 32:].tolist(), "greedy ids differ"
        return [compare("generate_fp32", "transformers", ours, theirs, amount=NEW, unit="tokens/s", clock=time.process_time,
                        packages=("transformers",))]
    finally: torch.set_num_threads(threads)


if __name__ == "__main__":
    for r in run(): print(r)
