"""Every token once: windows, batches, borders, and the number that transformers would give."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from llmlab.core.util import max_diff
from llmlab.evaluate.perplexity import Perplexity, bits_per_byte, evaluate_documents, perplexity, token_losses, windows
from llmlab.model.generate import evaluating
from llmlab.model.transformer import ModelConfig, Transformer


def small(dtype=torch.float64, **kw):
    shape = dict(vocab_size=31, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, context=12)
    return Transformer(ModelConfig(**shape | kw)).to(dtype)


def random_docs(lengths, seed=0, V=31):
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(V, (n,), generator=g) for n in lengths]


def uniform(V): return lambda ids: torch.zeros(*ids.shape, V, dtype=torch.float64)


class Planted(nn.Module):
    "Gives the token that follows i in 0, 1, 2, ... a loss of `losses[i]` nats, and remembers what it was asked."

    def __init__(self, losses):
        super().__init__()
        self.losses, self.asked = torch.tensor(losses, dtype=torch.float64), []

    def forward(self, ids):
        self.asked.append(ids.clone())
        V = len(self.losses) + 1
        p = torch.exp(-self.losses)[ids.clamp(max=V - 2)]  # (B,T): of token ids + 1, the rest is spread over the others
        q = ((1 - p) / (V - 1))[..., None].expand(*ids.shape, V).clone()
        return q.scatter(-1, (ids + 1).clamp(max=V - 1)[..., None], p[..., None]).log()


# counting


def test_windows_of_four_and_one():
    model = Planted([1.0, 1.0, 1.0, 1.0, 3.0])
    result = perplexity(model, range(6), window=4, stride=4)
    assert (result.tokens, round(result.nll, 9)) == (5, 7.0)
    assert round(result.perplexity, 4) == 4.0552
    assert round((Perplexity(4.0, 4) + Perplexity(3.0, 1)).perplexity, 4) == 4.0552


def test_twenty_tokens_window_ten_stride_five():
    model = Planted([float(i) / 10 + 0.1 for i in range(19)])
    losses = token_losses(model, [range(20)], 10, 5)[0]
    assert perplexity(model, range(20), 10, 5).tokens == 19
    assert torch.allclose(losses, model.losses, atol=1e-9, rtol=0)
    assert max(ids.shape[1] for ids in model.asked) == 10


@settings(deadline=None, max_examples=150)
@given(st.integers(2, 80), st.integers(1, 40), st.data())
def test_every_target_once(length, window, data):
    stride = data.draw(st.integers(1, window))
    spans = windows(length, window, stride)
    assert [i for start, stop, first in spans for i in range(first, stop)] == list(range(length - 1))
    assert all(start <= first < stop <= start + window for start, stop, first in spans)
    context = [first - start for start, stop, first in spans[1:]]
    assert all(c >= window - stride for c in context)
    if window >= length - 1: assert len(spans) == 1


@pytest.mark.parametrize("stride", [0, -1, 11])
def test_strides_that_would_loop_or_skip(stride):
    with pytest.raises(ValueError, match=f"stride is {stride}"): perplexity(uniform(31), range(20), 10, stride)
    with pytest.raises(ValueError, match=f"stride is {stride}"): evaluate_documents(uniform(31), [range(20)], 9, 10, stride)


@pytest.mark.parametrize("ids", [[], [3]])
def test_nothing_to_predict(ids):
    with pytest.raises(ValueError, match=f"{len(ids)} tokens has nothing to predict"): perplexity(uniform(31), ids, 10, 5)


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 40), st.integers(2, 30), st.integers(1, 20), st.data())
def test_a_uniform_model_gives_v(length, V, window, data):
    stride = data.draw(st.integers(1, window))
    ids = data.draw(st.lists(st.integers(0, V - 1), min_size=length, max_size=length))
    assert math.isclose(perplexity(uniform(V), ids, window, stride).perplexity, V, rel_tol=1e-12)


def test_a_window_that_holds_the_text_is_one_pass():
    model, ids = small(), random_docs([12])[0]
    with torch.no_grad(): whole = nn.functional.cross_entropy(model(ids[None, :-1])[0], ids[1:], reduction="sum").item()
    for window, stride in ((11, 1), (11, 11), (12, 5)): assert abs(perplexity(model, ids, window, stride).nll - whole) < 1e-12


# equal to slower truths


def naive(model, ids, window, stride):
    "One forward pass per token over what its window holds before it; softmax by hand."
    out = []
    with torch.no_grad():
        for start, stop, first in windows(len(ids), window, stride):
            for i in range(first, stop):
                p = model(ids[None, start:i + 1])[0, -1].softmax(-1)
                out.append(-math.log(p[ids[i + 1]]))
    return torch.tensor(out, dtype=torch.float64)


@pytest.mark.parametrize("batch_size", [1, 3, 32])
@pytest.mark.parametrize("stride", [1, 5, 12])
def test_equal_to_one_token_at_a_time(parity, batch_size, stride):
    model, docs = small(), random_docs([2, 30, 13, 12, 3, 2, 12, 25])
    ours = token_losses(model, docs, 12, stride, batch_size)
    theirs = [naive(model, d, 12, stride) for d in docs]
    assert [len(x) for x in ours] == [len(d) - 1 for d in docs]
    parity(f"windowed loss of every token, stride {stride}, batches of {batch_size}", "llmlab.evaluate.perplexity",
           "a token at a time, float64", torch.__version__, max_diff(ours, theirs), 1e-12)


def llama_like(model):
    from transformers import LlamaConfig, LlamaForCausalLM

    c = model.config
    llama = LlamaForCausalLM(LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size, num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads, max_position_embeddings=c.context, rms_norm_eps=c.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta}, tie_word_embeddings=c.tie_embeddings, bos_token_id=None,
        eos_token_id=None, pad_token_id=None))
    parts = (("blocks.", "layers."), ("attention_norm", "input_layernorm"), ("mlp_norm", "post_attention_layernorm"),
             ("attention.", "self_attn."))

    def their(name):
        for a, b in parts: name = name.replace(a, b)
        return "lm_head.weight" if name == "head.weight" else f"model.{name}"

    llama.load_state_dict({their(name): x for name, x in model.state_dict().items()}, strict=True)
    return llama.eval()


def test_equal_to_transformers_loss(parity):
    import transformers

    model = small(torch.float32, init_std=0.2)
    llama, ids = llama_like(model), random_docs([40])[0]
    total = 0.0
    for start, stop, first in windows(40, 12, 5):
        labels = ids[start:stop + 1].clone()
        labels[:first + 1 - start] = -100
        with torch.no_grad(): loss = llama(ids[None, start:stop + 1], labels=labels[None]).loss
        total += loss.item() * (stop - first)
    ours = perplexity(model, ids, 12, 5)
    assert abs(ours.mean - math.log(31)) > 0.05  # not a model that any mistake would fit
    parity("mean loss over sliding windows, equal weights", "llmlab.evaluate.perplexity", "transformers Llama's loss",
           transformers.__version__, abs(ours.mean - total / 39), 1e-5)
    parity("mean loss of a transformers Llama, measured by us", "llmlab.evaluate.perplexity", "transformers Llama's loss",
           transformers.__version__, abs(perplexity(llama, ids, 12, 5).mean - total / 39), 1e-5)


# measuring changes nothing


def test_modes_gradients_and_randomness_are_left_alone():
    model = small(dropout=0.5)
    model.blocks[0].eval()
    modes, state, rng = [m.training for m in model.modules()], {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    ids = random_docs([30])[0]
    first, second = (token_losses(model, [ids], 12, 6)[0] for _ in range(2))
    assert torch.equal(first, second) and not first.requires_grad
    assert [m.training for m in model.modules()] == modes and torch.equal(torch.get_rng_state(), rng)
    assert max_diff(model.state_dict(), state) == 0.0 and all(p.grad is None for p in model.parameters())
    assert torch.equal(first, token_losses(model.eval(), [ids], 12, 6)[0])


def test_modes_come_back_after_an_error():
    model = small()
    with pytest.raises(ValueError, match="context of 12"): perplexity(model, random_docs([30])[0], 13, 13)
    assert model.training and torch.is_grad_enabled()
    with pytest.raises(KeyError), evaluating(model): raise KeyError
    assert model.training


def test_bf16_is_near_and_is_used():
    model, ids = small(torch.float32, init_std=0.2), random_docs([60])[0]
    fp32, bf16 = (perplexity(model, ids, 12, 6, precision=p).mean for p in ("fp32", "bf16"))
    assert fp32 != bf16 and abs(fp32 - bf16) < 0.05
    with pytest.raises(ValueError, match="fp16"): perplexity(model, ids, 12, 6, precision="fp16")


# documents


def test_documents_are_a_sum_of_texts():
    model, docs = small(), random_docs([5, 1, 30, 2, 0, 17])
    result = evaluate_documents(model, docs, n_bytes=100, window=12, stride=4, batch_size=3)
    parts = [perplexity(model, d, 12, 4) for d in docs if len(d) > 1]
    assert math.isclose(result["nll"], sum(p.nll for p in parts), rel_tol=1e-12)
    assert result["tokens"] == sum(p.tokens for p in parts) == 50 and result["unscored"] == 5 and result["bytes"] == 100
    assert math.isclose(result["perplexity"], math.exp(result["nll"] / 50), rel_tol=1e-12)
    assert math.isclose(result["bits_per_byte"], result["nll"] / math.log(2) / 100, rel_tol=1e-12)


def test_order_of_documents_does_not_matter():
    model, docs = small(), random_docs([5, 30, 2, 17, 9])
    there, back = (evaluate_documents(model, d, 100, 12, 4) for d in (docs, docs[::-1]))
    assert math.isclose(there.pop("nll"), back.pop("nll"), rel_tol=1e-13)
    assert there["tokens"] == back["tokens"]


def test_a_start_token_pays_for_every_token():
    docs = random_docs([5, 1, 0, 9])
    result = evaluate_documents(uniform(32), docs, 10, 12, 4, start_id=31)
    assert result["tokens"] == 15 and result["unscored"] == 0
    assert math.isclose(result["bits_per_byte"], 15 * 5 / 10)


def test_same_bits_whatever_the_tokenizer():
    "Uniform over 256 bytes, and over 65,536 pairs of bytes, are one model: 8 bits per byte."
    text = bytes(range(200))
    single = evaluate_documents(uniform(256), [list(text)], 200, 16, 8, start_id=0)
    pairs = evaluate_documents(uniform(65536), [[a * 256 + b for a, b in zip(text[::2], text[1::2], strict=True)]], 200, 16, 8, start_id=0)
    assert math.isclose(single["bits_per_byte"], 8.0) and math.isclose(pairs["bits_per_byte"], 8.0)
    assert math.isclose(single["perplexity"], 256) and math.isclose(pairs["perplexity"], 65536)


def test_nothing_to_score_is_an_error():
    for docs in ([], [[]], [[1], [2]]):
        with pytest.raises(ValueError, match=f"{len(docs)} documents, and no token"): evaluate_documents(uniform(31), docs, 10, 12, 4)
    with pytest.raises(ValueError, match="n_bytes is 0"): evaluate_documents(uniform(31), [[1, 2]], 0, 12, 4)
    with pytest.raises(ValueError, match="n_bytes is 0"): bits_per_byte(1.0, 0)
    with pytest.raises(ValueError, match="0 tokens"): Perplexity(0.0, 0)


# what is given


@pytest.mark.parametrize("make", [list, tuple, np.array, np.uint16, torch.tensor, torch.IntTensor])
def test_any_kind_of_ids(make):
    model, ids = small(), random_docs([20])[0].tolist()
    assert perplexity(model, make(ids), 12, 6) == perplexity(model, ids, 12, 6)


@pytest.mark.parametrize("ids, named", [
    ([[1, 2], [3, 4]], "shape .2, 2."), ([0.5, 1.0], "float32"), ([3, -100], "holds -100"), ([3, 31], "id 31 is beyond the 31"),
    ([31, 3], "id 31 lies outside the vocabulary")])
def test_what_is_not_ids(ids, named):
    with pytest.raises(ValueError, match=named): perplexity(small(), ids, 12, 6)


def test_nan_is_not_passed_on():
    with pytest.raises(ValueError, match="NaN"): perplexity(lambda ids: torch.full((*ids.shape, 9), math.nan), range(9), 4, 4)
    never = lambda ids: torch.zeros(*ids.shape, 9).index_fill(-1, torch.tensor([3]), -math.inf)
    assert perplexity(never, [1, 3, 1], 4, 4).perplexity == math.inf


def test_batch_size_below_one():
    with pytest.raises(ValueError, match="batch_size is 0"): perplexity(small(), range(9), 4, 4, batch_size=0)
