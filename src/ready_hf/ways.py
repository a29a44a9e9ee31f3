"""Ways of decoding that things are measured in: the most likely text, and samples of the target."""

from typing import Any


def name_of(temperature: float) -> str:
    """As tables and files call it: `greedy`, `temperature 1`, `temperature 0.7`."""
    return f"temperature {temperature:g}" if temperature else "greedy"


def arguments_of(temperature: float) -> dict[str, Any]:
    """Arguments for `generate`; at a temperature of 1 the samples are the target's own distribution."""
    if not temperature:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": float(temperature), "top_k": 0, "top_p": 1.0}


NAMES = {temperature: name_of(temperature) for temperature in (0, 1)}
DECODING = {name: arguments_of(temperature) for temperature, name in NAMES.items()}
