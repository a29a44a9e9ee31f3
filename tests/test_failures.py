"""After a failure nothing is left behind, and the next call is right; odd drafters and threads do no harm."""

import threading

import pytest
import torch
from transformers import DynamicCache

from ready_hf.block_records import Record
from ready_hf.target import recurrent_layers
from ready_hf.target_features import decoder_layers
from support import (
    FeatureCheck,
    RecordingCriterion,
    RecordingStreamer,
    ScriptedDrafter,
    StateCheck,
    cache_argument,
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


PROMPT_LENGTH = 12
FAMILIES = ["qwen3_5", "kimi_linear", "nemotron_h"]


def generate(model, ids, **kwargs):
    return model.generate(ids, **{"do_sample": False, "max_new_tokens": 20} | kwargs)


class Bomb:
    """Raises at the `at`-th call."""

    def __init__(self, error: BaseException, at: int = 3):
        self.error, self.left = error, at

    def __call__(self, *args, **kwargs):
        self.left -= 1
        if not self.left:
            raise self.error


def bomb_in(place: str, model, drafter, error: BaseException):
    """Arguments of a `generate` call that fails in its third round at `place`, and what takes the bomb away again."""
    if place == "drafter":
        drafter.check = Bomb(error)
    elif place in ("first layer", "last layer", "head"):
        layers = decoder_layers(model)
        module = {"first layer": layers[0], "last layer": layers[-1], "head": model.get_output_embeddings()}[place]
        handle = module.register_forward_hook(Bomb(error, at=4))  # the prefill is the first forward
        return {}, handle.remove
    elif place == "criterion":
        bomb = Bomb(error, at=11)  # 1 token of the prefill, 4 of each round
        return {"stopping_criteria": [RecordingCriterion(lambda ids: bool(bomb(ids)))]}, lambda: None
    elif place == "streamer":
        streamer = RecordingStreamer()
        streamer.put = Bomb(error, at=12)  # the prompt, then as above
        return {"streamer": streamer}, lambda: None
    return {}, lambda: None


PLACES = ["drafter", "first layer", "last layer", "head", "criterion", "streamer"]
ERRORS = {"exception": RuntimeError, "interrupt": KeyboardInterrupt}


FAILURES = [("qwen3_5", place, error) for place in PLACES for error in ERRORS]
FAILURES += [(family, place, "exception") for family in FAMILIES[1:] for place in PLACES[1:4]]


@pytest.mark.parametrize(("family", "place", "error"), FAILURES)
def test_a_failure_in_round_3_leaves_nothing_behind(family, place, error):
    model, reference = tiny_target(family), plain_ids(family)
    drafter = k_right(reference, 3)
    cache = DynamicCache(config=model.config)
    classes, hooks = [type(layer) for layer in cache.layers], num_hooks(model)
    options, disarm = bomb_in(place, model, drafter, ERRORS[error]("bomb"))

    with pytest.raises(ERRORS[error], match="bomb"):
        generate(model, reference[:, :PROMPT_LENGTH], assistant_model=drafter, **cache_argument(cache), **options)
    disarm()

    assert num_hooks(model) == hooks
    assert [type(layer) for layer in cache.layers] == classes
    assert not any(getattr(layer, "record_past", False) for layer in cache.layers)
    assert not any(name in vars(layer) for layer in cache.layers for name in ("_rollback", "_records"))

    seen = cache.get_seq_length()
    assert seen == PROMPT_LENGTH + 8
    assert worst_error(states(cache), fresh_states(model, reference[:, :seen])) <= 1e-5
    again = generate(model, reference[:, : seen + 1], **cache_argument(cache))
    assert again.tolist() == reference[:, : again.shape[1]].tolist()

    drafter.check = None
    again = generate(model, reference[:, :PROMPT_LENGTH], assistant_model=drafter)
    assert again.tolist() == reference[:, : again.shape[1]].tolist()


@pytest.mark.parametrize("layer", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_failure_while_states_are_rebuilt_undoes_the_block(family, layer, monkeypatch):
    """Out of memory, or an interrupt, in the middle of a commit: some layers are done, others not."""
    model, reference = tiny_target(family), plain_ids(family)
    state_after, num_layers = Record.state_after, len(recurrent_layers(model))
    bomb = Bomb(RuntimeError("bomb"), at=2 * num_layers + layer)

    def failing(record, keep):
        bomb()
        return state_after(record, keep)

    monkeypatch.setattr(Record, "state_after", failing)
    cache = DynamicCache(config=model.config)
    with pytest.raises(RuntimeError, match="bomb"):
        generate(model, reference[:, :PROMPT_LENGTH], assistant_model=k_right(reference, 3), **cache_argument(cache))
    seen = cache.get_seq_length()
    assert seen == PROMPT_LENGTH + 8
    assert worst_error(states(cache), fresh_states(model, reference[:, :seen])) <= 1e-5


@pytest.mark.parametrize("place", ["first layer", "last layer", "head"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_failure_in_a_round_without_drafts(family, place):
    """A forward over the anchor alone; what plain `generate` leaves in a cache there is all that can be asked for."""
    model, reference = tiny_target(family), plain_ids(family)

    def run(**kwargs):
        cache = DynamicCache(config=model.config)
        options, disarm = bomb_in(place, model, None, RuntimeError("bomb"))
        with pytest.raises(RuntimeError, match="bomb"):
            generate(model, reference[:, :PROMPT_LENGTH], **cache_argument(cache), **options, **kwargs)
        disarm()
        return cache

    plain, drafted = run(), run(assistant_model=k_right(reference, 3), num_assistant_tokens=0)
    assert worst_error(states(drafted), states(plain)) <= 1e-5
    assert [type(layer) for layer in drafted.layers] == [type(layer) for layer in plain.layers]


@pytest.mark.parametrize("repetition", range(3))
def test_two_drafted_calls_in_two_threads_on_one_target(repetition):
    model, results, start = tiny_target("qwen3_5"), {}, threading.Barrier(2)
    hooks = num_hooks(model)
    prompts = {0: random_prompt(9, seed=31), 1: random_prompt(14, seed=32)}
    references = {name: generate(model, ids, max_new_tokens=40) for name, ids in prompts.items()}
    drafters = {0: k_right(references[0], 2), 1: partly_right(references[1], 0.7, block_size=5)}
    drafters[0].target_layer_ids, drafters[1].target_layer_ids = [0, 2], [1, 2, 3]
    for drafter in drafters.values():
        drafter.check = FeatureCheck()

    def work(name):
        try:
            start.wait(30)
            results[name] = generate(model, prompts[name], max_new_tokens=40, assistant_model=drafters[name])
        except BaseException as error:
            results[name] = error

    threads = [threading.Thread(target=work, args=(name,)) for name in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for name, reference in references.items():
        assert isinstance(results[name], torch.Tensor), results[name]
        assert results[name].tolist() == reference.tolist()
        assert drafters[name].check.worst(model, reference) <= 1e-4
    assert num_hooks(model) == hooks


def test_a_drafted_and_a_plain_call_in_two_threads():
    model, results = tiny_target("qwen3_5"), {}
    reference = plain_ids("qwen3_5")
    prompt, other_prompt = reference[:, :PROMPT_LENGTH], random_prompt(10, seed=33)
    other = generate(model, other_prompt)

    def work():
        results["plain"] = [generate(model, other_prompt) for _ in range(3)]

    thread = threading.Thread(target=work)
    thread.start()
    drafted = [generate(model, prompt, assistant_model=k_right(reference, 3)) for _ in range(6)]
    thread.join(120)
    assert all(ids.tolist() == reference[:, : ids.shape[1]].tolist() for ids in drafted)
    assert all(ids.tolist() == other.tolist() for ids in results["plain"])


class OddDrafter(ScriptedDrafter):
    """Drafts as many tokens as `widths` says, whatever it is asked for, five of them right."""

    def __init__(self, reference, widths):
        super().__init__(reference)
        self.widths = widths

    def draft(self, context):
        if self.check is not None:
            self.check(context)
        width, length = self.widths[self.rounds % len(self.widths)], context.input_ids.shape[1]
        self.rounds += 1
        drafts = self.reference[:, length : length + width].clone()
        drafts[:, 5:] = (drafts[:, 5:] + 1) % 97
        return drafts, None


@pytest.mark.parametrize("widths", [(0, 8), (0,), (1,), (8, 1, 0, 40, 3), (40,)])
@pytest.mark.parametrize("family", FAMILIES)
def test_drafters_that_propose_nothing_or_too_much(family, widths):
    model, reference = tiny_target(family), plain_ids(family)
    drafter = OddDrafter(reference, widths)
    drafter.check = check = StateCheck(model, every=7)
    got = generate(model, reference[:, :PROMPT_LENGTH], assistant_model=drafter, max_new_tokens=36)
    assert got.tolist() == reference[:, : PROMPT_LENGTH + 36].tolist()
    assert check.worst <= 1e-5
