"Norm, MLP and block against transformers and torch; packed rows against separate rows."

import warnings

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from llmlab.core.reduce import token_logprobs
from llmlab.core.streams import Streams
from llmlab.core.util import assert_close, max_diff
from llmlab.model.attention import Where
from llmlab.model.layers import MLP, Block, RMSNorm
from llmlab.model.mask import document_mask
from llmlab.model.positions import rope_tables, rotary

quick = settings(max_examples=25, deadline=None)
exact = lambda positions: rotary(positions, 8, dtype=torch.float64)


def gradients(y, x, module, up):
    names = ["input", *(n for n, _ in module.named_parameters())]
    return {"output": y, **dict(zip(names, torch.autograd.grad(y, [x, *module.parameters()], up), strict=True))}


def random_norm(C, dtype, seed=0):
    norm = RMSNorm(C).to(dtype)
    with torch.no_grad(): norm.weight.copy_(torch.randn(C, generator=torch.Generator().manual_seed(seed)))
    return norm


@quick
@given(st.integers(1, 17), st.floats(-4, 4), st.integers(0, 99))
def test_norm_is_its_formula(C, exponent, seed):
    norm = random_norm(C, torch.float64, seed)
    x = (10**exponent * torch.randn(3, C, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))).requires_grad_()
    slow = torch.stack([v / (sum(a * a for a in v) / C + 1e-5) ** 0.5 * norm.weight for v in x])
    up = torch.randn(3, C, dtype=torch.float64)
    fast, slow = gradients(norm(x), x, norm, up), gradients(slow, x, norm, up)
    assert max(max_diff(fast[n], slow[n]) / (1 + slow[n].abs().max().item()) for n in fast) < 1e-12


@pytest.mark.parametrize("reference", [LlamaRMSNorm, nn.RMSNorm])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)])  # a step of bfloat16 is 2**-8 of a number
def test_norm_equals_references(parity, reference, dtype, tolerance):
    ours, theirs = random_norm(64, dtype), reference(64, eps=1e-5).to(dtype)
    theirs.load_state_dict(ours.state_dict())
    g = torch.Generator().manual_seed(1)
    x = (torch.randn(40, 64, generator=g) * torch.logspace(-2, 2, 40)[:, None]).to(dtype).requires_grad_()
    up = torch.randn(40, 64, generator=g).to(dtype)
    a, b = gradients(ours(x), x, ours, up), gradients(theirs(x), x, theirs, up)
    gap = max(max_diff(a[n], b[n]) / b[n].abs().max().item() for n in a)
    library = transformers if reference is LlamaRMSNorm else torch
    parity(f"RMSNorm in {str(dtype)[6:]}, output and gradients, relative", "model.layers",
           f"{library.__name__} {reference.__name__}", library.__version__, gap, tolerance)


def test_norm_of_nothing_and_of_too_much():
    assert not RMSNorm(8)(torch.zeros(2, 8)).any()
    x = torch.zeros(1, 8, requires_grad=True)
    RMSNorm(8)(x).sum().backward()
    assert x.grad.isfinite().all()
    assert_close(RMSNorm(8).half()(torch.full((1, 8), 300.0).half()), torch.ones(1, 8), 1e-3)
    assert_close(RMSNorm(8)(torch.full((1, 8), 1e15)), torch.ones(1, 8), 1e-5)


@pytest.mark.parametrize("x_type, weight_type", [
    (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float64, torch.float32)])
def test_norm_keeps_the_type_of_its_input_without_a_word(x_type, weight_type):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = random_norm(16, weight_type)(torch.randn(2, 16, dtype=x_type))
    assert y.dtype == x_type


def test_mlp_equals_transformers(parity):
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=32, intermediate_size=96)
    ours, theirs = MLP(32, 96).double(), LlamaMLP(config).double()
    theirs.load_state_dict(ours.state_dict())
    x, up = torch.randn(5, 32, dtype=torch.float64, requires_grad=True), torch.randn(5, 32, dtype=torch.float64)
    parity("SwiGLU MLP, output and gradients", "model.layers", "transformers LlamaMLP", transformers.__version__,
           max_diff(gradients(ours(x), x, ours, up), gradients(theirs(x), x, theirs, up)), 1e-12)


THEIR_NAMES = {"attention_norm": "input_layernorm", "attention.": "self_attn.", "mlp_norm": "post_attention_layernorm"}


def their_name(name):
    for ours, theirs in THEIR_NAMES.items(): name = name.replace(ours, theirs)
    return name


def pair(heads, dtype, exact_norms):
    "Our block and transformers' layer with the same weights; theirs with torch's norms where float32 inside would hide a difference."
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=32, intermediate_size=96, num_attention_heads=heads[0], num_key_value_heads=heads[1],
                         rms_norm_eps=1e-5, attn_implementation="sdpa")
    ours, theirs = Block(32, *heads, 96), LlamaDecoderLayer(config, 0)
    for p in ours.parameters(): nn.init.normal_(p, mean=float(p.ndim == 1), std=0.2)
    if exact_norms: theirs.input_layernorm, theirs.post_attention_layernorm = nn.RMSNorm(32, 1e-5), nn.RMSNorm(32, 1e-5)
    theirs.load_state_dict({their_name(n): p for n, p in ours.state_dict().items()})
    return ours.to(dtype), theirs.to(dtype), config


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_block_equals_transformers(parity, heads, dtype, tolerance):
    ours, theirs, config = pair(heads, dtype, exact_norms=dtype == torch.float64)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5, 6]])
    mask = document_mask(torch.tensor([[0, 0, 0, 1, 1, 1, -1], [0] * 7]))
    x, up = torch.randn(2, 7, 32, dtype=dtype, requires_grad=True), torch.randn(2, 7, 32, dtype=dtype)
    tables = rope_tables(positions, 8, dtype=torch.float64) if dtype == torch.float64 else LlamaRotaryEmbedding(config)(x, positions)
    mine = gradients(ours(x, Where(rotary(positions, 8, dtype=dtype), mask)), x, ours, up)
    reference = gradients(theirs(x, attention_mask=mask, position_embeddings=tables), x, theirs, up)
    gap = max(max_diff(g, reference[their_name(n)]) / (1 + g.abs().max().item()) for n, g in mine.items())
    parity(f"block in {str(dtype)[6:]}, {heads[0]} heads on {heads[1]}, output and every gradient, relative", "model.layers",
           "transformers LlamaDecoderLayer", transformers.__version__, gap, tolerance)


class Tiny(nn.Module):
    "Two blocks between an embedding and a head."

    def __init__(self, V=17):
        super().__init__()
        self.embed, self.head = nn.Embedding(V, 32), nn.Linear(32, V, bias=False)
        self.blocks = nn.ModuleList(Block(32, 4, 2, 64) for _ in range(2))

    def forward(self, ids, positions, mask=None):
        x, where = self.embed(ids), Where(exact(positions), mask)
        for i, block in enumerate(self.blocks): x = block(x, where, i)
        return self.head(x)


def packed_and_separate(lengths, seed):
    torch.manual_seed(seed)
    model, documents = Tiny().double(), [torch.randint(17, (1, n)) for n in lengths]
    row, positions = torch.cat(documents, 1), torch.cat([torch.arange(n) for n in lengths])
    mask = document_mask(torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None])
    return model, documents, row, positions, mask


def test_packed_row_equals_separate_rows_in_loss_and_gradient():
    model, documents, row, positions, mask = packed_and_separate([3, 5, 1, 7], 0)
    real = positions[1:] > 0  # the first token of a document is no target of the document before
    packed = -token_logprobs(model(row, positions, mask)[:, :-1], row[:, 1:])[:, real].sum()
    single = sum(-token_logprobs(model(d, torch.arange(d.shape[1]))[:, :-1], d[:, 1:]).sum() for d in documents)
    assert_close(packed, single, 1e-10, "sum of token losses")
    a, b = (torch.autograd.grad(loss, list(model.parameters())) for loss in (packed, single))
    assert_close(a, b, 1e-10, "gradients")


@quick
@given(st.lists(st.integers(1, 6), min_size=2, max_size=4), st.integers(0, 99), st.data())
def test_replacing_one_document_changes_no_logit_of_another(lengths, seed, data):
    model, _, row, positions, mask = packed_and_separate(lengths, seed)
    which = data.draw(st.integers(0, len(lengths) - 1))
    start = sum(lengths[:which])
    mine = torch.zeros(row.shape[1], dtype=torch.bool)
    mine[start:start + lengths[which]] = True
    changed = torch.where(mine, (row + 1) % 17, row)
    before, after = model(row, positions, mask), model(changed, positions, mask)
    assert torch.equal(before[:, ~mine], after[:, ~mine]) and not torch.equal(before[:, mine], after[:, mine])


def test_padding_is_finite_and_touches_nothing():
    model, _, row, positions, _ = packed_and_separate([5], 0)
    padded, places = torch.cat([row, torch.zeros(1, 3, dtype=torch.int64)], 1), torch.cat([positions, torch.zeros(3, dtype=torch.int64)])
    y = model(padded, places, document_mask(torch.tensor([[0] * 5 + [-1] * 3])))
    assert y.isfinite().all()
    assert_close(y[:, :5], model(row, positions), 1e-12)


def test_dropout_comes_from_its_stream_and_spares_evaluation():
    torch.manual_seed(0)
    block, x, where = Block(32, 4, None, 64, dropout=0.2), torch.randn(2, 5, 32), Where(rotary(torch.arange(5), 8))
    outputs = []
    for _ in range(2):
        streams = Streams(7)
        with streams.use("dropout"): outputs.append((block(x, where), block(x, where)))
    (a, b), again = outputs
    assert torch.equal(a, again[0]) and torch.equal(b, again[1]) and not torch.equal(a, b)
    assert torch.equal(block.eval()(x, where), block(x, where))


def test_dropout_falls_on_what_each_half_adds():
    "One half silenced, the other must still be dropped; and what is kept is the input plus a scaled addition."
    for silent in ("attention.o_proj", "mlp.down_proj"):
        torch.manual_seed(0)
        block, x, where = Block(32, 4, None, 64, dropout=0.5), torch.randn(2, 5, 32), Where()
        nn.init.zeros_(block.get_submodule(silent).weight)
        added, whole = block(x, where) - x, block.eval()(x, where) - x
        dropped = added.abs() < 1e-6
        assert 0.3 < dropped.float().mean() < 0.7, silent
        assert_close(added[~dropped], 2 * whole[~dropped], 1e-5, silent)


def test_cache_is_told_which_layer_asks():
    asked = []

    class Cache:
        def update(self, layer, k, v):
            asked.append(layer)
            return k, v

    block, x = Block(32, 4, 2, 64), torch.randn(1, 3, 32)
    for layer in (0, 5): block(x, Where(cache=Cache()), layer)
    assert asked == [0, 5]


def test_stream_stays_in_float32_under_autocast():
    torch.manual_seed(0)
    block, x, where = Block(32, 4, 2, 64), torch.randn(2, 9, 32), Where(rotary(torch.arange(9), 8))
    seen = []
    for part in (block.attention, block.mlp): part.register_forward_hook(lambda m, i, o: seen.append((i[0].dtype, o.dtype)))
    with torch.autocast("cpu", torch.bfloat16): y = block(x, where)
    assert y.dtype == torch.float32 and seen == [(torch.float32, torch.bfloat16)] * 2
    assert_close(y, block(x, where), 0.05)


def test_names_that_files_and_adapters_rely_on():
    linears = [f"attention.{n}_proj.weight" for n in "qkvo"], [f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")]
    assert list(Block(32, 4, 2, 64).state_dict()) == ["attention_norm.weight", *linears[0], "mlp_norm.weight", *linears[1]]
