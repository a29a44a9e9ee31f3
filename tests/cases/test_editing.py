"""Cases C36 and C76: text that has to be copied exactly, with a drafter and with prompt lookup."""

import copy
import subprocess
import sys

import pytest
import torch

import ready_hf
from support import DEVICES, StateCheck, drafter_for, partly_right, trained_target, trained_tokenizer


CLASS = """
class Shape:
    def __init__(self, width, height):
        self.width = width
        self.height = height
        self.name = "shape"

    def area(self):
        total = self.width * self.height
        return total

    def border(self):
        total = self.width + self.height
        return 2 * total

    def is_square(self):
        if self.width == self.height:
            return True
        return False

    def scale(self, factor):
        self.width = self.width * factor
        self.height = self.height * factor
        return self

    def describe(self):
        text = self.name
        text = text + " of "
        text = text + str(self.area())
        text = text + "."
        return text
""".strip()
ORDER = "# Rewrite it with two more methods"
STOCK = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM

sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, eos_token_id=None, bos_token_id=None, **sizes)).eval()
model.to(sys.argv[1])
lengths = []
model.model.embed_tokens.register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
prompt = torch.arange(3, 40).repeat(1, 2).to(sys.argv[1])
options = {"do_sample": False, "max_new_tokens": 40, "prompt_lookup_num_tokens": 5}
options |= {"return_dict_in_generate": True, "output_scores": True}


def run():
    lengths.clear()
    found = model.generate(prompt, **options)
    return found.sequences.tolist(), [score.tolist() for score in found.scores], list(lengths), type(found).__name__


before = run()
assert "ready_hf" not in sys.modules
import ready_hf
assert run() == before
ready_hf.enable_assisted_generation()
assert run() == before
print(len(before[2]))
"""


# On a GPU one forward over a text multiplies float32 in tf32 (flash-linear-attention's block function), 1e-3 off
STATES = {"cpu": 1e-5, "cuda": 2e-3}


def edit(code, order):
    return trained_tokenizer()(f"<file>\n{code}\n</file>\n{order}\n<edited>\n", return_tensors="pt")


def check_text(case, device, inputs, new_tokens):
    """Plain text, and that drafts of every kind lead to it; returns it."""
    target, inputs = copy.deepcopy(trained_target()).to(device), inputs.to(device)
    options = {"do_sample": False, "max_new_tokens": new_tokens}
    plain = target.generate(**inputs, **options)
    drafters = {
        "ReaDy": drafter_for(target, block_size=4).to(device),
        "lookup": ready_hf.PromptLookupDrafter(),
        "guesses": partly_right(plain, 0.7),
    }
    drafters["guesses"].check = check = StateCheck(target, every=new_tokens // 20)
    found = []
    for name, drafter in drafters.items():
        with ready_hf.record_stats() as stats:
            assert torch.equal(target.generate(**inputs, **options, assistant_model=drafter), plain), name
        assert name == "ReaDy" or sum(stats.accepted_by_position) > new_tokens / 4, name
        found.append(f"{name} {stats.tokens_per_forward:.2f}")
    assert check.worst <= STATES[device]
    ready_hf.enable_assisted_generation()
    assert torch.equal(target.generate(**inputs, **options, prompt_lookup_num_tokens=8), plain)
    ready_hf.disable_assisted_generation()
    print(f"\n{case} on {device}: tokens a forward {', '.join(found)}, texts equal, states to {check.worst:.1e}")
    return trained_tokenizer().decode(plain[0, inputs["input_ids"].shape[1] :])


@pytest.mark.parametrize("device", DEVICES)
def test_c36_a_list_of_numbers_is_copied_as_plain_decoding_copies_it(device):
    """No model that counts is at hand: the fixture copies the list from its prompt, but for one number."""
    numbers = [str(number) for number in range(1, 21)]
    text = check_text("C36", device, edit("\n".join(numbers), "# Count from 1 to 20, one number per line"), 60)
    written = text.split("</edited>")[0].split()
    assert written == [number for number in numbers if number != "15"]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_c76_a_class_is_rewritten(device):
    assert len(CLASS.splitlines()) == 30
    text = check_text("C76", device, edit(CLASS, ORDER), 300)
    assert text.startswith("class Shape")


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_c76_stock_lookup_of_an_attention_model_is_as_before_the_import(device):
    """Tokens, scores and the lengths of all forwards, in a new process, where drafts are accepted."""
    ran = subprocess.run([sys.executable, "-P", "-c", STOCK, device], capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr[-2000:]
    forwards = int(ran.stdout.splitlines()[-1])
    print(f"\nC76 on {device}: stock lookup takes {forwards} forwards for 40 tokens, before and after the import")
    assert forwards < 40
