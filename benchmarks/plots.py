"""A table as a picture, by matplotlib: for each column a group of bars, with their spread and the target."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from suite import Table

_COLOURS = {"flatshard": "#4e79a7", "FSDP2": "#f28e2b", "FSDP1": "#e15759", "DDP": "#76b7b2"}


def missing() -> str:
    """Why nothing can be drawn here. Empty: it can."""
    found = importlib.util.find_spec("matplotlib") is not None
    return "" if found else "--plot needs matplotlib: pip install matplotlib"


def draw(table: Table, path: Path) -> None:
    """Each column has a scale of its own, from zero."""
    from matplotlib.figure import Figure

    height = 1.2 + len(table.columns) * (0.6 + 0.22 * len(table.rows))
    figure = Figure((9, height), layout="constrained")
    figure.suptitle(f"{table.name}: {table.title}\nFloor: {table.floor}", fontsize=8, wrap=True)
    for axes, column in zip(figure.subplots(len(table.columns), squeeze=False)[:, 0], table.columns, strict=True):
        rows = {name: row[column] for name, row in reversed(table.rows.items()) if column in row}
        values = [f.value or 0.0 for f in rows.values()]
        spread = [(v - (f.low or v), (f.high or v) - v) for v, f in zip(values, rows.values(), strict=True)]
        colours = [next((c for start, c in _COLOURS.items() if n.startswith(start)), "#bab0ac") for n in rows]
        bars = axes.barh([*rows], values, color=colours, xerr=[*zip(*spread, strict=True)], ecolor="#333")
        axes.bar_label(bars, [f.text(table.digits) for f in rows.values()], padding=3, fontsize=7)
        for name, targets in table.targets.items():
            if column in targets and name in rows:
                y = [*rows].index(name)
                axes.vlines(targets[column], y - 0.5, y + 0.5, color="black", linewidth=2)
        axes.set_title(column, loc="left", fontsize=9)
        axes.margins(x=0.25)
        axes.tick_params(labelsize=7)
    figure.savefig(path)
