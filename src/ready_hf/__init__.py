"""ready_hf: lossless speculative decoding on hybrid linear-attention models, in transformers' own `generate`.

Importing the package makes `target.generate(**inputs, assistant_model=drafter)` work for ready_hf drafters and leaves
every other call as it was; `ready_hf.unhook()` undoes that.
"""

from pathlib import Path

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from ready_hf.candidates import DraftContext, Drafter, PromptLookupDrafter, ReadyCandidateGenerator
from ready_hf.configuration_ready import ReadyDrafterConfig
from ready_hf.generation import (
    disable_assisted_generation,
    enable_assisted_generation,
    hook,
    speculate,
    unhook,
)
from ready_hf.modeling_ready import DrafterIsNoTarget, ReadyDrafterModel, ReadyDrafterOutput
from ready_hf.ops import set_kernels
from ready_hf.outputs import SpeculativeDecodingOutput
from ready_hf.rollback import Rollback
from ready_hf.shipped import small_drafter_path, small_target_path
from ready_hf.statistics import DecodingStats, record_stats
from ready_hf.target import UnsupportedTargetError, ensure_patched, recurrent_layers
from ready_hf.target_features import FeatureCapture


__version__ = "0.1.0.dev0"

__all__ = [
    "DecodingStats",
    "DraftContext",
    "Drafter",
    "FeatureCapture",
    "PromptLookupDrafter",
    "ReadyCandidateGenerator",
    "ReadyDrafterConfig",
    "ReadyDrafterModel",
    "ReadyDrafterOutput",
    "Rollback",
    "SpeculativeDecodingOutput",
    "UnsupportedTargetError",
    "disable_assisted_generation",
    "enable_assisted_generation",
    "ensure_patched",
    "hook",
    "record_stats",
    "recurrent_layers",
    "set_kernels",
    "small_drafter_path",
    "small_target_path",
    "speculate",
    "tiny_target_path",
    "unhook",
]


def tiny_target_path() -> str:
    """Folder of the small trained hybrid target that ships with the package, for demos and tests."""
    return str(Path(__file__).parent / "assets" / "tiny_target")


AutoConfig.register("ready_drafter", ReadyDrafterConfig, exist_ok=True)
AutoModel.register(ReadyDrafterConfig, ReadyDrafterModel, exist_ok=True)
AutoModelForCausalLM.register(ReadyDrafterConfig, DrafterIsNoTarget, exist_ok=True)  # refuses
hook()
