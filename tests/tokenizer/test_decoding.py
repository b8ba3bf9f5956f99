"""The streaming decoder: no cut of the bytes matters, and nothing of a stop text is ever shown."""

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
