"""Model cards of drafters, and the way to the Hub.

Everything that can be wrong with a card is found on this machine: it is written, read back and checked before the
first call to the Hub and before any file is uploaded. What is uploaded is one folder, exactly as `save_to_folder`
writes it: configuration, weights, the shim for `trust_remote_code=True`, and the card.
"""

import dataclasses
import math
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from huggingface_hub import EvalResult, HfApi, ModelCard, ModelCardData
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedModel


CARD_FILE = "README.md"
TEMPLATE = Path(__file__).parent / "assets" / "drafter_card.md"
TAGS = ("speculative-decoding", "draft-model", "dspark")
LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]*")


class ReaderVerdict(Protocol):
    """What a card tells about a reader: a `ready_hf.reader_check.ReaderCheck`."""

    @property
    def verdict(self) -> str:
        """One sentence: whether the reader helps, and by which numbers."""
        ...

    def table(self) -> str:
        """The numbers as lines of text."""
        ...


def drafter_card(
    drafter: PreTrainedModel,
    repo_id: str,
    *,
    base_model: str | None,
    license: str | None = None,
    language: str | Sequence[str] | None = None,
    datasets: str | Sequence[str] | None = None,
    tags: str | Sequence[str] | None = None,
    eval_results: Sequence[EvalResult] | None = None,
    measured: str | None = None,
    reader_check: ReaderVerdict | None = None,
) -> ModelCard:
    """The card of a drafter, checked with `check_card`. What is not given, and metrics without a value, are left out.

    Args:
        drafter (`ReadyDrafterModel`): The drafter.
        repo_id (`str`): Where it will be found.
        base_model (`str`, *optional*): Its target on the Hub, whose page will list the drafter.
        license (`str`, *optional*): As the Hub writes it, such as `"apache-2.0"`.
        language (`str` or `list[str]`, *optional*): Language codes.
        datasets (`str` or `list[str]`, *optional*): Training data on the Hub.
        tags (`str` or `list[str]`, *optional*): In addition to the usual ones.
        eval_results (`list[EvalResult]`, *optional*): Metrics; NaN and infinite ones are dropped.
        measured (`str`, *optional*): How they were measured: hardware, dtype, prompts, date.
        reader_check (`ReaderVerdict`, *optional*): Whether reading states helps, as found; without it the card says
            that nobody has checked.

    Raises:
        TypeError: an evaluation result or a reader check that is none.
        ValueError: anything that the Hub would refuse, all at once.
    """
    if reader_check is not None and not callable(getattr(reader_check, "table", None)):
        raise TypeError(f"`reader_check` must be what `check_reader` returns, got {type(reader_check).__name__}")
    config = drafter.config
    results = [result for result in map(_with_plain_value, eval_results or ()) if result is not None]
    own_tags = [*TAGS, *(["ready"] if config.has_reader else [])]
    fields: dict[str, Any] = {
        "base_model": base_model,
        "base_model_relation": "adapter" if base_model else None,
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": own_tags + [tag for tag in _as_list(tags) if tag not in own_tags],
        "license": license or None,
        "language": _as_list(language) or None,
        "datasets": _as_list(datasets) or None,
        "eval_results": results or None,
        "model_name": str(repo_id).rsplit("/", 1)[-1] if results else None,
    }
    card = ModelCard.from_template(
        ModelCardData(**fields),
        template_path=str(TEMPLATE),
        title=str(repo_id).rsplit("/", 1)[-1],
        drafter_id=repo_id,
        target_id=base_model or "path/to/its/target",
        target_name=f"[{base_model}](https://huggingface.co/{base_model})" if base_model else "its target",
        config=config,
        num_parameters=drafter.num_parameters(),
        dtype=str(drafter.dtype).removeprefix("torch."),
        eval_rows=results,
        training_data=fields["datasets"] or (),
        measured=measured,
        reader_check=reader_check,
    )
    check_card(card)
    return card


def check_card(card: ModelCard) -> None:
    """Checks a card without a network: its metadata is read back from the text and looked at field by field.

    `ModelCard.validate` asks the Hub instead. What only the Hub knows is not checked here: whether target and data
    sets exist, and its list of licences.

    Raises:
        ValueError: naming everything that is wrong.
    """
    try:
        data = ModelCard(str(card)).data.to_dict()
    except Exception as error:  # YAML and huggingface_hub raise errors of many types
        raise ValueError(f"the metadata of the model card cannot be read back: {error}") from error
    problems = [
        f"`{name}` must be {wanted!r}, got {data.get(name)!r}"
        for name, wanted in (("library_name", "transformers"), ("pipeline_tag", "text-generation"))
        if data.get(name) != wanted
    ]
    for name in ("base_model", "datasets"):
        problems += [f"`{name}`: {problem}" for problem in map(_repo_id_problem, _as_list(data.get(name))) if problem]
    tags = _as_list(data.get("tags"))
    if not tags or not all(isinstance(tag, str) and tag.strip() and tag.isprintable() for tag in tags):
        problems.append(f"`tags` must be printable words, at least one, got {tags}")
    languages = _as_list(data.get("language"))
    if not all(isinstance(language, str) for language in languages):
        problems.append(f"`language` must be codes such as 'en', got {languages}")
    license = data.get("license")
    if license is not None and not (isinstance(license, str) and LICENSE.fullmatch(license)):
        problems.append(f"`license` must be an identifier such as 'apache-2.0' or 'other', got {license!r}")
    for model in data.get("model-index") or ():
        metrics = [metric for result in model["results"] for metric in result["metrics"]]
        problems += [f"metric {m['type']!r} is {m['value']}" for m in metrics if not _has_value(m["value"])]
    if problems:
        raise ValueError("the model card is not valid: " + "; ".join(problems))


def save_to_folder(drafter: PreTrainedModel, folder: str | os.PathLike, card: ModelCard, **kwargs: Any) -> None:
    """Writes configuration, weights, shim and card: all that a repository of a drafter holds.

    Args:
        drafter (`ReadyDrafterModel`): The drafter.
        folder (`str` or `os.PathLike`): Is made if it does not exist.
        card (`ModelCard`): From `drafter_card`.
        kwargs: For `save_pretrained`.

    Raises:
        ValueError: the card is not valid; nothing is written then.
    """
    check_card(card)
    drafter.save_pretrained(folder, **kwargs)
    (Path(folder) / CARD_FILE).write_text(str(card), encoding="utf-8")


def keep_or_write_card(drafter: PreTrainedModel, folder: str | os.PathLike, repo_id: str, **card_fields: Any) -> None:
    """Writes a card into the folder of a training; a valid one that is there stays if there is nothing to say.

    Args:
        drafter (`ReadyDrafterModel`): The drafter.
        folder (`str` or `os.PathLike`): What a trainer uploads.
        repo_id (`str`): Where it goes.
        card_fields: For `drafter_card`; `base_model` alone says nothing new.

    Raises:
        ValueError: anything that the Hub would refuse.
    """
    path, says_more = Path(folder) / CARD_FILE, any(v for n, v in card_fields.items() if n != "base_model")
    if path.is_file() and not says_more and _is_valid(path.read_text(encoding="utf-8")):
        return
    path.write_text(str(drafter_card(drafter, repo_id, **card_fields)), encoding="utf-8")


def name_on_hub(model: PreTrainedModel) -> str | None:
    """The name under which a model was loaded from the Hub; `None` if it came from a folder, or from nowhere."""
    name = model.name_or_path
    return None if not name or "/" not in name or Path(name).exists() or _repo_id_problem(name) else name


def push_to_hub(
    drafter: PreTrainedModel,
    repo_id: str,
    *,
    base_model: str | None,
    card: ModelCard | None = None,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    commit_description: str | None = None,
    max_shard_size: int | str = "50GB",
    **card_fields: Any,
) -> Any:
    """Uploads a drafter with its card. The card is made and checked first, before any call to the Hub.

    Args:
        drafter (`ReadyDrafterModel`): The drafter.
        repo_id (`str`): `"name"` or `"user/name"`; is made if it does not exist.
        base_model (`str`, *optional*): Its target on the Hub.
        card (`ModelCard`, *optional*): Instead of a generated one.
        private, token, revision, create_pr, commit_message, commit_description, max_shard_size: As in transformers.
        card_fields: For `drafter_card`. If there is nothing to put on a card, not even `base_model`, a card that is
            in the repository already is kept.

    Returns:
        `CommitInfo`: of the upload.

    Raises:
        TypeError: a field that a card does not have.
        ValueError: a name, or something on the card, that the Hub would refuse.
    """
    if problem := _repo_id_problem(repo_id):
        raise ValueError(f"`repo_id`: {problem}")
    fields = {"base_model": base_model, **card_fields}
    nothing_to_say = card is None and not any(value is not None for value in fields.values())
    checked = drafter_card(drafter, repo_id, **fields) if card is None else card
    check_card(checked)

    with tempfile.TemporaryDirectory() as folder:
        save_to_folder(drafter, folder, checked, max_shard_size=max_shard_size)
        api = HfApi(token=token)
        full_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if card is None and full_id != repo_id:  # only the Hub knows whose repository a bare name is
            (Path(folder) / CARD_FILE).write_text(str(drafter_card(drafter, full_id, **fields)), encoding="utf-8")
        if revision is not None and not revision.startswith("refs/pr"):
            api.create_branch(full_id, branch=revision, exist_ok=True)
        keep_card = nothing_to_say and api.file_exists(full_id, CARD_FILE, revision=revision)
        return api.upload_folder(
            repo_id=full_id,
            folder_path=folder,
            commit_message=commit_message or "Upload drafter",
            commit_description=commit_description,
            revision=revision,
            create_pr=create_pr,
            ignore_patterns=[CARD_FILE] if keep_card else None,
        )


def _with_plain_value(result: EvalResult) -> EvalResult | None:
    """The result with a number that YAML can hold, or `None` if it has no value."""
    if not isinstance(result, EvalResult):
        raise TypeError(
            f"`eval_results` must hold huggingface_hub.EvalResult, got {type(result).__name__}: {result!r}"
        )
    value = result.metric_value
    value = value.item() if hasattr(value, "item") else value  # numpy and torch scalars
    return dataclasses.replace(result, metric_value=value) if _has_value(value) else None


def _has_value(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and not math.isfinite(value))


def _is_valid(text: str) -> bool:
    try:
        check_card(ModelCard(text))
    except ValueError:
        return False
    return True


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]


def _repo_id_problem(name: Any) -> str | None:
    """What is wrong with the name of a repository, or `None`."""
    try:
        validate_repo_id(name)
    except ValueError as error:
        return str(error)
    return None if name else "a name is needed"
