"""The update equal to torch's, the groups complete, and a clip that neither spreads nor hides what is not finite."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from llmlab.core.launch import launch
from llmlab.core.util import max_diff
from llmlab.model.transformer import ModelConfig, Transformer
from llmlab.train.optimizer import AdamW, clip_gradients, make_optimizer, param_groups, state_bytes

LIMIT = 1e-12  # float64 rounding, grown over 100 updates


def small(tied=True, dtype=torch.float64):
    return Transformer(ModelConfig(23, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, context=8, tie_embeddings=tied)).to(dtype)


def backward(model, step):
    ids = torch.randint(23, (3, 9), generator=torch.Generator().manual_seed(step))
    model.zero_grad()
    nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()


@pytest.mark.parametrize("tied", [True, False])
def test_equal_to_torch_over_100_updates(parity, tied):
    a, b = small(tied), small(tied)
    ours = AdamW(param_groups(a, 0.1), lr=3e-3, betas=(0.9, 0.95))
    theirs = torch.optim.AdamW(param_groups(b, 0.1), lr=3e-3, betas=(0.9, 0.95))
    for step in range(100):
        for model, optimizer in ((a, ours), (b, theirs)):
            backward(model, step)
            optimizer.step()
    assert max_diff(dict(a.named_parameters()), dict(small(tied).named_parameters())) > 0.01
    name = "tied" if tied else "untied"
    parity(f"AdamW, 100 updates of a {name} Transformer: weights", "llmlab.train.optimizer", "torch.optim.AdamW", torch.__version__,
           max_diff(dict(a.named_parameters()), dict(b.named_parameters())), LIMIT)
    parity(f"AdamW, 100 updates of a {name} Transformer: gradients", "llmlab.train.optimizer", "torch.optim.AdamW", torch.__version__,
           max_diff([p.grad for p in a.parameters()], [p.grad for p in b.parameters()]), LIMIT)


@settings(deadline=None, max_examples=40)
@given(lr=st.floats(0, 1), b1=st.floats(0, 0.999), b2=st.floats(0, 0.9999), eps=st.floats(1e-10, 1e-3), decay=st.floats(0, 1),
       seed=st.integers(0, 9999), present=st.lists(st.booleans(), min_size=1, max_size=6))
def test_any_settings_any_gradients(lr, b1, b2, eps, decay, seed, present):
    "Scales from 1e-6 to 1e6, gradients of 0, and updates in which a weight takes no part."
    noise = torch.Generator().manual_seed(seed)
    a, b = (nn.Parameter(torch.linspace(-1, 1, 6, dtype=torch.float64)) for _ in range(2))
    scales = torch.tensor([1e-6, 1e-3, 1.0, 1e3, 1e6, 0.0], dtype=torch.float64)
    kw = dict(lr=lr, betas=(b1, b2), eps=eps, weight_decay=decay)
    ours, theirs = AdamW([a], **kw), torch.optim.AdamW([b], **kw)
    for here in present:
        g = scales * torch.randn(6, generator=noise, dtype=torch.float64)
        a.grad, b.grad = (g.clone(), g.clone()) if here else (None, None)
        ours.step(), theirs.step()
    assert max_diff(a, b) <= LIMIT


@pytest.mark.parametrize("first, second", [(AdamW, torch.optim.AdamW), (torch.optim.AdamW, AdamW)])
def test_one_continues_the_other(first, second):
    a, b = small(), small()
    kw = dict(lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    whole, half = torch.optim.AdamW(a.parameters(), **kw), first(b.parameters(), **kw)
    for step in range(10):
        if step == 5:
            other = second(b.parameters(), **kw)
            other.load_state_dict(copy.deepcopy(half.state_dict()))
            half = other
        for model, optimizer in ((a, whole), (b, half)):
            backward(model, step)
            optimizer.step()
    assert max_diff(dict(a.named_parameters()), dict(b.named_parameters())) <= LIMIT


def test_sparse_gradients_are_dense_ones():
    tables = [nn.Embedding(10, 4, sparse=s) for s in (True, False)]
    tables[1].load_state_dict(tables[0].state_dict())
    optimizers = [AdamW(t.parameters(), lr=0.1) for t in tables]
    for _ in range(3):
        norms = []
        for t, optimizer in zip(tables, optimizers, strict=True):
            optimizer.zero_grad()
            t(torch.tensor([1, 1, 7])).square().sum().backward()
            norms.append(clip_gradients(t.parameters(), 0.5))
            optimizer.step()
        sparse, dense = (t.weight.grad for t in tables)
        assert sparse.is_sparse and norms[1] > 0.5 and norms[0] == pytest.approx(norms[1], rel=1e-6)
        assert max_diff(sparse.to_dense(), dense) < 1e-6
    assert max_diff(tables[0].weight, tables[1].weight) < 1e-6


def test_closure_is_called_with_gradients():
    w = nn.Parameter(torch.ones(2))
    optimizer = AdamW([w], lr=0.1, weight_decay=0.0)

    def closure():
        optimizer.zero_grad()
        loss = w.square().sum()
        loss.backward()
        return loss

    with torch.no_grad(): assert optimizer.step(closure) == 2.0
    assert torch.allclose(w, torch.tensor(0.9))


@pytest.mark.parametrize("bad", [dict(lr=-1.0), dict(lr=math.nan), dict(eps=-1e-8), dict(weight_decay=-0.1), dict(betas=(0.9, 1.0)),
                                 dict(betas=(-0.1, 0.9))])
def test_nonsense_is_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))): AdamW([nn.Parameter(torch.zeros(1))], **bad)


# groups


@pytest.mark.parametrize("tied", [True, False])
def test_every_weight_is_in_one_group(tied):
    model = small(tied)
    groups = param_groups(model, 0.3)
    assert sorted(id(p) for g in groups for p in g["params"]) == sorted(id(p) for p in model.parameters())
    assert [g["weight_decay"] for g in groups] == [0.3, 0.0]
    assert all(p.ndim >= 2 for p in groups[0]["params"]) and all(p.ndim < 2 for p in groups[1]["params"])
    named = dict(model.named_parameters(remove_duplicate=False))
    assert all(named[n] is p for g in groups for n, p in zip(g["param_names"], g["params"], strict=True))
    assert ("head.weight" in groups[0]["param_names"]) == (not tied)


def test_frozen_weights_are_left_out():
    model = small()
    for n, p in model.named_parameters(): p.requires_grad = n.endswith("q_proj.weight")
    groups = param_groups(model)
    assert len(groups) == 1 and all(n.endswith("q_proj.weight") for n in groups[0]["param_names"])
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="Transformer has no parameter that requires a gradient"): param_groups(model)


def test_memory_shared_by_two_parameters_is_refused():
    model = small(tied=False)
    model.head.weight = nn.Parameter(model.embed_tokens.weight.data)
    with pytest.raises(ValueError, match="embed_tokens.weight.*head.weight.*one parameter"): param_groups(model)


def test_make_optimizer_is_torch_with_our_groups():
    model = small()
    optimizer = make_optimizer(model, 1e-3, weight_decay=0.2)
    assert type(optimizer) is torch.optim.AdamW and optimizer.defaults["betas"] == (0.9, 0.95)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.2, 0.0]
    backward(model, 0)
    optimizer.step()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    assert 2 * weights <= state_bytes(optimizer) <= 2 * weights + 8 * len(list(model.parameters()))


# clipping


def with_grads(*grads, dtype=torch.float64):
    out = []
    for g in grads:
        p = nn.Parameter(torch.zeros(len(g), dtype=dtype))
        p.grad = torch.tensor(g, dtype=dtype)
        out.append(p)
    return out


def test_three_four_five():
    p = with_grads([3.0], [4.0])
    assert clip_gradients(p, 1.0) == 5.0
    assert abs(p[0].grad.item() - 0.6) < 1e-6 and abs(p[1].grad.item() - 0.8) < 1e-6


@pytest.mark.parametrize("scale", [1.0, 65536.0])
def test_a_scaled_loss_gives_the_same_update(scale):
    p = with_grads([3.0 * scale, 4.0 * scale])
    assert clip_gradients(p, 1.0, scale=scale) == 5.0
    assert (p[0].grad - torch.tensor([0.6, 0.8], dtype=torch.float64)).abs().max() < 1e-6
    p = with_grads([0.3 * scale, 0.4 * scale])
    assert clip_gradients(p, 1.0, scale=scale) == pytest.approx(0.5, abs=1e-15)
    assert (p[0].grad - torch.tensor([0.3, 0.4], dtype=torch.float64)).abs().max() < 1e-16


def test_short_gradients_are_not_touched():
    p = with_grads([0.3, 0.4])
    version, before = p[0].grad._version, p[0].grad.clone()
    assert clip_gradients(p, 1.0) == 0.5
    assert p[0].grad._version == version and torch.equal(p[0].grad, before)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 9999), sizes=st.lists(st.integers(1, 20), min_size=1, max_size=6), scale=st.floats(1e-6, 1e6),
       max_norm=st.floats(1e-4, 1e4), absent=st.booleans())
def test_clip_equals_torch(seed, sizes, scale, max_norm, absent):
    noise = torch.Generator().manual_seed(seed)
    grads = [(scale * torch.randn(n, generator=noise, dtype=torch.float64)).tolist() for n in sizes]
    a, b = with_grads(*grads), with_grads(*grads)
    if absent: a[0].grad = b[0].grad = None
    ours, theirs = clip_gradients(a, max_norm), torch.nn.utils.clip_grad_norm_(b, max_norm).item()
    assert abs(ours - theirs) <= 1e-15 * max(1.0, theirs)
    for p, q in zip(a, b, strict=True): assert (p.grad is q.grad is None) or (p.grad - q.grad).abs().max() <= 1e-15 * scale * 20


def test_clip_equals_torch_on_a_model(parity):
    a, b = small(), small()
    backward(a, 0), backward(b, 0)
    ours, theirs = clip_gradients(a.parameters(), 0.1), torch.nn.utils.clip_grad_norm_(b.parameters(), 0.1)
    gap = max(abs(ours - theirs.item()), max_diff([p.grad for p in a.parameters()], [p.grad for p in b.parameters()]))
    parity("clipping by the global norm: norm and gradients", "llmlab.train.optimizer", "torch.nn.utils.clip_grad_norm_",
           torch.__version__, gap, 1e-15)


def test_the_same_parameter_twice_counts_once():
    p = with_grads([3.0, 4.0])
    assert clip_gradients([*p, *p], 1.0) == 5.0
    assert (p[0].grad - torch.tensor([0.6, 0.8], dtype=torch.float64)).abs().max() < 1e-6


def test_nothing_to_clip(): assert clip_gradients([nn.Parameter(torch.ones(2))], 1.0) == 0.0


def test_bf16_gradients_are_summed_in_float32():
    p = with_grads(*[[1.0]] * 1000, dtype=torch.bfloat16)
    assert clip_gradients(p, math.inf) == pytest.approx(1000**0.5, rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_not_finite_is_reported_and_touches_nothing(bad):
    p = with_grads([1.0, bad], [2.0])
    assert not math.isfinite(clip_gradients(p, 1.0))
    assert p[0].grad[0] == 1.0 and p[1].grad[0] == 2.0


@pytest.mark.parametrize("kw", [dict(max_norm=0.0), dict(max_norm=-1.0), dict(max_norm=math.nan), dict(max_norm=1.0, scale=0.0),
                                dict(max_norm=1.0, scale=math.inf)])
def test_limits_that_make_no_sense(kw):
    with pytest.raises(ValueError, match="must be above 0"): clip_gradients(with_grads([1.0]), **kw)


def sharded_clip():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).double()
    with torch.no_grad():
        for i, p in enumerate(model.parameters()): p.copy_(torch.linspace(-1 - i, 1, p.numel()).view(p.shape))
    whole = copy.deepcopy(model)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    for m in (model, whole): m(torch.ones(2, 6, dtype=torch.float64)).square().sum().backward()
    norm, expected = (clip_gradients(m.parameters(), 1.0) for m in (model, whole))
    gaps = [(p.grad.full_tensor() - q.grad).abs().max().item() for p, q in zip(model.parameters(), whole.parameters(), strict=True)]
    return norm, expected, max(gaps)


@pytest.mark.slow
def test_sharded_gradients_have_one_norm():
    "FSDP2 hands over a shard to each process: both must see the norm of the whole."
    for norm, expected, gap in launch(sharded_clip, n=2):
        assert norm == pytest.approx(expected, rel=1e-12) and gap < 1e-12
