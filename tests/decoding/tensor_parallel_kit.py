"""What each rank of a tensor parallel model runs; a process that has the whole model runs the same."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import layerskip
from layerskip import Engine
from layerskip.decoding import call
from tests import kit
from tests.decoding import levers_kit

NEW = 12
# Options of a call, and how many prompts it has.
Way = tuple[dict[str, Any], int]
AUTOREGRESSIVE: Way = ({"strategy": "autoregressive"}, 1)
SPECULATIVE: Way = ({}, 1)
# All that is decided between rounds.
DECIDING: Way = ({"exit_layer": "auto", "draft_stop": "adaptive", "copy_ngrams": "trusted"}, 3)
GREEDY: dict[str, Way] = {
    "autoregressive": AUTOREGRESSIVE,
    "speculative": SPECULATIVE,
    "early_exit": ({"strategy": "early_exit"}, 1),
    "copies": ({"copy_ngrams": "checked"}, 3),
    "deciding": DECIDING,
}
SAMPLED: dict[str, Way] = {
    "autoregressive": AUTOREGRESSIVE,
    "speculative": SPECULATIVE,
    "deciding": DECIDING,
    "several of one prompt": ({"num_return_sequences": 3}, 1),
}


@dataclass(frozen=True)
class Answer:
    """What a call gave.

    Attributes:
        tokens: prompts and new tokens.
        counts: rounds, drafts, and accepted ones.
        logits: of every step, `(rows, vocabulary)`; none where they were not asked for.
        next_number: what this rank's generator gives after the call; `None` where nobody looked.
    """

    tokens: list[list[int]]
    counts: tuple[int, int, int]
    logits: tuple[torch.Tensor, ...] = ()
    next_number: float | None = None


def rank() -> int:
    """Returns the number of this process; 0 for one that is alone."""
    return int(os.environ.get("RANK", 0))


def loaded(folder: str) -> PreTrainedModel:
    """Returns a model, divided among the ranks where there are several."""
    plan = {"tp_plan": "auto"} if "RANK" in os.environ else {}
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, **plan).eval()
    return model


def ask(model: PreTrainedModel, way: Way, **arguments: Any) -> Answer:
    """Returns what an engine that knows what rounds cost gives for the prompts of the levers' tests."""
    options, rows = way
    ids, mask = levers_kit.padded(levers_kit.PROMPTS[:rows])
    engine = Engine(model, exit_layer=kit.EXIT_LAYER, cost_table=levers_kit.gpu_like())
    settings = {"pad_token_id": 0, "max_new_tokens": NEW, **options, **arguments}
    result = engine.generate(ids, attention_mask=mask, **settings)
    did = result.statistics
    return Answer(result.sequences.tolist(), (did.rounds, did.drafted, did.accepted), result.logits or ())


def ask_by_hook(model: PreTrainedModel, **arguments: Any) -> Answer:
    """Returns what `generate` with the hook gives in two turns, the second of which goes on from the first's cache."""
    settings = {"pad_token_id": 0, "max_new_tokens": NEW, "return_dict_in_generate": True, **arguments}
    settings |= {"custom_generate": layerskip.self_speculative(exit_layer=kit.EXIT_LAYER)}
    first: Any = model.generate(kit.prompt_tensor(), **settings)
    second: Any = model.generate(
        torch.cat([first.sequences, kit.prompt_tensor()], dim=1), cache=first.cache, **settings
    )
    did = second.statistics
    return Answer(second.sequences.tolist(), (did.rounds, did.drafted, did.accepted))


def answers(folder: str) -> dict[str, Answer]:
    """Returns what a Llama says in all ways; before every call each rank has random numbers of its own."""
    model = loaded(folder)
    said = {f"greedy, {name}": ask(model, way, do_sample=False, output_logits=True) for name, way in GREEDY.items()}
    said["greedy, tree"] = ask(model, ({"tree_nodes": 6}, 1), do_sample=False)
    said["greedy, hook"] = ask_by_hook(model, do_sample=False)
    for name, way in SAMPLED.items():
        torch.manual_seed(rank())
        said[f"sampled, {name}"] = replace(ask(model, way, do_sample=True), next_number=torch.rand(()).item())
    torch.manual_seed(rank())
    said["sampled, hook"] = ask_by_hook(model, do_sample=True)
    generator = torch.Generator().manual_seed(rank())
    given = ask(model, DECIDING, do_sample=True, generator=generator)
    said["sampled by a generator"] = replace(given, next_number=torch.rand((), generator=generator).item())
    return said


def left_alone(folder: str) -> Answer:
    """Returns what ranks draw that are left to numbers of their own; each pass has one token, whatever they draw."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call, "share_random_state", lambda model, generator: None)
        torch.manual_seed(rank())
        return ask(loaded(folder), AUTOREGRESSIVE, do_sample=True)


def refusals(folder: str) -> list[str]:
    """Returns what is said about options that cannot be had."""
    model = loaded(folder)
    said = []
    unfit = [({}, {"max_time": 60.0}), ({"draft_token_ids": torch.arange(9)}, {}), ({"compile": True}, {})]
    for options, settings in unfit:
        engine = Engine(model, exit_layer=kit.EXIT_LAYER, **options)
        with pytest.raises(ValueError) as refused:
            engine.generate(kit.prompt_tensor(), do_sample=False, max_new_tokens=4, **settings)
        said.append(str(refused.value))
    return said


def family_answers(folders: dict[str, str]) -> dict[str, list[list[int]]]:
    """Returns what a model of each family says, greedily."""
    models = {family: loaded(folder) for family, folder in folders.items()}
    return {
        family: ask(model, SPECULATIVE, do_sample=False, max_new_tokens=8).tokens for family, model in models.items()
    }


def everything(llama: str, families: dict[str, str], without_plan: str) -> dict[str, Any]:
    """Returns all of the above, and what transformers says of a model without a plan."""
    with pytest.raises(ValueError) as refused:
        loaded(without_plan)
    return {
        "answers": answers(llama),
        "left alone": left_alone(llama),
        "refusals": refusals(llama),
        "families": family_answers(families),
        "without a plan": str(refused.value),
    }
