"""Drawn tokens: nothing that the tokens spell is lost, and no text becomes HTML."""

from html.parser import HTMLParser

import matplotlib.pyplot as plt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import same_color

from llmlab.tokenizer.bpe import BPETokenizer
from llmlab.tokenizer.explorer import (
    FRAME,
    HEX_INK,
    LABELS,
    compare,
    draw_tokens,
    drawable,
    explorer,
    lay_out,
    panel,
    shown,
    token_figure,
    token_html,
)

BYTES = BPETokenizer([], {"<|end|>": 256})
PAIRS = BPETokenizer.train(["the cat and the hat and the bat\n" * 20, "naïve café"], 290, ["<|end|>"], allow_smaller=True)


class Page(HTMLParser):
    "Elements, and of each span its title, style and text."

    def __init__(self, text):
        super().__init__()
        self.tags, self.spans = set(), []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag == "span":
            self.spans.append(dict(attrs) | {"text": ""})

    def handle_data(self, data):
        self.spans[-1]["text"] += data


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    plt.close("all")


@given(st.text())
def test_html_gives_back_ids_and_bytes_and_holds_only_our_elements(text):
    ids = PAIRS.encode(text)
    page = Page(token_html(PAIRS, ids))
    read = [s["title"].split(": ") for s in page.spans]
    assert [int(i) for i, _ in read] == ids and b"".join(bytes.fromhex(b) for _, b in read).decode() == text
    assert page.tags <= {"div", "span", "br", "wbr"}
    assert [s["text"] for s in page.spans] == [shown(PAIRS.decode_bytes(i)) for i in ids]


@pytest.mark.parametrize(
    "data, label",
    [
        (b" a", "·a"),
        (b"\n", "↵"),
        (b"\t", "⇥"),
        (b"\r", "␍"),
        (b"\x00", r"\u0000"),
        ("\u202e".encode(), r"\u202e"),  # turns the direction of writing
        ("\u200b".encode(), r"\u200b"),  # has no width
        ("\U000e0041".encode(), r"\ue0041"),  # a tag, outside the first plane
        ("日".encode(), "日"),
        (b"\xe6\x97", "e6 97"),
        (b"a\xff", "61 ff"),
        (b"", ""),
    ],
)
def test_what_cannot_be_seen_is_spelled_out(data, label):
    assert shown(data) == label
    assert shown(data).isprintable()


def test_parts_of_characters_and_special_tokens_look_different():
    spans = Page(token_html(BYTES, [*BYTES.encode("né"), 256])).spans
    assert [HEX_INK in s["style"] for s in spans] == [False, True, True, False]
    assert [FRAME in s["style"] for s in spans] == [False] * 3 + [True]


@pytest.mark.parametrize("show, label", [("text", "·"), ("ids", "32"), ("bytes", "20")])
def test_a_token_is_shown_as_text_id_or_bytes(show, label):
    assert [s["text"] for s in Page(token_html(BYTES, [32], show)).spans] == [label]


def test_an_unknown_way_to_show_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'hex'.*text.*ids.*bytes"):
        token_html(BYTES, [32], "hex")


def test_counts_are_of_bytes_characters_and_tokens():
    row = compare({"bytes": BYTES}, "née")[0]
    assert row == {
        "tokenizer": "bytes",
        "tokens": 4,
        "different tokens": 4,
        "parts of characters": 2,
        "bytes per token": 1.0,
        "characters per token": 0.75,
    }
    assert compare({"bytes": BYTES}, "<|end|>", "all")[0]["tokens"] == 1 and compare({"bytes": BYTES}, "<|end|>")[0]["tokens"] == 7
    assert compare({"bytes": BYTES}, "")[0]["tokens"] == 0


def test_half_a_pair_is_an_error_everywhere_and_the_widget_says_so():
    for call in (compare, token_figure):
        with pytest.raises(ValueError, match="surrogate"):
            call({"bytes": BYTES}, "a\ud83d")
    assert "surrogate" in panel("bytes", BYTES, "a\ud83d")


@given(st.lists(st.text(min_size=1, max_size=12)), st.integers(1, 10))
def test_boxes_hold_every_label_without_overlap(labels, columns):
    boxes, seen = lay_out(labels, columns), set()
    assert ["".join(p for n, _, _, p in boxes if n == k) for k in range(len(labels))] == labels
    for _, row, column, piece in boxes:
        cells = {(row, column + k) for k in range(len(piece))}
        assert column + len(piece) <= columns and not cells & seen
        seen |= cells


def test_the_figure_draws_what_the_font_has_and_the_rest_as_bytes():
    assert drawable("é".encode()) == "é" and drawable("日".encode()) == "e6 97 a5"
    ax = plt.figure().add_subplot()
    assert draw_tokens(ax, BYTES, [97, 0xE6, 256], 20, 3) == 3
    texts = ax.texts
    assert "".join(t.get_text() for t in texts) == "ae6<|end|>"
    assert [same_color(t.get_color(), HEX_INK) for t in texts] == [False, True, True] + [False] * 7
    assert [same_color(p.get_edgecolor(), FRAME) for p in ax.patches] == [False, False, True]


def test_what_a_figure_or_a_panel_leaves_out_is_said():
    fig = token_figure({"bytes": BYTES}, "a" * 100, columns=10, rows=2)
    assert "100 tokens (the first 20 are drawn)" in fig.axes[0].get_title(loc="left")
    assert "are drawn" not in token_figure({"bytes": BYTES}, "a" * 20, columns=10, rows=2).axes[0].get_title(loc="left")
    assert "The first 30 tokens" in panel("bytes", BYTES, "a" * 31, limit=30) and "The first" not in panel(
        "bytes", BYTES, "a" * 30, limit=30
    )


def test_dollars_and_empty_texts_draw(recwarn):
    token_figure({"bytes": BYTES, "pairs": PAIRS}, "$x_1$ \\alpha ^").canvas.draw()
    token_figure({"bytes": BYTES}, "").canvas.draw()
    assert not recwarn.list


def test_the_widget_follows_its_text_and_its_choices():
    lab = explorer({"bytes": BYTES, "pairs": PAIRS}, "the cat")
    area, show, special, grid = lab.children
    left, right, one, two = grid.children
    assert (left.value, right.value) == ("bytes", "pairs") and one.value == panel("bytes", BYTES, "the cat") != two.value
    area.value = "the <b>cat</b><|end|>"
    assert "<b>cat" not in one.value and one.value == panel("bytes", BYTES, area.value)
    special.value = True
    assert FRAME in one.value and one.value == panel("bytes", BYTES, area.value, "text", "all")
    show.value = "ids"
    assert one.value == panel("bytes", BYTES, area.value, "ids", "all") and set(show.options) == set(LABELS)
    left.value = "pairs"
    assert one.value == two.value


def test_the_widget_with_one_tokenizer_and_with_none():
    grid = explorer({"bytes": BYTES}, "a").children[3]
    assert grid.children[2].value == grid.children[3].value
    with pytest.raises(ValueError, match="no tokenizers"):
        explorer({})
