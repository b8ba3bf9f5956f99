"""Measure ours and a peer in the same run: warm-up, alternated, median; one row per comparison."""

import statistics
import time
from importlib.metadata import version


def compare(bench, peer, ours, theirs, *, amount=None, unit="ms", repeat=7, warmup=1, clock=time.perf_counter, packages=()):
    "One row of results: `ours` and `theirs` are functions without arguments; with `amount` the figures are amount per second."
    times = {"ours": [], "theirs": []}
    for turn in range(warmup + repeat):
        for name, f in (("ours", ours), ("theirs", theirs)):
            start = clock()
            f()
            if turn >= warmup:
                times[name].append(clock() - start)
    median = {k: statistics.median(v) for k, v in times.items()}
    show = (lambda s: amount / s) if amount else (lambda s: s * 1000)
    ratios = [t / o for o, t in zip(times["ours"], times["theirs"], strict=True)]
    return {
        "bench": bench,
        "peer": peer,
        "ours": round(show(median["ours"]), 3),
        "theirs": round(show(median["theirs"]), 3),
        "unit": unit,
        "speedup": round(median["theirs"] / median["ours"], 3),
        "spread": round(max(ratios) - min(ratios), 3),
        "versions": {p: version(p) for p in ("torch", *packages)},
    }
