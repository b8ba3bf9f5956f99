"""Checkpoints: what is saved comes back bit for bit, and neither a kill, a full disk nor a flipped bit can pass for a whole one."""

import errno
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import time
import warnings
from contextlib import contextmanager
from importlib.metadata import version

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from train_lab import same

from llmlab.core.batch import Batch
from llmlab.core.util import file_hash, max_diff
from llmlab.model.objectives import NextToken
from llmlab.model.transformer import ModelConfig, Transformer
from llmlab.train.checkpoint import latest, load, load_model, load_optimizer, model_state, optimizer_state, read_manifest, save
from llmlab.train.optimizer import make_optimizer

FILES = ("tensors.safetensors", "state.json", "manifest.json")


def tiny(seed=0, **changes):
    config = ModelConfig(**{**dict(vocab_size=16, hidden_size=16, num_layers=2, num_heads=2, context=8), **changes})
    return Transformer(config, torch.Generator().manual_seed(seed))


# --- what goes in comes out

DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
          torch.float64]


@st.composite
def tensors(draw):
    shape, dtype = draw(st.lists(st.integers(0, 3), max_size=3)), draw(st.sampled_from(DTYPES))
    raw = torch.randint(0, 256, (*shape, torch.empty((), dtype=dtype).element_size()), dtype=torch.uint8,
                        generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    t = (raw % 2).bool()[..., 0] if dtype == torch.bool else raw.view(dtype)[..., 0]
    return t.transpose(0, -1) if t.ndim > 1 and draw(st.booleans()) else t


keys = st.text(max_size=5).filter(lambda k: "/" not in k and not k.startswith("__"))
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | tensors()
branches = st.recursive(leaves, lambda x: st.lists(x, max_size=3) | st.dictionaries(keys, x, max_size=3), max_leaves=8)
trees = st.dictionaries(keys, branches, max_size=4)


@settings(deadline=None, max_examples=40)
@given(trees)
def test_any_state_comes_back_bit_for_bit(tmp_path_factory, state):
    folder = tmp_path_factory.mktemp("c")
    back = load(save(folder, 3, state))
    assert json.dumps(shape(back), ensure_ascii=True) == json.dumps(shape(state), ensure_ascii=True)
    same(back, state)


def shape(tree):
    "The structure alone, so that an empty list and an empty dict are told apart."
    if isinstance(tree, dict): return {k: shape(v) for k, v in tree.items()}
    return [shape(v) for v in tree] if isinstance(tree, list) else 0


def test_surrogates_and_long_integers_survive(tmp_path):
    state = {"text": "caf\ud800é", "n": 2**90, "x": [float("nan"), float("-inf"), -0.0, 5e-324]}
    same(load(save(tmp_path, 0, state)), state)


def test_the_tensor_file_is_the_librarys_byte_for_byte(tmp_path, parity):
    from safetensors.torch import load_file
    from safetensors.torch import save as reference
    g = torch.Generator().manual_seed(0)
    state = {f"{d}".removeprefix("torch.") + n: (torch.randn(5, 3, generator=g) * 50).to(d) for d in DTYPES for n in ("b", "a", "é\"")}
    path = save(tmp_path, 1, state) / FILES[0]
    parity("tensors.safetensors, bytes that differ", "llmlab.train.checkpoint", "safetensors", version("safetensors"),
           sum(a != b for a, b in zip(path.read_bytes(), reference(state, {"format": "pt"}), strict=True)), 0)
    assert file_hash(path) == read_manifest(path.parent)["files"][FILES[0]]["sha256"]
    same(dict(sorted(load_file(path).items())), dict(sorted(state.items())))


@pytest.mark.parametrize("value,named", [((1, 2), "tuple"), ({1, 2}, "set"), (lambda: 0, "function"), ({"a/b": 1}, "a/b"), ({3: 1}, "3"),
                                         ({"__tensor__": "x"}, "__tensor__"), (torch.zeros(2, dtype=torch.complex64), "complex64")])
def test_what_cannot_be_saved_is_named_and_leaves_nothing(tmp_path, value, named):
    with pytest.raises(ValueError, match=named): save(tmp_path, 1, {"x": value})
    assert not list(tmp_path.iterdir())


def test_only_tensors_and_json(tmp_path):
    path = save(tmp_path, 7, {"w": torch.ones(2)}, meta={"recipe": "a"})
    assert sorted(p.name for p in path.iterdir()) == sorted(FILES) and path.name == "step_00000007"
    assert all(json.loads((path / f).read_text()) for f in FILES[1:])


# --- a kill at any moment

BIG = 4 << 20


def keep_saving(folder, start):
    "Save one checkpoint after another, each filled with its own number, until killed."
    for step in range(start, start + 10_000):
        save(folder, step, {"w": torch.full((BIG,), step % 251, dtype=torch.uint8), "n": step}, keep=2)


def kill_while_saving(folder, moments):
    "Fork a process that saves, kill it after so many seconds; what is left must be found and whole, and saving must go on."
    folder.mkdir()
    best = caught = 0
    for seconds in moments:
        child = os.fork()
        if child == 0:
            try:
                torch.set_num_threads(1)    # a forked process has lost the threads of its parent
                keep_saving(folder, best + 1)
            finally: os._exit(1)
        give_up = time.monotonic() + 60
        while not any(folder.glob("step_*")) and time.monotonic() < give_up: time.sleep(0.002)
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        caught += any(folder.glob(".step_*"))
        with warnings.catch_warnings():
            warnings.simplefilter("error")    # nothing broken may stand under the name of a whole one
            path = latest(folder)
        state = load(path)
        assert state["n"] >= best and bool((state["w"] == state["n"] % 251).all()), "an older or a mixed state was found"
        assert path.name == max(p.name for p in folder.glob("step_*")), "the newest name is the newest complete"
        best = state["n"]
    assert best > 1
    return caught


def test_killed_while_saving(tmp_path):
    rng = random.Random(0)
    kill_while_saving(tmp_path / "c", [rng.uniform(0.0, 0.15) for _ in range(4)])


@pytest.mark.slow
def test_killed_while_saving_twenty_times(tmp_path):
    rng = random.Random(1)
    assert kill_while_saving(tmp_path / "c", [rng.uniform(0.0, 0.4) for _ in range(20)]) >= 3, "too few kills fell into a write"


def test_stopped_before_every_single_call_to_the_system(tmp_path, monkeypatch):
    "As if the machine had stopped before the n-th write, sync, rename or deletion, for every n: the old or the new state is there."
    class PowerCut(BaseException): pass

    def cut_at(n):
        count = iter(range(10_000))

        def guard(f):
            def g(*args, **kwargs):
                if next(count) >= n: raise PowerCut
                return f(*args, **kwargs)
            return g
        for module, name in ((os, "fsync"), (os, "rename"), (os, "mkdir"), (os, "unlink"), (os, "rmdir"), (os, "open")):
            monkeypatch.setattr(module, name, guard(getattr(module, name)))

    outcomes = []
    for n in range(60):
        folder = tmp_path / str(n)
        for step in (1, 2): save(folder, step, {"n": step})
        with monkeypatch.context() as m:
            monkeypatch_setattr, monkeypatch.setattr = monkeypatch.setattr, m.setattr
            try:
                cut_at(n)
                save(folder, 3, {"n": 3})
                finished = True
            except PowerCut: finished = False
            finally: monkeypatch.setattr = monkeypatch_setattr
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            outcomes.append(load(latest(folder))["n"])
        save(folder, 4, {"n": 4})
        assert load(latest(folder))["n"] == 4 and len(list(folder.iterdir())) == 2, "leftovers are cleared by the next save"
        if finished: break
    assert finished and set(outcomes) == {2, 3} and outcomes == sorted(outcomes)


def test_temporary_names_are_never_taken_for_complete(tmp_path):
    whole = save(tmp_path, 5, {"n": 5})
    for name in (".step_00000009.tmp", "step_00000009.tmp", ".step_00000009.old.tmp", "step_9", "xstep_00000009", "step_00000009x"):
        shutil.copytree(whole, tmp_path / name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")    # not even looked into
        assert latest(tmp_path) == whole
    assert save(tmp_path, 6, {"n": 6}).exists() and not (tmp_path / ".step_00000009.tmp").exists()


# --- no room

@contextmanager
def tmpfs(path, size):
    "A file system of `size` bytes, where mounting is permitted; otherwise a limit on the size of a file."
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", path], capture_output=True)
    if done.returncode:
        with file_limit(path, size): yield
        return
    try: yield
    finally: subprocess.run(["umount", path], check=True)


@contextmanager
def file_limit(path, size):
    "No file may grow beyond `size` bytes."
    path.mkdir(exist_ok=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try: yield
    finally: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room", [tmpfs, file_limit])
def test_full_disk(tmp_path, room):
    folder = tmp_path / "small"
    with room(folder, 3 << 20):
        save(folder, 1, {"w": torch.zeros(1 << 20, dtype=torch.uint8)})
        with pytest.raises(OSError, match="no room for the checkpoint of step 2.*are kept") as e:
            save(folder, 2, {"w": torch.zeros(5 << 20, dtype=torch.uint8)})
        assert e.value.errno in (errno.ENOSPC, errno.EFBIG) and e.value.filename == str(folder)
        assert [p.name for p in folder.iterdir()] == ["step_00000001"], "the half-written one is cleared away"
        assert load(latest(folder))["w"].numel() == 1 << 20
        save(folder, 3, {"w": torch.ones(1 << 19, dtype=torch.uint8)})    # and with room again all is well
        assert latest(folder).name == "step_00000003"


# --- damage

@pytest.mark.parametrize("name", FILES)
def test_truncated_is_refused_with_its_path(tmp_path, name):
    save(tmp_path, 1, {"w": torch.randn(100), "n": 1})
    path = save(tmp_path, 2, {"w": torch.randn(100), "n": 2})
    data = (path / name).read_bytes()
    for size in (0, 1, len(data) // 2, len(data) - 1):
        (path / name).write_bytes(data[:size])
        with pytest.raises(ValueError, match=f"step_00000002/{name}"): load(path)
        with pytest.warns(UserWarning, match=f"skipped a broken checkpoint.*{name}"): assert latest(tmp_path).name == "step_00000001"
    (path / name).unlink()
    with pytest.raises(ValueError, match=f"step_00000002.*{name}"): load(path)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(FILES), st.floats(0, 1, exclude_max=True), st.integers(0, 7))
def test_a_flipped_bit_is_refused(tmp_path_factory, name, where, bit):
    path = save(tmp_path_factory.mktemp("c"), 2, {"w": torch.arange(50.0), "n": 2, "t": "text"}, meta={"recipe": "abc"})
    data = bytearray((path / name).read_bytes())
    manifest = json.loads(data) if name == FILES[2] else None
    data[int(where * len(data))] ^= 1 << bit
    (path / name).write_bytes(data)
    try:
        if manifest and json.loads(data) == manifest: return    # a blank became another blank
    except ValueError: pass
    with pytest.raises(ValueError, match=f"{path.name}"): load(path)


def test_renamed_and_foreign_folders(tmp_path):
    path = save(tmp_path / "a", 2, {"n": 2})
    moved = path.rename(path.with_name("step_00000008"))
    with pytest.raises(ValueError, match="holds step 2, the folder was renamed"): load(moved)
    (tmp_path / "b" / "step_00000003").mkdir(parents=True)
    (tmp_path / "b" / "step_00000003" / "manifest.json").write_text('{"step": 3}')
    with pytest.raises(ValueError, match="not the manifest of an llmlab checkpoint"): load(tmp_path / "b" / "step_00000003")
    with pytest.warns(UserWarning): assert latest(tmp_path / "b") is None
    with pytest.raises(ValueError, match="no manifest.json"): load(tmp_path)
    assert latest(tmp_path / "nowhere") is None


# --- whose it is, and how many stay

def test_meta_of_another_run_is_refused_naming_both(tmp_path):
    path = save(tmp_path, 1, {}, meta={"recipe": "abc", "precision": "bf16"})
    assert load(path, {"recipe": "abc"}) == {} and load(path) == {}
    with pytest.raises(ValueError, match="its precision is 'bf16', this run's is 'fp32'.*new folder"):
        load(path, {"recipe": "abc", "precision": "fp32"})
    with pytest.raises(ValueError, match="its seed is None, this run's is 1"): load(path, {"seed": 1})


def test_old_ones_go_only_when_the_new_one_is_complete(tmp_path):
    for step in range(1, 6): save(tmp_path, step, {"n": step}, keep=3)
    assert sorted(p.name[-1] for p in tmp_path.iterdir()) == ["3", "4", "5"]
    with pytest.raises(ValueError, match="set"): save(tmp_path, 6, {"n": {1}}, keep=1)
    assert sorted(p.name[-1] for p in tmp_path.iterdir()) == ["3", "4", "5"]
    with pytest.raises(ValueError, match="keep must be at least 1, got 0"): save(tmp_path, 6, {}, keep=0)
    save(tmp_path, 6, {}, keep=1)
    assert [p.name[-1] for p in tmp_path.iterdir()] == ["6"]


def test_a_broken_one_does_not_count_as_kept(tmp_path):
    for step in (1, 2): save(tmp_path, step, {"n": step})
    (tmp_path / "step_00000002" / "state.json").unlink()
    save(tmp_path, 3, {"n": 3}, keep=2)
    assert (tmp_path / "step_00000001").exists(), "two complete ones stay: 1 and 3"


def test_the_same_step_again(tmp_path):
    path = save(tmp_path, 4, {"w": torch.ones(3)})
    assert save(tmp_path, 4, {"w": torch.ones(3)}) == path
    with pytest.raises(ValueError, match="already there and holds something else"): save(tmp_path, 4, {"w": torch.zeros(3)})
    with pytest.raises(ValueError, match="newer than step 3"): save(tmp_path, 3, {})
    assert load(path)["w"].sum() == 3 and len(list(tmp_path.iterdir())) == 1
    (path / "state.json").unlink()
    assert load(save(tmp_path, 4, {"w": torch.zeros(3)}))["w"].sum() == 0, "a broken one gives way"


def test_a_folder_of_another_kind_is_not_written_into(tmp_path):
    (tmp_path / "photos").mkdir()
    with pytest.raises(ValueError, match="holds 'photos' and no checkpoints"): save(tmp_path, 1, {})
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="is a file"): save(tmp_path / "file", 1, {})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "photos"]


# --- models and optimizers

@pytest.fixture
def one_process_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("tied", [True, False])
def test_plain_compiled_and_wrapped_load_into_one_another(tmp_path, one_process_group, tied):
    wrap = {"plain": lambda m: m, "compiled": lambda m: torch.compile(m, backend="eager"), "ddp": torch.nn.parallel.DistributedDataParallel}
    ids = torch.randint(0, 16, (2, 8), generator=torch.Generator().manual_seed(1))
    expected, paths = tiny(7, tie_embeddings=tied)(ids), {}
    for kind, f in wrap.items(): paths[kind] = save(tmp_path / kind, 1, model_state(f(tiny(7, tie_embeddings=tied))))
    assert len({tuple(load(p)) for p in paths.values()}) == 1, "the same names, whatever was saved"
    assert ("head.weight" in load(paths["ddp"])) != tied
    for path in paths.values():
        for f in wrap.values():
            model = f(tiny(0, tie_embeddings=tied))
            assert max_diff(model(ids), expected) > 0.01
            load_model(model, load(path))
            assert torch.equal(model(ids), expected)


def test_compiled_parts_have_plain_names():
    model, plain = tiny(), model_state(tiny())
    for i, b in enumerate(model.blocks): model.blocks[i] = torch.compile(b, backend="eager")
    assert list(model_state(model)) == list(plain)
    load_model(model, plain)


def test_a_mismatch_names_keys_and_loads_nothing():
    model = tiny()
    before = {k: v.clone() for k, v in model_state(model).items()}
    other = {k: v + 1 for k, v in model_state(tiny(1)).items()}
    other["extra.weight"] = other.pop("norm.weight")
    other["embed_tokens.weight"] = other["embed_tokens.weight"][:, :8]
    other["blocks.0.mlp_norm.weight"] = other["blocks.0.mlp_norm.weight"].double()
    with pytest.raises(ValueError, match="nothing was loaded") as e: load_model(model, other)
    for text in ("missing: norm.weight", "unexpected: extra.weight",
                 "embed_tokens.weight (model (16, 16) float32, checkpoint (16, 8) float32)",
                 "blocks.0.mlp_norm.weight (model (16,) float32, checkpoint (16,) float64)"): assert text in str(e.value)
    same(model_state(model), before)
    with pytest.raises(ValueError, match="missing.* and 14 more"): load_model(model, {})


def steps(model, optimizer, n, seed):
    g = torch.Generator().manual_seed(seed)
    for _ in range(n):
        ids = torch.randint(0, 16, (2, 9), generator=g)
        optimizer.zero_grad()
        NextToken()(model, Batch(ids[:, :-1], ids[:, 1:], torch.ones(2, 8, dtype=torch.bool)))["loss"].sum.backward()
        optimizer.step()


def test_the_optimizer_is_saved_by_name(tmp_path):
    model = tiny()
    optimizer = make_optimizer(model, 1e-2)
    steps(model, optimizer, 3, 0)
    path = save(tmp_path, 3, {"model": model_state(model), "optimizer": optimizer_state(model, optimizer)})
    again = tiny(5)
    reordered = torch.optim.AdamW([{**g, "params": g["params"][::-1], "param_names": g["param_names"][::-1]}
                                   for g in reversed(make_optimizer(again, 1e-2).param_groups)])
    state = load(path)
    load_model(again, state["model"])
    load_optimizer(again, reordered, state["optimizer"])
    mine = optimizer_state(again, reordered)
    assert list(mine) != list(state["optimizer"])
    same(mine, {n: state["optimizer"][n] for n in mine})
    for m, o in ((model, optimizer), (again, reordered)): steps(m, o, 3, 1)
    same(model_state(again), model_state(model))


def test_a_foreign_optimizer_is_refused():
    model, other = tiny(), tiny(num_layers=1)
    with pytest.raises(ValueError, match="not in the model"): optimizer_state(model, make_optimizer(other, 1e-3))
    mine = make_optimizer(model, 1e-3)
    theirs = optimizer_state(other, make_optimizer(other, 1e-3))
    with pytest.raises(ValueError, match="on one side only: blocks.1"): load_optimizer(model, mine, theirs)
    load_optimizer(model, mine, optimizer_state(model, mine))
    assert not mine.state, "an optimizer that has not moved remembers nothing"
