"Near-duplicates among 20,000 texts of 200 words: ours with exact verification, the peers' candidates without."

import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from common import compare

from llmlab.data.dedup import minhash_dedup


def make_corpus(n=20_000, seed=0, words=200, vocabulary=5000):
    "Fresh texts, and copies (of copies) with 0 to 20 words replaced."
    rng = random.Random(seed)
    known = ["".join(rng.choices("etaoinshrdlucmfwypvbgkjqxz", k=rng.randint(2, 10))) for _ in range(vocabulary)]
    texts = []
    for _ in range(n):
        if len(texts) > 20 and rng.random() < 0.4:
            w = rng.choice(texts).split()
            for _ in range(rng.choice([0, 1, 2, 3, 4, 6, 8, 12, 20])): w[rng.randrange(len(w))] = rng.choice(known)
        else: w = rng.choices(known, k=words)
        texts.append(" ".join(w))
    return texts


def shingles(text):
    "Runs of five words."
    w = text.split()
    return [" ".join(w[i:i + 5]) for i in range(max(1, len(w) - 4))]


def with_datasketch(texts):
    "Texts without a candidate before them: bulk signatures with a fast hash, 16 bands of 8."
    import xxhash
    from datasketch import MinHash, MinHashLSH

    lsh, kept = MinHashLSH(num_perm=128, params=(16, 8)), []
    sets = ([s.encode() for s in shingles(t)] for t in texts)
    for i, m in enumerate(MinHash.bulk(sets, num_perm=128, hashfunc=xxhash.xxh32_intdigest)):
        if not lsh.query(m):
            kept.append(i)
            lsh.insert(i, m)
    return kept


def with_rensa(texts):
    "The same with rensa."
    from rensa import RMinHash, RMinHashLSH

    lsh, kept = RMinHashLSH(threshold=0.8, num_perm=128, num_bands=16), []
    for i, t in enumerate(texts):
        m = RMinHash(num_perm=128, seed=1)
        m.update(shingles(t))
        if not lsh.query(m):
            kept.append(i)
            lsh.insert(i, m)
    return kept


def run(repeat=5):
    "Rows for results.json: CPU time of one thread."
    texts = make_corpus()
    return [compare("minhash", peer, lambda: minhash_dedup(texts), lambda f=f: f(texts), amount=len(texts), unit="docs/s", repeat=repeat,
                    clock=time.process_time, packages=("numpy", peer))
            for peer, f in (("datasketch", with_datasketch), ("rensa", with_rensa))]


if __name__ == "__main__":
    for row in run(): print(row)
