"""A small run that the training tests share: real shards, a model with dropout, accumulation 2."""

import torch

from llmlab.core.batch import Batch
from llmlab.core.reduce import Term
from llmlab.core.util import flatten
from llmlab.data.packing import Loader, TokenStream
from llmlab.model.objectives import NextToken
from llmlab.model.transformer import ModelConfig, Transformer
from llmlab.train.trainer import TrainConfig, Trainer

VOCAB, LENGTH = 24, 8


def stream(rows=64):
    "Documents of uneven length, `rows` rows in all, so that rows have unequal numbers of targets."
    g = torch.Generator().manual_seed(3)
    ids = torch.randint(0, VOCAB, (rows * LENGTH,), generator=g).tolist()
    cuts = sorted({0, len(ids), *torch.randint(1, len(ids), (rows // 2,), generator=g).tolist()})
    return TokenStream([ids[a:b] for a, b in zip(cuts, cuts[1:], strict=False)], VOCAB)


def model(seed=0, dropout=0.2, dtype=torch.float32):
    config = ModelConfig(VOCAB, 16, num_layers=2, num_heads=2, context=LENGTH, dropout=dropout)
    return Transformer(config, torch.Generator().manual_seed(seed)).to(dtype)


class Recorder:
    "A loader that writes down which rows each update was given, and may do something before it hands them over."

    def __init__(self, loader, before=lambda step: None):
        self.loader, self.before, self.seen = loader, before, []

    def __getattr__(self, name): return getattr(self.loader, name)

    def update(self, step):
        self.before(step)
        self.seen.append((step, self.loader.sample_ids(step)))
        return self.loader.update(step)


def trainer(folder=None, updates=10, seed=0, rows=4, micro_rows=2, dtype=torch.float32, dropout=0.2, before=lambda step: None,
            rank=0, world=1, data_seed=0, settings=None, **more):
    "A trainer on 64 rows; `seed` is of the weights it begins with."
    config = TrainConfig(updates, **{**dict(peak=1e-2, warmup=2, checkpoint_every=1, keep=1000), **(settings or {})})
    loader = Recorder(Loader(stream(), LENGTH, rows, micro_rows, data_seed, rank, world), before)
    return Trainer(model(seed, dropout, dtype), NextToken(), loader, config, folder=folder, **more)


def columns(history, names=("loss", "grad_norm", "lr")):
    "A record as float64 tensors, to be compared to the last digit."
    return {n: torch.tensor([row[n] for row in history], dtype=torch.float64) for n in names}


def weights(t):
    return {n: p.detach().clone() for n, p in t.strategy.state()["model"].items()}


def memory(t):
    return {n: {k: v.clone() for k, v in s.items()} for n, s in t.strategy.state()["optimizer"].items()}


def same(a, b):
    "Equal to the last bit, types included."
    a, b = flatten(a), flatten(b)
    assert list(a) == list(b)
    for name, x in a.items():
        y = b[name]
        if isinstance(x, torch.Tensor):
            assert (x.dtype, x.shape) == (y.dtype, y.shape), name
            assert x.contiguous().reshape(-1).view(torch.uint8).equal(y.contiguous().reshape(-1).view(torch.uint8)), name
        else: assert type(x) is type(y) and repr(x) == repr(y), name


def random_batch(rows, seed=0, targets=None):
    "Rows with a random half of the targets masked, or exactly `targets` of them left."
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (rows, LENGTH + 1), generator=g)
    mask = torch.rand(rows, LENGTH, generator=g) < 0.5
    if targets is not None: mask = (torch.arange(rows * LENGTH) < targets).view(rows, LENGTH)
    return Batch(ids[:, :-1], ids[:, 1:], mask)


class Given:
    "An objective whose token losses are given, times one weight of the model: its gradient is the loss itself."

    def counts(self, batch): return {"loss": int(batch.loss_mask.sum())}

    def __call__(self, model, batch):
        losses = batch.extra["losses"]
        return {"loss": Term((losses * batch.loss_mask).sum() * model.weight.sum(), int(batch.loss_mask.sum()))}


def given(*losses, counted=True):
    "A micro-batch of one row with these token losses."
    ids = torch.zeros(1, len(losses), dtype=torch.long)
    return Batch(ids, ids, torch.full(ids.shape, counted), extra={"losses": torch.tensor([losses], dtype=torch.float64)})


def one_weight():
    "A model of a single weight, 1."
    m = torch.nn.Linear(1, 1, bias=False).double()
    torch.nn.init.ones_(m.weight)
    return m
