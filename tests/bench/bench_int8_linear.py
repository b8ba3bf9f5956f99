"""An int8 linear layer of 1024 x 1024, one row and 64: ours against PyTorch's dynamic quantization, and torchao where it is installed."""

import copy
import time
import warnings
from importlib.util import find_spec

import torch
from common import compare
from torch import nn

from llmlab.model.lowbit import Int8Linear


def peers(linear):
    "The same layer, quantized by others: name -> layer, and the packages that made it."
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dynamic = torch.ao.quantization.quantize_dynamic(nn.Sequential(copy.deepcopy(linear)), {nn.Linear}, dtype=torch.qint8)
        found = {"torch.ao": (dynamic, ())}
        if find_spec("torchao"):
            from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

            quantize_(layer := nn.Sequential(copy.deepcopy(linear)), Int8DynamicActivationInt8WeightConfig())
            found["torchao"] = (layer, ("torchao",))
    return found


def best_of_ours(linear, rows):
    "Rounded inputs where they pay: many rows, and a processor with instructions for them."
    return Int8Linear.from_linear(linear, activations=rows > 16 and torch.backends.cpu.get_cpu_capability() == "AVX512")


def rows_of(linear, rows):
    "One comparison for each peer; our error must be at most 0.65 of PyTorch's."
    ours, others, x = best_of_ours(linear, rows), peers(linear), torch.randn(rows, 1024)
    times = 1000 // rows
    error = lambda layer: (layer(x) - linear(x)).norm().item()
    assert error(ours) <= 0.65 * error(others["torch.ao"][0]), "less exact than torch.ao"
    work = lambda layer: lambda: [layer(x) for _ in range(times)]
    return [
        compare(f"int8_linear_b{rows}", name, work(ours), work(layer), amount=times * rows, unit="rows/s",
                clock=time.process_time, packages=packages)
        for name, (layer, packages) in others.items()
    ]


def run():
    "Rows on one thread, in CPU time."
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        torch.manual_seed(0)
        linear = nn.Linear(1024, 1024, bias=False)
        with torch.inference_mode(): return rows_of(linear, 1) + rows_of(linear, 64)
    finally: torch.set_num_threads(threads)


if __name__ == "__main__":
    for r in run(): print(r)
