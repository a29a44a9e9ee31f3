"""The two ways of decoding that things are measured in: the most likely text, and the target's own samples."""

from typing import Any


NAMES = {0: "greedy", 1: "temperature 1"}  # by temperature
DECODING: dict[str, dict[str, Any]] = {  # arguments for `generate`
    NAMES[0]: {"do_sample": False},
    NAMES[1]: {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0},
}
