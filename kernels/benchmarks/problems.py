"""Inputs of the benchmark, as a model makes them: states, records of a block, queries; and what `verify` gets."""

from collections.abc import Callable

import torch

from ready_hf.kernels import Records


DEVICE = "cuda"
HEADS, KEY_HEADS, KEYS, VALUES, TOKENS, QUERIES, CHANNELS, TAPS = 48, 16, 128, 128, 8, 7, 10240, 4
RULES = {  # heads, key heads, K, V of a model that has them
    "gated delta rule": (HEADS, KEY_HEADS, KEYS, VALUES),  # Qwen3.5-27B, 48 such layers
    "KDA": (32, 32, 128, 128),  # Kimi-Linear-48B-A3B, 20
    "Mamba-2": (128, 8, 128, 64),  # Nemotron-H-8B, 24
}


def problem(
    layers: int,
    rows: int,
    kept: int | None = None,
    tokens: int = TOKENS,
    seed: int = 0,
    rule: str = "gated delta rule",
    dtype: torch.dtype = torch.float32,
) -> dict:
    """States, records as a model makes them, accepted lengths (random ones if `kept` is None) and queries.

    Args:
        layers, rows, tokens (`int`): Sizes.
        kept (`int`, *optional*): Accepted tokens of every row.
        seed (`int`): Of the random numbers.
        rule (`str`): One of `RULES`.
        dtype (`torch.dtype`): Of the states.
    """
    generator = torch.Generator(DEVICE).manual_seed(seed)
    heads, key_heads, keys, values = RULES[rule]

    def normal(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*size, generator=generator, device=DEVICE).to(dtype)

    channels = [keys] if rule == "KDA" else []
    g = -0.1 * torch.rand(layers, rows, tokens, heads, *channels, generator=generator, device=DEVICE)
    beta = normal(layers, rows, tokens, heads).sigmoid()
    value = normal(layers, rows, tokens, heads, values)
    records = Records(normal(layers, rows, tokens, key_heads, keys), value, g, beta)
    lengths = torch.randint(0, tokens + 1, (rows,), generator=generator, device=DEVICE, dtype=torch.int32)
    accepted = lengths if kept is None else torch.full_like(lengths, kept)
    if rule == "Mamba-2":  # the cache holds [V, K]
        states = normal(layers, rows, heads, values, keys, dtype=dtype).mT
        options = {"delta": False, "l2norm": False}
    else:
        states, options = normal(layers, rows, heads, keys, values, dtype=dtype), {}
    queries = normal(layers, heads, QUERIES, keys)
    return {"states": states, "records": records, "accepted": accepted, "queries": queries, **options}


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative L2; NaN counts as infinite."""
    value = float((found.double() - expected.double()).norm() / expected.double().norm())
    return value if value == value else float("inf")


def wide(case: dict) -> dict:
    """The same problem in float64."""
    records = Records(*(x.double() for x in case["records"]))
    states, queries = case["states"].double(), case["queries"].double()
    return {**case, "states": states, "records": records, "queries": queries}


def record_bytes(case: dict, kept: int) -> int:
    """Bytes of the records of the kept tokens."""
    return sum(x.nbytes for x in case["records"]) * kept // case["records"].value.shape[2]


def layer_inputs(layers: int, tokens: int, rows: int = 1) -> list[dict]:
    """What `verify` gets in every layer, as a model has it in bfloat16."""

    def normal(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*size, device=DEVICE).to(dtype)

    return [
        {
            "mixed_qkv": normal(rows, tokens, CHANNELS),
            "conv_state": normal(rows, CHANNELS, TAPS),
            "conv_weight": normal(CHANNELS, TAPS) * 0.3,
            "conv_bias": None,
            "a": normal(rows, tokens, HEADS),
            "b": normal(rows, tokens, HEADS),
            "A_log": normal(HEADS),
            "dt_bias": normal(HEADS),
            "state": normal(rows, HEADS, KEYS, VALUES, dtype=torch.float32) * 0.1,
        }
        for _ in range(layers)
    ]


def as_transformers(x: dict, rule: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """The same layer as transformers computes it, with a rule of fla."""
    tokens = x["mixed_qkv"].shape[1]
    window = torch.cat([x["conv_state"], x["mixed_qkv"].transpose(1, 2)], dim=-1)
    mixed = torch.nn.functional.conv1d(window, x["conv_weight"][:, None], groups=CHANNELS)
    mixed = torch.nn.functional.silu(mixed[..., -tokens:]).transpose(1, 2)
    query, key, value = mixed.split([KEY_HEADS * KEYS, KEY_HEADS * KEYS, HEADS * VALUES], dim=-1)
    query, key = (part.reshape(*part.shape[:2], KEY_HEADS, KEYS) for part in (query, key))
    value, beta = value.reshape(*value.shape[:2], HEADS, VALUES), x["b"].sigmoid()
    g = -x["A_log"].float().exp() * torch.nn.functional.softplus(x["a"].float() + x["dt_bias"])
    options = {"initial_state": x["state"], "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    return rule(query, key, value, g=g, beta=beta, **options)[0]
