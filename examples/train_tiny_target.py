"""Train the tiny hybrid target that ships with the package, and measure how well it copies and edits code.

It learns from the standard library of the Python that runs it, and from edit tasks made of it (see PROMPT), so that
prompt lookup has something to find. The command behind the shipped folder, and options to try it on a CPU:

    python examples/train_tiny_target.py --seconds 390 --out src/ready_hf/assets/tiny_target
    python examples/train_tiny_target.py --seconds 5 --tasks 300 --batch 2 --evaluate 2 --out tiny_target
"""

import argparse
import builtins
import hashlib
import keyword
import math
import multiprocessing
import os
import pathlib
import platform
import random
import re
import sysconfig
import textwrap
import time
from unittest import mock

import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from tokenizers import decoders, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen


os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the tasks are encoded by processes already
EOS, MASK = "<|endoftext|>", "<|mask|>"
PROMPT = "<file>\n{code}\n</file>\n# {instruction}\n<edited>\n"
ANSWER = "{code}\n</edited>" + EOS
ROW, CHUNK = 1024, 64  # tokens a training row predicts, rows of one gated delta rule chunk
FLAG, PROMPT_WEIGHT = 1024, 0.4  # added to the ids of answer tokens in the stream; loss weight of all other tokens
RECORD = "## Training record\n\n| what | value |\n| --- | --- |\n"
SKIP = re.compile(r"(^|/)(site-packages|dist-packages|tests?|idle_test|encodings|pydoc_data|__phello__)/")
IDENTIFIER = re.compile(r"\b[A-Za-z_][A-Za-z0-9_]{2,23}\b")
# A word never carries its space, so a name is cut into the same tokens wherever it stands.
PRETOKENS = tokenizers.Regex(r"\n+ *|[A-Za-z]+|_+|\d| |[^\sA-Za-z\d_]+|\s+")
LAYERS = [f"{kind}_attention" for kind in ("linear", "full", "linear", "linear", "full", "linear")]
SIZES = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 56, "max_position_embeddings": 4096}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True}
GDN = {"linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_num_value_heads": 4, "linear_value_head_dim": 48}


def read_corpus() -> tuple[list[str], list[str], str]:
    """Sources of the running interpreter's standard library: training texts, held-out texts, a description."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(p for p in root.rglob("*.py") if not SKIP.search(p.relative_to(root).as_posix()))
    texts = list(dict.fromkeys(p.read_text(encoding="utf-8", errors="ignore") for p in paths))
    texts = [t for t in texts if len(t) > 600 and sum(ord(c) > 127 for c in t) < len(t) / 100]
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
    random.Random(0).shuffle(texts)
    held, size = len(texts) // 20, sum(map(len, texts)) / 1e6
    about = f"{len(texts)} files, {size:.1f} M characters, {held} files held out, sha256 {digest}"
    return texts[held:], texts[:held], f"CPython {platform.python_version()} standard library without tests: {about}"


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE over the training texts."""
    bpe, to_bytes = tokenizers.Tokenizer(tokenizers.models.BPE()), pre_tokenizers.ByteLevel(False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(PRETOKENS, "isolated"), to_bytes])
    bpe.decoder = decoders.ByteLevel()
    options = {"initial_alphabet": to_bytes.alphabet(), "special_tokens": [EOS, MASK], "show_progress": False}
    bpe.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(vocab_size=SIZES["vocab_size"], **options))
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=EOS, pad_token=EOS, mask_token=MASK)


class TaskMaker:
    """Draws edit tasks from source texts; `shortest` bounds the characters of a snippet."""

    def __init__(self, texts: list[str], tokenizer: tokenizers.Tokenizer, seed: int, shortest: int = 60):
        self.lines, self.tokenizer, self.rng = [t.splitlines() for t in texts], tokenizer, random.Random(seed)
        self.log_size = math.log(shortest), math.log(960)  # many short tasks, since copying is learned on them first
        words = {word.lower() for text in texts[:200] for word in re.findall(r"[A-Za-z][a-z]{2,8}", text)}
        self.words = sorted(words - set(keyword.kwlist))

    def name(self, style: str) -> str:
        """A new identifier of one to three known or made-up words, in the letter case of `style`."""
        words = self.rng.choices(self.words, k=self.rng.choice((1, 2, 2, 3)))
        if self.rng.random() < 0.4:
            words[0] = "".join(map(self.rng.choice, ("bcdfghjklmnprstvwz", "aeiou") * 2 + ("lmnrstx",)))
        if style[:1].isupper():
            return "_".join(words).upper() if style.isupper() else "".join(map(str.capitalize, words))
        return "_" * style.startswith("_") + "_".join(words)

    def snippet(self, size: int) -> str:
        """At most `size` characters of whole source lines; now and then unrelated names, which only copying gets."""
        if self.rng.random() < 0.2:
            ends = self.rng.choices((" ", "\n", ", ", " = ", "."), k=size // 10)
            return "".join(self.name(self.rng.choice("aAB")) + end for end in ends).strip()
        lines = self.rng.choice(self.lines)
        start = self.rng.randrange(len(lines))
        text = "\n".join(lines[start : start + size // 8])[: size + 1]
        return textwrap.dedent(text.rpartition("\n")[0]).strip()

    def task(self, rename: bool | None = None) -> tuple[list[int], list[int]]:
        """Prompt and answer ids that fit a row; `rename` None mixes four renamings with one plain copy."""
        while True:
            code = self.snippet(int(math.exp(self.rng.uniform(*self.log_size))))
            names = [n for n in IDENTIFIER.findall(code) if not keyword.iskeyword(n) and not hasattr(builtins, n)]
            if len(code) < 40 or not names or "file>" in code:
                continue
            edited, instruction = code, "Keep unchanged"
            if rename or (rename is None and self.rng.random() < 0.8):
                old = self.rng.choice(names)
                new = self.name(old)
                edited, instruction = re.sub(rf"\b{old}\b", new, code), f"Rename {old} to {new}"
            texts = PROMPT.format(code=code, instruction=instruction), ANSWER.format(code=edited)
            prompt, answer = (self.tokenizer.encode(text).ids for text in texts)
            if len(prompt) + len(answer) <= ROW:
                return prompt, answer


def task_stream(job: tuple[list[str], str, int, int]) -> list[np.ndarray]:
    """Seeded tasks as id arrays with the answer tokens flagged; runs in a process of its own."""
    maker = TaskMaker(job[0], tokenizers.Tokenizer.from_str(job[1]), seed=job[2])
    tasks = (maker.task() for _ in range(job[3]))
    return [np.array(prompt + [i + FLAG for i in answer], np.int16) for prompt, answer in tasks]


@torch.compiler.disable  # a compiled triangular solve gives wrong gradients in torch 2.13
def solve_and_scan(q, k, written, right, decay, q_decayed, k_decayed, last) -> torch.Tensor:
    """The outputs of all chunks, [B * H, N, CHUNK, V], from queries, keys and their decays of the same layout."""
    with torch.autocast(q.device.type, enabled=False):
        # What a row writes depends on the rows before it; one triangular solve gives all rows of a chunk.
        system, k_dim = written @ k.transpose(-1, -2) * decay, k.shape[-1]
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        fresh, held = solved[..., :-k_dim], solved[..., -k_dim:]
        # unbind, since the gradient of an index is a tensor as large as the whole
        reads = torch.cat([q_decayed, -held], -2).unbind(1)
        mixes = torch.cat([q @ k.transpose(-1, -2) * decay, k_decayed.transpose(-1, -2)], -2).unbind(1)
        state, out = right.new_zeros(len(q), k_dim, fresh.shape[-1]), []
        for read, mix, new, factor in zip(reads, mixes, fresh.unbind(1), last.unbind(1), strict=True):
            old, known = (read @ state).split(CHUNK, 1)
            seen, added = (mix @ (new + known)).split([CHUNK, k_dim], 1)
            state = torch.addcmul(added, state, factor)
            out.append(old + seen)
    return torch.stack(out, 1)


def chunk_gated_delta_rule(query, key, value, g, beta, **kwargs) -> tuple[torch.Tensor, None]:
    """Gated delta rule from an empty state over chunks, without in-place writes, so that autograd is quick."""
    batch, length, heads, v_dim = value.shape

    def chunks(x: torch.Tensor) -> torch.Tensor:  # [B, T, h, d] -> [B * H, N, CHUNK, d]
        x = x.float().repeat_interleave(heads // x.shape[2], dim=2)
        return x.transpose(1, 2).reshape(batch * heads, length // CHUNK, CHUNK, x.shape[-1])

    q, k, v, beta = chunks(query), chunks(key), chunks(value), chunks(beta[..., None])
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    total = chunks(g[..., None]).cumsum(-2)  # log decay since the start of the chunk
    last, decay = total[..., -1:, :], (total - total.transpose(-1, -2)).tril().exp().tril()
    right, k_decayed = beta * torch.cat([v, k * total.exp()], -1), k * (last - total).exp()
    out = solve_and_scan(q, k, beta * k, right, decay, q * total.exp(), k_decayed, last.exp())
    return (out * q.shape[-1] ** -0.5).reshape(batch, heads, length, v_dim).transpose(1, 2).to(query.dtype), None


def causal_conv(hidden: torch.Tensor, weight: torch.Tensor, *args, **kwargs) -> torch.Tensor:
    """Depthwise causal convolution of [B, C, T] and silu, as shifted sums that fuse."""
    padded = torch.cat([hidden.new_zeros(*hidden.shape[:-1], weight.shape[-1] - 1), hidden], -1)
    return F.silu(sum(padded[..., i : i + hidden.shape[-1]] * tap[:, None] for i, tap in enumerate(weight.unbind(-1))))


def build_model() -> Qwen3_5ForCausalLM:
    """The hybrid with fresh weights."""
    sizes = {"num_hidden_layers": len(LAYERS), "layer_types": LAYERS, **SIZES, **HEADS, **GDN}
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes, eos_token_id=0, pad_token_id=0))
    for mixer in (m for m in model.modules() if isinstance(m, qwen.Qwen3_5GatedDeltaNet)):
        # The library's initial decay forgets within a token or two.
        mixer.dt_bias.data.copy_(torch.logspace(-3, -0.5, mixer.num_v_heads).expm1().log())
        mixer.A_log.data.uniform_(1, 4).log_()
    return model


def loss_of(model: Qwen3_5ForCausalLM, batch: torch.Tensor) -> torch.Tensor:
    """Cross entropy of [B, ROW + 1] stream ids, answer tokens weighted 1 and all others PROMPT_WEIGHT."""
    ids, weight = batch % FLAG, torch.where(batch[:, 1:].flatten() >= FLAG, 1.0, PROMPT_WEIGHT)
    with torch.autocast(batch.device.type, dtype=torch.bfloat16):
        hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        logits = model.lm_head(hidden).float()
    return weight @ F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none") / weight.sum()


def train(model: Qwen3_5ForCausalLM, plain: torch.Tensor, tasks: list[np.ndarray], args: argparse.Namespace) -> int:
    """AdamW, a short warm-up, a cosine over the wall clock, rows of tasks and of source; returns the steps."""
    random_ids, ends = torch.Generator(model.device).manual_seed(args.seed), np.cumsum([len(task) for task in tasks])
    starts = torch.from_numpy(np.append(0, ends[:-1])[ends < ends[-1] - ROW]).to(model.device)
    stream, span = torch.from_numpy(np.concatenate(tasks)).to(model.device), torch.arange(ROW + 1, device=model.device)
    edits, start, step = math.ceil(args.batch * 0.7), time.perf_counter(), 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    while (done := (time.perf_counter() - start) / args.seconds) < 1:
        first = starts[torch.randint(len(starts), (edits,), generator=random_ids, device=model.device)]
        offsets = torch.randint(len(plain) - ROW, (args.batch - edits,), generator=random_ids, device=model.device)
        batch = torch.cat([stream[first[:, None] + span], plain[offsets[:, None] + span]]).long()
        factor = min(1, (step + 1) / 200) * max(0.01, math.cos(math.pi / 2 * done) ** 2)
        optimizer.param_groups[0]["lr"] = args.lr * factor
        loss = loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 200 == 0:
            print(f"step {step} loss {loss.item():.4f} {time.perf_counter() - start:.0f} s", flush=True)
        if step == 0:  # compilation is not training time
            start = time.perf_counter()
        step += 1
    return step


def tokens_per_forward(prompt: list[int], output: list[int], longest: int = 3, ahead: int = 10) -> float:
    """Output tokens over target forwards, with the proposals of the leftmost match of the longest n-gram."""
    ids, done, forwards = prompt + output, len(prompt), 0
    while done < len(ids):
        sizes = ((i, n) for n in range(longest, 0, -1) for i in range(done - n))
        match = next((i + n for i, n in sizes if ids[i : i + n] == ids[done - n : done]), done)
        good, most = 0, min(ahead, done - match, len(ids) - 1 - done)
        while good < most and ids[match + good] == ids[done + good]:
            good += 1
        done, forwards = done + good + 1, forwards + 1
    return len(output) / forwards


@torch.no_grad()
def measure(model: Qwen3_5ForCausalLM, tokenizer: tokenizers.Tokenizer, held: list[str], count: int) -> dict:
    """Copying, renaming and free text on held-out files."""
    maker, report = TaskMaker(held, tokenizer, seed=1, shortest=300), {}
    for kind in ("rename", "copy"):
        prompts, answers = zip(*(maker.task(kind == "rename") for _ in range(count)), strict=True)
        ids = torch.nn.utils.rnn.pad_sequence([*map(torch.tensor, prompts)], True, -1, "left").to(model.device)
        outputs = model.generate(ids.clamp(min=0), attention_mask=ids >= 0, do_sample=False, max_new_tokens=600)
        outputs = [new[: (new + [0]).index(0) + 1] for new in outputs[:, ids.shape[1] :].tolist()]
        right, same = [], []
        for prompt, answer, output in zip(prompts, answers, outputs, strict=True):
            logits = model(torch.tensor([prompt + answer], device=model.device)).logits[0, len(prompt) - 1 : -1]
            right.append(np.mean([*map(int.__eq__, logits.argmax(-1).tolist(), answer)]))
            same.append([*map(int.__eq__, output, answer), False].index(False))
        rates = [*map(tokens_per_forward, prompts, outputs)]
        report |= {
            f"{kind}: answer tokens right, teacher forced": f"{np.mean(right):.4f}",
            f"{kind}: greedy tokens before an error": f"{np.mean(same):.0f} of {sum(map(len, answers)) // count}",
            f"{kind}: greedy answers wholly right": f"{sum(map(list.__eq__, outputs, answers))} of {count}",
            f"{kind}: greedy answers ended": f"{sum(output[-1] == 0 for output in outputs)} of {count}",
            f"{kind}: tokens per forward, 3-gram lookup of 10 tokens": f"{np.mean(rates):.2f}",
        }
    windows = torch.tensor(tokenizer.encode(EOS.join(held)).ids, device=model.device).unfold(0, ROW, ROW)[:128]
    return report | {"held-out loss of source": f"{model(windows, labels=windows).loss.item():.3f} nats a token"}


def main() -> None:
    """Train, save, load again, measure, write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = {"seconds": 390.0, "lr": 4e-3, "batch": 64, "tasks": 300_000, "evaluate": 48, "seed": 0}
    for name, default in options.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    texts, held, corpus = read_corpus()
    tokenizer = train_tokenizer(texts)
    bpe, device = tokenizer.backend_tokenizer, "cuda" if torch.cuda.is_available() else "cpu"
    with multiprocessing.Pool() as pool:  # always 50 jobs, so that the tasks do not depend on the number of cores
        jobs = [(texts, bpe.to_str(), args.seed + i, args.tasks // 50) for i in range(50)]
        tasks = [task for part in pool.map(task_stream, jobs, chunksize=1) for task in part]
    plain = torch.tensor(bpe.encode(EOS.join(texts)).ids, dtype=torch.int16, device=device)
    model = build_model().to(device)
    torch.set_float32_matmul_precision("high")
    for layer in model.model.layers if device == "cuda" else ():
        layer.compile()
    with mock.patch.multiple(qwen, torch_chunk_gated_delta_rule=chunk_gated_delta_rule, causal_conv1d_fn=causal_conv):
        steps = train(model, plain, tasks, args)
    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    torch.set_float32_matmul_precision("highest")
    model = Qwen3_5ForCausalLM.from_pretrained(args.out, dtype=torch.float32).to(device)
    command = "examples/train_tiny_target.py " + " ".join(f"--{name} {getattr(args, name)}" for name in options)
    chip = f"one {torch.cuda.get_device_name().split()[-1]}" if device == "cuda" else "CPU"
    record = {
        "run": f"`python {command}`, {time.strftime('%Y-%m-%d')}",
        "on": f"{chip}, torch {torch.__version__}, transformers {transformers.__version__}",
        "text": f"{corpus}; {len(plain)} tokens, and {len(tasks)} tasks of {sum(map(len, tasks))} tokens",
        "steps": f"{steps} of {args.batch} rows of {ROW} tokens",
        **measure(model, bpe, held, args.evaluate),
    }
    table = "".join(f"| {name} | {value} |\n" for name, value in record.items())
    readme = args.out / "README.md"  # the text before the table is written by hand
    head = readme.read_text(encoding="utf-8").partition(RECORD)[0] if readme.exists() else ""
    readme.write_text(head + RECORD + table, encoding="utf-8")
    print(table)


if __name__ == "__main__":
    main()
