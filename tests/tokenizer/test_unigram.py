"""Unigram: segmentation, EM, seeds and pruning against their naive twins, sentencepiece and tokenizers; round trips; bad input."""

import argparse
import io
import json
import math
import os
import pickle
import random
import re
import subprocess
import sys
import textwrap
import time
from collections import Counter
from importlib.metadata import version

import numpy as np
import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from llmlab.data.sources import stdlib_corpus
from llmlab.tokenizer import unigram
from llmlab.tokenizer.bpe import BPETokenizer
from llmlab.tokenizer.unigram import (
    CUT,
    Lattice,
    SegmentCache,
    UnigramTokenizer,
    all_arcs,
    arcs,
    covered,
    learn_pieces,
    log_sums,
    losses,
    maximise,
    naive_expected,
    naive_seeds,
    prefix_table,
    prune,
    sample_word,
    seed_pieces,
    segmentations,
    viterbi,
)
from llmlab.tokenizer.words import count_words, split_pattern

fuzz = settings(max_examples=150, deadline=None)
SPECIALS = ["<|endoftext|>", "<|eot|>", "<|eot|>x", "[PAD]"]
LINES = [
    f"def step_{i}(x, y={i * 37}):\n    return x + y  # café, 你好, naïve {i}\n\n\tif it's done: we'll stop 👍🏽\r\n" for i in range(20)
]
PARTS = [" ", "  ", "\t", "\n", "\r\n", "\x00", "\x1b", "\x85", "\xa0", "\u2028", "\ufeff", "7", "1234", "٣", "½", "a", "Z", "é", "e\u0301"]
PARTS += [
    "\u0301",
    "你",
    "の",
    "ก",
    "👍🏽",
    "👩‍👩‍👧",
    "'s",
    "don't",
    "<|",
    "def",
    " return",
    "...",
    "<0x41>",
    "\u0378",
    "\U0010ffff",
    *SPECIALS,
]
TEXT = st.lists(st.sampled_from(PARTS) | st.text("ab \n1'.", max_size=8) | st.characters(exclude_categories=["Cs"]), max_size=25).map(
    "".join
)
SOURCES = [open(m.__file__, encoding="utf-8").read() for m in (argparse, json, random, textwrap)]


@pytest.fixture(scope="module")
def small():
    "360 tokens learned from 20 lines."
    return UnigramTokenizer.train(LINES, 360, SPECIALS)


@pytest.fixture(scope="module")
def larger():
    "A tokenizer of real code."
    return UnigramTokenizer.train(SOURCES, 2000, SPECIALS, digits=1)


# Pieces over a small alphabet with scores in halves, so that ties are many and sums are exact.
PIECES = st.dictionaries(st.text("abc", min_size=2, max_size=5), st.integers(1, 12), max_size=12).map(
    lambda d: {s: -n / 2 for s, n in ({"a": 3, "b": 4, "c": 3} | d).items()}
)
WORDS = st.dictionaries(st.text("aabc", min_size=1, max_size=9), st.integers(1, 9), min_size=1, max_size=8)
numbers = lambda pieces: np.array([*pieces.values()])


# ---------------------------------------------------------------- the best segmentation


def naive_best(word, pieces, unknown):
    "Of all last pieces, from the longest on, the first of the best; before it, the best."
    if not word:
        return 0.0, []
    options = []
    for i in range(len(word)):
        last = word[i:]
        if last in pieces or len(last) == 1:
            score, parts = naive_best(word[:i], pieces, unknown)
            options.append((score + pieces.get(last, unknown), [*parts, last]))
    return max(options, key=lambda option: option[0])


def test_the_worked_example():
    pieces = {s: math.log(p) for s, p in {"h": 0.1, "u": 0.1, "g": 0.1, "s": 0.2, "hu": 0.1, "ug": 0.1, "hug": 0.3}.items()}
    assert viterbi("hugs", prefix_table(pieces), -99.0) == ["hug", "s"]
    found = {" ".join(parts): math.exp(p) for p, parts in segmentations("hugs", pieces)}
    assert found == pytest.approx({"hug s": 0.06, "hu g s": 0.002, "h ug s": 0.002, "h u g s": 0.0002})


@fuzz
@given(PIECES, st.text("abcx", max_size=10))
def test_viterbi_equals_the_naive_definition(pieces, word):
    score, parts = naive_best(word, pieces, -20.0)
    assert viterbi(word, prefix_table(pieces), -20.0) == parts
    assert score == max(p for p, _ in segmentations(word, {"x": -20.0} | pieces))


def test_viterbi_equals_the_naive_definition_on_3000_strings():
    rng = random.Random(0)
    for _ in range(3000):
        pieces = {"".join(rng.choices("abcd", k=rng.randrange(1, 5))): -rng.randrange(1, 9) / 2 for _ in range(10)}
        word = "".join(rng.choices("abcdé", k=rng.randrange(11)))
        assert viterbi(word, prefix_table(pieces), -9.0) == naive_best(word, pieces, -9.0)[1]


def test_ties_go_to_the_longest_last_piece():
    pieces = dict.fromkeys(["a", "aa", "aaa"], -1.0)
    assert viterbi("aaaa", prefix_table(pieces), -9.0) == ["a", "aaa"]
    assert viterbi("aaaaa", prefix_table(pieces), -9.0) == ["aa", "aaa"]


@fuzz
@given(st.lists(st.text("abcé你", max_size=7), max_size=6), st.lists(st.text("abcé👍", min_size=1, max_size=5), unique=True, max_size=10))
@example([], ["a"])
@example(["ab"], [])
def test_arcs_of_all_words_equal_those_of_each(words, pieces):
    ids = prefix_table({s: i for i, s in enumerate(pieces)})
    slow = [(r, *arc) for r, w in enumerate(words) for arc in arcs(w, ids, len(pieces))]
    assert sorted(zip(*(a.tolist() for a in all_arcs(words, pieces)), strict=True)) == sorted(slow)


@fuzz
@given(PIECES, WORDS)
def test_the_lattice_finds_the_same_best_segmentations(pieces, words):
    lattice, spelled = Lattice(words, pieces), [*pieces]
    word, piece, score = lattice.best(numbers(pieces))
    for r, w in enumerate(lattice.words):
        parts = viterbi(w, prefix_table(pieces), -99.0)
        assert [spelled[p] for p in piece[word == r]][::-1] == parts
        assert score[r] == sum(pieces[s] for s in parts)


# ---------------------------------------------------------------- expected counts and EM


@fuzz
@given(PIECES, WORDS)
def test_expected_counts_equal_enumeration(pieces, words):
    slow, slow_total = naive_expected(words, pieces)
    fast, total = Lattice(words, pieces).expected(numbers(pieces))
    np.testing.assert_allclose(fast, [*slow.values()], rtol=1e-10, atol=1e-300)
    assert total == pytest.approx(slow_total, rel=1e-12)


def test_unknown_characters_have_a_place_in_the_lattice():
    lattice = Lattice({"axb": 2}, ["a", "b"])
    counts, total = lattice.expected(np.array([-1.0, -2.0, -20.0]))
    assert counts.tolist() == [2, 2, 2] and total == -46


@fuzz
@given(PIECES, WORDS)
def test_plain_em_never_lowers_the_likelihood(pieces, words):
    lattice, logp, last = Lattice(words, pieces), numbers(pieces), -math.inf
    logp = logp - np.logaddexp.reduce(logp)
    for _ in range(6):
        counts, total = lattice.expected(logp)
        assert total >= last - 1e-9
        last = total
        logp, alive = maximise(counts, np.ones(len(logp), bool), 3, sparse=False)
        assert alive.all() and np.exp(logp).sum() == pytest.approx(1)


def test_the_sparse_step_is_digamma_and_drops_what_is_rare():
    digamma = np.vectorize(lambda x: (math.lgamma(x + 1e-4) - math.lgamma(x - 1e-4)) / 2e-4)  # the derivative of log gamma
    counts = np.array([0.0, 40.0, 0.49, 0.51, 7.0])
    logp, alive = maximise(counts, np.ones(5, bool), letters=1)
    assert alive.tolist() == [True, True, False, True, True]
    kept = np.array([0.5, 40, 0.51, 7])
    np.testing.assert_allclose(logp[alive], digamma(kept) - digamma(kept.sum()), rtol=1e-6)
    assert maximise(counts, np.ones(5, bool), letters=1, size=5)[1].all()
    counts = np.array([0.0, 40, 0, 0, 7])
    assert maximise(counts, np.arange(5) != 2, letters=1, size=5)[1].tolist() == [True, True, False, True, True], "the dead stay dead"


def test_long_words_do_not_underflow():
    lattice = Lattice({"ab" * 4000: 3}, ["a", "b", "ab"])
    counts, total = lattice.expected(np.log([0.001, 0.001, 0.002]))
    assert np.isfinite(total) and counts[0] + counts[2] == pytest.approx(12_000)


# ---------------------------------------------------------------- seeds and pruning


@fuzz
@given(WORDS | st.dictionaries(st.text("aé你👍 ", min_size=1, max_size=8), st.integers(1, 3), min_size=1, max_size=6), st.integers(1, 7))
@example({"a": 1}, 1)
def test_seeds_equal_the_naive_definition(words, longest):
    assert list(seed_pieces(words, longest).items()) == list(naive_seeds(words, longest).items())


def naive_loss(words, pieces, piece):
    "Of one piece, by enumeration; best ways by `viterbi`."
    best = {w: viterbi(w, prefix_table(pieces), -99.0) for w in words}
    freq = Counter()
    for w, c in words.items():
        for s in best[w]:
            freq[s] += c
    other = sorted((way for way in segmentations(piece, pieces) if len(way[1]) > 1), key=lambda way: -way[0])
    if not other:
        return math.inf
    if not freq[piece] or other[0][0] > pieces[piece]:
        return -math.inf
    parts, f, total = naive_best(piece, {s: p for s, p in pieces.items() if s != piece}, -99.0)[1], freq[piece], freq.total()
    return f * (math.log(f / total) - sum(math.log((freq[s] + f) / (total + f * (len(parts) - 1))) for s in parts))


@fuzz
@given(PIECES, WORDS)
def test_losses_equal_the_naive_definition(pieces, words):
    longer = {s: 1 for s in pieces if len(s) > 1}
    splits, spelled = Lattice(longer, pieces, whole=False), [*pieces]
    row = np.array([spelled.index(w) for w in splits.words], int)
    if not longer:
        return
    fast = losses(Lattice(words, pieces), splits, row, numbers(pieces))
    np.testing.assert_allclose(fast, [naive_loss(words, pieces, s) for s in pieces], rtol=1e-9, atol=1e-9)


def test_pruning_keeps_what_would_be_missed():
    loss, alive = np.array([np.inf, 5, -np.inf, 1, 9, 1]), np.array([True] * 5 + [False])
    assert prune(loss, alive, 2, 0.7).nonzero()[0].tolist() == [0, 1, 4]
    assert prune(loss, alive, 4, 0.1).nonzero()[0].tolist() == [0, 1, 3, 4]
    assert prune(loss, alive, 5, 0.1).nonzero()[0].tolist() == [0, 1, 2, 3, 4], "what nobody misses is the last choice"
    assert prune(loss, alive, 1, 0.9999999999999999).sum() == 4, "each round takes one at least"


def test_every_size_can_be_had():
    words = count_words(LINES, split_pattern())
    letters, seeds = len({c for w in words for c in w}), len(seed_pieces(words))
    for size in (letters, letters + 1, (letters + seeds) // 2, seeds - 1, seeds):
        pieces = learn_pieces(words, size)
        assert len(pieces) == len(dict(pieces)) == size
        assert {c for w in words for c in w} <= set(dict(pieces))
        assert all(-math.inf < p < 0 for _, p in pieces) and pieces == sorted(pieces, key=lambda p: -p[1])
    assert len(learn_pieces(words, seeds + 1)) == seeds


def test_sums_of_learned_scores_are_exact(small):
    scores = [p for _, p in small.pieces]
    assert all((p * 4096).is_integer() for p in scores)
    rng = random.Random(0)
    for _ in range(200):
        some = rng.choices(scores, k=50)
        assert sum(some) == math.fsum(some) == sum(sorted(some))
        assert np.cumsum(np.array(some, np.float32))[-1] == math.fsum(some)


@settings(max_examples=25, deadline=None)
@given(WORDS, st.randoms(use_true_random=False))
def test_pieces_do_not_depend_on_the_order_of_words(words, rng):
    items = list(words.items())
    rng.shuffle(items)
    assert learn_pieces(dict(items), 8) == learn_pieces(words, 8)


def test_training_raises_the_likelihood_and_reports_it():
    words, report = count_words(SOURCES, split_pattern()), []
    pieces = learn_pieces(words, 800, report=report)
    assert [r["pieces"] for r in report] == sorted((r["pieces"] for r in report), reverse=True) and report[-1]["pieces"] == 800
    lattice = Lattice(words, [s for s, _ in pieces])
    assert -lattice.forward(np.array([p for _, p in pieces]))[lattice.last] @ lattice.weight == pytest.approx(report[-1]["nats"], rel=1e-4)
    wider = learn_pieces(words, 1600, report=(more := []))
    assert len(wider) == 1600 and more[-1]["nats"] < report[-1]["nats"]


def in_fresh_process(code, seed):
    env = {**os.environ, "PYTHONHASHSEED": str(seed)}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout


def test_saved_files_are_equal_for_hash_seeds_workers_and_orders(tmp_path):
    code = (
        "from llmlab.tokenizer.unigram import UnigramTokenizer as U\n"
        "import llmlab.tokenizer.words as words; words.BATCH = 5000\n"
        "texts = [f'{i % 977} def f{i * 7919 % 10007}(x):\\n    return x + {i}\\n' for i in range(2000)]\n"
        "U.train(texts[::STEP], 600, ['<|endoftext|>'], workers=WORKERS).save('PATH')"
    )
    for seed, workers, step in ((0, 1, 1), (4, 3, -1)):
        filled = code.replace("WORKERS", str(workers)).replace("STEP", str(step)).replace("PATH", str(tmp_path / f"{seed}.json"))
        in_fresh_process(filled, seed)
    assert (tmp_path / "0.json").read_bytes() == (tmp_path / "4.json").read_bytes()


# ---------------------------------------------------------------- round trips


@settings(max_examples=400, deadline=None)
@given(TEXT)
@example("")
@example("\x00\x00")
@example("a\U0001f600\u0301\u0378b")
def test_every_text_comes_back(small, text):
    for tok in (small, UnigramTokenizer()):
        ids = tok.encode(text)
        assert tok.decode(ids) == text
        assert not set(ids) & set(tok.special_ids.values())
        assert tok.encode_batch([text]) == [ids]


def test_every_encoding_is_the_best_of_its_words(small):
    rng, pieces = random.Random(1), dict(small.pieces)
    for _ in range(1000):
        text = "".join(rng.choices(PARTS, k=rng.randrange(10)))
        parts = [s for w in small._split(text) for s in naive_best(w, pieces, small.unknown)[1]] if len(text) < 14 else None
        spelled = (
            [i for s in parts for i in ([256 + [*pieces].index(s)] if s in pieces else s.encode())]
            if parts is not None
            else small.encode(text)
        )
        assert small.encode(text) == spelled


def test_an_eighth_of_all_code_points_comes_back(small):
    rng = random.Random(3)
    text = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    rng.shuffle(text)
    text = "".join(text[::8])
    assert small.decode(small.encode(text)) == text
    assert small.decode(small.sample(text[:20_000], 0.5, rng)) == text[:20_000]


@pytest.mark.parametrize("text", ["abc\ud83d", "abc\udc00def", "你好a\udfff", b"bytes", None])
def test_what_is_no_text_is_refused_as_bpe_refuses_it(small, text):
    messages = []
    for tok in (small, BPETokenizer()):
        with pytest.raises(ValueError) as e:
            tok.encode(text)
        messages.append(str(e.value))
    assert messages[0] == messages[1]
    for act in (small.log_prob, lambda t: small.sample(t, 1.0, random.Random())):
        with pytest.raises(ValueError):
            act(text)


@pytest.mark.parametrize("name", SPECIALS)
def test_text_cannot_forge_a_special_token(small, name):
    special = set(small.special_ids.values())
    for text in (name, f"hi {name}", f"{name} hi", f"a{name}{name}b", f"<|im_start|>system\n{name}"):
        for ids in (small.encode(text), small.encode_batch([text])[0], small.sample(text, 0.3, random.Random(0))):
            assert not special & set(ids)
            assert small.decode(ids) == text
        assert small.special_ids[name] in small.encode(text, allowed_special=[name])
        assert small.special_ids[name] in small.sample(text, 0.3, random.Random(0), allowed_special=[name])


@pytest.mark.parametrize("char", ["a", " ", "\n", "1", "你", "👍"])
def test_runs_of_200_000_equal_characters(small, char):
    text = "x" + char * 200_000 + "y"
    ids = small.encode(text)
    assert small.decode(ids) == text


def test_time_grows_with_the_length_alone():
    tok = UnigramTokenizer([("ab" * n, -float(n)) for n in range(1, 9)] + [("a", -3.0), ("b", -3.0)], pattern="(?s:.+)")

    def seconds(n):
        start = time.process_time()
        assert tok.decode(tok.encode("ab" * n)) == "ab" * n
        return time.process_time() - start

    once, twice = (min(seconds(n) for _ in range(3)) for n in (25_000, 100_000))
    assert twice < 10 * once, (once, twice)  # linear is 4 times, quadratic 16 times


def test_the_cache_is_bounded_and_changes_nothing(small):
    cache = SegmentCache(lambda w: small._spell(viterbi(w, small._table, small.unknown)), size=50)
    full = [list(cache[f" word{i % 131}"]) for i in range(1000)]
    assert len(cache) <= 50
    fresh = UnigramTokenizer.from_state(small.state())
    assert full[:131] == [list(fresh._words[f" word{i}"]) for i in range(131)] and full[131:262] == full[:131]
    cache["x" * 1000]
    assert "x" * 1000 not in cache


# ---------------------------------------------------------------- sampling and likelihood


@pytest.mark.parametrize("alpha", [0.0, 0.2, 1.0, 2.5])
@pytest.mark.parametrize("word", ["hugs", "aabcab", "axb"])
def test_samples_have_the_exact_distribution(word, alpha):
    pieces = {
        s: -0.3 * (i + 1) for i, s in enumerate(["hug", "a", "b", "c", "h", "u", "g", "s", "hu", "ug", "ab", "aab", "ca", "bca", "cab"])
    }
    ways = {" ".join(parts): math.exp(alpha * p) for p, parts in segmentations(word, {"x": -2.0} | pieces)}
    exact = {s: w / sum(ways.values()) for s, w in ways.items()}
    generator, n, table = np.random.default_rng(7), 20_000, prefix_table(pieces)
    drawn = Counter(" ".join(sample_word(word, table, -2.0, 3, alpha, generator)) for _ in range(n))
    assert set(drawn) <= set(exact)
    chi2, df = sum((drawn[s] - n * p) ** 2 / (n * p) for s, p in exact.items()), len(exact) - 1
    assert chi2 < df + 4 * math.sqrt(2 * df) + 4


@fuzz
@given(TEXT, st.sampled_from([0.0, 0.1, 1.0, 50.0]), st.integers(0, 99))
def test_samples_decode_to_their_text(small, text, alpha, seed):
    ids = small.sample(text, alpha, random.Random(seed))
    assert small.decode(ids) == text
    assert ids == small.sample(text, alpha, random.Random(seed))


def test_a_large_alpha_draws_the_best(small):
    score = lambda ids: sum(small.pieces[i - 256][1] for i in ids)
    text = "def step(x): return x + y\n" * 3
    assert score(small.sample(text, 1e6, np.random.default_rng(0))) == pytest.approx(score(small.encode(text)), rel=1e-9)  # or a tie
    assert len({tuple(small.sample(LINES[3], 0.0, np.random.default_rng(i))) for i in range(20)}) == 20


@pytest.mark.parametrize("alpha", [-0.1, math.nan, math.inf])
def test_a_strange_alpha_is_named(small, alpha):
    with pytest.raises(ValueError, match=f"alpha is {alpha}"):
        small.sample("text", alpha, random.Random())


@fuzz
@given(PIECES, st.text("abcx", max_size=9))
def test_log_sums_equal_enumeration(pieces, word):
    for alpha in (0.0, 0.5, 1.0):
        exact = math.log(math.fsum(math.exp(alpha * p) for p, _ in segmentations(word, {"x": -20.0} | pieces)))
        assert log_sums(word, prefix_table(pieces), -20.0, alpha)[-1] == pytest.approx(exact, rel=1e-12, abs=1e-12)


def test_the_log_probability_of_a_text_equals_the_lattice(larger):
    text = SOURCES[3] + " 你好"
    lattice = Lattice(Counter(larger._split(text)), [s for s, _ in larger.pieces])
    logp = np.array([p for _, p in larger.pieces] + [larger.unknown])
    assert larger.log_prob(text) == pytest.approx(lattice.forward(logp)[lattice.last] @ lattice.weight, rel=1e-12)
    assert larger.log_prob("") == 0


# ---------------------------------------------------------------- sentencepiece


def plain(word):
    "Blanks and control characters as letters of another block, since sentencepiece has uses of its own for them."
    return "".join(chr(0x20000 + ord(c)) if c.isspace() or not c.isprintable() or c in "▁▅" else c for c in word)


@pytest.fixture(scope="module")
def renamed():
    return {plain(w): c for w, c in count_words(SOURCES, split_pattern()).items()}


def sentencepiece_of(words, size, **more):
    model, fair = io.BytesIO(), dict(character_coverage=1.0, normalization_rule_name="identity", add_dummy_prefix=False)
    fair |= dict(remove_extra_whitespaces=False, split_by_unicode_script=False, split_by_number=False, bos_id=-1, eos_id=-1, unk_id=0)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(w for w, c in words.items() for _ in range(c)),
        model_writer=model,
        model_type="unigram",
        vocab_size=size,
        num_threads=1,
        max_sentence_length=10**6,
        minloglevel=2,
        **(fair | more),
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def pieces_of(processor):
    normal = [i for i in range(1, processor.get_piece_size()) if not processor.is_byte(i)]
    return [(processor.id_to_piece(i), processor.get_score(i)) for i in normal]


def test_segmentations_with_their_pieces_equal_sentencepiece(renamed, parity):
    processor = sentencepiece_of(renamed, 1201)
    pieces = pieces_of(processor)
    ours, score, rng = UnigramTokenizer(pieces, pattern="(?s:.+)"), dict(pieces), random.Random(5)
    names = [s for s, _ in pieces]
    strings = [*renamed, *("".join(rng.choices(names, k=rng.randrange(1, 9))) for _ in range(4000))]
    assert len(strings) > 5000
    both = [([ours.decode([i]) for i in ours.encode(w)], processor.encode(w, out_type=str)) for w in strings]
    ties = [(a, b) for a, b in both if a != b]
    worst = max((abs(sum(map(score.get, a)) - sum(map(score.get, b))) for a, b in ties), default=0.0)  # single precision against double
    parity(
        "score between the two, where words are cut differently",
        "tokenizer.unigram",
        "sentencepiece",
        sentencepiece.__version__,
        worst,
        1e-4,
    )
    parity(
        "share of words cut differently (ties), its pieces",
        "tokenizer.unigram",
        "sentencepiece",
        sentencepiece.__version__,
        len(ties) / len(both),
        2e-3,
    )


def test_unknown_characters_become_the_bytes_of_sentencepiece(renamed):
    processor = sentencepiece_of(renamed, 1457, byte_fallback=True)
    ours, rng, differ = UnigramTokenizer(pieces_of(processor), pattern="(?s:.+)"), random.Random(6), 0
    spell = lambda ids: [f"<0x{i:02X}>" if i < 256 else ours.decode([i]) for i in ids]
    known = [s for s, _ in ours.pieces]
    for _ in range(3000):
        text = "".join(
            rng.choice(known) if rng.random() < 0.6 else rng.choice("ÄßжЖ你好👍🏽ก\u0301\u0378") for _ in range(rng.randrange(1, 9))
        )
        differ += spell(ours.encode(text)) != processor.encode(text, out_type=str)
    assert differ <= 6


def bits(pieces, words, settle=0):
    "Bits a character, over all segmentations, after so many rounds of plain EM."
    lattice, logp = Lattice(words, [s for s, _ in pieces]), np.array([p for _, p in pieces])
    for _ in range(settle):
        logp, _ = maximise(lattice.expected(logp)[0] + 1e-3, np.ones(len(logp), bool), 0, sparse=False)
    total = lattice.forward(logp)[lattice.last] @ lattice.weight
    return -total / math.log(2) / sum(len(w) * c for w, c in words.items())


def test_trained_pieces_are_as_likely_as_those_of_sentencepiece(tmp_path, parity):
    texts = [d.text for d in stdlib_corpus(kinds=("docstring",))]
    renamed = {plain(w): c for w, c in count_words(texts, split_pattern()).items()}
    (tmp_path / "seeds.tsv").write_text("".join(f"{s}\t{score // len(s)}\n" for s, score in seed_pieces(renamed).items()), encoding="utf-8")
    size, says = 4000, ("tokenizer.unigram", "sentencepiece", sentencepiece.__version__)
    theirs = pieces_of(sentencepiece_of(renamed, size + 1, seed_sentencepieces_file=str(tmp_path / "seeds.tsv")))
    ours, wide = learn_pieces(renamed, size), learn_pieces(renamed, int(1.1 * (size + 1)))
    assert len(theirs) == len(ours) == size
    for name, rounds in (("as trained", 0), ("settled by EM", 10)):
        worse = max(0.0, bits(ours, renamed, rounds) / bits(theirs, renamed, rounds) - 1)
        parity(f"bits a character above its own, 4,000 pieces {name}, relative", *says, worse, 0.0)
    single = [p for p in wide if len(p[0]) == 1]
    cut = single + [p for p in wide if len(p[0]) > 1][: size - len(single)]
    apart = abs(bits(cut, renamed, 10) / bits(theirs, renamed, 10) - 1)
    parity("bits a character with its way to finish, settled by EM, relative", *says, apart, 0.01)
    differ = len({s for s, _ in cut} - {s for s, _ in theirs}) / size
    parity("share of other pieces with its way to finish, same seeds", *says, differ, 0.02)
    own = pieces_of(sentencepiece_of(renamed, size + 1))
    assert bits(ours, renamed) < bits(own, renamed)


# ---------------------------------------------------------------- tokenizers


@pytest.fixture(scope="module")
def peer(small, tmp_path_factory):
    return Tokenizer.from_file(str(small.to_hf(tmp_path_factory.mktemp("hf"))))


@fuzz
@given(TEXT)
def test_tokenizers_reads_it_alike(small, peer, text):
    peer.encode_special_tokens = True
    assert small.encode(text) == peer.encode(text).ids
    peer.encode_special_tokens = False
    ids = small.encode(text, allowed_special="all")
    assert ids == peer.encode(text).ids
    assert peer.decode(ids, skip_special_tokens=False) == text


def test_parity_on_real_code(larger, tmp_path, parity):
    hf = Tokenizer.from_file(str(larger.to_hf(tmp_path / "tok.json")))
    rng = random.Random(8)
    texts = [open(m.__file__, encoding="utf-8").read() for m in (os, subprocess, pickle)] + [
        "".join(rng.choices(PARTS, k=rng.randrange(30))) for _ in range(1000)
    ]
    differ = sum(larger.encode(t, allowed_special="all") != e.ids for t, e in zip(texts, hf.encode_batch(texts), strict=True))
    parity("encoded texts, Unigram through to_hf", "tokenizer.unigram", "tokenizers", version("tokenizers"), differ, 0)


def test_an_unknown_character_costs_ten_more_than_the_least_probable_piece(tmp_path):
    for lowest, expected in ((-20.0, [0xC3, 0xA9, 258]), (-9.0, [256, 257])):  # é ab: -31, éa b: -40; then -20 and -18
        tok = UnigramTokenizer([("éa", lowest), ("b", lowest), ("ab", -1.0)])
        assert tok.unknown == lowest - 10
        hf = Tokenizer.from_file(str(tok.to_hf(tmp_path)))
        assert tok.encode("éab") == hf.encode("éab").ids == expected
    assert UnigramTokenizer().unknown == -10


def test_to_hf_refuses_what_it_could_not_keep_apart(tmp_path):
    with pytest.raises(ValueError, match="'<0x00>' in one word"):
        UnigramTokenizer([("a", -1.0)], pattern="(?s:.+)").to_hf(tmp_path)
    for tok in (UnigramTokenizer([("he", -1.0)], ["he"]), UnigramTokenizer([("<0x41>", -1.0)]), UnigramTokenizer([], ["<0x41>"])):
        with pytest.raises(ValueError, match="names two tokens"):
            tok.to_hf(tmp_path)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize("texts", [[], [""], ["  \n\t "], iter([]), ["\u3000\xa0"]])
@pytest.mark.parametrize("workers", [1, 2])
def test_no_text_is_an_error_that_says_so(texts, workers):
    with pytest.raises(ValueError, match="no text to learn from"):
        UnigramTokenizer.train(texts, 300, workers=workers)


@pytest.mark.parametrize(
    "texts, says",
    [("one string", "pass a list"), (["fine", b"bytes"], "text 1 is bytes"), (["a\udcffb"], r"text 0 .*U\+DCFF at position 1")],
)
def test_wrong_texts_are_named(texts, says):
    with pytest.raises(ValueError, match=says):
        UnigramTokenizer.train(texts, 300)


@pytest.mark.parametrize("size", [0, 255, 261, -5])
def test_too_small_a_vocabulary_says_the_least(size):
    with pytest.raises(ValueError, match=f"{size}.* 4 characters .*262.*coverage"):
        UnigramTokenizer.train(["abba cab"], size, ["<a>", "<b>"])
    assert UnigramTokenizer.train(["abba cab"], 262, ["<a>", "<b>"]).vocab_size == 262


def test_too_large_a_vocabulary_says_the_most():
    text, most = "the cat, the hat", 256 + len(seed_pieces(count_words(["the cat, the hat"], split_pattern())))
    with pytest.raises(ValueError, match=f"allow {most - 256}.*{most}.*allow_smaller"):
        UnigramTokenizer.train([text], 5000)
    assert UnigramTokenizer.train([text], most).vocab_size == most
    tok = UnigramTokenizer.train([text], 5000, ["<|endoftext|>"], allow_smaller=True)
    assert tok.vocab_size == most + 1 and tok.eos_id == most


@pytest.mark.parametrize(
    "wrong",
    [
        {"coverage": 0},
        {"coverage": 1.1},
        {"coverage": math.nan},
        {"keep": 0},
        {"keep": 1.0},
        {"steps": 0},
        {"seeds": 0},
        {"longest": 0},
        {"digits": 4},
    ],
)
def test_settings_are_checked(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        UnigramTokenizer.train(LINES, 360, **wrong)


def test_rare_characters_are_left_to_their_bytes():
    texts = ["common words " * 500 + "你"]
    for coverage, expected in ((0.999, False), (1.0, True)):
        tok = UnigramTokenizer.train(texts, 300, coverage=coverage, allow_smaller=True)
        assert any("你" in s for s, _ in tok.pieces) == expected
        assert tok.decode(tok.encode("你 common")) == "你 common"
    assert covered({"aab": 5, "a字b": 1, "a" * 600: 1}, 0.99)[1] == {"aab": 5, "a": 1, "b": 1, "a" * CUT: 1, "a" * (600 - CUT): 1}


def test_settings_reach_the_trainer():
    tok = UnigramTokenizer.train(LINES, 360, longest=3)
    assert max(len(s) for s, _ in tok.pieces) == 3
    assert UnigramTokenizer.train(LINES, 360, seeds=60).fingerprint != UnigramTokenizer.train(LINES, 360).fingerprint


def test_a_run_of_equal_characters_trains():
    tok = UnigramTokenizer.train(["a" * 300_000], 270, allow_smaller=True)
    assert len(tok.encode("a" * 1600)) == 100


@pytest.mark.parametrize(
    "pieces, says",
    [
        ([("a", math.nan)], "nan"),
        ([("a", 0.5)], "0.5"),
        ([("a", -math.inf)], "inf"),
        ([("a", "-1")], "'-1'"),
        ([("a", True)], "True"),
        ([("a", None)], "None"),
        ([("", -1.0)], "piece 0 is empty"),
        ([("a", -1.0), ("a", -2.0)], "'a' is named twice"),
        ([("\ud800", -1.0)], "surrogate"),
        ([(b"a", -1.0)], "piece 0 is bytes"),
    ],
)
def test_wrong_pieces_are_named(pieces, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        UnigramTokenizer(pieces)


# ---------------------------------------------------------------- files


def test_save_and_load(small, tmp_path):
    path = tmp_path / "deep" / "tok.json"
    small.save(path)
    back = UnigramTokenizer.load(path)
    for name in ("pieces", "special_ids", "pattern", "fingerprint", "unknown"):
        assert getattr(back, name) == getattr(small, name)
    first = path.read_bytes()
    back.save(path)
    assert path.read_bytes() == first
    assert back.encode(LINES[1]) == small.encode(LINES[1])
    for tok in (small, back):
        again = pickle.loads(pickle.dumps(tok))
        assert again.fingerprint == small.fingerprint and again.encode(LINES[0]) == small.encode(LINES[0])


CHANGES = [
    {"format": "llmlab.bpe"},
    {"version": 2},
    {"extra": 1},
    {"fingerprint": "0"},
    {"pieces": None},
    {"pieces": [["a"]]},
    {"pieces": [["a", 1.0]]},
    {"pieces": [["a", None]]},
    {"pieces": [["a", -1.0]]},
    {"pieces": [[1, -1.0]]},
    {"pieces": "ab"},
    {"pattern": "("},
    {"pattern": None},
    {"special_tokens": ["a", "a"]},
    {"special_tokens": None},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_a_changed_file_is_refused_by_name(small, tmp_path, change):
    path = tmp_path / "tok.json"
    small.save(path)
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **change}), encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(str(path))):
        UnigramTokenizer.load(path)


def test_broken_and_foreign_files_are_refused_by_name(small, tmp_path):
    path = tmp_path / "tok.json"
    small.save(path)
    data = path.read_bytes()
    for content in (b"", b"{}", b"[]", b"null", *(data[:n] for n in range(0, len(data) - 2, 331))):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=re.escape(str(path))):
            UnigramTokenizer.load(path)
    BPETokenizer().save(path)
    with pytest.raises(ValueError, match="llmlab.unigram"):
        UnigramTokenizer.load(path)


def test_a_flipped_byte_is_found(small, tmp_path):
    path = tmp_path / "tok.json"
    small.save(path)
    data, rng = path.read_bytes(), random.Random(2)
    for _ in range(100):
        i = rng.randrange(len(data))
        path.write_bytes(data[:i] + bytes([data[i] ^ (1 << rng.randrange(8))]) + data[i + 1 :])
        try:
            same = UnigramTokenizer.load(path).fingerprint == small.fingerprint  # a changed blank between values is no harm
        except ValueError as e:
            same = str(path) in str(e)
        assert same, i


def test_names_are_exported():
    assert {"UnigramTokenizer", "viterbi", "Lattice", "learn_pieces"} <= set(unigram.__all__)
