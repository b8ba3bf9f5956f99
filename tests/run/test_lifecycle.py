"""The whole life in small: accounts, equality of two runs, interruption at any moment, and what bad input gets."""

import html
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from llmlab.deploy.serve import background, create_app
from llmlab.evaluate.benchmarks import PHRASE, Score, ask
from llmlab.run.assistant import assistant_of, conversations_of, gains, pairs_of, tasks_of, three_prompts
from llmlab.run.lifecycle import STAGES, lifecycle
from llmlab.run.recipe import get_recipe
from llmlab.run.stages import Report, Stage, held_out_score, open_model, tokenizer_of
from llmlab.tokenizer.chat import render

TINY = {
    "precision": "fp32",
    "train.updates": 24,
    "train.checkpoint_every": 4,
    "sft.train.updates": 16,
    "sft.train.checkpoint_every": 4,
    "dpo.train.updates": 8,
    "dpo.train.checkpoint_every": 2,
}
TRAINED = ("pretrain", "sft", "dpo")
KEPT = [
    *(f"{s}/model.safetensors" for s in (*TRAINED, "int8")),
    "tokenizer/tokenizer.json",
    "metrics.json",
    "samples/samples.json",
    "exam/answers.json",
    "export/model/model.safetensors",
    "serve/served.json",
]


def kept(folder):
    return {name: (folder / name).read_bytes() for name in KEPT}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    "One run without interruption."
    return lifecycle(get_recipe("smoke", TINY), tmp_path_factory.mktemp("whole"), progress=False)


def command(runs, *more, recipe="smoke", **settings):
    words = [f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in (TINY | settings).items()]
    return [
        sys.executable,
        "-m",
        "llmlab",
        "lifecycle",
        recipe,
        "--quiet",
        "--runs",
        str(runs),
        *more,
        *(x for w in words for x in ("--set", w)),
    ]


def live(runs, *more, **kw):
    return subprocess.run(command(runs, *more, **kw), capture_output=True, text=True, timeout=300)


def refused(done, *said):
    "Status 2 and one line on stderr that says all of `said`."
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 2 and len(lines) == 1, (done.returncode, done.stderr[-3000:])
    for words in said:
        assert words in lines[0], lines[0]


def test_the_life_is_accounted_for(whole):
    metrics = json.loads((whole.folder / "metrics.json").read_text())
    assert list(metrics["stages"]) == sorted(s.name for s in STAGES)
    for stage in metrics["stages"].values():
        assert stage["taken"] == stage["given"] + sum(stage["dropped"].values()) > 0
    found = metrics["stages"]["evaluate"]["metrics"]
    assert found["bits_per_byte"] < 0.9 * found["bits_per_byte_before"]
    assert {"fingerprint", "precision", "corpus_hash", "versions", "seed"} <= metrics.keys()
    with pytest.raises(ValueError, match="2 missing"):
        Report("documents", 5, 2, {"short": 1}, {})


def test_the_report_needs_no_other_file(whole):
    page = (whole.folder / "report.html").read_text()
    assert page.count("data:image/png;base64,") >= 2 and "bits per byte" in page and "def read_" in page
    assert not re.search(r'(src|href)="(?!data:)', page)


def test_every_stage_says_what_it_gained_and_cost(whole):
    "The exam of four models; figures of the table are those that the answers give."
    table, answers = gains(whole), json.loads((whole.dir("exam") / "answers.json").read_text())
    items = tasks_of(whole, "held_out")
    assert list(table["model"]) == ["pretrain", "sft", "dpo", "int8"] and not table.isna().any().any()
    for row in table.to_dict("records"):
        score = Score(tuple(items), tuple(answers[row["model"]]))
        assert row["exact_match"] == score.exact_match and row["terse"] == score.terse
        assert row["perplexity"] == pytest.approx(held_out_score(whole, assistant_of(whole, row["model"]))["perplexity"], rel=1e-9)
    page = (whole.folder / "report.html").read_text()
    asked = three_prompts(whole)
    assert len(asked) == len(set(asked["prompt"])) == 3
    assert all(html.escape(p).splitlines()[0] in page for p in asked["prompt"])


def test_no_held_out_question_is_trained_on(whole):
    train, held_out = ({i.prompt for i in tasks_of(whole, part)} for part in ("train", "held_out"))
    assert train and held_out and not train & held_out
    modules = {part: {i.source for i in tasks_of(whole, part)} - {"calendar"} for part in ("train", "held_out")}
    assert not modules["train"] & modules["held_out"]


def test_the_share_of_phrased_answers_is_what_the_recipe_says(whole):
    said = [c[-1]["content"] for c in conversations_of(whole)]
    phrased = sum(a.startswith(PHRASE) for a in said)
    assert phrased == round(whole.recipe.tasks.phrased * len(said)) and 0 < phrased < len(said)


def test_pairs_differ_in_the_phrase_alone(whole):
    tokenizer = tokenizer_of(whole)
    for pair in pairs_of(whole, "train", 50):
        chosen, rejected = (tokenizer.decode(list(side)) for side in (pair.chosen, pair.rejected))
        assert rejected == PHRASE + chosen and chosen.endswith("<|end|>")
        assert tokenizer.decode(list(pair.prompt)).endswith("<|assistant|>")


def test_the_export_opens_in_transformers_with_the_same_logits_and_chat(whole):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, item = whole.dir("export") / "model", tasks_of(whole, "held_out")[0]
    theirs, words = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = render(item.messages()[:1], tokenizer_of(whole), add_generation_prompt=True).ids
    assert words.apply_chat_template(item.messages()[:1], add_generation_prompt=True)["input_ids"] == ids
    with torch.no_grad():
        gap = (theirs(torch.tensor([ids])).logits - open_model(whole.dir("dpo"))(torch.tensor([ids]))).abs().max()
    assert gap < 1e-5


def test_served_is_offline_with_the_real_client(whole):
    "Streamed and plain, one after the other and eight at once."
    from concurrent.futures import ThreadPoolExecutor

    import openai

    model, tokenizer = assistant_of(whole, "int8"), tokenizer_of(whole)
    prompts = [i.prompt for i in tasks_of(whole, "held_out")[::5]][:8]
    offline = ask(model, tokenizer, prompts, whole.recipe.tasks.ask)
    with background(create_app(model, tokenizer, "smoke")) as url:
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)

        def one(prompt, stream=False):
            asked = dict(model="smoke", messages=[{"role": "user", "content": prompt}], max_tokens=whole.recipe.tasks.ask, temperature=0)
            if not stream:
                return client.chat.completions.create(**asked).choices[0].message.content
            return "".join(c.choices[0].delta.content or "" for c in client.chat.completions.create(**asked, stream=True) if c.choices)

        assert [one(p) for p in prompts] == offline == [one(p, True) for p in prompts]
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(one, prompts)) == offline


def test_a_branch_takes_over_what_did_not_change(whole, tmp_path):
    changed = get_recipe("smoke", TINY | {"dpo.beta": 0.3})
    branched = lifecycle(changed, tmp_path, "branch", progress=False, source=whole.folder)
    anew = lifecycle(changed, tmp_path, "anew", progress=False)
    assert kept(branched.folder) == kept(anew.folder) and (branched.folder / "report.html").exists()
    early = {s: (whole.dir(s) / "done.json").read_bytes() for s in ("sources", "shards", "sft")}
    assert all((branched.dir(s) / "done.json").read_bytes() == data for s, data in early.items())
    assert all((branched.dir(s) / "done.json").read_bytes() != (whole.dir(s) / "done.json").read_bytes() for s in ("dpo", "int8"))
    spent, before = (json.loads((life.folder / "timing.json").read_text()) for life in (branched, whole))
    assert spent["sft"] == before["sft"]


def test_every_setting_decides_some_stage():
    "A branch asks the stages what they depend on: a group that none names would be changed without effect."
    from dataclasses import fields

    named = {u for s in STAGES for u in s.uses}
    assert named == {f.name for f in fields(get_recipe("smoke"))} - {"name"}


def test_a_branch_of_something_else_is_refused(whole, tmp_path):
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ValueError, match="no run's folder to branch from"):
        lifecycle(whole.recipe, tmp_path, "b", progress=False, source=tmp_path / "nothing")
    old = tmp_path / "old"
    shutil.copytree(whole.folder, old)
    manifest = json.loads((old / "manifest.json").read_text())
    (old / "manifest.json").write_text(json.dumps(manifest | {"versions": manifest["versions"] | {"torch": "1.0"}}))
    with pytest.raises(ValueError, match="torch '1.0'"):
        lifecycle(whole.recipe, tmp_path, "c", progress=False, source=old)


def test_text_without_functions_still_makes_an_assistant(tmp_path):
    "Plain text gives no questions about code; the calendar remains."
    from llmlab.data.sources import stdlib_corpus

    texts = tmp_path / "texts"
    texts.mkdir()
    for i, d in enumerate([d for d in stdlib_corpus(("docstring",)) if len(d.text) > 300][:200]):
        (texts / f"{i}.txt").write_text(d.text)
    recipe = get_recipe("smoke", TINY | {"corpus.files": (str(texts),), "tokenizer.vocab_size": 300, "model.vocab_size": 300})
    life = lifecycle(recipe, tmp_path / "runs", progress=False)
    assert {i.task for i in tasks_of(life, "held_out")} == {"date"} and len(three_prompts(life)) == 3


def test_held_out_modules_are_not_trained_on(whole):
    from llmlab.data.document import read_documents

    modules = [{d.meta["module"] for d in read_documents(whole.dir("dedup") / f"{name}.jsonl.gz")} for name in ("train", "held_out")]
    assert modules[0] and modules[1] and not modules[0] & modules[1]


def test_two_runs_are_equal(whole, tmp_path):
    assert live(tmp_path).returncode == 0
    assert kept(tmp_path / "smoke") == kept(whole.folder)


def test_done_stages_are_not_done_again(whole):
    before = {p: p.stat().st_mtime_ns for p in whole.folder.rglob("done.json")}
    lifecycle(whole.recipe, whole.folder.parent, progress=False)
    assert before == {p: p.stat().st_mtime_ns for p in whole.folder.rglob("done.json")} and len(before) == len(STAGES)


def test_a_longer_life_only_adds_a_stage(whole, tmp_path):
    runs = tmp_path / "runs"
    shutil.copytree(whole.folder, runs / "smoke")
    count = Stage(
        "count",
        lambda life: Report("models", 1, 1, {}, {"parameters": open_model(life.dir("pretrain")).num_parameters}),
        show=lambda life: {"Counted": "one model"},
    )
    life = lifecycle(whole.recipe, runs, progress=False, stages=(*STAGES, count))
    assert json.loads((life.folder / "metrics.json").read_text())["stages"]["count"]["metrics"]["parameters"] > 0
    assert "one model" in (life.folder / "report.html").read_text()


def wait_for(condition, process, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None and time.monotonic() < end, "the run ended before it could be interrupted"
        time.sleep(0.005)


def begun(folder, stage):
    "Is a stage at work; one that trains: has it saved?"
    if stage in TRAINED:
        return any((folder / stage / "checkpoints").glob("step_*"))
    return (folder / stage).exists()


def interrupted(runs, moments, how):
    "A run stopped once in each of some stages, a moment after it began, and then left to end."
    for stage, delay in moments:
        process = subprocess.Popen(command(runs), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, preexec_fn=hears_ctrl_c)
        wait_for(lambda stage=stage: begun(runs / "smoke", stage), process)
        time.sleep(delay)
        process.send_signal(how)
        _, said = process.communicate(timeout=60)
        if how == signal.SIGINT:
            assert process.returncode == 130 and "the same command continues" in said, said[-2000:]
    done = live(runs)
    assert done.returncode == 0, done.stderr[-2000:]
    return kept(runs / "smoke")


def hears_ctrl_c():
    "A shell's background job would ignore Ctrl-C, and its children with it."
    signal.signal(signal.SIGINT, signal.default_int_handler)


def moments(seed, n):
    "Some stages in their order, each with a delay."
    draw = random.Random(seed)
    names = [s.name for s in STAGES]
    return [(names[i], draw.uniform(0, 0.1)) for i in sorted(draw.sample(range(len(names)), n))]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["kill", "ctrl-c"])
def test_interrupted_at_three_moments_it_continues(whole, tmp_path, how):
    assert interrupted(tmp_path, moments(0 if how == signal.SIGKILL else 1, 3), how) == kept(whole.folder)


@pytest.mark.slow
def test_killed_in_every_stage_it_continues(whole, tmp_path):
    assert interrupted(tmp_path, moments(0, len(STAGES)), signal.SIGKILL) == kept(whole.folder)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 5))
def test_killed_at_ten_seeded_moments_it_continues(whole, tmp_path, seed):
    assert interrupted(tmp_path, moments(seed, 10), signal.SIGKILL) == kept(whole.folder)


def test_another_recipe_is_refused_and_nothing_overwritten(whole):
    before = kept(whole.folder)
    refused(live(whole.folder.parent, **{"train.updates": 30}), "train.updates 24 -> 30", "--fresh", str(whole.folder))
    assert kept(whole.folder) == before


def test_truncated_files_are_named(whole, tmp_path):
    for name in ("pretrain/model.safetensors", "dedup/train.jsonl.gz", "int8/model.safetensors", "shards/train/manifest.json"):
        runs = tmp_path / name.replace("/", "_")
        shutil.copytree(whole.folder, runs / "smoke")
        file = runs / "smoke" / name
        file.write_bytes(file.read_bytes()[:-7])
        refused(live(runs), name, "--fresh")
    broken = runs / "smoke" / "manifest.json"
    broken.write_text(broken.read_text()[:50])
    refused(live(runs), "manifest.json", "not valid JSON")


def test_fresh_starts_anew_and_spares_other_folders(tmp_path):
    strange = tmp_path / "runs" / "smoke"
    strange.mkdir(parents=True)
    (strange / "thesis.txt").write_text("mine")
    for more in ((), ("--fresh",)):
        refused(live(tmp_path / "runs", *more), str(strange), "manifest")
        assert (strange / "thesis.txt").read_text() == "mine"


def test_two_processes_do_not_share_a_run(tmp_path):
    first = subprocess.Popen(command(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: (tmp_path / "smoke" / "manifest.json").exists(), first)
        refused(live(tmp_path), "another process")
    finally:
        first.kill()
        first.wait()


@pytest.mark.parametrize(
    "content, said",
    [
        (b"", "empty"),
        (b" \n\n\t\n", "empty"),
        (b"a short text that is longer than sixty characters, but of one document only.\n", "document"),
    ],
    ids=["empty", "blank", "tiny"],
)
def test_too_little_text(tmp_path, content, said):
    text = tmp_path / "text.txt"
    text.write_bytes(content)
    refused(live(tmp_path / "runs", "--file", str(text)), said)


def test_less_than_one_batch(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(30):
        (texts / f"{i}.txt").write_text(f"Number {i}: " + " ".join(chr(97 + (i * k) % 26) * (1 + k % 5) for k in range(40)))
    refused(
        live(tmp_path / "runs", "--file", str(texts), **{"rows": 512, "tokenizer.vocab_size": 280, "model.vocab_size": 280}),
        "512",
        "rows",
    )


def test_missing_and_unreadable_files(tmp_path):
    refused(live(tmp_path / "runs", "--file", str(tmp_path / "none.txt")), "none.txt")
    odd = tmp_path / "picture.png"
    odd.write_bytes(b"\x89PNG")
    refused(live(tmp_path / "runs", "--file", str(odd)), "picture.png")
    refused(live(tmp_path / "runs", recipe="pydocs"), "did you mean 'pydoc'")
    refused(live(tmp_path / "runs", "--set", "train.updates"), "FIELD=VALUE")


def test_a_full_disk(tmp_path):
    "In a file system of 200 kB the run stops with one line; with room it continues and ends equal."
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", small], capture_output=True).returncode:
        pytest.skip("no right to mount a small file system")
    try:
        refused(live(small), "no space left")
        assert not list(small.rglob("*.tmp"))
        subprocess.run(["mount", "-o", "remount,size=200m", small], check=True)
        assert live(small).returncode == 0
    finally:
        subprocess.run(["umount", small])


def test_python_m_and_the_script_say_the_same(tmp_path):
    script = shutil.which("llmlab", path=os.path.dirname(sys.executable))
    said = [subprocess.run([*c, "recipes"], capture_output=True, text=True).stdout for c in ([script], [sys.executable, "-m", "llmlab"])]
    assert said[0] == said[1] and "pydoc" in said[0]
    assert subprocess.run([script, "--version"], capture_output=True, text=True).stdout.strip() == "0.1.0"
    assert subprocess.run([script, "nonsense"], capture_output=True, text=True).returncode == 2


def say(*words, stdin=None):
    return subprocess.run([sys.executable, "-m", "llmlab", *words], capture_output=True, text=True, timeout=120, input=stdin)


def test_chat_says_what_the_model_says(whole):
    items = tasks_of(whole, "held_out")
    prompts = [next(i.prompt for i in items if i.task == t) for t in ("date", "name")]
    model, tokenizer = assistant_of(whole, "sft"), tokenizer_of(whole)
    room = [128 - len(render([{"role": "user", "content": p}], tokenizer, add_generation_prompt=True).ids) for p in prompts]
    offline = [ask(model, tokenizer, [p], n)[0] for p, n in zip(prompts, room, strict=True)]
    one = say("chat", str(whole.folder), prompts[0], "--model", "sft")
    assert one.returncode == 0 and one.stdout == offline[0] + "\n"
    lines = "".join(p.replace("\n", "\\n") + "\n" for p in prompts) + "\n"
    several = say("chat", str(whole.folder), "--model", "sft", stdin=lines)
    assert several.stdout.replace("> ", "") == "".join(a + "\n" for a in offline)


def test_serve_is_reached_and_stopped(whole):
    words = [sys.executable, "-m", "llmlab", "serve", str(whole.folder), "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=hears_ctrl_c) as server:
        try:
            url = re.search(r"http://\S+/v1", server.stdout.readline())[0]
            import httpx

            body = {"model": "smoke", "prompt": "def ", "max_tokens": 4, "temperature": 0}
            assert len(httpx.post(f"{url}/completions", json=body, timeout=30).json()["choices"][0]["text"]) > 0
            port = re.search(r":(\d+)/", url)[1]
            refused(say("serve", str(whole.folder), "--port", port), f"port {port}", "--port")
        finally:
            server.send_signal(signal.SIGINT)
            assert server.wait(30) in (0, 130, -signal.SIGINT)


def test_mistakes_in_chat_and_serve_are_one_line(whole, tmp_path):
    refused(say("chat", str(tmp_path), "hello"), str(tmp_path), "no run's folder")
    refused(say("serve", str(tmp_path)), str(tmp_path), "no run's folder")
    refused(say("chat", str(whole.folder), "hello", "--model", "grpo"), "grpo", "int8")
    refused(say("chat", str(whole.folder), "long " * 300), "context of 128")
    assert say("chat", str(whole.folder), "hello", "--temperature", "-1").returncode == 2
    half = tmp_path / "half"
    shutil.copytree(whole.folder, half, ignore=shutil.ignore_patterns("int8"))
    refused(say("chat", str(half), "hello"), "no int8 model yet")


def test_sample_from_a_run(whole):
    words = [sys.executable, "-m", "llmlab", "sample", str(whole.folder), "def ", "--tokens", "8"]
    said = [subprocess.run(words, capture_output=True, text=True).stdout for _ in range(2)]
    assert said[0] == said[1] and said[0].startswith("def ") and len(said[0]) > 6
