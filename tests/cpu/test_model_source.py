"""What a model's name is resolved to, and what is said when it is not."""

from __future__ import annotations

import json
import logging
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from transformers import CONFIG_MAPPING, dynamic_module_utils

from tilegym_fx import model_source
from tilegym_fx.errors import UnknownModelError
from tilegym_fx.export import build
from tilegym_fx.model_source import resolve_model, shipped_models

OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "tilegym_fx_own"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""
OWN = {
    "model_type": "tilegym_fx_own",
    "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 10,
}


def folder(path: Path, config: Any) -> str:
    text = config if isinstance(config, str) else json.dumps(config)
    (path / "config.json").write_text(text, encoding="utf-8")
    return str(path)


def error_of(name: str, **options: Any) -> str:
    with pytest.raises(UnknownModelError) as caught:
        resolve_model(name, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


class TestTable:
    def test_it_has_the_models_that_everyone_checks(self) -> None:
        assert len(shipped_models()) == 21

    @pytest.mark.parametrize("name", shipped_models())
    def test_each_id_gives_a_model_of_its_type_and_size(self, name: str) -> None:
        source = resolve_model(name)
        assert (source.provenance, source.model_type) == (
            "shipped table",
            shipped_models()[name]["model_type"],
        )
        model = build(source.config)
        assert type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
        assert model.get_input_embeddings().num_embeddings == shipped_models()[name]["vocab_size"]

    def test_fields_reach_the_configuration(self) -> None:
        config = resolve_model("meta-llama/Llama-3.1-8B").config
        assert (config.num_key_value_heads, config.intermediate_size) == (8, 14336)
        assert config.rope_parameters["rope_type"] == "llama3"


class TestModelType:
    def test_a_type_gives_its_default_configuration(self) -> None:
        source = resolve_model("llama")
        assert source.provenance == "model type"
        assert source.config.to_dict() == CONFIG_MAPPING["llama"]().to_dict()

    def test_of_a_composite_model_the_text_part_is_taken(self) -> None:
        assert resolve_model("gemma3").model_type == "gemma3_text"

    @pytest.mark.parametrize("name", ["bert", "t5", "whisper", "distilbert"])
    def test_encoders_and_encoder_decoders_are_taken(self, name: str) -> None:
        assert resolve_model(name).model_type == name

    def test_of_a_flat_encoder_decoder_the_configuration_stays_as_it_is(self) -> None:
        assert resolve_model("bart").config.to_dict() == CONFIG_MAPPING["bart"]().to_dict()

    def test_a_type_without_a_model_class_is_refused(self) -> None:
        assert "siglip_vision_model" in error_of("siglip_vision_projector")

    def test_a_misspelt_type_is_answered_with_the_nearest(self) -> None:
        assert "did you mean `llama`" in error_of("lamma")


class TestFolder:
    def test_it_is_read(self, tmp_path: Path) -> None:
        source = resolve_model(folder(tmp_path, {"model_type": "qwen3", "num_hidden_layers": 3}))
        assert (source.provenance, source.model_type) == ("folder", "qwen3")
        assert source.config.num_hidden_layers == 3

    def test_of_a_composite_model_the_text_part_is_taken(self, tmp_path: Path) -> None:
        config = {"model_type": "gemma3", "text_config": {"num_hidden_layers": 6}}
        source = resolve_model(folder(tmp_path, config))
        assert (source.model_type, source.config.num_hidden_layers) == ("gemma3_text", 6)

    @pytest.mark.parametrize(
        ("said", "dtype"),
        [
            ({"dtype": "float16"}, torch.float16),
            ({"torch_dtype": "float32"}, torch.float32),
            ({}, torch.bfloat16),
            ({"dtype": "int8"}, torch.bfloat16),
            ({"dtype": "float8_e4m3fn"}, torch.bfloat16),
        ],
        ids=str,
    )
    def test_the_dtype_is_the_checkpoints_where_it_can_compute_in_it(
        self, tmp_path: Path, said: dict[str, str], dtype: torch.dtype
    ) -> None:
        assert resolve_model(folder(tmp_path, {"model_type": "llama", **said})).dtype_for() == dtype

    @pytest.mark.parametrize(
        ("whole", "text", "dtype"), [("float16", {}, torch.float16), ("float16", {"dtype": "float32"}, torch.float32)]
    )
    def test_the_dtype_of_the_whole_is_the_text_parts_that_has_none(
        self, tmp_path: Path, whole: str, text: dict[str, str], dtype: torch.dtype
    ) -> None:
        config = {"model_type": "gemma3", "dtype": whole, "text_config": {"num_hidden_layers": 6, **text}}
        assert resolve_model(folder(tmp_path, config)).dtype_for() == dtype

    def test_a_folder_named_like_a_model_type_does_not_hide_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "llama").mkdir()
        monkeypatch.chdir(tmp_path)
        assert resolve_model("llama").provenance == "model type"

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ('{"model_type": ', "no readable config.json"),
            ("[1]", "holds no object|no readable config.json"),
            ({"hidden_size": 8}, "without a model_type"),
            ({"model_type": "lamma"}, "'lamma', which transformers"),
            ({"model_type": "llama", "hidden_size": "wide"}, "is not usable: .*hidden_size"),
            ({"model_type": 3}, "model_type is a int, 3"),
            ({"model_type": "mine", "auto_map": ["AutoConfig"]}, "auto_map is a list"),
            ({"model_type": "llama", "num_attention_heads": 0}, "is not usable: ZeroDivisionError"),
            ("[" * 100_000, "no readable config.json"),
        ],
        ids=["cut", "list", "no type", "unknown type", "wrong field", "type", "map", "no heads", "deep"],
    )
    def test_a_broken_one_is_one_clear_error(self, tmp_path: Path, config: Any, message: str) -> None:
        with pytest.raises(UnknownModelError, match=message):
            resolve_model(folder(tmp_path, config))

    def test_an_empty_one_is_one_clear_error(self, tmp_path: Path) -> None:
        assert "is a folder without a config.json" in error_of(str(tmp_path))

    def test_one_that_is_not_there_is_one_clear_error(self, tmp_path: Path) -> None:
        assert "no folder that is here" in error_of(str(tmp_path / "missing" / "model"))


class TestOwnCode:
    def test_it_is_not_executed_unless_trusted(self, tmp_path: Path) -> None:
        (tmp_path / "own.py").write_text("raise SystemExit('executed')", encoding="utf-8")
        message = error_of(folder(tmp_path, OWN))
        assert "brings code of its own (own.OwnConfig)" in message
        assert "--trust-remote-code" in message

    def test_it_is_used_when_trusted(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
        monkeypatch.syspath_prepend(str(tmp_path / "modules"))
        place = tmp_path / "own_model"
        place.mkdir()
        (place / "own.py").write_text(OWN_CODE, encoding="utf-8")
        source = resolve_model(folder(place, OWN), trust_remote_code=True)
        assert type(source.config).__name__ == "OwnConfig"
        assert type(build(source.config, trust_remote_code=True)).__name__ == "OwnModel"

    def test_broken_code_is_one_clear_error(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
        monkeypatch.syspath_prepend(str(tmp_path / "modules"))
        place = tmp_path / "broken_model"
        place.mkdir()
        (place / "own.py").write_text("class OwnConfig: pass\nraise ValueError('broken')", encoding="utf-8")
        assert "ValueError: broken" in error_of(folder(place, OWN), trust_remote_code=True)


class TestHub:
    def test_without_a_network_an_id_is_one_clear_error(self) -> None:
        assert "the hub cannot be asked (no network)" in error_of("someone/something")

    def test_near_names_are_suggested(self) -> None:
        assert "`meta-llama/Llama-3.1-8B`" in error_of("Llama-3.1-8b")

    @pytest.mark.parametrize("name", ["", "a/b/c", "with space", "../up"])
    def test_what_can_be_no_id_never_asks_the_hub(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(model_source, "_from_hub", lambda *args, **options: pytest.fail("asked"))
        error_of(name)

    def test_a_dead_endpoint_is_noticed_without_retries(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        assert not model_source._reachable(f"http://127.0.0.1:{port}")

    def test_a_live_endpoint_is_noticed(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            assert model_source._reachable(f"http://127.0.0.1:{server.getsockname()[1]}")

    def test_a_configuration_in_the_cache_needs_no_network(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        place = tmp_path / "models--someone--cached"
        (place / "snapshots" / "abc").mkdir(parents=True)
        (place / "refs").mkdir()
        (place / "refs" / "main").write_text("abc", encoding="utf-8")
        folder(place / "snapshots" / "abc", {"model_type": "llama", "num_hidden_layers": 7})
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path))
        source = resolve_model("someone/cached")
        assert (source.provenance, source.config.num_hidden_layers) == ("hub", 7)

    def test_the_log_level_of_the_hub_client_is_given_back(self) -> None:
        logger = logging.getLogger("huggingface_hub")
        before = logger.level
        error_of("someone/something")
        assert logger.level == before
