"""Byte-level BPE on the standard library's own source: training against tokenizers and rustbpe, encoding against tiktoken."""

import time

import rustbpe
from common import compare
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from llmlab.data.sources import stdlib_corpus
from llmlab.tokenizer.bpe import BPETokenizer, byte_chars, split_pattern


def peer_train(texts, vocab_size):
    "tokenizers with the same split pattern and the same 256 bytes to begin with."
    peer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(split_pattern()), "isolated")
    peer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    peer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=byte_chars(), show_progress=False))
    return peer


def rust_train(texts, vocab_size):
    "rustbpe with the same split pattern; it uses all cores."
    rustbpe.Tokenizer().train_from_iterator(texts, vocab_size, pattern=split_pattern())


def run():
    "Rows for the table of benchmarks: training by the clock on the wall, encoding by CPU time of one thread."
    texts = [d.text for d in stdlib_corpus(kinds=("code", "docstring"))]
    peers = {"tokenizers": peer_train, "rustbpe": rust_train}
    rows = [compare(f"bpe_train_{v}", name, lambda v=v: BPETokenizer.train(texts, v), lambda v=v, train=train: train(texts, v),
                    repeat=5, packages=(name, "regex")) for v in (4096, 32768) for name, train in peers.items()]
    ours = BPETokenizer.train(texts, 32768)
    peer = ours.to_tiktoken()
    tiktoken = lambda: peer.encode_ordinary_batch(texts, num_threads=1)

    def lesson():
        ours._words.clear()    # cold: every word is met for the first time
        return [ours.encode(t) for t in texts]

    assert lesson() == tiktoken() == ours.encode_batch(texts)
    size = sum(len(t.encode()) for t in texts) / 1e6
    settings = {"amount": size, "unit": "MB/s", "clock": time.process_time, "packages": ("tiktoken", "regex")}
    rows.append(compare("bpe_encode_lesson", "tiktoken", lesson, tiktoken, **settings))
    rows.append(compare("bpe_encode_fast", "tiktoken", lambda: ours.encode_batch(texts, threads=1), tiktoken, **settings))
    return rows


if __name__ == "__main__":
    for row in run(): print(row)
