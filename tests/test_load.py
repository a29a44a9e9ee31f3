"""Many calls, calls at once, calls that are interrupted from outside: nothing grows, nothing is left behind."""

import functools
import gc
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin

import ready_hf
from ready_hf import target as target_module
from support import (
    cache_argument,
    drafter_for,
    fresh_states,
    k_right,
    num_hooks,
    partly_right,
    plain_ids,
    random_prompt,
    states,
    tiny_target,
    worst_error,
)


LENGTH = 12
REFERENCE = plain_ids("qwen3_5", 96, LENGTH)
PROMPT = REFERENCE[:, :LENGTH]


def generate(ids=PROMPT, target=None, **kwargs):
    return (target or tiny_target("qwen3_5")).generate(ids, **{"do_sample": False, "max_new_tokens": 10} | kwargs)


def memory() -> int:
    """Resident pages of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def alive() -> tuple[int, int, int]:
    """Objects, tensors and caches that Python knows."""
    gc.collect()
    objects = gc.get_objects()
    types = [type(o) for o in objects]
    return len(objects), sum(issubclass(t, torch.Tensor) for t in types), sum(issubclass(t, Cache) for t in types)


def grown(calls: int, call) -> tuple[int, list[int]]:
    """By how many bytes the process, and by how many objects, tensors and caches Python's heap grows over calls."""
    for index in range(20):
        call(index)
    before, pages = alive(), memory()
    for index in range(calls):
        call(index)
    return memory() - pages, [now - then for now, then in zip(alive(), before, strict=True)]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads memory from Linux's /proc")
def test_memory_is_flat_over_500_calls():
    """With a drafter that reads features and states: every kind of thing that a call makes."""
    target = tiny_target("qwen3_5")
    drafters = [drafter_for(target), partly_right(REFERENCE, 0.6), ready_hf.PromptLookupDrafter()]

    def call(index, keep=None):
        sampled = {"do_sample": index % 3 == 2, "return_dict_in_generate": index % 5 == 1}
        output = generate(max_new_tokens=5, assistant_model=drafters[index % 3], **sampled)
        if keep is not None:
            keep.append(getattr(output, "past_key_values", output))

    num_bytes, (objects, tensors, caches) = grown(500, call)
    assert (tensors, caches) == (0, 0)
    assert objects < 200
    assert num_bytes < 5_000_000

    kept: list = []  # the same with one call in five leaving its cache: it is noticed
    num_bytes, (objects, tensors, caches) = grown(50, lambda index: call(index, kept))
    assert caches == 10
    assert tensors > 10


def kinds():
    return {
        "scripted": lambda reference: k_right(reference, 3),
        "ReaDy": lambda reference: drafter_for(tiny_target("qwen3_5")),
        "lookup": lambda reference: ready_hf.PromptLookupDrafter(),
        "none": lambda reference: None,
    }


def at_once(calls) -> list:
    """What functions give that start at the same time, each in a thread of its own."""
    start, results = threading.Barrier(len(calls)), [None] * len(calls)

    def work(index):
        try:
            start.wait(30)
            results[index] = calls[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return results


@pytest.mark.parametrize("second", kinds())
@pytest.mark.parametrize("first", ["scripted", "ReaDy"])
def test_two_calls_at_once_on_one_target(first, second):
    prompts = [PROMPT, random_prompt(9, seed=31)]
    want = [generate(ids, max_new_tokens=16) for ids in prompts]
    drafters = [kinds()[kind](reference) for kind, reference in zip((first, second), want, strict=True)]
    hooks = num_hooks(tiny_target("qwen3_5"))

    def call(index):
        return lambda: generate(prompts[index], max_new_tokens=16, assistant_model=drafters[index]).tolist()

    for order in ((0, 1), (1, 0)):
        got = at_once([call(index) for index in order])
        assert got == [want[index].tolist() for index in order]
        assert num_hooks(tiny_target("qwen3_5")) == hooks


@pytest.mark.parametrize("kind", ["ReaDy", "lookup"])
def test_one_drafter_in_several_calls_at_once(kind):
    drafter = kinds()[kind](None)
    prompts = [random_prompt(length, seed=length) for length in (5, 9, 14)]
    want = [generate(ids, max_new_tokens=16).tolist() for ids in prompts]
    calls = [lambda ids=ids: generate(ids, max_new_tokens=16, assistant_model=drafter).tolist() for ids in prompts]
    assert at_once(calls) == want


def test_one_sampled_call_does_not_disturb_a_greedy_one():
    want = generate(max_new_tokens=16).tolist()
    sampled = lambda: generate(max_new_tokens=16, do_sample=True, assistant_model=k_right(REFERENCE, 3))  # noqa: E731
    got = at_once([lambda: generate(max_new_tokens=16, assistant_model=k_right(REFERENCE, 3)).tolist(), sampled])
    assert got[0] == want
    assert got[1].shape == (1, LENGTH + 16)


@pytest.fixture
def interruptible():
    """A process that a shell started in the background ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(("kind", "delay"), [("scripted", 0.1), ("ReaDy", 0.15), ("ReaDy", 0.23), ("lookup", 0.2)])
def test_an_interrupt_by_signal_leaves_nothing_behind(kind, delay):
    """As Ctrl-C in a terminal or the stop button of a notebook do it: at any line of Python that runs just then."""
    target, original = tiny_target("qwen3_5"), GenerationMixin.generate
    drafter = kinds()[kind](REFERENCE)
    hooks, (_, _, caches) = num_hooks(target), alive()

    def send():
        time.sleep(delay)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    sender = threading.Thread(target=send)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 (whatever runs when the signal comes)
        sender.start()
        for _ in range(200):
            generate(max_new_tokens=40, assistant_model=drafter)
    sender.join()
    assert GenerationMixin.generate is original
    assert num_hooks(target) == hooks
    assert alive()[2] == caches
    again = generate(max_new_tokens=40, assistant_model=kinds()[kind](REFERENCE))
    assert again.tolist() == generate(max_new_tokens=40).tolist() == REFERENCE[:, : LENGTH + 40].tolist()


SOURCE = str(Path(ready_hf.__file__).parent)
FILES = ("decoding", "rollback", "candidates", "target_features", "target", "generation")


class Interrupter:
    """Counts lines of ours that run, and raises `KeyboardInterrupt` before one of them: as a signal does, anywhere."""

    def __init__(self, at: int | None = None):
        self.at, self.count, self.first, self.place = at, 0, {}, None

    def __call__(self, frame, event, arg):
        path = Path(frame.f_code.co_filename)
        if not frame.f_code.co_filename.startswith(SOURCE) or path.stem not in FILES:
            return None
        if event == "line":
            self.count += 1
            self.first.setdefault((path.stem, frame.f_lineno), self.count)
            if self.count == self.at:
                sys.settrace(None)
                self.place = f"{path.name}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self

    def run(self, call) -> bool:
        """Whether the call was interrupted."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            call()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False


@pytest.mark.slow
def test_an_interrupt_at_any_line_leaves_nothing_behind():
    target, drafter = tiny_target("qwen3_5"), k_right(REFERENCE, 3)
    hooks, new = num_hooks(target), 8

    def call(cache=None):
        return generate(
            max_new_tokens=new, assistant_model=drafter, **({} if cache is None else cache_argument(cache))
        )

    call()
    counted = Interrupter()
    assert not counted.run(call)
    assert len(counted.first) > 200
    found = []
    for at in counted.first.values():
        cache, interrupter = DynamicCache(config=target.config), Interrupter(at)
        classes = [type(layer) for layer in cache.layers]
        assert interrupter.run(functools.partial(call, cache))
        seen = cache.get_seq_length()
        fault = {
            "hooks": num_hooks(target) != hooks,
            "layers": [type(layer) for layer in cache.layers] != classes,
            "recording": any(getattr(layer, "record_past", False) for layer in cache.layers),
            "attributes": any({"_rollback", "_records", "_uncut"} & vars(layer).keys() for layer in cache.layers),
            "observers": (target_module._thread.observer, target_module._thread.mixer_observer) != (None, None),
            "states": seen
            and drafter.rounds
            and worst_error(states(cache), fresh_states(target, REFERENCE[:, :seen])) > 1e-5,
        }
        found += [f"{interrupter.place}: {name}" for name, is_wrong in fault.items() if is_wrong]
    assert found == []
    assert call().tolist() == REFERENCE[:, : LENGTH + new].tolist()
    assert generate(max_new_tokens=new).tolist() == REFERENCE[:, : LENGTH + new].tolist()


CELLS = [
    """
import threading, torch, ready_hf
from transformers import AutoModelForCausalLM
target = AutoModelForCausalLM.from_pretrained(ready_hf.tiny_target_path(), dtype=torch.float32).eval()
prompt, drafter = torch.arange(5, 17)[None], ready_hf.PromptLookupDrafter()
options = {"max_new_tokens": 24, "do_sample": False}
want, original = target.generate(prompt, **options), type(target).generate
print("ready")
""",
    """
print("running", flush=True)
while True:
    target.generate(prompt, **options, assistant_model=drafter)
""",
    """
again = [target.generate(prompt, **options, assistant_model=drafter), target.generate(prompt, **options)]
print(all(torch.equal(ids, want) for ids in again), type(target).generate is original)
""",
]


@pytest.mark.slow
def test_the_stop_button_of_a_notebook():
    """A kernel as a notebook starts it: the cell is interrupted, and those after it are right."""
    manager = pytest.importorskip("jupyter_client").KernelManager(kernel_name="python3")
    manager.start_kernel(env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    client = manager.client()
    said: list[str] = []

    def hear(message):
        said.append(message["content"].get("text") or message["content"].get("ename") or "")
        if "running" in said[-1]:
            threading.Timer(0.5, manager.interrupt_kernel).start()

    try:
        client.start_channels()
        client.wait_for_ready(timeout=60)
        replies = [client.execute_interactive(cell, timeout=60, output_hook=hear)["content"] for cell in CELLS]
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    assert [reply["status"] for reply in replies] == ["ok", "error", "ok"], said
    assert replies[1]["ename"] == "KeyboardInterrupt"
    assert "True True\n" in said
