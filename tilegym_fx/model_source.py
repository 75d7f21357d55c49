"""Which model the user means: a name brought to a configuration of a language model.

A name is looked for in the shipped table, then as a folder, then as a transformers model type, then on the
hub. Only configurations are read, never weights, and code that comes with one only when the caller trusts it.
"""

from __future__ import annotations

import json
import logging
import re
import socket
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast
from urllib.parse import urlsplit

from tilegym_fx.errors import UnknownModelError, did_you_mean

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

Provenance = Literal["shipped table", "folder", "model type", "hub"]

_CONNECT_SECONDS = 3.0
_MAX_MESSAGE = 240
_OFFLINE = (
    "Ask again with a network, or give a local folder with its config.json, a transformers model type or an id of the"
    " shipped table"
)
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_CAUSAL_CLASS = "AutoModelForCausalLM"
#: What making a configuration object out of somebody's JSON can raise.
_BAD_CONFIG = (ArithmeticError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError)


#: What `--dtype` takes, and what it says of itself; :meth:`ModelSource.dtype_for` is what it comes to.
DTYPES = ("bfloat16", "float16", "float32")
DTYPE_HELP = "of the weights (default: what the configuration says, or bfloat16)"


@dataclass(frozen=True)
class ModelSource:
    """A configuration and where it came from.

    Attributes:
        name: What the user asked for.
        provenance: Where it was found.
        config: The configuration of the language model; the text part where the model has several.
        trust_remote_code: Whether code that comes with the configuration may be executed.
    """

    name: str
    provenance: Provenance
    config: PreTrainedConfig
    trust_remote_code: bool = False

    @property
    def model_type(self) -> str:
        return str(self.config.model_type)

    def dtype_for(self, asked: str | torch.dtype | None = None) -> torch.dtype:
        """What its parameters are built in: the dtype that is asked for, by name or itself.

        Else that of its checkpoint; bfloat16 where that says nothing, or has none to compute in.
        """
        import torch

        if asked is not None:
            return asked if isinstance(asked, torch.dtype) else cast("torch.dtype", getattr(torch, asked))
        said = getattr(self.config, "dtype", None)
        if isinstance(said, torch.dtype) and said.is_floating_point and said.itemsize > 1:
            return said
        return torch.bfloat16

    @property
    def quantised(self) -> str | None:
        """How its weights are quantised (``"gptq"``), which a model built from a configuration alone is not."""
        if self.provenance == "shipped table":
            return _QUANTISED.get(self.name)
        asked = getattr(self.config, "quantization_config", None)
        fields = asked if isinstance(asked, Mapping) else vars(asked) if asked else {}
        return str(fields.get("quant_method", "in some way")) if asked else None


#: Ids of the shipped table whose checkpoints are quantised, which no field of their models' configurations says.
_QUANTISED = {"openai/gpt-oss-20b": "mxfp4"}


@cache
def shipped_models() -> Mapping[str, Mapping[str, Any]]:
    """The shipped table: id -> the fields of its configuration, ``model_type`` among them."""
    text = resources.files("tilegym_fx").joinpath("models.json").read_text(encoding="utf-8")
    table: dict[str, dict[str, Any]] = json.loads(text)
    return table


def resolve_model(name: str, *, trust_remote_code: bool = False) -> ModelSource:
    """The configuration that ``name`` stands for.

    Args:
        name: An id of the shipped table, a folder with a config.json, a transformers model type, or a hub id.
        trust_remote_code: Allow code that comes with a folder or a hub repository to be executed.

    Raises:
        UnknownModelError: Nothing of that name is found, it needs code that is not trusted, its configuration
            is broken, or transformers has no model for it.
    """
    from transformers import CONFIG_MAPPING

    if name in shipped_models():
        return ModelSource(name, "shipped table", _from_table(name))
    folder = Path(name).expanduser()
    if (folder / "config.json").is_file():
        config = _read(str(folder), name, trust=trust_remote_code, local=True)
        return ModelSource(name, "folder", config, trust_remote_code)
    if name in CONFIG_MAPPING:
        return ModelSource(name, "model type", _from_fields(name, {"model_type": name}))
    if folder.is_dir() or not _HUB_ID.fullmatch(name):
        raise _unknown(
            name,
            "is a folder without a config.json" if folder.is_dir() else "is no id and no folder that is here",
        )
    config = _from_hub(name, trust=trust_remote_code)
    return ModelSource(name, "hub", config, trust_remote_code)


def hush_models() -> None:
    """Keep transformers' warnings about single models off stderr, in this process."""
    import transformers

    transformers.logging.set_verbosity_error()


def causal_model_types() -> tuple[str, ...]:
    """Every model type for which transformers has a causal language model class."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))


def configuration(model_type: str, fields: Mapping[str, Any]) -> PreTrainedConfig:
    """The configuration of a transformers model type with some of its fields given.

    Raises:
        UnknownModelError: There is no such type, or the fields are refused.
    """
    return _from_fields(model_type, {**fields, "model_type": model_type})


def _from_table(name: str) -> PreTrainedConfig:
    return _from_fields(name, shipped_models()[name])


def _from_fields(name: str, fields: Mapping[str, Any]) -> PreTrainedConfig:
    from transformers import CONFIG_MAPPING

    rest = {key: value for key, value in fields.items() if key != "model_type"}
    model_type = fields["model_type"]
    if model_type not in CONFIG_MAPPING:
        raise _unknown_type(name, model_type)
    with _config_errors(name):
        config = CONFIG_MAPPING[model_type](**rest)
    return _language_config(name, config)


def _from_hub(name: str, *, trust: bool) -> PreTrainedConfig:
    from huggingface_hub import constants
    from transformers import PreTrainedConfig

    try:
        PreTrainedConfig.get_config_dict(name, local_files_only=True)
    except OSError:
        if constants.HF_HUB_OFFLINE or not _reachable(constants.ENDPOINT):
            raise _unknown(name, "is not known here, and the hub cannot be asked (no network)", _OFFLINE) from None
        return _read(name, name, trust=trust, local=False)
    return _read(name, name, trust=trust, local=True)


def _read(place: str, name: str, *, trust: bool, local: bool) -> PreTrainedConfig:
    """The configuration in a folder, a hub cache (``local``) or on the hub."""
    from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

    try:
        with _quiet_hub():
            fields, _ = PreTrainedConfig.get_config_dict(place, local_files_only=local)
    except (OSError, RecursionError, TypeError, ValueError) as error:
        raise _unknown(name, f"has no readable config.json: {_one_line(error)}") from None
    if not isinstance(fields, dict):
        raise _unknown(name, "has a config.json that holds no object")
    model_type, code = fields.get("model_type"), fields.get("auto_map") or {}
    for key, value, kind in (("model_type", model_type or "", str), ("auto_map", code, dict)):
        if not isinstance(value, kind):
            raise _unknown(name, f"has a config.json whose {key} is a {type(value).__name__}, {value!r:.40}")
    if model_type not in CONFIG_MAPPING and "AutoConfig" not in code:
        raise _unknown_type(name, model_type)
    if model_type not in CONFIG_MAPPING and not trust:
        raise UnknownModelError(
            f"{name!r} brings code of its own ({code['AutoConfig']})",
            advice="Read that code and, if you trust it, pass --trust-remote-code (trust_remote_code=True)",
        )
    with _config_errors(name), _quiet_hub():
        config = AutoConfig.from_pretrained(place, trust_remote_code=trust, local_files_only=local)
    return _language_config(name, config, trust=trust)


def _language_config(name: str, config: PreTrainedConfig, *, trust: bool = False) -> PreTrainedConfig:
    """The part of a configuration for which transformers has a model, the text part first.

    A causal language model is preferred to an encoder-decoder, and both to a bare model.
    """
    import transformers
    from transformers.models.auto import modeling_auto as auto

    if trust and _CAUSAL_CLASS in (getattr(config, "auto_map", None) or {}):
        return config
    with _config_errors(name):
        text = config.get_text_config(decoder=True)
    # Of a flat encoder-decoder the text part is a copy under changed names, which its own classes do not read.
    parts = (config,) if text.model_type == config.model_type else (text, config)
    for table in (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_MAPPING_NAMES,
    ):
        for candidate in parts:
            if candidate.model_type in table:
                if candidate.dtype is None and config.dtype is not None:  # said once, for all parts
                    candidate.dtype = config.dtype
                return candidate
    raise UnknownModelError(
        f"{name!r} has the model type {config.model_type!r}, for which transformers"
        f" {transformers.__version__} has no model class",
        advice="Give a language model, or the text model of this one",
    )


@contextmanager
def _config_errors(name: str) -> Iterator[None]:
    """Turns whatever a configuration class raises into one sentence."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except (*_BAD_CONFIG, StrictDataclassError) as error:
        raise UnknownModelError(
            f"the configuration of {name!r} is not usable: {type(error).__name__}: {_one_line(error)}",
            advice="Correct its config.json, or use the version of transformers that it was written with",
        ) from error


@contextmanager
def _quiet_hub() -> Iterator[None]:
    """Keeps the hub client's retry notices off stderr: the one error that we raise says it all."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _reachable(endpoint: str) -> bool:
    """Whether the hub answers at all; the hub client itself would retry for half a minute."""
    if urllib.request.getproxies():
        return True
    url = urlsplit(endpoint)
    address = (url.hostname or "", url.port or (80 if url.scheme == "http" else 443))
    try:
        with socket.create_connection(address, timeout=_CONNECT_SECONDS):
            return True
    except OSError:
        return False


def _unknown(name: str, problem: str, advice: str = UnknownModelError.advice) -> UnknownModelError:
    return UnknownModelError(f"{name!r} {problem}", advice=f"{advice}{_nearest(name)}")


def _unknown_type(name: str, model_type: str | None) -> UnknownModelError:
    import transformers

    if not model_type:
        return _unknown(name, "has a config.json without a model_type")
    problem = f"has the model type {model_type!r}, which transformers {transformers.__version__} does not know"
    return UnknownModelError(f"{name!r} {problem}", advice=f"Upgrade transformers{_nearest(model_type)}")


def _nearest(name: str) -> str:
    """The most similar ids, with or without their owners, and model types, as the end of an advice."""
    from transformers import CONFIG_MAPPING

    without_owner = {model_id.split("/")[-1]: model_id for model_id in shipped_models()}
    return did_you_mean(name, (*CONFIG_MAPPING, *shipped_models(), *without_owner), without_owner)


def _one_line(error: BaseException) -> str:
    text = " ".join((str(error).strip() or repr(error)).split()).rstrip(". ")
    return text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]}..."
