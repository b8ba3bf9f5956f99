"""The house rules, each also shown to fail on a planted fault."""

import configparser
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import rules

import llmlab

ROOT = rules.ROOT
BIN = Path(sys.executable).parent
SOURCES = [
    p
    for p in ROOT.rglob("*")
    if p.is_file()
    and p.suffix in (".py", ".md", ".toml", ".ini", ".txt", ".ipynb", ".cff", ".json", "")
    and not any(
        part.startswith(".") and part != ".ci" or part in ("runs", "_docs", "build", "dist", "__pycache__") or part.endswith(".egg-info")
        for part in p.relative_to(ROOT).parts
    )
]


def settings():
    config = configparser.ConfigParser(delimiters=["="])
    config.read(ROOT / "settings.ini", encoding="utf-8")
    return config["DEFAULT"]


def page(path, *cells, **metadata):
    path.parent.mkdir(parents=True, exist_ok=True)
    made = [
        {"cell_type": kind, "source": source, "metadata": {}, "id": f"c{i}"}
        | ({"outputs": [], "execution_count": None} if kind == "code" else {})
        for i, (kind, source) in enumerate(cells)
    ]
    path.write_text(json.dumps({"cells": made, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}), encoding="utf-8")
    return path


def test_metadata_agrees():
    meta, project = settings(), tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["name"] == meta["name"] == project["tool"]["nbdev"]["lib_path"]
    assert project["project"]["requires-python"] == f">={meta['min_python']}"
    assert {"version", "dependencies", "optional-dependencies", "scripts"} <= set(project["project"]["dynamic"])
    assert llmlab.__version__ == meta["version"]
    assert f"version: {meta['version']}" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"## {meta['version']}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_every_requirement_is_pinned():
    pins = {
        re.split("==", line)[0].lower().replace("_", "-") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    }
    wanted = [line.strip() for key in ("requirements", "dev_requirements") for line in settings()[key].splitlines() if line.strip()]
    names = {re.split(r"[<>=!\[ ]", line)[0].lower().replace("_", "-") for line in wanted}
    assert names <= pins, f"not in constraints.txt: {sorted(names - pins)}"


def test_notebooks_are_readable():
    assert not rules.broken_notebooks(ROOT / "nbs")


def test_imports_follow_the_order():
    assert not rules.wrong_imports(ROOT / "llmlab")


def test_no_module_without_notebook():
    assert not rules.orphan_modules(ROOT / "llmlab", ROOT / "nbs")


def test_links_lead_somewhere():
    assert not rules.dead_links(rules.notebooks(ROOT / "nbs") + sorted(ROOT.glob("*.md")))


def test_outputs_are_saved():
    assert not rules.poor_outputs(ROOT / "nbs")


def test_pages_are_whole():
    assert not rules.thin_pages(ROOT / "nbs")


def test_no_foreign_words():
    assert not rules.foreign_words([p for p in SOURCES if p != Path(rules.__file__).resolve()])


def test_every_page_stands_in_the_map():
    listed = set(re.findall(r"\]\((\w+/\d\d_\w+\.ipynb)\)", rules.build.index_markdown()))
    there = {str(p.relative_to(ROOT / "nbs")) for c in rules.build.chapters() for p in rules.build.pages(c)}
    assert listed >= there and len(there) >= 25, f"not in the map: {sorted(there - listed)}"


def test_readme_is_the_index():
    assert (ROOT / "README.md").read_text(encoding="utf-8") == rules.build.readme(), "make pages, or python docs/build.py --readme"


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    "The notebooks and the package somewhere else, exported and cleaned once more."
    top = tmp_path_factory.mktemp("copy")
    for name in ("nbs", "llmlab"):
        shutil.copytree(ROOT / name, top / name, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints"))
    for name in ("pyproject.toml", "settings.ini"):
        shutil.copy(ROOT / name, top)
    for command in ("nbdev-export", "nbdev-clean"):
        subprocess.run([BIN / command], cwd=top, check=True, capture_output=True)
    return top


def same_files(a, b, pattern):
    names = {p.relative_to(a) for p in a.rglob(pattern)} | {p.relative_to(b) for p in b.rglob(pattern)}
    names = [n for n in names if ".ipynb_checkpoints" not in n.parts]
    return [str(n) for n in sorted(names) if not (a / n).exists() or not (b / n).exists() or (a / n).read_bytes() != (b / n).read_bytes()]


def test_export_leaves_no_difference(copy):
    assert not same_files(ROOT / "llmlab", copy / "llmlab", "*.py"), "run nbdev-export"


def test_notebooks_are_clean(copy):
    assert not same_files(ROOT / "nbs", copy / "nbs", "*.ipynb"), "run nbdev-clean"


def test_cleaning_twice_is_cleaning_once(tmp_path):
    for name in ("pyproject.toml", "settings.ini"):
        shutil.copy(ROOT / name, tmp_path)
    dirty = page(tmp_path / "nbs" / "core" / "01_x.ipynb", ("code", "1 + 1"), zeta=1, alpha={"b": 1, "a": 2})
    seen = []
    for _ in range(2):
        subprocess.run([BIN / "nbdev-clean"], cwd=tmp_path, check=True, capture_output=True)
        seen.append(dirty.read_bytes())
    assert seen[0] == seen[1] and b"zeta" not in seen[0]


MARKS = ["<<<<<<< ours\n", "=======\n", ">>>>>>> theirs\n"]


@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize("where", ['"source"', '"outputs"', '"metadata"'])
def test_conflict_marks_are_named(tmp_path, mark, where):
    path = page(tmp_path / "nbs" / "a.ipynb", ("code", "1"))
    lines = json.dumps(json.loads(path.read_text()), indent=1).splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if where in line)
    lines.insert(at, mark)
    path.write_text("".join(lines))
    assert any(c.startswith(f"{path}:{at + 1}: conflict mark") for c in rules.broken_notebooks(tmp_path / "nbs"))


def test_a_page_without_a_kernel_is_named(tmp_path):
    named = {"kernelspec": {"display_name": "python3", "language": "python", "name": "python3"}}
    page(tmp_path / "nbs" / "a.ipynb", ("code", "1"), **named)
    bad = page(tmp_path / "nbs" / "b.ipynb", ("code", "1"), jupytext={"main_language": "python"})
    assert [c.partition(":")[0] for c in rules.broken_notebooks(tmp_path / "nbs")] == [str(bad)]


def test_a_broken_notebook_is_named_and_left_alone(tmp_path):
    for name in ("pyproject.toml", "settings.ini"):
        shutil.copy(ROOT / name, tmp_path)
    path = page(tmp_path / "nbs" / "a.ipynb", ("code", "1"))
    path.write_text(path.read_text()[:-20] + "\n")
    before = path.read_bytes()
    assert re.match(rf"{re.escape(str(path))}:\d+: not valid JSON", rules.broken_notebooks(tmp_path / "nbs")[0])
    for command in ("nbdev-clean", "nbdev-export"):
        subprocess.run([BIN / command], cwd=tmp_path, capture_output=True)
    assert path.read_bytes() == before


def test_the_rules_can_fail(tmp_path):
    package = tmp_path / "llmlab"
    (package / "core").mkdir(parents=True)
    (package / "core" / "util.py").write_text("from ..train.trainer import Trainer\nfrom llmlab.core import viz\n")
    (package / "core" / "stray.py").write_text("")
    wrong = rules.wrong_imports(package)
    assert len(wrong) == 2 and "util.py:1" in wrong[0] and "train.trainer" in wrong[0] and "core.viz" in wrong[1]
    assert "stray.py" in rules.orphan_modules(package, ROOT / "nbs")[0]
    (package / "model").mkdir()
    (package / "model" / "mask.py").write_text("import llmlab.data.document\n")
    assert any("model imports only core" in c for c in rules.wrong_imports(package))
    nb = page(tmp_path / "nbs" / "p.ipynb", ("markdown", "[x](nowhere.ipynb) `[y](z.ipynb)`"), ("code", "#| export\nx = 1"))
    assert len(rules.dead_links([nb])) == 1 and "nowhere" in rules.dead_links([nb])[0]
    assert "no saved output" in rules.poor_outputs(tmp_path / "nbs")[0]
    assert "a picture, an assertion, a Try it, a Next" in rules.thin_pages(tmp_path / "nbs")[0]
    note = tmp_path / "note.md"
    note.write_text("pip install --index-" + "url https://example.org/x")
    assert "registry" in rules.foreign_words([note])[0]


def test_a_skip_needs_a_committed_reason(tmp_path):
    tests = tmp_path / "tests"
    tests.mkdir()
    shutil.copy(ROOT / "tests" / "conftest.py", tests)
    (tests / "test_x.py").write_text("import pytest\ndef test_a(): pytest.skip('no reason')\ndef test_b(): pass\n")
    for allowed, status in (([], 1), ([{"tests": "tests/", "reason": "no reason"}], 0)):
        (tests / "allowed_skips.json").write_text(json.dumps(allowed))
        done = subprocess.run([sys.executable, "-m", "pytest", "tests"], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == status, done.stdout


PROBE = """
import importlib, os, socket, sys, threading
def refuse(*a, **k): raise OSError('network used at import')
socket.socket.connect = refuse
socket.getaddrinfo = refuse
before = dict(os.environ)
importlib.import_module(sys.argv[1])
import torch, matplotlib
assert threading.active_count() == 1, threading.enumerate()
assert not torch.cuda.is_initialized()
assert dict(os.environ) == before, 'environment changed'
print(sys.modules[sys.argv[1]].__file__)
"""


def modules():
    return sorted("llmlab." + ".".join(p.relative_to(ROOT / "llmlab").with_suffix("").parts) for p in (ROOT / "llmlab").rglob("[a-z]*.py"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    "The wheel, built from the tree and installed alone in an environment outside the repository."
    top = tmp_path_factory.mktemp("wheel")
    source = top / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "runs", "_docs", "build", "dist", "__pycache__", "*.egg-info"))
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", top / "dist", source], check=True, capture_output=True
    )
    subprocess.run([sys.executable, "-m", "venv", top / "env"], check=True)
    return top, next((top / "dist").glob("*.whl"))


def check_imports(python, top):
    "Each module in a process of its own; two at a time."
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"HOME": str(top), "MPLCONFIGDIR": str(top / "mpl")}
    names = modules()
    for pair in zip(names[::2], names[1::2] + [names[-1]], strict=False):
        running = [
            (n, subprocess.Popen([python, "-c", PROBE, n], cwd=top, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
            for n in pair
        ]
        for name, process in running:
            out, err = process.communicate(timeout=120)
            assert process.returncode == 0, f"{name}: {err[-2000:]}"
            assert str(top / "env") in out, f"{name} came from {out}"


def test_wheel_imports_alone(wheel):
    "Requirements are borrowed from the tests' environment; `test_wheel_in_an_empty_environment` installs them."
    top, file = wheel
    python = top / "env" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--no-deps", "--no-index", "-q", file], check=True)
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"], capture_output=True, text=True, check=True
    ).stdout.strip()
    here = subprocess.run(
        [sys.executable, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"], capture_output=True, text=True, check=True
    )
    Path(site, "borrowed.pth").write_text(f"import sys; sys.path.append({here.stdout.strip()!r})\n")
    assert len(modules()) >= 25
    check_imports(python, top)


@pytest.mark.slow
def test_wheel_in_an_empty_environment(wheel, tmp_path):
    top, file = wheel
    subprocess.run([sys.executable, "-m", "venv", "--clear", top / "env"], check=True)
    python = top / "env" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", file], check=True)
    check_imports(python, top)
    done = subprocess.run([top / "env" / "bin" / "llmlab", "recipes"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "pydoc" in done.stdout


def test_make_names_what_is_missing(tmp_path):
    old = tmp_path / "python-old"
    old.write_text('#!/bin/sh\ncase "$*" in *version_info*) exit 1;; -V) echo Python 3.8.1;; esac\n')
    bare = tmp_path / "python-bare"
    bare.write_text('#!/bin/sh\ncase "$*" in *ensurepip*) exit 1;; esac\n')
    for script in (old, bare):
        script.chmod(0o755)
    cases = {str(old): "is Python 3.8.1", str(bare): "no venv module", str(tmp_path / "none"): "was not found"}
    for python, said in cases.items():
        done = subprocess.run(
            ["make", "-s", "run", f"PYTHON={python}", f"VENV={tmp_path / 'venv'}"], cwd=ROOT, capture_output=True, text=True
        )
        lines = [line for line in done.stdout.splitlines() if "make PYTHON" in line or "apt-get" in line]
        assert done.returncode and len(lines) == 1 and said in lines[0], done.stdout + done.stderr
    assert not (tmp_path / "venv").exists()
