"""The source text of the small target: pinned packages to token files (see train_small_target.py)."""

import ast
import hashlib
import itertools
import json
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import zipfile
from typing import NamedTuple

import numpy as np
import tokenizers
from tokenizers import decoders, pre_tokenizers
from transformers import PreTrainedTokenizerFast


EOS, MASK = "<|endoftext|>", "<|mask|>"
CORPUS = pathlib.Path(__file__).with_name("small_target_corpus.txt")
MOST_TRAINING, MOST_HELD, MOST_OF_PACKAGE = 20_000_000, 500_000, 700_000  # tokens, tokens, characters
ENTRY = re.compile(r"([\w.-]+)==([\w.]+) --hash=sha256:([0-9a-f]{64})  # (.+)")
SECTIONS = {"# held out, never trained on": True, "# training": False}
SKIP = re.compile(
    r"(^|/)(tests?|testing|migrations|locales?|\w*vendor\w*|extern\w*|third_party|[^/]*\.data|lib2to3)/"
    r"|(^|/)(test_[^/]*|[^/]*_tests?|conftest|_version)\.py$"
)
GENERATED = re.compile(
    r"(auto.?|machine.?)?generated (by|from|with)|do not (edit|modify)|auto.?generated", re.IGNORECASE
)
# Line breaks go with the indent after them, words and signs with one space before them; digits stand alone.
PRETOKENS = tokenizers.Regex(r"\n+ *| ?[A-Za-z]+|\d| ?[^\sA-Za-z\d]+|\s+(?!\S)|\s+")
# Wheels of pure Python, chosen as if for one and the same machine.
WHEELS = ["--only-binary=:all:", "--platform=any", "--implementation=py", "--abi=none", "--python-version=3.12"]


class Package(NamedTuple):
    """One line of the corpus file."""

    name: str
    version: str
    sha256: str
    licence: str
    held: bool


class Source(NamedTuple):
    """One module of a package."""

    package: Package
    file: str
    text: str


def read_corpus(path: pathlib.Path = CORPUS) -> list[Package]:
    """The packages that a corpus file pins; a line that is no entry, section or empty is an error."""
    found, held = [], None
    for line in path.read_text(encoding="utf-8").splitlines():
        if line in SECTIONS:
            held = SECTIONS[line]
        elif line and not line.startswith("#"):
            entry = ENTRY.fullmatch(line)
            if entry is None or held is None:
                raise ValueError(f"{path.name}: cannot read {line!r}")
            found.append(Package(*entry.groups(), held))
    return found


def fetch(folder: pathlib.Path) -> None:
    """Let pip download the pinned files; it checks their hashes."""
    options = ["--no-deps", "--require-hashes", *WHEELS, "--dest", str(folder), "--requirement", str(CORPUS)]
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", *options], check=True)


def fetched_sources(wheels: pathlib.Path | None, most: int = MOST_OF_PACKAGE) -> list[Source]:
    """Usable modules of all pinned packages: from a folder of their wheels, or fetched."""
    with tempfile.TemporaryDirectory() as folder:
        if wheels is None:
            fetch(pathlib.Path(folder))
        return read_sources(read_corpus(), wheels or pathlib.Path(folder), most)


def usable(text: str) -> bool:
    """Whether a text is of a sensible size and looks written by people, in ASCII and not as a table of numbers."""
    size = len(text)
    if not 600 <= size <= 150_000 or GENERATED.search(text[:1500]) or MASK in text or EOS in text:
        return False
    lines, strange = text.count("\n") + 1, sum(not c.isascii() for c in text)
    return strange < size / 100 and sum(map(str.isdigit, text)) < size / 12 and size / lines < 70


def read_sources(packages: list[Package], folder: pathlib.Path, most: int = MOST_OF_PACKAGE) -> list[Source]:
    """Usable modules of the packages' wheels, each text once; those of held-out packages come first.

    Of a package for training, modules of together at most `most` characters, by chance.
    """
    wheels = {hashlib.sha256(path.read_bytes()).hexdigest(): path for path in folder.glob("*.whl")}
    found, seen = [], set()
    for package in sorted(packages, key=lambda package: (not package.held, package.name)):
        part, size = [], 0
        with zipfile.ZipFile(wheels[package.sha256]) as wheel:
            for file in sorted(name for name in wheel.namelist() if name.endswith(".py") and not SKIP.search(name)):
                text = wheel.read(file).decode("utf-8", errors="ignore").replace("\r\n", "\n")
                digest = hashlib.sha256(text.encode()).digest()
                if usable(text) and digest not in seen:
                    seen.add(digest)
                    part.append(Source(package, file, text))
        random.Random(package.name).shuffle(part)
        for source in part:
            size += len(source.text)
            if package.held or size <= most:
                found.append(source)
    return found


def wrap(bpe: tokenizers.Tokenizer) -> PreTrainedTokenizerFast:
    """The tokenizer as transformers loads it."""
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=EOS, pad_token=EOS, mask_token=MASK, model_max_length=4096
    )


def train_tokenizer(texts: list[str], vocabulary: int) -> tokenizers.Tokenizer:
    """Byte-level BPE over the texts; id 0 ends a file, id 1 is the mask that no text holds."""
    bpe, to_bytes = tokenizers.Tokenizer(tokenizers.models.BPE()), pre_tokenizers.ByteLevel(False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(PRETOKENS, "isolated"), to_bytes])
    bpe.decoder = decoders.ByteLevel()
    options = {"initial_alphabet": to_bytes.alphabet(), "special_tokens": [EOS, MASK], "show_progress": False}
    bpe.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(vocab_size=vocabulary, **options))
    return bpe


def encode(sources: list[Source], bpe: tokenizers.Tokenizer, most: int) -> tuple[np.ndarray, list[Source]]:
    """At most `most` ids of whole shuffled files, each with an end token after it, and those files."""
    sources, parts, used, total = random.Random(0).sample(sources, len(sources)), [], [], 0
    for start in range(0, len(sources), 256):
        batch = sources[start : start + 256]
        for source, encoding in zip(batch, bpe.encode_batch([s.text for s in batch]), strict=True):
            ids = np.array([*encoding.ids, 0], np.uint16)
            if total + len(ids) <= most:
                parts.append(ids)
                used.append(source)
                total += len(ids)
    return np.concatenate(parts), used


def cut_prompt(source: Source, bpe: tokenizers.Tokenizer, rng: random.Random) -> str | None:
    """Imports and the head of a top-level definition, up to a line end inside a function of it; None if none fits."""
    try:
        tree = ast.parse(source.text)
    except SyntaxError:
        return None
    lines, fitting = source.text.splitlines(), []
    imports = [line for line in lines if re.fullmatch(r"(import|from) [^(\\]+", line)][-3:]
    for top in tree.body:
        if not isinstance(top, ast.FunctionDef | ast.ClassDef):
            continue
        first = min([top.lineno, *(d.lineno for d in top.decorator_list)]) - 1
        functions = [node for node in ast.walk(top) if isinstance(node, ast.FunctionDef)]
        # The prompt stops before a statement that is not the first of its function.
        stops = sorted(statement.lineno - 1 for function in functions for statement in function.body[1:])
        prompts = [
            "\n".join([*imports, "", "", *lines[first:stop]]).strip() for stop in stops if 3 < stop - first < 40
        ]
        fitting.append([prompt for prompt in prompts if 80 <= len(bpe.encode(prompt).ids) <= 160])
    fitting = [prompts for prompts in fitting if prompts]
    return rng.choice(fitting)[-1] if fitting else None


def cut_prompts(sources: list[Source], bpe: tokenizers.Tokenizer, count: int) -> list[dict[str, str]]:
    """Prompts from held-out files, as evenly over the packages as they allow."""
    rng, by_package = random.Random(0), {}
    for source in rng.sample(sources, len(sources)):
        if (prompt := cut_prompt(source, bpe, rng)) is not None:
            package = source.package
            fields = {"package": package.name, "version": package.version, "licence": package.licence}
            by_package.setdefault(package.name, []).append({**fields, "file": source.file, "prompt": prompt})
    turns = itertools.zip_longest(*(by_package[name] for name in sorted(by_package)))
    return [row for turn in turns for row in turn if row is not None][:count]


def write_data(sources: list[Source], out: pathlib.Path, vocabulary: int, prompts: int) -> dict:
    """Tokenizer, token files, demo prompts, and a manifest of what they hold."""
    out.mkdir(parents=True, exist_ok=True)
    held = [source for source in sources if source.package.held]
    training = [source for source in sources if not source.package.held]
    bpe = train_tokenizer([source.text for source in training], vocabulary)
    bpe.save(str(out / "tokenizer.json"))
    manifest = {"vocabulary": bpe.get_vocab_size()}
    for name, part, most in (("train", training, MOST_TRAINING), ("held", held, MOST_HELD)):
        ids, used = encode(part, bpe, most)
        ids.tofile(out / f"{name}.bin")
        manifest[name] = {
            "tokens": len(ids),
            "files": len(used),
            "bytes": sum(len(source.text.encode()) for source in used),
            "sha256": hashlib.sha256(ids.tobytes()).hexdigest(),
            "packages": dict(
                sorted({f"{s.package.name} {s.package.version}": s.package.licence for s in part}.items())
            ),
        }
    rows = cut_prompts(held, bpe, prompts)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (out / "prompts.jsonl").write_text(text, encoding="utf-8")
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return manifest
