"""The exported folder, opened by transformers; and folders that are left alone."""

import os
import sys
import warnings
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from llmlab.core.util import max_diff
from llmlab.deploy.export import export_model
from llmlab.deploy.quantize import quantize_model
from llmlab.model import interop
from llmlab.model.generate import generate
from llmlab.model.interop import llama_name
from llmlab.model.transformer import ModelConfig, Transformer
from llmlab.tokenizer.bpe import BPETokenizer
from llmlab.tokenizer.chat import CHAT_TOKENS, TEMPLATE, render

sys.path.append(str(Path(__file__).parents[1] / "model"))
from llama_reference import in_float64  # noqa: E402

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
    theirs, info = AutoModelForCausalLM.from_pretrained(export_model(model, TOKENIZER, tmp_path / "m", TEMPLATE), output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids = torch.randint(TOKENIZER.vocab_size, (2, 30))
    with torch.no_grad():
        gap = max_diff(model(ids), theirs.eval()(ids).logits)
    parity(f"export: logits, {more or 'default shape'}", "deploy.export", "transformers", version("transformers"), gap, 1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        greedy = theirs.generate(ids[:1, :6], max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)[0, 6:].tolist()
    assert generate(model, ids[:1, :6].tolist(), 20)[0] == greedy


@pytest.mark.parametrize("more", SHAPES)
def test_in_float64_logits_and_every_gradient_agree(tmp_path, more, parity):
    from transformers import AutoModelForCausalLM

    model = model_of(init_std=0.1, **more).double()
    folder = export_model(model, TOKENIZER, tmp_path / "m", TEMPLATE)
    theirs, ids = AutoModelForCausalLM.from_pretrained(folder), torch.randint(TOKENIZER.vocab_size, (2, 30))
    assert theirs.dtype == torch.float64  # the folder says so
    with in_float64():
        theirs = AutoModelForCausalLM.from_pretrained(folder)  # its table of rotations is made when it is
        logits = theirs(ids).logits
        logits.square().sum().backward()
    ours = model(ids)
    ours.square().sum().backward()
    grads = {llama_name(n): p.grad for n, p in model.named_parameters()}
    scale = max(g.abs().max() for g in grads.values())
    gap = max_diff([ours, {n: g / scale for n, g in grads.items()}], [logits, {n: p.grad / scale for n, p in theirs.named_parameters()}])
    claim = f"export: logits and gradients in float64, {more or 'default shape'}"
    parity(claim, "deploy.export", "transformers", version("transformers"), gap, 1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_weights_arrive_bit_for_bit_in_their_own_type(tmp_path, dtype):
    from transformers import AutoModelForCausalLM

    model = model_of(num_kv_heads=2).to(dtype)
    theirs = AutoModelForCausalLM.from_pretrained(export_model(model, TOKENIZER, tmp_path / "m")).state_dict()
    ours = {llama_name(n): t for n, t in model.state_dict().items()}
    assert ours.keys() == theirs.keys() and all(torch.equal(t, theirs[n]) and theirs[n].dtype == dtype for n, t in ours.items())


def test_a_model_that_only_continues_text_needs_no_chat(tmp_path):
    from transformers import AutoTokenizer, GenerationConfig

    plain = BPETokenizer.train(["a b " * 9], 258, ["<|endoftext|>"], allow_smaller=True)
    folder = export_model(model_of(), plain, tmp_path / "m", generation={"do_sample": True, "temperature": 0.5})
    reader, said = AutoTokenizer.from_pretrained(folder), GenerationConfig.from_pretrained(folder)
    assert reader.chat_template is None and reader.eos_token == "<|endoftext|>" and reader("a b")["input_ids"] == plain.encode("a b")
    assert said.do_sample and said.temperature == 0.5 and said.eos_token_id == [plain.special_ids["<|endoftext|>"]]


def test_generation_stops_where_an_answer_ends(tmp_path):
    from transformers import AutoModelForCausalLM

    model, end = model_of(tie_embeddings=False), TOKENIZER.special_ids["<|end|>"]
    ids = torch.randint(200, (1, 6))
    third = generate(model, ids.tolist(), 3)[0][2]
    with torch.no_grad():  # what comes third is from now on the end
        model.head.weight[[third, end]] = model.head.weight[[end, third]]
    ours = generate(model, ids.tolist(), 20, stop=(end,))[0]
    theirs = AutoModelForCausalLM.from_pretrained(export_model(model, TOKENIZER, tmp_path / "m", TEMPLATE))
    assert theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20)[0, 6:].tolist() == ours
    assert ours[-1] == end and len(ours) < 20


OTHER = """{% for m in messages %}{{ '<|user|>' if m['role'] == 'user' else '<|assistant|>' }}
 {{ m['content'] | trim }}<|endoftext|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""


def test_another_template_travels_as_it_is(tmp_path):
    from transformers import AutoTokenizer

    reader = AutoTokenizer.from_pretrained(export_model(model_of(), TOKENIZER, tmp_path / "m", OTHER, end="<|endoftext|>"))
    talk = [{"role": "user", "content": " one? "}, {"role": "assistant", "content": "two"}]
    assert reader.chat_template == OTHER and reader.eos_token == "<|endoftext|>"
    assert reader.apply_chat_template(talk, tokenize=True)["input_ids"] == render(talk, TOKENIZER, OTHER).ids


@pytest.mark.parametrize(
    "template, said",
    [
        ("{% for m in messages %}", "does not compile"),
        ("{{ messages[0]['content'] }}<|end|>", r"leaves out messages\[1\]"),
        ("{% for m in messages %}<|im_start|>{{ m['content'] }}<|end|>{% endfor %}", "im_start"),
        ("{% for m in messages %}<|user|>{{ m['content'] }}{% endfor %}", "never writes '<|end|>'"),
    ],
)
def test_a_template_that_does_not_work_is_not_exported(tmp_path, template, said):
    with pytest.raises(ValueError, match=said.replace("|", r"\|")):
        export_model(model_of(), TOKENIZER, tmp_path / "m", template)
    assert not any(tmp_path.iterdir())


def test_the_tokenizer_and_the_template_say_the_same(tmp_path):
    from transformers import AutoTokenizer

    reader = AutoTokenizer.from_pretrained(export_model(model_of(), TOKENIZER, tmp_path / "m", TEMPLATE))
    for text in ("\x00\u200b\ufeff", "word " * 200, " a  b\n\n\tc", "1234 x1y22", "不 🙂 e\u0301 'LL", "def f(a=[1]):\r\n  return"):
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
    assert read(export_model(model_of(norm_eps=1e-3), TOKENIZER, tmp_path / "m")) != first
    assert read(export_model(model_of(), TOKENIZER, tmp_path / "m")) == first and [p.name for p in tmp_path.iterdir()] == ["m"]


def folder_with(path, **files):
    path.mkdir()
    for name, content in files.items():
        (path / name.replace("_", ".", 1)).write_text(content)
    return path


@pytest.mark.parametrize(
    "files",
    [
        {"thesis_txt": "years of work"},
        {"config_json": "{}", "model_safetensors": "", "thesis_txt": "years of work"},
        {"config_json": '{"model_type": "llama"}', "model_safetensors": "a model from elsewhere"},
        {"config_json": '{"exported_by": "llmlab"}', "notes_md": "about the export"},
        {"model_safetensors": "weights"},
    ],
)
def test_a_folder_that_is_no_export_is_left_alone(tmp_path, files):
    mine = folder_with(tmp_path / "mine", **files)
    before = {p.name: p.read_text() for p in mine.iterdir()}
    with pytest.raises(ValueError, match="choose another folder"):
        export_model(model_of(), TOKENIZER, mine)
    assert {p.name: p.read_text() for p in mine.iterdir()} == before and [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_a_file_is_no_folder_and_a_link_stays_a_link(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="is a file"):
        export_model(model_of(), TOKENIZER, tmp_path / "file")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    export_model(model_of(), TOKENIZER, tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "config.json").exists()
    monkeypatch.chdir(tmp_path / "real")
    export_model(model_of(), TOKENIZER, "../deep/er")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["deep", "file", "link", "real"]


@pytest.mark.parametrize("step", ["save", "tokenizer", "rename"])
def test_a_failure_at_any_step_leaves_the_older_export(tmp_path, monkeypatch, step):
    read = lambda d: {p.name: p.read_bytes() for p in d.iterdir()}
    first = read(export_model(model_of(), TOKENIZER, tmp_path / "m", TEMPLATE))

    def full(*args, **more):
        raise OSError(28, "No space left on device")

    class Broken(BPETokenizer):
        to_hf = full

    tokenizer, rename = TOKENIZER, os.rename
    if step == "save":
        monkeypatch.setattr(interop.safetensors.torch, "save_file", full)
    if step == "tokenizer":
        tokenizer = Broken(TOKENIZER.merges, TOKENIZER.special_tokens, TOKENIZER.pattern)
    if step == "rename":
        monkeypatch.setattr(interop.os, "rename", lambda a, b: full() if str(a).endswith(".tmp") else rename(a, b))
    with pytest.raises(OSError, match="No space"):
        export_model(model_of(norm_eps=1e-3), tokenizer, tmp_path / "m", TEMPLATE)
    assert read(tmp_path / "m") == first and [p.name for p in tmp_path.iterdir()] == ["m"]


class Adapter(torch.nn.Linear):
    "Has the names of a linear layer, and does something else."


def test_a_model_that_is_not_what_its_configuration_says_is_refused(tmp_path):
    def check(change, said, **more):
        model = model_of(**more)
        with torch.no_grad():
            change(model)
        with pytest.raises(ValueError, match=said):
            export_model(model, TOKENIZER, tmp_path / "m")
        assert not any(tmp_path.iterdir())

    check(quantize_model, "embed_tokens is Int8Embedding|head is Int8Linear|k_proj is Int8Linear")
    check(lambda m: setattr(m.blocks[0].attention, "q_proj", Adapter(48, 48, bias=False)), "q_proj is Adapter")
    check(lambda m: m.blocks[1].register_module("extra", torch.nn.Linear(2, 2)), "extra is Linear")
    check(lambda m: m.blocks.__delitem__(1), "blocks.1.* is missing")
    check(lambda m: setattr(m.head, "weight", torch.nn.Parameter(m.head.weight + 1)), "ties the head")
    check(lambda m: m.norm.weight.fill_(torch.nan), "norm.weight holds NaN")
    check(lambda m: m.blocks[0].mlp.up_proj.weight[0].fill_(torch.inf), "up_proj.weight holds NaN or infinity")


def test_a_compiled_model_is_exported_as_the_model_in_it(tmp_path):
    read = lambda d: {p.name: p.read_bytes() for p in d.iterdir()}
    plain, wrapped = model_of(), torch.compile(model_of())
    assert read(export_model(plain, TOKENIZER, tmp_path / "a")) == read(export_model(wrapped, TOKENIZER, tmp_path / "b"))


def test_a_tokenizer_that_does_not_fit_is_refused(tmp_path):
    plain = BPETokenizer.train(["a b " * 9], 258, ["<|endoftext|>"], allow_smaller=True)
    with pytest.raises(ValueError, match="no token '<.end.>' to end a turn"):
        export_model(model_of(), plain, tmp_path / "m", TEMPLATE)
    with pytest.raises(ValueError, match="no token '<.stop.>' to end a text"):
        export_model(model_of(), plain, tmp_path / "m", end="<|stop|>")
    small = Transformer(ModelConfig(TOKENIZER.vocab_size - 1, hidden_size=48, num_layers=1, num_heads=4))
    with pytest.raises(ValueError, match="do not belong together"):
        export_model(small, TOKENIZER, tmp_path / "m")
    assert not any(tmp_path.iterdir())
