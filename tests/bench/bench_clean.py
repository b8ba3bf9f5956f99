"""Cleaning against its peers: mojibake repair on sound text, and web pages to text."""

import gzip
import time
from pathlib import Path

import ftfy
from common import compare
from selectolax.lexbor import LexborHTMLParser

from llmlab.data.clean import BLOCKS, HIDDEN, LINES, REPAIRS, SKIPPED, clean_text, fix_mojibake, html_to_text
from llmlab.data.document import read_documents
from llmlab.data.sources import stdlib_corpus

ROOT = Path(__file__).parent.parent.parent
MARKED = ",".join([*BLOCKS.split(), *LINES.split(), "br", "ul", "ol", "li", "tr", "td", "th", "pre"])


def sound_texts():
    "Docstrings and the accented and Chinese samples, cleaned: the text on which a check should cost nothing."
    texts = [d.text for d in stdlib_corpus(kinds=("docstring",))[::10]]
    for name in ("mojibake.txt", "chinese.txt"):
        texts += [d.text for d in read_documents(ROOT / "data_samples" / name)]
    return [clean_text(t) for t in texts]


def pages():
    "The sample page, and the real pages that lie beside the project where there are any."
    found = [(ROOT / "data_samples" / "page.html").read_text(encoding="utf-8")]
    for path in sorted((ROOT.parent / "shared" / "data" / "html").glob("*.html*")):
        data = gzip.open(path).read() if path.suffix == ".gz" else path.read_bytes()
        found.append(data.decode("utf-8", "replace"))
    return found


def selectolax_blocks(html):
    "The same job with selectolax's own verbs: remove, put a line end around every block, read the text, tidy the blanks of its lines."
    tree = LexborHTMLParser(html)
    tree.strip_tags(SKIPPED.split(), recursive=True)
    for node in reversed(tree.css(HIDDEN)):
        node.decompose()  # the inner before the outer
    for node in tree.css(MARKED):
        node.insert_before("\n")
        node.insert_after("\n")
    return "\n".join(filter(None, (" ".join(line.split()) for line in tree.body.text().split("\n"))))


def selectolax_flat(html):
    "The least that can be called text: the same elements removed, every piece of text on a line of its own, sentences cut at each link."
    tree = LexborHTMLParser(html)
    tree.strip_tags(SKIPPED.split(), recursive=True)
    return tree.body.text(separator="\n", strip=True)


def run():
    "Rows for the table of benchmarks."
    texts, html = sound_texts(), pages()
    assert all(clean_text(t) == fix_mojibake(t) == ftfy.fix_text(t, REPAIRS) == t for t in texts)
    letters = lambda text: "".join(sorted(c for c in text if c.isalpha()))
    assert all(letters(html_to_text(h)) == letters(selectolax_blocks(h)) for h in html)
    rows = [
        compare(
            "mojibake_clean_text",
            "ftfy",
            lambda: [clean_text(t) for t in texts],
            lambda: [ftfy.fix_text(t, REPAIRS) for t in texts],
            amount=len(texts),
            unit="docs/s",
            clock=time.process_time,
            packages=("ftfy",),
        )
    ]
    for peer, theirs in (("selectolax", selectolax_blocks), ("selectolax_flat", selectolax_flat)):
        rows.append(
            compare(
                "html_to_text",
                peer,
                lambda: [html_to_text(h) for h in html],
                lambda f=theirs: [f(h) for h in html],
                amount=len(html),
                unit="pages/s",
                repeat=31,
                clock=time.process_time,
                packages=("selectolax",),
            )
        )
    return rows


if __name__ == "__main__":
    for row in run():
        print(row)
