"""Differences at near ties are told from others."""

from __future__ import annotations

import pytest
import torch

from layerskip import Engine
from layerskip.comparison.answer_audit import AnswerAudit, audit_answers
from layerskip.comparison.arms import Run
from layerskip.comparison.batches import Batch
from layerskip.comparison.benchmark import Sample
from layerskip.decoding.engine import Engine as EngineType
from tests import kit

PROMPTS = [kit.PROMPT, kit.PROMPT[:4]]


def plain(engine: EngineType, count: int = 8) -> list[list[int]]:
    return [kit.without_cache(engine.model, prompt, count) for prompt in PROMPTS]


def samples(arm: str, answers: list[list[int]], repeat: int = 0) -> list[Sample]:
    return [Sample(arm, batch, repeat, Run([row], 7, 1.0, 1.0)) for batch, row in enumerate(answers)]


def audited(engine: EngineType, others: dict[str, list[list[int]]]) -> dict[str, AnswerAudit]:
    runs = samples("plain", plain(engine))
    for label, answers in others.items():
        runs += samples(label, answers)
    return audit_answers(engine, "plain", runs, [Batch.of([prompt]) for prompt in PROMPTS], 8, eos_token_id=None)


def test_another_token_is_a_near_tie_only_where_the_model_was_close_to_it() -> None:
    engine = Engine(kit.mixed())
    same, far = plain(engine), plain(engine)
    logits = engine.model(torch.tensor([[*PROMPTS[1], *same[1][:3]]])).logits[0, -1]
    far[1][3] = int(logits.argmin())
    assert audited(engine, {"same": same, "far": far}) == {"same": AnswerAudit(0, 0), "far": AnswerAudit(1, 0)}
    close = plain(engine)
    close[1][3] = int(logits.topk(2).indices[1])
    with torch.no_grad():
        # Equal rows of the head give equal logits, of which the first wins.
        head = engine.model.get_output_embeddings().weight
        head[close[1][3]] = head[same[1][3]]
    tied = plain(engine)
    other = [list(row) for row in tied]
    place = next(index for index, token in enumerate(tied[1]) if token in (same[1][3], close[1][3]))
    other[1][place] = same[1][3] + close[1][3] - tied[1][place]
    assert audited(engine, {"close": other}) == {"close": AnswerAudit(1, 1)}


@pytest.mark.parametrize("cut", [1, 5])
def test_an_answer_that_ends_early_is_no_near_tie(cut: int) -> None:
    engine = Engine(kit.mixed())
    assert audited(engine, {"short": [row[:cut] for row in plain(engine)]}) == {"short": AnswerAudit(2, 0)}


def test_only_the_first_pass_counts() -> None:
    engine = Engine(kit.mixed())
    runs = samples("plain", plain(engine)) + samples("other", plain(engine))
    runs += samples("plain", plain(engine), 1) + samples("other", [[0] * 8, [0] * 8], 1)
    batches = [Batch.of([prompt]) for prompt in PROMPTS]
    assert audit_answers(engine, "plain", runs, batches, 8, eos_token_id=None) == {"other": AnswerAudit(0, 0)}
