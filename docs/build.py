"""Build the site from the notebooks (jupyter-book), and README.md from nbs/index.ipynb (nbconvert).

python docs/build.py                 -> _docs/html          python docs/build.py --readme        -> README.md
python docs/build.py --requirements  prints what the site builder's environment needs
"""

import json
import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NBS = ROOT / "nbs"


def metadata():
    config = ConfigParser(delimiters=["="])
    config.read(ROOT / "settings.ini", encoding="utf-8")
    return config["DEFAULT"]


def index_markdown():
    notebook = json.loads((NBS / "index.ipynb").read_text(encoding="utf-8"))
    return "\n\n".join("".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "markdown")


def chapters():
    "The chapters in order, from the one table in nbs/index.ipynb: rows that begin with a chapter's name in backticks."
    return re.findall(r"^\| `(\w+)` \|", index_markdown(), re.M)


def pages(chapter):
    return sorted(p for p in (NBS / chapter).glob("*.ipynb") if not p.name.startswith((".", "_")))


def readme():
    "README.md: the index page as Markdown, its links seen from the top folder, its code replaced by what it shows."
    import nbformat
    from nbconvert import MarkdownExporter

    notebook = nbformat.read(NBS / "index.ipynb", 4)
    shown = lambda c: "".join(o["data"].get("text/markdown", "") for o in c.outputs if "data" in o)
    notebook.cells = [nbformat.v4.new_markdown_cell(shown(c)) if c.cell_type == "code" else c for c in notebook.cells]
    text, _ = MarkdownExporter().from_notebook_node(notebook)
    text = re.sub(r"\]\((?!https?:|#|\.\./)([^)]+)\)", r"](nbs/\1)", text).replace("](../", "](")
    return "<!-- Made from nbs/index.ipynb by `make pages`. -->\n\n" + text.strip() + "\n"


def without_outside_links(text):
    "Links that leave nbs/ have no page in the site: their words alone."
    return re.sub(r"\[([^\]\n]+)\]\((?:\.\./)+(?!\w+/\d\d_)(?!\w+\.ipynb)[^)\s]+\)", r"`\1`", text)


def site():
    build = ROOT / "_docs"
    source = build / "source"
    shutil.rmtree(build, ignore_errors=True)
    shutil.copytree(NBS, source, ignore=shutil.ignore_patterns(".*", "_*", "*.tmp"))
    for page in source.rglob("*.ipynb"):
        notebook = json.loads(page.read_text(encoding="utf-8"))
        for cell in notebook["cells"]:
            if cell["cell_type"] == "markdown":
                cell["source"] = without_outside_links("".join(cell["source"]))
            elif "".join(cell["source"]).startswith(("#| echo: false", "#| hide_input")):
                cell["metadata"]["tags"] = ["remove-input"]
            elif "".join(cell["source"]).startswith("#| hide"):
                cell["metadata"]["tags"] = ["hide-input"]
        page.write_text(json.dumps(notebook), encoding="utf-8")
    parts = [{"caption": c, "chapters": [{"file": f"{c}/{p.stem}"} for p in pages(c)]} for c in chapters() if pages(c)]
    parts.insert(0, {"caption": "start", "chapters": [{"file": "tour"}]})
    toc = {"format": "jb-book", "root": "index", "parts": parts}
    meta = metadata()
    config = {
        "title": meta["name"],
        "author": meta["author"],
        "logo": "",
        "only_build_toc_files": True,
        "execute": {"execute_notebooks": "off"},
        "html": {"use_repository_button": False},
    }
    (source / "_toc.yml").write_text(json.dumps(toc), encoding="utf-8")  # JSON is YAML
    (source / "_config.yml").write_text(json.dumps(config), encoding="utf-8")
    command = [Path(sys.executable).parent / "jupyter-book", "build", source, "--path-output", build / "work", "-W", "--keep-going"]
    result = subprocess.run(list(map(str, command)))
    if result.returncode:
        sys.exit(f"jupyter-book stopped with status {result.returncode}: the warnings above name page and line")
    shutil.move(build / "work" / "_build" / "html", build / "html")
    print(f"\nthe site: {build / 'html' / 'index.html'}")


if __name__ == "__main__":
    if "--requirements" in sys.argv:
        print(*metadata()["docs_requirements"].split())
    elif "--readme" in sys.argv:
        (ROOT / "README.md").write_text(readme(), encoding="utf-8")
    else:
        site()
