"""Eight-bit rows: the error bound, rows that are nearly nothing, and layers equal to their dequantized twins."""

import copy
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from llmlab.core.util import max_diff
from llmlab.model import lowbit
from llmlab.model.lowbit import Int8Embedding, Int8Linear, block_product, dequantize, has_kernel, quantize_weight, round_rows


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 6),
    st.integers(1, 40),
    st.floats(-30, 30),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    st.integers(0, 99),
)
def test_the_error_is_at_most_half_a_step(o, i, exponent, dtype, seed):
    w = (torch.randn(o, i, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 10**exponent).to(dtype)
    q, s = quantize_weight(w)
    assert q.dtype == torch.int8 and s.dtype == torch.float32 and int(q.abs().max()) <= 127 and torch.isfinite(s).all() and (s > 0).all()
    assert ((dequantize(q, s, torch.float64) - w.double()).abs() <= s.double()[:, None] * 0.50001).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_rows_of_every_size_together_and_alone(dtype):
    sizes = [0.0, 1e-8, 1e-6, 1.0, 1e4]
    w = (torch.linspace(-1, 1, 16, dtype=torch.float64) * torch.tensor(sizes, dtype=torch.float64)[:, None]).to(dtype)
    q, s = quantize_weight(w)
    assert not q[0].any() and not dequantize(q, s)[0].any() and torch.isfinite(dequantize(q, s)).all()
    for row in range(len(sizes)):
        alone = quantize_weight(w[row : row + 1])
        assert torch.equal(alone[0][0], q[row]) and alone[1][0] == s[row]
        if w[row].any():
            assert int(q[row].abs().max()) == 127


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused_by_place(bad):
    w = torch.zeros(3, 4)
    w[1, 2] = bad
    with pytest.raises(ValueError, match=r"\[1, 2\] is (nan|inf|-inf)"):
        quantize_weight(w)


def test_a_weight_too_large_for_any_scale_is_refused_by_place():
    w = torch.ones(3, 4, dtype=torch.float64)
    w[2, 1] = 1e42
    with pytest.raises(ValueError, match=r"\[2, 1\] is 1e\+42"):
        quantize_weight(w)
    for odd in (torch.ones(3), torch.ones(2, 2, 2), torch.ones(2, 2, dtype=torch.int8)):
        with pytest.raises(ValueError, match="float matrix"):
            quantize_weight(odd)


def test_the_integers_are_those_of_torch(parity):
    w = torch.randn(96, 65, generator=torch.Generator().manual_seed(1))
    q, s = quantize_weight(w)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = torch.quantize_per_channel(w, s.double(), torch.zeros(96, dtype=torch.long), 0, torch.qint8)
        observer = torch.ao.quantization.PerChannelMinMaxObserver(
            ch_axis=0, dtype=torch.qint8, qscheme=torch.per_channel_symmetric, quant_min=-127, quant_max=127
        )
    observer(w)
    parity("int8 rows: scales", "model.lowbit", "torch.ao", torch.__version__, max_diff(s, observer.calculate_qparams()[0]), 1e-9)
    parity("int8 rows: integers", "model.lowbit", "torch", torch.__version__, max_diff(q, theirs.int_repr()), 0)
    parity("int8 rows: dequantized", "model.lowbit", "torch", torch.__version__, max_diff(dequantize(q, s), theirs.dequantize()), 0)


def test_small_rows_survive_half_precision_and_large_sums_do_not_overflow():
    w = (torch.linspace(-1, 1, 64).expand(16, 64) * 1e-6).half()
    assert dequantize(*quantize_weight(w), torch.float16).any()
    tiny, x = Int8Linear(*quantize_weight(w)).half(), torch.full((2, 64), 100.0).half()
    x[:, :32] = -100
    assert tiny.scale.dtype == torch.float32 and max_diff(tiny(x).double(), x.double() @ w.double().T) < 1e-4 and tiny(x).all()
    large = Int8Linear(*quantize_weight(torch.full((16, 1024), 0.01)))
    assert max_diff(large(torch.full((1, 1024), 8.0).half()), torch.full((1, 16), 81.92).half()) < 0.1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_types_of_layers_follow_the_model_and_a_table_stays_one(dtype):
    table = quantize_weight(torch.randn(32, 16))
    model = nn.Sequential(Int8Embedding(*table), nn.Linear(16, 16), Int8Linear(*table, torch.randn(32)))
    before = table[0].clone(), table[1].clone()
    copied = lambda t: t.clone().to(dtype if t.is_floating_point() else t.dtype)  # as another device would
    for moved in (copy.deepcopy(model).to(dtype), copy.deepcopy(model)._apply(copied)):
        e, _, h = moved
        assert e.qweight is h.qweight and e.scale is h.scale and torch.equal(h.qweight, before[0]) and torch.equal(h.scale, before[1])
        assert moved(torch.tensor([[3, 1]])).dtype == dtype == e(torch.tensor([0])).dtype and h.bias.dtype == dtype
    assert {t.device.type for t in copy.deepcopy(model).to("meta").buffers()} == {"meta"}


@pytest.mark.parametrize("rows", [1, 5, 33])
@pytest.mark.parametrize("shape", [(96, 64), (10, 7)])
@pytest.mark.parametrize("block, processor", [(1, "AVX2"), (100, "DEFAULT"), (2**18, "AVX512")])
@pytest.mark.parametrize("dtype, limit", [(torch.float64, 1e-12), (torch.float32, 1e-4)])
def test_a_layer_is_its_dequantized_twin_forward_and_backward(rows, shape, block, processor, dtype, limit, monkeypatch):
    monkeypatch.setattr(lowbit, "BLOCK", block)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: processor)  # every path works everywhere, if slowly
    torch.manual_seed(0)
    linear = nn.Linear(shape[1], shape[0]).to(dtype)
    small, x = Int8Linear.from_linear(linear), torch.randn(rows, shape[1], dtype=dtype, requires_grad=True)
    twin = lambda x: F.linear(x, dequantize(small.qweight, small.scale, dtype), linear.bias)
    ours, theirs = small(x), twin(x)
    grads = [torch.autograd.grad(y.square().sum(), x)[0] for y in (ours, theirs)]
    with torch.inference_mode():
        quiet = small(x.detach())
    assert max_diff([ours, grads[0], quiet], [theirs, grads[1], theirs]) < limit
    assert not [p for p in small.parameters()] and ours.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_where_there_is_one_agrees_with_the_blocks(dtype):
    torch.manual_seed(0)
    q, s = quantize_weight(torch.randn(96, 64))
    for rows in (1, 16):
        x = torch.randn(rows, 64).to(dtype)
        near = max_diff(torch._weight_int8pack_mm(x, q, torch.ones(96, dtype=dtype)).float(), block_product(x.float(), q))
        assert near < (1e-2 if dtype == torch.float32 else 16)  # integers up to 127 times 64 inputs: sums of about 1000
    for x in (torch.randn(17, 64), torch.randn(0, 64), torch.randn(1, 64).double(), torch.randn(1, 64).half()):
        assert not has_kernel(x, q)
    assert not has_kernel(torch.randn(2, 60).to(dtype), q[:, :60]) and not has_kernel(torch.randn(2, 64).to(dtype), q[:90])


def test_nothing_but_integers_is_kept_for_the_backward_pass():
    kept = []
    small, x = Int8Linear.from_linear(nn.Linear(64, 96)), torch.randn(40, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        small(x)
    assert [t for t in kept if t.shape == (96, 64)] and all(t.dtype == torch.int8 for t in kept if t.numel() >= 64 * 96)


@pytest.mark.parametrize("dtype, limit", [(torch.float64, 1e-5), (torch.float32, 1e-4)])
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("processor", ["AVX2", "AVX512"])
def test_rounded_inputs_are_a_product_of_what_both_stand_for(rows, processor, dtype, limit, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: processor)
    torch.manual_seed(0)
    x = torch.randn(2, rows, 65, dtype=dtype, requires_grad=True)
    layer = Int8Linear.from_linear(nn.Linear(65, 33).to(dtype), activations=True)
    q, s = round_rows(x.detach().flatten(0, 1))
    assert max_diff((q * s).double(), x.detach().flatten(0, 1).double()) <= float(s.max()) * 0.5001
    weight = dequantize(layer.qweight, layer.scale, dtype)
    twin = F.linear((q * s).to(dtype).view(2, rows, 65), weight, layer.bias)
    (grad,) = torch.autograd.grad(layer(x).square().sum(), x)
    assert max_diff([layer(x), grad], [twin, (2 * twin) @ weight]) < limit * 10 and layer(x).dtype == dtype


@pytest.mark.parametrize("processor", ["AVX2", "AVX512"])
def test_inputs_of_nothing_and_inputs_that_are_broken(processor, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: processor)
    for activations in (False, True):
        layer = Int8Linear.from_linear(nn.Linear(64, 32), activations)
        assert layer(torch.zeros(0, 64)).shape == (0, 32) and layer(torch.zeros(2, 0, 64)).shape == (2, 0, 32)
        assert max_diff(layer(torch.zeros(2, 64)), layer.bias.expand(2, -1)) == 0
        x = torch.randn(3, 64)
        x[0, 5], x[1, 6] = math.nan, math.inf
        y = layer(x)
        assert not torch.isfinite(y[:2]).any() and torch.isfinite(y[2]).all()
        with pytest.raises(ValueError, match="layer of 64 inputs"):
            layer(torch.randn(2, 128))
    with pytest.raises(ValueError, match="32 bits"):
        Int8Linear(torch.zeros(1, 140_000, dtype=torch.int8), torch.ones(1), activations=True)


def test_the_error_of_a_layer_is_below_that_of_dynamic_quantization_in_torch():
    torch.manual_seed(0)
    x, linear = torch.randn(64, 512), nn.Linear(512, 512)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dynamic = torch.ao.quantization.quantize_dynamic(nn.Sequential(linear), {nn.Linear}, dtype=torch.qint8)
    error = lambda layer: (layer(x) - linear(x)).norm().item()
    assert error(Int8Linear.from_linear(linear)) < error(Int8Linear.from_linear(linear, True)) < 0.65 * error(dynamic)


def test_an_embedding_shares_its_integers_with_a_head():
    table = quantize_weight(torch.randn(20, 8))
    e, h = Int8Embedding(*table), Int8Linear(*table)
    assert e.qweight is h.qweight and torch.equal(e(torch.tensor([[3, 0]])), dequantize(*table)[torch.tensor([[3, 0]])])


@pytest.mark.parametrize(
    "q, s",
    [
        (torch.zeros(2, 2), torch.ones(2)),
        (torch.zeros(2, 2, dtype=torch.int8), torch.ones(3)),
        (torch.zeros(2, 2, dtype=torch.int8), torch.ones(2).half()),
        (torch.zeros(2, 2, dtype=torch.int8), torch.tensor([1.0, 0.0])),
        (torch.zeros(2, 2, dtype=torch.int8), torch.tensor([1.0, math.nan])),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(q, s):
    with pytest.raises(ValueError):
        Int8Linear(q, s)
    with pytest.raises(ValueError):
        Int8Embedding(q, s)
