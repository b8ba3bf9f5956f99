"Every way to the loss gives the same sums and gradients; nothing that does not count is counted; memory stays small."

import weakref
from dataclasses import replace
from importlib.metadata import version

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llmlab.core.batch import Batch, next_token_batch, pad_batch
from llmlab.core.reduce import Term, add_terms, weighted_loss
from llmlab.core.util import max_diff
from llmlab.model.objectives import NextToken, chunked_logprobs, fused_nll, head_nll, plain_logprobs
from llmlab.model.transformer import ModelConfig, Transformer


def model_of(vocab=37, **settings):
    return Transformer(ModelConfig(vocab, 32, num_layers=2, num_kv_heads=2, context=64, init_std=0.2, **settings)).double()


def gradients(model, batches, objective):
    "Loss and gradients of one update over several batches."
    model.zero_grad()
    counts = {"loss": sum(objective.counts(b)["loss"] for b in batches)}
    loss = sum(weighted_loss(objective(model, b), counts) for b in batches)
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad.clone() for n, p in model.named_parameters()}


def random_batch(seed=0, rows=3, length=12, vocab=37, share=0.6):
    g = torch.Generator().manual_seed(seed)
    batch = next_token_batch(torch.randint(vocab, (rows, length + 1), generator=g))
    batch.loss_mask = torch.rand(rows, length, generator=g) < share
    batch.targets = torch.where(batch.loss_mask, batch.targets, -100)  # what does not count may be anything
    return batch


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("chunk", [1, 5, 18, 1000, None])
def test_chunked_equals_plain_in_loss_and_every_gradient(tied, chunk):
    model, batch = model_of(tie_embeddings=tied), random_batch()
    assert max_diff(gradients(model, [batch], NextToken(chunk)), gradients(model, [batch], NextToken(0))) < 1e-12


@given(n=st.integers(0, 9), vocab=st.integers(1, 9), chunk=st.integers(1, 11), seed=st.integers(0, 99), scale=st.floats(-3, 3))
@settings(max_examples=60, deadline=None)
def test_fused_and_recomputed_equal_plain(n, vocab, chunk, seed, scale):
    g = torch.Generator().manual_seed(seed)
    head = nn.Linear(4, vocab, bias=False).double()
    targets = torch.randint(vocab, (n,), generator=g)
    results = []
    for f in (lambda h: -plain_logprobs(h, head, targets).sum(), lambda h: fused_nll(h, head, targets, chunk),
              lambda h: -chunked_logprobs(h, head, targets, chunk).sum()):
        h = torch.randn(n, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed), requires_grad=True)
        head.weight.grad = None
        (scale * f(h)).backward()
        results.append({"loss": f(h).detach(), "hidden": h.grad, "weight": head.weight.grad})
    assert max_diff(results[1], results[0]) < 1e-10 and max_diff(results[2], results[0]) < 1e-10


def test_fused_passes_gradcheck_and_refuses_a_second_derivative():
    head, targets = nn.Linear(3, 5, bias=False).double(), torch.tensor([0, 4, 2, 2])
    h = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    fused = lambda h, w: torch.func.functional_call(_Fused(head), {"head.weight": w}, (h, targets))
    assert torch.autograd.gradcheck(fused, (h, head.weight.detach().requires_grad_()))
    (grad,) = torch.autograd.grad(fused_nll(h, head, targets, 2), h, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable|does not require grad"): grad.sum().backward()


class _Fused(nn.Module):
    def __init__(self, head): super().__init__(); self.head = head
    def forward(self, h, targets): return fused_nll(h, self.head, targets, 3)


def test_a_frozen_head_and_no_gradient_at_all():
    head, targets, h = nn.Linear(8, 11, bias=False), torch.arange(6), torch.randn(6, 8, requires_grad=True)
    head.requires_grad_(False)
    fused_nll(h, head, targets, 4).backward()
    wanted = torch.autograd.grad(-plain_logprobs(h, head, targets).sum(), h)[0]
    assert max_diff(h.grad, wanted) < 1e-5 and head.weight.grad is None
    with torch.no_grad(): assert not fused_nll(h, head, targets, 4).requires_grad
    head.requires_grad_(True)
    fused_nll(h.detach(), head, targets, 4).backward()
    assert head.weight.grad is not None


def test_backward_twice_over_a_kept_graph_adds_up():
    head, targets, h = nn.Linear(8, 11, bias=False), torch.arange(6), torch.randn(6, 8, requires_grad=True)
    loss = fused_nll(h, head, targets, 4)
    loss.backward(retain_graph=True)
    once = h.grad.clone()
    loss.backward()
    assert max_diff(h.grad, 2 * once) < 1e-6


def test_any_head_will_do():
    h, targets = torch.randn(6, 8, dtype=torch.float64), torch.arange(6)
    plain = nn.Linear(8, 11, bias=False).double()
    biased, wrapped, seen = nn.Linear(8, 11).double(), nn.Sequential(plain), []
    for head in (plain, biased, wrapped): assert max_diff(head_nll(h, head, targets, 4), -plain_logprobs(h, head, targets).sum()) < 1e-12
    handle = plain.register_forward_hook(lambda *a: seen.append(1))
    head_nll(h, plain, targets, 4)
    assert len(seen) == 2, "a head that is watched must be called as it is"
    handle.remove()
    with pytest.raises(ValueError, match="without bias"): fused_nll(h, biased, targets)


def test_loss_and_gradients_equal_transformers(parity):
    from llama_reference import in_float64, llama_name, make_llama

    model, batch = model_of(), random_batch()
    with in_float64():
        llama = make_llama(model)
        labels = torch.where(batch.loss_mask, batch.targets, -100)
        loss = llama(input_ids=batch.ids, labels=labels, shift_labels=labels).loss
        loss.backward()
    theirs = {"loss": loss.detach()} | {n: dict(llama.named_parameters())[llama_name(n)].grad for n, _ in model.named_parameters()}
    parity("masked next-token loss and every gradient, chunked, float64", "model.objectives", "transformers Llama loss",
           version("transformers"), max_diff(gradients(model, [batch], NextToken(5)), theirs), 1e-10)


def test_bf16_softmax_is_float32(parity):
    "Under autocast: equal to a float32 softmax of the same bfloat16 logits, in loss and up to bfloat16 rounding in gradients."
    head, h, targets = nn.Linear(64, 500, bias=False), torch.randn(300, 64, requires_grad=True), torch.randint(500, (300,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = {"fused": fused_nll(h, head, targets, 128), "plain": -plain_logprobs(h, head, targets).sum(),
                  "recomputed": -chunked_logprobs(h, head, targets, 128).sum()}
    reference = F.cross_entropy(F.linear(h.bfloat16(), head.weight.bfloat16()).float(), targets, reduction="sum")
    parity("cross-entropy of bfloat16 logits, mean over 300", "model.objectives", "torch float32 cross_entropy", torch.__version__,
           max(abs(x - reference).item() / 300 for x in losses.values()), 1e-5)
    assert all(x.dtype == torch.float32 for x in losses.values())
    grads = {n: torch.autograd.grad(x, (h, head.weight)) for n, x in losses.items()}
    exact = torch.autograd.grad(-plain_logprobs(h, head, targets).sum(), (h, head.weight))
    for g in grads.values():
        assert all(a.dtype == torch.float32 and max_diff(a, b) < 0.02 * b.abs().max() for a, b in zip(g, exact, strict=True))


def test_a_bfloat16_model_has_bfloat16_gradients():
    head, targets = nn.Linear(64, 500, bias=False).bfloat16(), torch.randint(500, (300,))
    h = torch.randn(300, 64).bfloat16().requires_grad_()
    loss = fused_nll(h, head, targets, 128)
    loss.backward()
    assert loss.dtype == torch.float32 and h.grad.dtype == head.weight.grad.dtype == torch.bfloat16


def test_counts_are_known_before_and_equal_the_terms():
    model, objective = model_of(), NextToken()
    for batch in (random_batch(), pad_batch([[1, 2, 3, 4], [5, 6]]), next_token_batch(torch.randint(37, (2, 9)))):
        assert objective.counts(batch) == {"loss": batch.n_targets} == {k: t.count for k, t in objective(model, batch).items()}


@given(cuts=st.lists(st.integers(1, 5), min_size=1, max_size=4), seed=st.integers(0, 20))
@settings(max_examples=15, deadline=None)
def test_any_split_gives_the_same_gradient(cuts, seed):
    batch, parts, at = random_batch(seed, rows=sum(cuts), length=6, share=0.5), [], 0
    if not batch.n_targets: return
    for n in cuts: parts.append(batch[at:at + n]); at += n
    assert max_diff(gradients(MODEL, parts, NextToken(4)), gradients(MODEL, [batch], NextToken(4))) < 1e-12


def test_a_micro_batch_without_targets_adds_nothing():
    full, empty = random_batch(1), random_batch(2)
    empty.loss_mask[:] = False
    term = NextToken()(MODEL, empty)["loss"]
    assert (term.sum.item(), term.count) == (0, 0)
    assert max_diff(gradients(MODEL, [full, empty], NextToken()), gradients(MODEL, [full], NextToken())) < 1e-15


def test_what_stands_in_padding_does_not_matter():
    rows = [[1, 2, 3, 4, 5, 6], [7, 8, 9]]
    a, b = pad_batch(rows, pad_id=0), pad_batch(rows, pad_id=36)
    assert max_diff(gradients(MODEL, [a], NextToken()), gradients(MODEL, [b], NextToken())) == 0
    alone = [next_token_batch(torch.tensor([r])) for r in rows]
    assert max_diff(gradients(MODEL, [a], NextToken()), gradients(MODEL, alone, NextToken())) < 1e-12


@pytest.mark.parametrize("lengths", [(3, 5, 1, 7), (1, 1, 1), (2,), (6, 1, 9, 4)])
def test_packed_documents_give_the_losses_and_gradients_of_separate_rows(lengths):
    docs = [torch.randint(37, (n + 1,), generator=torch.Generator().manual_seed(i)) for i, n in enumerate(lengths)]
    doc_ids = torch.arange(len(docs)).repeat_interleave(torch.tensor(lengths))[None]
    ids, targets = torch.cat([d[:-1] for d in docs])[None], torch.cat([d[1:] for d in docs])[None]
    packed = Batch(ids, targets, torch.ones_like(ids, dtype=torch.bool), positions=torch.cat([torch.arange(n) for n in lengths])[None],
                   doc_ids=doc_ids)
    rows = [next_token_batch(d[None]) for d in docs]
    together, alone = NextToken()(MODEL, packed)["loss"], add_terms(NextToken()(MODEL, r) for r in rows)["loss"]
    assert together.count == alone.count and max_diff(together.sum, alone.sum) < 1e-10
    assert max_diff(gradients(MODEL, [packed], NextToken()), gradients(MODEL, rows, NextToken())) < 1e-10


def test_the_end_of_a_document_is_no_target():
    "The first token of B is not predicted from A: changing it moves nothing of A's loss."
    ids = torch.tensor([[1, 2, 3, 4, 5, 6]])
    doc_ids = torch.tensor([[0, 0, 0, 1, 1, 1]])
    mask = torch.tensor([[True, True, False, True, True, False]])
    batch = Batch(ids, ids.roll(-1, 1), mask, positions=torch.tensor([[0, 1, 2, 0, 1, 2]]), doc_ids=doc_ids)
    only_a = replace(batch, loss_mask=mask & (doc_ids == 0))
    other = replace(only_a, ids=ids.clone())
    other.ids[0, 3] = 30
    other.targets = other.ids.roll(-1, 1)
    assert max_diff(NextToken()(MODEL, only_a)["loss"].sum, NextToken()(MODEL, other)["loss"].sum) == 0


def test_bad_batches_are_refused():
    batch = pad_batch([[1, 2, 3, 4], [5, 6]])
    with pytest.raises(ValueError, match="no targets"): NextToken().counts(Batch(batch.ids))
    with pytest.raises(ValueError, match="no targets"): NextToken()(MODEL, Batch(batch.ids))
    for f in (NextToken().counts, lambda b: NextToken()(MODEL, b)):
        with pytest.raises(ValueError, match="2 targets count at padding"): f(replace(batch, loss_mask=torch.ones_like(batch.loss_mask)))
    for chunk in (None, 0, 4):
        wrong = replace(batch, targets=torch.where(batch.targets == 4, 37, batch.targets))
        with pytest.raises(ValueError, match="target 37 lies outside the vocabulary 0..36"): NextToken(chunk)(MODEL, wrong)
    with pytest.raises(ValueError, match="chunk"): NextToken(-1)
    for f in (fused_nll, chunked_logprobs):
        with pytest.raises(ValueError, match="at least 1 row"): f(torch.randn(2, 3), nn.Linear(3, 4, bias=False), torch.tensor([0, 1]), 0)
    empty = replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))
    with pytest.raises(ValueError, match="count of 0"): weighted_loss(NextToken()(MODEL, empty), NextToken().counts(empty))


class PeakMemory(TorchDispatchMode):
    "The most bytes of live storages made inside the block."

    def __enter__(self):
        self.live, self.now, self.peak = set(), 0, 0
        return super().__enter__()

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        out = f(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor): self.see(t.untyped_storage())
        return out

    def see(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key in self.live: return
        self.live.add(key); self.now += size; self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.gone, key, size)

    def gone(self, key, size): self.live.discard(key); self.now -= size


def test_logits_are_never_all_there():
    N, C, V = 512, 16, 1024
    h, head, targets = torch.randn(N, C, requires_grad=True), nn.Linear(C, V, bias=False), torch.randint(V, (N,))

    def peak(f):
        h.grad = head.weight.grad = None
        with PeakMemory() as memory: f().backward()
        return memory.peak

    logits = 4 * N * V
    assert peak(lambda: -plain_logprobs(h, head, targets).sum()) >= 3 * logits
    for f in (lambda: fused_nll(h, head, targets, 32), lambda: -chunked_logprobs(h, head, targets, 32).sum()):
        assert peak(f) < logits / 3  # four chunks of 1/16 and the gradients of weight and hidden


def test_the_model_may_be_called_with_an_objective():
    batch = random_batch()
    a, b = MODEL(batch, NextToken())["loss"], NextToken()(MODEL, batch)["loss"]
    assert isinstance(a, Term) and a.count == b.count and torch.equal(a.sum, b.sum)


MODEL = model_of()
