"Rotary tables and turns against transformers, complex numbers and the claim that only distance counts."

import math

import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding, apply_rotary_pos_emb

from llmlab.core.util import assert_close, max_diff
from llmlab.model.attention import Attention, Where
from llmlab.model.mask import document_mask
from llmlab.model.positions import (
    LearnedPositions,
    alibi_bias,
    alibi_slopes,
    apply_rope,
    rope_frequencies,
    rope_tables,
    rotary,
    sinusoidal_positions,
)

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
    each = [apply_rope(x[b : b + 1], *exact(positions[b], 8)) for b in range(2)]
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


@pytest.mark.parametrize(
    "call, named",
    [
        (lambda: rope_tables(torch.arange(3), 7), "7"),
        (lambda: rope_tables(torch.arange(3), 0), "0"),
        (lambda: rope_tables(torch.arange(3), 8, dtype=torch.bfloat16), "bfloat16"),
        (lambda: rotary(torch.arange(1), 8)(torch.zeros(1, 1, 3, 8), torch.zeros(1, 1, 3, 8)), r"\(1, 8\).*\(3, 8\)"),
        (lambda: rope_frequencies(7), "7"),
        (lambda: rope_frequencies(8, dtype=torch.float16), "float16"),
        (lambda: sinusoidal_positions(4, 5), "5"),
        (lambda: sinusoidal_positions(-1, 4), "-1"),
        (lambda: alibi_slopes(0), "0"),
        (lambda: alibi_bias(torch.arange(3), -2), "-2"),
        (lambda: LearnedPositions(8, 4)(torch.arange(9)), r"0\.\.8 leave the table 0\.\.7"),
        (lambda: LearnedPositions(8, 4)(torch.tensor([[-1, 2]])), r"-1\.\.2"),
        (lambda: rotary(torch.arange(3), 6)(torch.zeros(1, 1, 3, 8), torch.zeros(1, 1, 3, 8)), r"\(3, 6\).*\(3, 8\)"),
    ],
)
def test_refusals_name_the_value(call, named):
    with pytest.raises(ValueError, match=named):
        call()


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_equal_to_transformers(parity, theta):
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters={"rope_type": "default", "rope_theta": theta})
    positions = torch.stack([torch.arange(40), torch.arange(40) % 7])
    theirs = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    q, k = torch.randn(2, 4, 40, 16), torch.randn(2, 2, 40, 16)
    parity(
        f"rotary tables, base {theta:,.0f}",
        "model.positions",
        "transformers LlamaRotaryEmbedding",
        transformers.__version__,
        max_diff(rope_tables(positions, 16, theta), theirs),
        1e-6,
    )
    parity(
        f"turned queries and keys, base {theta:,.0f}",
        "model.positions",
        "transformers apply_rotary_pos_emb",
        transformers.__version__,
        max_diff(rotary(positions, 16, theta)(q, k), apply_rotary_pos_emb(q, k, *theirs)),
        1e-6,
    )


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
    parity(
        "attention with rotary positions, output and gradients",
        "model.positions",
        "transformers LlamaAttention",
        transformers.__version__,
        gap,
        1e-12,
    )


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


LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 128, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
NTK = {"rope_type": "ntk", "factor": 4.0}


def reference(scaling, D, theta, length=None, seq_len=None):
    "Speeds and attention factor of transformers, the factor written as it wants it."
    length = length or int(scaling["factor"] * scaling.get("original_max_position_embeddings", 128))
    config = LlamaConfig(
        hidden_size=2 * D, num_attention_heads=2, max_position_embeddings=length, rope_parameters={"rope_theta": theta, **scaling}
    )
    return list(ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu", seq_len=seq_len))


widths, bases = st.integers(2, 64).map(lambda n: 2 * n), st.sampled_from([100.0, 1e4, 5e5, 1e6])
factors, lengths = st.floats(1, 64), st.sampled_from([16, 128, 2048, 8192])


@quick
@given(widths, bases, factors)
def test_linear_equals_transformers(D, theta, factor):
    rule = LINEAR | {"factor": factor}
    assert_close(list(rope_frequencies(D, theta, rule)), reference(rule, D, theta), 1e-6)


@quick
@given(
    widths,
    bases,
    factors,
    lengths,
    st.sampled_from([16, 32, 64]),
    st.sampled_from([0.5, 1, 4]),
    st.sampled_from([None, 0.8, 1.3]),
    st.booleans(),
)
def test_yarn_equals_transformers(D, theta, factor, length, fast, slow, attention, truncate):
    rule = YARN | {
        "factor": factor,
        "original_max_position_embeddings": length,
        "beta_fast": fast,
        "beta_slow": slow,
        "attention_factor": attention,
        "truncate": truncate,
    }
    assert_close(list(rope_frequencies(D, theta, rule)), reference(rule, D, theta), 1e-6)


@quick
@given(widths, bases, factors, lengths, st.floats(0.25, 4), st.floats(0.5, 8))
def test_llama3_equals_transformers(D, theta, factor, length, low, more):
    rule = LLAMA3 | {"factor": factor, "original_max_position_embeddings": length, "low_freq_factor": low, "high_freq_factor": low + more}
    assert_close(list(rope_frequencies(D, theta, rule)), reference(rule, D, theta), 2e-6)


@quick
@given(widths, bases, factors, st.integers(1, 16))
def test_ntk_is_transformers_dynamic_at_one_length(D, theta, factor, times):
    "At n times the trained length, dynamic scaling by f is a fixed base change by f n - (f - 1)."
    theirs = reference({"rope_type": "dynamic", "factor": factor}, D, theta, length=128, seq_len=128 * times)
    assert_close(list(rope_frequencies(D, theta, NTK | {"factor": factor * times - (factor - 1)})), theirs, 1e-6)


@pytest.mark.parametrize("name, rule", [("linear", LINEAR), ("YaRN", YARN), ("Llama 3", LLAMA3)])
def test_scaled_speeds_equal_transformers(parity, name, rule):
    gap = max(max_diff(list(rope_frequencies(D, theta, rule)), reference(rule, D, theta)) for D in (16, 64, 128) for theta in (1e4, 5e5))
    parity(
        f"rotary speeds and attention factor, {name}",
        "model.positions",
        "transformers ROPE_INIT_FUNCTIONS",
        transformers.__version__,
        gap,
        1e-6,
    )
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=1024, rope_parameters={"rope_theta": 1e4, **rule})
    positions = torch.stack([torch.arange(300), torch.arange(300) % 7])
    parity(
        f"rotary tables, {name}",
        "model.positions",
        "transformers LlamaRotaryEmbedding",
        transformers.__version__,
        max_diff(rope_tables(positions, 16, scaling=rule), LlamaRotaryEmbedding(config)(torch.zeros(1), positions)),
        1e-4,
    )


def test_base_change_equals_transformers(parity):
    theirs = reference({"rope_type": "dynamic", "factor": 1.0}, 64, 1e4, length=128, seq_len=512)
    parity(
        "rotary speeds, NTK-aware base",
        "model.positions",
        "transformers ROPE_INIT_FUNCTIONS",
        transformers.__version__,
        max_diff(list(rope_frequencies(64, 1e4, NTK)), theirs),
        1e-6,
    )


@pytest.mark.parametrize(
    "rule", [{"rope_type": "default"}, *({**r, "factor": 1} for r in (LINEAR, NTK, YARN, LLAMA3))], ids=lambda r: r["rope_type"]
)
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_a_factor_of_one_changes_nothing(rule, theta):
    plain = rope_tables(torch.arange(50), 16, theta, torch.float64)
    assert_close(rope_tables(torch.arange(50), 16, theta, torch.float64, rule), plain, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("theta", [10000.0, 500000.0, 123.0])
def test_plain_tables_are_bit_for_bit_those_of_before(dtype, theta):
    positions = torch.tensor([[0, 1, 2, 5000], [3, 0, 99999, 7]])
    pairs = torch.arange(0, 48, 2, dtype=dtype) / 48
    angle = positions[..., None].to(dtype) * (1.0 / theta**pairs)
    angle = torch.cat([angle, angle], -1)
    cos, sin = rope_tables(positions, 48, theta, dtype)
    assert torch.equal(cos, angle.cos()) and torch.equal(sin, angle.sin())


@quick
@given(st.floats(1, 64), st.integers(2, 32), st.integers(0, 99))
def test_every_rule_lies_between_plain_and_linear(factor, pairs, seed):
    plain = rope_frequencies(2 * pairs, dtype=torch.float64)[0]
    for rule in (NTK, YARN, LLAMA3):
        slower = plain / rope_frequencies(2 * pairs, scaling=rule | {"factor": factor}, dtype=torch.float64)[0]
        assert (slower >= 1 - 1e-12).all() and (slower <= factor * (1 + 1e-12)).all() and (slower.diff() >= -1e-12).all()


@pytest.mark.parametrize("rule", [LINEAR, NTK, YARN, LLAMA3], ids=lambda r: r["rope_type"])
def test_scaled_turns_keep_the_distance_and_give_gradients(rule):
    "Products of turned vectors know only the distance, times the attention factor squared; gradients as in complex numbers."
    q, k = torch.randn(2, 1, 2, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    omega, a = rope_frequencies(16, scaling=rule, dtype=torch.float64)
    z = lambda x, p: torch.complex(*x.chunk(2, -1)) * torch.polar(torch.full((), a, dtype=torch.float64), p[:, None] * omega)
    scores = lambda p: (z(q, p)[..., :, None, :] * z(k, p)[..., None, :, :].conj()).real.sum(-1)
    ours = lambda p: (lambda y: y[0] @ y[1].mT)(rotary(p, 16, dtype=torch.float64, scaling=rule)(q, k))
    positions, up = torch.tensor([0, 3, 4, 90, 700]), torch.randn(1, 2, 5, 5, dtype=torch.float64)
    both = [[s, *torch.autograd.grad(s, (q, k), up)] for s in (ours(positions), scores(positions))]
    assert_close(*both, 1e-11)
    assert_close(ours(positions + 1000), ours(positions), 1e-10)
    assert_close(ours(positions).diagonal(dim1=-2, dim2=-1), (q * k).sum(-1) * a**2, 1e-11)


@pytest.mark.parametrize(
    "rule, named",
    [
        ("yarn", "'yarn'.*dict"),
        ({}, "None is not known.*linear"),
        ({"rope_type": "yarm", "factor": 2}, "'yarm' is not known.*'default', 'linear', 'ntk', 'yarn', 'llama3'"),
        ({"rope_type": ["yarn"]}, r"\['yarn'\] is not known"),
        (LINEAR | {"beta_fast": 3}, r"'linear' has no key 'beta_fast'; known are \['factor'\]"),
        (LINEAR | {"rope_theta": 1e4}, "rope_theta.*argument theta"),
        ({"rope_type": "linear"}, "'linear' lacks the key 'factor'"),
        ({"rope_type": "linear", "factor": None}, "lacks the key 'factor'"),
        ({"rope_type": "yarn", "factor": 2}, "original_max_position_embeddings"),
        ({k: v for k, v in LLAMA3.items() if k != "low_freq_factor"}, "low_freq_factor"),
        (LINEAR | {"factor": 0.5}, "factor 0.5 .*1 or more"),
        (NTK | {"factor": "4"}, "factor '4'"),
        (YARN | {"factor": math.inf}, "factor inf"),
        (YARN | {"factor": math.nan}, "factor nan"),
        (YARN | {"original_max_position_embeddings": 0}, "original_max_position_embeddings 0"),
        (YARN | {"beta_fast": 1, "beta_slow": 2}, "beta_fast 1 .*beta_slow 2"),
        (LLAMA3 | {"low_freq_factor": 4}, "high_freq_factor 4.0 .*low_freq_factor 4"),
    ],
)
def test_scaling_refusals_name_the_value(rule, named):
    with pytest.raises(ValueError, match=named):
        rotary(torch.arange(3), 8, scaling=rule)


def test_base_change_needs_two_pairs():
    with pytest.raises(ValueError, match="head_dim 2"):
        rope_frequencies(2, scaling=NTK)


def test_scaling_is_not_changed():
    rule = dict(YARN)
    rope_tables(torch.arange(3), 8, scaling=rule)
    assert rule == YARN


@quick
@given(st.integers(0, 40), st.integers(1, 12))
def test_sinusoidal_is_the_double_loop(T, pairs):
    C, expected = 2 * pairs, torch.zeros(T, 2 * pairs, dtype=torch.float64)
    for p in range(T):
        for i in range(pairs):
            expected[p, 2 * i], expected[p, 2 * i + 1] = math.sin(p / 10000 ** (2 * i / C)), math.cos(p / 10000 ** (2 * i / C))
    assert_close(sinusoidal_positions(T, C, torch.float64), expected, 1e-12)
    assert sinusoidal_positions(T, C).shape == (T, C) and sinusoidal_positions(T, C).dtype == torch.float32


@pytest.mark.parametrize("H", [*range(1, 21), 40, 71, 112])
def test_alibi_slopes_and_bias_equal_bloom(H):
    theirs = build_alibi_tensor(torch.ones(1, 12), H, torch.float32)  # (H,1,12)
    assert_close(alibi_slopes(H)[:, None, None] * torch.arange(12), theirs, 1e-6)
    weights = lambda bias: (bias + torch.full((12, 12), -torch.inf).triu(1)).softmax(-1)
    assert_close(weights(alibi_bias(torch.arange(12), H)), weights(theirs), 1e-6)


def test_alibi_equals_transformers(parity):
    gap = max(
        max_diff(alibi_slopes(H)[:, None, None] * torch.arange(64), build_alibi_tensor(torch.ones(1, 64), H, torch.float32))
        for H in (4, 8, 12, 71)
    )
    parity("ALiBi slopes times positions", "model.positions", "transformers build_alibi_tensor", transformers.__version__, gap, 1e-5)


@quick
@given(st.integers(1, 6), st.integers(1, 7), st.integers(0, 99))
def test_alibi_in_the_fused_kernel_is_the_loop(H, T, seed):
    generator = torch.Generator().manual_seed(seed)
    q, k, v, up = torch.randn(4, 1, H, T, 4, dtype=torch.float64, generator=generator)
    for x in (q, k, v):
        x.requires_grad_()
    rows, slopes = [], alibi_slopes(H, torch.float64).tolist()
    for h in range(H):
        for t in range(T):
            scores = torch.stack([q[0, h, t] @ k[0, h, s] / 2 - slopes[h] * (t - s) for s in range(t + 1)])
            rows.append(scores.softmax(-1) @ v[0, h, : t + 1])
    naive = torch.stack(rows).view(1, H, T, 4)
    fused = F.scaled_dot_product_attention(q, k, v, attn_mask=alibi_bias(torch.arange(T), H, dtype=torch.float64))
    assert_close(*[[y, *torch.autograd.grad(y, (q, k, v), up)] for y in (fused, naive)], 1e-11)


def test_alibi_of_packed_documents_and_of_a_cache():
    "A document behind others gets what it gets alone; a new token against a cache gets the last row."
    doc_ids, positions = torch.tensor([[0, 0, 0, 1, 1], [0, 1, 1, 1, 1]]), torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]])
    bias = alibi_bias(positions, 3, mask=document_mask(doc_ids))
    assert bias.shape == (2, 3, 5, 5) and bias.dtype == torch.float32
    assert torch.equal(bias[0, :, 3:, 3:], alibi_bias(torch.arange(2), 3)) and torch.equal(
        bias[1, :, 1:, 1:], alibi_bias(torch.arange(4), 3)
    )
    assert torch.equal(bias.isinf(), ~document_mask(doc_ids).expand(2, 3, 5, 5))
    assert torch.equal(alibi_bias(torch.tensor([6, 7]), 3, torch.arange(8)), alibi_bias(torch.arange(8), 3)[:, 6:])
    assert alibi_bias(torch.arange(4), 2, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_learned_positions_are_an_embedding():
    torch.manual_seed(0)
    ours, theirs = LearnedPositions(8, 4).double(), torch.nn.Embedding(8, 4).double()
    theirs.load_state_dict(ours.state_dict())
    positions, up = torch.tensor([[0, 1, 7], [0, 0, 2]]), torch.randn(2, 3, 4, dtype=torch.float64)
    assert torch.equal(ours(positions), theirs(positions)) and ours(positions[:0]).shape == (0, 3, 4)
    assert torch.equal(*[torch.autograd.grad(m(positions), m.weight, up)[0] for m in (ours, theirs)])
