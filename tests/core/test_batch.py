"""Batches: padding is known by place, rows stay together, mistakes are refused."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from llmlab.core.batch import Batch, next_token_batch, pad_batch
from llmlab.core.util import max_diff

V = 7
rows_of = st.lists(st.lists(st.integers(0, V - 1), min_size=2, max_size=9), min_size=1, max_size=5)


class Recurrent(nn.Module):
    "A causal model in float64: a position sees nothing to its right."

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.rnn, self.head = nn.Embedding(V, 4), nn.GRU(4, 4, batch_first=True), nn.Linear(4, V)
        self.double()

    def forward(self, ids): return self.head(self.rnn(self.embed(ids))[0])


def learn(model, batch):
    losses = F.cross_entropy(model(batch.ids).flatten(0, 1), batch.targets.flatten(), reduction="none").view(batch.ids.shape)
    total = torch.where(batch.loss_mask, losses, 0.0).sum()
    return total.detach(), list(torch.autograd.grad(total, list(model.parameters())))


@settings(deadline=None, max_examples=25)
@given(rows=rows_of, pad_id=st.integers(0, V - 1), extra=st.integers(0, 4))
def test_padding_changes_neither_loss_nor_gradient(rows, pad_id, extra):
    model = Recurrent()
    alone = [learn(model, next_token_batch(torch.tensor([r]))) for r in rows]
    wanted = [sum(a for a, _ in alone), [sum(g) for g in zip(*[g for _, g in alone], strict=True)]]
    padded = pad_batch(rows, length=max(map(len, rows)) + extra, pad_id=pad_id)
    assert padded.n_targets == sum(len(r) - 1 for r in rows)
    assert max_diff(list(learn(model, padded)), wanted) < 1e-11


def test_padded_loss_equals_transformers(parity):
    import transformers
    from transformers.loss.loss_utils import ForCausalLMLoss

    model, gaps = Recurrent(), []
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(V, (n,), generator=generator).tolist() for n in (2, 9, 5, 7)]
    batch = pad_batch(rows, pad_id=3)
    total, grads = learn(model, batch)
    ids = torch.tensor([r + [3] * (9 - len(r)) for r in rows])
    labels = torch.tensor([r + [-100] * (9 - len(r)) for r in rows])
    # HF widens logits to float32, so the comparison is of that precision
    reference = ForCausalLMLoss(model(ids), labels, V)
    gaps.append(abs(total.item() / batch.n_targets - reference.item()))
    gaps.append(max_diff([g / batch.n_targets for g in grads], list(torch.autograd.grad(reference, list(model.parameters())))))
    parity("loss and gradients of padded rows", "core.batch", "transformers", transformers.__version__, max(gaps), 1e-6)


def test_an_end_token_that_is_also_the_pad_token_is_learnt():
    batch = pad_batch([[10, 0, 11, 0]], length=6, pad_id=0)
    assert batch.targets[batch.loss_mask].tolist() == [0, 11, 0] and batch.n_targets == 3


@settings(deadline=None, max_examples=50)
@given(rows=rows_of, data=st.data())
def test_masks_say_which_tokens_are_targets(rows, data):
    masks = [data.draw(st.lists(st.booleans(), min_size=len(r), max_size=len(r))) for r in rows]
    batch = pad_batch(rows, masks)
    kept = [[t for t, m in zip(r[1:], mask[1:], strict=True) if m] for r, mask in zip(rows, masks, strict=True)]
    assert [batch.targets[i][batch.loss_mask[i]].tolist() for i in range(len(rows))] == kept
    assert torch.equal(batch.doc_ids == 0, torch.arange(batch.ids.shape[1]) < torch.tensor([len(r) - 1 for r in rows])[:, None])
    assert not batch.loss_mask[batch.doc_ids < 0].any()


@settings(deadline=None, max_examples=50)
@given(n=st.integers(1, 9), size=st.integers(1, 10), seed=st.integers(0, 99))
def test_splits_lose_nothing_and_keep_rows_together(n, size, seed):
    generator = torch.Generator().manual_seed(seed)
    batch = next_token_batch(torch.randint(V, (n, 5), generator=generator))
    batch.extra.update(advantage=torch.randn(n, generator=generator), old=torch.randn(n, 4, generator=generator))
    parts = batch.split(size)
    assert [len(p) for p in parts[:-1]] == [size] * (len(parts) - 1) and sum(map(len, parts)) == n
    for name in ("ids", "targets", "loss_mask"): assert torch.equal(torch.cat([getattr(p, name) for p in parts]), getattr(batch, name))
    for name in batch.extra: assert torch.equal(torch.cat([p.extra[name] for p in parts]), batch.extra[name])
    order = torch.randperm(n, generator=generator)
    turned = batch[order]
    assert torch.equal(turned.ids, batch.ids[order]) and torch.equal(turned.extra["old"], batch.extra["old"][order])
    assert len(batch) == n and batch[order.tolist()].n_targets == batch.n_targets


def test_absent_fields_stay_absent_and_maps_leave_the_original():
    batch = Batch(torch.ones(2, 3, dtype=torch.long))
    doubled = batch.map(lambda x: x * 2)
    assert doubled.targets is doubled.positions is None and batch.ids.sum() == 6 and doubled.ids.sum() == 12 and batch.n_targets == 0
    assert batch.to("cpu").ids.device.type == "cpu" and "2 x 3, 0 targets" in repr(batch)


ids, mask = torch.ones(2, 3, dtype=torch.long), torch.ones(2, 3, dtype=torch.bool)


@pytest.mark.parametrize("make, said", [
    (lambda: Batch(torch.ones(3, dtype=torch.long)), r"ids must be \(B,T\)"),
    (lambda: Batch(torch.ones(2, 3)), "integers"),
    (lambda: Batch(ids, ids[:, :2], mask), "targets has shape"),
    (lambda: Batch(ids, ids), "come together"),
    (lambda: Batch(ids, loss_mask=mask), "come together"),
    (lambda: Batch(ids, ids, mask.float()), "loss_mask is bool"),
    (lambda: Batch(ids, ids, mask.long()), "loss_mask is bool"),
    (lambda: Batch(ids, positions=mask), "positions holds"),
    (lambda: Batch(ids, extra={"a": torch.ones(3)}), r"extra\['a'\] has 3 rows"),
    (lambda: Batch(ids)[0], "one row is"),
    (lambda: Batch(ids).split(0), "at least 1 row"),
    (lambda: next_token_batch(ids[:, :1]), "at least 2"),
    (lambda: next_token_batch(ids[0]), r"\(B,T\)"),
    (lambda: pad_batch([]), "no sequences"),
    (lambda: pad_batch([[1, 2], [3]]), "sequence 1 has 1 tokens"),
    (lambda: pad_batch([[1, 2], []]), "sequence 1 has 0 tokens"),
    (lambda: pad_batch([[1, 2, 3]], length=2), "more than length 2"),
    (lambda: pad_batch([[1, 2, 3]], length=0), "more than length 0"),
    (lambda: pad_batch([[1, 2, 3]], masks=[]), "0 masks for 1"),
    (lambda: pad_batch([[1, 2, 3]], masks=[[True]]), "1 entries for 3 tokens"),
    (lambda: pad_batch([[1.5, 2.5]]), "integers")])
def test_mistakes_are_refused_by_name(make, said):
    with pytest.raises(ValueError, match=said): make()
