"transformers' Llama with the weights of a model of ours, and, where asked, in float64 throughout."

from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import torch

from llmlab.model.interop import llama_name


@contextmanager
def in_float64():
    "The reference works norms, rotations and softmax in float32 whatever the model's type; here it does so in float64."
    from transformers.models.llama import modeling_llama

    double = SimpleNamespace(**{n: getattr(torch, n) for n in dir(torch)} | {"float32": torch.float64, "float": torch.float64})
    with patch.object(modeling_llama, "torch", double), patch.object(torch.Tensor, "float", torch.Tensor.double): yield


def make_llama(model, attn_implementation="eager"):
    "transformers' Llama of the same shape, with the same weights, in the same type."
    from transformers import LlamaConfig, LlamaForCausalLM

    c = model.config
    llama = LlamaForCausalLM(LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size, num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads, max_position_embeddings=c.context, rms_norm_eps=c.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta}, tie_word_embeddings=c.tie_embeddings,
        attn_implementation=attn_implementation, bos_token_id=None, eos_token_id=None, pad_token_id=None))
    llama.load_state_dict({llama_name(k): v for k, v in model.state_dict().items()}, strict=True)
    return llama.to(model.norm.weight.dtype)
