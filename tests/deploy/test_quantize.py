"""A whole model in int8: shared weights once, saved bit for bit, and loaders that refuse what does not fit."""

import copy
import json
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from torch import nn

from llmlab.core.util import max_diff
from llmlab.deploy.quantize import load_exactly, open_quantized, quantize_model, save_quantized, stored_bytes
from llmlab.model.generate import can_fuse, generate
from llmlab.model.lowbit import Int8Embedding, dequantize, quantize_weight
from llmlab.model.transformer import ModelConfig, Transformer
from llmlab.train.checkpoint import load_model

IDS = torch.arange(40).view(2, 20)


def model_of(tied=True, dtype=torch.float32):
    torch.manual_seed(0)
    return Transformer(ModelConfig(512, hidden_size=64, num_layers=2, num_heads=4, context=64, tie_embeddings=tied)).to(dtype).eval()


@pytest.mark.parametrize("tied", [True, False])
def test_every_matrix_is_quantized_a_shared_one_once(tied):
    model = model_of(tied)
    small = copy.deepcopy(model)
    report = quantize_model(small)
    kinds = [type(m) for m in small.modules()]
    assert nn.Linear not in kinds and nn.Embedding not in kinds and kinds.count(Int8Embedding) == 1
    assert (small.embed_tokens.qweight.data_ptr() == small.head.qweight.data_ptr()) == tied
    assert len(report.layers) == 2 * 7 + (1 if tied else 2) and max(e for _, e in report.layers) < 0.01
    assert report.bytes_before == stored_bytes(model) and report.ratio < 0.3 and "matrices" in repr(report)
    assert not [p for n, p in small.named_parameters() if p.ndim > 1]


@pytest.mark.parametrize("tied", [True, False])
def test_it_computes_what_a_float_model_with_rounded_weights_computes(tied):
    model = model_of(tied, torch.float64)
    small, rounded = copy.deepcopy(model), copy.deepcopy(model)
    quantize_model(small)
    with torch.no_grad():
        for p in rounded.parameters():
            if p.ndim == 2:
                p.copy_(dequantize(*quantize_weight(p), torch.float64))
        assert max_diff(small(IDS), rounded(IDS)) < 1e-10
    assert not can_fuse(small) and generate(small, [[1, 2, 3], [4]], 24) == generate(rounded, [[1, 2, 3], [4]], 24)


@pytest.mark.parametrize("tied", [True, False])
def test_saved_and_opened_in_a_new_process_it_is_the_same_bit_for_bit(tmp_path, tied):
    model = model_of(tied)
    whole = len(safetensors.torch.save({k: v for k, v in model.state_dict().items() if not (tied and k == "head.weight")}))
    quantize_model(model)
    save_quantized(model, tmp_path / "m")
    assert (tmp_path / "m" / "model.safetensors").stat().st_size <= 0.35 * whole
    code = (
        "import sys, torch; from llmlab.deploy.quantize import open_quantized as o; m = o(sys.argv[1]).eval()\n"
        "with torch.no_grad(): torch.save(m(torch.arange(40).view(2, 20)), sys.argv[2])"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "m", tmp_path / "y"], check=True)
    with torch.no_grad():
        assert torch.equal(torch.load(tmp_path / "y"), model(IDS))


def test_what_is_skipped_stays_and_is_opened_as_such(tmp_path):
    model = model_of(False)
    before = model.head.weight.clone()
    quantize_model(model, skip=("head", "blocks.1.mlp.up_proj"))
    save_quantized(model, tmp_path)
    again = open_quantized(tmp_path)
    assert type(again.head) is nn.Linear and torch.equal(again.head.weight, before) and type(again.blocks[1].mlp.up_proj) is nn.Linear
    with torch.no_grad():
        assert torch.equal(again(IDS), model(IDS))


def test_loaders_refuse_what_does_not_fit(tmp_path):
    model, small = model_of(), model_of()
    quantize_model(small)
    save_quantized(small, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    for name in [n for n in tensors if n.endswith(".scale")][:3]:
        safetensors.torch.save_file({k: v for k, v in tensors.items() if k != name}, file)
        with pytest.raises(ValueError, match=f"missing: {name}"):
            open_quantized(tmp_path)
    safetensors.torch.save_file({**tensors, "more": torch.ones(1)}, file)
    with pytest.raises(ValueError, match="unexpected: more"):
        open_quantized(tmp_path)
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ValueError, match="whole safetensors"):
        open_quantized(tmp_path)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(ValueError, match="nothing was loaded"):
        load_model(model, tensors)  # integers into a float model
    assert max_diff(model.state_dict(), before) == 0
    with pytest.raises(ValueError, match="does not fit"):
        load_exactly(small, before, file)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "quantization"}))
    with pytest.raises(ValueError, match="not quantized"):
        open_quantized(tmp_path)


def test_other_mistakes_are_named(tmp_path):
    model = model_of()
    with pytest.raises(ValueError, match="not quantized"):
        save_quantized(model, tmp_path)
    with pytest.raises(ValueError, match="scheme 'int3'"):
        quantize_model(model, "int3")
    with pytest.raises(ValueError, match="no module"):
        quantize_model(model, skip=("heads",))
    with torch.no_grad():
        model.blocks[0].mlp.up_proj.weight[3, 4] = torch.nan
    with pytest.raises(ValueError, match="nan"):
        quantize_model(model)
    again = model_of()
    quantize_model(again)
    with pytest.raises(ValueError, match="already"):
        quantize_model(again)
