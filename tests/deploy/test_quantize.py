"""A whole model in int8: shared weights once, saved bit for bit, and loaders that refuse what does not fit."""

import copy
import json
import subprocess
import sys
import warnings

import pytest
import safetensors.torch
import torch
from torch import nn

from llmlab.core.batch import next_token_batch
from llmlab.core.util import max_diff
from llmlab.deploy.quantize import load_exactly, open_quantized, quantize_model, save_quantized, stored_bytes
from llmlab.model.generate import can_fuse, generate
from llmlab.model.lowbit import Int8Embedding, Int8Linear, Int8Table, dequantize, quantize_weight
from llmlab.model.objectives import NextToken
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


@pytest.mark.parametrize(
    "tied, dtype, scheme",
    [(True, torch.float32, "int8"), (False, torch.float32, "int8"), (True, torch.bfloat16, "int8"), (True, torch.float32, "int8_dynamic")],
)
def test_saved_and_opened_in_a_new_process_it_is_the_same_bit_for_bit(tmp_path, tied, dtype, scheme):
    model = model_of(tied)
    whole = len(safetensors.torch.save({k: v for k, v in model.state_dict().items() if not (tied and k == "head.weight")}))
    quantize_model(model.to(dtype), scheme)
    save_quantized(model, tmp_path / "m")
    assert (tmp_path / "m" / "model.safetensors").stat().st_size <= 0.35 * whole
    code = (
        "import sys, torch; from llmlab.deploy.quantize import open_quantized as o; m = o(sys.argv[1])\n"
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
    for name, fault in (("norm.weight", "not finite"), ("embed_tokens.scale", "not finite"), ("blocks.0.mlp.up_proj.scale", "not finite")):
        bad = tensors[name].clone()
        bad[1] = torch.nan
        safetensors.torch.save_file({**tensors, name: bad}, file)
        with pytest.raises(ValueError, match=f"{fault}: {name}"):
            open_quantized(tmp_path)
    safetensors.torch.save_file({**tensors, "embed_tokens.scale": -tensors["embed_tokens.scale"]}, file)
    with pytest.raises(ValueError, match="not positive: embed_tokens.scale"):
        open_quantized(tmp_path)
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ValueError, match="whole safetensors"):
        open_quantized(tmp_path)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(ValueError, match="nothing was loaded"):
        load_model(model, tensors)  # integers into a float model
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(tensors)
    same = {n: t.to(torch.int8) if t.ndim > 1 else t for n, t in model.state_dict().items() if n != "head.weight"}
    with pytest.raises(ValueError, match="int8"):
        load_model(model, same)  # integers under the names of weights
    assert max_diff(model.state_dict(), before) == 0
    with pytest.raises(ValueError, match="does not fit"):
        load_exactly(small, before, file)
    safetensors.torch.save_file(tensors, file)
    config = json.loads((tmp_path / "config.json").read_text())
    for change, said in (
        (None, "not quantized"),
        ({"scheme": "int3", "modules": []}, "int3"),
        ({"scheme": "int8"}, "modules"),
        ({"scheme": "int8", "modules": [*config["quantization"]["modules"], "blocks.7.mlp.up_proj"]}, "does not have"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, "quantization": change}))
        with pytest.raises(ValueError, match=said):
            open_quantized(tmp_path)


def test_a_model_opened_again_does_not_drop_anything_out(tmp_path):
    model = Transformer(ModelConfig(512, hidden_size=64, num_layers=1, num_heads=4, dropout=0.5)).eval()
    quantize_model(model)
    save_quantized(model, tmp_path)
    again = open_quantized(tmp_path)
    with torch.no_grad():
        assert not again.training and torch.equal(again(IDS), model(IDS)) and torch.equal(again(IDS), again(IDS))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_quantized_model_changes_its_type_and_nothing_else(tmp_path, dtype):
    small = model_of()
    quantize_model(small)
    scales = {n: m.scale.clone() for n, m in small.named_modules() if isinstance(m, Int8Table)}
    with torch.no_grad():
        before = small(IDS)
        after = small.to(dtype)(IDS)
    assert after.dtype == dtype and small.embed_tokens.qweight is small.head.qweight
    assert max_diff({n: m.scale for n, m in small.named_modules() if isinstance(m, Int8Table)}, scales) == 0
    assert max_diff(after.double(), before.double()) < {torch.float64: 1e-4}.get(dtype, 0.03)
    save_quantized(small, tmp_path)
    with torch.no_grad():
        assert torch.equal(open_quantized(tmp_path)(IDS), after)


def test_tables_that_were_moved_are_still_saved_once(tmp_path):
    small = model_of()
    quantize_model(small)
    small._apply(torch.clone)  # what moving to another device does to every tensor
    save_quantized(small, tmp_path)
    assert "head.qweight" not in safetensors.torch.load_file(tmp_path / "model.safetensors")
    with torch.no_grad():
        assert torch.equal(open_quantized(tmp_path)(IDS), small(IDS))


@pytest.mark.parametrize("skip, floats", [(("blocks.1",), 7), (("head",), 2), (("blocks.0.attention", "blocks.1.mlp.up_proj"), 5)])
def test_a_skipped_name_covers_what_is_inside_and_what_is_shared(tmp_path, skip, floats):
    model = model_of()
    report = quantize_model(model, skip=skip)
    plain = [n for n, m in model.named_modules() if type(m) in (nn.Linear, nn.Embedding)]
    assert len(plain) == floats and {n.removesuffix(".weight") for n in report.kept} <= {*plain}
    save_quantized(model, tmp_path)
    with torch.no_grad():
        assert torch.equal(open_quantized(tmp_path)(IDS), model(IDS))


def test_a_broken_weight_anywhere_leaves_the_model_whole():
    model = model_of()
    with torch.no_grad():
        model.blocks[1].mlp.down_proj.weight[3, 4] = torch.inf
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"blocks.1.mlp.down_proj.weight: the weight at \[3, 4\] is inf"):
        quantize_model(model)
    assert not any(isinstance(m, Int8Table) for m in model.modules())
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def test_rows_of_nothing_in_a_model_stay_nothing():
    model = model_of()
    with torch.no_grad():
        model.embed_tokens.weight[5].zero_()
        model.blocks[0].mlp.up_proj.weight[2] = 1e-8
    quantize_model(model)
    with torch.no_grad():
        assert not model.embed_tokens(torch.tensor([5])).any() and torch.isfinite(model(IDS)).all() and not model(IDS)[..., 5].any()


def test_layers_of_other_kinds_and_modules_used_twice():
    class Own(nn.Linear):
        pass

    once = nn.Linear(16, 16)
    model = nn.Sequential(once, once, Own(16, 16), nn.Embedding(4, 16, max_norm=1.0))
    report = quantize_model(model)
    assert report.kept == ("2.weight", "3.weight") and type(model[2]) is Own and [n for n, _ in report.layers] == ["0.weight"]
    assert type(model[0]) is type(model[1]) is Int8Linear and model[0].qweight is model[1].qweight
    with pytest.raises(ValueError, match="nothing to quantize"):
        quantize_model(nn.Sequential(nn.LayerNorm(4)))


@pytest.mark.parametrize("scheme, limit", [("int8", 0.005), ("int8_dynamic", 0.02)])
def test_a_trained_model_keeps_its_loss_better_than_with_torch(scheme, limit):
    torch.manual_seed(0)
    text = torch.tensor(list(open(json.__file__, "rb").read()))
    model, objective = Transformer(ModelConfig(256, hidden_size=64, num_layers=2, num_heads=4)), NextToken()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(60):
        rows = text[torch.randint(len(text) - 65, (16, 1)) + torch.arange(65)]
        optimizer.zero_grad()
        objective(model, next_token_batch(rows))["loss"].mean.backward()
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear}, dtype=torch.qint8).eval()
    small, batch = copy.deepcopy(model), next_token_batch(text[: 64 * 65].view(64, 65))
    quantize_model(small, scheme)
    with torch.no_grad():
        ours, whole = (objective(m, batch)["loss"].mean.item() for m in (small, model))
        error = {m: float((m(batch.ids) - model(batch.ids)).norm() / model(batch.ids).norm()) for m in (small, theirs)}
    assert abs(ours - whole) < limit * whole and error[small] < 0.65 * error[theirs]


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


def test_the_same_model_is_the_same_file(tmp_path):
    "Byte for byte, however often it is written: runs are compared by their files."
    model = model_of()
    quantize_model(model)
    for i in range(8):
        save_quantized(model, tmp_path / str(i))
    assert len({(tmp_path / str(i) / "model.safetensors").read_bytes() for i in range(8)}) == 1
