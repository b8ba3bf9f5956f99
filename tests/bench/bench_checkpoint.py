"""A checkpoint of 212 MB until the disk holds it: ours (hashed, renamed, the old one kept until then) against safetensors and fsync."""

import os
import shutil
import tempfile
from itertools import count
from pathlib import Path

import safetensors.torch
import torch
from common import compare

from llmlab.train.checkpoint import load, save

SIZE = 212 * 10**6


def run():
    "One row, in wall time: what is waited for is the disk."
    g = torch.Generator().manual_seed(0)
    tensors = {f"blocks.{i}.weight": torch.randn(SIZE // 4 // 24, generator=g) for i in range(24)}
    with tempfile.TemporaryDirectory(prefix="llmlab-bench-") as room:
        room, step = Path(room), count(1)

        def ours(): save(room / "ours", next(step), tensors, keep=1)

        def theirs():
            "Two files in turn, so that the last one stays until the next is there."
            n = next(step)
            safetensors.torch.save_file(tensors, room / f"{n}.safetensors")
            with open(room / f"{n}.safetensors", "rb") as f: os.fsync(f.fileno())
            for old in room.glob("*.safetensors"):
                if old.stem != str(n): old.unlink()

        row = compare("checkpoint_sync", "safetensors", ours, theirs, repeat=9, warmup=2, packages=("safetensors",))
        saved = load(next((room / "ours").glob("step_*")))
        assert all(torch.equal(saved[n], t) for n, t in tensors.items())
        shutil.rmtree(room / "ours")
    return [row]


if __name__ == "__main__":
    for r in run(): print(r)
