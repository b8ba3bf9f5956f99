"""Sources: the library's corpus is complete, deterministic and honest about what it leaves out; your own files likewise."""

import ast
import gc
import gzip
import subprocess
import sys
import sysconfig
import warnings
from collections import Counter
from pathlib import Path

import pytest

from llmlab.data.document import Document, corpus_hash
from llmlab.data.sources import (
    KINDS,
    SHORT,
    docstrings,
    from_files,
    library_corpus,
    library_files,
    module_name,
    stdlib_corpus,
)

ROOT = Path(sysconfig.get_paths()["stdlib"])


@pytest.fixture(scope="module")
def corpus():
    report = []
    return stdlib_corpus(report=report), report


def test_kinds_sizes_and_names(corpus):
    docs, report = corpus
    sizes, counts = Counter(), Counter()
    for d in docs:
        sizes[d.meta["kind"]] += len(d.text)
        counts[d.meta["kind"]] += 1
    assert set(sizes) == set(KINDS)
    assert sizes["code"] > 6e6 and sizes["docstring"] > 1e6 and sizes["topic"] > 3e5
    assert counts["code"] > 300 and counts["docstring"] > 4000
    assert [d.id for d in docs] == sorted(d.id for d in docs) and len({d.id for d in docs}) == len(docs)
    assert not [r for r in report if r["file"]], "every file of this library can be read and parsed"


def test_only_library_code(corpus):
    parts = {part for d in corpus[0] for part in Path(d.meta["path"]).parts}
    assert not parts & {
        "test",
        "tests",
        "idlelib",
        "tkinter",
        "turtledemo",
        "site-packages",
        "dist-packages",
        "__pycache__",
        "encodings",
    }
    assert not [d.id for d in corpus[0] if "_sysconfigdata" in d.id]


def test_docstrings_are_unique_long_enough_and_belong_to_their_file(corpus):
    docs, report = corpus
    found = [d for d in docs if d.meta["kind"] == "docstring"]
    assert len({d.text for d in found}) == len(found) and min(len(d.text) for d in found) >= SHORT
    code = {d.meta["module"]: d for d in docs if d.meta["kind"] == "code"}
    assert all(d.meta["path"] == code[d.meta["module"]].meta["path"] for d in found)
    left_out = {r["problem"]: r["count"] for r in report}
    assert left_out[f"docstring under {SHORT} characters"] > 0 and left_out["docstring seen before"] > 0


def test_what_is_found_is_kept_short_or_repeated():
    report = []
    docs = library_corpus(ROOT / "email", report=report)
    total = sum(len(docstrings(d.text)) for d in docs if d.meta["kind"] == "code")
    kept = sum(d.meta["kind"] == "docstring" for d in docs)
    assert total == kept + sum(r["count"] for r in report if r["problem"].startswith("docstring")) > 300


def test_the_same_in_another_process_with_another_hash_seed():
    code = f"""from llmlab.data.sources import *; from llmlab.data.document import corpus_hash
docs = stdlib_corpus(("topic",)) + library_corpus({str(ROOT / "json")!r})
print(corpus_hash(docs), docs[0].id, docs[-1].id)"""
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7"}
    ).stdout.split()
    docs = stdlib_corpus(("topic",)) + library_corpus(ROOT / "json")
    assert out == [corpus_hash(docs), docs[0].id, docs[-1].id]


def test_kinds_are_checked():
    assert {d.meta["kind"] for d in stdlib_corpus(("licence", "topic"))} == {"licence", "topic"}
    for bad in ((), "code", ("code", "poems")):
        with pytest.raises(ValueError, match="kinds="):
            stdlib_corpus(bad)


def test_a_python_without_sources_is_a_clear_error(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ValueError, match="no library sources"):
        stdlib_corpus(("code", "docstring", "licence"), report=[])


def test_docstrings_equal_to_a_walk_over_the_whole_tree(parity):
    differ = compared = 0
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in library_files(ROOT)[::15]:
        source = (ROOT / path).read_bytes()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reference = [ast.get_docstring(n) for n in ast.walk(ast.parse(source)) if isinstance(n, kinds)]
        ours = [text for _, text in docstrings(source.decode("utf-8", "replace"))]
        differ += sorted(filter(None, reference)) != sorted(ours)
        compared += len(ours)
    assert compared > 200
    parity(
        "docstrings found in statements only", "data.sources", "ast.walk", sys.version.split()[0], differ, 0
    )


def test_docstrings_in_every_block():
    source = """
if a:
    def f():
        "in if"
else:
    class B:
        "in else"
        async def g(self):
            "a method"
            def h(): "inner"
try: pass
except E as name:
    def i(): "in except"
finally:
    def j(): "in finally"
match x:
    case 1:
        def k(): "in case"
with a as b:
    for c in d:
        def l(): "in for"
"""
    assert docstrings(source) == [
        ("f", "in if"),
        ("B", "in else"),
        ("B.g", "a method"),
        ("B.g.h", "inner"),
        ("i", "in except"),
        ("j", "in finally"),
        ("k", "in case"),
        ("l", "in for"),
    ]
    assert docstrings('"""The module."""\nx = "no docstring"') == [("", "The module.")]


def test_files_that_cannot_be_read_are_listed_and_do_not_cost_the_rest(tmp_path):
    (tmp_path / "pkg" / "tests").mkdir(parents=True)
    (tmp_path / "pkg" / "tests" / "t.py").write_text("x = 1")
    (tmp_path / "pkg" / "__init__.py").write_text('"""A package that is documented."""\n')
    (tmp_path / "pkg" / "old.py").write_text("print 'two'\n")
    (tmp_path / "pkg" / "bytes.py").write_bytes(b"x = '\xff'\n")
    (tmp_path / "pkg" / "latin.py").write_bytes(
        '# coding: latin-1\n"""Grüße aus Köln am Rhein."""\n'.encode("latin-1")
    )
    (tmp_path / "pkg" / "marked.py").write_bytes(
        b'\xef\xbb\xbf"""A byte-order mark before it."""\r\nx = 1\r\n'
    )
    (tmp_path / "pkg" / "deep.py").write_text("x = " + "(" * 3000 + ")" * 3000)
    (tmp_path / "pkg" / "blank.py").write_text("\n\n")
    report, collecting = [], gc.isenabled()
    docs = {d.id: d for d in library_corpus(tmp_path, report=report)}
    assert gc.isenabled() == collecting
    assert docs["docstring/pkg.latin:"].text == "Grüße aus Köln am Rhein."
    assert docs["code/pkg.marked"].text == '"""A byte-order mark before it."""\nx = 1\n'
    assert docs["docstring/pkg:"].meta == {
        "kind": "docstring",
        "module": "pkg",
        "path": "pkg/__init__.py",
        "format": "text",
    }
    assert {r["file"] for r in report if r["file"]} == {"pkg/old.py", "pkg/bytes.py", "pkg/deep.py"}
    assert {"file": "", "problem": "blank file", "count": 1} in report
    with pytest.warns(UserWarning, match="3 files left out"):
        library_corpus(tmp_path)


def test_repeated_docstrings_and_names(tmp_path):
    text = "A docstring of some length."
    (tmp_path / "b.py").write_text(f'def f():\n    "{text}"\n')
    (tmp_path / "a.py").write_text(
        f'def f():\n    "{text}"\ndef f():\n    "Another docstring of f."\ndef g():\n    "short"\n'
    )
    report = []
    docs = library_corpus(tmp_path, ("docstring",), report=report)
    assert [(d.id, d.text) for d in docs] == [
        ("docstring/a:f", text),
        ("docstring/a:f#2", "Another docstring of f."),
    ]
    assert {r["problem"]: r["count"] for r in report} == {
        "docstring seen before": 1,
        f"docstring under {SHORT} characters": 1,
    }


def test_files_are_in_the_order_of_their_modules():
    names = [module_name(p) for p in library_files(ROOT)]
    assert names == sorted(names) and len(set(names)) == len(names)


def test_module_names():
    names = {
        "a.py": "a",
        "a/b.py": "a.b",
        "a/__init__.py": "a",
        "a/__main__.py": "a.__main__",
        "__init__.py": "__init__",
    }
    assert {k: module_name(Path(k)) for k in names} == names


def test_progress_bar(tmp_path, capsys):
    (tmp_path / "a.py").write_text("x = 1")
    library_corpus(tmp_path, progress=True, name="demo")
    assert "demo" in capsys.readouterr().err


def test_from_files_and_folders(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("text")
    (tmp_path / "sub" / "a.html").write_text("<p>page")
    (tmp_path / "sub" / "c.jsonl").write_text('{"id":"r","text":"record","lang":"en","path":"kept"}\n"two"\n')
    (tmp_path / "d.md.gz").write_bytes(gzip.compress(b"packed"))
    (tmp_path / "e.txt").write_text(" \n")
    (tmp_path / "photo.png").write_bytes(b"\x89PNG")
    report = []
    docs = from_files(tmp_path, report=report)
    assert [d.id for d in docs] == ["b.txt", "d.md", "sub/a.html", "sub/c.jsonl:r", "sub/c.jsonl:c.jsonl:2"]
    assert [d.meta["format"] for d in docs] == ["text", "text", "html", "text", "text"] and docs[
        2
    ].text == "<p>page"
    assert (
        docs[3].meta["lang"] == "en"
        and docs[3].meta["path"] == "kept"
        and docs[3].meta["module"] == "sub/c.jsonl"
    )
    assert {(Path(r["file"]).name, r["problem"].split(":")[0]) for r in report} == {
        ("photo.png", "no reader for this kind of file"),
        ("e.txt", "blank"),
    }
    again = from_files([tmp_path / "sub", tmp_path / "b.txt", str(tmp_path / "sub" / "a.html")])
    assert [d.id for d in again] == ["sub/a.html", "sub/c.jsonl:r", "sub/c.jsonl:c.jsonl:2", "b.txt"], (
        "a file named twice is read once"
    )
    assert from_files(tmp_path / "b.txt") == [
        Document("text", "b.txt", {"kind": "file", "module": "b.txt", "path": "b.txt", "format": "text"})
    ]


def test_from_files_names_everything_that_is_wrong(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"")
    with pytest.raises(
        ValueError, match=r"missing \['.*no1.txt', '.*no2'\], of an unknown kind \['.*x.bin'\]"
    ):
        from_files([tmp_path / "no1.txt", tmp_path / "no2", tmp_path / "x.bin"])
    with pytest.raises(ValueError, match="cannot read"):
        from_files([])


@pytest.mark.parametrize("body", ["", " \n\t\n"])
def test_empty_input_is_an_error_that_says_so(tmp_path, body):
    (tmp_path / "x.txt").write_text(body)
    for paths in (tmp_path, tmp_path / "x.txt"):
        with pytest.raises(ValueError, match="the data is empty"):
            from_files(paths)


def test_samples(root):
    docs = from_files(root / "data_samples")
    assert len({d.id for d in docs}) == len(docs) >= 18
