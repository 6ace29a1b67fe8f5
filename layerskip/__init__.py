"""LayerSkip: one causal language model drafts with its early layers and verifies with the rest."""

from layerskip.decoding.cost import CostTable
from layerskip.decoding.engine import Engine
from layerskip.decoding.hook import SelfSpeculativeOutput, self_speculative
from layerskip.decoding.load import load
from layerskip.decoding.result import GenerationResult, StreamEvent
from layerskip.decoding.statistics import Statistics

__all__ = [
    "CostTable",
    "Engine",
    "GenerationResult",
    "SelfSpeculativeOutput",
    "Statistics",
    "StreamEvent",
    "load",
    "self_speculative",
]
