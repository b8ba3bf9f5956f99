"""The run from a notebook cell: equal on any number of processes, stopped and resumed, failing loudly and once."""

import json
import os
import subprocess
import sys
import textwrap
import time

import psutil
import pytest
import torch

from llmlab.core.launch import WorkerError, launch
from llmlab.run.assistant import ASSISTANT_STAGES
from llmlab.run.launch import launch_run, processes_of
from llmlab.run.recipe import get_recipe
from llmlab.run.stages import MODEL_STAGES, TEXT_STAGES, Life, Stage, pretrainer, train, train_here

UP_TO_PRETRAIN = (*TEXT_STAGES, MODEL_STAGES[0])
UP_TO_DPO = (*UP_TO_PRETRAIN, *ASSISTANT_STAGES[:3])
EXACT = {
    "precision": "fp64",
    "train.updates": 20,
    "sft.train.updates": 20,
    "dpo.train.updates": 20,
    "rows": 8,
    "micro_rows": 3,
}


def recorded(life, stage, name):
    return [row[name] for row in json.loads((life.dir(stage) / "monitor.json").read_text())["history"]]


def losses(life, stage):
    return recorded(life, stage, "loss")


def test_two_processes_give_the_losses_of_one_in_every_stage(tmp_path):
    "Twenty updates each of pretraining, fine-tuning and preference training, in float64 without dropout."
    recipe = get_recipe("smoke", EXACT)
    one, two = (launch_run(recipe, where, tmp_path, where, progress=False, stages=UP_TO_DPO) for where in ("here", "processes=2"))
    for stage in ("pretrain", "sft", "dpo"):
        a, b = losses(one, stage), losses(two, stage)
        assert len(a) == len(b) == 20 and a[0] != a[-1]
        assert max(abs(x - y) for x, y in zip(a, b, strict=True)) < 1e-10, stage
        assert recorded(one, stage, "tokens") == recorded(two, stage, "tokens"), "a row was read twice: the mean does not show it"


NOTEBOOK = """
    import logging; logging.disable(logging.WARNING)
    from llmlab.run.launch import launch_run
    from llmlab.run.recipe import get_recipe
    from llmlab.run.stages import MODEL_STAGES, TEXT_STAGES
    import torch; (torch.randn(300, 300) @ torch.randn(300, 300)).sum().item()
    recipe = get_recipe("smoke", {"precision": "fp32", "train.updates": 60, "train.checkpoint_every": 5})
    def run(name): return launch_run(recipe, "processes=2", RUNS, name, stages=(*TEXT_STAGES, MODEL_STAGES[0]))
"""


@pytest.fixture
def kernel():
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3", env={**os.environ, "PYTHONUNBUFFERED": "1"})
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def cell(client, code, meanwhile=None, seconds=240):
    "Run a cell; what it printed, and the name of its exception."
    message, text, failed, end = client.execute(textwrap.dedent(code)), "", None, time.monotonic() + seconds
    while True:
        assert time.monotonic() < end, text
        if meanwhile:
            meanwhile = None if meanwhile() else meanwhile
        try:
            got = client.get_iopub_msg(timeout=0.2)
        except Exception:  # nothing came within that time
            continue
        if got["parent_header"].get("msg_id") != message:
            continue
        kind, content = got["msg_type"], got["content"]
        text += content.get("text", "") if kind == "stream" else ""
        failed = (content["ename"], content["evalue"]) if kind == "error" else failed
        if kind == "status" and content["execution_state"] == "idle":
            return text, failed


def test_a_notebook_launches_stops_and_resumes_on_two_processes(kernel, tmp_path):
    "A real kernel that has computed before; its stop button; the same cell again; bytes of the undisturbed run."
    manager, client = kernel
    text, failed = cell(client, f"RUNS = {str(tmp_path)!r}" + textwrap.dedent(NOTEBOOK))
    assert failed is None, (text, failed)
    text, failed = cell(client, "whole = run('whole')")
    assert failed is None and "[rank 0]" in text and "100%" in text, (text, failed)

    def stop():
        there = any((tmp_path / "stopped" / "pretrain" / "checkpoints").glob("step_*"))
        if there:
            manager.interrupt_kernel()
        return there

    text, failed = cell(client, "run('stopped')", meanwhile=stop)
    assert failed and failed[0] == "KeyboardInterrupt" and "after update" in failed[1], (text, failed)
    assert not (tmp_path / "stopped" / "pretrain" / "done.json").exists()
    assert not [p for p in psutil.Process(manager.provisioner.pid).children(recursive=True) if "_worker" in " ".join(p.cmdline())]
    text, failed = cell(client, "run('stopped')")
    assert failed is None and "continuing from" in text, (text, failed)
    assert all((tmp_path / n / "pretrain" / "model.safetensors").exists() for n in ("whole", "stopped"))
    assert len({(tmp_path / n / "pretrain" / "model.safetensors").read_bytes() for n in ("whole", "stopped")}) == 1


def test_a_run_changes_its_number_of_processes_and_keeps_its_samples(tmp_path):
    "Begun on one, continued on two: in float64 the losses are those of one process."
    recipe, stages = get_recipe("smoke", EXACT | {"train.checkpoint_every": 5}), UP_TO_PRETRAIN
    whole = launch_run(recipe, "here", tmp_path, "whole", progress=False, stages=stages)

    def half(life):
        from llmlab.train.strategy import AccelerateStrategy

        trainer = pretrainer(life, AccelerateStrategy("fp64"), life.dir("pretrain") / "checkpoints")
        while trainer.step < 10:
            trainer._advance()
        trainer.save()
        raise InterruptedError

    with pytest.raises(InterruptedError):
        launch_run(recipe, "here", tmp_path, "moved", progress=False, stages=(*TEXT_STAGES, Stage("pretrain", half, resumes=True)))
    moved = launch_run(recipe, "processes=2", tmp_path, "moved", progress=False, stages=stages)
    assert max(abs(x - y) for x, y in zip(losses(whole, "pretrain"), losses(moved, "pretrain"), strict=True)) < 1e-10


def test_a_worker_that_fails_is_named_once(tmp_path):
    def failing(life):
        def make(life, strategy, folder=None):
            if strategy.rank == 1:
                raise ArithmeticError("no gradient today")
            return pretrainer(life, strategy, folder)

        return train(life, "pretrain", make)

    stages = (*TEXT_STAGES, Stage("pretrain", failing, resumes=True))
    with pytest.raises(WorkerError) as e:
        launch_run(get_recipe("smoke", {"precision": "fp32"}), "processes=2", tmp_path, progress=False, stages=stages)
    assert e.value.rank == 1 and str(e.value).count("ArithmeticError: no gradient today") == 1 and str(e.value).count("Traceback") == 1


def test_fewer_processes_than_asked_for_is_an_error(tmp_path):
    "One process alone, and a launcher that starts one where the run asks for two."
    recipe = get_recipe("smoke", {"precision": "fp32"})
    life = launch_run(recipe, "here", tmp_path, progress=False, stages=TEXT_STAGES)
    asks_for_two = Life(recipe, life.folder, progress=False, processes=2)
    life.note(precision="fp32")
    with pytest.raises(ValueError, match="2 processes were asked for, 1 joined"):
        train_here(asks_for_two, "pretrain", pretrainer)
    with pytest.raises(WorkerError, match="2 processes were asked for, 1 joined"):
        launch(train_here, asks_for_two, "pretrain", pretrainer, n=1)


@pytest.mark.parametrize("where", ["processes=0", "processes=-1", "processes=two", "processes", "there", "", None, 2])
def test_places_that_do_not_exist(where, tmp_path):
    with pytest.raises(ValueError, match="choose 'here', or 'processes=N'"):
        launch_run("smoke", where, tmp_path)
    assert not list(tmp_path.iterdir()) and processes_of("processes=12") == 12


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"rows": 9}, "9 rows"),
        ({"sft.examples": 15}, "15 examples"),
        ({"dpo.per_update": 7}, "7 pairs"),
        ({"sft.replay_rows": 3}, "3 replayed rows"),
    ],
)
def test_what_cannot_be_dealt_out_is_refused_before_anything_is_read(settings, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        launch_run(get_recipe("smoke", settings), "processes=2", tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_open_gpu_is_refused_before_anything_starts(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ValueError, match="restart the kernel"):
        launch_run("smoke", "processes=2", tmp_path)
    assert not list(tmp_path.iterdir())


def test_importing_everything_opens_no_gpu():
    code = """
        import pkgutil, importlib, llmlab, torch
        for m in pkgutil.walk_packages(llmlab.__path__, "llmlab."):
            if not m.name.endswith("__main__"): importlib.import_module(m.name)
        assert not torch.cuda.is_initialized()
        import torch.distributed as dist
        assert not dist.is_initialized()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=120)


def test_the_command_line_launches_too(tmp_path):
    words = [sys.executable, "-m", "llmlab", "lifecycle", "smoke", "--quiet", "--runs", str(tmp_path), "--processes"]
    refused = subprocess.run([*words, "3"], capture_output=True, text=True)
    assert refused.returncode == 2 and "multiple of 3" in refused.stderr and len(refused.stderr.strip().splitlines()) == 1
