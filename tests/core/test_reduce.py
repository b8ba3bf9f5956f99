"""Sums and counts: any split of an update gives the same loss and the same gradient."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from llmlab.core.batch import pad_batch
from llmlab.core.reduce import Term, add_terms, masked_mean, masked_sum, token_logprobs, weighted_loss
from llmlab.core.util import max_diff

V = 9


def tiny(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(V, 5), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, V)).double()


def run(model, micro_batches, with_penalty=False):
    "Loss and gradients of one update over these micro-batches."
    model.zero_grad()
    counts = {"next": sum(b.n_targets for b in micro_batches)} | ({"penalty": sum(map(len, micro_batches))} if with_penalty else {})
    parts = []
    for b in micro_batches:
        logits = model(b.ids)
        terms = {"next": Term(masked_sum(-token_logprobs(logits, b.targets), b.loss_mask), b.n_targets)}
        if with_penalty: terms["penalty"] = Term((logits**2).mean((1, 2)).sum(), len(b), "row", 0.1)
        weighted_loss(terms, counts).backward()
        parts.append(terms)
    total = add_terms(parts)
    return sum(t.weight * t.mean for t in total.values()).detach(), [p.grad.clone() for p in model.parameters()]


@settings(deadline=None, max_examples=40)
@given(lengths=st.lists(st.integers(2, 9), min_size=1, max_size=8), cuts=st.sets(st.integers(1, 7)), seed=st.integers(0, 9),
       shuffled=st.booleans(), penalty=st.booleans())
def test_any_split_gives_the_same_gradient(lengths, cuts, seed, shuffled, penalty):
    generator = torch.Generator().manual_seed(seed)
    whole = pad_batch([torch.randint(V, (n,), generator=generator).tolist() for n in lengths], length=9)
    order = torch.randperm(len(whole), generator=generator) if shuffled else torch.arange(len(whole))
    edges = [0, *sorted(c for c in cuts if c < len(whole)), len(whole)]
    split = [whole[order][a:b] for a, b in zip(edges, edges[1:], strict=False)]
    model = tiny()
    assert max_diff(list(run(model, split, penalty)), list(run(model, [whole], penalty))) < 1e-12


def test_eight_sequences_in_any_micro_batches_equal_one_cross_entropy(parity):
    generator = torch.Generator().manual_seed(3)
    whole = pad_batch([torch.randint(V, (n,), generator=generator).tolist() for n in (2, 9, 4, 3, 7, 2, 5, 6)])
    model, gaps = tiny(), []
    reference = F.cross_entropy(model(whole.ids).flatten(0, 1), torch.where(whole.loss_mask, whole.targets, -100).flatten())
    grads = list(torch.autograd.grad(reference, list(model.parameters())))
    for split in (whole.split(1), whole.split(2), whole.split(4), [whole[:3], whole[3:]], [whole]):
        gaps.append(max_diff(list(run(model, split)), [reference.detach(), grads]))
    parity("loss and gradients of an update, whatever its micro-batches", "core.reduce", "torch.nn.functional.cross_entropy",
           torch.__version__, max(gaps), 1e-13)


def test_micro_batches_of_unequal_counts_report_the_mean_over_tokens():
    parts = [{"next": Term(torch.tensor(4.0), 1)}, {"next": Term(torch.tensor(3.0), 3)}]
    assert add_terms(parts)["next"].mean == 1.75
    assert sum(weighted_loss(p, {"next": 4}) for p in parts) == 1.75


def test_normalisation_equals_transformers(parity):
    import transformers
    from transformers.loss.loss_utils import ForCausalLMLoss

    generator = torch.Generator().manual_seed(4)
    rows = [torch.randint(V, (n,), generator=generator).tolist() for n in (2, 8, 3)]
    whole, model = pad_batch(rows), tiny()
    loss, grads = run(model, whole.split(1))
    model.zero_grad()
    reference = sum(ForCausalLMLoss(model(torch.tensor([r])), torch.tensor([r]), V, num_items_in_batch=whole.n_targets) for r in rows)
    reference.backward()
    gap = max_diff([loss, grads], [reference.detach(), [p.grad for p in model.parameters()]])  # HF works in float32
    parity("micro-batches normalised by the tokens of the update", "core.reduce", "transformers", transformers.__version__, gap, 1e-6)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 0), (torch.float32, 0), (torch.bfloat16, 0), (torch.float16, 0)])
def test_log_probabilities_equal_log_softmax(dtype, tolerance):
    torch.manual_seed(1)
    z = (torch.randn(2, 3, V, dtype=torch.float64) * 30).to(dtype).requires_grad_()
    y = torch.randint(V, (2, 3))
    wide = z if dtype == torch.float64 else z.float()
    reference = wide.log_softmax(-1).gather(-1, y[..., None]).squeeze(-1)
    ours = token_logprobs(z, y)
    assert ours.dtype == reference.dtype and max_diff(ours, reference) <= tolerance
    weights = torch.randn_like(ours)
    assert max_diff(*[torch.autograd.grad((x * weights).sum(), z, retain_graph=True)[0] for x in (ours, reference)]) <= 1e-6


@settings(deadline=None, max_examples=50)
@given(shape=st.lists(st.integers(0, 4), max_size=3), seed=st.integers(0, 99))
def test_masked_log_probabilities_look_at_nothing_else(shape, seed):
    torch.manual_seed(seed)
    z, y, mask = torch.randn(*shape, V, dtype=torch.float64), torch.randint(V, shape), torch.rand(shape) < 0.5
    plain = token_logprobs(z, y)
    broken, odd = z.clone(), y.clone()
    broken[~mask], odd[~mask] = math.nan, -100
    broken.requires_grad_()
    ours = token_logprobs(broken, odd, mask)
    assert ours.shape == y.shape and torch.equal(ours, torch.where(mask, plain, 0.0))
    if mask.any(): ours.sum().backward(); assert broken.grad.isfinite().all() and (broken.grad[~mask] == 0).all()


@settings(deadline=None, max_examples=50)
@given(values=st.lists(st.floats(-9, 9), min_size=1, max_size=9), data=st.data(), bad=st.sampled_from([math.nan, math.inf, -math.inf]))
def test_masked_out_values_pass_on_no_value_and_no_gradient(values, data, bad):
    keep = data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values)))
    x, mask = torch.tensor(values, dtype=torch.float64), torch.tensor(keep)
    wanted = x[mask].sum()
    x[~mask] = bad
    x.requires_grad_()
    total = masked_sum(x, mask)
    total.backward()
    assert abs(total.detach() - wanted) < 1e-12 and torch.equal(x.grad, mask.double())
    if any(keep): assert abs(masked_mean(x, mask) - wanted / sum(keep)) < 1e-12


def test_a_counted_nan_is_not_hidden():
    assert masked_sum(torch.tensor([1.0, math.nan]), torch.tensor([True, True])).isnan()


def test_half_precision_sums_are_taken_in_float32():
    ones, mask = torch.ones(5000, dtype=torch.bfloat16), torch.ones(5000, dtype=torch.bool)
    assert masked_sum(ones, mask) == 5000 and masked_mean(ones, mask) == 1 and masked_sum(ones.double(), mask).dtype == torch.float64
    assert masked_sum(ones, mask.long()) == 5000


@pytest.mark.parametrize("call, said", [
    (lambda: token_logprobs(torch.zeros(2, 4), torch.tensor([-100, 1])), "-100 is not a token"),
    (lambda: token_logprobs(torch.zeros(2, 4), torch.tensor([-1, 1])), "-1 is not a token"),
    (lambda: token_logprobs(torch.zeros(2, 4), torch.tensor([0, 4])), "4 is not a token"),
    (lambda: token_logprobs(torch.zeros(2, 3, 4), torch.zeros(3, 2, dtype=torch.long)), "want targets of shape"),
    (lambda: masked_sum(torch.ones(3), torch.ones(2, dtype=torch.bool)), "mask has shape"),
    (lambda: masked_mean(torch.ones(3), torch.ones(3)), "a mask is bool"),
    (lambda: masked_mean(torch.ones(3), torch.zeros(3, dtype=torch.bool)), "empty"),
    (lambda: Term(torch.tensor(0.0), 0).mean, "0 tokens"),
    (lambda: weighted_loss({"a": Term(torch.tensor(1.0), 1)}, {"a": 0}), "count of 0"),
    (lambda: weighted_loss({"a": Term(torch.tensor(1.0), 1)}, {"b": 1}), "no count for term 'a'"),
    (lambda: add_terms([{"a": Term(1, 1, "token")}, {"a": Term(1, 1, "pair")}]), "changed its unit"),
    (lambda: add_terms([{"a": Term(1, 1)}, {"a": Term(1, 1, weight=2.0)}]), "changed its unit or weight")])
def test_mistakes_are_refused_by_name(call, said):
    with pytest.raises(ValueError, match=said): call()


@pytest.mark.parametrize("target", [-100, -1, 4])
def test_no_target_is_ignored_by_the_kernel_either(target, monkeypatch):
    "On a GPU the values are not looked at beforehand; the kernel has to refuse them."
    monkeypatch.setattr("llmlab.core.reduce._check_targets", lambda *a: None)
    with pytest.raises(IndexError): token_logprobs(torch.zeros(2, 4), torch.tensor([target, 1]))


def test_a_micro_batch_without_targets_adds_nothing():
    empty = Term(torch.tensor(0.0), 0)
    assert add_terms([{"a": empty}, {"a": Term(torch.tensor(3.0), 2)}, {"a": empty}])["a"][:2] == (3.0, 2)
    assert weighted_loss({"a": empty}, {"a": 2}) == 0 and add_terms([]) == {}
