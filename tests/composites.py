"""Tiny random image-and-text models around recurrent targets, and a prompt with an image for each."""

from collections.abc import Callable
from typing import Any

import torch
import transformers

from families import FAMILIES, MORE_FAMILIES, NO_SPECIAL_TOKENS, VOCAB_SIZE, nemotron_h


SPECIAL_TOKENS = list(range(VOCAB_SIZE - 6, VOCAB_SIZE))  # none of them is to be generated
IMAGE_TOKEN, IMAGE_START, IMAGE_END, VIDEO_TOKEN = SPECIAL_TOKENS[:4]
TOKENS = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": VIDEO_TOKEN,
    "vision_start_token_id": IMAGE_START,
    "vision_end_token_id": IMAGE_END,
}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
MINICPM_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 4,
}


def _text(family: str, **changes: Any) -> dict[str, Any]:
    return (FAMILIES | MORE_FAMILIES)[family]().to_dict() | changes


COMPOSITES: dict[str, Callable[[], Any]] = {
    "qwen3_5": lambda: transformers.Qwen3_5Config(
        text_config=_text("qwen3_5"), vision_config=QWEN_VISION, **TOKENS, **NO_SPECIAL_TOKENS
    ),
    "qwen4_exp": lambda: transformers.Qwen4ExpConfig(
        text_config=_text("qwen4_exp"), vision_config=QWEN_VISION, **TOKENS, **NO_SPECIAL_TOKENS
    ),
    "glm5_next": lambda: transformers.Glm5NextConfig(
        text_config=_text("glm5_next"),
        vision_config={
            **{k: v for k, v in QWEN_VISION.items() if k != "num_position_embeddings"},
            "image_size": 16,
            "projection_intermediate_size": 48,
        },
        image_token_id=IMAGE_TOKEN,
        image_start_token_id=IMAGE_START,
        image_end_token_id=IMAGE_END,
        video_token_id=VIDEO_TOKEN,
        video_start_token_id=SPECIAL_TOKENS[4],
        video_end_token_id=SPECIAL_TOKENS[5],
        **NO_SPECIAL_TOKENS,
    ),
    "minicpmv4_6": lambda: transformers.MiniCPMV4_6Config(
        text_config=_text("qwen3_5"), vision_config=MINICPM_VISION, insert_layer_id=0, image_token_id=IMAGE_TOKEN,
        **NO_SPECIAL_TOKENS,
    ),
    "minicpmv4_7": lambda: transformers.MiniCPMV4_7Config(
        text_config=_text("qwen3_5"), vision_config=MINICPM_VISION, insert_layer_id=0, image_token_id=IMAGE_TOKEN,
        **NO_SPECIAL_TOKENS,
    ),
    "minicpm_ocr": lambda: transformers.MiniCPMOcrConfig(
        text_config=_text("qwen3_5"), vision_config=MINICPM_VISION, insert_layer_id=0, image_token_id=IMAGE_TOKEN,
        downsample_mode="16x", tie_word_embeddings=False,
        **NO_SPECIAL_TOKENS,
    ),
    "nemotron_h_omni": lambda: transformers.NemotronH_Omni_Reasoning_V3_Config(
        text_config=nemotron_h().to_dict(),
        vision_config={
            "model_type": "radio", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
            "patch_size": 4, "image_size": 16, "max_img_size": 32, "num_cls_tokens": 1, "num_registers": 1,
            "video_temporal_patch_size": 2,
        },
        vision_hidden_size=32,
        projector_hidden_size=48,
        image_token_id=IMAGE_TOKEN,
        **NO_SPECIAL_TOKENS,
    ),
}  # fmt: skip


def image_inputs(family: str, seed: int = 7) -> dict[str, torch.Tensor]:
    """A prompt of 14 tokens with an image in it, as the processor of a composite model would make it."""
    generator = torch.Generator().manual_seed(seed)
    if family.startswith("minicpm"):  # 8 x 8 patches, sixteen of them make a token
        tokens, shape, sizes = 4, (1, 3, 4, 4 * 64), {"target_sizes": [[8, 8]]}
    elif family == "nemotron_h_omni":  # 4 x 4 patches, four of them make a token
        tokens, shape, sizes = 4, (16, 3 * 4 * 4), {"image_grid_hw": [[4, 4]]}
    else:  # 4 x 6 patches, four of them make a token
        tokens, shape, sizes = 6, (24, 3 * 2 * 4 * 4), {"image_grid_thw": [[1, 4, 6]]}
    inputs = {"pixel_values": torch.randn(*shape, generator=generator)}
    inputs |= {name: torch.tensor(value) for name, value in sizes.items()}
    text = torch.randint(3, SPECIAL_TOKENS[0], (12 - tokens,), generator=generator).tolist()
    ids = [*text[:3], IMAGE_START, *[IMAGE_TOKEN] * tokens, IMAGE_END, *text[3:]]
    inputs["input_ids"] = torch.tensor([ids])
    if "image_grid_thw" in inputs or family == "minicpmv4_7":  # positions are those of an image, in three dimensions
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == IMAGE_TOKEN).int()
    return inputs
