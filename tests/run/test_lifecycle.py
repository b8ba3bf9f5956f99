"""The whole life in small: accounts, equality of two runs, interruption at any moment, and what bad input gets."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from llmlab.run.lifecycle import STAGES, Report, Stage, lifecycle, open_model
from llmlab.run.recipe import get_recipe

TINY = {
    "precision": "fp32",
    "train.updates": 24,
    "train.checkpoint_every": 4,
}
KEPT = ["pretrain/model.safetensors", "tokenizer/tokenizer.json", "metrics.json", "samples/samples.json"]


def kept(folder):
    return {name: (folder / name).read_bytes() for name in KEPT}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    "One run without interruption."
    return lifecycle(get_recipe("smoke", TINY), tmp_path_factory.mktemp("whole"), progress=False)


def command(runs, *more, recipe="smoke", **settings):
    words = [f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in (TINY | settings).items()]
    return [
        sys.executable,
        "-m",
        "llmlab",
        "lifecycle",
        recipe,
        "--quiet",
        "--runs",
        str(runs),
        *more,
        *(x for w in words for x in ("--set", w)),
    ]


def live(runs, *more, **kw):
    return subprocess.run(command(runs, *more, **kw), capture_output=True, text=True, timeout=300)


def refused(done, *said):
    "Status 2 and one line on stderr that says all of `said`."
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 2 and len(lines) == 1, (done.returncode, done.stderr[-3000:])
    for words in said:
        assert words in lines[0], lines[0]


def test_the_life_is_accounted_for(whole):
    metrics = json.loads((whole.folder / "metrics.json").read_text())
    assert list(metrics["stages"]) == sorted(s.name for s in STAGES)
    for stage in metrics["stages"].values():
        assert stage["taken"] == stage["given"] + sum(stage["dropped"].values()) > 0
    found = metrics["stages"]["evaluate"]["metrics"]
    assert found["bits_per_byte"] < 0.9 * found["bits_per_byte_before"]
    assert {"fingerprint", "precision", "corpus_hash", "versions", "seed"} <= metrics.keys()
    with pytest.raises(ValueError, match="2 missing"):
        Report("documents", 5, 2, {"short": 1}, {})


def test_the_report_needs_no_other_file(whole):
    page = (whole.folder / "report.html").read_text()
    assert page.count("data:image/png;base64,") >= 2 and "bits per byte" in page and "def read_" in page
    assert not re.search(r'(src|href)="(?!data:)', page)


def test_held_out_modules_are_not_trained_on(whole):
    from llmlab.data.document import read_documents

    modules = [{d.meta["module"] for d in read_documents(whole.dir("dedup") / f"{name}.jsonl.gz")} for name in ("train", "held_out")]
    assert modules[0] and modules[1] and not modules[0] & modules[1]


def test_two_runs_are_equal(whole, tmp_path):
    assert live(tmp_path).returncode == 0
    assert kept(tmp_path / "smoke") == kept(whole.folder)


def test_done_stages_are_not_done_again(whole):
    before = {p: p.stat().st_mtime_ns for p in whole.folder.rglob("done.json")}
    lifecycle(whole.recipe, whole.folder.parent, progress=False)
    assert before == {p: p.stat().st_mtime_ns for p in whole.folder.rglob("done.json")} and len(before) == len(STAGES)


def test_a_longer_life_only_adds_a_stage(whole, tmp_path):
    runs = tmp_path / "runs"
    shutil.copytree(whole.folder, runs / "smoke")
    count = Stage(
        "count",
        lambda life: Report("models", 1, 1, {}, {"parameters": open_model(life.dir("pretrain")).num_parameters}),
        show=lambda life: {"Counted": "one model"},
    )
    life = lifecycle(whole.recipe, runs, progress=False, stages=(*STAGES, count))
    assert json.loads((life.folder / "metrics.json").read_text())["stages"]["count"]["metrics"]["parameters"] > 0
    assert "one model" in (life.folder / "report.html").read_text()


def killed_series(runs, whole, delays, how):
    "Start, stop after each delay, start again; the last time to the end."
    stops = 0
    for delay in delays:
        process = subprocess.Popen(command(runs), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            process.wait(delay)
        except subprocess.TimeoutExpired:
            process.send_signal(how)
            stops += 1
            process.wait(60)
    done = live(runs)
    assert done.returncode == 0, done.stderr[-2000:]
    assert kept(runs / "smoke") == kept(whole.folder)
    return stops


def wait_for(condition, process, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None and time.monotonic() < end, "the run ended before it could be interrupted"
        time.sleep(0.005)


POINTS = {  # what is there when the process is stopped
    "sources": lambda f: (f / "manifest.json").exists(),
    "dedup": lambda f: (f / "clean" / "done.json").exists(),
    "pretrain": lambda f: any((f / "pretrain" / "checkpoints").glob("step_*")),
    "samples": lambda f: (f / "evaluate" / "done.json").exists(),
}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["kill", "ctrl-c"])
def test_interrupted_at_each_point_it_continues(whole, tmp_path, how):
    "One run, stopped at every point in turn."
    for there in POINTS.values():
        process = subprocess.Popen(command(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        wait_for(lambda there=there: there(tmp_path / "smoke"), process)
        process.send_signal(how)
        _, said = process.communicate(timeout=60)
        if how == signal.SIGINT:
            assert process.returncode == 130 and "the same command continues" in said, said[-2000:]
    done = live(tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert kept(tmp_path / "smoke") == kept(whole.folder)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_killed_at_random_moments_it_continues(whole, tmp_path, seed):
    draw = random.Random(seed)
    assert killed_series(tmp_path, whole, [draw.uniform(3, 14) for _ in range(4)], signal.SIGKILL) >= 1


def test_another_recipe_is_refused_and_nothing_overwritten(whole):
    before = kept(whole.folder)
    refused(live(whole.folder.parent, **{"train.updates": 30}), "train.updates 24 -> 30", "--fresh", str(whole.folder))
    assert kept(whole.folder) == before


def test_truncated_files_are_named(whole, tmp_path):
    for name in ("pretrain/model.safetensors", "dedup/train.jsonl.gz", "tokenizer/tokenizer.json", "shards/train/manifest.json"):
        runs = tmp_path / name.replace("/", "_")
        shutil.copytree(whole.folder, runs / "smoke")
        file = runs / "smoke" / name
        file.write_bytes(file.read_bytes()[:-7])
        refused(live(runs), name, "--fresh")
    broken = runs / "smoke" / "manifest.json"
    broken.write_text(broken.read_text()[:50])
    refused(live(runs), "manifest.json", "not valid JSON")


def test_fresh_starts_anew_and_spares_other_folders(tmp_path):
    strange = tmp_path / "runs" / "smoke"
    strange.mkdir(parents=True)
    (strange / "thesis.txt").write_text("mine")
    for more in ((), ("--fresh",)):
        refused(live(tmp_path / "runs", *more), str(strange), "manifest")
        assert (strange / "thesis.txt").read_text() == "mine"


def test_two_processes_do_not_share_a_run(tmp_path):
    first = subprocess.Popen(command(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: POINTS["sources"](tmp_path / "smoke"), first)
        refused(live(tmp_path), "another process")
    finally:
        first.kill()
        first.wait()


@pytest.mark.parametrize(
    "content, said",
    [
        (b"", "empty"),
        (b" \n\n\t\n", "empty"),
        (b"a short text that is longer than sixty characters, but of one document only.\n", "document"),
    ],
    ids=["empty", "blank", "tiny"],
)
def test_too_little_text(tmp_path, content, said):
    text = tmp_path / "text.txt"
    text.write_bytes(content)
    refused(live(tmp_path / "runs", "--file", str(text)), said)


def test_less_than_one_batch(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(30):
        (texts / f"{i}.txt").write_text(f"Number {i}: " + " ".join(chr(97 + (i * k) % 26) * (1 + k % 5) for k in range(40)))
    refused(
        live(tmp_path / "runs", "--file", str(texts), **{"rows": 512, "tokenizer.vocab_size": 280, "model.vocab_size": 280}),
        "512",
        "rows",
    )


def test_missing_and_unreadable_files(tmp_path):
    refused(live(tmp_path / "runs", "--file", str(tmp_path / "none.txt")), "none.txt")
    odd = tmp_path / "picture.png"
    odd.write_bytes(b"\x89PNG")
    refused(live(tmp_path / "runs", "--file", str(odd)), "picture.png")
    refused(live(tmp_path / "runs", recipe="pydocs"), "did you mean 'pydoc'")
    refused(live(tmp_path / "runs", "--set", "train.updates"), "FIELD=VALUE")


def test_a_full_disk(tmp_path):
    "In a file system of 200 kB the run stops with one line; with room it continues and ends equal."
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", small], capture_output=True).returncode:
        pytest.skip("no right to mount a small file system")
    try:
        refused(live(small), "no space left")
        assert not list(small.rglob("*.tmp"))
        subprocess.run(["mount", "-o", "remount,size=200m", small], check=True)
        assert live(small).returncode == 0
    finally:
        subprocess.run(["umount", small])


def test_python_m_and_the_script_say_the_same(tmp_path):
    script = shutil.which("llmlab", path=os.path.dirname(sys.executable))
    said = [subprocess.run([*c, "recipes"], capture_output=True, text=True).stdout for c in ([script], [sys.executable, "-m", "llmlab"])]
    assert said[0] == said[1] and "pydoc" in said[0]
    assert subprocess.run([script, "--version"], capture_output=True, text=True).stdout.strip() == "0.1.0"
    assert subprocess.run([script, "nonsense"], capture_output=True, text=True).returncode == 2


def test_sample_from_a_run(whole):
    words = [sys.executable, "-m", "llmlab", "sample", str(whole.folder), "def ", "--tokens", "8"]
    said = [subprocess.run(words, capture_output=True, text=True).stdout for _ in range(2)]
    assert said[0] == said[1] and said[0].startswith("def ") and len(said[0]) > 6
