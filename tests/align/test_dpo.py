"""DPO against trl's trainer, and what it does with references, splits and bad input."""

import copy
import math
import sys
import warnings
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmlab.align.dpo import DPO, answer_logprobs, dpo_loss, preference_metrics, reference_logprobs, sequence_logprobs
from llmlab.align.preferences import Pair, PairLoader, pair_batch
from llmlab.core.util import max_diff
from llmlab.model.transformer import ModelConfig, Transformer
from llmlab.train.trainer import TrainConfig, Trainer

sys.path.insert(0, str(Path(__file__).parents[1] / "model"))
from llama_reference import llama_name, make_llama  # noqa: E402


def model_of(**more):
    torch.manual_seed(0)
    return Transformer(ModelConfig(61, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, context=32, **more)).double()


def pairs_of(n=12, seed=0):
    g = torch.Generator().manual_seed(seed)
    draw = lambda k: tuple(torch.randint(2, 61, (k,), generator=g).tolist())
    return [Pair(draw(i % 4 + 1), draw(i % 5 + 1), draw(i % 3 + 6)) for i in range(n)]


def moved(model):
    "The model some steps later."
    policy = copy.deepcopy(model)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.03 * torch.randn(p.shape, generator=g, dtype=p.dtype))
    return policy


def trl_trainer(policy, ref, folder):
    "trl's own trainer on transformers' Llama with our weights."
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast
    from trl import DPOConfig, DPOTrainer

    from llmlab.tokenizer.bpe import BPETokenizer

    BPETokenizer.train(["a b c " * 9], 258, ["<|end|>"], allow_smaller=True).to_hf(folder / "tokenizer.json")
    reader = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|end|>", pad_token="<|end|>")
    args = DPOConfig(
        output_dir=str(folder), beta=0.3, use_cpu=True, report_to=[], bf16=False, gradient_checkpointing=False, max_length=None
    )
    rows = Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}] * 2)
    return DPOTrainer(model=policy, ref_model=ref, args=args, train_dataset=rows, processing_class=reader)


def trl_inputs(batch):
    "The same rows as trl's collator lays them out: whole sequences, the chosen ones first; trl shifts by itself."
    whole = torch.cat([batch.ids, torch.zeros_like(batch.ids[:, :1])], 1)
    whole[:, 1:] = torch.where(batch.doc_ids >= 0, batch.targets, whole[:, 1:])
    answers = torch.cat([torch.zeros_like(batch.loss_mask[:, :1]), batch.loss_mask], 1).long()
    real = torch.cat([torch.ones_like(batch.ids[:, :1]), (batch.doc_ids >= 0).long()], 1)
    order = [*range(0, len(whole), 2), *range(1, len(whole), 2)]
    return {"input_ids": whole[order], "attention_mask": real[order], "completion_mask": answers[order]}


def test_loss_and_gradients_equal_trl(tmp_path, parity):
    "In float32, in which trl's kernel for log-probabilities adds up whatever the model is; the page proves the rest in float64."
    model = model_of().float()
    policy, pairs = moved(model), pairs_of()
    batch = pair_batch(pairs, extra={"ref": reference_logprobs(model, pairs)})
    inputs = trl_inputs(batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = make_llama(policy)
        trainer = trl_trainer(theirs, make_llama(model), tmp_path)
        trainer.model.train()
        loss = trainer.compute_loss(trainer.model, inputs)
        loss.backward()
    term = DPO(0.3)(policy, batch)["dpo"]
    (term.sum / term.count).backward()
    grads = dict(theirs.named_parameters())
    gaps = {n: max_diff(p.grad, grads[llama_name(n)].grad) for n, p in policy.named_parameters()}
    parity(
        "DPO: loss and gradients",
        "align.dpo",
        "trl",
        version("trl"),
        max(*gaps.values(), abs(loss.item() - (term.sum / term.count).item())),
        2e-5,
    )


def test_at_the_start_the_loss_is_ln_2_and_the_margin_0():
    model, pairs = model_of(), pairs_of()
    ref = reference_logprobs(model, pairs)
    for policy in (model, copy.deepcopy(model)):
        term = DPO()(policy, pair_batch(pairs, extra={"ref": ref}))["dpo"]
        assert abs(term.sum.item() / term.count - math.log(2)) < 1e-10
        assert preference_metrics(policy, pairs, ref) == {"accuracy": 0.0, "margin": 0.0, "chosen": 0.0, "rejected": 0.0}
    assert dpo_loss(*(torch.tensor([x], dtype=torch.float64) for x in (-9, -13, -10, -12))).item() == pytest.approx(0.59814, abs=5e-6)


def test_the_reference_does_not_move_in_training_and_the_policy_learns():
    model, pairs = model_of().float(), pairs_of(24)
    ref = reference_logprobs(model, pairs)
    before, loader = ref.clone(), PairLoader(pairs, 8, 4, extra={"ref": ref})
    trainer = Trainer(model, DPO(nll=0.1), loader, TrainConfig(updates=40, peak=3e-3, schedule="linear", warmup=2))
    losses = [trainer.update(loader.update(i))["term.dpo"] for i in range(40)]
    assert torch.equal(ref, before) and losses[-1] < 0.5 < losses[0]
    assert preference_metrics(model, pairs, ref)["accuracy"] == 1.0


@pytest.mark.parametrize("tie", [True, False])
def test_precomputed_values_are_those_of_a_live_reference(tie):
    model, pairs = model_of(tie_embeddings=tie), pairs_of(9)
    alone = torch.stack([sequence_logprobs(model, pair_batch([p])) for p in pairs]).detach()
    assert max_diff(reference_logprobs(model, pairs, rows=4), alone) < 1e-12
    model.train()
    reference_logprobs(model, pairs)
    assert model.training


@settings(deadline=None, max_examples=12)
@given(micro=st.integers(1, 12), nll=st.sampled_from([0.0, 0.5]), world=st.sampled_from([1, 2, 3]))
def test_no_split_changes_the_gradient(micro, nll, world):
    model, pairs = model_of(), pairs_of()
    ref, policy, objective = reference_logprobs(model, pairs), moved(model), DPO(0.2, nll)

    def gradient(batches):
        policy.zero_grad()
        counts = {}
        for b in batches:
            for k, v in objective.counts(b).items():
                counts[k] = counts.get(k, 0) + v
        for b in batches:
            sum(t.weight * t.sum / counts[n] for n, t in objective(policy, b).items()).backward()
        return {n: p.grad.clone() for n, p in policy.named_parameters()}

    parts = [b for r in range(world) for b in PairLoader(pairs, 12, micro, rank=r, world=world, extra={"ref": ref}).update(0)]
    assert max_diff(gradient(parts), gradient(PairLoader(pairs, 12, extra={"ref": ref}).update(0))) < 1e-12


def test_padding_and_the_end_token_do_not_matter():
    model = model_of()
    pairs = [Pair((5, 0), (7, 0), (0, 8, 9, 0)), Pair((0,), (0,), (3, 0))]  # 0 is the end and the padding
    together = answer_logprobs(model, pair_batch(pairs)).sum(1)
    alone = torch.cat([answer_logprobs(model, pair_batch([p])).sum(1) for p in pairs])
    wider = answer_logprobs(model, pair_batch(pairs, length=20)).sum(1)
    assert max_diff(together, alone) < 1e-12 and max_diff(together, wider) < 1e-12


def test_bad_input_is_named():
    pairs = pairs_of(2)
    for wrong in (0, -1, math.nan):
        with pytest.raises(ValueError, match="beta"):
            DPO(wrong)
    with pytest.raises(ValueError, match="nll"):
        DPO(nll=-0.1)
    with pytest.raises(ValueError, match="ref"):
        DPO().counts(pair_batch(pairs))
    batch = pair_batch(pairs, extra={"ref": torch.zeros(2, 2)})
    with pytest.raises(ValueError, match="no pairs"):
        DPO().counts(batch[:3])
    batch.loss_mask[1] = False
    with pytest.raises(ValueError, match="row 1 has no answer"):
        DPO()(model_of(), batch)
    with pytest.raises(ValueError, match="one shape"):
        dpo_loss(torch.zeros(2), torch.zeros(2), torch.zeros(2), torch.zeros(1))
    broken = model_of()
    with torch.no_grad():
        broken.norm.weight.fill_(math.nan)
    with pytest.raises(ValueError, match="not finite"):
        reference_logprobs(broken, pairs)
