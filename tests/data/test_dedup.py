"Near-duplicates: equal to naive sets, all pairs, datasketch and rensa; nothing is lost to short texts, order, workers or hash seeds."

import json
import random
import subprocess
import sys
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmlab.data.dedup import (
    agreement,
    candidate_pairs,
    choose_bands,
    detection,
    exact_dedup,
    jaccard,
    link,
    merge,
    minhash_dedup,
    naive_shingles,
    pair_similarity,
    permutations,
    result_from_labels,
    shingle_hashes,
    signatures,
    sketch,
)

QUICK = settings(deadline=None, max_examples=60)
ODD_WORDS = ["a", "ab", "cat", "Cat", "cat.", "é", "naïve", "\x00", "a\x00", "\ud800",
             "漢字かな", "ก็ดี", "x" * 8, "x" * 9, "x" * 64, "x" * 65, "x" * 200]
BLANKS = [" ", "  ", "\n", "\t", "\x0b", "\x1c", "\x85", "\xa0", "\u2003", "\u3000"]
TEXTS = st.lists(st.one_of(st.sampled_from(ODD_WORDS), st.sampled_from(BLANKS), st.text(max_size=5)), max_size=14).map("".join)


def make_corpus(n, seed=0, words=200, vocabulary=5000):
    "Fresh texts, and copies (of copies) with 0 to 20 words replaced."
    rng = random.Random(seed)
    known = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 10))) for _ in range(vocabulary)]
    texts = []
    for _ in range(n):
        if len(texts) > 20 and rng.random() < 0.4:
            w = rng.choice(texts).split()
            for _ in range(rng.choice([0, 1, 2, 3, 4, 6, 8, 12, 20])): w[rng.randrange(len(w))] = rng.choice(known)
        else: w = rng.choices(known, k=words)
        texts.append(" ".join(w))
    return texts


def all_near_pairs(texts, threshold):
    "Every near-duplicate pair, found through an index of shingles: exact, and fit for thousands of texts."
    sets, where, shared = [naive_shingles(t) for t in texts], {}, {}
    for i, s in enumerate(sets):
        for x in s:
            for j in where.setdefault(x, []): shared[j, i] = shared.get((j, i), 0) + 1
            where[x].append(i)
    return {(i, j) for (i, j), n in shared.items() if n / (len(sets[i]) + len(sets[j]) - n) >= threshold}


def components(n, pairs):
    parent = list(range(n))

    def root(i):
        while parent[i] != i: i = parent[i]
        return i

    for i, j in pairs:
        i, j = sorted((root(i), root(j)))
        parent[j] = i
    return [root(i) for i in range(n)]


def check_result(result, n):
    "Every index in exactly one cluster, the first member of each stays."
    assert sorted(i for c in result.clusters for i in c) == list(range(n))
    assert all(c == sorted(c) for c in result.clusters) and result.keep == [c[0] for c in result.clusters] == sorted(result.keep)
    assert sorted(result.keep + result.dropped) == list(range(n)) and len(result.labels) == n
    assert all(result.labels[i] == c[0] for c in result.clusters for i in c)


@QUICK
@given(st.lists(TEXTS, min_size=1, max_size=8), st.integers(1, 6))
def test_shingle_numbers_are_the_naive_strings(texts, size):
    hashes, borders = shingle_hashes(texts, size)
    numbers = [set(hashes[a:b].tolist()) for a, b in zip(borders, borders[1:], strict=False)]
    strings = [naive_shingles(t, size) for t in texts]
    assert list(map(len, numbers)) == list(map(len, strings))
    for i, j in combinations(range(len(texts)), 2): assert len(numbers[i] & numbers[j]) == len(strings[i] & strings[j])
    assert not (hashes & np.uint64(1)).any() and (hashes < 2**63).all()


def test_words_that_differ_in_one_byte_or_in_length_have_different_numbers():
    words = ["a" * n for n in range(1, 140)] + ["a" * n + "\0" * m for n in range(1, 12) for m in range(1, 5)]
    words += ["a" * n + "b" + "a" * m for n in (0, 3, 7, 8, 63, 64) for m in (0, 3, 8, 70)]
    hashes, _ = shingle_hashes(words)
    assert len(set(hashes.tolist())) == len(set(words)) > 190


@QUICK
@given(st.lists(TEXTS, min_size=2, max_size=8))
def test_pair_similarity_is_jaccard(texts):
    hashes, borders = shingle_hashes(texts)
    pairs = np.array(list(product(range(len(texts)), repeat=2)))
    expected = [jaccard(naive_shingles(texts[i]), naive_shingles(texts[j])) for i, j in pairs]
    assert pair_similarity(hashes, borders, *pairs.T).tolist() == expected


def test_pair_similarity_of_no_pairs():
    hashes, borders = shingle_hashes(["a b", ""])
    assert pair_similarity(hashes, borders, np.empty(0, int), np.empty(0, int)).tolist() == []


@QUICK
@given(st.lists(TEXTS, max_size=12), st.sampled_from([0.3, 0.8, 1.0]), st.booleans())
def test_result_is_a_partition(texts, threshold, verify):
    for result in (minhash_dedup(texts, threshold, num_perm=64, verify=verify), exact_dedup(texts)): check_result(result, len(texts))


@QUICK
@given(st.integers(1, 40), st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), max_size=60))
def test_merge_is_union_find(n, pairs):
    pairs = [(i % n, j % n) for i, j in pairs]
    left, right = np.array(pairs, np.int64).reshape(-1, 2).T
    assert merge(np.arange(n), left, right).tolist() == components(n, pairs)


# short and empty texts

def test_short_texts_are_told_apart():
    result = minhash_dedup(["cat", "dog", "cat"], shingle_words=5)
    assert result.keep == [0, 1] and result.clusters == [[0, 2], [1]] and result.empty == 0


@pytest.mark.parametrize("size", [1, 2, 5, 9])
@pytest.mark.parametrize("joint", [" ", ""])
def test_lengths_around_the_shingle_size_lose_nothing(size, joint):
    "Words with blanks, and Han characters without; every length twice, with different content."
    letter = (lambda k: f"w{k}") if joint else (lambda k: chr(0x4e00 + k))
    texts, k = [], 0
    for n in range(1, size + 3):
        for _ in range(2):
            texts.append(joint.join(letter(k + i) for i in range(n)))
            k += n
    assert minhash_dedup(texts, shingle_words=size).dropped == []
    twice = minhash_dedup(texts + texts, shingle_words=size)
    assert twice.keep == list(range(len(texts))) and all(len(c) == 2 for c in twice.clusters)


def test_empty_texts_are_one_cluster_and_counted():
    result = minhash_dedup(["", "words", "   ", "\n\u3000", "words"])
    assert result.clusters == [[0, 2, 3], [1, 4]] and result.empty == 3
    assert exact_dedup(["", "a", ""]).empty == 2 and exact_dedup(["", " "]).keep == [0, 1]
    assert minhash_dedup([""] * 4).keep == [0]


# one survivor per cluster

def planted(sizes, rng):
    "Near-copies in clusters of these sizes, shuffled; returns texts and the cluster of each."
    texts, cluster = [], []
    for c, size in enumerate(sizes):
        base = [f"{c}x{rng.randrange(10**6)}" for _ in range(100)]
        for k in range(size):
            w = list(base)
            if k: w[rng.randrange(100)] = f"changed{k}"
            texts.append(" ".join(w))
            cluster.append(c)
    order = rng.sample(range(len(texts)), len(texts))
    return [texts[i] for i in order], [cluster[i] for i in order]


@pytest.mark.parametrize(("threshold", "num_perm", "verify", "workers"), product([0.5, 0.8], [64, 128, 256], [True, False], [1, 3]))
def test_one_survivor_per_cluster_under_every_option(threshold, num_perm, verify, workers):
    options = dict(threshold=threshold, num_perm=num_perm, verify=verify, workers=workers)
    texts, cluster = planted([3, 2, 1, 5, 1, 1, 8], random.Random(1))
    result = minhash_dedup(texts, **options)
    assert len(result.keep) == 7 and [cluster[i] for c in result.clusters for i in c] == [cluster[c[0]] for c in result.clusters for _ in c]
    assert minhash_dedup(["the same text as ever"] * 50, **options).keep == [0]
    assert minhash_dedup(["alone"], **options).keep == [0]
    nothing = minhash_dedup([], **options)
    assert nothing.keep == nothing.clusters == nothing.labels == []


def test_the_threshold_itself_counts():
    short, long = (" ".join(f"w{i}" for i in range(n)) for n in (12, 14))  # 8 shingles, all of them among 10
    assert jaccard(naive_shingles(short), naive_shingles(long)) == 0.8
    assert minhash_dedup([short, long], 0.8).keep == [0] and minhash_dedup([short, long], 0.81).keep == [0, 1]


def test_order_of_texts_changes_no_cluster():
    texts, _ = planted([4, 3, 1, 2, 6], random.Random(2))
    order = random.Random(3).sample(range(len(texts)), len(texts))
    groups = lambda result, names: sorted(sorted(names[i] for i in c) for c in result.clusters)
    assert groups(minhash_dedup([texts[i] for i in order]), order) == groups(minhash_dedup(texts), range(len(texts)))


def test_workers_change_nothing():
    texts = make_corpus(1500)  # several stretches of half a million characters
    for got, expected in zip(sketch(texts, workers=4), sketch(texts, workers=1), strict=True): assert np.array_equal(got, expected)
    assert minhash_dedup(texts, workers=4) == minhash_dedup(texts)


def test_a_text_longer_than_a_stretch():
    long = " ".join(f"word{i}" for i in range(120_000))
    assert minhash_dedup(["a b c", long, "short one", long + " more"]).clusters == [[0], [1, 3], [2]]


def test_signatures_are_the_same_in_every_process_and_version():
    code = "from llmlab.data.dedup import sketch; print(sketch(['to be or not to be', '床前明月光'], 3)[2].tolist())"
    run = lambda seed: subprocess.Popen([sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, stdout=subprocess.PIPE, text=True)
    for process in [run("1"), run("random")]:
        out, _ = process.communicate(timeout=120)
        assert out.strip() == "[[167926707, 1001700791, 1910746209], [1650313080, 1341526552, 1694719400]]"


# against all pairs

@pytest.mark.parametrize(("n", "threshold"), [(1500, 0.8), (800, 0.5)])
def test_recall_and_precision_against_all_pairs(n, threshold):
    recall_and_precision(make_corpus(n), threshold)


@pytest.mark.slow
def test_recall_and_precision_of_20000_texts():
    recall_and_precision(make_corpus(20_000), 0.8)


def recall_and_precision(texts, threshold):
    truth = all_near_pairs(texts, threshold)
    hashes, borders, sigs = sketch(texts)
    candidates = candidate_pairs(sigs, *choose_bands(threshold))
    found = {tuple(p) for p in candidates[pair_similarity(hashes, borders, *candidates.T) >= threshold].tolist()}
    recall, precision = len(found & truth) / len(truth), len(found & truth) / len(found)
    print(f"{len(texts)} texts, {len(truth)} pairs, {len(candidates)} candidates: recall {recall:.4f}, precision {precision:.4f}")
    assert recall >= 0.99 and precision == 1
    result = minhash_dedup(texts, threshold)
    assert result.clusters == result_from_labels(components(len(texts), found)).clusters
    exact = result_from_labels(components(len(texts), truth))
    assert not set(result.dropped) - set(exact.dropped) and len(result.dropped) >= 0.99 * len(exact.dropped)


def test_link_asks_for_no_pair_twice_and_none_within_a_cluster():
    texts = make_corpus(600)
    hashes, borders, sigs = sketch(texts)
    asked, labels = [], np.arange(len(texts))

    def same(left, right):
        asked.extend(map(tuple, np.sort(np.stack([left, right], 1), 1).tolist()))
        return pair_similarity(hashes, borders, left, right) >= 0.8

    labels = link(sigs, 21, 6, same)
    assert len(asked) == len(set(asked)) <= len(candidate_pairs(sigs, 21, 6))
    assert labels.tolist() == minhash_dedup(texts).labels


def test_many_copies_are_not_many_comparisons():
    "20,000 equal texts have 2 * 10**8 pairs, 3,000 variants of a form letter 4.5 million; a pass over all of them would not end here."
    assert minhash_dedup(["the very same licence text, once more"] * 20_000).keep == [0]
    body = " ".join(f"word{i}" for i in range(200))
    assert minhash_dedup([f"{body} yours {i}" for i in range(3000)]).keep == [0]


# theory

@pytest.mark.parametrize("similarity", [0.3, 0.6, 0.9])
def test_estimates_and_bands_follow_theory(similarity):
    rng, pairs, size = np.random.default_rng(5), 600, 150
    both = round(2 * size * similarity / (1 + similarity))
    draw = lambda n: rng.integers(0, 2**62, (pairs, n), dtype=np.uint64) * np.uint64(2)
    common = draw(both)
    hashes = np.concatenate([common, draw(size - both), common, draw(size - both)], 1).ravel()
    sigs = signatures(hashes, np.arange(2 * pairs + 1) * size, permutations(128))
    J, even, odd = both / (2 * size - both), np.arange(0, 2 * pairs, 2), np.arange(1, 2 * pairs, 2)
    error = agreement(sigs, even, odd) - J
    expected = (J * (1 - J) / 128) ** 0.5
    assert abs(error.mean()) < 4 * expected / pairs**0.5 and error.std() == pytest.approx(expected, rel=0.12)
    for bands, rows in ((16, 8), (42, 3), (9, 14)):
        equal = (sigs[even] == sigs[odd])[:, :bands * rows].reshape(pairs, bands, rows)
        seen = equal.all(2).any(1).mean()
        p = detection(J, bands, rows)
        assert abs(seen - p) <= 4 * (p * (1 - p) / pairs) ** 0.5 + 1e-3


def test_bands_keep_their_promise():
    for threshold, num_perm in product([0.3, 0.5, 0.8, 0.95, 1.0], [64, 128, 200]):
        bands, rows = choose_bands(threshold, num_perm)
        assert bands * rows <= num_perm and detection(threshold, bands, rows) >= 0.99
        assert rows == num_perm or detection(threshold, num_perm // (rows + 1), rows + 1) < 0.99
    with pytest.raises(ValueError, match="take more permutations"): choose_bands(0.1, 8)


# against other libraries

def test_equal_to_datasketch(parity):
    import datasketch

    texts = make_corpus(300, words=60)
    hashes, borders, sigs = sketch(texts)
    a, x = permutations(), (hashes >> np.uint64(31)).astype(np.uint32)
    mixed = x.copy()
    for shift, factor in ((16, 0x85ebca6b), (13, 0xc2b2ae35)): mixed = (mixed ^ mixed >> np.uint32(shift)) * np.uint32(factor)
    mixed ^= mixed >> np.uint32(16)
    ours, theirs = signatures(mixed.astype(np.uint64) << np.uint64(31), borders, a), []
    for lo, hi in zip(borders, borders[1:], strict=False):
        theirs.append(datasketch.MinHash(scheme="affine32", permutations=np.stack([a, np.zeros_like(a)]), hashfunc=int))
        theirs[-1].update_batch(x[lo:hi].tolist())
    gap = np.abs(ours.astype(np.int64) - np.array([m.hashvalues for m in theirs]).astype(np.int64)).max()
    parity("MinHash signatures, equal hashes and factors", "data.dedup", "datasketch", datasketch.__version__, gap, 0)

    pairs = np.array(list(combinations(range(0, 300, 7), 2)))
    expected = [theirs[i].jaccard(theirs[j]) for i, j in pairs]
    gap = np.abs(agreement(ours, *pairs.T) - expected).max()
    parity("Jaccard estimates from signatures", "data.dedup", "datasketch", datasketch.__version__, gap, 1e-12)

    for bands, rows in ((21, 6), (16, 8), (42, 3)):
        lsh = datasketch.MinHashLSH(num_perm=128, params=(bands, rows))
        for i, m in enumerate(theirs): lsh.insert(i, m)
        found = {(i, j) for i, m in enumerate(theirs) for j in lsh.query(m) if i < j}
        missing = found ^ set(map(tuple, candidate_pairs(ours, bands, rows).tolist()))
        parity(f"candidate pairs of {bands} bands of {rows}", "data.dedup", "datasketch", datasketch.__version__, len(missing), 0)


def test_same_decisions_as_rensa_where_they_are_clear(parity):
    from importlib.metadata import version

    import rensa

    texts, _ = planted([3, 1, 1, 4, 2, 1, 6], random.Random(4))  # similarity above 0.9 or 0
    deduplicator = rensa.RMinHashDeduplicator(threshold=0.7, num_perm=128, use_lsh=False, seed=1)
    kept = set()
    for i, t in enumerate(texts):
        m = rensa.RMinHash(num_perm=128, seed=1)
        m.update(sorted(naive_shingles(t)))
        if deduplicator.add(str(i), m): kept.add(i)
    different = len(kept ^ set(minhash_dedup(texts, 0.7).keep))
    parity("texts kept of planted clusters", "data.dedup", "rensa", version("rensa"), different, 0)


def test_chinese_poems(shared_data):
    "Characters are shingles; copies with one character changed go, different poems stay."
    records = json.loads((shared_data / "zh-poetry" / "tang300.json").read_text(encoding="utf-8"))
    poems = sorted({"".join(r["paragraphs"]) for r in records})
    texts = poems + [p[:9] + "變" + p[10:] for p in poems[:40]]
    sets = [naive_shingles(t) for t in texts]
    truth = {(i, j) for i, j in combinations(range(len(texts)), 2) if jaccard(sets[i], sets[j]) >= 0.6}
    assert len(poems) > 200 and len(truth) >= 20
    assert minhash_dedup(texts, 0.6).labels == components(len(texts), truth)


# bad input

@pytest.mark.parametrize(("texts", "message"), [("one string", "list of strings"), (b"bytes", "list of strings"), (["a", None], "text 1"),
                                                 ([b"a"], "text 0"), ([["a"]], "text 0")])
def test_strange_texts_are_named(texts, message):
    for f in (exact_dedup, minhash_dedup):
        with pytest.raises(ValueError, match=message): f(texts)


@pytest.mark.parametrize("options", [{"threshold": 0}, {"threshold": -1}, {"threshold": 1.5}, {"threshold": float("nan")}, {"num_perm": 0},
                                     {"shingle_words": 0}, {"workers": 0}, {"num_perm": 4, "threshold": 0.2}])
def test_strange_settings_are_refused(options):
    with pytest.raises(ValueError): minhash_dedup(["a", "b"], **options)


def test_generators_are_read_once():
    assert minhash_dedup(t for t in ["a", "b", "a"]).keep == exact_dedup(t for t in ["a", "b", "a"]).keep == [0, 1]
