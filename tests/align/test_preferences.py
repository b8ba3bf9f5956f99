"""Pairs: what is kept of them, and what is refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmlab.align.preferences import Pair, PairLoader, fit_pair, fit_pairs, pair_batch, pairs_from_scores

tokens = st.lists(st.integers(0, 9), min_size=1, max_size=12).map(tuple)


@given(tokens, tokens, tokens, st.integers(1, 20))
def test_each_side_keeps_what_its_prompt_leaves_room_for(prompt, chosen, rejected, limit):
    if chosen == rejected:
        return
    room, out = limit - len(prompt), fit_pair(Pair(prompt, chosen, rejected), limit)
    if room < 1:
        assert out == "no room for an answer"
    elif chosen[:room] == rejected[:room]:
        assert out == "equal after the cut"
    else:
        assert (out.prompt, out.chosen, out.rejected) == (prompt, chosen[:room], rejected[:room])


def test_the_hand_worked_pair_and_the_account():
    out = fit_pair(Pair((1,) * 6, (2,) * 2, (3,) * 9), 10)
    assert (len(out.chosen), len(out.rejected)) == (2, 4)
    pairs = [Pair((1,) * n, (2, 3), (2, 4)) for n in range(1, 13)]
    kept, dropped = fit_pairs(pairs, 8)
    assert len(kept) + sum(dropped.values()) == 12 and dropped == {"no room for an answer": 5, "equal after the cut": 1}


@pytest.mark.parametrize(
    "sides, named",
    [(((), (1,), (2,)), "prompt"), (((1,), (), (2,)), "chosen"), (((1,), (2,), ()), "rejected"), (((1,), (2, 3), (2, 3)), "the same")],
)
def test_sides_that_cannot_be_compared_are_refused(sides, named):
    with pytest.raises(ValueError, match=named):
        Pair(*sides)


@given(st.lists(st.tuples(tokens, tokens, tokens).filter(lambda t: t[1] != t[2]), min_size=1, max_size=6))
def test_rows_hold_the_pairs_and_mark_the_answers(sides):
    pairs = [Pair(*s) for s in sides]
    batch = pair_batch(pairs, extra={"v": torch.arange(2.0 * len(pairs)).view(-1, 2)})
    for i, row in enumerate(r for p in pairs for r in p.rows):
        n, answer = len(row), (pairs[i // 2].chosen, pairs[i // 2].rejected)[i % 2]
        assert batch.ids[i, : n - 1].tolist() == list(row[:-1]) and batch.targets[i, : n - 1].tolist() == list(row[1:])
        assert batch.targets[i][batch.loss_mask[i]].tolist() == list(answer) and batch.extra["v"][i] == i
        assert (batch.doc_ids[i] >= 0).sum() == n - 1


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_same_pairs_for_any_number_of_ranks(world):
    pairs = [Pair((1,), (2,) * (i % 5 + 1), (3, i)) for i in range(30)]
    mark = torch.arange(30.0)[:, None].expand(30, 2)
    for step in range(9):
        found = [b.extra["mark"][::2] for r in range(world) for b in PairLoader(pairs, 8, 2, 5, r, world, {"mark": mark}).update(step)]
        assert sorted(torch.cat(found).int().tolist()) == sorted(PairLoader(pairs, 8, seed=5).sample_ids(step))
    seen = [i for s in range(15) for i in PairLoader(pairs, 2, seed=1).sample_ids(s)]
    assert sorted(seen) == list(range(30))


def test_bad_loaders_and_scores_are_refused():
    pairs = [Pair((1,), (2,), (3,))] * 4
    with pytest.raises(ValueError, match="4 pairs are fewer than the 8"):
        PairLoader(pairs, 8)
    with pytest.raises(ValueError, match="multiple of 3"):
        PairLoader(pairs, 4, world=3)
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=f"rank {rank} of world 2"):
            PairLoader(pairs, 4, rank=rank, world=2)
    with pytest.raises(ValueError, match=r"\(4, 2\)"):
        PairLoader(pairs, 4, extra={"ref": torch.zeros(4)})
    with pytest.raises(ValueError, match="at least 1 pair"):
        PairLoader(pairs, 4, 0)
    with pytest.raises(ValueError, match="one score"):
        pairs_from_scores((1,), [(2,)], [1, 2])
    with pytest.raises(ValueError, match="NaN"):
        pairs_from_scores((1,), [(2,), (3,)], [1, float("nan")])
    assert len(pairs_from_scores((1,), [(2,), (3,), (2,)], [2, 1, 0])) == 2  # (2,) never meets itself
