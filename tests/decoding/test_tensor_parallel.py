"""Two ranks that run one tensor parallel model: the same tokens on both, and those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import families_kit, kit
from tests.decoding import levers_kit, tensor_parallel_kit
from tests.decoding.tensor_parallel_kit import Answer
from tests.training import workers

# Plans with something of their own: norms that are not divided, experts, fused projections that are put together again.
FAMILIES = ("qwen3", "mixtral", "phi3")


@pytest.fixture(scope="module", name="folders")
def saved_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of a Llama of which a part of the drafts is accepted, and of models of other families."""
    folder = tmp_path_factory.mktemp("models")
    models = {"llama": kit.mixed(), "gpt2": kit.build(kit.gpt2_config())}
    models |= {family: kit.build(families_kit.CONFIGS[family]()) for family in FAMILIES}
    for name, model in models.items():
        model.save_pretrained(folder / name)
    return {name: str(folder / name) for name in models}


@pytest.fixture(scope="module", name="ranks")
def both_ranks(folders: dict[str, str]) -> list[dict[str, Any]]:
    """What each of two ranks says."""
    families = {family: folders[family] for family in FAMILIES}
    arguments = folders["llama"], families, folders["gpt2"]
    outcomes = workers.run_ranks(tensor_parallel_kit.everything, *arguments)
    for outcome in outcomes:
        assert (outcome.status, outcome.error) == (0, "")
    return [outcome.value for outcome in outcomes]


@pytest.fixture(scope="module", name="alone")
def one_process(folders: dict[str, str]) -> dict[str, Answer]:
    """What a process says that has the whole model, and the first rank's random numbers."""
    return tensor_parallel_kit.answers(folders["llama"])


def test_ranks_say_the_same(ranks: list[dict[str, Any]]) -> None:
    """To the last bit: what decides between rounds sees the same logits everywhere."""
    first, second = (rank["answers"] for rank in ranks)
    for name, answer in first.items():
        other = second[name]
        assert (answer.tokens, answer.counts) == (other.tokens, other.counts), name
        assert answer.next_number == other.next_number, name
        assert all(map(torch.equal, answer.logits, other.logits)), name


def test_ranks_say_what_one_process_says(ranks: list[dict[str, Any]], alone: dict[str, Answer]) -> None:
    """The sums of two ranks are added in another order, which moves logits by less than any choice here hangs on."""
    for name, expected in alone.items():
        answer = ranks[0]["answers"][name]
        assert (answer.tokens, answer.counts) == (expected.tokens, expected.counts), name
        assert answer.next_number == expected.next_number, name
        for logits, sums in zip(answer.logits, expected.logits, strict=True):
            torch.testing.assert_close(logits, sums, atol=1e-5, rtol=0)


def test_the_answers_are_worth_comparing(alone: dict[str, Answer]) -> None:
    """Drafts are accepted in part, copies of a prompt differ, and what is drawn is not what is best."""
    for name, answer in alone.items():
        if "autoregressive" not in name and "early_exit" not in name:
            rounds, drafted, accepted = answer.counts
            assert rounds > 1 and 0 < accepted <= drafted, name
    assert len({tuple(row) for row in alone["sampled, several of one prompt"].tokens}) == 3
    for way in ("autoregressive", "speculative", "deciding", "hook"):
        assert alone[f"sampled, {way}"].tokens != alone[f"greedy, {way}"].tokens, way


def test_ranks_that_are_left_to_their_own_numbers_draw_others(ranks: list[dict[str, Any]]) -> None:
    """The two would agree on nothing, were it not for the first rank's random numbers."""
    first, second = (rank["left alone"].tokens for rank in ranks)
    assert first != second


def test_what_ranks_cannot_do_is_refused_by_name(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        max_time, draft_vocab_size, compiled = rank["refusals"]
        assert max_time.startswith("max_time=60.0 is not supported for a tensor parallel model")
        assert draft_vocab_size.startswith("draft_vocab_size=9 takes rows of a head with a plain floating-point weight")
        assert compiled.startswith("compile=True does not go with a tensor parallel model")


def test_one_process_may_limit_its_time(folders: dict[str, str]) -> None:
    model = tensor_parallel_kit.loaded(folders["llama"])
    answer = tensor_parallel_kit.ask(model, tensor_parallel_kit.SPECULATIVE, do_sample=False, max_time=600.0)
    assert len(answer.tokens[0]) == len(levers_kit.REPEATS) + tensor_parallel_kit.NEW


@pytest.mark.parametrize("family", FAMILIES)
def test_families_with_plans_of_their_own(family: str, ranks: list[dict[str, Any]], folders: dict[str, str]) -> None:
    expected = tensor_parallel_kit.family_answers({family: folders[family]})
    assert [{family: rank["families"][family]} for rank in ranks] == [expected] * 2


def test_transformers_refuses_a_family_without_a_plan(ranks: list[dict[str, Any]]) -> None:
    assert all("`GPT2LMHeadModel` has no `tp_plan`" in rank["without a plan"] for rank in ranks)
