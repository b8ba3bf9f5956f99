"The model against transformers' Llama and against its own formulas; configs, first weights and inputs that are refused."

import math
from dataclasses import FrozenInstanceError, replace
from importlib.metadata import version

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_reference import in_float64, llama_name, make_llama
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from llmlab.core.batch import Batch, pad_batch
from llmlab.core.sharing import canonical_names, count_parameters, unique_parameters
from llmlab.core.util import max_diff
from llmlab.model.mask import document_mask
from llmlab.model.transformer import ModelConfig, Transformer, flops_per_token, init_weights, make_where, parameter_counts, plain_causal

SHAPES = {
    "grouped heads, own head": dict(num_heads=4, num_kv_heads=2, tie_embeddings=False),
    "one key head, tied": dict(num_heads=4, num_kv_heads=1),
    "all heads, tied, other base": dict(num_heads=2, rope_theta=500.0, norm_eps=1e-3),
}


def model_of(**settings):
    settings = {"vocab_size": 53, "hidden_size": 32, "num_layers": 3, "context": 40, "init_std": 0.3} | settings
    return Transformer(ModelConfig(**settings), torch.Generator().manual_seed(1)).double()


def packed(lengths, vocab=53, padding=0):
    "Documents side by side in one row, positions starting anew."
    docs = [torch.randint(vocab, (n,), generator=torch.Generator().manual_seed(i)) for i, n in enumerate(lengths)]
    pad = torch.zeros(padding, dtype=torch.int64)
    return docs, Batch(torch.cat([*docs, pad])[None], positions=torch.cat([torch.arange(len(d)) for d in docs] + [pad])[None],
                       doc_ids=torch.cat([torch.full((len(d),), i) for i, d in enumerate(docs)] + [pad - 1])[None])


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_every_gradient_equal_llama(shape, parity):
    model = model_of(**SHAPES[shape])
    ids, targets = torch.randint(53, (2, 2, 30))
    with in_float64():
        llama = make_llama(model)
        theirs = llama(input_ids=ids).logits
        F.cross_entropy(theirs.flatten(0, 1), targets.flatten()).backward()
    ours = model(ids)
    F.cross_entropy(ours.flatten(0, 1), targets.flatten()).backward()
    grads = {n: p.grad for n, p in llama.named_parameters()}
    assert len(list(model.parameters())) == len(grads) and ours.dtype == torch.float64
    assert all(p.grad.abs().max() > 0 for p in model.parameters())
    parity(f"logits of a Transformer with {shape}, float64", "model.transformer", "transformers Llama", version("transformers"),
           max_diff(ours, theirs), 1e-10)
    parity(f"gradient of every parameter with {shape}, float64", "model.transformer", "transformers Llama", version("transformers"),
           max(max_diff(p.grad, grads[llama_name(n)]) for n, p in model.named_parameters()), 1e-10)


def test_logits_equal_unmodified_llama_in_float32(parity):
    model = model_of(num_kv_heads=2, init_std=0.1).float()
    ids = torch.randint(53, (2, 40))
    parity("logits of a Transformer, float32", "model.transformer", "transformers Llama (sdpa)", version("transformers"),
           max_diff(model(ids), make_llama(model, "sdpa")(input_ids=ids).logits), 1e-5)


def test_packed_row_equals_llama_with_the_same_mask(parity):
    model = model_of(num_kv_heads=2)
    _, batch = packed((3, 5, 1, 7), padding=3)
    real = (batch.doc_ids >= 0)[0]
    bias = torch.zeros(1, 1, 19, 19, dtype=torch.float64).masked_fill(~document_mask(batch.doc_ids), -math.inf)
    with in_float64():
        llama = make_llama(model)
        theirs = llama(input_ids=batch.ids, position_ids=batch.positions, attention_mask=bias).logits
        theirs[:, real].sin().sum().backward()
    ours = model(batch)
    ours[:, real].sin().sum().backward()
    grads = {n: p.grad for n, p in llama.named_parameters()}
    gap = max(max_diff(p.grad, grads[llama_name(n)]) for n, p in model.named_parameters())
    parity("packed row with document mask, logits and gradients", "model.transformer", "transformers Llama", version("transformers"),
           max(gap, max_diff(ours[:, real], theirs[:, real])), 1e-10)


@given(lengths=st.lists(st.integers(1, 8), min_size=1, max_size=5), padding=st.integers(0, 4), restart=st.booleans())
@settings(max_examples=25, deadline=None)
def test_packed_documents_are_as_alone(lengths, padding, restart):
    model = MODEL
    docs, batch = packed(lengths, padding=padding)
    if not restart: batch.positions = None  # rotary positions are relative: only the distance within a document matters
    with torch.no_grad(): together, alone = model(batch)[0], [model(d[None])[0] for d in docs]
    assert max_diff(together[:sum(lengths)], torch.cat(alone)) < 1e-10
    assert together.isfinite().all()


def test_replacing_a_document_changes_no_other():
    _, batch = packed((3, 5, 1, 7))
    other = replace(batch, ids=batch.ids.clone())
    other.ids[0, 3:8] = (other.ids[0, 3:8] + 1) % 53
    with torch.no_grad(): moved = (MODEL(batch) - MODEL(other))[0].abs().amax(-1)
    assert moved[3:8].min() > 1e-3 and moved[:3].max() == 0 and moved[8:].max() == 0


@given(rows=st.lists(st.lists(st.integers(-1, 2), min_size=5, max_size=5), min_size=1, max_size=3))
@settings(max_examples=200, deadline=None)
def test_the_mask_is_left_out_only_where_it_changes_no_real_token(rows):
    doc_ids = torch.tensor(rows)
    if not plain_causal(doc_ids): return
    real = doc_ids >= 0
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    assert torch.equal(document_mask(doc_ids)[:, 0][real], causal.expand(len(rows), 5, 5)[real])


def test_rows_of_one_document_take_the_causal_path():
    where = lambda d: make_where(Batch(torch.zeros(1, 4, dtype=torch.int64), doc_ids=torch.tensor([d])), MODEL.config)
    assert [where(d).mask is None for d in ([0] * 4, [5] * 4, [0, 0, 0, -1], [-1] * 4, [0, 0, 1, 1], [-1, 0, 0, 0], [0, -1, 0, 0])] == \
        [True, True, True, True, False, False, False]
    model, batch = MODEL, pad_batch([[1, 2, 3, 4, 5], [6, 7, 8]])
    with torch.no_grad(): assert max_diff(model(batch)[1, :2], model(torch.tensor([[6, 7]]))[0]) < 1e-10


@pytest.mark.parametrize("shape", SHAPES)
def test_sizes_and_operations_follow_the_formulas(shape):
    model = model_of(**SHAPES[shape]).float()
    counts = parameter_counts(model.config)
    assert model.num_parameters == count_parameters(model) == sum(counts.values())
    part = lambda *words: sum(p.numel() for n, p in unique_parameters(model).items() if any(w in n for w in words))
    assert counts == {"embedding": part("embed_tokens"), "attention": part("_proj.weight") - part("mlp."), "mlp": part("mlp."),
                      "norms": part("norm.weight"), "head": part("head.weight")}
    for T in (1, 17, 40):
        with FlopCounterMode(display=False) as forward, sdpa_kernel(SDPBackend.MATH): y = model(torch.zeros(3, T, dtype=torch.int64))
        with FlopCounterMode(display=False) as backward: y.sum().backward()
        assert forward.get_total_flops() == 3 * T * flops_per_token(model.config, T)
        assert forward.get_total_flops() + backward.get_total_flops() == 3 * T * flops_per_token(model.config, T, training=True)


def test_a_model_without_memory_can_be_counted():
    config = ModelConfig(128256, 4096, 14336, 32, 32, 8, tie_embeddings=False)
    with torch.device("meta"): assert Transformer(config).num_parameters == sum(parameter_counts(config).values()) == 8_030_261_248


def test_first_weights_depend_on_the_generator_alone():
    config = ModelConfig(50, 32, num_layers=8)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    a = Transformer(config, torch.Generator().manual_seed(7))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    b, other = (Transformer(config, torch.Generator().manual_seed(s)) for s in (7, 8))
    default = Transformer(config)
    assert max_diff(a.state_dict(), b.state_dict()) == 0 < max_diff(a.state_dict(), other.state_dict())
    assert max_diff(default.state_dict(), Transformer(config, torch.Generator().manual_seed(0)).state_dict()) == 0
    twice = Transformer(config, torch.Generator().manual_seed(1)).double()
    init_weights(twice, torch.Generator().manual_seed(7))
    assert max_diff(twice.state_dict(), a.state_dict()) == 0


def test_first_weights_have_the_stated_widths():
    config = ModelConfig(512, 128, num_layers=8, init_std=0.05)
    for name, p in Transformer(config).named_parameters():
        if p.ndim == 1: assert (p == 1).all(), name; continue
        wanted = 0.05 / 4 if "o_proj" in name or "down_proj" in name else 0.05  # 2L = 16
        assert abs(p.std().item() / wanted - 1) < 0.05 and abs(p.mean().item()) < wanted / 20, name


def test_names_and_sharing():
    tied, untied = Transformer(ModelConfig(50, 32, num_layers=1)), Transformer(ModelConfig(50, 32, num_layers=1, tie_embeddings=False))
    parts = ["attention_norm", "mlp_norm", *(f"attention.{x}_proj" for x in "qkvo"), *(f"mlp.{x}_proj" for x in ("gate", "up", "down"))]
    block = [f"blocks.0.{n}.weight" for n in parts]
    for m in (tied, untied): assert set(m.state_dict()) == {"embed_tokens.weight", *block, "norm.weight", "head.weight"}
    assert canonical_names(tied)["head.weight"] == "embed_tokens.weight" and canonical_names(untied)["head.weight"] == "head.weight"
    assert tied.double().head.weight is tied.embed_tokens.weight


def test_a_compiled_and_a_parallel_model_have_the_weights_of_the_plain_one():
    model = Transformer(ModelConfig(50, 32, num_layers=1))
    for wrapped, prefix in ((torch.compile(model), "_orig_mod."), (torch.nn.DataParallel(model), "module.")):
        assert {n.removeprefix(prefix) for n in wrapped.state_dict()} == set(model.state_dict())
        assert {canonical_names(wrapped)[n].removeprefix(prefix) for n in wrapped.state_dict()} == set(canonical_names(model).values())


def test_hidden_embed_blocks_and_head_make_up_the_model():
    model, ids = MODEL, torch.randint(53, (2, 9))
    x, where = model.embed(ids), model.where(ids)
    for block in model.blocks: x = block(x, where)
    assert torch.equal(model.norm(x), model.hidden(ids)) and torch.equal(model.head(model.hidden(ids)), model(ids))
    assert torch.equal(model(Batch(ids)), model(ids.tolist()))
    assert model(ids, lambda m, b: (m is model, b is ids)) == (True, True)


def test_dropout_is_active_in_training_only():
    model = Transformer(ModelConfig(50, 32, num_layers=2, dropout=0.5))
    ids = torch.randint(50, (1, 8))
    assert max_diff(model(ids), model(ids)) > 0
    model.eval()
    assert max_diff(model(ids), model(ids)) == 0


@pytest.mark.parametrize("wrong, says", [
    (dict(num_heads=3), "hidden_size 32 is no multiple of num_heads 3"),
    (dict(num_kv_heads=3), "num_heads 4 is no multiple of num_kv_heads 3"),
    (dict(num_heads=32), "must be even|make it even"), (dict(vocab_size=0), "vocab_size must be a positive integer, got 0"),
    (dict(hidden_size=0), "hidden_size"), (dict(hidden_size=-32), "hidden_size"), (dict(num_layers=0), "num_layers"),
    (dict(num_heads=0), "num_heads"), (dict(context=0), "context"), (dict(vocab_size=1.5), "vocab_size"),
    (dict(num_layers=True), "num_layers"),
    (dict(dropout=1.0), "dropout"), (dict(dropout=-0.1), "dropout"), (dict(dropout=math.nan), "dropout"), (dict(init_std=0.0), "init_std"),
    (dict(rope_theta=-1.0), "rope_theta"), (dict(norm_eps=math.nan), "norm_eps"), (dict(intermediate_size=0), "intermediate_size"),
    (dict(num_kv_heads=0), "num_kv_heads"), (dict(vocab_size="50"), "vocab_size")])
def test_a_config_that_makes_no_model_is_refused(wrong, says):
    with pytest.raises(ValueError, match=says): ModelConfig(**{"vocab_size": 50, "hidden_size": 32} | wrong)


def test_configs_are_values():
    config = ModelConfig(50, 100, num_heads=2)
    assert (config.intermediate_size, config.num_kv_heads, config.head_dim) == (288, 2, 50)
    assert ModelConfig(50, 384, num_heads=6).intermediate_size == 1024  # 8/3 exactly is not rounded up further
    assert ModelConfig.from_dict(config.to_dict()) == config
    with pytest.raises(FrozenInstanceError): config.num_layers = 2
    with pytest.raises(ValueError, match=r"unknown settings \['layers'\].*num_layers"):
        ModelConfig.from_dict({"vocab_size": 5, "layers": 3})


@pytest.mark.parametrize("ids, says", [
    (torch.zeros(1, 0, dtype=torch.int64), "empty"), (torch.zeros(0, 3, dtype=torch.int64), "empty"), ([], r"\(B,T\)"), ([[]], "empty"),
    (torch.zeros(3, dtype=torch.int64), r"\(B,T\)"), (torch.zeros(1, 41, dtype=torch.int64), "41 tokens do not fit into a context of 40"),
    ([[1, 53]], "token id 53 lies outside the vocabulary 0..52"), ([[1, -1]], "token id -1"), ([[0.5]], "integers")])
def test_ids_that_cannot_be_read_are_refused(ids, says):
    for f in (MODEL, MODEL.hidden, MODEL.embed):
        with pytest.raises(ValueError, match=says): f(ids)


MODEL = model_of(num_kv_heads=2)
