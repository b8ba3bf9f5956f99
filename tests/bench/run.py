"""`make bench`: run every tests/bench/bench_*.py (or those named), write results.json and RESULTS.md.

python tests/bench/run.py [NAME ...]     NAME is the part of the file's name after bench_
"""

import importlib
import os
import platform
import sys
from pathlib import Path

from tqdm.auto import tqdm

from llmlab.core.util import atomic_write, load_json, save_json

HERE = Path(__file__).parent
TARGETS = load_json(HERE / "targets.json")


def cpu():
    "The processor's name and what it can do with 16-bit numbers, as far as the system tells."
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())
    flags = next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())
    units = [f for f in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f in flags]
    return f"{name}, {os.cpu_count()} cores, {' '.join(units) or 'units unknown'}"


def render(rows):
    lines = [
        "# Ours and the peers",
        "",
        "Ours and the peer of a row are measured in the same run, on the machine that the row names. `speedup` above 1: ours is faster. "
        "Spread: of the ratio over the rounds. The target is what the part is to reach in the end; where it is missed, the row says so.",
        "",
        "| bench | peer | ours | theirs | unit | speedup | spread | target | machine | versions |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        goal = TARGETS.get(r["bench"], {}).get(r["peer"])
        verdict = "" if goal is None else f"{goal}{'' if r['speedup'] >= goal else ' (missed)'}"
        versions = ", ".join(f"{k} {v}" for k, v in r["versions"].items())
        figures = " | ".join(str(r[k]) for k in ("bench", "peer", "ours", "theirs", "unit", "speedup", "spread"))
        lines.append(f"| {figures} | {verdict} | {r['machine']} | {versions} |")
    return "\n".join(lines) + "\n"


def main(names):
    sys.path.insert(0, str(HERE))
    every = sorted(p.stem for p in HERE.glob("bench_*.py"))
    chosen = [f"bench_{n}" for n in names] or every
    unknown = [n for n in chosen if n not in every]
    if unknown:
        sys.exit(f"no {unknown[0]}; there are: {', '.join(e.removeprefix('bench_') for e in every)}")
    path = HERE / "results.json"
    old = load_json(path) if names and path.exists() else []
    new = [row | {"machine": cpu()} for name in tqdm(chosen, unit="bench") for row in importlib.import_module(name).run()]
    fresh = {(r["bench"], r["peer"]) for r in new}
    rows = sorted([r for r in old if (r["bench"], r["peer"]) not in fresh] + new, key=lambda r: (r["bench"], r["peer"]))
    save_json(rows, path)
    with atomic_write(HERE / "RESULTS.md") as f:
        f.write(render(rows))
    print(render(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
