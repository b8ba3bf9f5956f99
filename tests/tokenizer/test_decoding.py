"""The streaming decoder: no cut of the bytes matters, and nothing of a stop text is ever shown."""

import itertools
import random
import time
from importlib.metadata import version

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmlab.tokenizer.bpe import BPETokenizer
from llmlab.tokenizer.decoding import StreamDecoder, decode_stream, first_stop, held_back


class Pieces:
    "A tokenizer whose tokens are any bytes; the last id is special."

    def __init__(self, parts):
        self.parts, self.special_ids = parts, {"<|end|>": len(parts)}

    def decode_bytes(self, i):
        return b"<|end|>" if i == len(self.parts) else self.parts[i]


def run(parts, stop=()):
    d = StreamDecoder(Pieces(parts), stop)
    pieces = [d.feed(i) for i in range(len(parts))] + [d.finish()]
    return pieces, d.stopped


def cut(data, places):
    at = sorted({0, len(data), *(p % (len(data) + 1) for p in places)})
    return [data[a:b] for a, b in zip(at, at[1:], strict=False)]


@given(st.binary(max_size=20), st.lists(st.integers(0, 100)))
def test_any_bytes_in_any_pieces_are_what_python_decodes(data, places):
    pieces, stopped = run(cut(data, places))
    assert "".join(pieces) == data.decode(errors="replace") and stopped is None


@given(st.text("abé🙂", max_size=14), st.lists(st.text("abé🙂", min_size=1, max_size=4), max_size=3), st.lists(st.integers(0, 100)))
@settings(max_examples=300)
def test_stop_texts_in_any_pieces(text, stop, places):
    pieces, stopped = run(cut(text.encode(), places), stop)
    found = next((first_stop(text[:n], stop) for n in range(len(text) + 1) if first_stop(text[:n], stop)), None)
    assert ("".join(pieces), stopped) == ((text[: found[0]], found[1]) if found else (text, None))


def test_what_was_sent_is_never_part_of_a_stop_text():
    pieces, stopped = run([b"DE", b"FG", b"H"], "EFGH")
    assert pieces == ["D", "", "", ""] and stopped == "EFGH"
    assert "".join(run([b"DE", b"FG", b"I"], ["EFGH"])[0]) == "DEFGI"  # a near miss is let go


def test_split_characters_arrive_whole_and_an_unfinished_one_is_one_mark():
    assert run([b"\xf0\x9f", b"\x99\x82"])[0] == ["", "🙂", ""]
    assert run([b"a\xf0\x9f"])[0] == ["a", "\ufffd"]
    assert "".join(run([b"\x80"] * 50)[0]) == "\ufffd" * 50  # broken bytes do not stall the stream


def test_special_tokens_give_no_text_unless_asked():
    t = Pieces([b"a", b"b"])
    assert "".join(decode_stream(t, [0, 2, 1])) == "ab"
    d = StreamDecoder(t, special=True)
    assert d.feed(0) + d.feed(2) == "a<|end|>"


def test_nothing_more_is_read_once_a_stop_text_is_complete():
    read = []

    def ids():
        for i in range(4):
            read.append(i)
            yield i

    assert "".join(decode_stream(Pieces([b"x", b"yz", b"q", b"r"]), ids(), ["z"])) == "xy" and read == [0, 1]
    d = StreamDecoder(Pieces([b"stop", b"more"]), ["stop"])
    assert (d.feed(0), d.feed(1), d.finish()) == ("", "", "")


@pytest.mark.parametrize("stop", ["", [""], ["a", None], [3]])
def test_a_stop_text_that_is_none_is_refused(stop):
    with pytest.raises(ValueError, match="stop text"):
        StreamDecoder(Pieces([]), stop)


def test_a_real_tokenizer_streams_what_it_decodes():
    t = BPETokenizer.train(["ünïcode 🙂 不可 and words " * 20], 300, ["<|end|>"], allow_smaller=True)
    for text in ("ünïcode 🙂 不可", "e\u0301 \u200d👩\u200d🚀 x", "\x00\r\n\t"):
        assert "".join(decode_stream(t, t.encode(text))) == text


@given(st.text("ab", max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_held_back_is_the_longest_suffix_that_begins_a_stop_text(text, stop):
    expected = max((n for n in range(len(text) + 1) for s in stop if n < len(s) and text.endswith(s[:n])), default=0)
    assert held_back(text, stop) == expected


def every_cut(data):
    for n in range(len(data)):
        for places in itertools.combinations(range(1, len(data)), n):
            yield cut(data, places)


@pytest.mark.parametrize(
    "text, stop, answer, stopped",
    [
        ("xFINISHy", ["FINISH"], "x", "FINISH"),
        ("FINISH", ["FINISH"], "", "FINISH"),
        ("xFINISx", ["FINISH"], "xFINISx", None),  # near misses are let go
        ("FINIFINISH", ["FINISH"], "FINI", "FINISH"),  # a beginning inside a beginning
        ("xFINIS", ["FINISH"], "xFINIS", None),  # the text ends in a beginning
        ("aFINISHb", ["FINISH", "NIS"], "aFI", "NIS"),  # overlapping: the one that is complete first
        ("aFINISHb", ["FINISH", "ISH", "H"], "a", "FINISH"),  # complete together: the one that begins first
        ("abFINIS", ["bFINIX", "FINIS"], "ab", "FINIS"),
        ("é🙂FIN🙂", ["FIN🙂"], "é🙂", "FIN🙂"),  # cut inside characters too
    ],
)
def test_every_way_to_cut_a_stop_text(text, stop, answer, stopped):
    for parts in every_cut(text.encode()):
        pieces, why = run(parts, stop)
        assert ("".join(pieces), why) == (answer, stopped), parts
        shown = "".join(pieces[:-1])
        assert answer.startswith(shown)  # at no time more than the answer


def test_every_way_to_cut_a_character():
    for text in ("é", "€", "🙂", "e\u0301", "👩\u200d🚀"):
        for parts in every_cut(text.encode()):
            pieces = run(parts)[0]
            assert "".join(pieces) == text and "\ufffd" not in "".join(pieces)


@pytest.mark.parametrize("stop", ["\x00", ["\x00\x00", "b\x00"], "\ufffd"])
def test_nul_and_marks_are_characters_like_others(stop):
    for data in (b"a\x00\x00b", b"ab\x00c", b"a\x80b", b"\xf0\x9fb\x00"):
        whole = data.decode(errors="replace")
        texts = [stop] if isinstance(stop, str) else stop
        found = next((first_stop(whole[:n], texts) for n in range(len(whole) + 1) if first_stop(whole[:n], texts)), None)
        for parts in every_cut(data):
            pieces, why = run(parts, stop)
            assert ("".join(pieces), why) == ((whole[: found[0]], found[1]) if found else (whole, None))


@pytest.mark.parametrize("byte", [b"\x80", b"\xff", b"\xc0", b"\xed\xa0\x80", b"\xf5"])
def test_invalid_bytes_never_stall(byte):
    "What cannot become a character is shown at once, as marks."
    d, shown = StreamDecoder(Pieces([byte, b"x"]), ["stop"]), 0
    for n in range(1, 200):
        shown += len(d.feed(0))
        assert shown == n * len(byte)
    assert d.feed(1) == "x"


def test_thousands_of_random_ids_equal_the_full_decode_and_transformers(tmp_path, parity):
    from transformers import PreTrainedTokenizerFast, TextIteratorStreamer

    tokenizer = BPETokenizer.train(["ünïcode 🙂 不可 and words, \r\n\t\x00 " * 20], 300, ["<|end|>", "<|user|>"], allow_smaller=True)
    tokenizer.to_hf(tmp_path / "tokenizer.json")
    reference = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    rng, off, ordinary = random.Random(0), 0, tokenizer.vocab_size - 2
    for n in range(4000):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(30))]
        ours = "".join(decode_stream(tokenizer, ids))
        off += ours != tokenizer.decode([i for i in ids if i < ordinary])
        if n % 4 == 0:  # 1,000 of them through the streamer of transformers, which writes no special tokens either
            streamer = TextIteratorStreamer(reference, skip_special_tokens=True)
            for i in ids:
                streamer.put(reference_ids(i))
            streamer.end()
            off += ours != "".join(streamer)
    parity("streamed text of random ids, whole", "tokenizer.decoding", "transformers", version("transformers"), float(off), 0.0)


def reference_ids(i):
    import torch

    return torch.tensor([i])


def test_time_is_linear_with_many_stop_texts():
    "Ten times the tokens, about ten times as long; also where every character may begin a stop text."
    for unit, tail in (("a", "b"), ("ab", "c"), ("to be or ", "!")):
        stop = [unit * (200 // len(unit)) + tail + str(k) for k in range(16)]
        t = Pieces([unit.encode()])

        def seconds(n, stop=stop, t=t):
            start = time.perf_counter()
            assert sum(map(len, decode_stream(t, itertools.repeat(0, n), stop))) == n * len(t.parts[0])
            return time.perf_counter() - start

        assert min(seconds(20_000) for _ in range(2)) < 40 * min(seconds(2_000) for _ in range(3))
