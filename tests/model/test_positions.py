"Rotary tables and turns against transformers, complex numbers and the claim that only distance counts."

import math

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding, apply_rotary_pos_emb

from llmlab.core.util import assert_close, max_diff
from llmlab.model.attention import Attention, Where
from llmlab.model.mask import document_mask
from llmlab.model.positions import apply_rope, rope_tables, rotary

quick = settings(max_examples=40, deadline=None)
exact = lambda positions, D, theta=10000.0: rope_tables(torch.as_tensor(positions), D, theta, torch.float64)


@quick
@given(st.lists(st.integers(0, 5000), min_size=1, max_size=6), st.integers(1, 8), st.sampled_from([100.0, 1e4, 1e6]), st.integers(0, 99))
def test_turn_is_a_complex_product(positions, pairs, theta, seed):
    D, T = 2 * pairs, len(positions)
    x = torch.randn(2, 3, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    omega = torch.tensor([theta ** (-2 * i / D) for i in range(pairs)], dtype=torch.float64)
    angle = torch.tensor(positions)[:, None] * omega
    z = torch.complex(x[..., :pairs], x[..., pairs:]) * torch.polar(torch.ones_like(angle), angle)
    y, expected, up = apply_rope(x, *exact(positions, D, theta)), torch.cat([z.real, z.imag], -1), torch.randn(2, 3, T, D).double()
    assert_close([y, torch.autograd.grad(y, x, up)[0]], [expected, torch.autograd.grad(expected, x, up)[0]], 1e-11)


@quick
@given(st.integers(0, 2000), st.integers(0, 2000), st.integers(0, 5000), st.integers(0, 99))
def test_products_know_only_the_distance(p, s, shift, seed):
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).unbind()
    score = lambda a, b: (apply_rope(q, *exact([a], 16)) * apply_rope(k, *exact([b], 16))).sum()
    assert_close(score(p, s), score(p + shift, s + shift), 1e-10)


@quick
@given(st.integers(0, 10000), st.integers(0, 99))
def test_a_turn_keeps_length_and_can_be_undone(p, seed):
    x = torch.randn(1, 2, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    cos, sin = exact([p], 8)
    y = apply_rope(x, cos, sin)
    assert_close(y.norm(dim=-1), x.norm(dim=-1), 1e-12)
    assert_close(apply_rope(y, cos, -sin), x, 1e-12)


def test_position_zero_changes_nothing():
    x = torch.randn(1, 2, 3, 8)
    assert torch.equal(apply_rope(x, *rope_tables(torch.zeros(3, dtype=torch.int64), 8)), x)


def test_rows_have_positions_of_their_own():
    positions, x = torch.tensor([[0, 1, 2, 3], [0, 1, 0, 1]]), torch.randn(2, 3, 4, 8, dtype=torch.float64)
    each = [apply_rope(x[b:b + 1], *exact(positions[b], 8)) for b in range(2)]
    assert torch.equal(apply_rope(x, *exact(positions, 8)), torch.cat(each))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_result_has_the_type_of_its_input(dtype):
    q, k = rotary(torch.arange(5), 8)(torch.randn(1, 4, 5, 8, dtype=dtype), torch.randn(1, 2, 5, 8, dtype=dtype))
    assert q.dtype == k.dtype == dtype and q.shape == (1, 4, 5, 8) and k.shape == (1, 2, 5, 8)


def test_float32_tables_hold_long_positions():
    positions = torch.tensor([10, 1000, 100_000])
    gap = [max_diff(a, b) for a, b in zip(rope_tables(positions, 64), exact(positions, 64), strict=True)]
    assert max(gap) < 0.01
    assert max_diff(rope_tables(positions[:2], 64), exact(positions[:2], 64)) < 1e-4


@pytest.mark.parametrize("call, named", [
    (lambda: rope_tables(torch.arange(3), 7), "7"),
    (lambda: rope_tables(torch.arange(3), 0), "0"),
    (lambda: rope_tables(torch.arange(3), 8, dtype=torch.bfloat16), "bfloat16"),
    (lambda: rotary(torch.arange(1), 8)(torch.zeros(1, 1, 3, 8), torch.zeros(1, 1, 3, 8)), r"\(1, 8\).*\(3, 8\)"),
    (lambda: rotary(torch.arange(3), 6)(torch.zeros(1, 1, 3, 8), torch.zeros(1, 1, 3, 8)), r"\(3, 6\).*\(3, 8\)"),
])
def test_refusals_name_the_value(call, named):
    with pytest.raises(ValueError, match=named): call()


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_equal_to_transformers(parity, theta):
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters={"rope_type": "default", "rope_theta": theta})
    positions = torch.stack([torch.arange(40), torch.arange(40) % 7])
    theirs = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    q, k = torch.randn(2, 4, 40, 16), torch.randn(2, 2, 40, 16)
    parity(f"rotary tables, base {theta:,.0f}", "model.positions", "transformers LlamaRotaryEmbedding", transformers.__version__,
           max_diff(rope_tables(positions, 16, theta), theirs), 1e-6)
    parity(f"turned queries and keys, base {theta:,.0f}", "model.positions", "transformers apply_rotary_pos_emb", transformers.__version__,
           max_diff(rotary(positions, 16, theta)(q, k), apply_rotary_pos_emb(q, k, *theirs)), 1e-6)


def test_attention_with_positions_equals_transformers(parity):
    "Float64 throughout: the tables are handed over, so nothing is rounded to float32."
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, attn_implementation="sdpa")
    ours, theirs = Attention(32, 4, 2).double(), LlamaAttention(config, 0).double()
    theirs.load_state_dict(ours.state_dict())
    positions, mask = torch.tensor([[0, 1, 2, 0, 1, 2, 3]]), document_mask(torch.tensor([[0, 0, 0, 1, 1, 1, 1]]))
    x, up = torch.randn(1, 7, 32, dtype=torch.float64, requires_grad=True), torch.randn(1, 7, 32, dtype=torch.float64)
    results = lambda y, module: [y, *torch.autograd.grad(y, [x, *module.parameters()], up)]
    mine = results(ours(x, Where(rotary(positions, 8, dtype=torch.float64), mask)), ours)
    gap = max_diff(mine, results(theirs(x, exact(positions, 8), mask)[0], theirs))
    parity("attention with rotary positions, output and gradients", "model.positions", "transformers LlamaAttention",
           transformers.__version__, gap, 1e-12)


def test_other_pairing_needs_reordered_channels():
    "Turning neighbours, as GGUF and the paper do, gives other scores until the channels of q and k are reordered."
    q, k = torch.randn(2, 1, 2, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind()
    angle = torch.arange(6)[:, None] * 10000 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    spin = torch.polar(torch.ones_like(angle), angle)
    neighbours = lambda x: torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * spin).flatten(-2)
    halves = apply_rope(q, *exact(torch.arange(6), 8)) @ apply_rope(k, *exact(torch.arange(6), 8)).mT
    order = torch.arange(8).view(2, 4).T.flatten()
    assert max_diff(neighbours(q) @ neighbours(k).mT, halves) > 0.1
    assert_close(neighbours(q[..., order]) @ neighbours(k[..., order]).mT, halves, 1e-12)


def test_order_matters_only_with_positions():
    torch.manual_seed(0)
    layer, x = Attention(16, 2).double(), torch.randn(1, 6, 16, dtype=torch.float64)
    shuffled = x[:, [2, 0, 4, 1, 3, 5]]
    turn = Where(rotary(torch.arange(6), 8, dtype=torch.float64))
    assert_close(layer(shuffled, Where())[:, -1], layer(x, Where())[:, -1], 1e-12)
    assert max_diff(layer(shuffled, turn)[:, -1], layer(x, turn)[:, -1]) > 1e-3


def test_wavelengths():
    cos, _ = exact(torch.arange(100), 8)
    assert_close(cos[:, 1], torch.tensor([math.cos(t * 0.1) for t in range(100)], dtype=torch.float64), 1e-12)
    assert_close(cos[:, 5], cos[:, 1], 0)
