"Speculative decoding: the exact distribution by walking every way the dice can fall, rewound caches, greedy, counts, bad input."

import math
from collections import Counter
from functools import cache as memo
from importlib.metadata import version
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_reference import in_float64, make_llama

from llmlab.core.util import max_diff
from llmlab.model.generate import KVCache, filter_logits, generate
from llmlab.model.speculative import Speculated, accept, draw, expected_tokens, keep_chance, residual, speculative
from llmlab.model.transformer import ModelConfig, Transformer


def tiny(seed, layers=1, V=3, width=8, context=32, std=0.5):
    config = ModelConfig(V, width, num_layers=layers, num_heads=2, context=context, init_std=std)
    return Transformer(config, torch.Generator().manual_seed(seed)).double()


PAIR = tiny(0, 2), tiny(1)
WIDE = tiny(2, 2, V=7), tiny(3, 1, V=7)


def believer(model, **filters):
    "From a text to what the model draws from, by a pass over the whole text."

    @memo
    @torch.no_grad()
    def of(*text): return filter_logits(model(torch.tensor([text]))[0, -1], **filters).softmax(-1)
    return of


def plain_distribution(p_of, prompt, n, stop=()):
    "Chance of every text of the model alone: the product of the chances of its tokens."
    out = Counter()

    def grow(new, chance):
        if len(new) == n or new and new[-1] in stop: out[new] += chance; return
        for v, x in enumerate(p_of(*prompt, *new).tolist()):
            if x: grow((*new, v), chance * x)
    grow((), 1.0)
    return out


def follow(program, script):
    "One way: the branches of `script`, then always the first; what it gives, its chance, and the branches left open."
    way, chance, left = [], 1.0, []

    def chooser(p):
        nonlocal chance
        options, at = p.nonzero()[:, 0].tolist(), len(way)
        if at >= len(script): left.extend((*way, o) for o in options[1:])
        way.append(script[at] if at < len(script) else options[0])
        chance *= p[way[-1]].item()
        return way[-1]
    return tuple(program(chooser)), chance, left


def walk(program):
    "Chance of everything that a program can give, where program(chooser) draws by chooser(p): every way the dice can fall, once."
    total, todo, ways = Counter(), [()], 0
    while todo:
        out, chance, left = follow(program, todo.pop())
        total[out], ways = total[out] + chance, ways + 1
        todo += left
    return total, ways


def twin(p_of, q_of, prompt, n, k, stop=(), generator=None, rule=accept):
    "No cache, nothing batched; draws in the same order."
    new = []
    while len(new) < n and not (new and new[-1] in stop):
        text, guesses = [*prompt, *new], []
        for _ in range(min(k, n - len(new) - 1)): guesses.append(draw(q_of(*text, *guesses), generator))
        for i, x in enumerate(guesses):
            token, kept = rule(p_of(*text, *guesses[:i]), q_of(*text, *guesses[:i]), x, generator)
            new.append(token)
            if not kept or token in stop: break
        else: new.append(draw(p_of(*text, *guesses), generator))
    return new


def gap(a, b): return max(abs(a[t] - b[t]) for t in {*a, *b})


FILTERS = [{}, {"temperature": 0.4}, {"temperature": 2.0}, {"top_k": 2}, {"temperature": 1.5, "top_p": 0.8},
           {"temperature": 1.5, "top_k": 2, "top_p": 0.7}, {"temperature": 0}]


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_the_real_function_has_exactly_the_distribution_of_the_large_model(k, filters):
    filters = {"temperature": 1.0} | filters
    wanted = plain_distribution(believer(PAIR[0], **filters), [0, 2], 2)
    found, _ = walk(lambda c: speculative(*PAIR, [0, 2], 2, k, generator=c, **filters).ids)
    assert abs(sum(found.values()) - 1) < 1e-12 and gap(found, wanted) < 1e-12


@pytest.mark.parametrize("stop", [(), (1,), (0, 2)])
def test_three_tokens_with_stops_caches_and_rewinding(stop):
    wanted = plain_distribution(believer(PAIR[0], temperature=1.0), [1], 3, stop)
    found, ways = walk(lambda c: speculative(*PAIR, [1], 3, 2, 1.0, stop=stop, generator=c).ids)
    assert ways > len(wanted) and gap(found, wanted) < 1e-12 and all(len(t) == 3 or t[-1] in stop for t in found)


@pytest.mark.parametrize("V, n, seed", [(4, 3, 0), (5, 2, 1), (3, 3, 2)])
@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("filters", [{}, {"temperature": 0.6, "top_k": 3}, {"temperature": 1.4, "top_p": 0.85}])
def test_the_method_is_exact_for_more_models_and_vocabularies(V, n, seed, k, filters):
    p_of, q_of = (believer(tiny(10 + seed + 5 * i, 2 - i, V), **filters) for i in range(2))
    found, _ = walk(lambda c: twin(p_of, q_of, [0, V - 1], n, k, generator=c))
    assert gap(found, plain_distribution(p_of, [0, V - 1], n)) < 1e-12


def redraw(p, q, x, generator):
    a = keep_chance(p, q)[x]
    return (x, True) if draw(torch.stack([1 - a, a]), generator) else (draw(p, generator), False)


def generous(p, q, x, generator): return (x, True) if p[x] > q[x] / 2 else (draw(residual(p, q), generator), False)
def upside_down(p, q, x, generator): return accept(q, q, x, generator)


@pytest.mark.parametrize("rule", [redraw, generous, upside_down])
def test_wrong_rules_are_caught_by_the_walk(rule):
    p_of, q_of = (believer(m, temperature=1.5) for m in PAIR)
    wanted = plain_distribution(p_of, [0, 2], 2)
    assert gap(walk(lambda c: twin(p_of, q_of, [0, 2], 2, 2, generator=c, rule=rule))[0], wanted) > 0.01


def some_chances(V):
    "V numbers that sum to 1; zeros and equal ones are frequent."
    return st.lists(st.sampled_from([0.0, 0.0, 1.0, 1.0, 1e-9, 3.0, 0.1, 7.7]), min_size=V, max_size=V).filter(any).map(
        lambda x: torch.tensor(x, dtype=torch.float64) / sum(x))


@given(pair=st.integers(1, 6).flatmap(lambda V: st.tuples(some_chances(V), some_chances(V))))
@settings(max_examples=200, deadline=None)
def test_kept_and_redrawn_add_up_to_p(pair):
    p, q = pair
    a, r = keep_chance(p, q), residual(p, q)
    assert a.isfinite().all() and ((0 <= a) & (a <= 1)).all() and abs(r.sum() - 1) < 1e-12 and (r >= 0).all()
    assert max_diff(q * a + (1 - (q * a).sum()) * r, p) < 1e-12
    assert (a[(p == 0) & (q > 0)] == 0).all() and (a[p == q] == 1).all() and (r[p == 0] == 0).all()
    written, _ = walk(lambda c: [accept(p, q, draw(q, c), c)[0]])
    assert max(abs(written[(v,)] - x) for v, x in enumerate(p.tolist())) < 1e-12


def test_equal_beliefs_are_always_kept():
    for seed in range(50):
        p = torch.rand(9, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).softmax(-1)
        assert accept(p, p.clone(), seed % 9, torch.Generator().manual_seed(seed)) == (seed % 9, True)
        assert walk(lambda c: accept(p, p.clone(), 3, c))[0] == {(3, True): 1.0}  # noqa: B023


def test_forbidden_tokens_are_never_kept_nor_drawn():
    p = filter_logits(torch.tensor([0.0, -math.inf, 1.0, -math.inf])).softmax(-1)
    q = torch.full((4,), 0.25, dtype=torch.float64)
    assert all(accept(p, q, 1, torch.Generator().manual_seed(i)) in ((0, False), (2, False)) for i in range(30))
    assert max_diff(residual(p, q)[[1, 3]], torch.zeros(2)) == 0


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("k", [1, 2, 5, 30])
def test_equal_to_the_twin_with_the_same_dice(seed, k):
    filters = {"temperature": 0.5 + 0.1 * seed, "top_k": [None, 4][seed % 2], "top_p": [None, 0.9, 0.99][seed % 3]}
    dice = lambda: torch.Generator().manual_seed(seed)
    prompt = torch.randint(7, (1 + seed % 5,), generator=dice()).tolist()
    wanted = twin(*(believer(m, **filters) for m in WIDE), prompt, 14, k, [6], dice())
    assert speculative(*WIDE, prompt, 14, k, stop=[6], generator=dice(), **filters).ids == wanted


def test_greedy_equals_generate_on_hundreds_of_prompts():
    maker = torch.Generator().manual_seed(0)
    prompts = [torch.randint(7, (int(torch.randint(1, 12, (1,), generator=maker)),), generator=maker).tolist() for _ in range(300)]
    for n, stop in ((1, ()), (6, ()), (9, (2, 5))):
        wanted = generate(WIDE[0], prompts, n, stop=stop)
        some = range(0, 300, 1 if n == 9 else 10)
        assert [speculative(*WIDE, prompts[i], n, 1 + i % 6, stop=stop).ids for i in some] == [wanted[i] for i in some]


def test_sampled_texts_come_as_often_as_they_should():
    wanted, runs = plain_distribution(believer(PAIR[0], temperature=1.0), [0, 2], 2), 900
    dice = torch.Generator().manual_seed(0)
    counts = Counter(tuple(speculative(*PAIR, [0, 2], 2, 3, 1.0, generator=dice).ids) for _ in range(runs))
    assert len(wanted) == 9 and set(counts) <= set(wanted)
    assert sum((counts[t] - runs * x) ** 2 / (runs * x) for t, x in wanted.items()) < 26.1  # 8 degrees of freedom, 1 in 1000


@given(first=st.integers(1, 6), wrong=st.integers(0, 8), then=st.integers(1, 6), seed=st.integers(0, 50), padded=st.booleans())
@settings(max_examples=25, deadline=None)
def test_a_rewound_cache_gives_the_logits_of_a_fresh_one(first, wrong, then, seed, padded):
    model, g = WIDE[0], torch.Generator().manual_seed(seed)
    text, guess = (torch.randint(7, (2, n), generator=g) for n in (first + then, wrong))
    pads = torch.tensor([0, first - 1]) if padded else None
    used, fresh = (KVCache(model, 20, pads) for _ in range(2))
    with torch.no_grad():
        for c in (used, fresh): model.hidden(text[:, :first], c)
        if wrong: model.hidden(guess, used)
        used.rewind(wrong)
        a, b = (model.head(model.hidden(text[:, first:], c)) for c in (used, fresh))
        assert used.length == fresh.length == first + then and max_diff(a, b) < 1e-12
        assert padded or max_diff(a, model(text)[:, first:]) < 1e-12


@pytest.mark.parametrize("n", [-1, 4])
def test_more_than_all_cannot_be_forgotten(n):
    cache = KVCache(WIDE[0], 5)
    with torch.no_grad(): WIDE[0].hidden(torch.tensor([[1, 2, 3]]), cache)
    with pytest.raises(ValueError, match=f"{n} tokens of 3"): cache.rewind(n)
    cache.rewind(3)
    assert cache.length == 0


@pytest.mark.parametrize("k, n", [(1, 6), (2, 9), (3, 7), (5, 6), (9, 4), (4, 0), (4, 1)])
def test_counts_when_the_draft_is_the_model(k, n):
    out = speculative(WIDE[0], WIDE[0], [1, 2], n, k)
    assert out.ids == generate(WIDE[0], [[1, 2]], n)[0] and out.passes == -(-n // (k + 1))
    assert out.accepted == out.proposed == n - out.passes and not out.rejected
    assert n < 2 or out.kept_share == 1 and out.tokens_per_pass == n / out.passes


@given(n=st.integers(0, 12), k=st.sampled_from([1, 2, 3, 5, 14]), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_counts_add_up_and_nothing_is_proposed_beyond_the_end(n, k, seed):
    seen = []
    spy = WIDE[0].embed_tokens.register_forward_pre_hook(lambda m, x: seen.append(x[0].shape[1]))
    out = speculative(*WIDE, [3, 1], n, k, 1.0, generator=torch.Generator().manual_seed(seed))
    spy.remove()
    assert len(out.ids) == n == out.accepted + out.passes and len(seen) == out.passes <= max(n, 0)
    assert out.rejected <= out.passes and out.accepted + out.rejected <= out.proposed <= k * out.passes
    assert sum(seen) == (1 if n else 0) + out.passes + out.proposed  # the last token of the text, and the guesses
    if out.accepted == out.proposed: assert not out.rejected
    if k == 1: assert out.accepted + out.rejected == out.proposed  # every guess was looked at


def test_the_context_may_be_filled_to_the_last_token():
    models = tiny(5, 2, 7, context=10), tiny(6, 1, 7, context=10)
    assert speculative(*models, [1, 2, 3], 7, 4).ids == generate(models[0], [[1, 2, 3]], 7)[0]


@pytest.mark.parametrize("resting", [0, 1])
def test_modes_and_the_global_generator_are_left_alone(resting):
    model, draft = (Transformer(ModelConfig(7, 8, num_layers=2, num_heads=2, context=20, dropout=0.5)).double() for _ in range(2))
    (model, draft)[resting].eval()
    state = torch.get_rng_state()
    write = lambda: speculative(model, draft, torch.tensor([1, 2]), 9, temperature=1.0, generator=torch.Generator().manual_seed(0)).ids
    assert write() == write()
    assert [m.training for m in (model, draft)] == [bool(resting), not resting] == [m.blocks[0].training for m in (model, draft)]
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("change, words", [
    ({"k": 0}, "from 1, got 0"), ({"k": -2}, "got -2"), ({"k": 2.5}, "got 2.5"), ({"k": math.nan}, "got nan"), ({"k": True}, "got True"),
    ({"draft": tiny(1, V=4)}, "7 tokens, the draft 4"),
    ({"draft": tiny(1, V=7, context=6)}, "the draft: .*3 tokens and 4 new.*context of 6"),
    ({"model": tiny(1, V=7, context=5)}, "^a prompt of 3 tokens and 4 new.*context of 5"),
    ({"ids": []}, "empty"), ({"ids": [[1, 2]]}, r"one prompt.*\[1, 2\]"), ({"ids": torch.tensor([[1, 2]])}, "one prompt"),
    ({"ids": [1, 7]}, "token id 7"), ({"max_new_tokens": -1}, "got -1"),
    ({"temperature": -1}, "got -1"), ({"top_k": 0}, "top_k.*0"), ({"top_p": 0}, "top_p.*0")])
def test_what_cannot_work_is_refused(change, words):
    good = {"model": WIDE[0], "draft": WIDE[1], "ids": [1, 2, 3], "max_new_tokens": 4}
    with pytest.raises(ValueError, match=words): speculative(**good | change)


def test_impossible_chances_are_refused():
    p, q = torch.tensor([0.5, 0.5]), torch.tensor([1.0, 0.0])
    with pytest.raises(ValueError, match="token 1 has the chance 0.0"): accept(p, q, 1)
    for a, b in ((p, torch.ones(3) / 3), (p[None], q[None])):
        with pytest.raises(ValueError, match=r"must both be \(V,\)"): keep_chance(a, b)


@given(a=st.floats(0, 1), k=st.integers(0, 12))
@settings(max_examples=60, deadline=None)
def test_expected_tokens_is_the_sum_of_powers(a, k):
    assert math.isclose(expected_tokens(a, k), sum(a**i for i in range(k + 1)), rel_tol=1e-3 if 0.999 < a < 1 else 1e-9)


@pytest.mark.parametrize("a, k", [(-0.1, 2), (1.1, 2), (math.nan, 2), (0.5, -1)])
def test_expected_tokens_refuses_nonsense(a, k):
    with pytest.raises(ValueError, match=f"{k if k < 0 else a}"): expected_tokens(a, k)


def test_an_empty_result_has_shares_too():
    assert Speculated([]).tokens_per_pass == Speculated([]).kept_share == 0


def test_expected_tokens_holds_when_guesses_are_independent():
    p, q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    lengths, _ = walk(lambda c: [next((i for i in range(3) if not accept(p, q, draw(q, c), c)[1]), 3) + 1])
    assert abs(sum(n[0] * x for n, x in lengths.items()) - expected_tokens(torch.minimum(p, q).sum().item(), 3)) < 1e-12


def theirs_decides(p, q, token, u):
    "transformers' rule for one drafted token, its coin showing u: was it kept, and what would be drawn from next?"
    from transformers.generation.utils import _speculative_sampling

    asked = []

    def multinomial(chances, num_samples):
        asked.append(chances[0])
        return torch.zeros(1, 1, dtype=torch.int64)
    with patch("torch.rand_like", lambda ratio: torch.full_like(ratio, u)), patch("torch.multinomial", multinomial):
        _, kept = _speculative_sampling(torch.tensor([[token]]), q.log()[None, None], 1, torch.stack([p, p]).log()[None])
    return bool(kept), asked[0]


def test_rule_equals_that_of_transformers(parity):
    worst, refused = 0.0, 0
    for seed in range(60):
        g = torch.Generator().manual_seed(seed)
        p, q = ((2 * torch.randn(11, generator=g, dtype=torch.float64)).softmax(-1) for _ in range(2))
        a = keep_chance(p, q)[seed % 11].item()
        assert theirs_decides(p, q, seed % 11, a * 0.999)[0]
        if a > 0.99: continue
        kept, rest = theirs_decides(p, q, seed % 11, a * 1.001)
        worst, refused = max(worst, max_diff(rest, residual(p, q))), refused + (not kept)
        assert not kept
    assert refused > 20
    parity("speculative rule: when a guess is kept, and what is drawn instead", "model.speculative", "transformers _speculative_sampling",
           version("transformers"), worst, 1e-12)


def test_greedy_equals_assisted_generation_of_transformers(parity):
    model, draft = tiny(7, 3, 31, 16, context=64), tiny(8, 1, 31, 16, context=64)
    differ = 0
    with in_float64():
        large, small = (make_llama(m).eval() for m in (model, draft))
        small.generation_config.num_assistant_tokens, small.generation_config.num_assistant_tokens_schedule = 3, "constant"
        for seed in range(5):
            ids = torch.randint(31, (1, 6), generator=torch.Generator().manual_seed(seed))
            settings = {"attention_mask": torch.ones_like(ids), "assistant_model": small, "max_new_tokens": 20, "do_sample": False}
            differ += large.generate(ids, **settings)[0, 6:].tolist() != speculative(model, draft, ids[0], 20, 3).ids
    parity("speculative decoding, greedy: texts that differ", "model.speculative", "transformers assisted generation",
           version("transformers"), differ, 0)
