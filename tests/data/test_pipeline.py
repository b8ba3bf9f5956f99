"Pipelines account for every document; a split separates no near-copies."

import io
import random
from collections import Counter
from contextlib import redirect_stderr
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmlab.data.clean import clean_text
from llmlab.data.dedup import exact_dedup, jaccard, minhash_dedup, naive_shingles
from llmlab.data.document import Document
from llmlab.data.pipeline import (
    CorpusStep,
    Pipeline,
    StageReport,
    Step,
    clean_step,
    dedup_step,
    leak_rate,
    min_chars,
    report_table,
    split_holdout,
    tie,
    waterfall,
)

QUICK = settings(deadline=None, max_examples=60)
SOME = ["", " ", "a", "a b c", "a b c ", "a  b c", "one two three four five six", "é\r\nx", "long " * 30]
TEXTS = st.lists(st.sampled_from(SOME), min_size=1, max_size=20)


def documents(texts): return [Document(t, str(i)) for i, t in enumerate(texts)]


def near_copies(families, size, seed=0, words=120):
    "Families of texts that share all but one word, under modules that have nothing to do with the families."
    rng, docs = random.Random(seed), []
    for f in range(families):
        base = [f"w{rng.randrange(10**6)}" for _ in range(words)]
        for k in range(size):
            new = list(base)
            new[rng.randrange(words)] = f"edit{k}"
            docs.append(Document(" ".join(new), f"{f}.{k}", {"family": f}))
    return rng.sample(docs, len(docs))


# accounts

@QUICK
@given(TEXTS, st.integers(0, 6))
def test_every_step_accounts_for_every_document_and_character(texts, n):
    docs = documents(texts)
    steps = [clean_step(), min_chars(n), dedup_step(exact_dedup), dedup_step(minhash_dedup, threshold=0.7)]
    kept, reports = Pipeline(steps).run(docs, progress=False)
    size = sum(len(d.text) for d in docs)
    for r, after in zip(reports, [*reports[1:], None], strict=True):
        assert r.docs_in == r.docs_out + r.dropped.total() and r.chars_in == size
        assert r.chars_in == r.chars_out + r.dropped_chars.total() + r.chars_edited and set(r.dropped) == set(r.dropped_chars)
        assert after is None or (after.docs_in, after.chars_in) == (r.docs_out, r.chars_out)
        assert r.name == "clean" or r.chars_edited == 0
        size = r.chars_out
    assert (len(kept), sum(len(d.text) for d in kept)) == (reports[-1].docs_out, reports[-1].chars_out)
    expected = [(d.id, clean_text(d.text)) for d in docs if len(clean_text(d.text).strip()) >= max(n, 1)]
    for dedup in (exact_dedup, lambda t: minhash_dedup(t, 0.7)): expected = [expected[i] for i in dedup([t for _, t in expected]).keep]
    assert [(d.id, d.text) for d in kept] == expected
    report_table(reports)


def test_reasons_are_counted():
    docs = documents(["", "    ", "abc", "abcdef", "abcdef", "x"])
    _, reports = Pipeline([min_chars(3), dedup_step(exact_dedup), dedup_step()]).run(docs, progress=False)
    assert reports[0].dropped == Counter({"empty": 2, "shorter than 3": 1})
    assert reports[0].dropped_chars == Counter({"empty": 4, "shorter than 3": 1})
    assert reports[1].dropped == Counter({"exact copy": 1}) and reports[2].dropped == Counter()
    table = report_table(reports)
    assert list(table["step"]) == ["min_chars", "exact_dedup", "minhash_dedup", "whole"]
    assert list(table["docs in"]) == [6, 3, 2, 6] and list(table["docs out"]) == [3, 2, 2, 2] and table["dropped"].iloc[-1] == "4"


def test_html_becomes_text_once():
    doc = Document("<p>caf\u0065\u0301</p><script>x</script>", "p", {"format": "html", "kept": 1})
    (new,), _ = Pipeline([clean_step(), clean_step()]).run([doc], progress=False)
    assert new == Document("café", "p", {"format": "text", "kept": 1})
    (plain,), _ = Pipeline([clean_step()]).run([Document("a < b", "q")], progress=False)
    assert plain.text == "a < b"


def test_all_may_be_dropped_but_nothing_may_come_in():
    kept, reports = Pipeline([min_chars(5), dedup_step()]).run(documents(["", "", " "]), progress=False)
    assert kept == [] and [r.docs_out for r in reports] == [0, 0] and reports[0].dropped == Counter({"empty": 3})
    report_table(reports)
    waterfall(reports)
    for empty in ([], iter(())):
        with pytest.raises(ValueError, match="corpus is empty: 0 documents"): Pipeline([min_chars(1)]).run(empty)
    with pytest.raises(ValueError, match="at least one step"): Pipeline([])


def test_waterfall_starts_and_ends_with_what_is_there():
    _, reports = Pipeline([clean_step(), min_chars(4)]).run(documents(["abc  \n\n", "abcdefg \n", "h"]), progress=False)
    for ax, before, after in zip(waterfall(reports), (3, reports[0].chars_in), (1, reports[-1].chars_out), strict=True):
        widths, lefts = [p.get_width() for p in ax.patches], [p.get_x() for p in ax.patches]
        assert (widths[0], widths[-1], lefts[0], lefts[-1]) == (before, after, 0, 0)
        assert before - sum(widths[1:-1]) == after


# steps that go wrong

def test_errors_name_step_and_document():
    def strict(doc): return Document(str(int(doc.text)), doc.id)

    with pytest.raises(ValueError, match="invalid literal") as caught: Pipeline([strict]).run(documents(["1", "x"]), progress=False)
    assert caught.value.__notes__ == ["in step 'strict', document '1'"]


@pytest.mark.parametrize(("step", "message"), [
    (Step("none", lambda d: None), "'none' returned NoneType for document '0'"), (Step("text", lambda d: d.text), "'text' returned str"),
    (CorpusStep("fewer", lambda docs: docs[1:]), "'fewer' returned 1 answers for 2 documents"),
    (CorpusStep("more", lambda docs: [*docs, docs[0]]), "'more' returned 3 answers"),
    (CorpusStep("keep", lambda docs: [0, 1]), "'keep' returned int"),
])
def test_strange_answers_are_refused(step, message):
    with pytest.raises(ValueError, match=message): Pipeline([step]).run(documents("ab"), progress=False)


def test_strange_documents_are_refused():
    with pytest.raises(ValueError, match="document 1 is of type str"): Pipeline([min_chars(1)]).run([Document("a"), "b"])


def test_an_unbalanced_account_is_noticed():
    with pytest.raises(AssertionError, match="lost count"): StageReport("x", docs_in=3, docs_out=1, dropped=Counter(a=1)).check()


def test_one_bar_a_step_in_a_plain_terminal():
    screen = io.StringIO()
    with redirect_stderr(screen): Pipeline([min_chars(1), dedup_step()]).run(documents(["a", "b", "c"]))
    assert "min_chars: 100%" in screen.getvalue() and "minhash_dedup: 100%" in screen.getvalue() and "3/3" in screen.getvalue()
    with redirect_stderr(silent := io.StringIO()): Pipeline([min_chars(1)]).run(documents(["a"]), progress=False)
    assert not silent.getvalue()


# the split

@QUICK
@given(st.integers(1, 30), st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), max_size=20), st.integers(1, 8))
def test_bundles_are_what_can_be_reached(n, pairs, modules):
    docs = [Document("", str(i), {"m": i % modules if i % 3 else None}) for i in range(n)]
    links = [(i % n, j % n) for i, j in pairs]
    labels = tie(docs, [list(p) for p in links], lambda d: d.meta["m"]).tolist()
    links += [(i, j) for i, j in combinations(range(n), 2) if docs[i].meta["m"] == docs[j].meta["m"] is not None]
    reach = [{i} for i in range(n)]
    for _ in range(n):
        for i, j in links: reach[i] |= reach[j]; reach[j] |= reach[i]
    assert labels == [min(r) for r in reach]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("form", ["result", "clusters", "labels"])
def test_no_near_copy_straddles_the_split(seed, form):
    docs = near_copies(60, 4)
    result = minhash_dedup([d.text for d in docs], 0.7)
    clusters = {"result": result, "clusters": result.clusters, "labels": result.labels}[form]
    train, held_out = split_holdout(docs, clusters, fraction=0.2, seed=seed)
    assert [d for d in docs if d in train] == train and sorted(d.id for d in train + held_out) == sorted(d.id for d in docs)
    assert not {d.meta["family"] for d in train} & {d.meta["family"] for d in held_out}
    sets = {d.id: naive_shingles(d.text) for d in docs}
    assert max(jaccard(sets[a.id], sets[b.id]) for a in train for b in held_out) < 0.1
    assert leak_rate(train, held_out) == 0


def test_a_random_split_leaks():
    docs = near_copies(60, 4)
    held_out, train = docs[:40], docs[40:]
    sets = {d.id: naive_shingles(d.text) for d in docs}
    naive = sum(any(jaccard(sets[a.id], sets[b.id]) >= 0.5 for b in train) for a in held_out) / 40
    assert leak_rate(train, held_out) == naive > 0.9


def test_groups_and_clusters_chain():
    "Cluster {0, 1}, modules {1, 2} and {2, 3}: all or none is held out."
    for seed in range(30):
        docs = [Document(f"text {i}", str(i), {"module": m}) for i, m in enumerate(["a", "b", "b", "b", *"cdefghijklmnopqrstuvwxyz"])]
        try: _, held_out = split_holdout(docs, [[0, 1]], fraction=0.4, seed=seed)
        except ValueError: continue
        assert len({d.id for d in held_out} & {"0", "1", "2", "3"}) in (0, 4)


def test_the_split_does_not_depend_on_order_or_on_newcomers():
    docs = near_copies(50, 2)
    ids = lambda part: {d.id for d in part}
    split = lambda docs: split_holdout(docs, minhash_dedup([d.text for d in docs], 0.7), 0.2, seed=3)
    train, held_out = split(docs)
    again, held_again = split(random.Random(1).sample(docs, len(docs)))
    assert (ids(again), ids(held_again)) == (ids(train), ids(held_out))
    newcomers = [Document(d.text, f"new {d.id}") for d in near_copies(30, 2, seed=9)]
    _, more = split(docs + newcomers)
    assert ids(more) & ids(docs) == ids(held_out)
    assert split_holdout(docs, [[i] for i in range(100)], 0.2, seed=4)[1] != held_out


def test_the_fraction_is_met_on_average():
    docs = [Document(f"text {i}", str(i)) for i in range(400)]
    shares = [len(split_holdout(docs, [], 0.1, seed)[1]) / 400 for seed in range(40)]
    assert 0.09 < sum(shares) / 40 < 0.11


def test_a_bundle_larger_than_the_held_out_part_stays_in_train():
    docs = [Document(f"text {i}", str(i), {"module": "giant" if i < 50 else i}) for i in range(100)]
    for seed in range(20): assert not {str(i) for i in range(50)} & {d.id for d in split_holdout(docs, [], 0.2, seed)[1]}


def test_documents_without_ids_are_told_apart_by_text():
    docs = [Document(f"text {i}") for i in range(200)]
    assert 5 < len(split_holdout(docs, [], 0.1)[1]) < 40


@pytest.mark.parametrize(("docs", "clusters", "fraction", "message"), [
    ([], [], 0.1, "corpus is empty"), (documents("abc"), [], 0, "fraction"), (documents("abc"), [], 1, "fraction"),
    (documents("abc"), [[0, 3]], 0.1, "document 3 of 3"), (documents("abc"), [0, 1], 0.1, "2 labels for 3 documents"),
    (documents("abc"), [[0, 1, 2]], 0.3, "nothing is left to hold out: 3 documents hang together in 1 bundles, the largest of 3"),
    (documents("a"), [], 0.5, "nothing is left"), (documents("abcdefgh"), [[0], [1]], 1e-9, "nothing is left to hold out"),
])
def test_strange_splits_are_refused(docs, clusters, fraction, message):
    with pytest.raises(ValueError, match=message): split_holdout(docs, clusters, fraction)


def test_leaks_of_nothing_are_refused():
    with pytest.raises(ValueError, match="nothing was held out"): leak_rate(documents("a"), [])
    assert leak_rate([], documents("ab")) == 0
