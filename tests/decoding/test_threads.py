"""Calls on one model at the same time, in threads and by turns, do not notice each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from transformers import PreTrainedModel

from layerskip import Engine, StreamEvent, self_speculative
from tests import kit

REPETITIONS = 2
Job = Callable[[], list[list[int]]]
SECOND = [8, 20, 31, 60, 2, 9, 77, 12, 4, 4]


def jobs_on(model: PreTrainedModel) -> dict[str, Job]:
    """Returns calls of every kind on one model, each of which gives the same tokens whenever it is made."""
    engine = Engine(model)
    ids = torch.tensor([kit.PROMPT, SECOND])

    def by_engine(seed: int | None = None, **options: int | str | float) -> Job:
        def job() -> list[list[int]]:
            drawing = {} if seed is None else {"do_sample": True, "generator": torch.Generator().manual_seed(seed)}
            return engine.generate(ids, max_new_tokens=16, **options, **drawing).sequences.tolist()

        return job

    def by_generate(exit_layer: int | None = None) -> Job:
        def job() -> list[list[int]]:
            custom = None if exit_layer is None else self_speculative(exit_layer=exit_layer)
            return kit.reference(model, ids, 16, custom_generate=custom).tolist()

        return job

    def by_stream() -> list[list[int]]:
        events = engine.stream(ids[:1], max_new_tokens=16, exit_layer=2)
        return [[token for event in events for token in event.token_ids]]

    return {
        **{f"exit {exit_layer}": by_engine(exit_layer=exit_layer) for exit_layer in (1, 2, 3)},
        "one draft": by_engine(exit_layer=2, num_draft_tokens=1),
        "autoregressive": by_engine(strategy="autoregressive"),
        "early_exit": by_engine(strategy="early_exit", exit_layer=2),
        "sampled 1": by_engine(seed=1, exit_layer=1, top_k=20),
        "sampled 2": by_engine(seed=2, exit_layer=2, temperature=0.7),
        "sampled, autoregressive": by_engine(seed=3, strategy="autoregressive"),
        "penalised": by_engine(exit_layer=2, repetition_penalty=1.3),
        "generate": by_generate(),
        "hook": by_generate(exit_layer=2),
        "stream": by_stream,
    }


@pytest.mark.parametrize("family", ["gemma3_text", "gpt2"])
def test_calls_of_every_kind_in_threads_give_what_they_give_alone(family: str) -> None:
    model = kit.graded(family, "some")
    jobs = jobs_on(model)
    alone = {name: job() for name, job in jobs.items()}
    assert alone["exit 1"] == alone["exit 3"] == alone["generate"] == alone["hook"]
    assert len({str(tokens) for tokens in alone.values()}) >= 6
    start = Barrier(len(jobs))

    def repeat(job: Job) -> list[list[list[int]]]:
        results = []
        for _ in range(REPETITIONS):
            start.wait(timeout=60)
            results.append(job())
        return results

    with ThreadPoolExecutor(len(jobs)) as threads:
        together = dict(zip(jobs, threads.map(repeat, jobs.values()), strict=True))
    for name, results in together.items():
        assert results == [alone[name]] * REPETITIONS, name


def test_a_cache_is_gone_on_from_by_several_threads_at_once() -> None:
    engine = Engine(kit.mixed(), exit_layer=2)
    first = engine.generate(kit.prompt_tensor(), max_new_tokens=8, return_cache=True)
    longer = torch.cat([first.sequences, torch.tensor([[7, 70, 33]])], dim=1)
    expected = engine.generate(longer, max_new_tokens=24).sequences
    start = Barrier(4)

    def go_on(_: int) -> torch.Tensor:
        start.wait(timeout=60)
        return engine.generate(longer, max_new_tokens=24, cache=first.cache).sequences

    with ThreadPoolExecutor(4) as threads:
        for _ in range(3):
            assert all(torch.equal(sequences, expected) for sequences in threads.map(go_on, range(4)))


def test_streams_by_turns_give_what_they_give_alone() -> None:
    model = kit.mixed()
    engine = Engine(model)

    def streams() -> list[Iterator[StreamEvent]]:
        return [
            engine.stream(kit.prompt_tensor(), exit_layer=1, max_new_tokens=24),
            engine.stream(torch.tensor([SECOND]), exit_layer=3, max_new_tokens=24),
            engine.stream(
                kit.prompt_tensor(),
                exit_layer=2,
                max_new_tokens=24,
                do_sample=True,
                generator=torch.Generator().manual_seed(5),
            ),
            engine.stream(kit.prompt_tensor(), strategy="early_exit", exit_layer=2, max_new_tokens=24),
        ]

    alone = [list(stream) for stream in streams()]
    assert len({len(events) for events in alone}) > 1
    running = streams()
    together: list[list[StreamEvent]] = [[] for _ in running]
    while any(len(events) < len(expected) for events, expected in zip(together, alone, strict=True)):
        for stream, events in zip(running, together, strict=True):
            event = next(stream, None)
            if event is not None:
                events.append(event)
        # Whatever runs between two rounds sees the model as it is.
        kit.reference(model, kit.prompt_tensor(), max_new_tokens=1)
    assert [next(stream, None) for stream in running] == [None] * len(running)
    for events, expected in zip(together, alone, strict=True):
        assert [(event.token_ids, event.accepted) for event in events] == [
            (event.token_ids, event.accepted) for event in expected
        ]
        assert events[-1].result is not None
    assert torch.equal(alone[0][-1].result.sequences, kit.reference(model, kit.prompt_tensor()))
