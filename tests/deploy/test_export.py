"""The exported folder, opened by transformers; and folders that are left alone."""

import warnings
from importlib.metadata import version

import pytest
import torch

from llmlab.core.util import max_diff
from llmlab.deploy.export import export_model
from llmlab.deploy.quantize import quantize_model
from llmlab.model.generate import generate
from llmlab.model.transformer import ModelConfig, Transformer
from llmlab.tokenizer.bpe import BPETokenizer
from llmlab.tokenizer.chat import CHAT_TOKENS, render

TOKENIZER = BPETokenizer.train(["one two three, and four 12. " * 30], 300, ["<|endoftext|>", *CHAT_TOKENS], digits=1, allow_smaller=True)


def model_of(**more):
    torch.manual_seed(0)
    return Transformer(
        ModelConfig(TOKENIZER.vocab_size, **{"hidden_size": 48, "num_layers": 2, "num_heads": 4, "context": 64, **more})
    ).eval()


SHAPES = [
    {},
    {"num_kv_heads": 2, "rope_theta": 777.0},
    {"num_kv_heads": 1, "tie_embeddings": False, "norm_eps": 3e-3},
    {"intermediate_size": 80},
]


@pytest.mark.parametrize("more", SHAPES)
def test_transformers_opens_it_with_the_same_logits_and_text(tmp_path, more, parity):
    from transformers import AutoModelForCausalLM

    model = model_of(**more)
    theirs, info = AutoModelForCausalLM.from_pretrained(export_model(model, TOKENIZER, tmp_path / "m"), output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids = torch.randint(TOKENIZER.vocab_size, (2, 30))
    with torch.no_grad():
        gap = max_diff(model(ids), theirs.eval()(ids).logits)
    parity(f"export: logits, {more or 'default shape'}", "deploy.export", "transformers", version("transformers"), gap, 1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        greedy = theirs.generate(ids[:1, :6], max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)[0, 6:].tolist()
    assert generate(model, ids[:1, :6].tolist(), 20)[0] == greedy


def test_the_tokenizer_and_the_template_say_the_same(tmp_path):
    from transformers import AutoTokenizer

    reader = AutoTokenizer.from_pretrained(export_model(model_of(), TOKENIZER, tmp_path / "m"))
    for text in ("", " a  b\n\n\tc", "1234 x1y22", "不 🙂 e\u0301 'LL", "def f(a=[1]):\r\n  return"):
        assert reader(text)["input_ids"] == TOKENIZER.encode(text)
    talk = [{"role": "system", "content": "s"}, {"role": "user", "content": "one?"}, {"role": "assistant", "content": "two"}]
    for n in (2, 3):
        for more in (True, False):
            said = reader.apply_chat_template(talk[:n], tokenize=True, add_generation_prompt=more, return_dict=True)["input_ids"]
            assert said == render(talk[:n], TOKENIZER, add_generation_prompt=more).ids
    assert reader.eos_token_id == TOKENIZER.special_ids["<|end|>"] and reader.model_max_length == 64


def test_two_exports_are_the_same_bytes_and_the_second_replaces_the_first(tmp_path):
    read = lambda d: {p.name: p.read_bytes() for p in d.iterdir()}
    first = read(export_model(model_of(), TOKENIZER, tmp_path / "m"))
    assert read(export_model(model_of(), TOKENIZER, tmp_path / "m")) == first and [p.name for p in tmp_path.iterdir()] == ["m"]


def test_what_cannot_be_exported_leaves_everything_as_it_was(tmp_path):
    model = model_of()
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="no export"):
        export_model(model, TOKENIZER, mine)
    plain = BPETokenizer.train(["a b " * 9], 258, ["<|endoftext|>"], allow_smaller=True)
    with pytest.raises(ValueError, match="no token"):
        export_model(model, plain, tmp_path / "m")
    small = Transformer(ModelConfig(200, hidden_size=48, num_layers=1, num_heads=4))
    with pytest.raises(ValueError, match="do not belong together"):
        export_model(small, TOKENIZER, tmp_path / "m")
    quantize_model(model)
    with pytest.raises(ValueError, match="plain float model"):
        export_model(model, TOKENIZER, tmp_path / "m")
    assert (mine / "thesis.txt").read_text() == "years of work" and [p.name for p in tmp_path.iterdir()] == ["mine"]
