"""``kernelize(model)``: this live model, in place, undoable.

plan -> emit -> import the emitted text -> bind it to this instance -> verify. What is tested is what is emitted, and
what runs: there is no other path.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from . import apply as binding
from . import plan_cache
from . import verify as judge
from .alone import alone
from .errors import ApplyError, ExportError, MatchError, UsageError, VerifyError
from .export import MODEL_ERRORS, cache_of, copies
from .export.trace import describe
from .fingerprint import NoFingerprintError
from .folder_form import emitted_path, make_emitted_folder, refuse_foreign
from .judging import UNCHECKED, Checked, Rewriting, Run, judged, put_unjudged, wider_run
from .live_model import BATCH, Call, is_meta, model_device, names_in, split_inputs
from .live_report import Report
from .ops import lower_as_calls, tell_of_references, what_runs
from .rehearsal import compilers, language_calls

Model = TypeVar("Model", bound=nn.Module)

_OLD_PYTHON = (
    "Python before 3.11 does not tell which expression an instruction belongs to, so no source can be rewritten; "
    'torch.compile(model, backend="tilegym_fx") uses the same kernels'
)
#: Modules that are named one by one where a model runs an emitted file.
_SHOWN = 5
_reports: WeakKeyDictionary[nn.Module, Report] = WeakKeyDictionary()
#: Models that kernelize had to leave as they were -> why.
_left: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def kernelize(model: Model, *, inputs: Any = None, only: Collection[str] | None = None,
              skip: Collection[str] | None = None, strict: bool = False, verify: bool = True,
              compile: bool | Mapping[str, Any] | None = None, emit: str | Path | None = None) -> Model:  # fmt: skip
    """Put kernels where this model's own code computes what they compute.

    Only this instance changes: its modules become instances of emitted subclasses of their classes. Nothing of
    transformers is touched, state dicts keep their keys, and :func:`restore` puts everything back. A second call
    starts from the model as it is by then: adapters, hooks and other dtypes are taken into account.

    Args:
        model: A causal language model of transformers, or any module together with ``inputs``.
        inputs: Sample inputs of a module that is none: a tensor, a tuple of positional or a dict of keyword ones.
        only: Use these Definitions only.
        skip: Leave these Definitions out.
        strict: Raise where nothing matches, instead of warning and returning the model as it is.
        verify: Compare the outputs with the original's before returning.
        compile: ``True``, or keyword arguments of ``torch.compile``, to compile the result in place.
        emit: A folder or file to write ``modeling_<model>.py`` to, the very text that is applied.

    Returns:
        The same model.

    Raises:
        ExportError: With ``strict``, if the model cannot be captured, or does not run.
        MatchError: If an option names no Definition; with ``strict``, if nothing matches.
        UsageError: If ``model`` is no module or another thread is running it, or if an option is nothing that can be
            used.
        VerifyError: If an output differs by more than rounding, or the result does not run; the model is put back.
    """
    _require_module(model)
    _require_flags(strict=strict, verify=verify)
    only, skip = names_in("only", only), names_in("skip", skip)
    compile_options = _compile_options(compile) if compile else None
    tell_of_references(model_device(model))
    if sys.version_info < (3, 11):
        return _unchanged(model, _OLD_PYTHON, strict, MatchError(_OLD_PYTHON))
    with alone(model):
        restore(model)
        inner = own_model(model)
        try:
            report, checked = _planned_and_applied(inner, inputs, only, skip or (), verify, emit)
        except ExportError as error:
            return _unchanged(model, str(error), strict, error)
    if not report.text:
        return _unchanged(model, _why_nothing(report), strict, MatchError(_why_nothing(report)))
    _reports[model] = _reports[inner] = report.with_checks(checked.checks, checked.no_wider, checked.places)
    lower_as_calls()  # whoever compiles the model later, and however
    if compile_options is not None:
        model.compile(**compile_options)
    return model


def _refuse_wrong_inputs(model: nn.Module, inputs: Any) -> None:
    """What cannot be captured may be called with the wrong things.

    Raises:
        ExportError: If the model itself does not run with these inputs.
    """
    if inputs is None or is_meta(model):
        return
    args, kwargs = copies(split_inputs(inputs))
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    except MODEL_ERRORS as problem:
        raise ExportError(f"{type(model).__name__} does not run with these inputs: {describe(problem)}",
                          advice="Give what it is called with: a tensor, a tuple of arguments or a dict of named ones"
                          ) from problem  # fmt: skip


def _planned_and_applied(
    model: nn.Module, inputs: Any, only: Collection[str] | None, skip: Collection[str], verify: bool,
    emit: str | Path | None,
) -> tuple[Report, Checked]:  # fmt: skip
    """What an earlier start found, where it is right; else a search, whose result is kept once it is verified."""
    kept_in, why_not = _kept_place(model, only, skip) if inputs is None else (None, "")
    if kept_in is not None and (found := _kept_and_applied(model, kept_in, verify, emit)) is not None:
        return found
    report, checked = _searched_and_applied(model, inputs, only, skip, verify, emit)
    if kept_in is not None and _is_worth_keeping(report, checked):
        why_not = plan_cache.keep(kept_in, report)
    return replace(report, not_kept=why_not), checked


def _kept_place(model: nn.Module, only: Collection[str] | None, skip: Collection[str]) -> tuple[Path | None, str]:
    """Where a plan is kept, or why it cannot be."""
    try:
        return plan_cache.place_of(model, only, skip), ""
    except NoFingerprintError as why:
        return None, str(why)


def _kept_and_applied(
    model: nn.Module, kept_in: Path, verify: bool, emit: str | Path | None
) -> tuple[Report, Checked] | None:
    """What an earlier start found; None where there is nothing, or nothing that is right."""
    if (known := plan_cache.read(kept_in)) is None:
        return None
    _save(known.text, emit, model)
    try:
        return known, _apply(model, known, None, verify)
    except judge.MemoryVerifyError:
        raise
    except (ApplyError, VerifyError):
        plan_cache.forget(kept_in)
    return None


def _is_worth_keeping(report: Report, checked: Checked) -> bool:
    """Only what was verified, and was found in every call: what could not be captured now perhaps can be next time."""
    return not report.problems and bool(checked.checks) and all(check.passed for check in checked.checks)


def _searched_and_applied(
    model: nn.Module, inputs: Any, only: Collection[str] | None, skip: Collection[str], verify: bool,
    emit: str | Path | None,
) -> tuple[Report, Checked]:  # fmt: skip
    """Where the first layers stood for all and the result is wrong, all are looked at before anybody is told."""
    from .planner import plan_source_form  # what searches is imported by those alone who search: most starts do not

    why_whole = ""
    while True:
        try:
            _, report = plan_source_form(model, inputs=inputs, only=only, skip=skip, whole=why_whole)
        except ExportError:
            _refuse_wrong_inputs(model, inputs)
            raise
        _save(report.text, emit, model)
        try:
            return report, _apply(model, report, inputs, verify)
        except VerifyError as problem:
            if not report.copied or isinstance(problem, judge.MemoryVerifyError):
                raise
            why_whole = problem.what


def _compile_options(compile: Any) -> dict[str, Any]:
    """Keyword arguments of ``torch.compile`` that it takes: tried on another module before anything is done.

    Raises:
        UsageError: If it does not.
    """
    try:
        options = {} if compile is True else dict(compile)
        torch.compile(nn.Identity(), **options)
    except MODEL_ERRORS as problem:
        raise UsageError(f"compile={compile!r} is nothing that torch.compile takes: {describe(problem)}",
                         advice="Give True, or a dict of keyword arguments of torch.compile") from problem  # fmt: skip
    return options


def _save(text: str, emit: str | Path | None, model: nn.Module) -> None:
    if not text or emit is None:
        return
    try:
        path = emitted_path(emit, model)
        make_emitted_folder(emit)
        refuse_foreign(path)
        binding.save(text, path)
    except (OSError, TypeError) as problem:
        raise UsageError(f"emit={emit!r} cannot be written: {problem}",
                         advice="Give a folder, or a file in one that is there") from problem  # fmt: skip


def _require_module(model: Any) -> None:
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise UsageError(f"{what} is no module with Python code", advice="Give an instance of an nn.Module")


def _apply(model: nn.Module, report: Report, inputs: Any, verify: bool) -> Checked:
    if not report.text:
        return UNCHECKED
    module = binding.load(report.text)
    used = {written.match.definition for written in report.written}
    rewriting = Rewriting(
        model, used, lambda: binding.apply(module, model), lambda: binding.restore(model), report.chooses
    )
    if not verify or is_meta(model):
        return put_unjudged(rewriting)
    with compilers(model, report.text) as compile_kernels:
        prepared = replace(rewriting, prepare=lambda: compile_kernels(_calls(model, inputs)))
        return judged(prepared, _runner(model, inputs))


def _runner(model: nn.Module, inputs: Any) -> Run:
    if inputs is not None:
        args, kwargs = split_inputs(inputs)
        return lambda m, **options: judge.run_module(m, *_as_judged(m, args, kwargs), **options)
    sample = judge.sample_inputs(model, batch=BATCH)
    return lambda m, **options: judge.run_language_model(m, sample, _cache_of, **options)


def _calls(model: nn.Module, inputs: Any) -> list[Callable[[nn.Module], object]]:
    """What `_runner` makes a model do, and more of the kind, to be made without memory."""
    if inputs is None:
        return [*language_calls(model, judge.sample_inputs(model, batch=BATCH)["input_ids"], _cache_of)]
    args, kwargs = split_inputs(inputs)

    def call(model: nn.Module) -> object:
        own_args, own_kwargs = copies((args, kwargs))
        return model(*own_args, **own_kwargs)

    return [call]


def _cache_of(model: nn.Module, results: Any) -> dict[str, Any] | None:
    try:
        name, cache = cache_of(model, results)
    except ExportError:
        return None
    return {name: cache}


def wider_outputs(model: nn.Module, run: judge.Call) -> judge.Outputs | None:
    """A run of the model in a wider dtype; None for code that takes no other dtype than its own."""
    return wider_run(model, run).outputs


def _as_judged(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """A copy in a wider dtype gets its inputs in that dtype."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    wide = next(iter(dtypes)) if len(dtypes) == 1 else None
    if wide in (torch.float32, torch.float64):
        return judge.in_dtype(args, wide), judge.in_dtype(kwargs, wide)
    return args, kwargs


def own_model(model: nn.Module) -> nn.Module:
    """The model of transformers inside one of peft, where the calls of ``generate()`` arrive; else the model."""
    inner = getattr(model, "get_base_model", None)
    return inner() if callable(inner) else model


def restore(model: Model) -> Model:
    """Put every module of the model back as it was before :func:`kernelize`; harmless on any other model.

    Raises:
        UsageError: If it is no module.
    """
    _require_module(model)
    for known in (model, own_model(model)):
        _reports.pop(known, None)
        _left.pop(known, None)
    return binding.restore(model)


@contextmanager
def kernelized(model: Model, **options: Any) -> Iterator[Model]:
    """:func:`kernelize` for the length of a block."""
    try:
        yield kernelize(model, **options)
    finally:
        restore(model)


def report(model: nn.Module) -> Report:
    """What :func:`kernelize` did to this model, and what has been taken back since.

    Raises:
        UsageError: If it did nothing to it.
    """
    _require_module(model)
    found = _reports.get(model)
    if found is None:
        _refuse_emitted(model)
    if found is None and model in _left:
        raise UsageError(f"kernelize left this {type(model).__name__} as it was: {_left[model]}",
                         advice="kernelize(model, strict=True) raises where nothing can be done")  # fmt: skip
    if found is None:
        raise UsageError(f"this {type(model).__name__} has not been kernelized", advice="Call kernelize(model) first")
    binding.check(model)
    return replace(found, given_back=tuple(binding.given_back(model)), runs=what_runs(model_device(model)))


def _require_flags(**flags: object) -> None:
    """``verify="no"`` would verify."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise UsageError(f"{name}={value!r} is neither True nor False", advice="Give one of them")


def _refuse_emitted(model: nn.Module) -> None:
    """A model to which somebody applied an emitted file, or a copy of a kernelized one, has no report of its own."""
    binding.check(model)
    files, back = binding.emitted_files(model), binding.given_back(model)
    if not files and not back:
        return
    what = f"this {type(model).__name__} runs the emitted code of {', '.join(files)}, which kernelize did not put there"
    if not files:
        what = f"this {type(model).__name__} runs its author's code again after an emitted file was applied to it"
    listed = [str(one) for one in back[:_SHOWN]] + [f"and {len(back) - _SHOWN} more"] * (len(back) > _SHOWN)
    raise UsageError("; ".join([what, *listed]),
                     advice="The head of the emitted file lists its places; tilegym_fx.restore(model) takes it off,"
                            " and kernelize(model) makes a report")  # fmt: skip


def _unchanged(model: Model, why: str, strict: bool, error: Exception) -> Model:
    if strict:
        raise error
    _left[model] = why
    warnings.warn(f"tilegym_fx: {type(model).__name__} is unchanged: {why}", stacklevel=3)
    return model


def _why_nothing(found: Report) -> str:
    misses = found.misses()
    nearest = f"; the nearest miss is {misses[0]}" if misses else ""
    return f"nothing in it can be replaced{nearest}"
