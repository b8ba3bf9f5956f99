"""Fixtures and rules for every test: real data files, the record of proofs, and no skip without a committed reason."""

import json
import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ROOT = Path(__file__).parent.parent
PROOFS = pytest.StashKey[dict]()
SKIPS = pytest.StashKey[list]()


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")
    parser.addoption("--write-parity", action="store_true", help="write tests/parity.json and tests/PARITY.md")


def pytest_configure(config):
    config.stash[PROOFS], config.stash[SKIPS] = {}, []


def pytest_collection_modifyitems(config, items):
    if config.getoption("--slow"):
        return
    slow = [i for i in items if i.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)
    items[:] = [i for i in items if i not in slow]


@pytest.fixture(scope="session")
def root():
    "The project's folder."
    return ROOT


@pytest.fixture(scope="session")
def shared_data():
    "Real files from public projects, kept beside the project where there are any."
    path = ROOT.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip("real data files are not beside the project")
    return path


@pytest.fixture
def parity(request):
    "Assert that a component equals its reference, and record it for tests/PARITY.md."

    def record(claim, module, reference, version, max_abs_diff, tolerance):
        assert max_abs_diff <= tolerance, f"{claim}: difference {max_abs_diff:.3g} from {reference}, allowed {tolerance:.3g}"
        request.config.stash[PROOFS][claim, reference] = dict(
            claim=claim,
            module=module,
            reference=reference,
            version=str(version),
            max_abs_diff=float(max_abs_diff),
            tolerance=float(tolerance),
        )

    return record


def pytest_runtest_logreport(report):
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        _skipped.append((report.nodeid, reason.removeprefix("Skipped: ")))


_skipped = []


def pytest_sessionfinish(session, exitstatus):
    allowed = json.loads((ROOT / "tests" / "allowed_skips.json").read_text(encoding="utf-8"))
    surprise = [(n, r) for n, r in _skipped if not any(a["reason"] == r and n.startswith(a["tests"]) for a in allowed)]
    if surprise:
        print("\nskipped, but not on tests/allowed_skips.json:", *(f"\n  {n}: {r}" for n, r in surprise))
        session.exitstatus = 1
    if session.config.getoption("--write-parity"):
        write_parity(session.config.stash[PROOFS].values())


def write_parity(rows):
    from llmlab.core.util import atomic_write, save_json

    rows = sorted(rows, key=lambda r: (r["module"], r["claim"], r["reference"]))
    save_json(rows, ROOT / "tests" / "parity.json")
    lines = [
        "# Parity",
        "",
        "Each claim is a test: ours against the reference, largest absolute difference. `make parity` writes this page.",
        "",
        "| module | claim | reference | largest difference | tolerance |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['module']} | {r['claim']} | {r['reference']} {r['version']} | {r['max_abs_diff']:.2g} | {r['tolerance']:.2g} |" for r in rows
    ]
    with atomic_write(ROOT / "tests" / "PARITY.md") as f:
        f.write("\n".join(lines) + "\n")
