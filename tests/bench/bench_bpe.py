"""Byte-level BPE on the library's own source: training against tokenizers, encoding against tiktoken."""

import gc
import time

import common
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from llmlab.data.sources import stdlib_corpus
from llmlab.tokenizer.bpe import BPETokenizer, split_pattern


def corpus():
    "About 10 MB of Python source."
    return [d.text for d in stdlib_corpus(kinds=("code",))]


def peer_train(texts, vocab_size):
    "tokenizers with the same split pattern and the same 256 bytes to begin with."
    peer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(split_pattern()), "isolated")
    peer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    peer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False))
    return peer


def fresh(tokenizer):
    "The same tokenizer with an empty cache of words."
    return BPETokenizer(tokenizer.merges, tokenizer.special_tokens, tokenizer.pattern)


def run():
    texts = corpus()
    size = sum(len(t.encode()) for t in texts) / 1e6
    rows = [common.compare(f"bpe_train_{v}", "tokenizers", lambda v=v: BPETokenizer.train(texts, v), lambda v=v: peer_train(texts, v),
                           repeat=5, packages=("tokenizers",)) for v in (4096, 32768)]
    ours = BPETokenizer.train(texts, 32768)
    theirs = ours.to_tiktoken()
    cold = iter([fresh(ours) for _ in range(8)])
    gc.collect()
    cpu = {"amount": size, "unit": "MB/s", "packages": ("tiktoken",), "repeat": 7}
    plain = lambda: theirs.encode_ordinary_batch(texts, num_threads=1)

    def lesson():
        tokenizer = next(cold)
        return [tokenizer.encode(t) for t in texts]

    assert lesson.__call__() == plain()
    return rows


if __name__ == "__main__":
    start = time.time()
    for row in run(): print(row)
    print(f"{time.time() - start:.0f} s")
