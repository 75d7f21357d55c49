"""Compiling kernels without a GPU: assumptions, architectures, errors, and the child process."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Annotated

import cuda.tile as ct
import pytest
import torch
from cuda.tile import compilation

from tilegym_fx.compile import ARCHITECTURES, CompileError, compile_kernel, describe, signature
from tilegym_fx.inventory.code import load_file

ELF = b"\x7fELF"


@ct.kernel
def copy_kernel(x, out, scale, TILE: ct.Constant[int]):
    place = ct.bid(0)
    ct.store(out, (place,), ct.astype(ct.load(x, (place,), (TILE,)) * scale, out.dtype))


@ct.kernel
def wrong_kernel(x, out):
    ct.store(out, (0,), ct.load(x, (0,), (3,)))


@ct.kernel(occupancy=ct.ByTarget(sm_90=4, default=1), num_ctas=1)
def hinted_kernel(x, out):
    ct.store(out, (0,), ct.load(x, (0,), (16,)))


@ct.kernel
def annotated_kernel(x: Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(-1,))], n: ct.ScalarInt64, flag):
    ct.store(x, (0, 0), ct.zeros((1, x.shape[1]), x.dtype))


def args(dtype=torch.bfloat16, device="cpu"):
    return torch.empty(64, dtype=dtype, device=device), torch.empty(64, dtype=dtype, device=device), 0.5, 16


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_kernel_compiles_for_every_architecture(arch):
    assert compile_kernel(copy_kernel, args(), arch).startswith(ELF)


def test_meta_tensors_describe_a_launch_too():
    assert describe(copy_kernel, args(device="meta")) == describe(copy_kernel, args())
    assert compile_kernel(copy_kernel, args(device="meta"), "sm_90") == compile_kernel(copy_kernel, args(), "sm_90")


def test_assumptions_follow_lengths_strides_and_alignment():
    memory = torch.empty(32, 64, dtype=torch.bfloat16)
    first, second = describe(wrong_kernel, (memory[:, :32], memory[1:, 1:]))
    assert (first["stride_constant"], first["stride_divisible_by"]) == ([None, 1], [8, 1])
    assert (first["base_addr_divisible_by"], second["base_addr_divisible_by"]) == (16, 1)
    assert (first["shape_divisible_by"], second["shape_divisible_by"]) == ([16, 16], [1, 1])
    odd, expanded = describe(wrong_kernel, (torch.empty(8, 7)[:, :4], torch.empty(1, 4).expand(8, 4)))
    assert odd["stride_divisible_by"] == [1, 1]
    assert (odd["may_alias_internally"], expanded["may_alias_internally"]) == (False, True)
    row, _ = describe(wrong_kernel, (memory[:1], memory))
    assert row["shape_constant"] == [1, None]


#: Part of a kernel's name on an H200 -> dtype, shape and stride of the argument that it speaks of.
SEEN = {
    "A2bf16_1s1v8l0_2i16t1_p16": (torch.bfloat16, (1, 4096), (4096, 1)),
    "A2bf16_1v8l0_2t1_3i16_p16": (torch.bfloat16, (4096, 4096), (4096, 1)),
    "A2bf16_1v8l0_2i16t1_p16": (torch.bfloat16, (6, 2048), (2048, 1)),
    "A3f32_3v4l0_4t1_5i16_p16": (torch.float32, (32, 7, 16), (112, 16, 1)),
    "A4u8_7s1l0_8t1_p16": (torch.uint8, (1, 1, 1, 2049), (2049, 2049, 2049, 1)),
    "A4u8_2s1_3v16_7l0_8t1_p16": (torch.uint8, (2, 1, 12, 12), (144, 144, 12, 1)),
    "A3bf16_2s1_3v8l0_4i16t1_p16i": (torch.bfloat16, (12, 1, 4096), (0, 4096, 1)),
    "A3bf16_3v8l0_4i16t1_p16i": (torch.bfloat16, (12, 3, 4096), (8, 4096, 1)),
    "A3bf16_3s1_4i16_7t1_p16": (torch.bfloat16, (1, 1, 4096), (1, 1, 1)),
    "A3bf16_1v8_2i16_3l0_4t1_p16": (torch.bfloat16, (12, 32, 20), (640, 20, 1)),
    "A3bf16_3v8_4i16_7l0_p16": (torch.bfloat16, (12, 3, 4096), (24576, 8192, 2)),
    "A1i64_1v2l0_p16": (torch.int64, (2,), (12,)),
}


@pytest.mark.parametrize("name", SEEN)
def test_a_description_is_what_a_launch_on_a_gpu_assumed(name):
    dtype, shape, stride = SEEN[name]
    array = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    made = signature(describe(wrong_kernel, (array, array))).with_mangled_symbol("kernel").symbol
    assert made.partition("_K")[2].partition("_")[2] == f"{name}_{name}"


def test_annotations_decide_what_is_constant():
    array, wide, flag = describe(annotated_kernel, (torch.empty(2, 64), 1, True))
    assert array["shape_constant"] == [None, 64]
    assert (wide, flag) == ({"scalar": "int64"}, {"scalar": "bool_"})
    assert describe(copy_kernel, args())[2:] == [{"scalar": "float32"}, {"constant": 16}]
    assert compile_kernel(annotated_kernel, (torch.empty(2, 64), 1, True), "sm_90").startswith(ELF)


def test_a_description_survives_json_and_makes_cutile_s_signature():
    parameters = json.loads(json.dumps(describe(copy_kernel, args())))
    made = signature(parameters)
    assert isinstance(made, compilation.KernelSignature)
    assert made.parameters[0].dtype == ct.bfloat16
    assert made.parameters[3] == compilation.ConstantConstraint(16)


def test_a_kernel_error_is_one_line_with_the_place():
    with pytest.raises(CompileError) as caught:
        compile_kernel(wrong_kernel, (torch.empty(64), torch.empty(64)), "sm_90")
    text = str(caught.value)
    assert "kernel wrong_kernel (test_compile.py:" in text
    assert "not a power of two" in text
    assert "\n" not in text


def test_an_unknown_architecture_is_refused_with_the_compiler_s_words():
    with pytest.raises(CompileError, match=r"for sm_33: Return code 1 .*sm_33"):
        compile_kernel(copy_kernel, args(), "sm_33")


def test_wrong_arguments_are_refused_before_compiling():
    with pytest.raises(CompileError, match="takes 4 arguments, but got 2"):
        compile_kernel(copy_kernel, args()[:2], "sm_90")
    with pytest.raises(CompileError, match="argument 'scale' is a NoneType"):
        compile_kernel(copy_kernel, (*args()[:2], None, 16), "sm_90")


@pytest.mark.parametrize(("code", "advice"), [(5, "Unset CUDA_HOME and CUDA_PATH"), (1, "of one version")])
def test_a_failure_of_the_compiler_says_what_to_check(monkeypatch, code, advice):
    def fail(*_, **__):
        raise ct.TileCompilerExecutionError(code, "error: failed", ct._exception.Loc.unknown(), "", None)

    monkeypatch.setattr(compilation, "export_kernel", fail)
    with pytest.raises(CompileError, match=f"for sm_90: Return code {code} error: failed.*{advice}"):
        compile_kernel(copy_kernel, args(), "sm_90")


def test_a_missing_compiler_says_how_to_install_it(monkeypatch):
    def fail(*_, **__):
        raise FileNotFoundError("'tileiras' compiler not found")

    monkeypatch.setattr(compilation, "export_kernel", fail)
    with pytest.raises(CompileError, match=r"pip install \"cuda-tile\[tileiras\]\""):
        compile_kernel(copy_kernel, args(), "sm_90")


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_kernel_s_file_has_to_be_there_when_it_is_first_compiled(tmp_path, is_gone):
    file = tmp_path / "kernels" / "lone.py"
    file.parent.mkdir()
    file.write_text(
        "import cuda.tile as ct\n\n\n@ct.kernel\ndef lone_kernel(x, out):\n"
        "    ct.store(out, (ct.bid(0),), ct.load(x, (ct.bid(0),), (16,)))\n"
    )
    kernel = load_file(tmp_path, file).lone_kernel
    if not is_gone:
        assert compile_kernel(kernel, args()[:2], "sm_90").startswith(ELF)
        return
    file.unlink()
    with pytest.raises(CompileError, match=r"lone_kernel does not compile for sm_90: .*Keep the kernel's file"):
        compile_kernel(kernel, args()[:2], "sm_90")


def test_the_time_limit_holds_in_this_process(monkeypatch):
    monkeypatch.setattr(ct._cext.default_tile_context.config, "cache_dir", None)
    with pytest.raises(CompileError, match=r"copy_kernel for sm_90 took longer than 0\.001 s"):
        compile_kernel(copy_kernel, args(), "sm_90", timeout=0.001)
    assert compile_kernel(copy_kernel, args(), "sm_90").startswith(ELF)


def test_a_child_process_compiles_the_same_code():
    kernel = copy_kernel.replace_hints(occupancy=2)
    assert compile_kernel(kernel, args(), "sm_90", isolated=True) == compile_kernel(kernel, args(), "sm_90")


def test_a_child_process_passes_errors_on():
    with pytest.raises(CompileError, match=r"kernel wrong_kernel \(test_compile\.py:\d+\).*not a power of two"):
        compile_kernel(wrong_kernel, (torch.empty(64), torch.empty(64)), "sm_90", isolated=True)


def test_a_child_process_is_stopped_at_the_time_limit():
    with pytest.raises(CompileError, match=r"took longer than 0\.05 s"):
        compile_kernel(copy_kernel, args(), "sm_90", isolated=True, timeout=0.05)


def test_a_child_process_that_dies_is_one_error(monkeypatch):
    started = subprocess.Popen

    def die(command, **options):
        return started([sys.executable, "-c", "import os; os.kill(os.getpid(), 11)"], **options)

    monkeypatch.setattr(subprocess, "Popen", die)
    with pytest.raises(CompileError, match=r"compiling kernel copy_kernel for sm_90 ended with status -11"):
        compile_kernel(copy_kernel, args(), "sm_90", isolated=True)


def test_a_kernel_inside_a_function_cannot_be_compiled_in_a_child():
    @ct.kernel
    def local_kernel(x):
        ct.store(x, (0,), ct.zeros((16,), x.dtype))

    assert compile_kernel(local_kernel, (torch.empty(64),), "sm_90").startswith(ELF)
    with pytest.raises(CompileError, match="not at the top of a file"):
        compile_kernel(local_kernel, (torch.empty(64),), "sm_90", isolated=True)


def test_hints_by_target_reach_the_child():
    from tilegym_fx.compile.child import hints

    assert hints(hinted_kernel, "sm_90") == {"num_ctas": 1, "occupancy": 4, "opt_level": 3}
    assert hints(hinted_kernel, "sm_80")["occupancy"] == 1
