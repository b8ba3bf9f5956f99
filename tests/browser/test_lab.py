"""JupyterLab in a real browser: `make lab` opens the tour and its cells run; the explorer draws what is typed."""

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request

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
        "--LabApp.expose_app_in_browser=True",
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


def within(page, promise, seconds=240):
    "Wait for a promise; one that a dialog keeps open is an error that shows the dialog."
    late = f"new Promise(done => setTimeout(() => done('late'), {1000 * seconds}))"
    said = page.evaluate(f"() => Promise.race([{promise}.then(() => 'done'), {late}])")
    assert said == "done", f"{promise} is not done after {seconds} s; dialogs: {page.locator('dialog').all_inner_texts()}"


def run_all(page, url, path, name):
    "Open a notebook, clear what was saved, run every cell; the cells as JupyterLab saves them."
    page.set_default_timeout(240_000)
    page.goto(f"{url}lab/tree/{name}?reset")
    page.wait_for_selector(".jp-Notebook .jp-CodeCell")
    within(page, "jupyterapp.restored.then(() => jupyterapp.shell.currentWidget.sessionContext.ready)")
    page.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status='idle']")
    for command in ("notebook:clear-all-cell-outputs", "notebook:run-all-cells", "docmanager:save"):
        within(page, f"jupyterapp.commands.execute('{command}')")
    cells = [c for c in json.loads((path / name).read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code"]
    failed = ["".join(o["traceback"]) for c in cells for o in c["outputs"] if o["output_type"] == "error"]
    assert not failed and all(c["execution_count"] for c in cells), failed
    return cells


def test_the_tour_runs_in_the_browser(lab, page):
    url, folder = lab
    cells = run_all(page, url, folder, "tour.ipynb")
    assert any("image/png" in o.get("data", {}) for c in cells for o in c["outputs"])


def test_the_explorer_draws_what_is_typed(lab, page):
    url, folder = lab
    run_all(page, url, folder, "tokenizer/08_explorer.ipynb")
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
