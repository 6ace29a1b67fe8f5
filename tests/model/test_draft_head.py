"""The draft head gives the full head's logits for its tokens; the file that names them is read back or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from layerskip.model.draft_head import TENSORS_FILE, DraftHead, read_draft_token_ids, write_draft_token_ids
from layerskip.model.layered import LayeredModel
from tests import kit

IDS = torch.tensor([0, 3, 17, 44, 96])


def hidden_states(seed: int = 5) -> torch.Tensor:
    """Returns random states before the final norm, `(3, 2, hidden)`."""
    return torch.randn(3, 2, 32, generator=torch.Generator().manual_seed(seed))


def with_bias() -> PreTrainedModel:
    """Returns a Llama whose head has a bias large enough to decide between tokens."""
    model = kit.l4()
    head = nn.Linear(32, kit.VOCAB)
    nn.init.normal_(head.bias, std=2.0)
    model.set_output_embeddings(head)
    return model


MODELS = {
    "plain": kit.l4,
    "tied": lambda: kit.l4(tie_word_embeddings=True),
    "soft-capped": lambda: kit.build(kit.gemma2_config()),
    "bias": with_bias,
}


# Its logits


@torch.no_grad()
@pytest.mark.parametrize("kind", list(MODELS))
def test_logits_are_those_of_the_full_head(kind: str) -> None:
    layered = LayeredModel(MODELS[kind]())
    head = DraftHead.of(layered, IDS)
    full = layered.logits(hidden_states())
    torch.testing.assert_close(head.logits(hidden_states()), full[..., head.token_ids], atol=1e-5, rtol=1e-5)
    assert torch.equal(head.token_ids, IDS)


@torch.no_grad()
@pytest.mark.parametrize("kind", list(MODELS))
def test_it_chooses_the_best_of_its_tokens(kind: str) -> None:
    layered = LayeredModel(MODELS[kind]())
    best = layered.logits(hidden_states())[..., IDS].argmax(-1)
    assert torch.equal(DraftHead.of(layered, IDS).choose(hidden_states()), IDS[best])
    assert not torch.equal(layered.logits(hidden_states()).argmax(-1), IDS[best])


@torch.no_grad()
def test_the_models_above_differ_from_a_plain_head() -> None:
    """A control: without its soft-cap or bias the head would give something else."""
    capped = LayeredModel(MODELS["soft-capped"]())
    assert capped.logits(hidden_states()).abs().max() <= 1.0
    assert capped.head(capped.norm(hidden_states())).abs().max() > 1.0
    biased = LayeredModel(MODELS["bias"]())
    assert biased.head.bias.abs().max() > 1.0
    tied = LayeredModel(MODELS["tied"]())
    assert tied.head.weight is tied.embedding.weight


@torch.no_grad()
def test_of_equal_logits_the_lowest_id_is_chosen_as_by_the_full_head() -> None:
    model = kit.l4()
    model.get_output_embeddings().weight.zero_()
    layered = LayeredModel(model)
    assert (layered.logits(hidden_states()).argmax(-1) == 0).all()
    assert (DraftHead.of(layered, IDS).choose(hidden_states()) == 0).all()
    assert (DraftHead.of(layered, IDS[1:]).choose(hidden_states()) == 3).all()


def test_the_model_and_the_list_stay_as_they_are() -> None:
    model = kit.l4()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ids = IDS.clone()
    head = DraftHead.of(LayeredModel(model), ids)
    assert not head.weight.requires_grad and head.weight.shape == (5, 32)
    head.weight.zero_()
    assert torch.equal(ids, IDS)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_states_go_to_where_the_rows_are() -> None:
    layered = LayeredModel(kit.l4())
    head = DraftHead(layered, IDS, torch.empty(5, 32, device="meta"), None)
    assert head.logits(hidden_states()).device.type == "meta"


# Heads of which no rows can be taken


class OwnLinear(nn.Linear):
    """A head that computes in a way of its own."""


def adapted() -> PreTrainedModel:
    return peft.get_peft_model(kit.l4(), peft.LoraConfig(target_modules=["lm_head"])).get_base_model()


def kept_apart() -> PreTrainedModel:
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    return peft.get_peft_model(kit.l4(), config).get_base_model()


def with_head(head: nn.Module) -> PreTrainedModel:
    model = kit.l4()
    model.lm_head = head
    return model


def of_type(dtype: torch.dtype, shape: tuple[int, int] = (kit.VOCAB, 32)) -> PreTrainedModel:
    head = nn.Linear(32, kit.VOCAB, bias=False)
    head.weight = nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
    return with_head(head)


class Packed(torch.Tensor):
    """A weight that is stored in another way than it looks, as quantised ones are."""


def packed() -> PreTrainedModel:
    model = kit.l4()
    model.lm_head.weight = nn.Parameter(torch.zeros(kit.VOCAB, 32).as_subclass(Packed), requires_grad=False)
    return model


@pytest.mark.parametrize(
    ("made", "named"),
    [
        (adapted, "peft.tuners.lora.layer.Linear"),
        (kept_apart, "ModulesToSaveWrapper"),
        (lambda: with_head(OwnLinear(32, kit.VOCAB)), "OwnLinear"),
        (lambda: of_type(torch.int8), "torch.int8"),
        (lambda: of_type(torch.float32, (kit.VOCAB, 16)), r"shape \(97, 16\)"),
        (lambda: of_type(torch.float32, (90, 32)), r"shape \(90, 32\)"),
        (packed, "Packed"),
    ],
    ids=["LoRA", "a copy", "a subclass", "integers", "packed columns", "other rows", "a tensor subclass"],
)
def test_a_head_that_is_no_plain_matrix_is_refused_by_name(made: Any, named: str) -> None:
    with pytest.raises(ValueError, match=rf"draft_vocab_size=5 .*{named}.*draft with the full head: .*size=97"):
        DraftHead.of(LayeredModel(made()), IDS)


# The file


def test_ids_are_read_as_they_were_written(tmp_path: Path) -> None:
    write_draft_token_ids(tmp_path, IDS)
    found = read_draft_token_ids(tmp_path)
    assert found is not None and found.dtype == torch.int64 and found.tolist() == IDS.tolist()
    with safe_open(tmp_path / TENSORS_FILE, framework="pt") as tensors:
        assert tensors.get_tensor("draft_token_ids").dtype == torch.int32


def test_a_folder_without_the_file_names_no_ids(tmp_path: Path) -> None:
    assert read_draft_token_ids(tmp_path) is None


WRONG = [
    (torch.tensor([1.0, 2.0]), r"tensor of torch.float32 and shape \(2,\)"),
    (torch.tensor([1, 2], dtype=torch.int16), "torch.int16"),
    (torch.tensor([True]), "torch.bool"),
    (torch.tensor([[1, 2]]), r"shape \(1, 2\)"),
    (torch.tensor(3), r"shape \(\)"),
    (torch.tensor([], dtype=torch.int64), r"shape \(0,\).*one or more token ids"),
    (torch.tensor([4, 7, 2, 7]), "the token id 7 more than once"),
    (torch.tensor([4, -1]), "the token id -1; allowed are ids from 0 on"),
]


@pytest.mark.parametrize(("ids", "message"), WRONG, ids=str)
def test_what_is_no_list_of_different_ids_is_neither_read_nor_written(
    tmp_path: Path, ids: torch.Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=f"draft_token_ids .*{message}"):
        write_draft_token_ids(tmp_path, ids)
    assert not (tmp_path / TENSORS_FILE).exists()
    save_file({"draft_token_ids": ids}, tmp_path / TENSORS_FILE)
    with pytest.raises(ValueError, match=rf"draft_token_ids in .*layerskip\.safetensors .*{message}"):
        read_draft_token_ids(tmp_path)


def test_what_is_no_tensor_is_refused(tmp_path: Path) -> None:
    ids: Any = [1, 2]
    with pytest.raises(TypeError, match="draft_token_ids is a list; pass a tensor of token ids"):
        write_draft_token_ids(tmp_path, ids)


@pytest.mark.parametrize("kept", [0, 5, 60, -1])
def test_a_damaged_file_is_refused(tmp_path: Path, kept: int) -> None:
    write_draft_token_ids(tmp_path, IDS)
    path = tmp_path / TENSORS_FILE
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"layerskip\.safetensors cannot be read"):
        read_draft_token_ids(tmp_path)


def test_a_file_without_the_ids_is_refused(tmp_path: Path) -> None:
    save_file({"other": IDS}, tmp_path / TENSORS_FILE)
    with pytest.raises(ValueError, match=r"layerskip\.safetensors holds no 'draft_token_ids'"):
        read_draft_token_ids(tmp_path)
