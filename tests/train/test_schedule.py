"""Rates as closed forms: the same for every layout of processes, equal to the libraries where conventions agree."""

import math
import pickle
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmlab.data.packing import Loader, TokenStream
from llmlab.model.objectives import NextToken
from llmlab.model.transformer import ModelConfig, Transformer
from llmlab.train.schedule import linear, make_schedule, warmup_cosine, wsd
from llmlab.train.trainer import TrainConfig, Trainer

ALL = (linear, warmup_cosine, wsd)


def test_linear_decay_after_a_quarter():
    assert linear(25, peak=2e-3, total=100) == 0.75 * 2e-3
    assert linear(100, peak=2e-3, total=100) == 0.0


@pytest.mark.parametrize("micro_rows", [8, 4, 2])
def test_accumulation_does_not_move_the_schedule(micro_rows):
    "A real run: the rate of the update that follows 25 updates is 0.75 x peak, however many micro-batches make an update."
    ids = torch.randint(20, (600,), generator=torch.Generator().manual_seed(0)).tolist()
    loader = Loader(TokenStream([ids], 20), 4, 8, micro_rows)
    model = Transformer(ModelConfig(20, hidden_size=8, num_layers=1, num_heads=1, context=4))
    config = TrainConfig(updates=100, peak=1e-3, schedule="linear", warmup=0, floor=0.0)
    trainer = Trainer(model, NextToken(), loader, config)
    rates = [trainer.update(loader.update(step))["lr"] for step in range(26)]
    assert rates == [linear(s, peak=1e-3, total=100) for s in range(26)] and rates[25] == 0.75 * 1e-3


def peers(warmup, total):
    from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup, get_wsd_schedule

    flat = round(0.6 * total) - warmup
    return {linear: partial(get_linear_schedule_with_warmup, num_warmup_steps=warmup, num_training_steps=total),
            warmup_cosine: partial(get_cosine_schedule_with_warmup, num_warmup_steps=warmup, num_training_steps=total),
            wsd: partial(get_wsd_schedule, num_warmup_steps=warmup, num_stable_steps=flat, num_decay_steps=total - flat - warmup,
                         decay_type="linear")}


@pytest.mark.parametrize("ours", ALL)
def test_equal_to_transformers(parity, ours):
    import transformers

    gap = 0.0
    for warmup, total in ((0, 10), (10, 100), (30, 720)):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2e-3)
        scheduler, theirs = peers(warmup, total)[ours](optimizer), []
        for _ in range(total + 1):  # beyond, their cosine would rise again
            theirs.append(scheduler.get_last_lr()[0])
            optimizer.step(), scheduler.step()
        mine = [ours(s, peak=2e-3, warmup=warmup, total=total) for s in range(total + 1)]
        gap = max([gap] + [abs(a - b) for a, b in zip(mine[warmup:], theirs[warmup:], strict=True)]
                  + [abs(a - b) for a, b in zip(mine[:warmup - 1], theirs[1:warmup], strict=False)])  # their warm-up starts at 0
    parity(f"{ours.__name__}: rates from warm-up to the end", "llmlab.train.schedule", "transformers schedules",
           transformers.__version__, gap, 1e-17)


def test_equal_to_torch_lambda_lr(parity):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, make_schedule("wsd", peak=1.0, warmup=7, total=50, floor=0.1))
    gap = 0.0
    for step in range(60):
        gap = max(gap, abs(optimizer.param_groups[0]["lr"] - wsd(step, peak=3e-3, warmup=7, total=50, floor=3e-4)))
        optimizer.step(), scheduler.step()
    parity("wsd as a LambdaLR", "llmlab.train.schedule", "torch LambdaLR", torch.__version__, gap, 1e-17)


@st.composite
def runs(draw):
    total = draw(st.integers(1, 300))
    peak = draw(st.floats(1e-6, 1.0))
    return dict(peak=peak, total=total, warmup=draw(st.integers(0, int(0.6 * total))), floor=peak * draw(st.floats(0, 1)))


@settings(deadline=None, max_examples=60)
@given(run=runs(), ours=st.sampled_from(ALL))
def test_shape(run, ours):
    "Up to the peak, then never up again, between floor and peak, and at the floor for ever after."
    rates = [ours(s, **run) for s in range(run["total"] + 3)]
    w, peak, floor = run["warmup"], run["peak"], run["floor"]
    rise, fall = rates[:w], rates[w:]
    assert all(0 < r <= peak * (1 + 1e-12) for r in rise) and rise == sorted(rise)
    if w: assert rates[0] == peak / w and math.isclose(rates[w - 1], peak)
    assert all(a >= b - 1e-15 for a, b in zip(fall, fall[1:], strict=False))
    assert all(floor - 1e-15 <= r <= peak + 1e-15 for r in fall)
    assert rates[-3:] == [floor] * 3
    if w < run["total"]: assert math.isclose(rates[w], peak)


def test_wsd_is_flat_until_its_share():
    rates = [wsd(s, peak=1.0, warmup=5, total=100, floor=0.0, decay_start=0.7) for s in range(101)]
    assert rates[4:71] == [1.0] * 67 and rates[71] < 1.0 and math.isclose(rates[85], 0.5)
    assert wsd(99, peak=1.0, warmup=5, total=100, decay_start=1.0) == 1.0


@pytest.mark.parametrize("ours", ALL)
@pytest.mark.parametrize("settings, named", [
    (dict(step=-1), "step is -1"), (dict(step=1.5), "step is 1.5"), (dict(total=0), "total is 0"),
    (dict(warmup=11), "warmup is 11"), (dict(warmup=-1), "warmup is -1"), (dict(peak=0.0), "peak is 0.0"),
    (dict(peak=math.nan), "peak is nan"), (dict(floor=2.0), "floor is 2.0"),
    (dict(floor=-0.1), "floor is -0.1"), (dict(floor=math.nan), "floor is nan")])
def test_nonsense_is_refused(ours, settings, named):
    kw = dict(step=0, peak=1.0, warmup=2, total=10, floor=0.1) | settings
    with pytest.raises(ValueError, match=named): ours(kw.pop("step"), **kw)


@pytest.mark.parametrize("share", [0.1, 1.1, -0.5])
def test_a_decay_that_starts_outside_is_refused(share):
    with pytest.raises(ValueError, match=f"decay_start is {share}"): wsd(0, peak=1.0, warmup=20, total=100, decay_start=share)


def test_names_are_exact():
    for f in ALL:
        schedule = pickle.loads(pickle.dumps(make_schedule(f.__name__, peak=1.0, warmup=3, total=30, floor=0.1)))
        assert [schedule(s) for s in range(35)] == [f(s, peak=1.0, warmup=3, total=30, floor=0.1) for s in range(35)]
    for name in ("cosine", "WSD", "linear "):
        with pytest.raises(ValueError, match="no schedule"): make_schedule(name, peak=1.0, total=10)
    with pytest.raises(ValueError, match="decay_start"): make_schedule("linear", peak=1.0, total=10, decay_start=0.5)
    with pytest.raises(ValueError, match="missing: .'total'"): make_schedule("linear", peak=1.0)
    with pytest.raises(ValueError, match="warmup is 20"): make_schedule("linear", peak=1.0, total=10, warmup=20)
