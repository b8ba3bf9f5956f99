"""The loop: equal to one written by hand, honest about what it skipped, undisturbed by what looks on."""

import math
import os
import random
import signal
import threading

import numpy as np
import pytest
import torch
from train_lab import Given, Recorder, columns, given, memory, model, one_weight, random_batch, stream, trainer, weights

from llmlab.core.util import max_diff
from llmlab.data.packing import Loader
from llmlab.model.objectives import NextToken
from llmlab.train.trainer import Stopped, TrainConfig, Trainer, untouched


def test_equal_to_a_loop_by_hand(parity):
    t = trainer(None, 10, dropout=0.0, dtype=torch.float64)
    history = t.fit(progress=False).history
    m, loader, losses, norms = model(dropout=0.0, dtype=torch.float64), Loader(stream(), 8, 4), [], []
    matrices = [p for p in m.parameters() if p.ndim > 1]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1},
                                   {"params": [p for p in m.parameters() if p.ndim == 1], "weight_decay": 0.0}], betas=(0.9, 0.95))
    for step in range(10):
        batch = loader.update(step)[0]
        loss = torch.nn.functional.cross_entropy(m(batch)[batch.loss_mask], batch.targets[batch.loss_mask])
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0).item())
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * ((step + 1) / 2 if step < 2 else 1 if step <= 6 else 1 - 0.98 * (step - 6) / 4)
        optimizer.step()
        losses.append(loss.item())
    theirs = columns([{"loss": a, "grad_norm": b} for a, b in zip(losses, norms, strict=True)], ("loss", "grad_norm"))
    parity("10 updates, accumulation 2: loss, gradient norm", "llmlab.train.trainer", "torch loop on whole batches", torch.__version__,
           max_diff(columns(history, theirs), theirs), 1e-10)
    parity("10 updates, accumulation 2: weights", "llmlab.train.trainer", "torch loop on whole batches", torch.__version__,
           max_diff(dict(t.model.named_parameters()), dict(m.named_parameters())), 1e-10)


def test_reports_the_mean_over_tokens():
    t = Trainer(one_weight(), Given(), None, TrainConfig(5, warmup=0))
    values = t.update([given(4.0), given(1.0, 1.0, 1.0)])
    assert values["loss"] == 1.75 and values["tokens"] == 4 and values["skipped"] == 0 and values["lr"] == 2e-3


def test_clips_by_the_true_norm():
    sgd = lambda m: torch.optim.SGD(m.parameters(), 1.0)
    t = Trainer(one_weight(), Given(), None, TrainConfig(5, warmup=0, clip=1.0), make_optimizer=sgd)
    assert t.update([given(4.0), given(6.0)])["grad_norm"] == pytest.approx(5.0)
    assert t.model.weight.item() == pytest.approx(1 - 2e-3, abs=1e-8), "a gradient of 5, clipped to 1, at a rate of 0.002"


class Bad(NextToken):
    "An objective that is not finite on some calls."

    def __init__(self, calls, value): super().__init__(); self.calls, self.value, self.n = calls, value, -1

    def __call__(self, model, batch):
        self.n += 1
        terms = super().__call__(model, batch)
        if self.n in self.calls: terms = {k: t._replace(sum=t.sum * self.value) for k, t in terms.items()}
        return terms


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_an_update_that_is_not_finite_is_skipped_and_counted(value):
    t = trainer(None, 10, dropout=0.0)
    t.objective = Bad({5}, value)    # the second micro-batch of the third update
    for i in range(2): t.update(t.loader.update(i))
    before, moments = weights(t), memory(t)
    said = t.update(t.loader.update(2))
    assert said["skipped"] == 1 == t.skipped and not math.isfinite(said["grad_norm"]) and t.step == 3
    assert max_diff(weights(t), before) == 0 and max_diff(memory(t), moments) == 0
    after = t.update(t.loader.update(3))
    assert after["lr"] == said["lr"] == t.rate(2) and after["skipped"] == 1, "the schedule counts what was done"
    assert max_diff(weights(t), before) > 0 and all(torch.isfinite(p).all() for p in t.model.parameters())


def test_a_finite_gradient_with_a_loss_that_is_not_is_skipped_too():
    class Adds(NextToken):
        def __call__(self, model, batch):
            return {k: t._replace(sum=t.sum + float("inf")) for k, t in super().__call__(model, batch).items()}
    t = trainer(None, 10)
    t.objective, before = Adds(), weights(t)
    assert t.update(t.loader.update(0))["skipped"] == 1 and max_diff(weights(t), before) == 0


def test_too_many_skips_in_a_row_end_the_run(tmp_path):
    t = trainer(tmp_path / "c", 10, settings=dict(max_skips=3))
    t.objective = Bad(range(4, 100), float("nan"))
    with pytest.raises(FloatingPointError, match="3 updates in a row .* the last was update 5"): t.fit(progress=False)
    assert [r["skipped"] for r in t.monitor.history] == [0, 0, 1, 2, 3] and math.isnan(t.monitor.history[-1]["loss"])
    again = trainer(tmp_path / "c", 10, settings=dict(max_skips=4))
    assert again.resume() and again.skips_in_a_row == 3 and str(again.monitor.history) == str(t.monitor.history)


def test_an_update_without_targets_changes_nothing():
    t = trainer(None, 10)
    before = weights(t)
    with pytest.raises(ValueError, match="no target for loss"): t.update([random_batch(2, 0, targets=0)])
    assert t.step == 0 and not t.halfway and max_diff(weights(t), before) == 0


def test_another_objective_for_one_update():
    class Halved(NextToken):
        def __call__(self, model, batch): return {k: t._replace(weight=0.5) for k, t in super().__call__(model, batch).items()}
    a, b = trainer(None, 10, dropout=0.0), trainer(None, 10, dropout=0.0)
    batches = a.loader.update(0)
    assert a.update(batches)["loss"] == pytest.approx(2 * b.update(batches, Halved())["loss"]) and b.step == 1


# --- looking changes nothing

def rude(model):
    "An evaluator that draws from every generator, turns dropout on and leaves gradients."
    random.random(), np.random.rand(), torch.rand(1)
    assert not model.training and not torch.is_grad_enabled() and all(p.grad is None for p in model.parameters())
    model.train()
    with torch.enable_grad(): model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    return {"x": 1.0}


def test_evaluation_changes_nothing():
    plain, looked = trainer(None, 10), trainer(None, 10, evaluators={"rude": rude}, settings=dict(eval_every=3))
    looked.model.blocks[0].eval()
    plain.model.blocks[0].eval()
    state = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    a, b = plain.fit(progress=False).history, looked.fit(progress=False).history
    assert state[:2] == (random.getstate(), np.random.get_state()[1].tolist()) and torch.equal(state[2], torch.get_rng_state())
    assert max_diff(weights(plain), weights(looked)) == 0 and not looked.model.blocks[0].training and looked.model.training
    assert [r["step"] for r in b if "rude.x" in r] == [0, 3, 6, 9, 10]
    assert [{k: v for k, v in r.items() if k != "rude.x"} for r in b[1:]] == a


def test_gradients_are_put_back_even_when_looking_fails():
    t = trainer(None, 10)
    t.update(t.loader.update(0))
    before = {n: p.grad.clone() for n, p in t.model.named_parameters()}
    with pytest.raises(ZeroDivisionError), untouched(t.model) as m:
        m(torch.zeros(1, 4, dtype=torch.long))
        raise ZeroDivisionError
    assert t.model.training and max_diff({n: p.grad for n, p in t.model.named_parameters()}, before) == 0


def test_trackers_hear_everything():
    class Tracker(list):
        def log(self, step, values): self.append((step, values))
    heard = Tracker()
    t = trainer(None, 4, evaluators={"e": lambda m: {"x": 2.0}}, trackers=[heard], settings=dict(eval_every=2, log_every=3, warmup=1))
    t.fit(progress=False)
    assert [(s, "loss" in v, v.get("e.x")) for s, v in heard] == [
        (0, False, 2.0), (2, False, 2.0), (3, True, None), (4, True, None), (4, False, 2.0)]
    assert heard[2][1]["seconds"] > 0 and [r["step"] for r in t.monitor.history] == [0, 2, 3, 4]
    assert [r["step"] for r in t.monitor.timing if "seconds" in r] == [0, 2, 3, 4]


# --- asked to stop

@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_asked_to_stop_finishes_the_update_saves_and_continues(tmp_path, number, capsys):
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    whole = trainer(None, 10)
    whole.fit(progress=False)
    t = trainer(tmp_path / "c", 10, settings=dict(checkpoint_every=0), before=lambda step: step == 6 and os.kill(os.getpid(), number))
    said = f"{signal.Signals(number).name} after update 7 of 10; saved in .*the same call continues"
    with pytest.raises(Stopped, match=said): t.fit(progress=False)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers and t.step == 7
    assert isinstance(Stopped(), KeyboardInterrupt), "what waits for Ctrl-C hears it"
    again = trainer(tmp_path / "c", 10, seed=5, settings=dict(checkpoint_every=0))
    again.fit(progress=False)
    assert capsys.readouterr().out.splitlines() == [f"continuing from {tmp_path / 'c' / 'step_00000007'}: update 7 of 10"]
    assert max_diff(weights(again), weights(whole)) == 0 and again.monitor.history == whole.monitor.history
    assert again.monitor is again.fit(progress=False), "a finished run has nothing left to do"


def test_stopped_where_an_evaluation_was_due(tmp_path):
    more = dict(evaluators={"e": lambda m: {"norm": float(m.norm.weight.norm())}}, settings=dict(eval_every=3, checkpoint_every=3))
    whole = trainer(None, 8, **more)
    whole.fit(progress=False)
    t = trainer(tmp_path / "c", 8, before=lambda step: step == 5 and os.kill(os.getpid(), signal.SIGINT), **more)
    with pytest.raises(Stopped): t.fit(progress=False)
    again = trainer(tmp_path / "c", 8, **more)
    assert again.fit(progress=False).history == whole.monitor.history


def test_without_a_folder_nothing_is_promised():
    t = trainer(None, 10, before=lambda step: step == 3 and os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(Stopped, match="no folder: nothing was saved"): t.fit(progress=False)
    assert t.step == 4


def test_a_second_ctrl_c_breaks_off_and_the_state_in_memory_is_not_trusted(tmp_path):
    twice = lambda step: step == 4 and [os.kill(os.getpid(), signal.SIGINT) for _ in range(2)]
    class Twice(NextToken):
        def __call__(self, model, batch): twice(t.step); return super().__call__(model, batch)
    whole = trainer(None, 10)
    whole.fit(progress=False)
    for folder in (tmp_path / "c", None):
        t = trainer(folder, 10)
        t.objective = Twice()
        with pytest.raises(KeyboardInterrupt, match="asked to stop twice") as e: t.fit(progress=False)
        assert not isinstance(e.value, Stopped) and t.halfway
        t.objective = NextToken()
        if folder:
            t.fit(progress=False)
            assert max_diff(weights(t), weights(whole)) == 0 and t.monitor.history == whole.monitor.history
        else:
            with pytest.raises(ValueError, match="broken off half-way"): t.fit(progress=False)


def test_in_another_thread_signals_are_left_alone():
    handler, seen = signal.getsignal(signal.SIGINT), []
    t = trainer(None, 4, settings=dict(warmup=1), before=lambda step: seen.append(signal.getsignal(signal.SIGINT)))
    thread = threading.Thread(target=t.fit, kwargs=dict(progress=False))
    thread.start()
    thread.join()
    assert t.step == 4 and set(seen) == {handler}


# --- settings

@pytest.mark.parametrize("bad,named", [(dict(updates=0), "updates must be at least 1, got 0"), (dict(updates=5, keep=0), "keep must be"),
                                       (dict(updates=100, schedule="cosine"), "no schedule 'cosine'"), (dict(updates=20), "warmup is 30"),
                                       (dict(updates=100, floor=1.0), "floor"), (dict(updates=100, eval_every=-1), "eval_every"),
                                       (dict(updates=100, schedule_settings=dict(cycles=2)), "cycles")])
def test_a_config_that_cannot_be_is_refused_when_made(bad, named):
    with pytest.raises(ValueError, match=named): TrainConfig(**bad)


def test_the_last_rate_is_two_percent_unless_said():
    assert TrainConfig(100).rate()(100) == pytest.approx(0.02 * 2e-3) and TrainConfig(100, floor=1e-4).rate()(100) == 1e-4


def test_bf16_trains_and_progress_shows(capsys):
    from llmlab.train.strategy import AccelerateStrategy
    t = Trainer(model(), NextToken(), Recorder(Loader(stream(), 8, 4)), TrainConfig(6, warmup=2), AccelerateStrategy("bf16"))
    t.fit()
    shown = capsys.readouterr().err
    assert "6/6" in shown and "loss" in shown and all(math.isfinite(r["loss"]) for r in t.monitor.history)
    assert all(r["seconds"] > 0 and r["tokens_per_second"] > 0 for r in t.monitor.timing)
