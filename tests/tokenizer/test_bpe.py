"""Byte-level BPE: the trainer and the encoder against their naive twins, tiktoken and tokenizers; round trips; bad input."""

import argparse
import json
import os
import pickle
import random
import re
import subprocess
import sys
import unicodedata
from importlib.metadata import version

import pytest
import regex
import rustbpe
import tiktoken
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from llmlab.data.sources import stdlib_corpus
from llmlab.tokenizer import bpe, words
from llmlab.tokenizer.bpe import BPETokenizer, byte_chars, learn_merges, merge_long, merge_short, naive_encode, naive_merges
from llmlab.tokenizer.words import ASCII, PATTERNS, UNICODE, count_words, split_pattern, splitter

fuzz = settings(max_examples=200, deadline=None)
SPECIALS = ["<|endoftext|>", "<|eot|>", "<|eot|>x", "[PAD]"]
LINES = [f"def step_{i}(x, y={i * 37}):\n    return x + y  # café, 你好, naïve {i}\n\n\tif it's done: we'll stop 👍🏽\r\n"
         for i in range(20)]

# What splits texts differently in careless tokenizers.
KINDS = (
    [" ", "  ", "\t", "\n", "\r\n", "\r", "\x00", "\x07", "\x1b", "\x1c", "\x7f", "\x85", "\xa0", "\u2028", "\u3000", "\ufeff", "\u200b"],
    ["0", "7", "42", "1234", "٣", "Ⅷ", "½", "a", "Z", "é", "e\u0301", "\u0301", "ß", "ſ", "İ", "K", "你", "好。", "の", "한", "ก", "ा"],
    ["🙂", "👍🏽", "🇩🇪", "👩‍👩‍👧", "'s", "'LL", "don't", "'", '"', "<|", "|>", "_", "->", "==", "...", "#", "the", "ab", *SPECIALS])
MIXED = st.one_of(
    *map(st.sampled_from, KINDS),
    st.text(alphabet="ab \n\t1'.", max_size=12),
    st.integers(1, 40).map(" ".__mul__),
    st.characters(max_codepoint=0x2FFF, exclude_categories=["Cs", "Cn"]))
TEXT = st.lists(MIXED, max_size=30).map("".join)


@pytest.fixture(scope="module")
def small():
    "300 tokens learned from 20 lines."
    return BPETokenizer.train(LINES, 300, SPECIALS)


@pytest.fixture(scope="module")
def larger():
    "A tokenizer of real code, single digits."
    return BPETokenizer.train([open(m.__file__, encoding="utf-8").read() for m in (argparse, json, re, random)], 1200, SPECIALS, digits=1)


# ---------------------------------------------------------------- training


def test_the_worked_example():
    assert learn_merges({"aaabdaaabac": 1}, 3) == [(97, 97), (97, 98), (256, 257)]


WORDS = st.dictionaries(st.text("abc", min_size=1, max_size=14) | st.text("aé ", min_size=1, max_size=8), st.integers(1, 5), max_size=12)


@fuzz
@given(WORDS, st.integers(0, 30))
@example({"aaaa": 1, "aaa": 2, "aaaaaaa": 1}, 9)
@example({}, 3)
def test_incremental_training_equals_the_naive_definition(words, n):
    assert learn_merges(words, n) == naive_merges(words, n)


@fuzz
@given(WORDS, st.randoms(use_true_random=False))
def test_merges_do_not_depend_on_the_order_of_words(words, rng):
    items = list(words.items())
    rng.shuffle(items)
    assert learn_merges(dict(items), 20) == learn_merges(words, 20)


@settings(max_examples=50, deadline=None)
@given(st.lists(TEXT, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_merges_do_not_depend_on_the_order_of_texts(texts, rng):
    if not "".join(texts).strip(): texts = texts + ["word"]
    shuffled = rng.sample(texts, len(texts))
    a, b = (BPETokenizer.train(t, 300, allow_smaller=True) for t in (texts, shuffled))
    assert a.merges == b.merges


def in_fresh_process(code, seed):
    env = {**os.environ, "PYTHONHASHSEED": str(seed)}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout


def test_ties_are_broken_alike_for_every_hash_seed():
    code = ("from llmlab.tokenizer.bpe import BPETokenizer as B\n"
            "print([B.train([t], 260).merges for t in ('aaabbbccccdddd', 'bbbaaaddddcccc')])\n"
            f"print(B.train({LINES!r}, 350).merges)")
    answers = {in_fresh_process(code, seed) for seed in range(5)}
    assert len(answers) == 1
    first, second = eval(answers.pop().splitlines()[0])
    assert first == second == [(99, 99), (100, 100), (97, 97), (98, 98)]    # counts 3, 3, 2, 2


def test_saved_files_are_equal_for_hash_seeds_and_workers(tmp_path):
    code = ("from llmlab.tokenizer.bpe import BPETokenizer as B\n"
            "import llmlab.tokenizer.words as words; words.BATCH = 5000\n"
            "texts = [f'{i % 977} def f{i * 7919 % 10007}(x):\\n    return x + {i}\\n' for i in range(2000)]\n"
            "B.train(texts, 400, ['<|endoftext|>'], workers=WORKERS).save('PATH')")
    for seed, workers in ((0, 1), (4, 3)):
        in_fresh_process(code.replace("WORKERS", str(workers)).replace("PATH", str(tmp_path / f"{seed}.json")), seed)
    assert (tmp_path / "0.json").read_bytes() == (tmp_path / "4.json").read_bytes()


def test_counting_in_processes_equals_counting_here(monkeypatch):
    called = []
    real = words._count_in_processes
    monkeypatch.setattr(words, "_count_in_processes", lambda *a: called.append(a) or real(*a))
    monkeypatch.setattr(words, "BATCH", 10_000)
    texts = [line * 40 for line in LINES]
    assert count_words(texts, split_pattern(), workers=2) == count_words(texts, split_pattern())
    assert len(called) == 1
    assert count_words(LINES, split_pattern(), workers=2) == count_words(LINES, split_pattern())
    assert len(called) == 1, "a small text stays in one process"


def test_a_counting_process_that_dies_is_an_error(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr(words, "BATCH", 10_000)
    with pytest.raises(RuntimeError, match="counting process"): count_words([line * 40 for line in LINES], split_pattern(), workers=2)


def test_texts_are_read_once_and_not_held():
    alive = []

    class Text(str):
        def __del__(self): alive.remove(id(self))

    def texts():
        for i in range(60):
            t = Text(f"text number {i} " * 10_000)
            alive.append(id(t))
            most.append(len(alive))
            yield t
            del t

    most = []
    BPETokenizer.train(texts(), 270)
    assert max(most) < 20 and not alive


@pytest.mark.parametrize("n", [400, 1500])
def test_merges_equal_those_of_tokenizers_when_bytes_are_sorted_alike(n, parity):
    "tokenizers breaks ties by smallest ids too, but numbers the bytes by GPT-2's characters; with bytes as themselves nothing differs."
    texts = [open(m.__file__, encoding="utf-8").read() for m in (argparse, json, random)]
    ours = learn_merges(count_words(texts, split_pattern()), n)
    letter = [chr(0x4E00 + b) for b in range(256)]    # one CJK letter per byte, in the order of the bytes
    split = splitter(split_pattern())
    spelled = (" ".join("".join(letter[b] for b in w.encode()) for w in split(t)) for t in texts)
    peer = Tokenizer(models.BPE())
    peer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    peer.train_from_iterator(spelled, trainers.BpeTrainer(vocab_size=256 + n, initial_alphabet=letter, show_progress=False))
    vocab = peer.get_vocab()
    theirs = [(vocab[a], vocab[b]) for a, b in json.loads(peer.to_str())["model"]["merges"]]
    assert len(theirs) == n
    differ = sum(a != b for a, b in zip(ours, theirs, strict=True))
    parity(f"{n} trained merges, bytes in one order", "tokenizer.bpe", "tokenizers", version("tokenizers"), differ, 0)


def test_every_token_of_a_large_vocabulary_is_rustbpes(parity):
    "The same pattern, the same rule for ties: each of 32,768 tokens at its place."
    texts = [d.text for d in stdlib_corpus(kinds=("code", "docstring"))]
    ours, peer = BPETokenizer.train(texts, 32768), rustbpe.Tokenizer()
    peer.train_from_iterator(texts, 32768, pattern=split_pattern())
    theirs = [bytes(token) for token, _ in sorted(peer.get_mergeable_ranks(), key=lambda ranked: ranked[1])]
    differ = sum(ours.decode_bytes(i) != token for i, token in zip(range(32768), theirs, strict=True))
    parity("32,768 tokens learned from the standard library", "tokenizer.bpe", "rustbpe", version("rustbpe"), differ, 0)


def test_merges_agree_with_tokenizers_up_to_ties():
    texts = [open(m.__file__, encoding="utf-8").read() for m in (argparse, json, random)]
    n, chars = 1000, byte_chars()
    ours = BPETokenizer.train(texts, 256 + n)
    peer = Tokenizer(models.BPE())
    peer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split_pattern()), "isolated"),
                                                  pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    peer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=256 + n, initial_alphabet=alphabet, show_progress=False))
    theirs = set(peer.get_vocab())
    common = sum("".join(chars[b] for b in ours.decode_bytes(i)) in theirs for i in range(256, 256 + n))
    assert common > 0.97 * n


# ---------------------------------------------------------------- encoding


@fuzz
@given(st.text("abé ", max_size=40))
def test_three_ways_to_merge_a_word_agree(word):
    merges = learn_merges({"abab": 5, "aaaa": 3, " ab": 4, "éa": 2, "bbabé": 2, "aab": 1}, 14)
    made = {p: 256 + i for i, p in enumerate(merges)}
    slow = naive_encode(word, merges)
    assert merge_short(list(word.encode()), made) == slow
    assert merge_long(list(word.encode()), made) == slow


@fuzz
@given(WORDS, st.text("abcé ", max_size=80))
def test_ways_to_merge_agree_for_any_trained_merges(words, word):
    merges = learn_merges(words, 25)
    made = {p: 256 + i for i, p in enumerate(merges)}
    assert merge_short(list(word.encode()), made) == merge_long(list(word.encode()), made) == naive_encode(word, merges)


def peers(tokenizer, folder):
    hf = Tokenizer.from_file(str(tokenizer.to_hf(folder)))
    hf.encode_special_tokens = True
    return tokenizer.to_tiktoken(), hf


@pytest.fixture(scope="module")
def small_peers(small, tmp_path_factory): return peers(small, tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def larger_peers(larger, tmp_path_factory): return peers(larger, tmp_path_factory.mktemp("larger"))


def check_all_ways(tokenizer, tik, hf, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids == tik.encode_ordinary(text)
    assert ids == hf.encode(text).ids
    if tokenizer.vocab_size < 400: assert ids == [i for w in tokenizer._split(text) for i in naive_encode(w, tokenizer.merges)]


@fuzz
@given(TEXT)
@example("  Hello World.")
@example("a\n\n\tb  ")
@example("")
def test_round_trip_and_peers_by_search(small, small_peers, text): check_all_ways(small, *small_peers, text)


def random_text(rng):
    kinds = [k for kind in KINDS for k in kind]
    ranges = ((0, 128), (0, 0x250), (0x3000, 0x9FFF), (0x1F300, 0x1F650))
    return "".join(rng.choice(kinds) if rng.random() < 0.7 else chr(rng.randrange(*rng.choice(ranges))) for _ in range(rng.randrange(25)))


def test_round_trip_and_peers_on_2000_random_strings(small, small_peers):
    rng = random.Random(42)
    for _ in range(2000): check_all_ways(small, *small_peers, random_text(rng))


def test_round_trip_and_peers_with_single_digits(larger, larger_peers):
    rng = random.Random(43)
    for _ in range(2000): check_all_ways(larger, *larger_peers, random_text(rng))


@settings(max_examples=150, deadline=None)
@given(TEXT)
def test_specials_equal_those_of_peers(small, text):
    peer = small.to_tiktoken()
    for names in (["<|eot|>"], ["<|endoftext|>", "[PAD]"]):    # no two that begin alike: tiktoken leaves their order open
        ids = small.encode(text, allowed_special=names)
        assert small.decode(ids) == text
        assert ids == peer.encode(text, allowed_special=set(names), disallowed_special=())


@settings(max_examples=150, deadline=None)
@given(TEXT)
def test_all_specials_equal_those_of_tokenizers(small, small_peers, text):
    hf = Tokenizer.from_str(small_peers[1].to_str())
    assert small.encode(text, allowed_special="all") == hf.encode(text).ids
    assert hf.decode(small.encode(text), skip_special_tokens=False) == text


def test_parity_on_real_code(larger, larger_peers, parity):
    texts = [open(m.__file__, encoding="utf-8").read() for m in (os, subprocess, pickle)]
    ours = [larger.encode(t) for t in texts]
    tik, hf = larger_peers
    differ = lambda theirs: sum(a != b for a, b in zip(ours, theirs, strict=True))
    parity("encoded texts", "tokenizer.bpe", "tiktoken", tiktoken.__version__, differ([tik.encode_ordinary(t) for t in texts]), 0)
    parity("encoded texts", "tokenizer.bpe", "tokenizers", version("tokenizers"), differ([e.ids for e in hf.encode_batch(texts)]), 0)
    parity("encode_batch, the fast path", "tokenizer.bpe", "tiktoken", tiktoken.__version__, differ(larger.encode_batch(texts)), 0)


def test_runs_of_blanks_between_words(small):
    for n in range(1, 41):
        for blank in (" ", "\n", "\t", " \n", "\u3000"):
            text = "one" + blank * n + "two"
            assert small.decode(small.encode(text)) == text


@fuzz
@given(st.lists(TEXT, max_size=5), st.sampled_from([(), ["<|eot|>"], "all"]))
def test_encode_batch_equals_encode(small, texts, allowed):
    assert small.encode_batch(texts, allowed_special=allowed) == [small.encode(t, allowed_special=allowed) for t in texts]


@pytest.mark.parametrize("digits", [1, 2, 3])
def test_the_ascii_twin_of_the_pattern_splits_alike(digits):
    full, narrow = regex.compile(split_pattern(digits)), re.compile(split_pattern(digits, ASCII))
    rng = random.Random(0)
    for _ in range(3000):
        text = "".join(chr(rng.choice((rng.randrange(128), 32, 10, 39, 115, 49))) for _ in range(rng.randrange(40)))
        assert narrow.findall(text) == full.findall(text), repr(text)
    assert split_pattern(digits) == split_pattern(digits, UNICODE)


def test_digits_are_split_as_asked():
    for digits, expected in ((1, ["1", "2", "3", "4"]), (2, ["12", "34"]), (3, ["123", "4"])):
        assert splitter(split_pattern(digits))("1234") == expected
        assert splitter(split_pattern(digits))("é1234") == ["é", *expected]


def test_engines_differ_only_in_young_characters():
    "Which characters are letters, numerals, blanks: `regex` and tiktoken agree on all that Python's own tables know."
    text = "".join(chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000)
    for kind in UNICODE.values():
        keep = tiktoken.Encoding("kind", pat_str=kind, mergeable_ranks={bytes([i]): i for i in range(256)}, special_tokens={})
        theirs = set(keep.decode(keep.encode_ordinary(text)))    # tiktoken drops what no word holds
        young = set(regex.findall(kind, text)) ^ theirs
        assert all(unicodedata.category(c) == "Cn" for c in young)


def test_an_eighth_of_all_code_points_comes_back(small):
    rng = random.Random(3)
    text = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    rng.shuffle(text)
    text = "".join(text[::8]) + "".join(text[:2000])
    assert small.decode(small.encode(text)) == text
    assert small.decode(small.encode_batch([text])[0]) == text


class Counted(dict):
    looked = 0

    def get(self, *a):
        Counted.looked += 1
        return super().get(*a)


@pytest.mark.parametrize("unit", ["a", "ab", "é"])
def test_long_words_take_linear_lookups(unit):
    merges = learn_merges({unit * 64: 1}, 12)
    made = Counted({p: 256 + i for i, p in enumerate(merges)})
    text = unit * 40_000
    Counted.looked = 0
    ids = merge_long(list(text.encode()), made)
    assert Counted.looked < 8 * len(text.encode())
    assert b"".join(bpe.token_bytes(merges)[i] for i in ids) == text.encode()


@pytest.mark.parametrize("char", ["a", " ", "\n", "1", "你"])
def test_runs_of_200_000_equal_characters(small, char):
    text = "x" + char * 200_000 + "y"
    ids = small.encode(text)
    assert small.decode(ids) == text
    assert ids == small.encode_batch([text])[0]


def test_a_run_of_equal_characters_trains():
    tok = BPETokenizer.train(["a" * 50_000], 300, allow_smaller=True)
    assert tok.merges[:3] == [(97, 97), (256, 256), (257, 257)]
    assert len(tok.encode("a" * 50_000)) == 1


def test_runs_of_blanks_that_make_tiktoken_panic(small):
    text = "x" + " " * 1_200_000 + "y"
    ids, = small.encode_batch([text])
    assert small.decode(ids) == text and len(ids) < 1_200_000


def test_the_cache_is_bounded_and_changes_nothing(small):
    cache = bpe.WordCache(small._made, size=50)
    full = [cache[f" word{i % 131}"] for i in range(1000)]
    assert len(cache) <= 50
    assert full == [tuple(naive_encode(f" word{i % 131}", small.merges)) for i in range(1000)]
    cache["x" * 1000]
    assert "x" * 1000 not in cache


# ---------------------------------------------------------------- special tokens


@pytest.mark.parametrize("name", SPECIALS)
def test_text_cannot_forge_a_special_token(small, name):
    special = set(small.special_ids.values())
    for text in (name, f"hi {name}", f"{name} hi", f"a{name}{name}b", f"<|im_start|>system\n{name}"):
        for ids in (small.encode(text), small.encode_batch([text])[0]):
            assert not special & set(ids)
            assert small.decode(ids) == text


def test_only_named_specials_appear(small):
    text = "a<|eot|>b<|endoftext|>c<|eot|>xd"
    eot, end, eotx = (small.special_ids[n] for n in ("<|eot|>", "<|endoftext|>", "<|eot|>x"))
    found = lambda names: [i for i in small.encode(text, allowed_special=names) if i >= small.special_ids["<|endoftext|>"]]
    assert found(()) == []
    assert found(["<|endoftext|>"]) == [end]
    assert found({"<|eot|>"}) == [eot, eot]
    assert found("all") == [eot, end, eotx]    # the longest of those that begin at one place
    assert small.eos_id == end


def test_special_names_are_checked(small):
    with pytest.raises(ValueError, match="<|nope|>"): small.encode("hi", allowed_special=["<|nope|>"])
    with pytest.raises(ValueError, match="<|nope|>"): small.encode_batch(["hi"], allowed_special=["<|nope|>"])
    with pytest.raises(ValueError, match="pass a list"): small.encode("hi", allowed_special="<|eot|>")
    for bad in (["a", "a"], [""], ["\ud800"], [b"x"], "one string"):
        with pytest.raises(ValueError): BPETokenizer([], bad)
    with pytest.raises(AttributeError, match="endoftext"): assert BPETokenizer([], ["<|eot|>"]).eos_id


def test_specials_with_signs_of_regular_expressions():
    names = ["a|b", "(", ".*", "\\d", "^$"]
    tok = BPETokenizer([], names)
    text = "x(.*)a|b\\d^$y"
    ids = tok.encode(text, allowed_special="all")
    assert [i - 256 for i in ids if i > 255] == [1, 2, 0, 3, 4]
    assert tok.decode(ids) == text


# ---------------------------------------------------------------- decoding


def test_any_ids_decode(small):
    rng = random.Random(1)
    for _ in range(500):
        ids = [rng.randrange(small.vocab_size) for _ in range(rng.randrange(30))]
        assert small.decode(ids) == b"".join(map(small.decode_bytes, ids)).decode("utf-8", "replace")
    assert small.decode([0xFF, 97, 0xC3]) == "\ufffda\ufffd"
    assert small.decode(list("é".encode())) == "é"


def test_ids_of_arrays_and_tensors_decode(small):
    import numpy as np
    import torch

    ids = small.encode("a café")
    assert small.decode(torch.tensor(ids)) == small.decode(np.array(ids, dtype=np.uint16)) == small.decode(iter(ids)) == "a café"


@pytest.mark.parametrize("bad", [-1, 300, 10**9])
def test_unknown_ids_are_named(small, bad):
    with pytest.raises(ValueError, match=f"{bad}.*300"): small.decode([97, bad])
    with pytest.raises(ValueError, match=f"{bad}.*300"): small.decode_bytes(bad)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize("texts", [[], [""], ["", ""], ["  \n\t "], [" ", "\n"], iter([]), ["\u3000\xa0"]])
@pytest.mark.parametrize("workers", [1, 2])
def test_no_text_is_an_error_that_says_so(texts, workers):
    with pytest.raises(ValueError, match="no text to learn from"): BPETokenizer.train(texts, 300, workers=workers)


@pytest.mark.parametrize("texts, says", [("one string", "pass a list"), (b"bytes", "pass a list"), (["fine", b"bytes"], "text 1 is bytes"),
                                         (["fine", None], "text 1 is NoneType"), (["fine", "a\udcffb"], r"text 1 .*U\+DCFF at position 1")])
def test_wrong_texts_are_named(texts, says):
    with pytest.raises(ValueError, match=says): BPETokenizer.train(texts, 300)


def test_lone_surrogates_name_their_position(small):
    for text in ("abc\ud83d", "abc\udc00def", "你好a\udfff"):
        for encode in (small.encode, lambda t: small.encode_batch(["ok", t])):
            with pytest.raises(ValueError, match="position 3"): encode(text)
    assert small.decode(small.encode("\U0001F600")) == "\U0001F600"


def test_text_with_replacement_characters_trains():
    text = b"first line\nse\xff\xfecond\nthird line\n".decode("utf-8", "replace")
    tok = BPETokenizer.train([text], 262)
    assert tok.decode(tok.encode(text)) == text


@pytest.mark.parametrize("size", [0, 255, 257, -5])
def test_too_small_a_vocabulary(size):
    with pytest.raises(ValueError, match=f"{size}.*258"): BPETokenizer.train(["some text"], size, ["<a>", "<b>"])


def test_too_little_text_says_how_many_merges_there_are():
    with pytest.raises(ValueError, match="allow 3.*259.*allow_smaller"): BPETokenizer.train(["abcd"], 400)
    tok = BPETokenizer.train(["abcd"], 400, ["<|endoftext|>"], allow_smaller=True)
    assert tok.vocab_size == 260 and tok.special_ids == {"<|endoftext|>": 259}
    assert BPETokenizer.train(["abcd"], 259).vocab_size == 259


@pytest.mark.parametrize("pattern, says", [(r"\w+", "drops ' ' at position 5"), (r"(\w+)|\W+", "capturing groups"),
                                           ("(", "does not compile"), (3, "does not compile")])
def test_patterns_that_lose_text_are_refused(pattern, says):
    with pytest.raises(ValueError, match=re.escape(says)): BPETokenizer.train(["three words here"], 260, pattern=pattern)
    if pattern == r"\w+":
        with pytest.raises(ValueError, match=re.escape(says)): BPETokenizer([], pattern=pattern).encode("three words")


def test_other_patterns_work():
    for pattern in (r"\s?\S+|\s", r"(?s:.)", r"(?s:.+)", r"\w*|\W"):
        tok = BPETokenizer.train(["the cat sat on the mat, the end"], 262, pattern=pattern, allow_smaller=True)
        assert tok.decode(tok.encode(" the bat\n\n sat")) == " the bat\n\n sat"
    with pytest.raises(ValueError, match="digits"): split_pattern(4)


@pytest.mark.parametrize("merges", [[(97, 256)], [(97, -1)], [(97, 98), (97, 98)], [(98, 99), (97, 98), (257, 99)],
                                    [(98, 99), (97, 98), (257, 99), (97, 256)]])
def test_merges_that_could_never_happen_are_refused(merges):
    with pytest.raises(ValueError, match="merge"): BPETokenizer(merges)


# ---------------------------------------------------------------- files


def test_save_and_load(small, tmp_path):
    path = tmp_path / "deep" / "tok.json"
    small.save(path)
    back = BPETokenizer.load(path)
    for name in ("merges", "special_ids", "pattern", "fingerprint"): assert getattr(back, name) == getattr(small, name)
    first = path.read_bytes()
    back.save(path)
    assert path.read_bytes() == first
    assert list(path.parent.iterdir()) == [path]
    assert back.encode("it's 12 o'clock\n") == small.encode("it's 12 o'clock\n")


def test_a_tokenizer_travels_by_pickle(small):
    back = pickle.loads(pickle.dumps(small))
    assert back.fingerprint == small.fingerprint and back.encode(LINES[0]) == small.encode(LINES[0])


CHANGES = [
    {"format": "other"}, {"version": 1}, {"version": 3}, {"version": None}, {"extra": 1}, {"fingerprint": "0"}, {"fingerprint": None},
    {"merges": ["97"]}, {"merges": [[97, 98]]}, {"merges": ["97 x"]}, {"merges": "97 98"}, {"merges": ["97 99999"]}, {"merges": None},
    {"pattern": "("}, {"pattern": None}, {"pattern": r"\w+"},
    {"special_tokens": "<|eot|>"}, {"special_tokens": ["a", "a"]}, {"special_tokens": [1]}, {"special_tokens": None}]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_a_changed_file_is_refused_by_name(small, tmp_path, change):
    path = tmp_path / "tok.json"
    small.save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=re.escape(str(path))): BPETokenizer.load(path)


@pytest.mark.parametrize("key", ["format", "version", "pattern", "special_tokens", "merges", "fingerprint"])
def test_a_file_without_a_key_is_refused_by_name(small, tmp_path, key):
    path = tmp_path / "tok.json"
    small.save(path)
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != key}))
    with pytest.raises(ValueError, match=re.escape(str(path))): BPETokenizer.load(path)


def test_broken_and_foreign_files_are_refused_by_name(small, tmp_path):
    path = tmp_path / "tok.json"
    small.save(path)
    data = path.read_bytes()
    for content in (b"", b"{}", b"[]", b"null", b"\x80\x04pickle", b'"llmlab.bpe"', *(data[:n] for n in range(0, len(data) - 2, 97))):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=re.escape(str(path))): BPETokenizer.load(path)
    small.to_hf(path)
    with pytest.raises(ValueError, match="not a tokenizer of format"): BPETokenizer.load(path)
    with pytest.raises(FileNotFoundError, match="gone.json"): BPETokenizer.load(tmp_path / "gone.json")


def test_a_flipped_byte_is_found(small, tmp_path):
    path = tmp_path / "tok.json"
    small.save(path)
    data, rng = path.read_bytes(), random.Random(2)
    for _ in range(200):
        i = rng.randrange(len(data))
        broken = data[:i] + bytes([data[i] ^ (1 << rng.randrange(8))]) + data[i + 1:]
        path.write_bytes(broken)
        try: same = BPETokenizer.load(path).fingerprint == small.fingerprint    # a changed blank between values is no harm
        except ValueError as e: same = str(path) in str(e)
        assert same, i


def test_transformers_opens_the_folder(small, tmp_path, parity):
    import transformers

    small.to_hf(tmp_path)
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path)
    texts = ["  Hello World.", "a\n\n\tb  ", "it's 12345 é 你好 👍🏽", "<|endoftext|>a", *LINES]
    ours = [small.encode(t, allowed_special="all") for t in texts]
    theirs = [auto(t, add_special_tokens=False)["input_ids"] for t in texts]
    differ = sum(a != b for a, b in zip(ours, theirs, strict=True))
    parity("AutoTokenizer on to_hf", "tokenizer.bpe", "transformers", transformers.__version__, differ, 0)
    assert auto.eos_token_id == small.eos_id and len(auto) == small.vocab_size
    assert [auto.decode(i) for i in ours] == texts


def test_to_hf_refuses_a_special_spelled_like_a_token(tmp_path):
    tok = BPETokenizer.train(["the the the"], 258, ["he"])
    assert tok.encode("the", allowed_special="all")[1] == tok.special_ids["he"]
    with pytest.raises(ValueError, match="'he'"): tok.to_hf(tmp_path)


@pytest.mark.parametrize("pattern", ["gpt2", "gpt4", "gpt4o"])
def test_encode_batch_equals_encode_on_every_character(pattern):
    "Engines differ on the newest characters; merges of a letter with the first byte of the next character show every cut."
    tok = BPETokenizer([(97, b) for b in range(0xC2, 0xF5)], pattern=PATTERNS[pattern])
    assigned = [c for c in map(chr, range(0x110000)) if unicodedata.category(c) not in ("Cn", "Cs", "Co")]
    newer = random.Random(0).sample([c for c in map(chr, range(0x110000)) if unicodedata.category(c) == "Cn"], 3000) + ["\u0295", "\u0558"]
    texts = ["".join(f"a{c}A{c} " for c in cs[i : i + 500]) for cs in (assigned, newer) for i in range(0, len(cs), 500)]
    assert tok.encode_batch(texts) == [tok.encode(t) for t in texts]
