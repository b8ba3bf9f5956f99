"""The same gradient from every split: into micro-batches, and over processes, whatever their shares of targets."""

import math

import pytest
import torch
import torch.distributed as dist
from train_lab import Given, columns, given, model, one_weight, random_batch, trainer

from llmlab.core.launch import launch
from llmlab.core.reduce import Term
from llmlab.core.streams import Streams
from llmlab.core.util import max_diff
from llmlab.model.objectives import NextToken
from llmlab.train.optimizer import make_optimizer
from llmlab.train.strategy import AccelerateStrategy


def ready(m, precision="fp32"):
    return AccelerateStrategy(precision).prepare(m, lambda m: make_optimizer(m, 1e-3))


def gradients(micro_batches, dtype=torch.float64, objective=None):
    "Loss and gradient per parameter of one update."
    s, objective = ready(model(dropout=0.0, dtype=dtype)), objective or NextToken()
    counts = s.count(objective, micro_batches)
    terms = s.forward_backward(objective, micro_batches, counts)
    return terms["loss"].sum / terms["loss"].count, {n: p.grad.clone() for n, p in s.model.named_parameters()}


SPLITS = {"8x1": [1] * 8, "4x2": [2] * 4, "3+5": [3, 5], "1x8": [8]}


@pytest.mark.parametrize("name", SPLITS)
def test_every_split_gives_the_same_gradient(name, parity):
    batch = random_batch(8)
    whole = gradients([batch])
    logits = model(dropout=0.0, dtype=torch.float64)
    loss = torch.nn.functional.cross_entropy(logits(batch.ids)[batch.loss_mask], batch.targets[batch.loss_mask])
    loss.backward()
    reference = loss, {n: p.grad for n, p in logits.named_parameters()}
    micro_batches = [batch[i - n:i] for n, i in zip(SPLITS[name], torch.tensor(SPLITS[name]).cumsum(0).tolist(), strict=True)]
    assert sum(map(len, micro_batches)) == 8 and max_diff(gradients(micro_batches), whole) < 1e-10
    parity(f"loss and gradients, 8 sequences as {name}", "llmlab.train.strategy", "torch cross_entropy over all 8", torch.__version__,
           max_diff(gradients(micro_batches), reference), 1e-10)


def test_a_token_counts_the_same_whichever_micro_batch_it_is_in():
    s = ready(one_weight())
    micro_batches = [given(4.0), given(1.0, 1.0, 1.0)]
    terms = s.forward_backward(Given(), micro_batches, s.count(Given(), micro_batches))
    assert float(terms["loss"].sum / terms["loss"].count) == 1.75 == s.model.weight.grad.item()


def test_a_micro_batch_without_targets_adds_nothing():
    full, empty = random_batch(3, 1), random_batch(2, 2, targets=0)
    for some in ([full, empty], [empty, full]): assert max_diff(gradients(some), gradients([full])) < 1e-12


@pytest.mark.parametrize("micro_batches", [[], [random_batch(2, 0, targets=0)] * 2])
def test_an_update_without_any_target_is_refused_before_the_forward_pass(micro_batches):
    s = ready(model())
    with pytest.raises(ValueError, match="the whole update has no target"): s.count(NextToken(), micro_batches)
    assert all(p.grad is None for p in s.model.parameters())


def test_an_objective_that_miscounts_is_refused():
    class Miscounts(Given):
        def counts(self, batch): return {"loss": 5}
    s = ready(one_weight())
    with pytest.raises(ValueError, match="counted as 5 before the forward pass and 1 in it"):
        s.forward_backward(Miscounts(), [given(1.0)], s.count(Miscounts(), [given(1.0)]))
    class Forgets(Given):
        def counts(self, batch): return {"loss": 1, "balance": 3}
    with pytest.raises(ValueError, match="'balance' was counted as 3 .* not at all"):
        s.forward_backward(Forgets(), [given(1.0)], s.count(Forgets(), [given(1.0)]))


def test_terms_of_two_units_are_divided_each_by_its_own_count():
    class Two(Given):
        def counts(self, batch): return {"loss": batch.n_targets, "pairs": len(batch)}
        def __call__(self, model, batch):
            return {**super().__call__(model, batch), "pairs": Term(10.0 * model.weight.sum(), 1, "pair", 0.5)}
    s, micro_batches = ready(one_weight()), [given(4.0), given(1.0, 1.0, 1.0)]
    terms = s.forward_backward(Two(), micro_batches, s.count(Two(), micro_batches))
    assert s.model.weight.grad.item() == 1.75 + 0.5 * 10 and terms["pairs"].count == 2


def test_the_verbs(tmp_path):
    s = ready(model(dropout=0.5), "bf16")
    batch, streams = random_batch(4), Streams(0)
    s.zero()
    s.forward_backward(NextToken(), [batch], s.count(NextToken(), [batch]), streams)
    assert list(streams.generators) == ["dropout"] and all(p.grad.dtype == torch.float32 for p in s.parameters)
    norm = s.clip(math.inf)
    assert s.clip(norm / 2) == pytest.approx(norm) and s.clip(math.inf) == pytest.approx(norm / 2, rel=1e-4)
    s.step(3e-3)
    assert {g["lr"] for g in s.optimizer.param_groups} == {3e-3}
    assert s.forward(lambda m, b: m(b), batch).dtype == torch.bfloat16 and not s.forward(lambda m, b: m(b), batch).requires_grad
    assert s.gather(5) == [5] and (s.rank, s.world) == (0, 1)
    other = ready(model(1), "bf16")
    other.load(s.state())
    assert max_diff(other.state(), s.state()) == 0
    s.close()
    assert s.model is None


def test_dropout_draws_from_its_stream_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    losses = []
    for _ in range(2):
        s, batch, streams = ready(model(dropout=0.5)), random_batch(4), Streams(7)
        for _ in range(2): losses.append(float(s.forward_backward(NextToken(), [batch], {"loss": batch.n_targets}, streams)["loss"].sum))
    assert torch.equal(torch.get_rng_state(), before) and losses[:2] == losses[2:] and losses[0] != losses[1]


# --- several processes: one launch, many questions

SHARES = {"unequal": [(12,), (40,)], "unequal, 3 against 1": [(4, 9, 1), (30,)], "no targets on one": [(20, 7), (0, 0)],
          "no targets in the last": [(20, 7), (5, 0)], "no micro-batches on one": [(20, 7), ()]}


def shares(name):
    "The micro-batches of each rank: rows of their own, so many targets each."
    return [[random_batch(5, 10 * rank + i, n) for i, n in enumerate(of_rank)] for rank, of_rank in enumerate(SHARES[name])]


def on_two(folder):
    "What each of two processes finds."
    rank = dist.get_rank()
    found = {"gradients": {n: gradients(shares(n)[rank]) for n in SHARES}}
    s, mine = ready(one_weight()), [[given(6.0, 6.0)], [given(*[2.0] * 6)]][rank]
    terms = s.forward_backward(Given(), mine, s.count(Given(), mine))
    found["loss 3"] = float(terms["loss"].sum / terms["loss"].count), s.model.weight.grad.item()
    found["type"] = str(s.accelerator.distributed_type), s.world, s.gather(rank)
    try: s.count(NextToken(), [random_batch(2, 0, targets=0)])
    except ValueError as e: found["error"] = str(e)
    found["rates"] = {m: rates(2, rank, m) for m in (1, 2)}
    t = trainer(folder, 10, seed=1, dtype=torch.float64, dropout=0.0, rank=rank, world=2, micro_rows=1, settings=dict(checkpoint_every=100))
    found["resumed at"], found["history"] = t.resume() and t.step, t.fit(progress=False).history
    found["rows"], found["weights"] = t.loader.seen, {n: p.detach() for n, p in t.model.named_parameters()}
    d = trainer(None, 2, rank=rank, world=2, dropout=0.5, settings=dict(warmup=1))
    d.fit(progress=False)
    found["dropout"] = d.state()["streams"]
    return found


def rates(world, rank, micro_rows, updates=30):
    "The rate at each update of a linear decay over 100, of which 30 are run."
    t = trainer(None, 100, rank=rank, world=world, micro_rows=micro_rows, dropout=0.0,
                settings=dict(schedule="linear", warmup=0, floor=0.0, peak=0.01))
    return [t.update(t.loader.update(i))["lr"] for i in range(updates)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    "Ten updates on one process, checkpoints on the way, of which the sixth is the newest left."
    folder = tmp_path_factory.mktemp("alone") / "c"
    t = trainer(folder, 10, dtype=torch.float64, dropout=0.0, settings=dict(checkpoint_every=6, keep=2))
    t.fit(progress=False)
    (folder / "step_00000010" / "manifest.json").unlink()
    return folder, t


@pytest.fixture(scope="module")
def two(alone): return launch(on_two, alone[0], n=2)


@pytest.mark.parametrize("name", SHARES)
def test_two_processes_equal_one(two, name, parity):
    joined = gradients([b for of_rank in shares(name) for b in of_rank])
    assert two[0]["gradients"][name][1].keys() == joined[1].keys()
    parity(f"DDP, 2 processes: loss and gradients, {name}", "llmlab.train.strategy", "one process on all batches", torch.__version__,
           max(max_diff(r["gradients"][name], joined) for r in two), 1e-10)


def test_two_processes_weigh_tokens_not_ranks(two):
    assert [r["loss 3"] for r in two] == [(3.0, 3.0)] * 2
    assert [r["type"] for r in two] == [("DistributedType.MULTI_CPU", 2, [0, 1])] * 2
    assert all("the whole update has no target" in r["error"] for r in two)


def closed_form(updates): return [0.01 * (1 - i / 100) for i in range(updates)]


@pytest.mark.parametrize("micro_rows", [1, 2, 4])
def test_the_rate_counts_updates_on_one_process(micro_rows):
    found = rates(1, 0, micro_rows)
    assert found == pytest.approx(closed_form(30), rel=1e-12) and found[25] == pytest.approx(0.75 * 0.01)


def test_the_rate_counts_updates_on_two_processes(two):
    for r in two:
        for micro_rows in (1, 2): assert r["rates"][micro_rows] == pytest.approx(closed_form(30), rel=1e-12)


@pytest.mark.slow
def test_the_rate_counts_updates_on_four_processes():
    for found in launch(lambda: rates(4, dist.get_rank(), 1), n=4): assert found == pytest.approx(closed_form(30), rel=1e-12)


def test_two_processes_continue_what_one_began(two, alone, parity):
    folder, t = alone
    names = [n for n, _ in t.model.named_parameters()]
    assert [r["resumed at"] for r in two] == [6, 6]
    assert two[0]["rows"] == two[1]["rows"] == t.loader.seen[6:], "the same rows at the same update, whatever the number of processes"
    assert max_diff(two[0]["weights"], two[1]["weights"]) == 0
    there = {n: t.model.get_parameter(n) for n in names}
    worst = max(max_diff(columns(two[0]["history"]), columns(t.monitor.history)), max_diff(two[0]["weights"], there))
    parity("6 updates on 1 process, 4 more on 2", "llmlab.train.trainer", "10 on one process", torch.__version__, worst, 1e-10)


def test_ranks_drop_different_units_and_every_stream_is_saved(two):
    streams = two[0]["dropout"]
    assert len(streams) == 2 and not torch.equal(streams[0]["streams"]["dropout"], streams[1]["streams"]["dropout"])
    assert max_diff(streams, two[1]["dropout"]) == 0
