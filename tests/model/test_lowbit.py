"""Eight-bit rows: the error bound, rows that are nearly nothing, and layers equal to their dequantized twins."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from llmlab.core.util import max_diff
from llmlab.model.lowbit import Int8Embedding, Int8Linear, dequantize, quantize_weight


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


@pytest.mark.parametrize("rows", [1, 5, 33])
@pytest.mark.parametrize("shape", [(96, 64), (10, 7)])
@pytest.mark.parametrize("dtype, limit", [(torch.float64, 1e-12), (torch.float32, 1e-4)])
def test_a_layer_is_its_dequantized_twin_forward_and_backward(rows, shape, dtype, limit):
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


def test_an_embedding_shares_its_integers_with_a_head():
    table = quantize_weight(torch.randn(20, 8))
    e, h = Int8Embedding(*table), Int8Linear(*table)
    assert e.qweight is h.qweight and torch.equal(e(torch.tensor([[3, 0]])), dequantize(*table)[torch.tensor([[3, 0]])])


@pytest.mark.parametrize(
    "q, s",
    [
        (torch.zeros(2, 2), torch.ones(2)),
        (torch.zeros(2, 2, dtype=torch.int8), torch.ones(3)),
        (torch.zeros(2, 2, dtype=torch.int8), torch.tensor([1.0, 0.0])),
        (torch.zeros(2, 2, dtype=torch.int8), torch.tensor([1.0, math.nan])),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(q, s):
    with pytest.raises(ValueError):
        Int8Linear(q, s)
    with pytest.raises(ValueError):
        Int8Embedding(q, s)
