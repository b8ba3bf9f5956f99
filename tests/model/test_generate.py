"Sampling at every setting; cached equals uncached, batched equals single, greedy equals transformers; bad input."

import math
from importlib.metadata import version
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_reference import make_llama

from llmlab.core.util import max_diff
from llmlab.model.generate import FusedStep, KVCache, can_fuse, evaluating, filter_logits, generate, sample, stream
from llmlab.model.positions import apply_rope, rope_tables
from llmlab.model.transformer import ModelConfig, Transformer


def model_of(dtype=torch.float64, **settings):
    settings = {"num_heads": 4, "num_kv_heads": 2, "context": 48, "init_std": 0.3} | settings
    return Transformer(ModelConfig(61, 32, num_layers=3, **settings), torch.Generator().manual_seed(3)).to(dtype)


@torch.no_grad()
def uncached(model, prompt, n):
    "Greedy, everything read again for each token."
    ids = list(prompt)
    for _ in range(n): ids.append(model(torch.tensor([ids]))[0, -1].argmax().item())
    return ids[len(prompt):]


HARD = {"plain": [2.0, 1.0, 0.5, -1.0], "ties": [1.0, 1.0, 1.0, 0.0], "banned": [-math.inf, 3.0, 2.0, -math.inf],
        "huge": [1e4, 9999.0, -1e4, 0.0], "one": [-math.inf, -math.inf, 0.0, -math.inf], "tiny": [1e-30, 0.0, -1e-30, 1e-31]}


@pytest.mark.parametrize("name", HARD)
def test_every_setting_gives_a_distribution_that_holds_the_best(name):
    x = torch.tensor([HARD[name]])
    best = x.argmax().item()
    for temperature, top_k, top_p in product([0, 1e-320, 1e-45, 1e-6, 0.5, 1.0, 1e6], [None, 1, 3, 10_000], [None, 1e-9, 0.75, 1.0]):
        p = filter_logits(x, temperature, top_k, top_p).softmax(-1)
        assert p.isfinite().all() and abs(p.sum().item() - 1) < 1e-12 and (p[x == -math.inf] == 0).all()
        if name != "ties": assert p[0, best] == p.max() > 0
        kept = p.gt(0).sum().item()
        if top_k: assert kept <= top_k
        if temperature == 0 or top_p == 1e-9 or top_k == 1: assert kept == 1
        if temperature == 0 or (temperature <= 1e-6 and name in ("plain", "banned", "huge")): assert p[0, best] == 1
        chosen = {sample(x, temperature, top_k, top_p, torch.Generator().manual_seed(i)).item() for i in range(5)}
        assert all(p[0, c] > 0 for c in chosen)
        if temperature == 0: assert chosen == {best}


def test_top_p_keeps_the_fewest_that_reach_p():
    z = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    kept = lambda p: filter_logits(z, top_p=p).softmax(-1)
    assert max_diff(kept(0.75), torch.tensor([0.625, 0.375, 0, 0])) < 1e-7
    assert [int(kept(p).gt(0).sum()) for p in (1e-9, 0.49, 0.51, 0.79, 0.81, 0.96, 1.0)] == [1, 1, 2, 2, 3, 4, 4]
    assert torch.equal(filter_logits(z.flip(0), top_p=0.75), filter_logits(z, top_p=0.75).flip(0))
    even = torch.zeros(4)  # a quarter each, exactly
    assert [int(filter_logits(even, top_p=p).isfinite().sum()) for p in (0.25, 0.26, 0.5, 0.75, 0.76)] == [1, 2, 2, 3, 4]


def test_the_smallest_temperature_survives_arithmetic_without_subnormals():
    torch.set_flush_denormal(True)
    try: p = filter_logits(torch.tensor([1.0, 2.0]), 5e-324).softmax(-1)
    finally: torch.set_flush_denormal(False)
    assert p.tolist() == [0, 1]


@given(seed=st.integers(0, 1000), temperature=st.floats(0.1, 5), top_k=st.integers(1, 40), top_p=st.floats(0.01, 1.0))
@settings(max_examples=40, deadline=None)
def test_filters_equal_those_of_transformers(seed, temperature, top_k, top_p):
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    x = 3 * torch.randn(2, 30, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    theirs = x
    warpers = TemperatureLogitsWarper(temperature), TopKLogitsWarper(min(top_k, 30)), TopPLogitsWarper(top_p)
    for warp in warpers: theirs = warp(None, theirs)
    assert max_diff(filter_logits(x, temperature, top_k, top_p).softmax(-1), theirs.softmax(-1)) < 1e-12


def test_draws_follow_the_distribution():
    z = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    counts = sample(z.expand(40_000, 4), 0.7, top_p=0.97, generator=torch.Generator().manual_seed(0)).bincount(minlength=4)
    wanted = filter_logits(z, 0.7, top_p=0.97).softmax(-1) * 40_000
    assert counts[3] == 0 and ((counts - wanted)[:3] ** 2 / wanted[:3]).sum() < 13.8  # chi-square, 2 degrees of freedom, 1 in 1000


@pytest.mark.parametrize("bad", [[math.nan, 0.0], [math.inf, 0.0], [-math.inf, -math.inf]])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_logits_without_a_best_are_an_error(bad, temperature):
    for f in (filter_logits, sample):
        with pytest.raises(ValueError, match="no best token"): f(torch.tensor([[1.0, 0.0], bad]), temperature)


@pytest.mark.parametrize("wrong", [dict(temperature=-1), dict(temperature=math.nan), dict(temperature=math.inf), dict(top_k=0),
                                   dict(top_k=-3), dict(top_k=2.5), dict(top_p=0), dict(top_p=1.1), dict(top_p=-0.1), dict(top_p=math.nan)])
def test_settings_that_mean_nothing_are_refused(wrong):
    (name, value), = wrong.items()
    with pytest.raises(ValueError, match=f"{name}.*{value}"): filter_logits(torch.randn(1, 5), **wrong)
    with pytest.raises(ValueError, match=f"{name}.*{value}"): generate(MODEL, [[1, 2]], 3, **wrong)


def test_a_generator_makes_draws_repeatable():
    again = lambda seed: generate(MODEL, [[1, 2, 3]] * 3, 20, temperature=1.0, generator=torch.Generator().manual_seed(seed))
    first = again(0)
    torch.rand(5)
    assert again(0) == first != again(1) and len(set(map(tuple, first))) == 3
    state = torch.get_rng_state()
    again(0)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_cached_logits_equal_uncached(dtype, tolerance, kv_heads):
    model = model_of(dtype, num_kv_heads=kv_heads, init_std=0.1)
    ids, cache = torch.randint(61, (2, 48)), KVCache(model, 48)
    with torch.no_grad(): parts = torch.cat([model.head(model.hidden(x, cache)) for x in ids.split([5, 1, 1, 9, 1, 31], 1)], 1)
    assert max_diff(parts, model(ids)) < tolerance and cache.length == 48


@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=5), seed=st.integers(0, 50))
@settings(max_examples=12, deadline=None)
def test_padded_cached_logits_equal_each_row_alone(lengths, seed):
    g, longest = torch.Generator().manual_seed(seed), max(lengths) + 6
    pads = torch.tensor([max(lengths) - n for n in lengths])
    ids = torch.randint(61, (len(lengths), longest), generator=g)
    cache = KVCache(MODEL, longest, pads)
    with torch.no_grad():
        parts = torch.cat([MODEL.head(MODEL.hidden(x, cache)) for x in ids.split([max(lengths), 1, 4, 1], 1)], 1)
        for row, pad, x in zip(parts, pads.tolist(), ids, strict=True): assert max_diff(row[pad:], MODEL(x[None, pad:])[0]) < 1e-10
    assert parts.isfinite().all()


def test_a_padded_row_has_the_positions_of_its_own_text():
    alone, padded = KVCache(MODEL, 9), KVCache(MODEL, 9, torch.tensor([0, 4]))
    assert torch.equal(padded.cos[0], alone.cos) and torch.equal(padded.cos[1, :, 4:], alone.cos[:, :5])
    assert torch.equal(padded.sin[1, :, 4:], alone.sin[:, :5])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_cache_turns_as_apply_rope_does(dtype):
    model = model_of(dtype)
    q, k = torch.randn(2, 3, 4, 7, 8, dtype=dtype)
    ours = KVCache(model, 7).where(7).rotate(q, k)
    cos, sin = rope_tables(torch.arange(7), 8, model.config.rope_theta, dtype)
    assert torch.equal(ours[0], apply_rope(q, cos, sin)) and torch.equal(ours[1], apply_rope(k, cos, sin))


@pytest.mark.parametrize("settings", [{}, {"num_kv_heads": 4, "tie_embeddings": False}, {"num_kv_heads": 1, "norm_eps": 1e-2}])
@pytest.mark.parametrize("pads", [None, [0, 3]])
def test_a_fused_step_gives_the_logits_of_the_model(settings, pads):
    model = model_of(**settings)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1: p.uniform_(0.5, 2.0)  # norms as training leaves them
        ids, pads = torch.randint(61, (2, 20)), None if pads is None else torch.tensor(pads)
        plain, fused, step = KVCache(model, 20, pads), KVCache(model, 20, pads), FusedStep(model)
        for cache in (plain, fused): model.hidden(ids[:, :7], cache)
        for x in ids[:, 7:].split(1, 1): assert max_diff(step(x, fused), model.head(model.hidden(x, plain))[:, -1]) < 1e-10
    assert plain.length == fused.length == 20


def test_fusing_changes_no_text_and_reads_the_weights_afresh():
    model, prompts = model_of(), [[1, 2, 3], [4]]
    before = generate(model, prompts, 24, fuse=True)
    assert before == generate(model, prompts, 24, fuse=False) == generate(model, prompts, 24)
    with torch.no_grad(): model.blocks[1].mlp.up_proj.weight.mul_(-3)
    after = generate(model, prompts, 24, fuse=True)
    assert before != after == generate(model, prompts, 24, fuse=False)


class Doubled(torch.nn.Linear):
    def forward(self, x): return 2 * super().forward(x)


def test_a_model_that_was_changed_from_outside_is_not_fused():
    free, prompts = generate(MODEL, [[1, 2]], 24), [[1, 2]]
    hooked = model_of()
    handle = hooked.blocks[0].mlp.register_forward_hook(lambda m, i, out: 2 * out)
    assert not can_fuse(hooked) and generate(hooked, prompts, 24, fuse=True)[0] == uncached(hooked, [1, 2], 24) != free[0]
    handle.remove()
    assert can_fuse(hooked) and generate(hooked, prompts, 24, fuse=True) == free
    swapped = model_of()
    swapped.blocks[2].attention.q_proj.__class__ = Doubled
    assert not can_fuse(swapped) and generate(swapped, prompts, 24, fuse=True)[0] == uncached(swapped, [1, 2], 24) != free[0]
    shaped = model_of()
    torch.nn.utils.parametrizations.weight_norm(shaped.blocks[0].mlp.up_proj)
    assert not can_fuse(shaped) and generate(shaped, prompts, 24) == free
    with torch.autocast("cpu", torch.bfloat16): assert not can_fuse(MODEL)


def test_batches_equal_single_prompts_and_no_cache():
    prompts = [torch.randint(61, (n,)).tolist() for n in (1, 12, 5, 5)]
    together = generate(MODEL, prompts, 20)
    assert together == [generate(MODEL, [p], 20)[0] for p in prompts] == [uncached(MODEL, p, 20) for p in prompts]
    seeds = lambda: [torch.Generator().manual_seed(i) for i in range(4)]
    drawn = generate(MODEL, prompts, 20, 0.8, 20, 0.95, generator=seeds())
    assert drawn == [generate(MODEL, [p], 20, 0.8, 20, 0.95, generator=[g])[0] for p, g in zip(prompts, seeds(), strict=True)] != together


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_greedy_ids_equal_transformers(dtype, parity):
    model = model_of(dtype)
    llama = make_llama(model).eval()
    ids = torch.randint(61, (3, 10))
    theirs = llama.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=38, do_sample=False)[:, 10:].tolist()
    ours = generate(model, ids, 38)
    parity(f"ids of greedy generation that differ, 3 x 38, {str(dtype)[6:]}", "model.generate", "transformers generate",
           version("transformers"),
           sum(a != b for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True)), 0)


def test_rows_end_at_their_own_stop():
    prompts = [[1, 2, 3], [4], [5, 6]]
    free = generate(MODEL, prompts, 30)
    stop = {free[0][4], free[1][9]}
    cut = lambda row: row[:min([i for i, x in enumerate(row) if x in stop], default=29) + 1]
    ended = generate(MODEL, prompts, 30, stop=stop)
    assert ended == [cut(r) for r in free] and len(ended[0]) <= 5
    assert generate(MODEL, prompts, 30, stop=list(stop)) == ended == generate(MODEL, prompts, 30, stop=tuple(stop))
    steps = list(stream(MODEL, prompts, 30, stop=stop))
    assert [[s[i] for s in steps if s[i] is not None] for i in range(3)] == ended
    assert len(steps) == max(map(len, ended)), "when all rows have ended, no step follows"


def test_the_context_may_be_filled_but_not_exceeded():
    assert len(generate(MODEL, [[1] * 40], 8)[0]) == 8 and generate(MODEL, [[1] * 48, [2]], 0) == [[], []]
    with pytest.raises(ValueError, match="40 tokens and 9 new ones exceed the context of 48"): generate(MODEL, [[1], [1] * 40], 9)
    cache = KVCache(MODEL, 4)
    MODEL.hidden(torch.tensor([[1, 2, 3]]), cache)
    with pytest.raises(ValueError, match="holds 4 tokens a row, 5 are wanted"): MODEL.hidden(torch.tensor([[1, 2]]), cache)


@pytest.mark.parametrize("prompts, says", [([], "no prompts"), ([[]], "prompt 0 is empty"), ([[1], []], "prompt 1 is empty"),
                                           (torch.zeros(0, 4, dtype=torch.int64), "no prompts"),
                                           (torch.zeros(2, 0, dtype=torch.int64), "prompt 0 is empty"),
                                           ([[61]], "token id 61 lies outside"), ([[-1, 3]], "token id -1 lies outside")])
def test_prompts_that_cannot_be_continued_are_refused(prompts, says):
    with pytest.raises(ValueError, match=says): generate(MODEL, prompts, 3)
    with pytest.raises(ValueError, match=says): list(stream(MODEL, prompts, 3))


def test_negative_lengths_are_refused():
    with pytest.raises(ValueError, match="must not be negative, got -1"): generate(MODEL, [[1]], -1)


def test_dropout_is_off_and_every_mode_is_put_back():
    model = model_of(dropout=0.5).train()
    model.blocks[1].eval()
    modes = [m.training for m in model.modules()]
    assert generate(model, [[1, 2]], 10) == generate(model, [[1, 2]], 10)
    assert [m.training for m in model.modules()] == modes
    with pytest.raises(RuntimeError), evaluating(model):
        assert not any(m.training for m in model.modules())
        raise RuntimeError
    assert [m.training for m in model.modules()] == modes
    for _ in stream(model, [[1, 2]], 10): break
    assert [m.training for m in model.modules()] == modes


def test_training_may_go_on_after_generating():
    model = model_of()
    generate(model, [[1, 2, 3]], 4)
    model(torch.tensor([[1, 2, 3]])).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_generation_under_autocast():
    model = model_of(torch.float32, init_std=0.1)
    with torch.autocast("cpu", dtype=torch.bfloat16): out = generate(model, [[1, 2, 3], [4]], 6)
    assert [len(r) for r in out] == [6, 6]


MODEL = model_of()
