"""One memory, one weight: whatever the objects and names that lead to it."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from llmlab.core.sharing import canonical_names, count_parameters, shared_groups, tie, unique_parameters
from llmlab.core.util import max_diff


class Model(nn.Module):
    def __init__(self, V=6, C=4, tied=True):
        super().__init__()
        self.embed, self.hidden, self.head = nn.Embedding(V, C), nn.Linear(C, C), nn.Linear(C, V, bias=False)
        if tied: self.head.weight = self.embed.weight

    def forward(self, ids): return self.head(self.hidden(self.embed(ids)).tanh())


TIED = [["embed.weight", "head.weight"], ["hidden.weight"], ["hidden.bias"]]
APART = [["embed.weight"], ["hidden.weight"], ["hidden.bias"], ["head.weight"]]


def viewed():
    m = Model(tied=False)
    m.head.weight = nn.Parameter(m.embed.weight.data)
    return m


def assigned():
    with torch.device("meta"): m = Model()
    m.load_state_dict(Model().state_dict(), assign=True)
    return m


def on_meta(tied=True):
    with torch.device("meta"): return Model(tied=tied)


def meta_view():
    m = on_meta(tied=False)
    m.head.weight = nn.Parameter(m.embed.weight.detach())
    return m


@pytest.mark.parametrize("make", [Model, viewed, assigned, on_meta, meta_view, lambda: copy.deepcopy(Model()), lambda: Model().double(),
                                  lambda: Model().requires_grad_(False)])
def test_shared_memory_is_found(make):
    m = make()
    assert shared_groups(m) == TIED and count_parameters(m) == 24 + 16 + 4 and list(unique_parameters(m)) == [g[0] for g in TIED]
    assert canonical_names(m) == {"embed.weight": "embed.weight", "head.weight": "embed.weight", "hidden.weight": "hidden.weight",
                                  "hidden.bias": "hidden.bias"}


@pytest.mark.parametrize("make", [lambda: Model(tied=False), lambda: on_meta(tied=False), lambda: Model(tied=False).to(torch.bfloat16)])
def test_equal_shapes_or_values_are_not_sharing(make):
    m = make()
    if not m.head.weight.is_meta: m.head.weight.data.copy_(m.embed.weight.data)
    assert shared_groups(m) == APART and count_parameters(m) == 24 + 16 + 4 + 24


def test_a_transposed_view_is_the_same_memory():
    m = nn.Module()
    m.a = nn.Parameter(torch.randn(3, 5))
    m.b = nn.Parameter(m.a.data.T)
    assert shared_groups(m) == [["a", "b"]] and count_parameters(m) == 15
    with pytest.raises(ValueError, match="cannot be"): tie(m, shared_groups(m))


def test_slices_of_one_buffer_are_separate_weights():
    buffer, m = torch.randn(30), nn.Module()
    for i, name in enumerate("abc"): m.register_parameter(name, nn.Parameter(buffer[i * 10:(i + 1) * 10]))
    assert shared_groups(m) == [["a"], ["b"], ["c"]] and count_parameters(m) == 30


@pytest.mark.parametrize("part", [lambda w: w[:2], lambda w: w[1:3], lambda w: w[2:], lambda w: w.flatten()[5:9]])
def test_overlap_is_refused_by_name(part):
    m = nn.Module()
    m.whole = nn.Parameter(torch.randn(4, 4))
    m.part = nn.Parameter(part(m.whole.data))
    for f in (shared_groups, canonical_names, unique_parameters, count_parameters):
        with pytest.raises(ValueError, match="'whole' and 'part' overlap|'part' and 'whole' overlap"): f(m)


def test_two_tensors_over_one_numpy_array_are_one_memory():
    import numpy as np

    array, m = np.ones(4, dtype=np.float32), nn.Module()
    m.a, m.b = nn.Parameter(torch.from_numpy(array)), nn.Parameter(torch.from_numpy(array))
    assert m.a.untyped_storage()._cdata != m.b.untyped_storage()._cdata and shared_groups(m) == [["a", "b"]]


def test_empty_weights_are_nobodys_twins():
    m = nn.Module()
    m.a, m.b = nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.empty(0, 3))
    assert shared_groups(m) == [["a"], ["b"]] and count_parameters(m) == 0


def test_devices_are_told_apart():
    m = nn.Module()
    m.a, m.b, m.c = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, device="meta")), nn.Parameter(torch.ones(3, device="meta"))
    assert shared_groups(m) == [["a"], ["b"], ["c"]]


@settings(deadline=None, max_examples=30)
@given(tying=st.lists(st.integers(0, 5), min_size=6, max_size=6))
def test_agrees_with_named_parameters_wherever_objects_are_shared(tying):
    m = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(6))
    for i, j in enumerate(tying): m[i].weight = m[j].weight
    assert list(unique_parameters(m)) == [n for n, _ in m.named_parameters()]
    assert count_parameters(m) == sum(p.numel() for p in m.parameters())
    everything = [n for g in shared_groups(m) for n in g]
    assert sorted(everything) == sorted(n for n, _ in m.named_parameters(remove_duplicate=False))


def test_agrees_with_safetensors(parity):
    import safetensors
    from safetensors.torch import _find_shared_tensors

    for m in (Model(), viewed(), assigned(), Model(tied=False)):
        theirs = {frozenset(g) for g in _find_shared_tensors(m.state_dict())}
        ours = {frozenset(g) for g in shared_groups(m)}
        assert {g for g in ours if len(g) > 1} == {g for g in theirs if len(g) > 1}
    parity("which names share memory", "core.sharing", "safetensors", safetensors.__version__, 0, 0)


def test_agrees_with_transformers_on_a_tied_llama(parity):
    import transformers

    gap = 0
    for tied in (True, False):
        config = transformers.LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
                                          num_key_value_heads=1, tie_word_embeddings=tied)
        model = transformers.LlamaForCausalLM(config)
        gap = max(gap, abs(count_parameters(model) - model.num_parameters()))
        assert (["model.embed_tokens.weight", "lm_head.weight"] in shared_groups(model)) == tied
    parity("number of parameters, tied and untied", "core.sharing", "transformers", transformers.__version__, gap, 0)


def test_sharded_weights_of_one_shape_are_not_one():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        m = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(3)])
        m[2].weight = m[0].weight
        fully_shard(m, mesh=init_device_mesh("cpu", (1,)))
        assert type(m[0].weight).__name__ == "DTensor" and shared_groups(m) == [["0.weight", "2.weight"], ["1.weight"]]
    finally: dist.destroy_process_group()


def test_trainable_counts():
    m = Model()
    m.embed.requires_grad_(False)
    assert count_parameters(m, trainable=True) == 20 and count_parameters(m) == 44


@pytest.mark.parametrize("broken", [assigned, viewed, lambda: on_meta().to_empty(device="cpu")])
def test_a_lost_tie_is_restored_and_learns_the_whole_gradient(broken):
    groups, m, good = shared_groups(on_meta()), broken(), Model()
    assert m.head.weight is not m.embed.weight
    tie(m, groups)
    assert m.head.weight is m.embed.weight and shared_groups(m) == TIED
    m.load_state_dict(good.state_dict())
    ids = torch.tensor([[0, 1, 2, 3]])
    for model in (m, good): F.cross_entropy(model(ids)[0, :-1], ids[0, 1:]).backward()
    assert max_diff(m.embed.weight.grad, good.embed.weight.grad) == 0
