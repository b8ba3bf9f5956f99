"""Files that are whole or not there, and comparisons that no wrong result passes."""

import errno
import json
import math
import os
import resource
import signal
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmlab.core import util
from llmlab.core.util import (
    assert_close,
    atomic_write,
    bench,
    content_hash,
    differences,
    file_hash,
    flatten,
    human,
    load_json,
    max_diff,
    save_json,
    table,
)

finite = st.floats(-1e6, 1e6)


# ---------------------------------------------------------------- atomic_write
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path, error):
    path = tmp_path / "x.txt"
    path.write_text("old")
    with pytest.raises(error):
        with atomic_write(path) as f:
            f.write("new" * 10_000)
            f.flush()
            raise error
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["x.txt"]


def test_a_new_file_is_not_there_until_it_is_whole(tmp_path):
    path = tmp_path / "deep" / "x.bin"
    with atomic_write(path, "wb") as f:
        f.write(b"12")
        assert not path.exists()
        f.write(b"34")
    assert path.read_bytes() == b"1234"


def test_text_is_utf8_with_plain_line_ends(tmp_path):
    with atomic_write(tmp_path / "x") as f: f.write("ä\nб\r\n字")
    assert (tmp_path / "x").read_bytes() == "ä\nб\r\n字".encode()


def test_permissions_and_links_stay(tmp_path):
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    with atomic_write(link) as f: f.write("new")
    assert link.is_symlink() and real.read_text() == "new" and real.stat().st_mode & 0o777 == 0o640


def test_a_new_file_has_the_mode_that_open_would_give(tmp_path):
    (tmp_path / "plain").write_text("")
    with atomic_write(tmp_path / "ours"): pass
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_name_of_full_length_works(tmp_path):
    for name in ("n" * 255, "字" * 85):
        with atomic_write(tmp_path / name) as f: f.write("x")
        assert (tmp_path / name).read_text() == "x"


@pytest.mark.parametrize("mode", ["a", "r+", "w+", "x"])
def test_other_modes_are_refused(tmp_path, mode):
    with pytest.raises(ValueError, match="as a whole"), atomic_write(tmp_path / "x", mode): pass
    assert not os.listdir(tmp_path)


def write_for_ever(path):
    n = 0
    while True:
        n += 1
        with atomic_write(path, "wb") as f:
            for _ in range(64):
                f.write(b"%08d" % n * 1024)
                f.flush()


@pytest.mark.parametrize("wait", [0.0, 0.003, 0.013, 0.031, 0.07, 0.15])
def test_killed_at_any_moment_a_reader_finds_a_whole_file(tmp_path, wait):
    path = tmp_path / "x.bin"
    path.write_bytes(b"%08d" % 0 * 64 * 1024)
    child = os.fork()
    if not child:
        try: write_for_ever(path)
        finally: os._exit(1)
    time.sleep(wait)
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    data = path.read_bytes()
    assert len(data) == 64 * 1024 * 8 and data == data[:8] * (64 * 1024)
    assert all(f.name == "x.bin" or f.suffix == ".tmp" for f in tmp_path.iterdir())


def test_readers_beside_a_writer_never_see_half(tmp_path):
    path, seen, done = tmp_path / "x", set(), threading.Event()
    path.write_text("0" * 50_000)

    def read():
        while not done.is_set(): seen.add((len(t := path.read_text()), len(set(t))))

    reader = threading.Thread(target=read)
    reader.start()
    for i in range(40):
        with atomic_write(path) as f:
            for _ in range(50): f.write(str(i % 10) * 1000)
    done.set()
    reader.join()
    assert seen == {(50_000, 1)}


def test_two_writers_at_once_leave_one_whole_file(tmp_path):
    path = tmp_path / "x"

    def write(c):
        for _ in range(20):
            with atomic_write(path) as f:
                for _ in range(10): f.write(c * 1000)

    threads = [threading.Thread(target=write, args=(c,)) for c in "abc"]
    for t in threads: t.start()
    for t in threads: t.join()
    assert len(text := path.read_text()) == 10_000 and len(set(text)) == 1 and os.listdir(tmp_path) == ["x"]


@pytest.fixture(params=["mount", "limit"])
def small_disk(tmp_path, request):
    "A folder that takes 256 kB: a small file system where one may be mounted, else a limit on the size of a file."
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder]
    if request.param == "mount" and subprocess.run(mount, capture_output=True).returncode == 0:
        yield folder, errno.ENOSPC
        subprocess.run(["umount", folder], check=True)
        return
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (256 * 1024, old[1]))
    yield folder, errno.EFBIG
    resource.setrlimit(resource.RLIMIT_FSIZE, old)
    signal.signal(signal.SIGXFSZ, ignored)


def test_a_full_disk_is_named_and_keeps_the_old_file(small_disk):
    folder, code = small_disk
    path = folder / "x.bin"
    with atomic_write(path, "wb") as f: f.write(b"old")
    with pytest.raises(OSError) as e, atomic_write(path, "wb") as f: f.write(b"x" * 2**20)
    assert e.value.errno == code and str(path) in str(e.value)
    assert path.read_bytes() == b"old" and os.listdir(folder) == ["x.bin"]


# ---------------------------------------------------------------- JSON and hashes
json_values = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
                           lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(), x, max_size=3), max_leaves=8)


@settings(deadline=None, max_examples=60)
@given(value=json_values)
def test_json_comes_back(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("json") / "x.json"
    try: save_json(value, path)
    except UnicodeEncodeError: return  # a lone surrogate is no text
    assert load_json(path) == value
    assert content_hash(json.loads(path.read_text(encoding="utf-8"))) == content_hash(value)


@pytest.mark.parametrize("value", [{"a": math.nan}, [math.inf], {"a": {1, 2}}, {"a": torch.ones(1)}])
def test_what_json_cannot_hold_is_refused_with_the_path(tmp_path, value):
    path = tmp_path / "x.json"
    save_json({"old": 1}, path)
    with pytest.raises((ValueError, TypeError), match="x.json"): save_json(value, path)
    assert load_json(path) == {"old": 1}


@pytest.mark.parametrize("data", [b"", b"{", b'{"a": NaN}', b"[Infinity]", b"\xff\xfe", b'{"a": 1'])
def test_broken_json_is_named(tmp_path, data):
    (tmp_path / "x.json").write_bytes(data)
    with pytest.raises(ValueError, match="x.json"): load_json(tmp_path / "x.json")


def test_a_byte_order_mark_is_no_part_of_json(tmp_path):
    (tmp_path / "x.json").write_bytes(b"\xef\xbb\xbf" + b'{"a": 1}\r\n')
    assert load_json(tmp_path / "x.json") == {"a": 1}


def test_equal_values_are_equal_files(tmp_path):
    save_json({"b": 1, "a": {"d": 2, "c": 3}}, tmp_path / "one")
    save_json({"a": {"c": 3, "d": 2}, "b": 1}, tmp_path / "two")
    assert file_hash(tmp_path / "one") == file_hash(tmp_path / "two")


# ---------------------------------------------------------------- comparing
@settings(deadline=None, max_examples=60)
@given(a=st.lists(finite, min_size=1, max_size=8), b=st.lists(finite, min_size=8, max_size=8))
def test_max_diff_equals_numpy(a, b):
    b = b[:len(a)]
    assert max_diff(torch.tensor(a, dtype=torch.float64), np.array(b)) == np.abs(np.array(a) - np.array(b)).max()


@settings(deadline=None, max_examples=60)
@given(values=st.lists(finite, min_size=1, max_size=6), where=st.integers(0, 5), bad=st.sampled_from([math.nan, math.inf, -math.inf]))
def test_one_bad_number_anywhere_is_never_agreement(values, where, bad):
    broken = list(values)
    broken[where % len(values)] = bad
    assert max_diff(broken, values) == max_diff(values, broken) == math.inf
    assert max_diff({"a": torch.tensor(broken)}, {"a": torch.tensor(values)}) == math.inf
    with pytest.raises(AssertionError): assert_close(broken, values, atol=1e300)


def test_equal_infinities_agree_and_nan_does_not_agree_with_itself():
    assert max_diff([math.inf, -math.inf], [math.inf, -math.inf]) == 0
    assert max_diff(math.inf, -math.inf) == math.inf and max_diff(math.nan, math.nan) == math.inf


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.uint16, torch.bool, torch.bfloat16, torch.float8_e4m3fn])
def test_every_type_of_number_is_compared(dtype):
    x = torch.tensor([0, 1, 1]).to(dtype)
    assert max_diff(x, x.clone()) == 0 and max_diff(x, torch.tensor([0, 1, 0])) == 1


def test_bare_numbers_keep_all_their_digits():
    assert max_diff(1.0, 1.0 + 2**-52) == 2**-52 and max_diff({"a": [0.1]}, {"a": [0.1 + 1e-12]}) > 0
    assert max_diff(1j, 1j + 1e-12) > 0


def test_whole_numbers_beyond_float64_are_told_apart():
    assert max_diff(2**53 + 1, 2**53) >= 1 and max_diff(2**62, -(2**62)) == 2.0**63


@pytest.mark.parametrize("a, b, said", [
    (torch.ones(2), torch.ones(3), "shape"), ({"a": 1}, {"b": 1}, "different names"), ([1, 2], [1], "different names"),
    ({"a": {"b": None}}, {"a": {"b": 1.0}}, "a.b"), ("x", "x", "cannot be compared"), (torch.ones(2, 1), torch.ones(2), "shape")])
def test_what_cannot_be_compared_says_why(a, b, said):
    with pytest.raises(ValueError, match=said): max_diff(a, b)


def test_assert_close_names_the_worst_leaf_and_returns_the_gap():
    a, b = {"x": torch.zeros(2), "y": [torch.zeros(1), torch.tensor([0.5])]}, {"x": torch.zeros(2), "y": [torch.zeros(1), torch.zeros(1)]}
    with pytest.raises(AssertionError, match=r"gradients \(y\.1\).*0\.5.*0\.1"): assert_close(a, b, 0.1, "gradients")
    assert assert_close(a, b, 0.5) == 0.5 and differences(a, b) == {"x": 0.0, "y.0": 0.0, "y.1": 0.5}
    with pytest.raises(AssertionError): assert_close(1.0, 1.0, atol=math.nan)


def test_assert_close_works_under_optimisation():
    optimised = {"__name__": "optimised"}
    exec(compile(Path(util.__file__).read_text(encoding="utf-8"), "util", "exec", optimize=2), optimised)
    with pytest.raises(AssertionError): optimised["assert_close"](1.0, 2.0, 0.1)


@settings(deadline=None, max_examples=60)
@given(tree=st.recursive(finite, lambda x: st.lists(x, min_size=1, max_size=3)
                         | st.dictionaries(st.text("ab", min_size=1), x, min_size=1, max_size=3)))
def test_flatten_keeps_every_leaf(tree):
    def count(t): return sum(map(count, t.values() if isinstance(t, dict) else t)) if isinstance(t, (dict, list)) else 1
    assert len(flatten(tree)) == count(tree) and max_diff(tree, tree) == 0


@pytest.mark.parametrize("tree", [{"a.b": 1, "a": {"b": 2}}, {1: "x", "1": "y"}])
def test_flatten_refuses_names_that_collide(tree):
    with pytest.raises(ValueError, match="rename"): flatten(tree)


# ---------------------------------------------------------------- showing and timing
@settings(deadline=None, max_examples=200)
@given(number=st.floats(0, 9e17), unit=st.sampled_from(["", "B"]))
def test_human_is_short_and_close(number, unit):
    said = human(number, unit)
    digits = said.rstrip("B").rstrip("kMGTP ")
    scale = (1024 if unit else 1000) ** ("kMGTP".index(p) + 1 if (p := said.removesuffix("B").strip()[-1:]) in set("kMGTP") else 0)
    assert len(digits) <= 9 and math.isclose(float(digits) * scale, number, rel_tol=0.006, abs_tol=1e-9)
    if 1 <= number < 999e15: assert "e" not in said


@pytest.mark.parametrize("number, unit, said", [
    (999.9, "", "1k"), (1023, "B", "1023 B"), (1024, "B", "1 kB"), (0, "", "0"), (math.nan, "", "nan"),
    (math.inf, "", "inf"), (-2500, "", "-2.5k"), (999_999, "", "1M")])
def test_human_at_the_edges(number, unit, said): assert human(number, unit) == said


def test_table_keeps_counts_whole():
    t = table([{"n": 123456789, "x": 1 / 3}, {"x": np.float32(2 / 3)}])
    assert t["n"][0] == 123456789 and list(t["x"]) == ["0.3333", "0.6667"]


def test_bench_alternates_and_survives_a_coarse_clock():
    turns = []
    rows = bench({"a": lambda: turns.append("a"), "b": lambda: turns.append("b")}, repeat=2, warmup=1, clock=lambda: 0.0)
    assert turns == ["a", "b"] * 3 and [r["name"] for r in rows] == ["a", "b"] and math.isnan(rows[1]["times as fast"])
    with pytest.raises(ValueError, match="nothing to time"): bench({})
    ticks = iter([0, 1, 0, 4, 0, 2, 0, 4, 0, 3, 0, 4])
    rows = bench({"a": int, "b": int}, repeat=3, warmup=0, clock=lambda: next(ticks))
    assert [r["ms"] for r in rows] == [2000, 4000] and rows[1]["times as fast"] == 0.5 and rows[0]["spread %"] == 100
