"""Quantised weights: which are decoded exactly, and why others are refused.

Drafts are verified several at a time, where plain decoding passes one token. The two agree only if every layer computes
a token by itself. Weights that are unpacked and then multiplied do. Where inputs are quantised as well it takes a scale
for each token: with one for a whole pass, tokens change with those that stand beside them.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# By the name that both the package and `quant_method` have.
SUPPORTED = ("bitsandbytes", "torchao")
TORCHAO = (
    "Int8WeightOnlyConfig, IntxWeightOnlyConfig, Float8WeightOnlyConfig, Int8DynamicActivationIntxWeightConfig, and "
    "Int8DynamicActivationInt8WeightConfig with PerRow()"
)
BESIDE = "so that a token would change with those verified beside it"


def is_quantized(config: PreTrainedConfig) -> bool:
    """Whether a configuration tells of quantised weights."""
    return config.to_dict().get("quantization_config") is not None


def check_stored_quantization(config: PreTrainedConfig, where: str) -> None:
    """Checks what a checkpoint's configuration says about its weights, before they are read.

    Args:
        config: as `AutoConfig` reads it.
        where: how messages call the checkpoint.

    Raises:
        ImportError: the package that unpacks the weights is missing.
        ValueError: weights of a kind that is not supported.
    """
    if not is_quantized(config):
        return
    _check_method(config, where)
    try:
        import_module(_method(config))
    except ImportError as error:
        raise ImportError(
            f"{where} has weights quantised by {_method(config)}, a package that cannot be imported: run "
            '`pip install "layerskip[quant]"`.'
        ) from error


def check_quantization(model: PreTrainedModel) -> None:
    """Checks that the layers of a model, as they are now, compute every token by itself if they are quantised.

    Raises:
        ValueError: a kind that is not supported.
    """
    # transformers names GGUF as the origin of weights also where it has unpacked them.
    is_unpacked = is_quantized(model.config) and _method(model.config) == "gguf" and _is_floating_point(model)
    if is_quantized(model.config) and not is_unpacked:
        _check_method(model.config, "the model")
    for name, module in model.named_modules():
        if type(module).__module__.startswith("torch.ao.nn.quantized.dynamic"):
            raise ValueError(
                f"{name} was made by torch.ao.quantization.quantize_dynamic, which quantises the inputs of a pass with "
                f"one scale, {BESIDE}; quantise the weights alone, such as by torchao with Int8WeightOnlyConfig."
            )
    # A model holds nothing of a package that was never loaded, and this one does without.
    if "bitsandbytes" in sys.modules:
        _check_bitsandbytes(model)
    if "torchao" in sys.modules:
        _check_torchao(model)


def _check_bitsandbytes(model: PreTrainedModel) -> None:
    from bitsandbytes.nn import Linear8bitLt

    for name, module in model.named_modules():
        if isinstance(module, Linear8bitLt) and module.state.threshold > 0:
            raise ValueError(
                f"{name} has llm_int8_threshold={module.state.threshold}: an input column in which any token of a pass "
                f"reaches it is left in fp16 for all of them, {BESIDE}. Load with llm_int8_threshold=0.0 (in "
                "BitsAndBytesConfig, or for stored 8-bit weights in the quantization_config of config.json), or in 4 "
                "bits."
            )


def _check_torchao(model: PreTrainedModel) -> None:
    from torchao.quantization import Float8Tensor, Int8Tensor, IntxUnpackedToInt8Tensor, PerRow

    for name, weight in model.named_parameters():
        kind, is_exact = type(weight).__name__, not type(weight).__module__.startswith("torchao.")
        if isinstance(weight, IntxUnpackedToInt8Tensor):
            is_exact = True
        elif isinstance(weight, Int8Tensor | Float8Tensor):
            inputs = weight.act_quant_kwargs
            # No test has run fp8 inputs.
            is_exact = inputs is None or (isinstance(weight, Int8Tensor) and inputs.granularity == PerRow())
            kind += "" if inputs is None else f", inputs quantised with {inputs.granularity}"
        if not is_exact:
            raise ValueError(
                f"{name} is quantised by torchao in a way that is not supported ({kind}); supported are {TORCHAO}. "
                f"Inputs quantised with PerTensor() have one scale for a pass, {BESIDE}."
            )


def _check_method(config: PreTrainedConfig, where: str) -> None:
    method = _method(config)
    if method not in SUPPORTED:
        raise ValueError(
            f"{where} has quantised weights with quant_method={method!r}, which are not supported; supported are "
            f"{' and '.join(map(repr, SUPPORTED))}. Take the checkpoint from which it was made, or unpack the weights: "
            "where transformers can, with the argument dequantize=True of its quantization_config or by "
            "model.dequantize()."
        )


def _method(config: PreTrainedConfig) -> str:
    """Returns the `quant_method` of a quantised model, whose settings are a dict until its weights are read."""
    settings: Any = vars(config)["quantization_config"]
    method = settings.get("quant_method") if isinstance(settings, dict) else settings.quant_method
    # transformers' own type prints with the name of its class.
    return str.__str__(method) if isinstance(method, str) else str(method)


def _is_floating_point(model: PreTrainedModel) -> bool:
    return all(weight.is_floating_point() for weight in model.parameters())
