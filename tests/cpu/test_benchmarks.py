"""The benchmark scripts: each can be imported and explains itself; what other libraries' kernels stand for."""

from __future__ import annotations

import importlib
import inspect
import math
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from repository import ROOT

from tilegym_fx import inventory

SCRIPTS = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py"))


@pytest.fixture(autouse=True)
def _beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


def script(name: str) -> Any:
    return importlib.import_module(name)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_can_be_imported(name: str) -> None:
    module = script(name)
    assert Path(inspect.getfile(module)).parent == ROOT / "benchmarks"
    assert module.__doc__


class TestPeers:
    def installed(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> ModuleType:
        peers: ModuleType = script("peers")
        monkeypatch.setattr(peers, "find_spec", lambda name: name if name in names else None)
        return peers

    def test_each_stands_for_an_op_and_takes_its_arguments(self, monkeypatch: pytest.MonkeyPatch) -> None:
        peers = self.installed(monkeypatch, "liger_kernel", "tilegym")
        ops = {op for runs in peers._PEERS.values() for op in runs}
        definitions = inventory.load().definitions
        assert ops <= set(definitions)
        for op in ops:
            wanted = list(definitions[op].inputs)
            for name, run in peers.peers_of(op).items():
                taken = list(inspect.signature(run).parameters)
                assert [t for t in taken if t != "mask"] == wanted or len(taken) == len(wanted), (op, name)

    def test_what_is_not_installed_is_not_among_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert set(self.installed(monkeypatch, "liger_kernel").peers_of("rms_norm")) == {"liger"}
        assert set(self.installed(monkeypatch, "tilegym").peers_of("rms_norm")) == {"tilegym"}
        assert self.installed(monkeypatch).peers_of("rms_norm") == {}
        assert self.installed(monkeypatch, "liger_kernel").peers_of("linear") == {}


class TestNormTable:
    @pytest.fixture
    def bench(self) -> Any:
        return script("bench_norm_activation_rope")

    @pytest.fixture
    def case(self, bench: Any) -> Any:
        def make() -> tuple[Any, ...]:
            return torch.randn(4, 32, dtype=torch.bfloat16), torch.randn(32, dtype=torch.bfloat16), 1e-6

        return bench.Case("rms_norm", "4 x 32", make)

    def test_a_peer_is_timed_where_it_is_right(self, bench: Any, case: Any) -> None:
        reference = inventory.load().reference("rms_norm")
        assert bench.peer_time(case, "peer", reference, reference, lambda _: 7.0) == 7.0

    def test_a_peer_that_is_wrong_or_refuses_is_left_out(
        self, bench: Any, case: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        reference = inventory.load().reference("rms_norm")

        def refusing(*_: Any) -> Any:
            raise NotImplementedError("no such shape\nand more")

        for peer in (refusing, lambda x, weight, eps: x):
            assert bench.peer_time(case, "peer", peer, reference, lambda _: 7.0) is None
        said = capsys.readouterr().out.splitlines()
        assert said[0] == "    peer is left out of rms_norm 4 x 32: NotImplementedError: no such shape"
        assert "relative error" in said[1]

    def test_the_best_of_all_others_counts(self, bench: Any) -> None:
        row = bench.Row("op", "shape", 2.0, 8.0, math.nan, 0.0, 0.0, 0.0, peers={"liger": 3.0})
        assert row.ahead == 1.5
        assert "liger 3.0" in bench.line(row)


class TestProductTable:
    def test_a_vendor_is_timed_where_it_is_right(self, capsys: pytest.CaptureFixture[str]) -> None:
        bench = script("bench_gemm_attention")
        x, weight = torch.randn(3, 16), torch.randn(8, 16)
        right = x @ weight.t()
        assert bench.is_right("vendor", lambda x, w: x @ w.t(), (x, weight), right)
        assert not bench.is_right("vendor", lambda x, w: 2 * x @ w.t(), (x, weight), right)
        assert not bench.is_right("vendor", lambda x: x, (x, weight), right)
        assert len(capsys.readouterr().out.splitlines()) == 2

    def test_the_summary_takes_the_best_vendor_of_each_case(self) -> None:
        times = [{"ours": 2.0, "vendor a": 4.0, "vendor b": 2.0, "tile=1": 1.0}, {"ours": 1.0, "vendor a": 4.0}]
        rows = [{"group": "gemv", "microseconds": found} for found in times]
        assert list(script("bench_gemm_attention").summary(rows)) == [
            "gemv: 2.00x the best vendor (geometric mean of 2), worst 1.00"
        ]

    def test_kernels_of_others_are_called_with_the_scale(self) -> None:
        found = script("bench_gemm_attention").with_scale({"peer": lambda q, scale: (q, scale)}, 0.5)
        assert found["peer"](1) == (1, 0.5)
        assert SimpleNamespace(**found).peer.keywords == {"scale": 0.5}
