"Every kernel against the loop, outputs and gradients; the module against transformers and torch."

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention

import llmlab.model.attention as page
from llmlab.core.util import assert_close, max_diff
from llmlab.model.attention import (
    Attention,
    Where,
    attention,
    attention_weights,
    choose_kernel,
    fused_attention,
    fused_fp32_attention,
    manual_attention,
    naive_attention,
)
from llmlab.model.mask import cache_mask, causal_mask, document_mask

quick = settings(max_examples=30, deadline=None)
KERNELS = (manual_attention, fused_attention, attention)


def random_inputs(B=2, H=4, Hkv=2, T=5, S=None, D=4, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    draw = lambda h, t: torch.randn(B, h, t, D, generator=g, dtype=torch.float64).to(dtype)
    return [draw(H, T), draw(Hkv, S or T), draw(Hkv, S or T)], draw(H, T)


def results(f, inputs, mask, upstream):
    inputs = [x.detach().requires_grad_() for x in inputs]
    y = f(*inputs, mask)
    return [y, *torch.autograd.grad(y, inputs, upstream)]


@quick
@given(st.integers(1, 2), st.integers(1, 3), st.integers(1, 3), st.integers(1, 6), st.integers(1, 7), st.integers(1, 5), st.integers(0, 99))
def test_kernels_are_the_loop_under_any_mask(B, Hkv, group, T, S, D, seed):
    "Any shape, any grouping, any mask, queries that may see nothing included."
    inputs, up = random_inputs(B, Hkv * group, Hkv, T, S, D, seed=seed)
    mask = torch.rand(B, 1, T, S, generator=torch.Generator().manual_seed(seed)) < 0.6
    slow = results(naive_attention, inputs, mask, up)
    for f in KERNELS: assert_close(results(f, inputs, mask, up), slow, 1e-12, f.__name__)


@quick
@given(st.integers(1, 8), st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 2), (3, 1)]), st.integers(0, 99))
def test_kernels_are_the_loop_when_causal(T, heads, seed):
    inputs, up = random_inputs(2, *heads, T, seed=seed)
    slow = results(naive_attention, inputs, None, up)
    for f in KERNELS: assert_close(results(f, inputs, None, up), slow, 1e-12, f.__name__)
    assert_close(results(attention, inputs, causal_mask(T), up), slow, 1e-12)


def test_gradient_is_the_derivative():
    "Finite differences know nothing of the code."
    inputs, _ = random_inputs(1, 2, 1, 4, D=3)
    for mask in (None, document_mask(torch.tensor([[0, 0, 1, -1]]))):
        for f in (manual_attention, attention):
            assert torch.autograd.gradcheck(lambda q, k, v, f=f, mask=mask: f(q, k, v, mask), [x.requires_grad_() for x in inputs])


def test_masks_of_every_shape_broadcast():
    inputs, up = random_inputs(T=4)
    m = document_mask(torch.tensor([[0, 0, 1, 1], [0, 0, 1, 1]]))
    shapes = (m[0, 0], m[0], m[:1], m, m.expand(2, 4, 4, 4))
    first = results(attention, inputs, shapes[0], up)
    for s in shapes: assert_close(results(attention, inputs, s, up), first, 1e-12)


def test_one_query_sees_every_key():
    (q, k, v), _ = random_inputs(T=1, S=6)
    assert_close(attention(q, k, v), naive_attention(q, k, v, torch.ones(1, 6, dtype=torch.bool)), 1e-12)
    (q, k, v), _ = random_inputs(T=1)
    assert_close(attention(q, k, v), v.repeat_interleave(2, 1), 1e-12)


def test_weights_sum_to_one_or_to_nothing():
    (q, k, _), _ = random_inputs(T=6)
    mask = causal_mask(6).clone()
    mask[3] = False
    w = attention_weights(q, k, mask)
    assert_close(w.sum(-1), torch.tensor([1., 1, 1, 0, 1, 1]).expand(2, 4, 6), 1e-12)
    assert not w[..., ~mask].any()


def test_a_blind_query_gets_zeros_and_passes_on_zeros():
    inputs, up = random_inputs(T=5)
    mask = causal_mask(5).clone()
    mask[2] = False
    for f in (naive_attention, *KERNELS, fused_fp32_attention):
        y, dq, dk, dv = results(f, inputs, mask, up)
        assert not y[:, :, 2].any() and not dq[:, :, 2].any() and all(t.isfinite().all() for t in (y, dq, dk, dv)), f.__name__


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_enormous_scores_stay_finite(dtype):
    inputs, up = random_inputs(dtype=dtype)
    inputs[0] = inputs[0] * 1e4
    for f in KERNELS: assert all(t.isfinite().all() for t in results(f, inputs, None, up)), f.__name__


def test_kernel_for_every_device_and_precision(monkeypatch):
    for units in (True, False):
        monkeypatch.setattr(page, "cpu_has_bf16", lambda units=units: units)
        assert choose_kernel("cpu", torch.bfloat16) is (manual_attention if units else fused_fp32_attention)
        assert choose_kernel("cpu", torch.float16) is fused_fp32_attention
        for device, dtype in (("cpu", torch.float32), ("cpu", torch.float64), ("cuda", torch.bfloat16), ("mps", torch.float16)):
            assert choose_kernel(device, dtype) is fused_attention


@pytest.mark.parametrize("units", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_low_precision_is_as_near_to_the_truth_as_torch(monkeypatch, units, masked):
    monkeypatch.setattr(page, "cpu_has_bf16", lambda: units)
    inputs, up = random_inputs(2, 4, 2, 48, D=16, dtype=torch.bfloat16)
    mask = document_mask(torch.tensor([[0] * 20 + [1] * 20 + [-1] * 8] * 2)) if masked else None
    truth = results(fused_attention, [x.double() for x in inputs], mask, up.double())
    ours, torchs = (results(f, inputs, mask, up) for f in (attention, fused_attention))
    error = lambda r: sum((a.double() - b).square().mean().sqrt().item() for a, b in zip(r, truth, strict=True))
    assert all(t.dtype == torch.bfloat16 for t in ours) and error(ours) < 1.5 * error(torchs)


def test_autocast_keeps_the_fp32_kernel_in_fp32():
    inputs, _ = random_inputs(dtype=torch.bfloat16, T=16)
    with torch.autocast("cpu", torch.bfloat16): y = fused_fp32_attention(*inputs)
    assert torch.equal(y, fused_fp32_attention(*inputs))


@pytest.mark.parametrize("call, named", [
    (lambda q, k, v: attention(q[:, :3], k, v), "3 query heads"),
    (lambda q, k, v: attention(q[:, :, :3], k, v), "3 queries against 5 keys"),
    (lambda q, k, v: attention(q, k, v, torch.ones(5, 5)), "float32"),
    (lambda q, k, v: attention(q, k, v, torch.ones(5, 5, dtype=torch.int64)), "int64"),
    (lambda q, k, v: Attention(30, 4), "30"),
    (lambda q, k, v: Attention(32, 4, 3), "num_kv_heads 3"),
    (lambda q, k, v: Attention(32, 4, 0), "num_kv_heads 0"),
    (lambda q, k, v: Attention(32, 4, dropout=1.0), "1.0"),
])
def test_refusals_name_the_value(call, named):
    with pytest.raises(ValueError, match=named): call(*random_inputs()[0])


def gradients(y, x, module, up):
    names = ["input", *(n for n, _ in module.named_parameters())]
    return {"output": y, **dict(zip(names, torch.autograd.grad(y, [x, *module.parameters()], up), strict=True))}


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("implementation, tolerance", [("sdpa", 1e-12), ("eager", 1e-5)])  # eager takes its softmax in float32
def test_module_equals_transformers(parity, heads, implementation, tolerance):
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=32, num_attention_heads=heads[0], num_key_value_heads=heads[1], attn_implementation=implementation)
    ours, theirs = Attention(32, *heads).double(), LlamaAttention(config, 0).double()
    theirs.load_state_dict(ours.state_dict())
    x, up = torch.randn(2, 7, 32, dtype=torch.float64, requires_grad=True), torch.randn(2, 7, 32, dtype=torch.float64)
    mask = document_mask(torch.tensor([[0, 0, 0, 1, 1, 1, -1], [0] * 7]))
    added = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    still = (torch.ones(1, 7, 8, dtype=torch.float64), torch.zeros(1, 7, 8, dtype=torch.float64))
    gap = max_diff(gradients(ours(x, Where(mask=mask)), x, ours, up), gradients(theirs(x, still, added)[0], x, theirs, up))
    parity(f"attention module, {heads[0]} heads on {heads[1]}, output and gradients", "model.attention",
           f"transformers LlamaAttention ({implementation})", transformers.__version__, gap, tolerance)


def test_module_equals_torch_multihead(parity):
    torch.manual_seed(0)
    ours, theirs = Attention(32, 4).double(), nn.MultiheadAttention(32, 4, bias=False, batch_first=True).double()
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([ours.q_proj.weight, ours.k_proj.weight, ours.v_proj.weight]))
        theirs.out_proj.weight.copy_(ours.o_proj.weight)
    x, up = torch.randn(2, 7, 32, dtype=torch.float64, requires_grad=True), torch.randn(2, 7, 32, dtype=torch.float64)
    mine = gradients(ours(x, Where()), x, ours, up)
    other = gradients(theirs(x, x, x, attn_mask=~causal_mask(7), need_weights=False)[0], x, theirs, up)
    packed = torch.cat([mine[f"{n}_proj.weight"] for n in "qkv"])
    gap = max_diff([mine["output"], mine["input"], packed, mine["o_proj.weight"]],
                   [other["output"], other["input"], other["in_proj_weight"], other["out_proj.weight"]])
    parity("attention module, output and gradients", "model.attention", "torch.nn.MultiheadAttention", torch.__version__, gap, 1e-12)


@quick
@given(st.lists(st.integers(-1, 2), min_size=2, max_size=7), st.integers(0, 9))
def test_outputs_depend_on_what_the_mask_allows_and_nothing_else(doc_ids, seed):
    torch.manual_seed(seed)
    T, mask = len(doc_ids), document_mask(torch.tensor([doc_ids]))
    layer, x = Attention(8, 2).double(), torch.randn(1, T, 8, dtype=torch.float64, requires_grad=True)
    y = layer(x, Where(mask=mask))[0].sum(-1)
    depends = torch.stack([torch.autograd.grad(y[t], x, retain_graph=True)[0][0].abs().sum(-1) > 0 for t in range(T)])
    assert torch.equal(depends, mask[0, 0])


class GrowingCache:
    "Keys and values of all calls so far, by layer."

    def __init__(self): self.kept = {}

    def update(self, layer, k, v):
        if layer in self.kept: k, v = (torch.cat([old, new], 2) for old, new in zip(self.kept[layer], (k, v), strict=True))
        self.kept[layer] = k, v
        return k, v


def test_token_by_token_through_a_cache_equals_all_at_once():
    torch.manual_seed(0)
    layer, x, cache = Attention(16, 4, 2).double(), torch.randn(2, 7, 16, dtype=torch.float64), GrowingCache()
    pieces = []
    for a, b in ((0, 3), (3, 4), (4, 7)):
        mask = cache_mask(torch.arange(a, b).expand(2, -1), b)
        pieces.append(layer(x[:, a:b], Where(mask=mask, cache=cache), layer=3))
    assert list(cache.kept) == [3] and cache.kept[3][0].shape == (2, 2, 7, 4)
    assert_close(torch.cat(pieces, 1), layer(x, Where()), 1e-12)


def test_dropout_in_training_only():
    torch.manual_seed(0)
    layer, x = Attention(16, 2, dropout=0.5), torch.randn(2, 9, 16)
    assert not torch.equal(layer(x, Where()), layer(x, Where()))
    assert torch.equal(layer.eval()(x, Where()), layer(x, Where()))


def test_dropout_keeps_the_mean():
    torch.manual_seed(0)
    (q, k, v), _ = random_inputs(1, 1, 1, 4, D=2, dtype=torch.float32)
    for f in (manual_attention, fused_attention):
        mean = f(*(t.expand(20000, -1, -1, -1) for t in (q, k, v)), dropout=0.3).mean(0, keepdim=True)
        assert_close(mean, f(q, k, v), 0.03, f.__name__)


def test_width_of_heads_of_its_own():
    layer = Attention(16, 2, head_dim=12)
    assert layer.q_proj.weight.shape == (24, 16) and layer(torch.randn(1, 3, 16), Where()).shape == (1, 3, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_traced_without_a_break(dtype):
    (q, k, v), _ = random_inputs(dtype=dtype)
    assert_close(torch.compile(attention, backend="eager", fullgraph=True)(q, k, v), attention(q, k, v), 1e-6)
