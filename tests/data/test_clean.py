"""Cleaning: equal to ftfy where ftfy acts, idempotent on anything, and pages keep every letter and their structure."""

import gzip
import re
import sys
import time
import unicodedata
from importlib.metadata import version

import ftfy
import pytest
from ftfy.badness import MOJIBAKE_CATEGORIES, is_bad
from hypothesis import example, given, settings
from hypothesis import strategies as st
from selectolax.lexbor import LexborHTMLParser

from llmlab.data.clean import (
    BREAKS,
    HIDDEN,
    LEFTOVER,
    NOTHING,
    ODD,
    REPAIRS,
    SKIPPED,
    SPACES,
    SUSPECT,
    clean_text,
    damage,
    fix_mojibake,
    html_to_text,
)

TABLE = re.compile("[" + "".join(MOJIBAKE_CATEGORIES.values()) + "Œœ]")
CHARACTERS = [c for c in map(chr, range(0x80, 0x10000)) if TABLE.match(c)]
CODES = [
    "latin-1",
    "cp1252",
    "cp1251",
    "cp1250",
    "cp1253",
    "cp1254",
    "cp1257",
    "iso8859_2",
    "mac_roman",
    "cp437",
]
SENTENCES = [
    "Zoë’s “naïve” café – 20 €…",
    "Größe, Straße, übermäßig „gut“",
    "¿Qué? ¡El niño señaló!",
    "L’été à l’œuvre, voilà le travail",
    "Съешь ещё этих мягких булок",
    "Ελληνικά γράμματα, άλλα",
    "Žluťoučký kůň pěl ďábelské ódy",
    "你好，世界！",
    "العربية",
    "İstanbul’da şık",
    "Ā–ž latviešu",
    "5 × 3² ± 1 µm",
    "naïve 👩‍👧 emoji 😀",
]

accidents = st.text(
    st.one_of(
        st.sampled_from(CHARACTERS),
        st.sampled_from("aZ .,\n\r\t ÂÃâ€™œ\xa0\xad\u200b\u200d\ufeff\x85\x92\u0301\x1b[0m"),
        st.characters(),
    ),
    max_size=30,
)


def wrong(text, code, times=1):
    for _ in range(times):
        text = text.encode("utf-8", "surrogatepass").decode(code, "ignore")
    return text


def test_repair_equals_ftfy_on_wrong_decodings(parity):
    cases = [wrong(s, c, n) for s in SENTENCES for c in CODES for n in (0, 1, 2)] + SENTENCES
    cases += [a + "\n" + b for a, b in zip(cases, cases[7:], strict=False)]
    acted = sum(ftfy.fix_text(t, REPAIRS) != t for t in cases)
    differ = sum(fix_mojibake(t) != ftfy.fix_text(t, REPAIRS) for t in cases)
    assert acted > 150
    parity("mojibake repair, texts that differ", "data.clean", "ftfy.fix_text", version("ftfy"), differ, 0)


def test_repair_equals_ftfy_on_real_files(shared_data):
    files = ["wikitext-2/valid.txt", "zh-poetry/tang300.json", "html/utf8.html", "warc/cc_net_sample.wet.txt"]
    for name in files:
        text = (shared_data / name).read_text(encoding="utf-8", errors="replace")[:200_000]
        assert fix_mojibake(text) == ftfy.fix_text(text, REPAIRS), name


@given(accidents)
@settings(deadline=None, max_examples=400)
def test_repair_equals_ftfy_on_anything(text):
    assert fix_mojibake(text) == ftfy.fix_text(text, REPAIRS)


def test_the_cheap_look_misses_no_pair():
    plain = [" ", "a", "A", "z", ".", "\n"]
    bad = missed = 0
    for a in CHARACTERS + plain:
        for b in CHARACTERS + plain:
            for text in (a + b, f"a{a}{b}a", f" {a}{b} "):
                if SUSPECT.search(text):
                    continue
                bad += 1
                missed += is_bad(text)
    assert bad > 100_000, "the look must also say no, or it would be worth nothing"
    assert missed == 0


@pytest.mark.parametrize(
    "alphabet", ["вГўВЂВСРabz .°µ€™”»", "√≈∂±´°¢‚Äâóìàê ", "ÂÃÎÐØÙ \xa0\xad´–—€œŠšž°·a.", "βāΒΓΞΟ€™Ά®° a"]
)
def test_the_cheap_look_misses_no_longer_match(alphabet):
    import random

    rng = random.Random(42)
    for _ in range(20_000):
        text = "".join(rng.choices(alphabet, k=6))
        assert SUSPECT.search(text) or not is_bad(text), repr(text)


@given(accidents)
@example("A\u0303\u00a9")  # NFC makes a broken pair of it
@example("Ã\u200b©")  # so does taking out what is invisible
@example("\xd0\xb2\xad\u20ac\u2022")  # so does the soft hyphen that goes after the repair
@example("\xc2 \u03ba")  # the repair makes a no-break space
@example("x \n\u3000\n\n\n \n\n")
@settings(deadline=None, max_examples=400)
def test_cleaning_twice_is_cleaning_once(text):
    once = clean_text(text)
    assert clean_text(once) == once
    assert unicodedata.is_normalized("NFC", once)
    once.encode("utf-8")
    assert not BREAKS.search(once) and not LEFTOVER.search(once) and not SPACES.search(once)
    assert "\n\n\n\n" not in once and not re.search(r"[ \t]\n", once) and once == once.strip("\n")
    assert not any(unicodedata.category(c) == "Cc" and c not in "\t\n" for c in once)


def test_one_scan_knows_every_odd_character():
    for code in range(sys.maxunicode + 1):
        c = chr(code)
        if any(p.search(c) for p in (BREAKS, NOTHING, LEFTOVER, SPACES)):
            assert ODD.search(c), hex(code)


@pytest.mark.parametrize(
    "text, cleaned",
    [
        ("a\r\nb\rc\x0bd\x0ce\u2028f\u2029g", "a\nb\nc\nd\ne\nf\ng"),
        ("p1\r\n\r\np2", "p1\n\np2"),
        ("\ufeffstart", "start"),
        ("zero\u200bwidth\u2060 \u202eright\u202c", "zerowidth right"),
        ("nul\0 bell\x07 del\x7f", "nul bell del"),
        ("tab\tstays\n", "tab\tstays"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("e\u0301", "é"),
        ("a\xa0b\u2009c", "a b c"),
        ("\u3000\u3000段落。", "\u3000\u3000段落。"),
        ("soft\xadly", "softly"),
        ("a  \nb\t\n", "a\nb"),
        ("a" + "\n" * 9 + "b", "a\n\n\nb"),
        ("\n\n    indented", "    indented"),
        ("می\u200cخواهم", "می\u200cخواهم"),
        ("👩\u200d👧 w\u200dord", "👩\u200d👧 word"),
        ("🏴\U000e0067\U000e0062\U000e007f x\U000e0041y", "🏴\U000e0067\U000e0062\U000e007f xy"),
        ("half \ud83d", "half \ufffd"),
        ("\ud83d\ude00", "😀"),
        ("‘curly’ “quotes” ﬁ １２ ，", "‘curly’ “quotes” ﬁ １２ ，"),
        ("&amp; &lt;b&gt;", "&amp; &lt;b&gt;"),
        ("", ""),
        (" \t\r\n\ufeff", ""),
        ("cafÃ©", "café"),
        ("itâ€™s", "it’s"),
        ("x\ufffdy", "x\ufffdy"),
    ],
)
def test_cases(text, cleaned):
    assert clean_text(text) == cleaned


def test_code_keeps_its_indentation(root):
    source = (root / "data_samples" / "code.py").read_text()
    assert clean_text(source) == source.rstrip("\n")
    assert clean_text(source.replace("\n", "\r\n").replace("    ", "\xa0   ")) == source.rstrip("\n")


def test_samples(root):
    text = clean_text((root / "data_samples" / "mojibake.txt").read_text(encoding="utf-8"))
    for words in (
        "Zoë’s café",
        "20 € für zwei Stück Käsekuchen, täglich außer",
        "El niño comió piñones",
        "Привет, это письмо",
        "\n    indented(code)",
    ):
        assert words in text
    sound = (root / "data_samples" / "chinese.txt").read_text(encoding="utf-8")
    assert clean_text(sound) == sound.rstrip("\n")


def test_damage_counts():
    report = damage("\ufeffa\r\nb\xa0c\u200b \ncafÃ© e\u0301\n\n\n\n\nx")
    assert report == {
        "line ends": 1, "invisible": 2, "odd spaces": 1, "mojibake lines": 1, "not NFC": 1,
        "blanks at line ends": 1, "many blank lines": 1,
    }  # fmt: skip
    assert not any(damage("Sound text.\n\n“Größe” 你好\n").values())


@pytest.mark.parametrize(
    "text",
    [
        " " * 200_000 + "x",
        "\u3000 \t" * 50_000,
        "Ã" * 50_000,
        "\n" * 200_000,
        "\x1b[" * 50_000,
        "\u200d" * 100_000,
    ],
)
def test_no_text_is_slow(text):
    start = time.process_time()
    clean_text(text)
    assert time.process_time() - start < 20, "seconds; a quadratic step would take minutes"


# --- pages ---


@pytest.mark.parametrize(
    "html, text",
    [
        ("<p>a<p>b", "a\n\nb"),
        ("<h1>t</h1>loose<p>p", "t\n\nloose\n\np"),
        ("<div>a</div><div>b</div>", "a\nb"),
        ("a<br>b<br><br>c", "a\nb\n\nc"),
        ("<p>one <b>bold</b>, <a href=x>link</a>!", "one bold, link!"),
        ("<p>a\n  b\t c", "a b c"),
        ("&amp;&lt;&eacute;&#x4f60;&hellip;", "&<é你…"),
        ("<ul><li>a<li>b</ul>c", "- a\n- b\n\nc"),
        ("<ol start=9><li>a<li>b</ol>", "9. a\n10. b"),
        ("<ol start=x><li>a</ol>", "1. a"),
        ("<ul><li>a<ul><li>b<ol><li>c</ol></ul><li>d</ul>", "- a\n  - b\n    1. c\n- d"),
        ("<ul><li><p>a</p></li><li><li><div>b</div></ul>", "- a\n- b"),
        ("<ul><li><p>a<p>b<li>c</ul>", "- a\n\nb\n- c"),
        ("<li>a", "- a"),
        ("<table><tr><th>a<th>b<tr><td>1<td>2</table>x", "a | b\n1 | 2\n\nx"),
        ("<table><tr><td>a<td><td>c</table>", "a |  | c"),
        ("<table><tr><td><td>b<tr><td>c<td></table>", "| b\nc |"),
        ("<table><tr><td><p>a</p><td><div>b</div></table>", "a | b"),
        ("<table><tr><td> <td>&nbsp;<tr><td>a</table>", "a"),
        ("<table><tr><td>m<p>n</p><td>z</table>", "m\n\nn\n\nz"),
        ("<table><tr><td>a<td><table><tr><td>x<td>y</table></table>", None),
        ("<pre>\n  a\n\n\n    b  \n</pre>x", "  a\n\n\n    b\n\nx"),
        ("<pre>a\r\nb<br>c</pre>", "a\nb\nc"),
        ("<p>x<pre>1</pre><pre>2</pre>y", "x\n\n1\n\n2\n\ny"),
        ("<pre> </pre>a", "a"),
        ("<code>a  b</code>", "a b"),
        ("a<script>x</script><style>y</style><noscript>z</noscript><template>t</template>", "a"),
        ("<pre>x<button>Copy</button><nav>n<nav>m</nav></nav></pre>", "x"),
        ("<nav>n</nav><aside>s</aside><footer>f</footer><main>m</main>", "m"),
        ("<p hidden>a</p><p HIDDEN>b</p><i aria-hidden=true>c</i>d", "d"),
        ("<div role=navigation><p>a</div>b", "b"),
        ("<form><p>kept</p><button>B</button><select><option>o</select></form>", "kept"),
        ("<!-- <p>c</p> --><p>a<!-- x -->b", "ab"),
        ("<p>a\u00a0b", "a\u00a0b"),
        ("<p>\u3000段落", "\u3000段落"),
        ("a<wbr>b<x-y>c</x-y>", "abc"),
        ("<svg><text>s</text><title>t</title></svg>a<title>b</title>", "a"),
        ("<img alt='a > b'>c", "c"),
        ("", ""),
        ("   ", ""),
        ("<p> </p>", ""),
        ("<frameset><frame>", ""),
        ("plain text", "plain text"),
        ("a\0b&#0;c", "ab\ufffdc"),
        ("x\ud800y", "x\ufffdy"),
        ("<p>n</p>\0n \0i \0c", "n\n\nn i c"),
        ("<p>|</p><p>-</p>", "|\n\n-"),
        ("<dl><dt>t<dd>d<dt>u</dl>", "t\nd\nu"),
        ("<p>a</p><hr><p>b", "a\n\nb"),
        ("a<nav>x<nav>y</nav></nav>b", "ab"),
    ],
)
def test_elements(html, text):
    result = html_to_text(html)
    assert "\0" not in result
    if text is not None:
        assert result == text


def letters(text):
    return "".join(c for c in text if c.isalnum())


def reference_letters(html):
    "All text of the page but for what is skipped, by selectolax's own verbs; list numbers are ours and not in it."
    tree = LexborHTMLParser(html)
    tree.strip_tags(SKIPPED.split(), recursive=True)
    for node in reversed(tree.css(HIDDEN)):
        node.decompose()
    return letters(tree.body.text())


def test_real_pages_keep_every_letter_in_order(shared_data, root, parity):
    differ, pages = 0, [root / "data_samples" / "page.html", *sorted((shared_data / "html").glob("*.html*"))]
    assert len(pages) >= 5
    for path in pages:
        data = gzip.open(path).read() if path.suffix == ".gz" else path.read_bytes()
        html = re.sub("<(/?)ol[^>]*>", r"<\1ul>", data.decode("utf-8", "replace"))
        text = html_to_text(html)
        ours, theirs = letters(text), reference_letters(html)
        differ += abs(len(ours) - len(theirs)) + sum(a != b for a, b in zip(ours, theirs, strict=False))
        assert "\n\n\n" not in text or "<pre" in html
        assert html_to_text(html) == text and clean_text(clean_text(text)) == clean_text(text)
    parity("letters of real pages, in order", "data.clean", "selectolax", version("selectolax"), differ, 0)


tags = st.sampled_from(
    [
        "p",
        "div",
        "b",
        "a",
        "ul",
        "ol",
        "li",
        "table",
        "tr",
        "td",
        "pre",
        "h1",
        "br",
        "script",
        "nav",
        "span",
        "blockquote",
        "form",
        "dl",
        "dd",
        "svg",
        "title",
        "textarea",
        "/p",
        "/div",
        "/ul",
        "/li",
        "/table",
        "/tr",
        "/td",
        "/pre",
        "/script",
        "/nav",
        "/b",
        "hr",
    ]
)
soup = st.lists(
    st.one_of(
        tags.map("<{}>".format),
        st.text("ab \n\0&;<>", max_size=6),
        st.sampled_from(["n", "c ", "i", "|", "- ", "1. "]),
    ),
    max_size=25,
).map("".join)


@given(soup)
@settings(deadline=None, max_examples=400)
def test_any_soup_keeps_its_letters(html):
    text = html_to_text(html)
    assert "\0" not in text and text == text.strip("\n")
    ours, theirs = letters(text), reference_letters(html)
    if "<ol" not in html:
        assert ours == theirs
    else:
        assert [c for c in ours if c.isalpha()] == [c for c in theirs if c.isalpha()]


@given(st.text(max_size=60))
@settings(deadline=None, max_examples=150)
def test_any_string_is_a_page(html):
    text = html_to_text(html)
    assert "\0" not in text
    text.encode("utf-8")


@pytest.mark.parametrize("tag", ["div", "ul", "b", "table><tr><td", "ul><li", "blockquote", "pre", "span"])
def test_deep_pages_do_not_exhaust_the_stack(tag):
    html = f"<{tag}>" * 1500 + "<script>no()</script>deep" + "<p>end"
    assert letters(html_to_text(html)).startswith("deep") or "deepend" in letters(html_to_text(html))
    assert "no()" not in html_to_text(html)


def test_sample_page(root):
    text = clean_text(html_to_text((root / "data_samples" / "page.html").read_text(encoding="utf-8")))
    for words in (
        "Sourdough, the slow way\n\n",
        "1 : 2 : 2.\n\nWhat you need\n\n- flour\n  - strong white\n  - a little rye\n- water\n- salt",
        "3. Mix.\nWait an hour.\n4. Fold",
        "rye |  | 420\n\nThe last row has no flour: ask the miller.",
        "flour & water",
        "def hydration(flour, water):\n    if flour == 0:\n        raise",
        "takes.\n\n— my grandmother",
    ):
        assert words in text, words
    for words in ("Subscribe", "newsletter", "About us", "cookies", "Related", "draft", "★", "Quiet Kitchen"):
        assert words not in text, words
