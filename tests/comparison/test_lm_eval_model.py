"""Checkpoints as lm-eval's models: the same figures as its own model class, on tiny models and local tasks."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import Registry, get_model
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from layerskip import Engine
from layerskip.comparison import lm_eval_model
from layerskip.comparison.lm_eval_model import LayerSkipLM
from tests import kit

ROOT = Path(__file__).parents[2]
EOS = 35
EXIT = 2
CONTEXTS = ["w44 w3", "w1 w5 w9 w33 w7", "w2", "", "w3 w3 w3 w18 w52 w9 "]
CONTINUATIONS = [" w9", " w3 w4", " w35 w1 w2"]
BUDGET = 12
GREEDY = {"until": ["w44"], "max_gen_toks": BUDGET, "do_sample": False, "temperature": 0.0}
STRATEGIES = {
    "autoregressive": {},
    "early_exit": {"exit_layer": EXIT},
    "self_speculative": {"exit_layer": EXIT, "num_draft_tokens": 3},
}


def tokenizer(**special: str) -> PreTrainedTokenizerFast:
    """A word for each id, and an EOS token."""
    made = kit.word_tokenizer(kit.VOCAB)
    made.add_special_tokens({"eos_token": f"w{EOS}", **special})
    return made


def models(family: str = "llama", **tokens: str) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A model whose exit agrees in part with it, and a tokenizer; both end texts with EOS."""
    model = kit.graded(family, "some")
    model.generation_config.eos_token_id = EOS
    return model, tokenizer(**tokens)


def ours(model: PreTrainedModel, words: PreTrainedTokenizerFast, strategy: str, **options: Any) -> LayerSkipLM:
    return LayerSkipLM(Engine(model, words), strategy=strategy, **STRATEGIES[strategy], **options)


def theirs(model: PreTrainedModel, words: PreTrainedTokenizerFast, strategy: str, **options: Any) -> HFLM:
    """lm-eval's own class, for an exit on the model cut off there."""
    whole = kit.truncated(model, EXIT) if strategy == "early_exit" else model
    whole.generation_config.eos_token_id = EOS
    return HFLM(pretrained=whole, tokenizer=words, **options)


def pair(family: str, strategy: str, bos: bool = False, **options: Any) -> tuple[LayerSkipLM, HFLM]:
    special = {"bos_token": "w7"} if bos else {}
    model, words = models(family, **special)
    # HFLM sets a padding token on the tokenizer that it is given.
    return ours(model, words, strategy, **options), theirs(model, tokenizer(**special), strategy, **options)


def requests(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(kind, {}, each, index) for index, each in enumerate(arguments)]


LIKELIHOODS = requests("loglikelihood", [(context, each) for context in CONTEXTS for each in CONTINUATIONS])


def assert_same_likelihoods(found: list[tuple[float, bool]], wanted: list[tuple[float, bool]]) -> None:
    assert [score for score, _ in found] == pytest.approx([score for score, _ in wanted], abs=1e-4)
    assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in wanted]


# Likelihoods


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("family", kit.CONFIGS)
def test_likelihoods_are_those_of_lm_evals_own_class(family: str, strategy: str) -> None:
    """Of an exit: those of the model cut off there. Self-speculation has the whole model's."""
    mine, reference = pair(family, strategy, batch_size=4)
    assert_same_likelihoods(
        mine.loglikelihood(LIKELIHOODS, disable_tqdm=True), reference.loglikelihood(LIKELIHOODS, disable_tqdm=True)
    )


def test_an_exit_has_other_likelihoods_than_the_last_layer() -> None:
    """A control for the test above."""
    model, words = models()
    first = ours(model, words, "early_exit").loglikelihood(LIKELIHOODS, disable_tqdm=True)
    last = ours(model, words, "autoregressive").loglikelihood(LIKELIHOODS, disable_tqdm=True)
    assert all(abs(one[0] - other[0]) > 1e-3 for one, other in zip(first, last, strict=True))


@pytest.mark.parametrize("strategy", ["autoregressive", "early_exit"])
def test_a_models_own_next_tokens_are_greedy(strategy: str) -> None:
    mine, reference = pair("llama", strategy)
    ids = kit.without_cache(reference.model, [44, 3], 3)
    own = " " + " ".join(f"w{token}" for token in ids)
    asked = requests("loglikelihood", [("w44 w3", own), ("w44 w3", own.rpartition(" ")[0] + " w96")])
    found = mine.loglikelihood(asked, disable_tqdm=True)
    assert [is_greedy for _, is_greedy in found] == [True, False]
    assert_same_likelihoods(found, reference.loglikelihood(asked, disable_tqdm=True))


def test_choices_that_differ_in_their_last_token_pass_once() -> None:
    model, words = models()
    mine = ours(model, words, "early_exit", batch_size=2)
    asked = requests("loglikelihood", [("w1 w5 w9", f" w{token}") for token in range(10, 20)])
    with kit.counted_layers(model) as counts:
        mine.loglikelihood(asked, disable_tqdm=True)
    assert counts == [3, 3, 0, 0]


@pytest.mark.parametrize("bos", [False, True], ids=["eos_prefix", "bos_prefix"])
def test_texts_without_a_context_follow_the_prefix_token(bos: bool) -> None:
    mine, reference = pair("llama", "autoregressive", bos=bos)
    assert mine.prefix_token_id == reference.prefix_token_id == (7 if bos else EOS)
    # The last begins with either prefix, which then is not set before it.
    asked = requests("loglikelihood", [("", "w9 w3"), ("", "w7 w3"), ("", "w35 w3")])
    assert_same_likelihoods(
        mine.loglikelihood(asked, disable_tqdm=True), reference.loglikelihood(asked, disable_tqdm=True)
    )


@pytest.mark.parametrize("max_length", [2, 5, 64])
def test_long_texts_are_cut_on_the_left_and_read_in_windows(max_length: int) -> None:
    mine, reference = pair("llama", "early_exit", max_length=max_length, batch_size=3)
    long = " ".join(f"w{token}" for token in kit.PROMPT)
    asked = requests("loglikelihood", [(long, " w9 w1"), ("w3", " w4 w5")])
    assert_same_likelihoods(
        mine.loglikelihood(asked, disable_tqdm=True), reference.loglikelihood(asked, disable_tqdm=True)
    )
    rolling = requests("loglikelihood_rolling", [(long,), ("w3",), (long + " w4",)])
    wanted = reference.loglikelihood_rolling(rolling, disable_tqdm=True)
    assert mine.loglikelihood_rolling(rolling, disable_tqdm=True) == pytest.approx(wanted, abs=1e-4)


def test_an_empty_text_has_likelihood_one() -> None:
    mine = ours(*models(), "autoregressive")
    assert mine.loglikelihood_rolling(requests("loglikelihood_rolling", [("",)]), disable_tqdm=True) == [0.0]


def test_continuations_that_cannot_be_read_are_named() -> None:
    mine = ours(*models(), "autoregressive", max_length=3)
    with pytest.raises(ValueError, match=r"the continuation '' has 0 tokens; allowed are 1 to max_length=3"):
        mine.loglikelihood(requests("loglikelihood", [("w1", "")]), disable_tqdm=True)
    with pytest.raises(ValueError, match="has 4 tokens"):
        mine.loglikelihood(requests("loglikelihood", [("w1", " w1 w2 w3 w4")]), disable_tqdm=True)


# Texts


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("family", "batch_size"), [("llama", 1), ("llama", 3), ("gemma2", 3), ("gpt2", 3)])
def test_texts_are_those_of_lm_evals_own_class(family: str, strategy: str, batch_size: int) -> None:
    mine, reference = pair(family, strategy, batch_size=batch_size)
    asked = requests("generate_until", [(context, GREEDY) for context in CONTEXTS if context])
    found = mine.generate_until(asked, disable_tqdm=True)
    assert found == reference.generate_until(asked, disable_tqdm=True)
    assert len(set(found)) > 1


@pytest.mark.parametrize("grade", ["some", "all"])
def test_self_speculation_drafts_and_gives_the_last_layers_texts(grade: str) -> None:
    model, words = kit.graded("llama", grade), tokenizer()
    asked = requests("generate_until", [(context, {**GREEDY, "until": []}) for context in CONTEXTS])
    drafting, plain = ours(model, words, "self_speculative"), ours(model, words, "autoregressive")
    assert drafting.generate_until(asked, disable_tqdm=True) == plain.generate_until(asked, disable_tqdm=True)
    info = drafting.get_model_info()
    assert (info["strategy"], info["exit_layer"], info["num_draft_tokens"]) == ("self_speculative", EXIT, 3)
    taken = info["statistics"]
    assert 0 < taken["accepted"] <= taken["drafted"]
    assert (taken["accepted"] == taken["drafted"]) == (grade == "all")
    assert plain.get_model_info()["statistics"]["drafted"] == 0
    json.dumps(info)


def test_requests_with_different_settings_come_back_in_their_order() -> None:
    model, words = models()
    mine = ours(model, words, "autoregressive", batch_size=4)
    asked = [("w44 w3", {**GREEDY, "max_gen_toks": count, "until": []}) for count in (2, 5, 2, 1)]
    whole = [f"w{token}" for token in kit.without_cache(model, [44, 3], 5)]
    found = mine.generate_until(requests("generate_until", asked), disable_tqdm=True)
    assert found == [" ".join(whole[:count]) for count in (2, 5, 2, 1)]


def test_a_text_ends_before_its_stop_string_and_no_further_token_is_made() -> None:
    """Stop strings may be split between tokens, and the end of the prompt is no part of one."""
    model = kit.l4()
    new = kit.without_cache(model, [1, 5], BUDGET)
    letters = kit.spelled({1: b"x", 5: b"A", new[0]: b"B", new[1]: b"C", new[2]: b"De", new[3]: b"fg", EOS: b"<end>"})
    letters.add_special_tokens({"eos_token": "<end>"})
    mine = LayerSkipLM(Engine(model, letters))
    settings = {"max_gen_toks": BUDGET, "until": ["AB", "ef"]}
    assert mine.generate_until(requests("generate_until", [("xA", settings)]), disable_tqdm=True) == ["BCD"]
    assert mine.get_model_info()["statistics"]["emitted"] == 4


def test_prompts_are_cut_on_the_left_to_leave_room_for_the_text() -> None:
    mine, reference = pair("llama", "autoregressive", max_length=BUDGET + 3)
    asked = requests("generate_until", [(CONTEXTS[1], GREEDY)])
    assert mine.generate_until(asked, disable_tqdm=True) == reference.generate_until(asked, disable_tqdm=True)
    assert mine.get_model_info()["statistics"]["early_layer_tokens"] <= 3 + BUDGET
    with pytest.raises(ValueError, match=r"max_gen_toks=256 is out of range; allowed are 1 to 14"):
        mine.generate_until(requests("generate_until", [("w1", {"until": []})]), disable_tqdm=True)


def test_sampled_texts_follow_the_seed() -> None:
    mine = ours(*models(), "self_speculative")
    asked = requests("generate_until", [("w44 w3", {**GREEDY, "do_sample": True, "temperature": 2.0, "top_p": 0.9})])

    def text(seed: int) -> str:
        torch.manual_seed(seed)
        return mine.generate_until(asked, disable_tqdm=True)[0]

    assert text(0) == text(0)
    assert len({text(seed) for seed in range(3)}) > 1


@pytest.mark.parametrize("name", ["stop", "strategy", "max_length", "presence_penalty"])
def test_unknown_generation_arguments_are_refused_before_any_text(name: str) -> None:
    model, words = models()
    asked = requests("generate_until", [("w1", GREEDY), ("w2", {**GREEDY, name: 1})])
    with kit.counted_layers(model) as counts, pytest.raises(TypeError, match=rf"^{name}=1 is not supported"):
        ours(model, words, "autoregressive").generate_until(asked, disable_tqdm=True)
    assert counts == [0] * kit.NUM_LAYERS


def test_chat_templates_are_the_tokenizers() -> None:
    mine, reference = pair("llama", "autoregressive")
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    for model in (mine, reference):
        model.tokenizer.chat_template = template + "{% if add_generation_prompt %}w8{% endif %}"
        model.tokenizer.name_or_path = "owner/words"
    chat = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]
    assert mine.apply_chat_template(chat) == "user: w1\nassistant: w2\nw8"
    assert mine.apply_chat_template(chat, add_generation_prompt=False) == "user: w1\nassistant: w2"
    assert mine.apply_chat_template(chat, False) == reference.apply_chat_template(chat, False)
    assert mine.chat_template(True) == reference.chat_template(True) == mine.tokenizer.chat_template
    assert mine.tokenizer_name == reference.tokenizer_name == "owner__words"


# Arguments


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"peft": "x"}, TypeError, "peft='x' is no argument of 'layerskip'; allowed are pretrained, strategy"),
        ({"device": "cpu"}, TypeError, "device='cpu' is no argument"),
        ({"batch_size": "auto"}, ValueError, "batch_size='auto' is not allowed; pass an integer from 1 on"),
        ({"batch_size": 0}, ValueError, "batch_size=0 is not allowed"),
        ({"max_length": -4}, ValueError, "max_length=-4 is not allowed"),
        ({"strategy": "draft"}, ValueError, "strategy='draft' is unknown"),
        ({"strategy": "early_exit"}, ValueError, "needs exit_layer"),
        ({"strategy": "early_exit", "exit_layer": 4}, ValueError, "exit_layer=4 is out of range"),
        ({"exit_layer": 2}, ValueError, "exit_layer=2 has no meaning with strategy='autoregressive'"),
        ({"strategy": "early_exit", "exit_layer": 2, "num_draft_tokens": 3}, ValueError, "num_draft_tokens=3 has no"),
    ],
)
def test_arguments_that_cannot_be_are_refused_by_name(
    arguments: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        LayerSkipLM(Engine(*models()), **arguments)


@pytest.mark.parametrize("words", [None, kit.word_tokenizer()], ids=["no_tokenizer", "no_eos"])
def test_a_tokenizer_with_an_eos_token_is_needed(words: PreTrainedTokenizerFast | None) -> None:
    with pytest.raises(ValueError, match="no tokenizer with an EOS token"):
        LayerSkipLM(Engine(kit.l4(), words))


# Registration


def test_the_entry_point_is_one_that_lm_eval_can_resolve() -> None:
    group = "lm_eval.models"
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"][group]
    registry: Registry[type[LM]] = Registry("model", base_cls=LM)
    for name, value in declared.items():
        registry.register(name, target=EntryPoint(name, value, group))
    assert registry.get("layerskip") is LayerSkipLM


def test_importing_the_module_registers_the_model_beside_lm_evals_own() -> None:
    assert get_model("layerskip") is LayerSkipLM
    assert get_model("hf") is HFLM


def test_without_lm_eval_the_module_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r'pip install "layerskip\[eval\]"'):
        runpy.run_path(lm_eval_model.__file__)


# Whole runs on local tasks

CHOICES = ["w9", "w10 w11", "w12"]
QUESTIONS = [(44, 3), (1, 5, 9), (2,), (60, 61), (7, 52, 18), (33,), (80, 4), (21, 22, 23)]
ROWS = [{"question": " ".join(f"w{token}" for token in ids), "gold": place % 3} for place, ids in enumerate(QUESTIONS)]


@cache
def whole_and_exit() -> tuple[PreTrainedModel, PreTrainedModel]:
    """A model whose exit hardly ever agrees with it, and what the exit is."""
    model = kit.l4(eos_token_id=EOS)
    return model, kit.truncated(model, EXIT)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("checkpoint")
    whole_and_exit()[0].save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


@cache
def last_word(model: PreTrainedModel, ids: tuple[int, ...]) -> str | None:
    """Returns the last word of a greedy text; EOS, which may end it, is none."""
    tokens = kit.without_cache(model, list(ids), BUDGET)
    kept = tokens[: tokens.index(EOS)] if EOS in tokens else tokens
    return f"w{kept[-1]}" if kept else None


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two tasks, one with choices and one with texts, and their data."""
    folder = tmp_path_factory.mktemp("tasks")
    whole, short = whole_and_exit()
    # Texts are asked to end as the last layer ends them, as the exit does, or otherwise.
    models = [whole, short, whole, None, whole, None, whole, short]
    rows = [
        {**row, "answer": "none" if model is None else last_word(model, ids)}
        for row, ids, model in zip(ROWS, QUESTIONS, models, strict=True)
    ]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    source = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "doc_to_text": "{{question}}",
    }
    choosing = {
        "task": "tiny_choices",
        "output_type": "multiple_choice",
        "doc_to_choice": CHOICES,
        "doc_to_target": "{{gold}}",
        "metric_list": [{"metric": "acc"}],
    }
    last = {"function": "regex", "regex_pattern": r"(w\d+)$"}
    writing = {
        "task": "tiny_texts",
        "output_type": "generate_until",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": BUDGET, "do_sample": False},
        "filter_list": [{"name": "last_word", "filter": [last, {"function": "take_first"}]}],
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    for task in (choosing, writing):
        # JSON is YAML.
        (folder / f"{task['task']}.yaml").write_text(json.dumps({**source, **task}), encoding="utf-8")
    return folder


@torch.no_grad()
def accuracy_by_hand(model: PreTrainedModel) -> float:
    right = []
    for row, ids in zip(ROWS, QUESTIONS, strict=True):
        scores = []
        for choice in CHOICES:
            wanted = [int(word[1:]) for word in choice.split()]
            log_probs = model(torch.tensor([[*ids, *wanted]])).logits[0].log_softmax(-1)
            scores.append(sum(float(log_probs[len(ids) - 1 + place, token]) for place, token in enumerate(wanted)))
        right.append(scores.index(max(scores)) == row["gold"])
    return sum(right) / len(right)


def share_by_hand(model: PreTrainedModel, tasks: Path) -> float:
    rows = [json.loads(line) for line in (tasks / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    right = [row["answer"] == last_word(model, ids) for row, ids in zip(rows, QUESTIONS, strict=True)]
    return sum(right) / len(right)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_whole_runs_give_what_is_computed_by_hand(
    checkpoint: str, tasks: Path, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Loading is counted on the net otherwise.
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    # A list of the packages that are installed.
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
    arguments = {"pretrained": checkpoint, "strategy": strategy, **STRATEGIES[strategy], "dtype": "float32"}
    found = simple_evaluate(
        model="layerskip",
        model_args=",".join(f"{name}={value}" for name, value in arguments.items()),
        tasks=["tiny_choices", "tiny_texts"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        batch_size=3,
        device="cpu",
        bootstrap_iters=0,
    )
    assert found is not None
    model = whole_and_exit()[strategy == "early_exit"]
    accuracy, share = accuracy_by_hand(model), share_by_hand(model, tasks)
    assert found["results"]["tiny_choices"]["acc,none"] == accuracy
    assert found["results"]["tiny_texts"]["exact_match,last_word"] == share
    assert 0 < accuracy < 1
    assert 0 < share < 1
    assert found["config"]["strategy"] == strategy
    assert (found["config"]["statistics"]["drafted"] > 0) == (strategy == "self_speculative")


def test_an_exit_does_not_do_on_these_tasks_as_the_last_layer_does(tasks: Path) -> None:
    """A control for the test above: it can tell them apart."""
    whole, short = whole_and_exit()
    assert accuracy_by_hand(whole) != accuracy_by_hand(short)
    assert share_by_hand(whole, tasks) != share_by_hand(short, tasks)


# As `python -m` runs it, but that lm-eval neither reads its own 14,000 tasks nor lists the packages that are installed.
COMMAND = """
import functools, lm_eval.evaluator, lm_eval.tasks, runpy
lm_eval.evaluator.add_env_info = lambda results: None
lm_eval.tasks.TaskManager = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)
runpy.run_module("layerskip.comparison.lm_eval_model", run_name="__main__", alter_sys=True)
"""


def test_the_command_line_is_lm_evals_own_with_the_model(checkpoint: str, tasks: Path, tmp_path: Path) -> None:
    arguments = [
        *("run", "--model", "layerskip"),
        *("--model_args", f"pretrained={checkpoint},strategy=early_exit,exit_layer={EXIT},dtype=float32,device=cpu"),
        *("--tasks", "tiny_choices", "--include_path", str(tasks), "--batch_size", "2"),
        *("--output_path", str(tmp_path)),
    ]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    run = subprocess.run(
        [sys.executable, "-c", COMMAND, *arguments],
        cwd=ROOT,
        env={**os.environ, **offline},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    (path,) = tmp_path.rglob("results_*.json")
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["results"]["tiny_choices"]["acc,none"] == accuracy_by_hand(whole_and_exit()[1])
    assert (found["config"]["model"], found["config"]["exit_layer"]) == ("layerskip", EXIT)
    assert "tiny_choices" in run.stdout
