"""Bits as they are, bf16 where it is asked for, float16 refused, and a choice that was measured."""

import math
import struct
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from llmlab.train.precision import autocast, choose_precision, float_bits, spacing


@settings(deadline=None, max_examples=100)
@given(st.floats(width=32, allow_nan=False))
def test_float32_bits_are_those_of_struct(x):
    assert float_bits(x, torch.float32).replace(" ", "") == f"{struct.unpack('>I', struct.pack('>f', x))[0]:032b}"


@settings(deadline=None, max_examples=100)
@given(st.floats(width=16, allow_nan=False))
def test_float16_bits_are_those_of_numpy(x):
    assert float_bits(x, torch.float16).replace(" ", "") == f"{np.float16(x).view(np.uint16):016b}"


@settings(deadline=None, max_examples=50)
@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_bfloat16_is_the_first_half_of_float32(x):
    rounded = torch.tensor(x).bfloat16()
    if rounded.isfinite(): assert float_bits(rounded.item(), torch.float32)[:18] == float_bits(x, torch.bfloat16)


@settings(deadline=None, max_examples=50)
@given(st.floats(min_value=0, max_value=2.0**99, width=32))
def test_spacing_equals_numpy(x): assert spacing(x, torch.float32) == float(np.spacing(np.float32(x)))


def test_spacing_of_bf16():
    assert [spacing(x, torch.bfloat16) for x in (1.0, -1.0, 255.0, 256.0)] == [2**-7, 2**-7, 1.0, 2.0]
    with pytest.raises(ValueError, match="70000.*65504"): spacing(70000.0, torch.float16)
    with pytest.raises(ValueError, match="float64"): float_bits(1.0, torch.float64)


def test_autocast_casts_products_and_nothing_else():
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    with autocast("bf16"):
        y = layer(x)
        with autocast("fp32"): z = layer(x)
    assert y.dtype == torch.bfloat16 and z.dtype == torch.float32
    y.float().sum().backward()
    assert layer.weight.dtype == layer.weight.grad.dtype == torch.float32
    with autocast("fp32"): assert torch.equal(layer(x), z)


def test_autocast_equals_torch(parity):
    layer, x = nn.Linear(64, 64), torch.randn(8, 64)
    with autocast("bf16"): ours = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16): theirs = layer(x)
    parity("bf16 autocast of a linear layer", "llmlab.train.precision", "torch.autocast", torch.__version__,
           (ours.double() - theirs.double()).abs().max().item(), 0.0)


@pytest.mark.parametrize("precision, device, why", [
    ("fp16", "cpu", "hundred times slower"), ("fp16", "cuda", "loss scaler"), ("bfloat16", "cpu", "no precision"),
    ("FP32", "cpu", "no precision"), ("", "cpu", "no precision")])
def test_other_precisions_are_refused(precision, device, why):
    with pytest.raises(ValueError, match=why): autocast(precision, device)
    calls = []
    with pytest.raises(ValueError, match=why): choose_precision(calls.append, ("fp32", precision), device_type=device)
    assert not calls


@pytest.mark.parametrize("slow", ["fp32", "bf16"])
def test_the_faster_is_chosen(slow):
    calls = []

    def update(precision):
        calls.append(precision)
        time.sleep(0.03 if precision == slow else 0.001)

    name, seconds = choose_precision(update, repeat=3)
    assert name != slow and seconds[slow] >= 0.03 > seconds[name]
    assert calls == ["fp32", "bf16"] * 4  # one round of warm-up, alternating


def test_one_hiccup_does_not_decide():
    count = {"fp32": 0, "bf16": 0}

    def update(precision):
        count[precision] += 1
        time.sleep(0.2 if precision == "bf16" and count["bf16"] == 2 else {"fp32": 0.03, "bf16": 0.001}[precision])

    assert choose_precision(update, repeat=3)[0] == "bf16"


def test_an_update_that_fails_is_not_hidden():
    def update(precision): raise RuntimeError("not here")

    with pytest.raises(RuntimeError, match="not here"): choose_precision(update)


def test_counting_by_ones_stalls():
    "What the page teaches, as a fact about this torch: at 256 in bf16, at 2048 in float16."
    for dtype, limit in ((torch.bfloat16, 256), (torch.float16, 2048)):
        total = torch.tensor(0.0, dtype=dtype)
        for _ in range(limit + 10): total += 1
        assert total == limit and math.isclose(spacing(limit, dtype), 2)
