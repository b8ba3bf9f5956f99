"""Recipes: exact names, changes that are checked, fingerprints that tell runs apart."""

from dataclasses import replace

import pytest

from llmlab.run.recipe import RECIPES, CorpusConfig, Recipe, change, get_recipe


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_stands_under_its_own_name(name):
    assert get_recipe(name).name == name


def test_unknown_names_are_errors_that_help():
    with pytest.raises(ValueError, match="no recipe 'pydocs'; did you mean 'pydoc'"):
        get_recipe("pydocs")
    with pytest.raises(ValueError, match="there are: pydoc, smoke"):
        get_recipe("")
    with pytest.raises(ValueError, match="no setting 'train.update' .* updates"):
        get_recipe("smoke", {"train.update": 1})
    with pytest.raises(ValueError, match="is a group"):
        get_recipe("smoke", {"train": 1})
    with pytest.raises(ValueError, match="is no group"):
        get_recipe("smoke", {"rows.x": 1})


def test_changes_take_the_type_of_what_stood_there():
    r = get_recipe("smoke", {"train.updates": "40", "train.peak": "1", "corpus.packages": '["json"]', "precision": "fp32"})
    assert (r.train.updates, r.train.peak, r.corpus.packages, r.precision) == (40, 1.0, ("json",), "fp32")
    for path, value in {"train.updates": "many", "rows": "1.5", "train.peak": '"x"'}.items():
        with pytest.raises(ValueError, match=path):
            get_recipe("smoke", {path: value})


def test_settings_that_belong_together_move_together():
    r = get_recipe("smoke", {"tokenizer.vocab_size": 300, "model.vocab_size": 300})
    assert r.tokenizer.vocab_size == r.model.vocab_size == 300


def test_contradictions_are_refused():
    with pytest.raises(ValueError, match="vocab_size"):
        get_recipe("smoke", {"model.vocab_size": 300})
    with pytest.raises(ValueError, match="precision 'fp16'"):
        get_recipe("smoke", {"precision": "fp16"})
    with pytest.raises(ValueError, match="related"):
        CorpusConfig(related=0.9)
    with pytest.raises(ValueError, match="held_out"):
        CorpusConfig(held_out=0.0)
    with pytest.raises(ValueError, match="rows"):
        Recipe("x", rows=0)


def test_the_fingerprint_sees_every_field():
    base = get_recipe("smoke")
    assert base.fingerprint == get_recipe("smoke").fingerprint
    others = [
        change(base, c) for c in ({"rows": 8}, {"train.seed": 1}, {"corpus.min_chars": 61}, {"sample.tokens": 31}, {"model.dropout": 0.1})
    ]
    others.append(replace(base, name="other"))
    assert len({base.fingerprint, *(o.fingerprint for o in others)}) == 7
