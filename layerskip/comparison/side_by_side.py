"""The same texts and questions for one checkpoint or for two, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from layerskip.comparison.accuracy import Answering, Extraction, Question, answer_questions
from layerskip.comparison.answer_log import AnswerLog
from layerskip.comparison.batches import token_rows
from layerskip.comparison.machine import fingerprint
from layerskip.comparison.perplexity import TextSums, Window, text_losses, window_size, windows_of
from layerskip.decoding.engine import Engine
from layerskip.decoding.plan import check_exit_layer
from layerskip.program import answering_tokenizer
from layerskip.prompt_file import Prompt, PromptRow, as_chat


@dataclass(frozen=True)
class Asked:
    """What is asked of every model.

    Attributes:
        documents: texts to read; none for no perplexity.
        window, stride: of the windows on them; `None` for the defaults of the first model.
        questions: what is to be answered; none for no accuracy.
        extraction: how an answer is read.
        exit_layers: the exits that read the texts, counted from 1, rising.
        arms: how questions are answered.
        max_new_tokens: the budget of every answer.
        batch_size: windows or questions that pass together.
    """

    documents: Sequence[str]
    window: int | None
    stride: int | None
    questions: Sequence[Question]
    extraction: Extraction
    exit_layers: Sequence[int]
    arms: Sequence[Answering]
    max_new_tokens: int
    batch_size: int


@dataclass(frozen=True)
class Prepared:
    """What is asked, as one model takes it.

    Attributes:
        window, stride: of the windows, in tokens.
        windows: of the texts.
        prompts: one for each question: a string, tokenised as it stands, or a list of messages.
        weights: a hash of the model's weights, by which answers of another one under the same name are told.
    """

    window: int
    stride: int
    windows: list[Window]
    prompts: list[Prompt]
    weights: str


def prepare(engine: Engine, model: str, asked: Asked) -> Prepared:
    """Returns what is asked as a model takes it; no layer runs.

    Args:
        engine: the model.
        model: what messages call it.
        asked: what is asked.

    Raises:
        TypeError, ValueError: no tokenizer, an exit that the model does not have, a window beyond its positions, no
            text long enough to predict a token, or, for questions, no EOS token or prompts that it cannot take.
    """
    layered, tokenizer = engine.layered, engine.tokenizer
    if tokenizer is None:
        raise ValueError(f"--model {model} has no tokenizer, without which no text can be read or written.")
    for exit_layer in (*asked.exit_layers, *(arm.exit_layer for arm in asked.arms)):
        check_exit_layer(exit_layer, layered.num_layers)
    prompts: list[Prompt] = []
    weights = fingerprint(engine.model)
    if asked.questions:
        prompts = as_chat([question.prompt for question in asked.questions], answering_tokenizer(engine, model))
        token_rows([PromptRow(question.where, question.prompt) for question in asked.questions], engine)
    if not asked.documents:
        return Prepared(0, 0, [], prompts, weights)
    window, stride = window_size(asked.window, asked.stride, layered.config.max_position_embeddings)
    windows = windows_of(asked.documents, tokenizer, window, stride)
    if not windows:
        raise ValueError("--text holds no text of two tokens or more, so that there is none to predict.")
    return Prepared(window, stride, windows, prompts, weights)


@dataclass
class Findings:
    """What has been measured so far.

    Attributes:
        log: the answers.
        texts: summed losses by model, in the order in which they were read.
    """

    log: AnswerLog
    texts: dict[str, TextSums] = field(default_factory=dict)


def measure(engine: Engine, model: str, prepared: Prepared, asked: Asked, findings: Findings) -> None:
    """Lets a model read the texts and answer the questions, and adds to the findings batch by batch.

    Args:
        engine: the model.
        model: what findings call it.
        prepared: of `prepare`.
        asked: what is asked.
        findings: what is there already is not answered again.
    """
    if prepared.windows:
        sums = findings.texts.setdefault(model, TextSums.empty(prepared.windows, asked.exit_layers))
        for indices, losses in text_losses(engine, prepared.windows, asked.exit_layers, asked.batch_size):
            sums.sums.put(indices, losses)
    for arm in asked.arms:
        for answers in answer_questions(
            engine,
            asked.questions,
            prepared.prompts,
            arm,
            asked.extraction,
            max_new_tokens=asked.max_new_tokens,
            batch_size=asked.batch_size,
            done=frozenset(findings.log.of(model, arm)),
        ):
            findings.log.add(model, arm, answers)
