"""Items whose answers Python itself confirms, and scores with honest intervals."""

import ast
import inspect
import json
import logging
import textwrap
from collections import Counter
from datetime import date

import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from llmlab.data.document import Document
from llmlab.evaluate.benchmarks import (
    PHRASE,
    Item,
    Score,
    code_items,
    compare_scores,
    date_items,
    draw,
    exact_match,
    is_terse,
    pick,
    score_table,
    wilson,
)


def doc(text, name="m"):
    return Document(textwrap.dedent(text), name, {"kind": "code", "module": name})


def test_items_of_real_modules_are_what_the_interpreter_says():
    checked = 0
    for module in (json, logging, textwrap):
        items = {
            i.prompt: i
            for i in code_items([Document(inspect.getsource(module), module.__name__, {"kind": "code", "module": module.__name__})])
        }
        for name, f in inspect.getmembers(module, inspect.isfunction):
            if f.__module__ != module.__name__ or f.__name__ != name:
                continue
            args = ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(f))).body[0].args)
            mine = [i for i in items.values() if i.prompt.split("\n")[1].removeprefix(f"{module.__name__}.") == f"{name}({args})"]
            for i in mine:
                if i.task == "name":
                    assert i.answer == name
                if i.task == "module":
                    assert i.answer == f.__module__
                if i.task == "parameters":
                    assert i.answer == f"({', '.join(inspect.signature(f).parameters)})"
                checked += 1
    assert checked > 30


def test_defaults_of_every_kind_of_parameter():
    items = code_items([doc("def f(a, b=1, /, c='x', *, d, e=(1, 2)): pass")])
    assert {i.prompt.split("\n")[0]: i.answer for i in items if i.task == "default"} == {
        "What is the default of b?": "b=1",
        "What is the default of c?": "c='x'",
        "What is the default of e?": "e=(1, 2)",
    }
    assert not [i for i in items if i.task in ("parameters", "call")]  # its commas do not only separate parameters


def test_calls_run_and_modules_are_those_of_the_top():
    "Every `call` answer is a call that the function takes; methods and inner functions are asked about neither call nor module."
    code = "def f(a, b=2, c='x'): return (a, b, c)\nclass C:\n    def g(self, a): pass\ndef h():\n    def inner(a): pass"
    items = code_items([doc(code, "pack.mod")])
    names = {}
    exec(code, names)
    call = [i.answer for i in items if i.task == "call"]
    assert call == ["f(a=a, b=b, c=c)"] and eval(call[0], {**names, "a": 1, "b": 3, "c": 4}) == (1, 3, 4)
    assert [(i.prompt.split("\n")[1], i.answer) for i in items if i.task == "module"] == [
        ("pack.mod.f(a, b=2, c='x')", "pack.mod"),
        ("pack.mod.h()", "pack.mod"),
    ]


def test_a_prompt_stands_once_and_one_with_two_answers_not_at_all():
    items = code_items([doc("def f(a, b, c): pass"), doc("def f(a, b, c): pass", "n"), Document("prose", "p", {"kind": "topic"})])
    assert sorted(i.task for i in items) == ["call", "module", "module", "name", "parameters"]
    with pytest.raises(ValueError, match="bad.*not Python"):
        code_items([doc("def f(:", "bad")])


@given(st.integers(0, 300), st.integers(0, 5))
def test_dates_are_different_and_right(n, seed):
    items = date_items(n, seed)
    assert len({i.prompt for i in items}) == n and items == date_items(n + 5, seed)[:n]
    for i in items[:5]:
        d = date.fromisoformat(i.prompt.split()[1])
        assert i.answer == f"{d.day} {d:%B} {d.year}"


def test_the_same_items_are_picked_whatever_else_there_is():
    items = date_items(50)
    assert pick(items, 20) == pick(items[::-1], 20) == pick(items, 30)[:20] and pick(items, 20) != pick(items, 20, seed=1)
    assert not {i.prompt for i in pick(items, 20, exclude={i.prompt for i in items[:30]})} & {i.prompt for i in items[:30]}
    assert len(draw(items, 99)["date"]) == 50
    with pytest.raises(ValueError, match="20 unseen items, 21"):
        pick(items, 21, exclude={i.prompt for i in items[:30]})


def test_no_answer_comes_more_often_than_its_share():
    items = [Item("a", f"question {i}", "None" if i % 3 else str(i)) for i in range(300)]
    found = draw(items, 50, same=0.1)["a"]
    counts = Counter(i.answer for i in found)
    assert counts["None"] == 5 and len(found) == 50 and max(v for k, v in counts.items() if k != "None") == 1
    assert draw(items, 50, same=1.0) == draw(items, 50) and draw(items, 50) != {"a": found}
    assert [i for i in draw(items, 30, same=1.0)["a"]] == draw(items, 50)["a"][:30]
    assert len(draw(items, 4, same=0.1)["a"]) == 4 and len(draw([i for i in items if i.answer == "None"], 50, same=0.1)["a"]) == 5


@pytest.mark.parametrize(
    "said, right, terse",
    [
        ("5 May", True, True),
        (" 5 May\n", True, True),
        (PHRASE + "5 May", True, False),
        ("The answer is:5 May", True, False),
        ("5 may", False, True),
        ("5 May.", False, True),
        ("", False, True),
        (PHRASE, False, False),
        (PHRASE * 2 + "5 May", False, False),
    ],
)
def test_what_counts_as_right_and_as_terse(said, right, terse):
    assert exact_match(said, "5 May") == right and is_terse(said) == terse


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_intervals_equal_scipy(kn):
    low, high = scipy.stats.binomtest(*kn).proportion_ci(method="wilson")
    assert wilson(*kn) == pytest.approx((low, high), abs=1e-12)


def test_scores_weigh_tasks_alike_and_compare_pairwise():
    items = tuple([Item("a", f"p{i}", "x") for i in range(4)] + [Item("b", "q", "x")])
    some, more = Score(items, ("x", "x", "?", "?", "?")), Score(items, ("x", "x", "x", "?", PHRASE + "x"))
    assert some.by_task == {"a": 0.5, "b": 0.0} and some.exact_match == 0.25 and more.terse == 0.8
    assert compare_scores(some, more) == {"only_a": 0, "only_b": 2, "difference": 0.4, "p": 0.5}
    assert list(score_table(some)["task"]) == ["a", "b", "all"]
    with pytest.raises(ValueError, match="different items"):
        compare_scores(some, Score(items[:1], ("x",)))
    with pytest.raises(ValueError, match="4 answers to 5 items"):
        Score(items, ("x",) * 4)
    with pytest.raises(ValueError, match="no answer"):
        Item("a", "p", " ")
    with pytest.raises(ValueError, match="no such share"):
        wilson(2, 1)
