"""Documents: every way to save a text gives the same text, damage has an address, and what is written is read back."""

import codecs
import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmlab.data.document import Document, corpus_hash, file_format, read_documents, write_documents

MARK = b"\xef\xbb\xbf"
TEXTS = ["p1\n\np2", "好 é", "third"]


def save(path, data):
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("mark", [b"", MARK])
def test_marks_line_ends_and_packing_do_not_change_documents(tmp_path, mark, end, packed):
    records = [{"text": t} for t in TEXTS]
    lines = end.join(json.dumps(r, ensure_ascii=False).encode() for r in records) + end
    value = json.dumps(records, indent=1, ensure_ascii=False).encode().replace(b"\n", end)
    for name, body in (("a.jsonl", lines), ("a.json", value)):
        docs = list(read_documents(save(tmp_path / (name + packed), mark + body), errors="strict"))
        assert [d.text for d in docs] == TEXTS and corpus_hash(docs) == corpus_hash(
            [Document(t) for t in TEXTS]
        )
        assert [d.id for d in docs] == [f"{name}:{i}" for i in (1, 2, 3)], "packing must not rename"
    (doc,) = read_documents(save(tmp_path / ("a.txt" + packed), mark + TEXTS[0].encode().replace(b"\n", end)))
    assert doc.text == TEXTS[0] and doc.id == "a.txt"


def test_the_smallest_windows_record(tmp_path):
    (doc,) = read_documents(save(tmp_path / "a.jsonl", MARK + b'{"text":"a"}\r\n'))
    assert doc.text == "a"


@pytest.mark.parametrize("where", ["start", "middle", "end"])
@pytest.mark.parametrize("size", [3, 8190, 8191, 8192, 65536])
def test_broken_bytes_have_a_policy_and_an_address(tmp_path, where, size):
    good = b"a" * size
    line = {"start": b"\xff\xfe" + good, "middle": good + b"\xff\xfe" + good, "end": good + b"\xff\xfe"}[
        where
    ]
    path = save(tmp_path / "x.txt", b"one\n" + line + b"\nthree\n")
    offset = 4 + (0 if where == "start" else size)
    report = []
    (doc,) = read_documents(path, report=report)
    assert report == [{"file": str(path), "line": 2, "offset": offset, "count": 2, "problem": "broken bytes"}]
    assert doc.text == "one\n" + line.decode("utf-8", "replace") + "\nthree\n"
    (dropped,) = read_documents(path, errors="drop", report=report)
    assert dropped.text == "one\nthree\n" and len(report) == 2
    with pytest.raises(ValueError, match=rf"x\.txt, line 2, byte {offset}: 2 bytes"):
        list(read_documents(path, errors="strict"))


@pytest.mark.parametrize(
    "errors, texts", [("replace", ["one", "t\ufffd\ufffdwo", "three"]), ("drop", ["one", "three"])]
)
def test_broken_bytes_in_json_lines(tmp_path, errors, texts):
    path = save(tmp_path / "x.jsonl", MARK + b'{"text":"one"}\n{"text":"t\xff\xfewo"}\n{"text":"three"}\n')
    report = []
    assert [d.text for d in read_documents(path, errors, report)] == texts
    assert [(r["line"], r["count"], r["offset"]) for r in report] == [(2, 2, 3 + 15 + 10)], (
        "the offset counts the mark"
    )
    with pytest.raises(ValueError, match="line 2, byte 28"):
        list(read_documents(path, "strict"))


def test_a_file_that_begins_with_broken_bytes_is_not_taken_for_utf16(tmp_path):
    (doc,) = read_documents(save(tmp_path / "x.txt", b"\xff\xfeabc\n"))
    assert doc.text == "\ufffd\ufffdabc\n"
    with pytest.raises(ValueError, match="UTF-16.*iconv"):
        list(read_documents(save(tmp_path / "y.txt", "abc\n".encode("utf-16"))))


@given(
    st.lists(
        st.sampled_from(
            [b"a", b"\n", b"\xc3", b"\xa9", b"\xe5\xa5", b"\xbd", b"\xf0\x9f", b"\xff", b"\xed\xa0\x80"]
        ),
        max_size=40,
    ),
    st.integers(1, 9),
)
@settings(deadline=None, max_examples=150)
def test_equal_to_the_incremental_decoder_at_any_chunk_size(tmp_path_factory, pieces, size):
    data = b"x" + b"".join(pieces)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    reference = "".join(
        decoder.decode(data[i : i + size]) for i in range(0, len(data), size)
    ) + decoder.decode(b"", True)
    report = []
    (doc,) = read_documents(save(tmp_path_factory.mktemp("d") / "x.txt", data), report=report)
    assert doc.text == reference
    assert bool(report) == ("\ufffd" in reference)


def test_parity_with_the_incremental_decoder(tmp_path, parity):
    data = Path(__file__).read_bytes() + "好é".encode() * 5000 + b"\xff\xe5"
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    reference = "".join(
        decoder.decode(data[i : i + 4097]) for i in range(0, len(data), 4097)
    ) + decoder.decode(b"", True)
    (doc,) = read_documents(save(tmp_path / "x.txt.gz", data))
    differ = sum(a != b for a, b in zip(doc.text, reference, strict=True))
    parity(
        "broken bytes decoded line by line",
        "data.document",
        "codecs incremental decoder",
        "Python",
        differ,
        0,
    )


@pytest.mark.parametrize("data", [b"", MARK, b" \n\r\n\t", b"\n" * 9])
@pytest.mark.parametrize("name", ["x.txt", "x.jsonl", "x.json", "x.md.gz"])
def test_blank_files_hold_no_document(tmp_path, name, data):
    assert list(read_documents(save(tmp_path / name, data))) == []


def test_an_empty_text_in_a_record_is_a_document(tmp_path):
    assert [d.text for d in read_documents(save(tmp_path / "x.jsonl", b'{"text":""}\n\n""\n'))] == ["", ""]


@pytest.mark.parametrize(
    "body, message",
    [
        (b'{"text":"a"}\n{"text":', r"x\.jsonl, line 2: not valid JSON"),
        (b'{"body":"a"}\n', r"line 1: no text under .text., found \['body'\]"),
        (b'{"text":3}\n', "text_key"),
        (b"[1]\n", "found list"),
        (b"[" * 100000, "line 1: not valid JSON"),
    ],
)
def test_bad_records_are_errors_with_file_and_line(tmp_path, body, message):
    with pytest.raises(ValueError, match=message):
        list(read_documents(save(tmp_path / "x.jsonl", body)))


def test_lone_surrogates_fall_under_the_policy(tmp_path):
    path = save(tmp_path / "x.jsonl", b'{"text":"a \\ud83d b"}\n{"text":"\\ud83d\\ude00"}\n')
    report = []
    assert [d.text for d in read_documents(path, report=report)] == ["a \ufffd b", "😀"]
    assert report[0]["problem"] == "lone surrogates" and report[0]["line"] == 1
    assert [d.text for d in read_documents(path, "drop")] == ["😀"]
    with pytest.raises(ValueError, match="line 1: 1 lone surrogates"):
        list(read_documents(path, "strict"))


def test_wrong_calls_fail_at_the_call(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        read_documents(tmp_path / "x.txt")
    with pytest.raises(ValueError, match="no reader"):
        read_documents(tmp_path / "x.png")
    with pytest.raises(ValueError, match="errors='ignore'"):
        read_documents(tmp_path / "x.txt", errors="ignore")
    with pytest.raises(ValueError, match="Document.text is bytes"):
        Document(b"x")


def test_damaged_gzip_names_the_file(tmp_path):
    whole = gzip.compress(b"a line\n" * 1000)
    for data in (whole[:-10], whole[:40] + b"\0" * 8 + whole[48:], b"not gzip"):
        (tmp_path / "x.txt.gz").write_bytes(data)
        with pytest.raises(ValueError, match=r"x\.txt\.gz: damaged or cut"):
            list(read_documents(tmp_path / "x.txt.gz"))


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
metas = st.dictionaries(
    texts,
    st.one_of(texts, st.integers(), st.booleans(), st.none(), st.lists(st.integers(), max_size=3)),
    max_size=3,
)


@given(
    st.lists(st.builds(Document, texts, texts, metas), max_size=5), st.sampled_from(["x.jsonl", "x.jsonl.gz"])
)
@settings(deadline=None, max_examples=100)
def test_written_documents_are_read_back_exactly(tmp_path_factory, docs, name):
    path = tmp_path_factory.mktemp("d") / name
    assert write_documents(iter(docs), path) == len(docs)
    assert list(read_documents(path, errors="strict")) == docs


def test_packed_bytes_are_deterministic_and_nothing_half_written(tmp_path, monkeypatch):
    docs = [Document("a", "1", {"b": 1, "a": 2}), Document("b", "2", {"a": 2, "b": 1})]
    write_documents(docs, tmp_path / "one.jsonl.gz")
    monkeypatch.setattr("time.time", lambda: 10**9)
    write_documents(
        [Document(d.text, d.id, dict(reversed(d.meta.items()))) for d in docs], tmp_path / "two.jsonl.gz"
    )
    one = (tmp_path / "one.jsonl.gz").read_bytes()
    assert one == (tmp_path / "two.jsonl.gz").read_bytes()
    for bad in (
        Document("\ud800", "half"),
        Document("x", "half", {"y": object()}),
        Document("x", "half", {"y": float("nan")}),
    ):
        with pytest.raises(ValueError, match="document 'half'"):
            write_documents([*docs, bad], tmp_path / "one.jsonl.gz")
        assert (tmp_path / "one.jsonl.gz").read_bytes() == one and len(list(tmp_path.iterdir())) == 2
    with pytest.raises(ValueError, match="written as .jsonl"):
        write_documents(docs, tmp_path / "x.txt")


def test_corpus_hash_knows_borders_and_order_and_nothing_else():
    hashes = {
        corpus_hash([Document(t) for t in ts])
        for ts in (["ab", "c"], ["a", "bc"], ["c", "ab"], ["abc"], ["abc", ""], [])
    }
    assert len(hashes) == 6
    assert corpus_hash([Document("a", "x", {"y": 1})]) == corpus_hash([Document("a")])


def test_file_formats():
    names = {
        "a.jsonl.gz": "jsonl",
        "a.JSON": "json",
        "a.htm": "html",
        "a.html.gz": "html",
        "a.py": "text",
        "a.md": "text",
        "a.bin": None,
        "a.gz": None,
    }
    assert {n: file_format(n) for n in names} == names


def test_real_files(shared_data):
    counts = {"gsm8k/test.jsonl": 1319, "humaneval/HumanEval.jsonl.gz": 164}
    for name, count in counts.items():
        key = "question" if "gsm8k" in name else "prompt"
        docs = list(read_documents(shared_data / name, "strict", text_key=key))
        assert len(docs) == count == len({d.id for d in docs}) and docs[0].meta
    poems = list(read_documents(shared_data / "zh-poetry" / "tang300.json", "strict", text_key="title"))
    assert len(poems) > 300 and all(not d.text.isascii() for d in poems)
    (shakespeare,) = read_documents(shared_data / "tinyshakespeare" / "input.txt", "strict")
    assert len(shakespeare.text) == 1115394


def test_samples(root):
    folder, report = root / "data_samples", []
    assert [d.text.count("\n\n") for d in read_documents(folder / "windows.txt")] == [1]
    assert [d.id for d in read_documents(folder / "windows.jsonl", "strict")] == ["w1", "w2", "w3"]
    list(read_documents(folder / "broken_bytes.txt", report=report))
    assert [(r["line"], r["count"]) for r in report] == [(2, 2), (4, 1)]
