"""Conversations as tokens: equal to transformers, and text that stays text."""

import itertools
from importlib.metadata import version

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmlab.tokenizer.bpe import BPETokenizer
from llmlab.tokenizer.chat import CHAT_TOKENS, TEMPLATE, render

TOKENIZER = BPETokenizer.train(["one two three, and four. " * 30], 300, ["<|endoftext|>", *CHAT_TOKENS], allow_smaller=True)
SPECIAL = set(TOKENIZER.special_ids.values())


def talk(*texts):
    return [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(texts)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("hf") / "tokenizer.json"
    TOKENIZER.to_hf(path)
    return PreTrainedTokenizerFast(tokenizer_file=str(path), chat_template=TEMPLATE)


def test_ids_and_masks_equal_transformers(reference, parity):
    talks = [talk("one"), talk("one", "two"), talk("a", "b", "c", "d"), [{"role": "system", "content": "x"}, *talk(" 不 🙂\n", "\tyes ")]]
    off = 0
    for t in talks:
        for more in (False, True):
            theirs = reference.apply_chat_template(
                t, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, add_generation_prompt=more
            )
            ours = render(t, TOKENIZER, add_generation_prompt=more)
            off += (ours.ids, ours.mask) != (theirs["input_ids"], [bool(m) for m in theirs["assistant_masks"]])
    parity("chat template: ids and assistant mask", "tokenizer.chat", "transformers", version("transformers"), float(off), 0.0)


@pytest.mark.parametrize("name", TOKENIZER.special_ids)
@pytest.mark.parametrize("where", ["{}b", "a{}b", "a{}", "{}", "{}{}"])
def test_no_spelling_of_a_control_token_becomes_one(name, where):
    text = where.format(name, name)
    ids = TOKENIZER.encode(text)
    assert not SPECIAL & {*ids} and TOKENIZER.decode(ids) == text
    r = render(talk(text, text), TOKENIZER)
    assert [i for i in r.ids if i in SPECIAL] == [TOKENIZER.special_ids[n] for n in ("<|user|>", "<|end|>", "<|assistant|>", "<|end|>")]
    learned = [i for i, m in zip(r.ids, r.mask, strict=True) if m]
    assert TOKENIZER.decode(learned[:-1]) == text and learned[-1] == TOKENIZER.special_ids["<|end|>"]


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(str.strip), min_size=1, max_size=4))
def test_every_message_comes_back_and_only_answers_are_marked(texts):
    r = render(talk(*texts), TOKENIZER)
    groups = [(m, [i for i, _ in g]) for m, g in itertools.groupby(zip(r.ids, r.mask, strict=True), key=lambda x: x[1])]
    answers = [TOKENIZER.decode(ids[:-1]) for m, ids in groups if m]
    assert answers == texts[1::2]
    users = [t for m, ids in groups if not m for t in [TOKENIZER.decode([i for i in ids if i not in SPECIAL])]]
    assert [u for u in users if u] == texts[::2]


def test_the_prompt_is_the_beginning_of_the_whole_row():
    whole, prompt = render(talk("one", "two"), TOKENIZER), render(talk("one"), TOKENIZER, add_generation_prompt=True)
    assert whole.ids[: len(prompt.ids)] == prompt.ids and sum(whole.mask) == len(whole.ids) - len(prompt.ids)


def test_a_name_that_is_no_token_here_is_plain_text_in_a_message():
    r = render(talk("<|robot|> hi"), TOKENIZER)
    assert TOKENIZER.decode([i for i in r.ids if i not in SPECIAL]) == "<|robot|> hi"


@pytest.mark.parametrize(
    "messages, said",
    [
        ([], "at least one"),
        ({"role": "user"}, "list"),
        ([{"role": "robot", "content": "x"}], r"messages\[0\].role"),
        ([{"role": "user"}], "content"),
        ([{"role": "user", "content": 3}], "int, not a string"),
        (talk("a", "  "), r"messages\[1\] is an empty answer"),
        ([*talk("a"), {"role": "system", "content": "x"}], "comes first"),
    ],
)
def test_messages_that_teach_nonsense_are_refused(messages, said):
    with pytest.raises(ValueError, match=said):
        render(messages, TOKENIZER)


@pytest.mark.parametrize(
    "template, said",
    [
        ("{% for m in messages %}", "does not compile"),
        ("{{ messages[0]['content'] }}", r"leaves out messages\[1\]"),
        ("{{ nothing }}", "does not fit"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "does not fit"),
        ("{{ '<|robot|>' + messages[0]['content'] + messages[1]['content'] }}", "no special token"),
        ("{{ messages.append(1) }}", "does not fit"),
    ],
)
def test_templates_that_do_not_fit_are_named(template, said):
    messages = talk("one", "two")
    with pytest.raises(ValueError, match=said):
        render(messages, TOKENIZER, template)
    assert messages == talk("one", "two")


def test_a_tokenizer_without_chat_tokens_is_refused():
    plain = BPETokenizer.train(["one two " * 9], 260, ["<|endoftext|>"], allow_smaller=True)
    with pytest.raises(ValueError, match="no special token"):
        render(talk("one"), plain)


def test_one_compiled_template_serves_many_threads():
    "Each rendering has marks of its own; a template that is compiled once must not mix them up."
    from concurrent.futures import ThreadPoolExecutor

    chats = [talk("one" * (i % 5 + 1) + "\ue000" * (i % 3), "two" * (i % 7 + 1) + "\ue001" * (i % 2)) for i in range(300)]
    alone = [render(c, TOKENIZER) for c in chats]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda c: render(c, TOKENIZER), chats)) == alone
    assert all(0 < sum(r.mask) < len(r.mask) for r in alone)
