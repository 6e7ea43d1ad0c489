"""A table as an SVG, written by hand: for each column a group of bars, with their spread and the target."""

from __future__ import annotations

from xml.sax.saxutils import escape

from suite import Figure, Table

WIDTH, LEFT, RIGHT, BAR = 900, 200, 190, 16
_COLOURS = {"flatshard": "#4e79a7", "FSDP2": "#f28e2b", "FSDP1": "#e15759", "DDP": "#76b7b2"}
_OTHER = "#bab0ac"


def as_svg(table: Table) -> str:
    """The drawing: XML that needs no other file. Each column has a scale of its own, from zero."""
    parts = [_text(20, 28, table.name, size=16), *_wrapped(table.title, 48)]
    y = 48 + 15 * len(_lines(table.title)) + 10
    for column in table.columns:
        y = _column(parts, table, column, y)
    parts += _wrapped(f"Floor: {table.floor}", y + 10)
    y += 10 + 15 * len(_lines(f"Floor: {table.floor}"))
    body = "\n".join(parts)
    return (
        f'<?xml version="1.0" encoding="UTF-8"?>\n<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" '
        f'viewBox="0 0 {WIDTH} {y}" font-family="sans-serif">\n<rect width="{WIDTH}" height="{y}" fill="white"/>\n'
        f"{body}\n</svg>\n"
    )


def _column(parts: list[str], table: Table, column: str, y: int) -> int:
    """One group; the y below it."""
    figures = {name: row[column] for name, row in table.rows.items() if column in row}
    targets = {name: columns[column] for name, columns in table.targets.items() if column in columns}
    most = max([1e-12, *targets.values(), *(f.value for f in figures.values() if f.value is not None)])
    scale = (WIDTH - LEFT - RIGHT) / most
    parts.append(_text(20, y + 12, column, size=13))
    y += 20
    for name, figure in figures.items():
        parts.append(_text(LEFT - 8, y + 12, name, anchor="end"))
        _bar(parts, figure, name, scale, most, y, table.digits)
        if name in targets:
            x = LEFT + targets[name] * scale
            parts.append(_line(x, y - 3, x, y + BAR + 1, "#000", f"target: at most {targets[name]:g}", width=2))
        y += BAR + 4
    return y + 10


def _bar(parts: list[str], figure: Figure, name: str, scale: float, most: float, y: int, digits: int) -> None:
    value = figure.value
    end = LEFT + max(0.0, value or 0.0) * scale
    if value is not None:
        colour = next((c for start, c in _COLOURS.items() if name.startswith(start)), _OTHER)
        parts.append(
            f'<rect x="{LEFT}" y="{y}" width="{max(end - LEFT, 0.5):.1f}" height="{BAR - 2}" fill="{colour}"/>'
        )
        if figure.low is not None and figure.high is not None:
            low, high = (LEFT + min(max(0.0, v), most) * scale for v in (figure.low, figure.high))
            parts.append(_line(low, y + BAR / 2 - 1, high, y + BAR / 2 - 1, "#333", "least to most"))
            end = max(end, high)
    parts.append(_text(end + 6, y + 12, figure.text(digits)))


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, title: str, width: int = 1) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="{width}">'
        f"<title>{escape(title)}</title></line>"
    )


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 11) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{escape(text)}</text>'


def _lines(text: str, length: int = 130) -> list[str]:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) > length:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def _wrapped(text: str, y: int) -> list[str]:
    return [_text(20, y + 15 * i, line) for i, line in enumerate(_lines(text))]
