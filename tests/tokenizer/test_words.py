"""Words: the vectorised splitter and the counts against their naive twins, in bounds, in pieces and in processes; what is no text."""

import itertools
import os
import random
import re
import subprocess
import sys
import warnings
from collections import Counter

import pytest
import regex
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmlab.data.document import read_pieces
from llmlab.tokenizer import words
from llmlab.tokenizer.bpe import BPETokenizer
from llmlab.tokenizer.words import (
    ASCII,
    PATTERNS,
    Tokenizer,
    WordCounts,
    add_up,
    ascii_counts,
    ascii_words,
    count_words,
    naive_counts,
    split_pattern,
    splitter,
)

fuzz = settings(max_examples=200, deadline=None)
UNITS = st.sampled_from([*"aZslLvVeErRdmT019'_(-/. \t\n\r\v\f\x00\x1c\x7f", "  ", "\r\n", "'s", "'LL", "don't", "    ", "\n\n  x"])
LINES = [f"def step_{i}(x, y={i * 37}):\n    return x + y  # café, 你好, naïve {i}\n\n\tif it's done: we'll stop\r\n" for i in range(40)]


@pytest.mark.parametrize("digits", [1, 2, 3])
def test_the_vectorised_splitter_is_the_pattern_on_every_short_string(digits):
    "Nine characters stand for all that the rules can tell apart."
    texts = ["".join(t) for n in range(1, 7) for t in itertools.product("sl1 \t\n'(", repeat=n)]
    pattern = re.compile(split_pattern(digits, ASCII))
    assert ascii_words(texts, digits) == [w.encode() for t in texts for w in pattern.findall(t)]


@fuzz
@given(st.lists(st.lists(UNITS, max_size=25).map("".join), max_size=6), st.sampled_from([1, 2, 3]))
@example(["(\n  \n", "a\n  \nb", "'", "''s", " 's", "\t's", "x'", "'LLm", "1234'5"], 3)
@example(["", "", "a"], 1)
def test_ascii_counts_are_the_naive_counts(texts, digits):
    assert ascii_counts(texts, digits) == naive_counts(texts, split_pattern(digits))


@fuzz
@given(st.text(st.characters(max_codepoint=127), max_size=60))
def test_ascii_counts_of_any_ascii(text):
    assert ascii_counts([text]) == naive_counts([text], split_pattern())


def test_long_runs_are_counted_in_linear_time():
    for char in "a1 \n\t'(":
        text = "x" + char * 300_000 + "y"
        assert ascii_counts([text]) == naive_counts([text], split_pattern()), char


@pytest.mark.parametrize("name", PATTERNS)
def test_no_named_pattern_drops_a_character(name):
    rng, pattern = random.Random(5), regex.compile(PATTERNS[name])
    every = "".join(chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000)
    assert "".join(pattern.findall(every)) == every
    for _ in range(2000):
        text = "".join(chr(rng.choice((rng.randrange(128), rng.randrange(0x3000), 32, 10, 39))) for _ in range(rng.randrange(30)))
        assert "".join(splitter(PATTERNS[name])(text)) == text


def test_a_text_is_split_alike_whether_its_words_are_held_or_not(monkeypatch):
    text = "".join(LINES)
    for pattern in (*PATTERNS.values(), r"\s?\S+|\s"):
        held = list(splitter(pattern)(text))
        monkeypatch.setattr(words, "LENGTHY", 10)
        assert list(splitter(pattern)(text)) == held
        monkeypatch.undo()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text("ab cé", max_size=30), min_size=1, max_size=8), st.integers(1, 9), st.integers(1, 4))
def test_bounded_counts_are_exact_for_what_they_keep(tmp_path_factory, texts, limit, parts):
    "Whatever waited in files, and in however many parts: the most frequent words with their true counts; ties by the word."
    folder, split = tmp_path_factory.mktemp("counts"), splitter(split_pattern())
    counts = [WordCounts(limit, folder) for _ in range(parts)]
    for i, text in enumerate(texts):
        counts[i % parts].add(split(text))
    exact = naive_counts(texts, split_pattern())
    best = dict(sorted(exact.items(), key=lambda wc: (-wc[1], wc[0]))[:limit])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert add_up(counts, limit) == best
    assert len(said) == (len(exact) > limit)
    assert all(len(c.counts) <= limit for c in counts)


def test_bounds_change_nothing_while_there_is_room_and_say_so_when_not(monkeypatch):
    monkeypatch.setattr(words, "BATCH", 300)
    exact = naive_counts(LINES, split_pattern())
    for workers in (1, 3):
        assert count_words(LINES, split_pattern(), workers=workers, max_words=len(exact)) == exact
        with pytest.warns(UserWarning, match=f"{len(exact)} distinct words.*max_words=50"):
            kept = count_words(LINES, split_pattern(), workers=workers, max_words=50)
        assert kept == dict(sorted(exact.items(), key=lambda wc: (-wc[1], wc[0]))[:50])
    with pytest.raises(ValueError, match="max_words is 0"):
        count_words(LINES, split_pattern(), max_words=0)


def test_merges_within_bounds_do_not_depend_on_hash_seeds_or_workers(tmp_path):
    code = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "from llmlab.tokenizer.bpe import BPETokenizer as B\n"
        "import llmlab.tokenizer.words as words; words.BATCH = 5000\n"
        "texts = [f'{i % 977} def f{i * 7919 % 10007}(x):\\n    return x + {i} # é\\n' for i in range(2000)]\n"
        "B.train(texts, 400, workers=WORKERS, max_words=500).save('PATH')"
    )
    for seed, workers in ((0, 1), (3, 4)):
        run = code.replace("WORKERS", str(workers)).replace("PATH", str(tmp_path / f"{seed}.json"))
        subprocess.run([sys.executable, "-c", run], env={**os.environ, "PYTHONHASHSEED": str(seed)}, check=True)
    assert (tmp_path / "0.json").read_bytes() == (tmp_path / "3.json").read_bytes()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(UNITS | st.sampled_from(["你好", "é", "\u3000", "\xa0", "word another", "\x85", "\u2028"]), max_size=80).map("".join),
    st.integers(1, 40),
)
def test_pieces_of_a_file_are_the_file_and_tear_no_word(tmp_path_factory, text, size):
    path = tmp_path_factory.mktemp("pieces") / "t.txt"
    path.write_bytes(text.encode())
    pieces = list(read_pieces(path, size))
    read = text.replace("\r\n", "\n").replace("\r", "\n")
    assert "".join(pieces) == read
    for name, pattern in PATTERNS.items():
        if name != "gpt4" or not read.endswith(("\n", " ", "\t")):  # that one looks at the end of the text
            assert naive_counts(pieces, pattern) == naive_counts([read], pattern), name


def test_broken_bytes_have_one_address_whatever_the_size_of_the_pieces(tmp_path):
    path = tmp_path / "broken.txt"
    path.write_bytes(b"first line\nse\xff\xfecond two\n\xc3\xa9 third\nlast \xe4\xbd")
    reports = []
    for size in (1, 3, 7, 1000):
        assert "".join(read_pieces(path, size, report=(found := []))) == path.read_bytes().decode(errors="replace")
        reports.append([(f["line"], f["offset"], f["count"]) for f in found])
    assert reports == [[(2, 13, 2), (4, 38, 2)]] * 4
    tokenizer = BPETokenizer.train(read_pieces(path, 5), 262)
    assert tokenizer.merges == BPETokenizer.train([path.read_bytes().decode(errors="replace")], 262).merges
    with pytest.raises(ValueError, match="line 2, byte 13"):
        list(read_pieces(path, 4, errors="strict"))
    assert "".join(read_pieces(path, 1000, errors="drop")) == "first line\né third\n"
    for bad in ({"errors": "ignore"}, {"size": 0}):
        with pytest.raises(ValueError):
            read_pieces(path, **bad)
    with pytest.raises(ValueError, match="no such file"):
        read_pieces(tmp_path / "gone.txt")


def test_one_endless_line_is_read_in_bounded_pieces(tmp_path):
    path = tmp_path / "line.txt"
    path.write_text("some words and more " * 100_000)
    assert max(map(len, read_pieces(path, 2**16))) < 2**17


def test_a_packed_file_is_read_and_a_damaged_one_named(tmp_path):
    import gzip

    path = tmp_path / "t.txt.gz"
    path.write_bytes(gzip.compress("".join(LINES).encode()))
    assert "".join(read_pieces(path, 50)) == "".join(LINES).replace("\r\n", "\n")
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ValueError, match=re.escape(str(path))):
        list(read_pieces(path, 50))


def test_a_tokenizer_that_has_no_art_keeps_the_promises():
    "The base class alone: NUL is a character, a surrogate has an address, specials only by name."

    class Letters(Tokenizer):
        FORMAT = "letters"

        def __init__(self, names=()):
            n = {s: 256 + i for i, s in enumerate(names)}
            super().__init__([bytes([i]) for i in range(256)] + [s.encode() for s in names], n, split_pattern())

        def _encode_words(self, words):
            return itertools.chain.from_iterable(w.encode() for w in words)

    t = Letters(["<|a|>"])
    assert t.encode("\x00é<|a|>") == list("\x00é<|a|>".encode()) and t.encode("x<|a|>", "all") == [120, 256]
    for encode in (t.encode, lambda s: t.encode_batch(["ok", s])):
        with pytest.raises(ValueError, match="position 1"):
            encode("a\udc00")
    assert t.encode_batch(["a", "<|a|>"], ["<|a|>"]) == [[97], [256]]
    with pytest.raises(AttributeError, match="endoftext"):
        assert t.eos_id


def test_counts_are_counters():
    assert isinstance(count_words(["a b a"], split_pattern()), Counter)
