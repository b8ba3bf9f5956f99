"""Extended vocabularies: the merges against their naive twin, nothing old moves, rows of embeddings, bad input."""

import pickle
import random
import re
from importlib.metadata import version

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from llmlab.tokenizer.bpe import BPETokenizer, Numbering, learn_merges, naive_merges, replace
from llmlab.tokenizer.extend import extend, extend_rows, grown, licence_texts, made_of, token_reader
from llmlab.tokenizer.words import Tokenizer as Base
from llmlab.tokenizer.words import count_words, split_pattern

fuzz = settings(max_examples=100, deadline=None)
OLD = [f"def step_{i}(x):\n    return x + {i}  # café, 你好 {i}\n" for i in range(30)]
NEW = [f"§ {i} The licensee shall not, notwithstanding clause {i}, convey the work or any naïve derivative 你好们\n" for i in range(30)]
TEXT = st.text(alphabet="abc é你 \n1'<|>", max_size=40) | st.sampled_from([*OLD, *NEW])


def turned(tok, special, **more):
    "The same merges under ids that go downwards, special tokens first."
    n = len(tok.numbering.ids)
    return BPETokenizer(
        tok.merges, (), tok.pattern, Numbering([n - 1 - i + len(special) for i in range(n)], {s: i for i, s in enumerate(special)}, **more)
    )


def lacking(tok):
    "No id for byte 4, as in SmolLM2."
    ids = [-1 if i == 4 else i - (i > 4) for i in range(len(tok.numbering.ids))]
    return BPETokenizer(tok.merges, (), tok.pattern, Numbering(ids, {"<|s|>": len(ids) - 1}))


PLAIN = BPETokenizer.train(OLD, 300)
KINDS = {
    "plain": PLAIN,
    "special last": BPETokenizer(PLAIN.merges, ["<|a|>", "<|b|>"]),
    "special first": turned(PLAIN, ["<|a|>", "<|b|>"]),
    "NFC": turned(PLAIN, [], normalizer="NFC"),
    "lacks a byte": lacking(PLAIN),
    "whole words": BPETokenizer(
        PLAIN.merges, (), None, Numbering([*range(300)], {"<|a|>": 301}, {b" convey".hex(): 300}, whole_words=True)
    ),
    "bytes": BPETokenizer(),
    "one by one": BPETokenizer.train(OLD, 285, ["<|a|>"], digits=1),
}


@pytest.fixture(scope="module", params=KINDS)
def pair(request):
    old = KINDS[request.param]
    return old, extend(old, NEW, 60, ["<|clause|>"])


# ---------------------------------------------------------------- learning


WORDS = st.dictionaries(st.text("abc", min_size=1, max_size=14) | st.text("aé ", min_size=1, max_size=8), st.integers(1, 5), min_size=1)


@fuzz
@given(WORDS, st.integers(0, 12), st.integers(0, 20))
def test_growth_equals_the_naive_definition(words, before, n):
    old = BPETokenizer(learn_merges(words, before))
    first, new = token_reader(old), 256 + len(old.merges)
    assert learn_merges(words, n, first=first, new=new) == naive_merges(words, n, first, new)
    assert [*old.merges, *naive_merges(words, n, first, new)] == learn_merges(words, len(old.merges) + n) or len(old.merges) < before


def test_on_its_own_text_extending_is_training_on():
    grown_up = extend(BPETokenizer.train(OLD, 280), OLD, 20)
    assert grown_up.state() == BPETokenizer.train(OLD, 300).state()
    assert extend(extend(PLAIN, NEW, 20), NEW, 15).state() == extend(PLAIN, NEW, 35).state()


def test_the_first_merges_of_a_larger_extension_are_the_smaller(pair):
    old, new = pair
    few = extend(old, NEW, 25)
    assert new.merges[: len(few.merges)] == few.merges
    assert grown(old, new.merges[len(old.merges) : len(old.merges) + 25]).state() == few.state()


# ---------------------------------------------------------------- encoding


def by_formula(old, new, word):
    "E(w), then each new merge in turn."
    tokens = list(token_reader(old)(word))
    if tokens[0] >= len(old.numbering.ids):
        return [old.numbering.unmerged[word.encode().hex()]]
    for i in range(len(old.merges), len(new.merges)):
        tokens = replace(tokens, new.merges[i], 256 + i)
    return [new.numbering.ids[t] for t in tokens]


def test_thousands_of_words_are_read_as_the_formula_says(pair):
    old, new = pair
    rng = random.Random(0)
    parts = [
        "a",
        "shall",
        " not",
        " lic",
        "ensee",
        "notwith",
        "standing",
        "1",
        "23",
        "é",
        "你好",
        "_",
        "def",
        "step",
        " convey",
        "'s",
        "==",
    ]
    words = [*count_words([*OLD, *NEW], old.pattern)]
    words += [w for _ in range(1500) for w in old._split("".join(rng.choices(parts, k=rng.randrange(1, 9))))]
    assert len(words) > 2000
    for w in words:
        got = new._words[w]
        assert list(got) == by_formula(old, new, w), w


def test_nothing_old_moves(pair):
    old, new = pair
    assert new.vocab_size == old.vocab_size + 61
    assert new._bytes[: old.vocab_size] == old._bytes
    assert new.special_tokens == [*old.special_tokens, "<|clause|>"] and new.special_ids["<|clause|>"] == new.vocab_size - 1
    for name, i in old.special_ids.items():
        assert new.special_ids[name] == i
    kept = [t for t in OLD + ["", "x", "  \n"] if not set(new.encode(t)) - set(range(old.vocab_size))]
    assert kept and all(new.encode(t) == old.encode(t) for t in kept)
    assert sum(map(len, map(new.encode, NEW))) < sum(map(len, map(old.encode, NEW)))


@fuzz
@given(TEXT)
def test_round_trips(text):
    for old in KINDS.values():
        new = grown(old, [(97, 98), (99, 256 + len(old.merges))], ["<|x|>"])
        ids = new.encode(text, "all")
        assert new.decode(ids) == new.decode(old.encode(text)) and new.encode_batch([text], "all") == [ids]
        if max(ids, default=0) < old.vocab_size:
            assert ids == old.encode(text, "all")


def test_it_saves_and_travels(pair, tmp_path):
    old, new = pair
    new.save(tmp_path / "new.json")
    assert BPETokenizer.load(tmp_path / "new.json").state() == pickle.loads(pickle.dumps(new)).state() == new.state()
    assert new.fingerprint != old.fingerprint
    assert [new.decode(i) for i in new.encode_batch(NEW)] == NEW


def test_other_libraries_read_it_alike(pair, tmp_path, parity):
    old, new = pair
    texts = [*OLD, *NEW, "the licensee's 12345 conveyors  \n\n x"]
    ours = [new.encode(t) for t in texts]
    reader = Tokenizer.from_file(str(new.to_hf(tmp_path)))
    differ = sum(a != e.ids for a, e in zip(ours, reader.encode_batch(texts), strict=True))
    parity("an extended vocabulary through to_hf", "tokenizer.extend", "tokenizers", version("tokenizers"), differ, 0)
    assert reader.encode("a<|clause|>").ids[-1] == new.special_ids["<|clause|>"]
    try:
        old.to_tiktoken()
    except ValueError:
        with pytest.raises(ValueError, match="tiktoken cannot hold"):
            new.to_tiktoken()
    else:
        assert ours == new.to_tiktoken().encode_ordinary_batch(texts)


def test_a_token_that_no_merge_made_keeps_its_id_when_one_does():
    old = KINDS["whole words"]
    new = extend(old, [" conveys conveyed conveyance"] * 9, 12)
    assert not new.numbering.unmerged and 300 in new.numbering.ids and new.vocab_size == old.vocab_size + 11
    assert len(made_of(old, new)) == 11 and len(extend_rows(torch.randn(302, 4), old, new)) == 313
    assert new.encode(" convey") == old.encode(" convey") == [300]
    assert new.decode(new.encode("reconvey conveyor")) == "reconvey conveyor"


def test_special_tokens_alone():
    for old in KINDS.values():
        new = grown(old, special_tokens=["<|u|>", "<|v|>"])
        assert [new.special_ids[s] for s in ("<|u|>", "<|v|>")] == [old.vocab_size, old.vocab_size + 1]
        assert new.merges == old.merges and all(new.encode(t) == old.encode(t) for t in OLD)


def test_composed_text_is_learned_from_as_it_is_read():
    old = KINDS["NFC"]
    parted = ["nai\u0308ve cafe\u0301"] * 3
    new = extend(old, parted, 6, allow_smaller=True)
    assert new.state() == extend(old, ["naïve café"] * 3, 6, allow_smaller=True).state()
    assert len(new.encode(parted[0])) < len(old.encode(parted[0]))


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rows(pair, dtype):
    old, new = pair
    weight = torch.randn(old.vocab_size, 8, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    rows, parts = extend_rows(weight, old, new), made_of(old, new)
    assert rows.shape == (new.vocab_size, 8) and rows.dtype == dtype and not rows.requires_grad
    assert torch.equal(rows[: old.vocab_size], weight)
    assert list(sorted(parts)) == list(range(old.vocab_size, new.vocab_size))
    for i, made in parts.items():
        exact = weight.detach().double()[made].mean(0)
        assert (rows[i].double() - exact).abs().max() <= 2 * torch.finfo(dtype).eps * exact.abs().max().clamp(min=1)
        if i not in new.special_ids.values():
            assert b"".join(map(old.decode_bytes, made)) == new.decode_bytes(i) and len(made) > 1
    used = [i for i, b in enumerate(old._bytes) if b is not None]
    assert parts[new.special_ids["<|clause|>"]] == used


def test_parts_are_what_the_old_tokenizer_reads(pair):
    old, new = pair
    for i, made in made_of(old, new).items():
        word = new.decode_bytes(i).decode(errors="replace")
        if i not in new.special_ids.values() and "\ufffd" not in word:
            assert list(old._words[word]) == made


def test_a_mean_row_scores_the_mean_of_its_parts(pair):
    old, new = pair
    g = torch.Generator().manual_seed(1)
    weight, h = torch.randn(old.vocab_size, 16, generator=g, dtype=torch.float64), torch.randn(16, generator=g, dtype=torch.float64)
    scores, before = extend_rows(weight, old, new) @ h, weight @ h
    for i, made in made_of(old, new).items():
        assert scores[i] == pytest.approx(before[made].mean().item(), abs=1e-12)
    kept = (before.logsumexp(0) - scores.logsumexp(0)).exp()
    share = before.softmax(0)
    assert kept >= 1 / (1 + sum(share[m].mean() for m in made_of(old, new).values())) - 1e-12


def test_rows_that_do_not_fit(pair):
    old, new = pair
    for shape in ((old.vocab_size + 1, 4), (new.vocab_size, 4), (old.vocab_size,)):
        with pytest.raises(ValueError, match=f"one row for each|{old.vocab_size} tokens"):
            extend_rows(torch.zeros(shape), old, new)
    others = [
        BPETokenizer(new.merges, (), split_pattern(2)),
        BPETokenizer([(98, 97), *new.merges[:1]] if old.merges else [], ["<|q|>"], split_pattern(1)),
    ]
    for wrong in others:
        with pytest.raises(ValueError, match="no extension of"):
            made_of(old, wrong)
    with pytest.raises(ValueError, match="no extension of"):
        extend_rows(torch.zeros(new.vocab_size, 4), new, old)


# ---------------------------------------------------------------- bad input


def test_only_bpe_can_be_extended():
    class Other(Base):
        pass

    for wrong in (Other([b"a"], {}, split_pattern()), None, "tokenizer"):
        with pytest.raises(ValueError, match=f"tokenizer is {type(wrong).__name__}"):
            extend(wrong, NEW, 3)


@pytest.mark.parametrize("n", [0, -1])
def test_at_least_one(n):
    with pytest.raises(ValueError, match=f"n is {n}; .*grown"):
        extend(PLAIN, NEW, n)


@pytest.mark.parametrize("name", ["plain", "NFC"])
@pytest.mark.parametrize(
    "texts, says",
    [
        ([], "no text to learn"),
        (["", " \n"], "no text to learn"),
        ("one", "pass a list"),
        (["fine", b"b"], "text 1 is bytes"),
        (["a\udcff"], "lone surrogate"),
    ],
)
def test_wrong_texts(name, texts, says):
    with pytest.raises(ValueError, match=says):
        extend(KINDS[name], texts, 3)


def test_too_little_text_says_how_many():
    old = BPETokenizer([(97, 98)])
    with pytest.raises(ValueError, match="allow 1 merges.*n=1.*allow_smaller"):
        extend(old, ["abc"], 5)
    assert extend(old, ["abc"], 5, ["<|x|>"], allow_smaller=True).special_ids == {"<|x|>": 258}
    assert extend(old, ["ab"], 5, allow_smaller=True).state() == old.state()


@pytest.mark.parametrize(
    "special, says", [(["<|a|>"], "named twice"), (["<|n|>", "<|n|>"], "named twice"), ("<|n|>", "pass a list"), ([""], "empty")]
)
def test_wrong_special_tokens(special, says):
    with pytest.raises(ValueError, match=says):
        extend(KINDS["special last"], NEW, 3, special)


def test_a_byte_without_a_token_is_named():
    old = KINDS["lacks a byte"]
    with pytest.raises(ValueError, match="no token"):
        extend(old, ["a\x04b"], 1)
    with pytest.raises(ValueError, match=re.escape("merge (97, 4) joins a byte")):
        grown(old, [(97, 4)])
    with pytest.raises(ValueError, match="merge"):
        grown(old, [(97, 9999)])


def test_licences_are_there():
    texts = licence_texts()
    assert len(texts) == len(set(texts)) > 100 and sum(map(len, texts)) > 50_000
    assert any("notwithstanding" in t.lower() for t in texts) and not any("\n" in t for t in texts)
