"""A record that survives JSON to the last bit, refuses what would spoil it, and shows accidents."""

import json
import math

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

from llmlab.core.util import load_json, save_json
from llmlab.train.monitor import Monitor, ema, memory_mb

NUMBERS = st.one_of(st.floats(), st.integers(-2**60, 2**60), st.booleans(), st.none(), st.text(max_size=5))


def filled(losses):
    m = Monitor()
    for step, loss in enumerate(losses, 1): m.log(step, loss=loss)
    return m


@settings(deadline=None, max_examples=60)
@given(st.lists(st.dictionaries(st.sampled_from(["loss", "grad_norm", "lr", "seconds", "memory_mb", "note"]), NUMBERS, max_size=5),
                max_size=6))
def test_json_keeps_every_bit(rows):
    m = Monitor()
    for step, row in enumerate(rows):
        if not isinstance(row.get("seconds", 1.0), (int, float)): row.pop("seconds")
        m.log(step, **row)
    text = json.dumps(m.state_dict(), allow_nan=False)
    again = Monitor()
    again.load_state_dict(json.loads(text))
    assert again.history == m.history and again.timing == m.timing
    assert [list(map(repr, r.values())) for r in again.history] == [list(map(repr, r.values())) for r in m.history]


def test_a_file_keeps_it_too(tmp_path):
    m = filled([0.1 + 0.2, math.nan, math.inf, -math.inf, 1e-320, 1e308])
    save_json(m.state_dict(), tmp_path / "m.json")
    again = Monitor()
    again.load_state_dict(load_json(tmp_path / "m.json"))
    assert again.history == m.history


def test_a_state_does_not_change_with_the_monitor():
    m = filled([1.0])
    state = m.state_dict()
    m.log(1, perplexity=2.0)
    m.log(2, loss=0.5)
    assert state["history"] == [{"step": 1, "loss": 1.0}]
    old = Monitor()
    old.load_state_dict(state)
    old.log(2, loss=9.0)
    assert state["history"] == [{"step": 1, "loss": 1.0}]


def test_a_resumed_record_equals_one_that_was_never_interrupted():
    whole, first, second = filled([3.0, 2.0, 1.0]), filled([3.0, 2.0]), Monitor()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    second.log(3, loss=1.0)
    assert second.history == whole.history and [r["step"] for r in second.timing] == [1, 2, 3]


def test_history_and_timing_are_apart():
    now = iter([10.0, 12.0, 12.5, 20.0])
    m = Monitor(clock=lambda: next(now))
    m.log(1, loss=1.0, tokens=100)
    m.log(1, perplexity=3.0)  # an evaluation: no new row, no new time
    m.log(2, loss=0.9, tokens=100, memory_mb=7.0)
    m.log(3, loss=0.8, tokens=100, seconds=0.1)
    assert m.history == [{"step": 1, "loss": 1.0, "tokens": 100, "perplexity": 3.0}, {"step": 2, "loss": 0.9, "tokens": 100},
                         {"step": 3, "loss": 0.8, "tokens": 100}]
    assert [r["seconds"] for r in m.timing] == [2.0, 0.5, 0.1]
    assert [r["tokens_per_second"] for r in m.timing] == pytest.approx([50.0, 200.0, 1000.0])
    assert m.timing[1]["memory_mb"] == 7.0 and m.timing[0]["memory_mb"] > 1
    assert m.last == m.history[-1] and Monitor().last == {}


def test_tensors_become_numbers_and_let_the_graph_go():
    m = Monitor()
    m.log(0, loss=torch.ones(1, requires_grad=True).sum(), norm=np.float32(0.5), n=torch.tensor(3), ok=np.bool_(True))
    assert {k: type(v) for k, v in m.last.items()} == {"step": int, "loss": float, "norm": float, "n": int, "ok": bool}


@pytest.mark.parametrize("step, values, named", [
    (1, dict(loss=2.0), "already has .'loss'"), (0, dict(loss=2.0), "step 0 after step 1"), (2, dict(loss=torch.ones(3)), "loss has shape"),
    (2, dict(loss=[1.0]), "loss is a list"), (1, dict(seconds=1.0), "already has .'seconds'")])
def test_what_would_spoil_it_is_refused(step, values, named):
    m = filled([1.0])
    before = json.dumps(m.state_dict())
    with pytest.raises(ValueError, match=named): m.log(step, **values)
    assert json.dumps(m.state_dict()) == before


def test_series_leaves_gaps_out():
    m = filled([3.0, 2.0, 1.0])
    m.log(3, perplexity=5.0)
    assert m.series("perplexity") == ([3], [5.0]) and m.series("nothing") == ([], [])
    assert m.series("seconds")[0] == [1, 2, 3]


def test_spikes():
    assert filled([3.0, 2.9, 9.0, 8.5, 2.7, math.nan, 2.6, -math.inf]).spikes() == [3, 4, 6, 8]
    assert filled([5.0, 4.0, 3.0]).spikes() == [] and Monitor().spikes() == []
    assert filled([math.nan, math.nan, 1.0]).spikes() == [1, 2]
    assert filled([1.0] * 30 + [2.5]).spikes(factor=3.0) == [] and filled([1.0] * 30 + [2.5]).spikes(factor=2.0) == [31]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.one_of(st.floats(-100, 100), st.just(math.nan)), min_size=1, max_size=40), st.floats(0, 0.99))
def test_ema_equals_pandas(values, beta):
    import pandas as pd

    theirs = pd.Series(values).ewm(alpha=1 - beta, ignore_na=True).mean().to_numpy()
    assert np.allclose(ema(values, beta), theirs, rtol=0, atol=1e-10, equal_nan=True)


def test_ema_equals_pandas_recorded(parity):
    import pandas as pd

    values = torch.randn(500, generator=torch.Generator().manual_seed(0), dtype=torch.float64).tolist()
    gap = np.abs(np.array(ema(values)) - pd.Series(values).ewm(alpha=0.1).mean().to_numpy()).max()
    parity("exponential moving average", "llmlab.train.monitor", "pandas ewm", pd.__version__, gap, 1e-13)
    with pytest.raises(ValueError, match="beta is 1"): ema(values, 1)


def test_plot_is_a_figure_that_pyplot_forgets():
    m = Monitor()
    for step in range(30): m.log(step, loss=3 / (step + 1) if step != 20 else math.nan, grad_norm=1.0, lr=1e-3, tokens=10)
    open_before = plt.get_fignums()
    fig = m.plot()
    assert isinstance(fig, Figure) and plt.get_fignums() == open_before
    assert [ax.get_title() for ax in fig.axes] == ["loss", "grad norm", "lr", "tokens per second", "memory mb"]
    marks = [line.get_xdata()[0] for line in fig.axes[0].lines if line.get_color() == "red"]
    assert marks == [20]
    assert len(m.plot(("lr",)).axes) == 1
    fig.canvas.draw()
    with pytest.raises(ValueError, match="nothing to plot"): Monitor().plot()


def test_plot_of_a_run_that_is_all_nan():
    filled([math.nan] * 3).plot(("loss",)).canvas.draw()


def test_memory_is_that_of_this_process(): assert 10 < memory_mb() < 1e6
