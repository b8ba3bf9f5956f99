"""The main recipe with three seeds, in fp32 too: thresholds, and the committed figures (tests/run/pydoc.json)."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

RESULTS = Path(__file__).parent / "pydoc.json"
LIMITS = {"fall": 0.45, "seconds": 300, "memory_mb": 4096}


def live(runs, name, **settings):
    words = [x for k, v in settings.items() for x in ("--set", f"{k}={v}")]
    subprocess.run(
        [sys.executable, "-m", "llmlab", "lifecycle", "pydoc", "--quiet", "--runs", str(runs), "--name", name, *words],
        check=True,
        timeout=1800,
        stdout=subprocess.DEVNULL,
    )
    metrics, timing = (json.loads((runs / name / f"{f}.json").read_text()) for f in ("metrics", "timing"))
    return {
        "name": name,
        "seed": metrics["seed"],
        "precision": metrics["precision"],
        "fingerprint": metrics["fingerprint"],
        "corpus_hash": metrics["corpus_hash"],
        "seconds": {k: v for k, v in timing.items() if k != "peak_memory_mb"},
        "peak_memory_mb": timing["peak_memory_mb"],
        "stages": metrics["stages"],
    }


def record(runs):
    "The committed figures."
    facts = {"cores": os.cpu_count(), "versions": {p: version(p) for p in ("llmlab", "torch", "numpy")}, "python": sys.version.split()[0]}
    RESULTS.write_text(json.dumps({**facts, "runs": runs}, indent=1, sort_keys=True) + "\n", encoding="utf-8")


@pytest.mark.slow
def test_pydoc_reaches_its_thresholds(tmp_path):
    "Where bf16 is the faster, one run in fp32 stands beside the three seeds; where fp32 is, they are in fp32 themselves."
    runs = [live(tmp_path, f"seed{s}", **{"train.seed": s}) for s in range(3)]
    if runs[0]["precision"] != "fp32":
        runs.append(live(tmp_path, "seed0-fp32", **{"train.seed": 0, "precision": "fp32"}))
    record(runs)
    for run in runs:
        assert run["stages"]["evaluate"]["metrics"]["bits_per_byte_fall"] >= LIMITS["fall"], run["name"]
        assert run["peak_memory_mb"] <= LIMITS["memory_mb"] and sum(run["seconds"].values()) <= LIMITS["seconds"], run["name"]


def test_the_committed_figures_meet_the_thresholds():
    runs = json.loads(RESULTS.read_text(encoding="utf-8"))["runs"]
    assert {r["seed"] for r in runs} == {0, 1, 2} and "fp32" in {r["precision"] for r in runs}
    for run in runs:
        assert run["stages"]["evaluate"]["metrics"]["bits_per_byte_fall"] >= LIMITS["fall"]
        assert sum(run["seconds"].values()) <= LIMITS["seconds"] and run["peak_memory_mb"] <= LIMITS["memory_mb"]


def test_the_committed_figures_are_of_todays_recipe():
    from llmlab.run.recipe import get_recipe

    runs = {r["name"]: r for r in json.loads(RESULTS.read_text(encoding="utf-8"))["runs"]}
    for seed in range(3):
        assert runs[f"seed{seed}"]["fingerprint"] == get_recipe("pydoc", {"train.seed": seed}).fingerprint
