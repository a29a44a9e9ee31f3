"""Cases C81 and C82: an image in the prompt of the shipped target, which is given eyes for it, and what follows.

Its text model is the trained one, so the shipped drafter drafts for it; what it sees is noise.
"""

import copy
import functools

import pytest
import torch
import transformers
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import ready_hf
from composites import COMPOSITES, QWEN_VISION, image_inputs
from ready_hf import ReadyDrafterModel
from ready_hf.candidates import own_positions
from support import DEVICES, drafter_for, existing, image_target


IMAGE, START, END, VIDEO = 2040, 2041, 2042, 2043  # rare tokens of the shipped tokenizer
CODE = "import os\nimport sys\n\n\ndef main(arguments=None):\n    parser = "
NEW_TOKENS = 100


@functools.cache
def _seeing_target():
    text = AutoModelForCausalLM.from_pretrained(ready_hf.small_target_path(), dtype=torch.float32)
    config = transformers.Qwen3_5Config(
        text_config=text.config.to_dict(),
        vision_config=QWEN_VISION | {"out_hidden_size": text.config.hidden_size},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = transformers.Qwen3_5ForConditionalGeneration(config).eval()
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.generation_config = text.generation_config
    return model


def seeing_target(device):
    """A copy that has seen nothing."""
    model = copy.deepcopy(_seeing_target()).to(device)
    ready_hf.ensure_patched(model)
    return model


@functools.cache
def _small_drafter():
    return AutoModel.from_pretrained(ready_hf.small_drafter_path("ready"), dtype=torch.float32).eval()


def small_drafter(device):
    """A copy that has drafted nothing."""
    return copy.deepcopy(_small_drafter()).to(device)


@functools.cache
def tokenizer():
    return AutoTokenizer.from_pretrained(ready_hf.small_target_path(), padding_side="left")


def text_prompt(*texts):
    return dict(tokenizer()(list(texts), return_tensors="pt", padding=True))


def image_prompt():
    """Text, an image of 64 tokens that takes 8 positions, and text."""
    before, after = (text_prompt(text)["input_ids"] for text in ("# As in this picture:\n", CODE))
    seen = torch.tensor([[START, *[IMAGE] * 64, END]])
    ids = torch.cat([before, seen, after], dim=1)
    pixels = torch.randn(256, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(3))
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == IMAGE).int(),
        "pixel_values": pixels,
        "image_grid_thw": torch.tensor([[1, 16, 16]]),
    }


def generate(model, inputs, **options):
    inputs = {name: value.to(model.device) for name, value in inputs.items()}
    return model.generate(**inputs, **{"do_sample": False, "max_new_tokens": NEW_TOKENS} | options)


@pytest.fixture
def drafted_at(monkeypatch):
    """Positions of slots and of context rows, of every drafter forward."""
    found = []
    original = ReadyDrafterModel.forward

    def forward(self, *args, **kwargs):
        found.append((kwargs["position_ids"].cpu(), kwargs["context_position_ids"].cpu()))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(ReadyDrafterModel, "forward", forward)
    return found


def decoded_at(model, run):
    """Positions `[B, T]` of every forward of the target's decoder in `run()`, the largest of a token's three."""
    found = []

    def note(module, args, kwargs):
        found.append(own_positions(kwargs["position_ids"], kwargs["inputs_embeds"].shape[0]).cpu())

    handle = model.get_decoder().register_forward_pre_hook(note, with_kwargs=True)
    try:
        return run(), found
    finally:
        handle.remove()


def check_positions(drafted_at, targets):
    """Slots start at the position of the anchor, context rows are where the target was."""
    for (slots, _), block in zip(drafted_at, targets[1:], strict=False):  # no drafts in the last round
        assert torch.equal(slots, block[:, :1] + torch.arange(slots.shape[1]))
    rows = drafted_at[0][1]
    assert torch.equal(rows, targets[0][:, -rows.shape[1] :])
    kept = torch.cat([rows for _, rows in drafted_at[1:]], dim=1)[0]
    first = int(targets[1][0, 0])
    assert kept.tolist() == list(range(first, first + len(kept)))  # every committed token once


@pytest.mark.parametrize("device", DEVICES)
def test_c81_positions_and_acceptance_behind_an_image(device, drafted_at):
    model, drafter, inputs = seeing_target(device), small_drafter(device), image_prompt()
    plain = generate(model, inputs)
    with ready_hf.record_stats() as stats:
        drafted, targets = decoded_at(model, lambda: generate(model, inputs, assistant_model=drafter))
    assert torch.equal(drafted, plain)
    length = inputs["input_ids"].shape[1]
    assert targets[1][0, 0] == length - 64 + 8  # the image takes as many positions as its side
    check_positions(drafted_at, targets)
    with ready_hf.record_stats() as text:
        generate(model, text_prompt(CODE), assistant_model=drafter)
    rates = [round(s.tokens_per_forward, 2) for s in (stats, text)]
    print(f"\nC81 on {device}: {rates[0]} tokens a forward behind an image, {rates[1]} without it")
    assert rates[0] > 0.7 * rates[1] > 1


@pytest.mark.parametrize("family", [name for name in COMPOSITES if "mm_token_type_ids" in image_inputs(name)])
def test_c81_every_target_whose_images_take_positions(family, drafted_at):
    model, inputs = existing(lambda: image_target(family)), image_inputs(family)
    drafter = drafter_for(model, reader=False)
    drafted, targets = decoded_at(model, lambda: generate(model, inputs, assistant_model=drafter, max_new_tokens=20))
    assert torch.equal(drafted, generate(model, inputs, max_new_tokens=20))
    assert (int(targets[1][0, 0]) < inputs["input_ids"].shape[1]) is (family != "glm5_next")  # which counts tokens
    check_positions(drafted_at, targets)


@pytest.mark.parametrize("device", DEVICES)
def test_c82_image_text_and_padding_in_turn(device):
    """The same objects for all calls, against ones that have seen nothing, with drafts and without."""
    calls = {
        "image": image_prompt(),
        "text": text_prompt(CODE),
        "left-padded": text_prompt(CODE, "class Reader:"),
        "image again": image_prompt(),
    }
    model, drafter = seeing_target(device), small_drafter(device)
    for name, inputs in calls.items():
        with ready_hf.record_stats() as stats:
            found = generate(model, inputs, assistant_model=drafter, max_new_tokens=16)
        with ready_hf.record_stats() as fresh:
            new = generate(seeing_target(device), inputs, assistant_model=small_drafter(device), max_new_tokens=16)
        assert torch.equal(found, new), name
        assert torch.equal(found, generate(seeing_target(device), inputs, max_new_tokens=16)), name
        assert stats.accepted_by_position == fresh.accepted_by_position, name
        print(f"\nC82 on {device}: {name}, {stats.tokens_per_forward:.2f} tokens a forward, as of fresh objects")
        assert stats.tokens_per_forward > 1
