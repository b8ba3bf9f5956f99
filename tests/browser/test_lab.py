"""JupyterLab in a real browser: `make lab` opens the tour and its cells run; the explorer draws what is typed."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def lab(root, tmp_path_factory):
    "A server on a copy of the notebooks, with everything that Jupyter writes in the temporary folder."
    home = tmp_path_factory.mktemp("lab")
    shutil.copytree(root / "nbs", home / "nbs", ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    env = os.environ | {f"JUPYTER_{k}_DIR": str(home / k) for k in ("CONFIG", "DATA", "RUNTIME")} | {"IPYTHONDIR": str(home / "ipython")}
    words = [
        "-m",
        "jupyter",
        "lab",
        "--no-browser",
        "--ServerApp.port=0",
        "--IdentityProvider.token=",
        "--ServerApp.password=",
        f"--notebook-dir={home / 'nbs'}",
        *(["--allow-root"] if os.geteuid() == 0 else []),
    ]
    server = subprocess.Popen([sys.executable, *words], env=env, cwd=home, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 60
        while not (found := list((home / "RUNTIME").glob("jpserver-*.json"))):
            assert server.poll() is None and time.monotonic() < end, "JupyterLab did not start"
            time.sleep(0.2)
        url = json.loads(found[0].read_text())["url"]
        while True:
            try:
                urllib.request.urlopen(url + "api/status", timeout=5)
                break
            except OSError:
                assert time.monotonic() < end
                time.sleep(0.2)
        yield url, home / "nbs"
    finally:
        server.terminate()
        server.wait(30)


@pytest.fixture
def page(lab, tmp_path):
    "A new browser."
    from playwright.sync_api import sync_playwright

    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    with sync_playwright() as p:
        browser = p.chromium.launch_persistent_context(
            tmp_path / "profile", executable_path=CHROMIUM, args=FLAGS, viewport={"width": 1200, "height": 1600}
        )
        yield browser.new_page()
        browser.close()


def run_all(page, url, name, seconds):
    "Open a notebook, clear what was saved, run every cell, and wait for the last one."
    page.goto(f"{url}lab/tree/{name}?reset")
    page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=60_000)
    page.wait_for_selector("[data-status='idle'], .jp-Notebook-ExecutionIndicator[data-status='idle']", timeout=60_000)
    choose(page, "Edit", "Clear Outputs of All Cells")
    choose(page, "Run", "Run All Cells")
    if not wait_idle(page, time.monotonic() + seconds):
        raise AssertionError(f"{name} was not done after {seconds} s")


def choose(page, menu, entry):
    "An entry of JupyterLab's menus; what is open already is closed first."
    page.keyboard.press("Escape")
    page.get_by_role("menuitem", name=menu, exact=True).first.click()
    page.get_by_text(entry, exact=True).click()


def wait_idle(page, end):
    "Wait until the kernel is idle and no cell waits for it."
    while time.monotonic() < end:
        page.wait_for_timeout(1000)
        status = page.locator(".jp-Notebook-ExecutionIndicator").first.get_attribute("data-status")
        if status == "idle" and not re.search(r"\[\*\]", page.locator(".jp-NotebookPanel").first.inner_text()):
            return True
    return False


def saved(page, path):
    "The notebook's outputs as JupyterLab saves them."
    before = path.stat().st_mtime_ns
    page.keyboard.press("Control+s")
    end = time.monotonic() + 20
    while path.stat().st_mtime_ns == before and time.monotonic() < end:
        page.wait_for_timeout(200)
    page.wait_for_timeout(500)
    return [c for c in json.loads(Path(path).read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code"]


def executed(page, path, seconds):
    "The saved cells once every one of them has run; on a busy machine a kernel that has just started may drop the first request."
    end = time.monotonic() + seconds
    while not all(c["execution_count"] for c in saved(page, path)) and time.monotonic() < end:
        choose(page, "Run", "Run All Cells")
        wait_idle(page, end)
    return saved(page, path)


def test_the_tour_runs_in_the_browser(lab, page):
    url, folder = lab
    run_all(page, url, "tour.ipynb", 240)
    cells = executed(page, folder / "tour.ipynb", 240)
    outputs = [o for c in cells for o in c["outputs"]]
    assert all(c["execution_count"] for c in cells) and not [o for o in outputs if o["output_type"] == "error"]
    assert any("image/png" in o.get("data", {}) for o in outputs)


def test_the_explorer_draws_what_is_typed(lab, page):
    url, folder = lab
    run_all(page, url, "tokenizer/08_explorer.ipynb", 240)
    executed(page, folder / "tokenizer" / "08_explorer.ipynb", 240)
    field = page.locator(".jp-OutputArea .widget-textarea textarea").first
    field.scroll_into_view_if_needed()
    for text, drawn in (("<i>zebra</i> quilt", "<i>zebra</i>·quilt"), ("12 é", "12·c3a9")):
        field.fill(text)
        end = time.monotonic() + 30
        while time.monotonic() < end:
            views = ["".join(v.locator("div[dir=ltr] span").all_inner_texts()) for v in page.locator(".widget-html").all()]
            if views == [drawn, drawn]:
                break
            page.wait_for_timeout(300)
        assert views == [drawn, drawn]
