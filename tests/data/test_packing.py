"Packing: no token lost, borders kept, corpora complete or refused, one order for any number of processes."

import json
import os
import pickle
import random
import signal
import time
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmlab.core.batch import pad_batch
from llmlab.core.launch import launch
from llmlab.core.reduce import masked_sum, token_logprobs
from llmlab.data import packing
from llmlab.data.packing import (
    Loader,
    RowOrder,
    TokenShards,
    TokenStream,
    check_ids,
    pack,
    pack_batch,
    shuffled,
    stream_batch,
    write_shards,
)

QUICK = settings(deadline=None, max_examples=60)
DOCS = st.lists(st.lists(st.integers(0, 99), max_size=20), min_size=1, max_size=12).filter(lambda docs: any(docs))
EMPTY = [[], [[]], [[], []]]
FIELDS = ("ids", "targets", "loss_mask", "positions", "doc_ids")


def some_docs(n=60, seed=0, vocab=1000):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, size).tolist() for size in rng.integers(0, 40, n)]


def same(a, b): return all(torch.equal(getattr(a, f), getattr(b, f)) for f in FIELDS)


def naive_rows(docs, length):
    "The definition, token by token: a list of (id, target or None, position, document) for each row."
    tokens = [(t, i, p) for i, d in enumerate(docs) for p, t in enumerate(d)]
    out = []
    for start in range(0, len(tokens), length):
        row = []
        for at in range(start, min(start + length, len(tokens))):
            t, doc, p = tokens[at]
            after = tokens[at + 1] if at + 1 < len(tokens) else (None, None, None)
            row.append((t, after[0] if after[1] == doc else None, min(p, at - start), doc - tokens[start][1]))
        out.append(row)
    return out


def check_batch(batch, docs, length):
    rows = naive_rows(docs, length)
    assert batch.ids.shape == (len(rows), length)
    for k, row in enumerate(rows):
        n = len(row)
        assert [batch.ids[k, :n].tolist(), batch.positions[k, :n].tolist(), batch.doc_ids[k, :n].tolist()] == [
            [x[0] for x in row], [x[2] for x in row], [x[3] for x in row]]
        targets = [t if m else None for t, m in zip(batch.targets[k].tolist(), batch.loss_mask[k].tolist(), strict=True)]
        assert targets == [x[1] for x in row] + [None] * (length - n)
        assert (batch.doc_ids[k, n:] == -1).all() and not batch.ids[k, n:].any() and not batch.positions[k, n:].any()


# nothing is lost

def test_documents_longer_than_a_row_and_a_short_last_row():
    rows = pack([[1, 2, 3, 4, 5], [6, 7], [8, 9, 10], [11]], 4)
    assert [list(r) for r in rows] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11]]
    assert [r.doc_ids for r in rows] == [[0, 0, 0, 0], [0, 1, 1, 2], [2, 2, 3]]
    assert [r.positions for r in rows] == [[0, 1, 2, 3], [0, 0, 1, 0], [0, 1, 0]]


@QUICK
@given(DOCS, st.integers(1, 8))
def test_every_token_in_exactly_one_row(docs, length):
    rows, batch = pack(docs, length), pack_batch(docs, length)
    every = Counter(t for d in docs for t in d)
    assert Counter(t for r in rows for t in r) == every == Counter(batch.ids[batch.doc_ids >= 0].tolist())
    assert all(len(r) == length for r in rows[:-1]) and 1 <= len(rows[-1]) <= length
    back = {}
    for r in rows:
        for t, d in zip(r.ids, r.doc_ids, strict=True): back.setdefault(d, []).append(t)
    assert back == {i: d for i, d in enumerate(docs) if d}


@QUICK
@given(DOCS, st.integers(1, 24))
def test_batch_is_the_definition(docs, length):
    batch = pack_batch(docs, length)
    check_batch(batch, docs, length)
    assert batch.n_targets == sum(len(d) - 1 for d in docs if d)


@pytest.mark.parametrize("docs", EMPTY)
def test_empty_corpora_are_named(docs, tmp_path):
    for f in (lambda: pack(docs, 4), lambda: pack_batch(docs, 4), lambda: TokenStream(docs), lambda: TokenShards.write(tmp_path, docs, 10)):
        with pytest.raises(ValueError, match="corpus is empty"): f()
    with pytest.raises(ValueError, match="not written to the end"): TokenShards.open(tmp_path)


# one document does not reach into another

def test_first_token_of_a_document_is_never_a_target():
    a, b = [1, 2, 3], [4, 5, 6, 7, 8]
    batch = pack_batch([a, b, [9], [10] * 7], 16)
    assert batch.targets[batch.loss_mask].tolist() == [2, 3, 5, 6, 7, 8, *[10] * 6]
    assert batch.positions[0].tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 0, 1, 2, 3, 4, 5, 6]
    other = pack_batch([[11, 12, 13], b, [9], [10] * 7], 16)
    for field in FIELDS: assert torch.equal(getattr(batch, field)[0, 3:], getattr(other, field)[0, 3:])
    assert torch.equal(batch.loss_mask, other.loss_mask)


def test_packed_loss_and_gradients_are_those_of_separate_rows():
    torch.manual_seed(0)
    tables = [torch.randn(30, 30, dtype=torch.float64, requires_grad=True) for _ in range(2)]

    def loss(batch):
        logits = tables[0][batch.ids] + tables[1][batch.positions]
        total = -masked_sum(token_logprobs(logits, batch.targets), batch.loss_mask)
        return [total, *torch.autograd.grad(total, tables)]

    docs = [torch.randint(0, 30, (n,)).tolist() for n in (3, 5, 2, 7, 12)]
    alone = pad_batch(docs)
    alone.positions = torch.arange(alone.ids.shape[1]).expand_as(alone.ids)
    for packed in (pack_batch(docs, 29), pack_batch(docs, 40), pack_batch([docs[0], [4], *docs[1:], [9]], 31)):
        for x, y in zip(loss(packed), loss(alone), strict=True): assert (x - y).abs().max() < 1e-10


# ids

@pytest.mark.parametrize(("doc", "message"), [([1, 100], r"document 3 .*100 at position 1"), ([-1], r"token id -1"), ([0.5], "integer"),
                                              ([[1], [2]], "one list"), (["a"], "integer"), ([True], "integer"), ([2**40], "1099511627776"),
                                              (7, "one list")])
def test_strange_ids_are_named(doc, message):
    with pytest.raises(ValueError, match=message): check_ids(doc, 3, 100)


def test_ids_of_any_container():
    for doc in ([1, 2], (1, 2), np.array([1, 2], np.uint8), torch.tensor([1, 2])): assert check_ids(doc, 0, 3).tolist() == [1, 2]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(2, "<u2"), (65_536, "<u2"), (65_537, "<u4"), (200_000, "<u4")])
def test_no_id_is_wrapped_round(tmp_path, vocab_size, dtype):
    shards = TokenShards.write(tmp_path, [[0, vocab_size - 1]], vocab_size)
    assert shards.manifest["dtype"] == dtype and shards.tokens(0, 2).tolist() == [0, vocab_size - 1]
    with pytest.raises(ValueError, match=f"token id {vocab_size}"): TokenShards.write(tmp_path, [[0], [vocab_size]], vocab_size)
    with pytest.raises(ValueError, match="not written to the end"): TokenShards.open(tmp_path)


# shards

@QUICK
@given(docs=DOCS, shard_tokens=st.integers(1, 30), buffer=st.integers(1, 40), length=st.integers(1, 24),
       vocab_size=st.sampled_from([100, 70_000]))
def test_shards_are_the_stream(tmp_path_factory, docs, shard_tokens, buffer, length, vocab_size):
    folder = tmp_path_factory.mktemp("shards")
    write_shards(folder, iter(docs), vocab_size, shard_tokens, buffer=buffer)
    shards, stream = TokenShards.open(folder, verify=True), TokenStream(docs)
    assert (shards.n_docs, shards.n_tokens, shards.borders.tolist()) == (len(docs), stream.n_tokens, stream.borders.tolist())
    assert [shards.document(i).tolist() for i in range(len(docs))] == docs
    assert all(len(p) == shard_tokens for p in shards.parts[:-1])
    starts = np.arange(0, stream.n_tokens, length)
    assert same(stream_batch(shards, starts, length), stream_batch(stream, starts, length))
    check_batch(stream_batch(shards, starts, length), docs, length)


def test_writing_twice_gives_the_same_bytes(tmp_path):
    one, two = (TokenShards.write(tmp_path / n, some_docs(), 1000, 77, meta={"tokenizer": "x"}) for n in "ab")
    assert one.fingerprint == two.fingerprint and one.manifest["meta"] == {"tokenizer": "x"}
    assert sorted(p.name for p in one.folder.iterdir()) == sorted(p.name for p in two.folder.iterdir())
    assert all((one.folder / p.name).read_bytes() == p.read_bytes() for p in two.folder.iterdir())
    assert TokenShards.write(tmp_path / "c", some_docs(seed=1), 1000, 77).fingerprint != one.fingerprint


def test_a_shorter_corpus_leaves_nothing_of_the_longer_one(tmp_path):
    (tmp_path / "notes.txt").write_text("not ours")
    TokenShards.write(tmp_path, some_docs(), 1000, shard_tokens=10)
    shards = TokenShards.write(tmp_path, [[1, 2, 3]], 1000, shard_tokens=10)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["documents.bin", "manifest.json", "notes.txt", "shard_00000.bin"]
    assert shards.tokens(0, 99).tolist() == [1, 2, 3]


def test_writing_holds_a_buffer_not_the_corpus(tmp_path):
    on_disk = []

    def docs():
        for _ in range(200):
            yield [1] * 100
            on_disk.append(sum(p.stat().st_size for p in tmp_path.glob("shard_*")) // 2)

    write_shards(tmp_path, docs(), 10, shard_tokens=1000, buffer=500)
    written = np.arange(1, 201) * 100 - np.array(on_disk)
    assert written.max() <= 500 + 100 + 1000  # the buffer, a document, and what lies in the file's own buffer


class Accident(Exception): pass


@pytest.mark.parametrize("before", [False, True])
def test_interrupted_while_documents_come(tmp_path, before):
    if before: TokenShards.write(tmp_path, [[7, 8, 9]], 10)

    def docs():
        yield [1, 2, 3]
        raise Accident

    with pytest.raises(Accident): TokenShards.write(tmp_path, docs(), 10, shard_tokens=2)
    with pytest.raises(ValueError, match=f"{tmp_path} was not written to the end"): TokenShards.open(tmp_path)
    assert TokenShards.write(tmp_path, [[4, 5]], 10).tokens(0, 9).tolist() == [4, 5]


def test_failing_at_any_moment_of_making_durable(tmp_path, monkeypatch):
    "Every fsync in turn fails, as on a full disk: the corpus is then refused, or it is the complete new one."
    docs, real, outcomes = some_docs(20), os.fsync, []
    for moment in range(40):
        TokenShards.write(tmp_path, [[1, 2, 3]], 1000)
        calls = iter(range(1000))

        def fsync(handle, calls=calls, moment=moment):
            if next(calls) == moment: raise OSError(28, "No space left on device")
            real(handle)

        monkeypatch.setattr(os, "fsync", fsync)
        try: write_shards(tmp_path, docs, 1000, shard_tokens=50)
        except OSError: pass
        else: break
        finally: monkeypatch.setattr(os, "fsync", real)
        try: outcomes.append([TokenShards.open(tmp_path, verify=True).document(i).tolist() for i in range(len(docs))] == docs)
        except ValueError as e: outcomes.append("not written to the end" in str(e))
    assert len(outcomes) > 8 and all(outcomes)


def test_killed_at_any_moment(tmp_path):
    "SIGKILL while corpora are written over one another: what can be opened is whole."
    rng, refused, opened = random.Random(0), 0, 0
    corpora = [some_docs(400, seed) for seed in range(3)]
    for _ in range(12):
        child = os.fork()
        if not child:
            for k in range(10_000): write_shards(tmp_path, corpora[k % 3], 1000, shard_tokens=700, buffer=300)
            os._exit(0)
        time.sleep(rng.uniform(0.005, 0.08))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if not tmp_path.exists(): continue
        try: shards = TokenShards.open(tmp_path, verify=True)
        except ValueError as e:
            assert "not written to the end" in str(e)
            refused += 1
        else:
            assert [shards.document(i).tolist() for i in range(shards.n_docs)] in corpora
            opened += 1
    assert refused + opened >= 10 and refused
    assert TokenShards.write(tmp_path, [[5]], 1000).n_tokens == 1


@pytest.mark.parametrize("name", ["shard_00001.bin", "documents.bin"])
def test_damaged_files_are_named(tmp_path, name):
    TokenShards.write(tmp_path, some_docs(), 1000, shard_tokens=100)
    path = tmp_path / name
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert TokenShards.open(tmp_path)  # the size is right: only verify can see it
    with pytest.raises(ValueError, match=f"{path} is not what was written"): TokenShards.open(tmp_path, verify=True)
    path.write_bytes(whole[:-2])
    with pytest.raises(ValueError, match=f"{path} has {len(whole) - 2} bytes"): TokenShards.open(tmp_path)
    path.unlink()
    with pytest.raises(ValueError, match=f"{path} has no bytes"): TokenShards.open(tmp_path)


def test_damaged_manifests_are_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere does not exist"): TokenShards.open(tmp_path / "nowhere")
    TokenShards.write(tmp_path, [[1]], 10)
    manifest = tmp_path / "manifest.json"
    whole = json.loads(manifest.read_text())
    manifest.write_text('{"format": 1, ')
    with pytest.raises(ValueError, match="not valid JSON"): TokenShards.open(tmp_path)
    manifest.write_text(json.dumps({**whole, "format": 2}))
    with pytest.raises(ValueError, match="format 2"): TokenShards.open(tmp_path)


def test_a_sent_corpus_must_still_be_the_same(tmp_path):
    sent = pickle.dumps(TokenShards.write(tmp_path, some_docs(), 1000))
    assert len(sent) < 1000 and pickle.loads(sent).n_docs == 60
    TokenShards.write(tmp_path, some_docs(seed=1), 1000)
    with pytest.raises(ValueError, match="written anew"): pickle.loads(sent)


@pytest.mark.parametrize("options", [{"vocab_size": 0}, {"shard_tokens": 0}, {"buffer": 0}])
def test_strange_sizes_are_refused(tmp_path, options):
    with pytest.raises(ValueError, match="at least 1"): write_shards(tmp_path / "x", [[0]], **{"vocab_size": 10, **options})
    assert not (tmp_path / "x").exists()
    with pytest.raises(ValueError, match="at least 1 token"): pack([[1]], 0)


# order

def test_the_order_is_the_same_on_every_machine_and_version():
    assert shuffled(8, 0, 0).tolist() == [6, 1, 0, 4, 3, 5, 7, 2]
    assert shuffled(8, 0, 1).tolist() == [0, 3, 1, 4, 7, 6, 2, 5] and shuffled(8, 1, 0).tolist() == [2, 1, 0, 3, 6, 4, 7, 5]


@QUICK
@given(st.integers(1, 200), st.integers(0, 5), st.integers(0, 9))
def test_an_epoch_is_a_permutation(n, seed, epoch):
    assert sorted(shuffled(n, seed, epoch).tolist()) == list(range(n))


def test_orders_look_random():
    "Over 2,000 epochs each row stands in each place about equally often."
    counts = np.zeros((6, 6))
    for epoch in range(2000): counts[np.arange(6), shuffled(6, 3, epoch)] += 1
    assert abs(counts - 2000 / 6).max() < 5 * (2000 / 6) ** 0.5


@QUICK
@given(st.data())
def test_each_row_once_per_epoch(data):
    n = data.draw(st.integers(1, 40))
    rows = data.draw(st.integers(1, n))
    order = RowOrder(n, rows, data.draw(st.integers(0, 3)))
    stream = [i for s in range(3 * n) for i in order.sample_ids(s)]  # 3 * rows epochs
    assert all(sorted(stream[e * n:(e + 1) * n]) == list(range(n)) for e in range(3 * rows))
    step = data.draw(st.integers(0, 3 * n - 1))
    assert RowOrder(n, rows, order.seed).sample_ids(step) == order.sample_ids(step) == stream[step * rows:(step + 1) * rows]
    assert order.epoch_of(step) == step * rows // n


@QUICK
@given(DOCS, st.integers(1, 8), st.integers(1, 3))
def test_every_token_once_per_epoch_the_short_last_row_too(docs, length, rows):
    stream = TokenStream(docs)
    n = -(-stream.n_tokens // length)
    loader = Loader(stream, length, min(rows, n), seed=1)
    parts = [b for s in range(n) for b in loader.update(s)]  # as many epochs as rows an update
    seen = Counter(t for b in parts for t in b.ids[b.doc_ids >= 0].tolist())
    assert seen == Counter({t: k * loader.rows for t, k in Counter(t for d in docs for t in d).items()})
    assert sum(b.n_targets for b in parts) == loader.rows * sum(len(d) - 1 for d in docs if d)


def batches(loader_of, steps, world=1):
    "All rows of each update as one batch, in the order of ranks and micro-batches."
    for s in steps:
        parts = [b for r in range(world) for b in loader_of(r, world).update(s)]
        yield {f: torch.cat([getattr(b, f) for b in parts]) for f in FIELDS}


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("micro_rows", [None, 1, 3, 100])
def test_ranks_and_micro_batches_change_no_row(tmp_path, world, micro_rows):
    docs = some_docs(150)
    shards, stream = TokenShards.write(tmp_path, docs, 1000, shard_tokens=333), TokenStream(docs)
    one = batches(lambda r, w: Loader(stream, 32, 8, seed=5), range(40))
    many = batches(lambda r, w: Loader(shards, 32, 8, micro_rows, 5, r, w), range(40), world)
    for a, b in zip(one, many, strict=True): assert all(torch.equal(a[f], b[f]) for f in FIELDS)
    sizes = [len(b) for b in Loader(shards, 32, 8, micro_rows, 5, 0, world).update(0)]
    assert sum(sizes) == 8 // world and max(sizes) <= (micro_rows or 8)


@pytest.mark.parametrize("start", [0, 64 * 2 // 8])
def test_a_resumed_run_gets_what_the_whole_run_got(start):
    "64 rows, 8 an update in two micro-batches, stopped after each of 1 ... 9 updates, in epoch 0 and in epoch 2."
    make = lambda: Loader(TokenStream([list(range(64 * 16))], 10_000), 16, 8, micro_rows=4, seed=1)
    whole = make()
    expected = [[b.ids.tolist() for b in whole.update(s)] for s in range(start, start + 10)]
    assert whole.rows_per_epoch == 64 and whole.epoch_of(start) == start * 8 // 64
    for stop in range(1, 10):
        resumed = make()
        assert [[b.ids.tolist() for b in resumed.update(s)] for s in range(start + stop, start + 10)] == expected[stop:]


def test_identity_says_what_decides_the_samples():
    stream = TokenStream(some_docs())
    base = Loader(stream, 16, 8).identity
    assert base == Loader(stream, 16, 8, micro_rows=3, rank=1, world=2).identity and json.dumps(base)
    others = [Loader(stream, 8, 8), Loader(stream, 16, 4), Loader(stream, 16, 8, seed=1), Loader(TokenStream(some_docs(seed=1)), 16, 8)]
    assert all(o.identity != base for o in others)


@pytest.mark.parametrize(("settings", "message"), [
    (dict(length=16, rows=12, world=5), "12 rows .* 5 ranks"), (dict(length=16, rows=8, rank=2, world=2), "rank 2 of world 2"),
    (dict(length=16, rows=8, rank=-1), "rank -1"), (dict(length=0, rows=8), "at least 1"), (dict(length=16, rows=0), "at least 1"),
    (dict(length=16, rows=8, micro_rows=0), "micro_rows 0"), (dict(length=10, rows=12), "105 tokens make 11 rows of 10, fewer than the 12"),
])
def test_strange_loaders_are_refused(settings, message):
    with pytest.raises(ValueError, match=message): Loader(TokenStream([[1] * 105]), **settings)


def test_updates_count_from_zero():
    with pytest.raises(ValueError, match="counted from 0"): Loader(TokenStream([[1] * 100]), 10, 2).update(-1)


# other processes

def rows_of_rank(loader, steps):
    import torch.distributed as dist

    mine = Loader(loader.shards, loader.length, loader.rows, loader.micro_rows, loader.seed, dist.get_rank(), dist.get_world_size())
    return [[b.ids.tolist() for b in mine.update(s)] for s in steps]


def test_a_loader_arrives_in_spawned_processes(tmp_path):
    loader = Loader(TokenShards.write(tmp_path, some_docs(), 1000, 300), 16, 8, seed=2)
    ranks = launch(rows_of_rank, loader, range(5), n=2, timeout=120)
    for s in range(5): assert sum((b for r in ranks for b in r[s]), []) == loader.update(s)[0].ids.tolist()


def test_two_workers_give_the_batches_of_none(tmp_path):
    "torch's own loader with spawned workers as a reader ahead."
    loader = Loader(TokenShards.write(tmp_path, some_docs(), 1000, 300), 16, 8, micro_rows=3, seed=2)
    ahead = torch.utils.data.DataLoader(range(3, 9), batch_size=None, collate_fn=loader.update, num_workers=2,
                                        multiprocessing_context="spawn", timeout=120)
    for step, got in zip(range(3, 9), ahead, strict=True):
        assert len(got) == 3 and all(same(a, b) for a, b in zip(got, loader.update(step), strict=True))


def test_the_manifest_comes_last(tmp_path, monkeypatch):
    seen, real = [], packing.save_json

    def save_json(value, path):
        seen.append(sorted(p.name for p in tmp_path.iterdir()))
        real(value, path)

    monkeypatch.setattr(packing, "save_json", save_json)
    TokenShards.write(tmp_path, [[1, 2, 3]], 10, shard_tokens=2)
    assert seen == [["documents.bin", "shard_00000.bin", "shard_00001.bin"]]
