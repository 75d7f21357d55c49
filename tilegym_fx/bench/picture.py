"""Time by kernel before and after, as an SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from .results import KernelTime, Result, best

_WIDTH, _BAR, _ROW, _LEFT, _RIGHT = 960, 34, 18, 150, 90
_SHOWN = 8
_OURS = ("#2f7d4f", "#4c9a6a", "#6bb585", "#8fcca3", "#b3dfc1", "#d3eedc")
_OTHERS = ("#5a6b86", "#7688a3", "#93a3ba", "#b0bccd", "#ccd5e0", "#e4e9ef")


def draw(results: Sequence[Result]) -> str:
    """For each case two bars on one scale: the fastest baseline, and the fastest of our variants."""
    parts: list[str] = []
    y = 24
    for case in dict.fromkeys(result.case for result in results):
        of_case = [result for result in results if result.case == case and result.kernels]
        pair = [r for r in (_best(of_case, ours=False), _best(of_case, ours=True)) if r is not None]
        if pair:
            drawn, y = _group(case, pair, y)
            parts += drawn
    body = "\n".join(parts) or f'<text x="8" y="{y}">no kernel times: nothing was timed on a GPU</text>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{y + 12}" '
        f'font-family="sans-serif" font-size="12">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def _best(results: Sequence[Result], *, ours: bool) -> Result | None:
    return best(results, ours=ours, measure="gpu") or best(results, ours=ours)


def _group(case: str, pair: Sequence[Result], y: int) -> tuple[list[str], int]:
    parts = [f'<text x="8" y="{y}" font-weight="bold">{escape(case)}: GPU time by kernel</text>']
    y += 12
    scale = (_WIDTH - _LEFT - _RIGHT) / max(_total(result) for result in pair)
    for result in pair:
        parts.append(f'<text x="8" y="{y + 21}">{escape(result.variant)}</text>')
        x = float(_LEFT)
        for kernel, color in _colored(result.kernels):
            width = kernel.seconds * scale
            label = f"{kernel.name}: {1e3 * kernel.seconds:.3f} ms"
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{max(width, 0.3):.1f}" height="{_BAR}" fill="{color}"'
                f' stroke="white" stroke-width="0.5"><title>{escape(label)}</title></rect>'
            )
            x += width
        parts.append(f'<text x="{x + 6:.1f}" y="{y + 21}">{1e3 * _total(result):.3f} ms</text>')
        y += _BAR + 6
    for kernel, color in _colored(pair[-1].kernels):
        parts.append(f'<rect x="{_LEFT}" y="{y}" width="12" height="12" fill="{color}"/>')
        share = f"{kernel.seconds / _total(pair[-1]):.1%} {'ours' if kernel.is_ours else ''}"
        parts.append(f'<text x="{_LEFT + 18}" y="{y + 10}">{escape(f"{share} {kernel.name[:100]}")}</text>')
        y += _ROW
    return parts, y + 28


def _total(result: Result) -> float:
    return sum(kernel.seconds for kernel in result.kernels)


def _colored(kernels: Sequence[KernelTime]) -> Iterator[tuple[KernelTime, str]]:
    """The longest kernels, ours in green and before the others, and one bar for the rest."""
    shown, rest = kernels[:_SHOWN], kernels[_SHOWN:]
    for is_ours, colors in ((True, _OURS), (False, _OTHERS)):
        for i, kernel in enumerate(k for k in shown if k.is_ours is is_ours):
            yield kernel, colors[min(i, len(colors) - 1)]
    if rest:
        yield KernelTime(f"{len(rest)} more", sum(k.seconds for k in rest), 0, False), "#f1f3f6"
