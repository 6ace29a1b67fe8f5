"""A checkpoint on its own greedy answers, where drafts are made: which choices of an exit are the model's own.

Beside them the usual measure: losses on given completions.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from layerskip.comparison.forced import LOGIT_ROWS, answer_states, following
from layerskip.comparison.losses import LossSums, batch_losses
from layerskip.comparison.plain_greedy import plain_greedy
from layerskip.decoding.engine import Engine
from layerskip.decoding.prompts import longest_first, read_prompts
from layerskip.model.layered import LayeredModel
from layerskip.training.rows import RowTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class OwnAnswer:
    """A greedy answer of all layers.

    Attributes:
        prompt_ids: the prompt's tokens.
        token_ids: N new tokens, the EOS token that ended them included.
        text: the new tokens as text, without special tokens; `None` without a tokenizer.
        finish_reason: "stop" (an EOS token) or "length".
        matches: for each exit and each draft vocabulary, in the order in which they were asked for, N − 1 flags: entry
            t tells whether the exit's first choice after the prompt and new tokens 0..t is new token t + 1.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    text: str | None
    finish_reason: str
    matches: dict[int, tuple[list[bool], ...]]


def own_answers(
    engine: Engine,
    prompts: Any,
    exit_layers: Sequence[int],
    max_new_tokens: int,
    batch_size: int,
    draft_token_ids: Sequence[torch.Tensor | None] = (None,),
) -> list[OwnAnswer]:
    """Answers prompts greedily with all layers and notes, in one more pass over each batch, where exits agree.

    Args:
        engine: the model; its EOS tokens end answers.
        prompts: a list of strings, tokenised as they stand, or of lists of messages.
        exit_layers: the exits to measure, counted from 1.
        max_new_tokens: the budget of every answer.
        batch_size: prompts that are answered together; those of like length are.
        draft_token_ids: draft vocabularies, `(ids,)` each, that an exit's choice is restricted to; `None` for all ids.

    Returns:
        The answers in the order of the prompts.

    Raises:
        TypeError, ValueError: what `Engine.generate` refuses.
    """
    answers: dict[int, OwnAnswer] = {}
    with plain_greedy(engine.model):
        for batch in answer(engine, prompts, max_new_tokens, batch_size):
            prompt_ids, new_tokens = [made.prompt_ids for made in batch], [made.token_ids for made in batch]
            matches = exit_matches(engine.layered, prompt_ids, new_tokens, exit_layers, draft_token_ids)
            for made, found in zip(batch, matches, strict=True):
                answers[made.index] = OwnAnswer(made.prompt_ids, made.token_ids, made.text, made.finish_reason, found)
    return [answers[index] for index in range(len(answers))]


@dataclass(frozen=True)
class Answer:
    """A greedy answer.

    Attributes:
        index: which prompt it answers.
        prompt_ids, token_ids, text, finish_reason: as in `OwnAnswer`.
    """

    index: int
    prompt_ids: list[int]
    token_ids: list[int]
    text: str | None
    finish_reason: str


def answer(
    engine: Engine,
    prompts: Any,
    max_new_tokens: int,
    batch_size: int,
    *,
    strategy: str = "autoregressive",
    exit_layer: int | None = None,
    num_draft_tokens: int | None = None,
    done: Collection[int] = (),
) -> Iterator[list[Answer]]:
    """Answers prompts greedily and yields the answers of each batch, the longest prompts first.

    A progress bar on standard error counts prompts.

    Args:
        engine: the model; its EOS tokens end answers.
        prompts: a list of strings, tokenised as they stand, or of lists of messages.
        max_new_tokens: the budget of every answer.
        batch_size: prompts that are answered together; those of like length are.
        strategy, exit_layer, num_draft_tokens: of `Engine.generate`; by default all layers answer.
        done: indices of prompts that are left out.

    Raises:
        TypeError, ValueError: what `Engine.generate` refuses.
    """
    rows = read_prompts(prompts, engine.tokenizer, None, engine.layered.vocab_size).rows
    order = [index for index in longest_first(rows) if index not in done]
    with tqdm(total=len(rows), initial=len(rows) - len(order), desc="answering", unit="prompt") as progress:
        for first in range(0, len(order), batch_size):
            batch = order[first : first + batch_size]
            result = engine.generate(
                [prompts[index] for index in batch],
                strategy=strategy,
                exit_layer=exit_layer,
                num_draft_tokens=num_draft_tokens,
                do_sample=False,
                max_new_tokens=max_new_tokens,
                # Fills up what is cut off here; a model that has none answers batches all the same.
                pad_token_id=0,
            )
            texts = [None] * len(batch) if result.texts is None else result.texts
            made = zip(batch, result.new_token_ids, texts, result.finish_reasons, strict=True)
            yield [Answer(index, rows[index], tokens, text, reason) for index, tokens, text, reason in made]
            progress.update(len(batch))


@torch.inference_mode()
def exit_matches(
    layered: LayeredModel,
    prompt_ids: Sequence[list[int]],
    new_tokens: Sequence[list[int]],
    exit_layers: Sequence[int],
    draft_token_ids: Sequence[torch.Tensor | None] = (None,),
) -> list[dict[int, tuple[list[bool], ...]]]:
    """Returns the matches of each row, as in `OwnAnswer`: one pass over prompts and answers, up to the highest exit.

    Args:
        layered: the model, in eval mode.
        prompt_ids: the prompts' tokens.
        new_tokens: the answers' tokens, at least one each.
        exit_layers: the exits, counted from 1.
        draft_token_ids: draft vocabularies, `(ids,)` each, or `None` for all ids.
    """
    counts = [len(tokens) - 1 for tokens in new_tokens]
    follow = following(new_tokens).to(layered.device)
    # Ascending, so that of equal logits the lowest id wins, as among all ids.
    vocabularies = [None if ids is None else ids.to(layered.device).sort().values for ids in draft_token_ids]
    matches: list[dict[int, tuple[list[bool], ...]]] = [{} for _ in new_tokens]
    for exit_layer, states in answer_states(layered, prompt_ids, new_tokens, exit_layers):
        by_row = [flags.split(counts) for flags in _agreements(layered, states, follow, vocabularies)]
        for row, found in enumerate(matches):
            found[exit_layer] = tuple(flags[row].tolist() for flags in by_row)
    return matches


def _agreements(
    layered: LayeredModel, states: torch.Tensor, follow: torch.Tensor, vocabularies: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    """Returns, for each vocabulary, whether the first choice of each state in it is what follows, `(tokens,)` bool."""
    flags: list[list[torch.Tensor]] = [[torch.empty(0, dtype=torch.bool)] for _ in vocabularies]
    for chunk, wanted in zip(states.split(LOGIT_ROWS), follow.split(LOGIT_ROWS), strict=True):
        if not len(chunk):
            continue
        logits = layered.logits(chunk).to(layered.device)
        for found, ids in zip(flags, vocabularies, strict=True):
            choice = logits.argmax(-1) if ids is None else ids[logits[:, ids].argmax(-1)]
            found.append((choice == wanted).cpu())
    return [torch.cat(found) for found in flags]


def coverage(answers: Sequence[OwnAnswer], draft_token_ids: torch.Tensor) -> float | None:
    """Returns the share of the answers' tokens, each answer's first left out, that a draft vocabulary `(ids,)` holds.

    No exit can agree more often with it. `None` where there are no such tokens.
    """
    ids = set(draft_token_ids.tolist())
    held = [token in ids for answer in answers for token in answer.token_ids[1:]]
    return sum(held) / len(held) if held else None


def reference_sums(
    engine: Engine, rows: Mapping[str, Mapping[str, Any]], exit_layers: Sequence[int], batch_size: int
) -> LossSums:
    """Returns the losses of the last layer and of exits on completions as training sees them, in the order of the rows.

    They end with EOS, unless the `finish_reason` of their row is "length".

    Args:
        engine: the model, with a tokenizer.
        rows: at least one, by what messages call it, each with `prompt` and `completion`; see `RowTokenizer`.
        exit_layers: the exits, counted from 1.
        batch_size: rows in a pass.

    Raises:
        ValueError: no tokenizer or no EOS token, or a row that cannot be tokenised or has more tokens than the model
            has positions.
    """
    if engine.tokenizer is None or engine.tokenizer.eos_token_id is None:
        raise ValueError("losses need a tokenizer with an EOS token, which ends a completion; set tokenizer.eos_token.")
    exits = sorted(set(exit_layers))
    tokenised = _tokenised(rows, engine.tokenizer, engine.layered.config.max_position_embeddings)
    sums = LossSums.zeros(len(tokenised), exits)
    for indices, found in batch_losses(engine, tokenised, exits, batch_size, unit="row"):
        sums.put(indices, found)
    return sums


def _tokenised(
    rows: Mapping[str, Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, longest: int
) -> list[dict[str, list[int]]]:
    """Returns the `input_ids` and `labels` of each row; raises ValueError by name where one has more than `longest`."""
    tokenise = RowTokenizer(tokenizer, None, max_length=sys.maxsize)
    tokenised = []
    for where, row in rows.items():
        try:
            made = tokenise(row)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        if len(made["input_ids"]) > longest:
            raise ValueError(
                f"{where}: prompt and completion have {len(made['input_ids'])} tokens, but the model has {longest} "
                "positions; shorten the row, or leave it out."
            )
        tokenised.append(made)
    return tokenised
