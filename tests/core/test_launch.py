"""Functions in several processes: results, one error, no hang, no process left behind."""

import functools
import os
import pkgutil
import signal
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest
import torch
import torch.distributed as dist

import llmlab
from llmlab.core.launch import WorkerError, _pack, launch

PATIENCE = 30  # seconds from a worker's end to the caller's error; far below the 300 that a collective waits


def offspring(): return [p for p in psutil.Process().children(recursive=True) if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    assert not offspring()


def test_what_is_sent_arrives_and_what_is_returned_comes_back(capfd):
    class Local:
        def __init__(self, x): self.x = x

    offset, weight = 10, torch.nn.Parameter(torch.ones(2))
    torch.randn(400, 400) @ torch.randn(400, 400)  # the parent has threads

    def work(local, w):
        x = local.x + offset + dist.get_rank()
        dist.all_reduce(x)
        print("printed by", dist.get_rank())
        print("warned by", dist.get_rank(), file=sys.stderr)
        told = [int(os.environ[k]) for k in ("RANK", "LOCAL_RANK", "WORLD_SIZE")]
        return Local(x), (w * 2).sum(), torch.get_num_threads(), told, os.getpid(), lambda: local.x

    results = launch(work, Local(torch.tensor([1.0, 2.0])), weight)
    assert [r[0].x.tolist() for r in results] == [[23.0, 25.0]] * 2 and all(type(r[0]) is Local for r in results)
    assert [r[1].item() for r in results] == [4.0, 4.0] and [r[2] for r in results] == [1, 1]
    assert [r[3] for r in results] == [[0, 0, 2], [1, 1, 2]] and len({os.getpid(), *[r[4] for r in results]}) == 3
    assert results[0][5]().tolist() == [1.0, 2.0]
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[rank 0] printed by 0", "[rank 1] printed by 1"]
    assert "[rank 0] warned by 0\n" in err and "[rank 1] warned by 1\n" in err
    assert "RANK" not in os.environ and not torch.distributed.is_initialized()


def test_an_error_is_shown_once_with_its_rank_and_the_others_are_killed(tmp_path, capfd):
    def work():
        (tmp_path / f"{dist.get_rank()}").write_text(str(os.getpid()))
        if dist.get_rank() == 1: raise KeyError("ouch")  # this line
        while True: time.sleep(0.1)

    with pytest.raises(WorkerError) as e: launch(work)
    said = str(e.value)
    assert e.value.rank == 1 and said.startswith("rank 1 failed:") and said.count("Traceback") == said.count("KeyError: ") == 1
    assert "# this line" in said and "rank 0" not in said and capfd.readouterr() == ("", "")
    assert not any(psutil.pid_exists(int((tmp_path / r).read_text())) for r in "01")


@pytest.mark.parametrize("end, said", [
    (lambda: os.kill(os.getpid(), signal.SIGKILL), "rank 1 was killed by SIGKILL"),
    (lambda: os._exit(0), "rank 1 left with exit status 0 and no result")])
def test_a_rank_that_dies_while_another_waits_ends_both(tmp_path, end, said):
    def work():
        if dist.get_rank() == 1:
            (tmp_path / "died").touch()
            end()
        dist.barrier()

    with pytest.raises(WorkerError) as e: launch(work)
    assert time.time() - (tmp_path / "died").stat().st_mtime < PATIENCE
    assert str(e.value).startswith(said) and e.value.rank == 1


def test_a_rank_that_returns_too_early_is_named(tmp_path):
    def work():
        if dist.get_rank() == 1: dist.all_reduce(torch.ones(1))
        (tmp_path / "returned").touch()

    with pytest.raises(WorkerError) as e: launch(work)
    assert time.time() - (tmp_path / "returned").stat().st_mtime < PATIENCE
    assert e.value.rank == 1 and "Ranks [0] had returned" in str(e.value)


def last_to_come(op):
    "Rank 1 comes late to its last collective, when rank 0 may be gone already."
    x, rank = torch.full((1000,), float(dist.get_rank() + 1)), dist.get_rank()
    if rank == 1: time.sleep(1)
    if op == "broadcast": dist.broadcast(x, src=0)
    if op == "reduce": dist.reduce(x, dst=1)
    if op == "send": dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
    if op == "scatter": dist.scatter(x, [x, x * 5] if rank == 0 else None, src=0)
    if op == "gather": dist.gather(x, [torch.empty(1000) for _ in range(2)] if rank == 1 else None, dst=1)
    return x.unique().tolist()


@pytest.mark.parametrize("op, wanted", [
    ("broadcast", [1.0]),
    *[pytest.param(op, wanted, marks=pytest.mark.slow) for op, wanted in
      (("reduce", [3.0]), ("send", [1.0]), ("scatter", [5.0]), ("gather", [2.0]))]])
def test_a_rank_may_leave_when_its_own_part_is_done(op, wanted): assert launch(last_to_come, op)[1] == wanted


def a_generator(): return (i for i in range(3))


lock = threading.Lock()


def consume(batches, scale=1): return scale


class Holder:
    def __init__(self): self.inner = {"rows": [1, a_generator()]}
    def go(self): return 1


def uses_a_cell():
    held = threading.Lock()
    return lambda: held


def uses_a_global_in_a_cell():
    "As a cell would: a function whose module cannot be imported."
    space = {"__name__": "__main__", "lock": threading.Lock()}
    exec("def helper(): return lock\ndef work(): return helper()", space)
    return space["work"]


@pytest.mark.parametrize("f, args, said", [
    (consume, lambda: [a_generator()], r"argument 'batches' of consume\(\) is a generator"),
    (consume, lambda: [1, lock], r"argument 'scale' of consume\(\) is a lock"),
    (consume, lambda: [{"a": [0, lock]}], r"argument 'batches' of consume\(\)\['a'\]\[1\] is a lock"),
    (consume, lambda: [Holder()], r"argument 'batches' of consume\(\)\.inner\['rows'\]\[1\] is a generator"),
    (consume, lambda: [open(os.devnull, "w")], "argument 'batches'.*TextIOWrapper"),
    (uses_a_cell(), lambda: [], r"<lambda>\(\), which uses 'held' is a lock"),
    (uses_a_global_in_a_cell(), lambda: [], r"work\(\), which uses 'helper', which uses 'lock' is a lock"),
    (functools.partial(consume, lock), lambda: [], "is a lock"),
    (Holder().go, lambda: [], r"\.inner\['rows'\]\[1\] is a generator"),
    (print, lambda: [1, lock], r"argument 'args' of print\(\)\[1\] is a lock"),
    (max, lambda: [1, lock], r"argument 1 of max\(\) is a lock")])
def test_what_cannot_be_sent_is_named_before_anything_starts(f, args, said, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(TypeError, match="cannot be sent.*" + said): launch(f, *args())


@pytest.mark.parametrize("f", [lambda x: x, consume, functools.partial(consume, 1), print, torch.nn.Linear(2, 2), uses_a_cell, max])
def test_what_can_be_sent_is_sent(f): assert _pack(f, ())


def test_a_circle_is_no_endless_search():
    def even(n): return n == 0 or odd(n - 1)
    def odd(n): return (lock, n and even(n - 1))

    even.mark = threading.Lock()
    ring = [even]
    ring.append(ring)
    with pytest.raises(TypeError, match="is a lock"): launch(consume, ring)


def test_a_result_that_cannot_be_sent_back_is_named():
    with pytest.raises(WorkerError, match=r"rank 0 failed:\nTypeError: cannot be sent back: the result\['a'\]\[1\] is a generator"):
        launch(lambda: {"a": [1, a_generator()]}, n=1)


@pytest.mark.parametrize("n", [0, -1])
def test_no_processes_are_refused(n):
    with pytest.raises(ValueError, match="at least 1"): launch(consume, 1, n=n)


SCRIPT = """
    import os, subprocess, sys, time
    from llmlab.core.launch import launch
    def work(folder):
        import torch.distributed as dist
        child = subprocess.Popen(["sleep", "600"])
        open(f"{folder}/{dist.get_rank()}", "w").write(f"{os.getpid()} {child.pid}\\n")
        dist.barrier()
        time.sleep(600)
    launch(work, sys.argv[1])
"""  # without `if __name__ == "__main__"`


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_or_killed_parent_leaves_no_process(tmp_path, how):
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    heard = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore Ctrl-C
    parent = subprocess.Popen([sys.executable, tmp_path / "script.py", tmp_path], stderr=subprocess.PIPE, text=True, preexec_fn=heard)
    files = [tmp_path / "0", tmp_path / "1"]
    until = time.monotonic() + 120
    while not all(f.exists() and f.read_text().endswith("\n") for f in files):
        assert parent.poll() is None and time.monotonic() < until, parent.stderr.read() if parent.poll() is not None else "no start"
        time.sleep(0.05)
    pids = [int(pid) for f in files for pid in f.read_text().split()]
    assert len(pids) == 4 and all(psutil.pid_exists(p) for p in pids)
    parent.send_signal(how)
    assert parent.wait(PATIENCE) != 0
    said = parent.stderr.read()
    assert ("KeyboardInterrupt" in said and said.count("Traceback") == 1) if how == signal.SIGINT else not said
    alive = lambda p: psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE
    while any(map(alive, pids)):
        assert time.monotonic() < until + PATIENCE
        time.sleep(0.05)


SAVES = """
    import signal, sys, time
    from pathlib import Path
    from llmlab.core.launch import launch
    def work(folder):
        import torch.distributed as dist
        asked = []
        signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
        dist.barrier()
        Path(folder, f"ready{dist.get_rank()}").touch()
        while not asked: time.sleep(0.01)
        time.sleep(0.3 + 0.5 * dist.get_rank())
        Path(folder, f"saved{dist.get_rank()}").touch()
        raise KeyboardInterrupt(f"rank {dist.get_rank()} has saved")
    launch(work, sys.argv[1])
"""


def test_ctrl_c_lets_every_worker_save_and_passes_on_what_it_said(tmp_path):
    (tmp_path / "script.py").write_text(textwrap.dedent(SAVES))
    heard = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)
    parent = subprocess.Popen([sys.executable, tmp_path / "script.py", tmp_path], stderr=subprocess.PIPE, text=True, preexec_fn=heard)
    until = time.monotonic() + 120
    while not all((tmp_path / f"ready{r}").exists() for r in range(2)):
        assert parent.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    parent.send_signal(signal.SIGINT)
    _, said = parent.communicate(timeout=PATIENCE)
    assert all((tmp_path / f"saved{r}").exists() for r in range(2))
    assert said.strip().endswith("KeyboardInterrupt: rank 0 has saved") and said.count("Traceback") == 1


def test_a_notebook_launches_its_cells_as_edited():
    import nbclient
    import nbformat

    cells = ["import torch\nimport torch.distributed as dist\nfrom llmlab.core.launch import launch\n"
             "(torch.ones(300, 300) @ torch.ones(300, 300)).sum()",
             "class Box:\n    def __init__(self, x): self.x = x\ndef f(b): return Box(b.x * (dist.get_rank() + 1))",
             "def f(b):\n    if dist.get_rank() == 1: print('seen')\n    return Box(b.x - dist.get_rank())",
             "[(r.x, type(r) is Box) for r in launch(f, Box(5))]",
             "def f(b): return b.x / dist.get_rank()  # in a cell\ntry: launch(f, Box(5))\nexcept RuntimeError as e: print(e)",
             "torch.cuda.is_initialized()"]
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    nbclient.NotebookClient(nb, timeout=120, kernel_name="python3").execute()
    text = lambda i: "".join(o.get("text") or o["data"]["text/plain"] for o in nb.cells[i].outputs)
    assert text(3) == "[rank 1] seen\n[(5, True), (4, True)]"
    assert "rank 0 failed" in text(4) and "# in a cell" in text(4) and "ZeroDivisionError" in text(4)
    assert text(5) == "False"


def test_importing_starts_no_gpu():
    names = [m.name for m in pkgutil.walk_packages(llmlab.core.__path__, "llmlab.core.")]
    code = f"""
import importlib, torch
def started(*a, **k): raise SystemExit("a GPU was started")
torch.cuda._lazy_init = torch._C._cuda_init = started
for name in {names!r}: importlib.import_module(name)
assert not torch.cuda.is_initialized()
"""
    assert len(names) >= 7 and subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_accelerate_finds_its_processes():
    def work():
        from accelerate import Accelerator

        a = Accelerator(cpu=True)
        return a.num_processes, a.process_index, int(a.reduce(torch.tensor(a.process_index + 1)))

    assert launch(work) == [(2, 0, 3), (2, 1, 3)]
