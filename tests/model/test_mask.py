"Masks against the definition, torch and transformers; no row is ever empty."

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_mask
from transformers import LlamaConfig
from transformers.masking_utils import create_causal_mask

from llmlab.model.mask import cache_mask, causal_mask, document_mask

quick = settings(max_examples=40, deadline=None)
rows_of_ids = st.integers(1, 9).flatmap(lambda T: st.lists(st.lists(st.integers(-1, 3), min_size=T, max_size=T), min_size=1, max_size=3))


def by_definition(doc_ids):
    "Pair by pair."
    see = lambda row, t, s: s == t or (s < t and row[s] == row[t] and row[t] >= 0)
    return torch.tensor([[[[see(row, t, s) for s in range(len(row))] for t in range(len(row))]] for row in doc_ids])


@quick
@given(rows_of_ids)
def test_document_mask_is_the_definition(doc_ids):
    mask = document_mask(torch.tensor(doc_ids))
    assert mask.dtype == torch.bool and torch.equal(mask, by_definition(doc_ids))
    assert mask.any(-1).all(), "no query may be left with nothing to see"


@quick
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 3))
def test_documents_are_triangles_on_the_diagonal(lengths, padding):
    ids = torch.tensor([d for d, n in enumerate(lengths) for _ in range(n)] + [-1] * padding)
    blocks = [causal_mask(n) for n in lengths] + [causal_mask(1)] * padding
    assert torch.equal(document_mask(ids[None])[0, 0], torch.block_diag(*(b.float() for b in blocks)).bool())


def test_numbers_of_documents_do_not_matter():
    assert torch.equal(document_mask(torch.tensor([[0, 0, 1, 2]])), document_mask(torch.tensor([[9, 9, 4, 7]])))
    assert torch.equal(document_mask(torch.zeros(1, 6, dtype=torch.int64))[0, 0], causal_mask(6))


@quick
@given(st.lists(st.integers(0, 3), min_size=1, max_size=3), st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(0, 2))
def test_cache_mask_is_rows_of_the_document_mask(pads, chunks, spare):
    "Prompts padded on the left and fed a few tokens at a time see what they would have seen at once."
    T = sum(chunks)
    doc_ids = torch.tensor([[-1 if t < p else 0 for t in range(T)] for p in pads])
    whole, start = document_mask(doc_ids), 0
    for t in chunks:
        end, K = start + t, start + t + spare
        valid = torch.arange(K) >= torch.tensor(pads)[:, None]
        mask = cache_mask(torch.arange(start, end).expand(len(pads), t), K, valid)
        assert torch.equal(mask[..., :end], whole[:, :, start:end, :end])
        assert not mask[..., end:].any(), "slots that are not filled yet"
        start = end


def test_cache_mask_without_padding():
    assert torch.equal(cache_mask(torch.arange(5)[None], 5)[0, 0], causal_mask(5))
    assert cache_mask(torch.tensor([[2], [4]]), 6)[:, 0, 0].int().tolist() == [[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0]]


@pytest.mark.parametrize("call, named", [
    (lambda: causal_mask(0), "0"),
    (lambda: document_mask(torch.zeros(4, dtype=torch.int64)), r"\(4,\)"),
    (lambda: cache_mask(torch.arange(3), 3), r"\(3,\)"),
    (lambda: cache_mask(torch.tensor([[3]]), 3), "0..2"),
    (lambda: cache_mask(torch.tensor([[-1]]), 3), "-1"),
    (lambda: cache_mask(torch.tensor([[1]]), 3, torch.ones(1, 2, dtype=torch.bool)), r"\(1, 3\)"),
])
def test_refusals_name_the_value(call, named):
    with pytest.raises(ValueError, match=named): call()


def test_equal_to_torch_create_mask(parity):
    ids = torch.randint(-1, 3, (4, 32), generator=torch.Generator().manual_seed(0)).sort(-1).values
    rule = lambda b, h, q, k: (q == k) | ((q >= k) & (ids[b, q] == ids[b, k]) & (ids[b, q] >= 0))
    theirs = create_mask(rule, 4, 1, 32, 32, device="cpu")
    parity("document mask", "model.mask", "torch.nn.attention.flex_attention.create_mask", torch.__version__,
           (document_mask(ids) != theirs).sum().item(), 0)


def test_equal_to_transformers_masks(parity):
    config = LlamaConfig(hidden_size=16, num_attention_heads=2, attn_implementation="sdpa")
    theirs = lambda attention_mask, position_ids: create_causal_mask(config, torch.zeros(2, 6, 16), attention_mask, None, position_ids)
    packed = theirs(None, torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 0, 1, 2, 3]]))
    ours = document_mask(torch.tensor([[0, 0, 0, 1, 1, 2], [5, 5, 8, 8, 8, 8]]))
    parity("mask of packed documents", "model.mask", "transformers", transformers.__version__, (packed != ours).sum().item(), 0)
    valid = torch.tensor([[False, False, True, True, True, True], [True] * 6])
    padded, ours = theirs(valid.long(), None), cache_mask(torch.arange(6).expand(2, 6), 6, valid)
    differ = (padded[:, 0] != ours[:, 0])[valid]  # rows of padding are empty there, and see themselves here
    parity("mask of left-padded prompts", "model.mask", "transformers", transformers.__version__, differ.sum().item(), 0)
