import sys
from pathlib import Path

import pytest

from sameseed.errors import ConfigError
from sameseed.measure.costs import Cost, Profile
from sameseed.measure.limits import Limits
from sameseed.measure.profile_report import plot
from sameseed.report.plot import Panel, Series, plot_paths, shown


def made(contexts, rows):
    limit = Limits(2, {"read": (2e10,), "fp32": (2e11,), "int8": (9e11,)}, {}, "native")
    costs = tuple(
        Cost(f, "bf16", c, m, 10.0 + m, (10 + m) / 11, 9.0 + m, 12.0 + m, 5, 8.0, 0.4 * m)
        for f in ("bf16", "w4a8")
        for c in contexts
        for m in rows
    )
    return Profile({"name": "tiny <shape>"}, costs, (), (), (), limit, {"cpu": "some CPU"}, interrupted=True)


@pytest.mark.parametrize("case", [((8,), (1, 2, 16)), ((8, 64), (1, 2)), ((8,), (1,))])
def test_both_files_are_written(case, tmp_path):
    pytest.importorskip("matplotlib")
    png, svg = plot(made(*case), tmp_path / "curves.png")
    assert png.read_bytes().startswith(b"\x89PNG") and len(png.read_bytes()) > 10_000
    assert "<svg" in svg.read_text() and svg.name == "curves.svg"
    before = svg.read_bytes()
    plot(made(*case), tmp_path / "curves")
    assert svg.read_bytes() == before, "the same numbers draw the same file"


@pytest.mark.parametrize("published", [1, 6, 7])
def test_a_full_panel_is_parted(published):
    """However many published series there are, the first part has one of ours, and the later ones have no published."""
    ours = [Series(f"ours {i}", [(1, 1.0)]) for i in range(4)]
    theirs = [Series(f"theirs {i}", [(1, 1.0)], published=True) for i in range(published)]
    parts = shown([Panel("t", "x", [*ours, *theirs])])
    drawn = [[s.label for s in part.series if not s.published] for part in parts]
    assert [label for part in drawn for label in part] == [s.label for s in ours] and all(drawn)
    assert [sum(s.published for s in part.series) for part in parts] == [published] + [0] * (len(parts) - 1)


def test_clear_errors(monkeypatch):
    with pytest.raises(ConfigError, match=r"not as '\.pdf'.*c\.png"):
        plot_paths(Path("c.pdf"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="matplotlib"):
        plot_paths(Path("c.png"))
