"""A run that was interrupted cannot be told from one that was not: ids, losses, rates and weights, to the last bit."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from train_lab import LENGTH, Recorder, model, same, stream, trainer, weights

from llmlab.core.util import max_diff
from llmlab.data.packing import Loader, TokenStream
from llmlab.model.objectives import NextToken
from llmlab.train.checkpoint import latest, load, read_manifest
from llmlab.train.strategy import AccelerateStrategy
from llmlab.train.trainer import TrainConfig, Trainer

UPDATES = {"epoch 0": 10, "epoch 2": 42}    # 64 rows, 4 an update: an epoch is 16 updates


@pytest.fixture(scope="module", params=UPDATES)
def whole(request, tmp_path_factory):
    "A run in one go that left every one of its checkpoints."
    t = trainer(tmp_path_factory.mktemp("whole") / "c", UPDATES[request.param])
    t.fit(progress=False)
    return t


def test_each_row_once_an_epoch(whole):
    ids = [i for _, ids in whole.loader.seen for i in ids]
    assert whole.loader.rows_per_epoch == 64
    for epoch in range(len(ids) // 64): assert sorted(ids[64 * epoch:64 * epoch + 64]) == list(range(64))
    if len(ids) > 128: assert ids[:64] != ids[64:128]


@pytest.mark.parametrize("left", range(1, 10))
def test_interrupted_after_any_update(whole, tmp_path, left):
    updates = whole.config.updates
    at = updates - left
    shutil.copytree(whole.folder / f"step_{at:08d}", tmp_path / "c" / f"step_{at:08d}")
    torch.manual_seed(left)
    random.seed(left)
    t = trainer(tmp_path / "c", updates, seed=99)
    t.fit(progress=False)
    assert t.loader.seen == whole.loader.seen[at:]
    assert t.monitor.history == whole.monitor.history and len(t.monitor.history) == updates
    a, b = (load(x.folder / f"step_{updates:08d}") for x in (t, whole))
    for state in (a, b): state["monitor"].pop("timing")
    same(a, b)


def test_a_checkpoint_holds_all_that_the_next_update_needs(whole):
    path = latest(whole.folder)
    state, meta = load(path), read_manifest(path)["meta"]
    assert set(state) == {"model", "optimizer", "streams", "data", "monitor", "trainer"}
    assert set(state["optimizer"]) == set(state["model"]) and {"step", "exp_avg", "exp_avg_sq"} == set(state["optimizer"]["norm.weight"])
    assert "head.weight" not in state["model"], "the shared weight is there once"
    assert list(state["streams"][0]["streams"]) == ["dropout"] and state["data"]["epoch"] == whole.config.updates // 16
    assert meta["config.peak"] == 1e-2 and meta["precision"] == "fp32" and meta["torch"] == torch.__version__ and meta["world"] == 1


def test_without_its_memory_the_optimizer_would_be_noticed(whole, tmp_path):
    "The comparison above can fail: forget any one part, and the result is another."
    at = whole.config.updates - 5
    state = load(whole.folder / f"step_{at:08d}")
    for part in ("optimizer", "streams", "trainer"):
        t = trainer(None, whole.config.updates)
        fresh = t.state()[part]
        if part == "optimizer": fresh = {n: {k: torch.zeros_like(v) for k, v in s.items()} for n, s in state[part].items()}
        if part == "trainer": fresh = {**state[part], "skipped": 3}
        t.load_state({**state, part: fresh})
        t.fit(progress=False)
        assert t.loader.seen == whole.loader.seen[at:] and max_diff(weights(t), weights(whole)) > 1e-6, part


# --- a real kill

SCRIPT = """
import sys, time, torch
sys.path.insert(0, {here!r})
torch.set_num_threads(1)
from train_lab import trainer
trainer({folder!r}, {updates}, before=lambda step: time.sleep(0.02)).fit(progress=False)
"""


def run_and_kill(folder, updates, seconds, having):
    "Start a training process, kill it so long after its checkpoint number `having` is there; True if it was still running."
    script = SCRIPT.format(here=str(Path(__file__).parent), folder=str(folder), updates=updates)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    give_up = time.monotonic() + 120
    while process.poll() is None and not (folder / f"step_{having:08d}").exists() and time.monotonic() < give_up: time.sleep(0.005)
    time.sleep(seconds)
    running = process.poll() is None
    if running: process.send_signal(signal.SIGKILL)
    process.wait()
    return running


def killed_and_resumed(tmp_path, updates, kills, seed):
    threads, rng = torch.get_num_threads(), random.Random(seed)
    torch.set_num_threads(1)
    try:
        expected = trainer(None, updates)
        expected.fit(progress=False)
        folder, at = tmp_path / "c", 0
        for _ in range(kills):
            assert run_and_kill(folder, updates, rng.uniform(0, 0.3), at + 1), "the process ended before it was killed"
            assert at < (now := read_manifest(latest(folder))["step"]) < updates
            at = now
        t = trainer(folder, updates, seed=5)
        t.fit(progress=False)
    finally: torch.set_num_threads(threads)
    assert t.loader.seen == expected.loader.seen[at:] and t.monitor.history == expected.monitor.history
    assert max_diff(weights(t), weights(expected)) == 0


def test_killed_in_the_middle_of_training(tmp_path): killed_and_resumed(tmp_path, 60, 1, seed=0)


@pytest.mark.slow
def test_killed_five_times(tmp_path): killed_and_resumed(tmp_path, 400, 5, seed=1)


# --- what is not this run's is refused

@pytest.fixture
def begun(tmp_path):
    "A folder with the first six updates of a run of ten."
    t = trainer(tmp_path / "c", 10, before=lambda step: step == 5 and os.kill(os.getpid(), signal.SIGINT), meta={"recipe": "abc123"})
    with pytest.raises(KeyboardInterrupt): t.fit(progress=False)
    assert latest(tmp_path / "c").name == "step_00000006"
    return tmp_path / "c"


OTHERS = [(dict(meta={"recipe": "xyz789"}), "recipe is 'abc123', this run's is 'xyz789'"),
          (dict(settings=dict(peak=2e-2)), "config.peak is 0.01, this run's is 0.02"),
          (dict(updates=12), "config.updates is 10, this run's is 12"),
          (dict(strategy="bf16"), "precision is 'fp32', this run's is 'bf16'"),
          (dict(data_seed=4), "saved seed 0, now 4"),
          (dict(rows=8), "saved rows 4, now 8")]


@pytest.mark.parametrize("change,named", OTHERS)
def test_another_runs_checkpoint_is_refused_naming_both(begun, change, named):
    change = {k: AccelerateStrategy(v) if k == "strategy" else v for k, v in change.items()}
    t = trainer(begun, **{"updates": 10, "meta": {"recipe": "abc123"}, **change})
    before, files = weights(t), sorted(begun.iterdir())
    with pytest.raises(ValueError, match=f"{named}.*new folder"): t.fit(progress=False)
    assert t.step == 0 and max_diff(weights(t), before) == 0 and sorted(begun.iterdir()) == files


def test_another_model_is_refused_and_nothing_is_loaded(begun):
    t = trainer(begun, 10, meta={"recipe": "abc123"}, dtype=torch.float64)
    before = weights(t)
    with pytest.raises(ValueError, match="not of this model, nothing was loaded"): t.fit(progress=False)
    assert max_diff(weights(t), before) == 0


def test_other_data_of_the_same_size_is_refused(begun):
    config = TrainConfig(10, peak=1e-2, warmup=2)
    reverse = TokenStream([stream().document(i)[::-1] for i in range(stream().n_docs)])
    t = Trainer(model(), NextToken(), Loader(reverse, LENGTH, 4, 2), config, folder=begun)
    with pytest.raises(ValueError, match="saved data '.*', now '.*use the same data"): t.fit(progress=False)


def test_how_often_one_looks_may_change(begun):
    whole = trainer(None, 10)
    whole.fit(progress=False)
    t = trainer(begun, 10, meta={"recipe": "abc123"}, micro_rows=2, evaluators={"e": lambda m: {"x": 1}},
                settings=dict(eval_every=4, checkpoint_every=3, keep=1, log_every=2))
    t.fit(progress=False)
    assert max_diff(weights(t), weights(whole)) == 0 and [r["step"] for r in t.monitor.history] == [1, 2, 3, 4, 5, 6, 8, 10]
    assert [p.name for p in begun.iterdir()] == ["step_00000010"]


def test_a_broken_newest_is_passed_over(begun):
    whole = trainer(None, 10)
    whole.fit(progress=False)
    tensors = begun / "step_00000006" / "tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1])
    t = trainer(begun, 10, meta={"recipe": "abc123"})
    with pytest.warns(UserWarning, match="skipped a broken checkpoint.*step_00000006"): t.fit(progress=False)
    assert t.loader.seen[0][0] == 5 and t.monitor.history == whole.monitor.history and max_diff(weights(t), weights(whole)) == 0


def test_a_full_disk_ends_the_run_and_keeps_what_was_there(begun):
    from test_checkpoint import file_limit
    t = trainer(begun, 10, meta={"recipe": "abc123"})
    with file_limit(begun, 1000), pytest.raises(OSError, match="no room for the checkpoint of step 7"): t.fit(progress=False)
    assert latest(begun).name == "step_00000006"


def test_a_loader_of_ones_own_needs_only_update():
    class Mine:
        def __init__(self, loader): self.loader = loader
        def update(self, step): return self.loader.update(step)
    t = trainer(None, 4, settings=dict(warmup=1))
    t.loader = Mine(t.loader)
    t.fit(progress=False)
    assert t.state()["data"] == {} and isinstance(t.loader.loader, Recorder)
