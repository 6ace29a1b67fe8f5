"""What the hook refuses by name, before any layer runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    LogitsProcessor,
    PreTrainedModel,
    StaticCache,
)
from transformers.generation.logits_process import SynthIDTextWatermarkLogitsProcessor

import layerskip
from tests import kit
from tests.decoding.hook_kit import (
    MASK,
    NEW,
    PADDED,
    USER_TURN,
    first_turn,
    graded,
    hook,
    ours,
    plain,
    refused,
)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"num_beams": 2}, "num_beams=2"),
        ({"num_beams": 2, "num_return_sequences": 2}, "num_beams=2"),
        ({"num_beams": 2, "do_sample": True}, "num_beams=2"),
        ({"guidance_scale": 1.5}, "guidance_scale=1.5"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3"),
        ({"assistant_early_exit": 2}, "assistant_early_exit=2"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions=True"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states=True"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha=0.6"),
        ({"dola_layers": "low"}, "dola_layers='low'"),
        ({"prefill_chunk_size": 4}, "prefill_chunk_size=4"),
        ({"token_healing": True}, "token_healing|tokenizer"),
        ({"cache_implementation": "static"}, "cache_implementation='static'"),
        ({"cache_implementation": "offloaded"}, "cache_implementation='offloaded'"),
        ({"use_cache": False}, "use_cache=False"),
        ({"token_type_ids": torch.zeros(1, 10, dtype=torch.long)}, "token_type_ids"),
        ({"labels": torch.zeros(1, 10, dtype=torch.long)}, "labels=a tensor of shape"),
        ({"cache": StaticCache}, "StaticCache"),
        ({"attention_mask": torch.tensor([[1] * 4 + [0] + [1] * 5])}, "attention_mask.0. has a zero between"),
        ({"attention_mask": torch.zeros(1, 10)}, "attention_mask.0. is all zeros"),
        ({"attention_mask": torch.tensor([[2] * 10])}, "attention_mask holds other values"),
        ({"attention_mask": torch.ones(1, 14)}, "attention mask 14"),
        ({"position_ids": torch.arange(1, 11).unsqueeze(0)}, "position_ids"),
        ({"position_ids": torch.arange(10)}, "position_ids"),
        ({"position_ids": torch.arange(10).repeat(2, 1)}, "position_ids"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_done_is_refused_by_name(llama: PreTrainedModel, arguments: dict[str, Any], name: str) -> None:
    if "cache" in arguments:
        arguments = {"cache": StaticCache(config=llama.config, max_cache_len=32)}
    error = TypeError if "cache" in arguments else ValueError
    refused(llama, arguments, error, name)


def test_what_only_some_families_know_is_refused_by_name() -> None:
    model = graded("gpt2")
    refused(model, {"token_type_ids": torch.zeros(1, 10, dtype=torch.long)}, ValueError, "token_type_ids=a tensor")


def test_a_setting_of_the_checkpoint_is_refused_as_well() -> None:
    model = kit.graded("llama", "some")
    model.generation_config.num_beams = 3
    with pytest.raises(ValueError, match=r"num_beams=3 in the generation_config.*pass num_beams=1"):
        ours(model, kit.prompt_tensor(), max_new_tokens=8)
    given = ours(model, kit.prompt_tensor(), max_new_tokens=8, num_beams=1)
    assert torch.equal(given, plain(model, kit.prompt_tensor(), max_new_tokens=8, num_beams=1))


def test_compilation_is_refused_by_name(llama: PreTrainedModel) -> None:
    from transformers.generation.configuration_utils import CompileConfig

    refused(llama, {"compile_config": CompileConfig()}, ValueError, "compile_config=")


def test_masks_of_another_number_of_rows_are_refused(llama: PreTrainedModel) -> None:
    for mask in (MASK[1:2], torch.cat([MASK, MASK])):
        with pytest.raises(ValueError, match=r"attention_mask has shape .* there are 3 rows"):
            ours(llama, PADDED, attention_mask=mask, position_ids=torch.arange(10).unsqueeze(0), max_new_tokens=4)


def test_embeddings_of_another_shape_are_refused(llama: PreTrainedModel) -> None:
    embedded = llama.get_input_embeddings()(kit.prompt_tensor()).detach()
    for wrong in (embedded[0], embedded[..., :7]):
        with kit.counted_layers(llama) as counts:
            with pytest.raises(ValueError, match=r"inputs_embeds has shape .* must be \(rows, tokens, 32\)"):
                ours(llama, inputs_embeds=wrong, max_new_tokens=4)
            assert counts == [0] * kit.NUM_LAYERS


def test_token_ids_outside_the_vocabulary_are_refused(llama: PreTrainedModel) -> None:
    for token in (97, -1):
        refused(llama, {}, ValueError, f"input_ids.0. holds token id {token}", torch.tensor([[5, token, 7]]))


@pytest.mark.parametrize("kind", ["rows", "layers", "whole prompt", "padded on the right", "uneven", "offloaded"])
def test_caches_that_do_not_fit_are_refused(llama: PreTrainedModel, kind: str) -> None:
    turn = first_turn(llama, plain, PADDED, attention_mask=MASK, max_new_tokens=6)
    sequence = torch.cat([turn.sequences, USER_TURN.expand(3, -1)], dim=1)
    mask = torch.cat([MASK, torch.ones(3, 11, dtype=torch.long)], dim=1)
    cache = turn.cache
    error, match = ValueError, "cache"
    if kind == "rows":
        sequence, mask, match = sequence[:2], mask[:2], "layer 1 of cache holds 3 rows"
    elif kind == "layers":
        short = kit.truncated(llama, 3)
        cache = first_turn(short, plain, PADDED, attention_mask=MASK, max_new_tokens=6).cache
        match = "cache has 3 layers, but the model 4"
    elif kind == "whole prompt":
        sequence, mask, match = (
            sequence[:, :15],
            mask[:, :15],
            "the cache holds 15 tokens, and the input",
        )
    elif kind == "padded on the right":
        mask[1, -2:] = 0
        match = "attention_mask ends in zeros"
    elif kind == "uneven":
        cache.layers[2].keys = cache.layers[2].keys[:, :, :-1]
        cache.layers[2].values = cache.layers[2].values[:, :, :-1]
        match = "the layers of cache hold"
    else:
        cache = DynamicCache(config=llama.config, offloading=True)
        match = "offloading=True"
    refused(llama, {"attention_mask": mask, "cache": cache}, error, match, sequence)


class CountingProcessor(LogitsProcessor):
    """Keeps count of its calls, which a rejected draft makes wrong."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return scores - self.calls


def test_processors_with_a_state_are_refused_by_name(llama: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="CountingProcessor, which changed when it was called: calls"):
        ours(llama, kit.prompt_tensor(), max_new_tokens=8, logits_processor=[CountingProcessor()])
    remembering = SynthIDTextWatermarkLogitsProcessor(2, [1, 2], 64, 0, 4, device=torch.device("cpu"))
    refused(llama, {"logits_processor": [remembering]}, ValueError, "SynthIDTextWatermarkLogitsProcessor")


def test_train_mode_is_refused_and_stays() -> None:
    model = kit.graded("llama", "some")
    model.model.layers[1].train()
    with kit.counted_layers(model) as counts, pytest.raises(ValueError, match=r"train mode.*model.eval\(\)"):
        ours(model, kit.prompt_tensor(), max_new_tokens=4)
    assert counts == [0] * kit.NUM_LAYERS
    assert model.model.layers[1].training
    assert not model.training


@pytest.mark.parametrize(
    ("exit_layer", "error", "match"),
    [
        (-1, ValueError, "exit_layer=-1 is out of range; allowed are 1 to 3"),
        (0, ValueError, "exit_layer=0 is out of range; allowed are 1 to 3"),
        (4, ValueError, "exit_layer=4 is out of range; allowed are 1 to 3"),
        (5, ValueError, "exit_layer=5 is out of range; allowed are 1 to 3"),
        ("2", TypeError, "exit_layer='2' is a str"),
        (None, ValueError, r"exit_layer=1\.\.3.*compare_exits\.py"),
    ],
)
def test_exits_that_are_none_are_refused(
    llama: PreTrainedModel, exit_layer: Any, error: type[Exception], match: str
) -> None:
    refused(llama, {}, error, match, decode=layerskip.self_speculative(exit_layer=exit_layer))


def test_other_numbers_of_the_hook_are_checked(llama: PreTrainedModel) -> None:
    for arguments, match in (
        ({"num_draft_tokens": 0}, "num_draft_tokens=0"),
        ({"draft_vocab_size": 8}, "draft_vocab_size=8"),
        ({"draft_token_ids": torch.tensor([1, 97])}, "draft_token_ids"),
    ):
        refused(llama, {}, ValueError, match, decode=hook(**arguments))


def test_the_exit_of_the_checkpoint_is_taken() -> None:
    model = kit.graded("llama", "some")
    model.config.layerskip = {"format": 1, "exit_layers": [1], "exit_layer": 1, "num_draft_tokens": 2}
    output = model.generate(
        kit.prompt_tensor(),
        custom_generate=layerskip.self_speculative(),
        max_new_tokens=NEW,
        return_dict_in_generate=True,
    )
    assert (output.statistics.exit_layer, output.statistics.num_draft_tokens) == (1, 2)
    assert torch.equal(output.sequences, plain(model, kit.prompt_tensor(), max_new_tokens=NEW))


def test_what_is_no_causal_language_model_of_a_supported_family_is_refused() -> None:
    from transformers import MambaConfig, MambaForCausalLM

    model = MambaForCausalLM(MambaConfig(vocab_size=97, hidden_size=16, num_hidden_layers=4, state_size=4)).eval()
    with pytest.raises(ValueError, match="mamba"):
        ours(model, kit.prompt_tensor(), max_new_tokens=4)


def test_a_tokenizer_of_another_kind_is_refused_before_any_layer_runs() -> None:
    model = kit.l4()
    decode = layerskip.self_speculative(exit_layer=2, tokenizer=5, stop_strings="w1")  # type: ignore[arg-type]
    with kit.counted_layers(model) as counts, pytest.raises(TypeError, match="tokenizer is a int; pass what AutoTok"):
        model.generate(kit.prompt_tensor(), max_new_tokens=4, do_sample=False, custom_generate=decode)
    assert counts == [0] * kit.NUM_LAYERS
