"""What the house tests look for, each rule a function that returns complaints as `file:line: what is wrong`."""

import ast
import importlib.util
import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
_spec = importlib.util.spec_from_file_location("docs_build", ROOT / "docs" / "build.py")
build = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(build)

MAX_KB, MAX_ALL_MB, MAX_TEXT_LINES = 250, 10, 40


def notebooks(folder):
    return sorted(p for p in folder.rglob("*.ipynb") if not any(part.startswith((".", "_")) for part in p.relative_to(folder).parts))


def text(cell):
    source = cell.get("source", "")
    return source if isinstance(source, str) else "".join(source)


def broken_notebooks(folder):
    "Conflict marks, invalid JSON, and pages that do not name their kernel (JupyterLab would ask for one before it opens them)."
    out = []
    for path in notebooks(folder):
        raw = path.read_text(encoding="utf-8", errors="replace")
        marks = [i for i, line in enumerate(raw.splitlines(), 1) if re.match(r'\s*"?(<{7} |={7}(\\n"?,?)?$|>{7} )', line)]
        out += [f"{path}:{i}: conflict mark; merge the notebook (make hooks), or git checkout one side" for i in marks]
        try:
            if json.loads(raw)["metadata"].get("kernelspec", {}).get("name") != "python3":
                out.append(f"{path}: its metadata name no kernel python3; give it the kernelspec of another page")
        except json.JSONDecodeError as e:
            if not marks:
                out.append(f"{path}:{e.lineno}: not valid JSON ({e.msg})")
    return out


def page_order():
    "(chapter, page) -> place; the chapters from the table in nbs/index.ipynb, the pages by their numbers."
    order = {}
    for chapter in build.chapters():
        for page in build.pages(chapter):
            order[chapter, page.stem.partition("_")[2]] = len(order)
    return order


def imported(tree, module):
    "llmlab modules that a module imports, as (chapter, page or None, line)."
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        if isinstance(node, ast.ImportFrom):
            base = module[: len(module) - node.level] if node.level else []
            stem = ".".join([*base, *((node.module or "").split(".") if node.module else [])])
            names = [f"{stem}.{a.name}" for a in node.names] + [stem]
        for name in names:
            parts = name.split(".")
            if parts[0] == "llmlab" and len(parts) > 1:
                yield parts[1], parts[2] if len(parts) > 2 else None, node.lineno


def wrong_imports(package):
    "Imports against the order of chapters and pages."
    order, out = page_order(), []
    chapters = build.chapters()
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        if len(parts) != 2 or parts[1] == "__init__":
            continue
        me = tuple(parts)
        if me not in order:
            continue
        for chapter, page, line in imported(ast.parse(path.read_text(encoding="utf-8")), ["llmlab", *parts]):
            later = chapters.index(chapter) > chapters.index(me[0]) or order.get((chapter, page), -1) >= order[me]
            outside = me[0] == "model" and chapter not in ("core", "model")
            if later:
                out.append(f"{path}:{line}: {'.'.join(me)} imports {chapter}.{page}, which comes later in the book")
            if outside:
                out.append(f"{path}:{line}: model imports only core, this imports {chapter}")
    return sorted(set(out))


def exported_modules(folder):
    "module path -> notebook that exports it."
    out = {}
    for path in notebooks(folder):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            found = re.search(r"^#\|\s*default_exp\s+([\w.]+)", text(cell), re.M)
            if found:
                out[found[1]] = path
    return out


def orphan_modules(package, folder):
    "Generated modules whose notebook is gone."
    have = exported_modules(folder)
    return [
        f"{p}:1: no notebook exports this module; delete it, or bring the notebook back"
        for p in sorted(package.rglob("*.py"))
        if p.name not in ("__init__.py", "_modidx.py", "__main__.py") and ".".join(p.relative_to(package).with_suffix("").parts) not in have
    ]


def dead_links(pages):
    "Relative links that lead nowhere, in notebooks and Markdown files."
    out = []
    for path in pages:
        raw = path.read_text(encoding="utf-8")
        prose = "\n".join(text(c) for c in json.loads(raw)["cells"] if c["cell_type"] == "markdown") if path.suffix == ".ipynb" else raw
        prose = re.sub(r"```.*?```|`[^`\n]*`", "", prose, flags=re.S)
        for target in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", prose):
            if re.match(r"[a-z]+:|#", target):
                continue
            if not (path.parent / target.split("#")[0]).exists():
                out.append(f"{path}:1: the link to {target} leads nowhere")
    return out


def poor_outputs(folder):
    "Notebooks without saved outputs, with errors, or too large."
    out = []
    for path in notebooks(folder):
        code = [c for c in json.loads(path.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code"]
        outputs = [o for c in code for o in c.get("outputs", [])]
        if code and not outputs:
            out.append(f"{path}:1: no saved output; make pages PAGES={path.relative_to(folder.parent)}")
        if any(o.get("output_type") == "error" for o in outputs):
            out.append(f"{path}:1: an error is saved in its outputs")
        if any(o.get("name") == "stderr" for o in outputs):
            out.append(f"{path}:1: stderr noise is saved in its outputs")
        if path.stat().st_size > MAX_KB * 1024:
            out.append(f"{path}:1: {path.stat().st_size // 1024} KB, at most {MAX_KB}")
        for o in outputs:
            shown = o.get("text", "") if o["output_type"] == "stream" else o.get("data", {}).get("text/plain", "")
            lines = len(shown if isinstance(shown, list) else shown.splitlines())
            if lines > MAX_TEXT_LINES:
                out.append(f"{path}:1: an output of {lines} lines, at most {MAX_TEXT_LINES}")
    total = sum(p.stat().st_size for p in notebooks(folder))
    if total > MAX_ALL_MB * 2**20:
        out.append(f"{folder}:1: all notebooks are {total >> 20} MB, at most {MAX_ALL_MB}")
    return out


def thin_pages(folder):
    "Pages that export something but lack a proof, a picture, an exercise, or an onward link."
    out = []
    for path in notebooks(folder):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        code = [c for c in cells if c["cell_type"] == "code"]
        if not any(re.search(r"^#\|\s*export", text(c), re.M) for c in code):
            continue
        prose = "\n".join(text(c) for c in cells if c["cell_type"] == "markdown").lower()
        outputs = [o for c in code for o in c.get("outputs", [])]
        lacks = [] if any("image/png" in o.get("data", {}) or "image/svg+xml" in o.get("data", {}) for o in outputs) else ["a picture"]
        if not any(re.search(r"\bassert|expect_fail", text(c)) for c in code):
            lacks.append("an assertion")
        if not re.search(r"^#+ .*try it", prose, re.M):
            lacks.append("a Try it")
        if not re.search(r"^#+ .*next", prose, re.M):
            lacks.append("a Next")
        if lacks:
            out.append(f"{path}:1: lacks {', '.join(lacks)}")
    return out


FOREIGN = {
    "a registry's address": r"(?i)((index-url|find-links|registry)\W+https?://|https?://\S+/(simple|whl)\b)",
    "a path of one machine": r"(/work/main|/work/shared|/root/\.pyenv|\.library/)",
}


def foreign_words(files):
    "Addresses of package registries and paths of one machine."
    return [
        f"{path}:{i}: {what}: {found[0]}"
        for path in files
        for i, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        for what, pattern in FOREIGN.items()
        if (found := re.search(pattern, line))
    ]
