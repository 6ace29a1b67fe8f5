"""What evaluate.py says: figures of texts and questions as JSON takes them, and as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from layerskip.comparison.accuracy import AUTOREGRESSIVE, Answering, Question, accuracy
from layerskip.comparison.answer_log import Answers
from layerskip.comparison.bootstrap import paired_bootstrap
from layerskip.comparison.perplexity import TextSums
from layerskip.comparison.table import format_table

SPECULATIVE_NOTE = (
    "Verification restores the whole model's answers, so that accuracy does not tell exits apart under "
    "self_speculative; how well an exit alone answers is what --strategy early_exit measures."
)
EARLY_EXIT_NOTE = (
    "early_exit answers from the first layers alone, so that its accuracy varies from exit to exit; the answers of "
    "self-speculation are verified and keep the accuracy of all layers."
)
NOTES = {"autoregressive": None, "early_exit": EARLY_EXIT_NOTE, "self_speculative": SPECULATIVE_NOTE}


# --- Texts ------------------------------------------------------------------------------------------------------------


def text_report(by_model: Mapping[str, TextSums], seed: int) -> dict[str, Any]:
    """Returns the figures of a text, of one model or of two that are compared.

    `models`: for each its `model`, `windows`, `tokens` (predicted ones), and of the last layer `loss`, `perplexity`;
    `exits`: `exit_layer`, `loss`, `perplexity`, `agreement` (share of tokens for which the exit's first choice is the
    last layer's). All are sums over tokens divided by their number; `None` where nothing came in. `comparison`, of two:
    for the last layer (`exit_layer` null) and each exit the first model's loss minus the second's as `difference`, the
    ends of its interval as `low` and `high`, and over how many `items`, documents or, in a single one, windows.
    """
    models = [{"model": model, **_text_figures(sums)} for model, sums in by_model.items()]
    comparison = _text_comparison(list(by_model.values()), seed) if len(by_model) == 2 else []
    return {"models": models, "comparison": comparison}


def _text_figures(text: TextSums) -> dict[str, Any]:
    done = bool(text.sums.tokens.sum())
    found = text.sums.metrics() if done else {}
    return {
        "windows": int((text.sums.tokens > 0).sum()),
        "tokens": int(text.sums.tokens.sum()),
        "loss": found.get("loss"),
        "perplexity": found.get("perplexity"),
        "exits": [
            {
                "exit_layer": exit_layer,
                **{name: found.get(f"{name}_exit_{exit_layer}") for name in ("loss", "perplexity", "agreement")},
            }
            for exit_layer in text.sums.exit_layers
        ],
    }


def _text_comparison(texts: Sequence[TextSums], seed: int) -> list[dict[str, Any]]:
    """Compares what two models have both read; nothing where that is nothing."""
    first, second = texts
    both = np.flatnonzero((first.sums.tokens > 0) & (second.sums.tokens > 0))
    if not len(both):
        return []
    grouped = [text.items(both) for text in texts]
    tokens = grouped[0][0]
    rows = []
    for column, exit_layer in enumerate((None, *first.sums.exit_layers)):
        one, other = (losses[:, column] / tokens for _, losses in grouped)
        found = paired_bootstrap(one, other, seed=seed, weights=tokens)
        rows.append({"exit_layer": exit_layer, "items": len(tokens), **vars(found)})
    return rows


def print_text(report: Mapping[str, Any]) -> None:
    """Prints the figures of `text_report`."""
    for figures in report["models"]:
        print(f"\n{figures['model']} on the text: {figures['tokens']} tokens in {figures['windows']} windows.")
        rows = [["last", _digits(figures["loss"], 4), _digits(figures["perplexity"], 3), None]]
        rows += [
            [
                str(made["exit_layer"]),
                _digits(made["loss"], 4),
                _digits(made["perplexity"], 3),
                _digits(made["agreement"], 3),
            ]
            for made in figures["exits"]
        ]
        print(format_table(["exit_layer", "loss", "perplexity", "agreement"], rows), flush=True)
    if report["comparison"]:
        first, second = (figures["model"] for figures in report["models"])
        print(f"\nLoss of {first} minus that of {second}, with a 95 % interval:")
        rows = [
            ["last" if made["exit_layer"] is None else str(made["exit_layer"]), *_difference(made), made["items"]]
            for made in report["comparison"]
        ]
        print(format_table(["exit_layer", "difference", "low", "high", "items"], rows), flush=True)


# --- Questions --------------------------------------------------------------------------------------------------------


def questions_report(
    questions: Sequence[Question], answers: Answers, models: Sequence[str], arms: Sequence[Answering], seed: int
) -> dict[str, Any]:
    """Returns the figures of questions, of one model or of two that are compared.

    `questions`: how many there are. `models`: for each its `model` and `arms`: the settings of each arm, the figures of
    `accuracy`, `new_tokens`, `same_as_autoregressive` (how many answers are token for token those of all layers, of
    those that were answered with both) and `categories`, by name the figures of `accuracy`. `comparison`, of two: for
    each arm the first model's accuracy minus the second's as `difference` over the questions that both answered, their
    number as `questions`, the ends of its interval as `low` and `high`, and how many only the first (`only_first`) and
    only the second (`only_second`) got right. `note`: what accuracy tells about exits with this strategy.
    """
    note = NOTES[arms[-1].strategy]
    return {
        "questions": len(questions),
        "note": note,
        "models": [
            {"model": model, "arms": [_arm_figures(questions, answers, model, arm) for arm in arms]} for model in models
        ],
        "comparison": [_arm_comparison(answers, models, arm, seed) for arm in arms] if len(models) == 2 else [],
    }


def _arm_figures(questions: Sequence[Question], answers: Answers, model: str, arm: Answering) -> dict[str, Any]:
    found, plain = answers.get((model, arm), {}), answers.get((model, AUTOREGRESSIVE), {})
    categories: dict[str, set[int]] = {}
    for index, question in enumerate(questions):
        if question.category is not None:
            categories.setdefault(question.category, set()).add(index)
    same = [found[index].token_ids == plain[index].token_ids for index in found if index in plain]
    return {
        **arm.settings,
        **accuracy(found),
        "new_tokens": sum(len(answer.token_ids) for answer in found.values()),
        "same_as_autoregressive": sum(same),
        "categories": {name: accuracy(found, categories[name]) for name in sorted(categories)},
    }


def _arm_comparison(answers: Answers, models: Sequence[str], arm: Answering, seed: int) -> dict[str, Any]:
    """Compares what both models have answered; all but the number of questions is `None` where that is nothing."""
    one, other = (answers.get((model, arm), {}) for model in models)
    pairs = np.array([(one[index].correct, other[index].correct) for index in sorted(one) if index in other])
    first, second = pairs.reshape(-1, 2).T.astype(bool)
    found: dict[str, Any] = {"difference": None, "low": None, "high": None}
    if len(pairs):
        found = vars(paired_bootstrap(first, second, seed=seed))
    return {
        **arm.settings,
        "questions": len(pairs),
        **found,
        "only_first": int((first & ~second).sum()),
        "only_second": int((second & ~first).sum()),
    }


def print_questions(report: Mapping[str, Any]) -> None:
    """Prints the figures of `questions_report`."""
    for figures in report["models"]:
        print(f"\n{figures['model']}, {report['questions']} questions:")
        header = ["answered by", "answered", "correct", "accuracy", "ended with EOS", "same as autoregressive"]
        rows = []
        for made in figures["arms"]:
            same = None if made["strategy"] == AUTOREGRESSIVE.strategy else made["same_as_autoregressive"]
            rows.append([*_accuracy_row(_name(made), made), same])
            rows += [[*_accuracy_row(f"  {name}", part), None] for name, part in made["categories"].items()]
        print(format_table(header, rows), flush=True)
    if report["comparison"]:
        first, second = (figures["model"] for figures in report["models"])
        print(f"\nAccuracy of {first} minus that of {second}, with a 95 % interval:")
        header = ["answered by", "questions", "difference", "low", "high", f"only {first}", f"only {second}"]
        rows = [
            [_name(made), made["questions"], *_difference(made), made["only_first"], made["only_second"]]
            for made in report["comparison"]
        ]
        print(format_table(header, rows), flush=True)
    if report["note"] is not None:
        print(f"\n{report['note']}", flush=True)


def _name(made: Mapping[str, Any]) -> str:
    """Returns what a table calls an arm."""
    parts = [made["strategy"]]
    if made["exit_layer"] is not None:
        parts.append(f"E={made['exit_layer']}")
    if made["num_draft_tokens"] is not None:
        parts.append(f"γ={made['num_draft_tokens']}")
    return " ".join(parts)


def _accuracy_row(name: str, figures: Mapping[str, Any]) -> list[object]:
    return [name, figures["answered"], figures["correct"], _digits(figures["accuracy"], 3), figures["finished"]]


def _difference(made: Mapping[str, Any]) -> list[str | None]:
    return [None if made[part] is None else f"{made[part]:+.4f}" for part in ("difference", "low", "high")]


def _digits(value: float | None, digits: int) -> str | None:
    return None if value is None else f"{value:.{digits}f}"
