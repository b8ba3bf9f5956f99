"""Conversations packed into rows: nothing lost, nothing seen that should not be, the same gradient in every split."""

from importlib.metadata import version

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmlab.core.util import max_diff
from llmlab.data.packing import Loader, TokenStream
from llmlab.finetune.sft import SFT, Example, ExampleLoader, fill_rows, make_examples, rows_batch
from llmlab.model.transformer import ModelConfig, Transformer
from llmlab.tokenizer.bpe import BPETokenizer
from llmlab.tokenizer.chat import CHAT_TOKENS


def examples_of(n=16, seed=0):
    g = torch.Generator().manual_seed(seed)
    out = []
    for i in range(n):
        ids = torch.randint(0, 61, (int(torch.randint(4, 15, (1,), generator=g)),), generator=g).tolist()
        start = i % (len(ids) - 2) + 1
        out.append(Example(tuple(ids), tuple(k >= start for k in range(len(ids)))))
    return out


def model_of():
    torch.manual_seed(0)
    return Transformer(ModelConfig(61, hidden_size=32, num_layers=2, num_heads=4, context=64)).double()


def gradient(model, batches, objective):
    model.zero_grad()
    counts = {}
    for b in batches:
        for k, v in objective.counts(b).items():
            counts[k] = counts.get(k, 0) + v
    loss = sum(t.weight * t.sum / counts[n] for b in batches for n, t in objective(model, b).items())
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad.clone() for n, p in model.named_parameters()}}


@settings(deadline=None, max_examples=10)
@given(length=st.integers(16, 60), micro=st.integers(1, 8), world=st.sampled_from([1, 2, 4]))
def test_no_packing_and_no_split_changes_the_gradient(length, micro, world):
    model, examples = model_of(), examples_of()
    alone = [rows_batch([[e]]) for e in examples]
    packed = [b for r in range(world) for b in ExampleLoader(examples, 16, length, micro, 3, r, world).update(0)]
    assert max_diff(gradient(model, packed, SFT()), gradient(model, alone, SFT())) < 1e-12


def test_loss_and_gradients_equal_transformers(parity):
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parents[1] / "model"))
    from llama_reference import in_float64, llama_name, make_llama

    model, examples = model_of(), examples_of(8)
    ours = gradient(model, ExampleLoader(examples, 8, 40).update(0), SFT())
    n = sum(sum(e.mask[1:]) for e in examples)
    with in_float64():
        theirs = make_llama(model)
        total = 0
        for e in examples:
            ids, mask = torch.tensor([e.ids]), torch.tensor([e.mask])
            total = total + theirs(ids, labels=torch.where(mask, ids, -100), num_items_in_batch=torch.tensor(n)).loss
        total.backward()
    grads = dict(theirs.named_parameters())
    gap = max(max_diff(ours["loss"], total.detach()), *(max_diff(ours[k], grads[llama_name(k)].grad) for k, _ in model.named_parameters()))
    parity("SFT: loss and gradients of packed conversations", "finetune.sft", "transformers", version("transformers"), gap, 1e-9)


@given(st.lists(st.integers(2, 20), min_size=1, max_size=20))
def test_rows_hold_every_example_once_and_none_is_too_long(lengths):
    examples = [Example((i,) * n, (True,) * n) for i, n in enumerate(lengths)]
    rows = fill_rows(examples, 19)
    assert sorted(e.ids[0] for r in rows for e in r) == list(range(len(lengths))) and all(sum(len(e) - 1 for e in r) <= 19 for r in rows)
    b = rows_batch(rows)
    assert int(b.loss_mask.sum()) == sum(n - 1 for n in lengths) and not (b.loss_mask & (b.doc_ids < 0)).any()
    starts = b.positions == 0
    assert int((starts & (b.doc_ids >= 0)).sum()) == len(lengths)


def test_padding_is_known_by_position_not_by_id():
    ids, mask = (10, 0, 11, 0), (True,) * 4
    b = rows_batch([[Example(ids, mask)], [Example((5,) * 7, (True,) * 7)]])
    assert b.targets[0][b.loss_mask[0]].tolist() == [0, 11, 0]


def test_replay_is_a_term_of_its_own():
    model, examples, stream = model_of(), examples_of(), TokenStream([list(range(61)) * 20])
    loader = ExampleLoader(examples, 8, 40, replay=Loader(stream, 40, 2))
    batches = loader.update(0)
    names = [next(iter(SFT().counts(b))) for b in batches]
    assert names[-1] == "replay" and set(names[:-1]) == {"answer"} and loader.identity["replay"]["rows"] == 2
    both = gradient(model, batches, SFT(0.25))
    a, r = gradient(model, batches[:-1], SFT()), gradient(model, batches[-1:], SFT(1.0))
    assert max_diff(both, {k: a[k] + 0.25 * r[k] for k in a}) < 1e-12


def test_what_does_not_fit_is_counted_or_refused():
    t = BPETokenizer.train(["one two " * 9], 270, ["<|endoftext|>", *CHAT_TOKENS], allow_smaller=True)
    talk = lambda n: [{"role": "user", "content": "one " * n}, {"role": "assistant", "content": "two"}]
    kept, dropped = make_examples([talk(n) for n in (1, 2, 60)], t, 40)
    assert len(kept) == 2 and dropped == {"too_long": 1} and all(e.mask[-1] and e.ids[-1] == t.special_ids["<|end|>"] for e in kept)
    with pytest.raises(ValueError, match="nothing to learn"):
        Example((1, 2, 3), (True, False, False))
    with pytest.raises(ValueError, match="3 ids and 2 marks"):
        Example((1, 2, 3), (True, False))
    with pytest.raises(ValueError, match="does not fit into a row"):
        ExampleLoader(kept, 2, 5)
    with pytest.raises(ValueError, match="fewer than the 3"):
        ExampleLoader(kept, 3, 40)
    with pytest.raises(ValueError, match="multiple of 2"):
        ExampleLoader(kept, 1, 40, world=2)
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=f"rank {rank} of world 2"):
            ExampleLoader(kept, 2, 40, rank=rank, world=2)
    with pytest.raises(ValueError, match="replay_weight"):
        SFT(-1)
    with pytest.raises(ValueError, match="empty answer"):
        make_examples([[*talk(1)[:1], {"role": "assistant", "content": ""}]], t, 40)
