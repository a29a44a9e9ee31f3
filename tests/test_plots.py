"""Plots go into the axes they are given, hold the counts, and name the extra they need."""

import sys

import pytest

from ready_hf import DecodingStats
from ready_hf.plots import plot_acceptance, require_matplotlib, save_acceptance


STATS = {
    "DSpark": DecodingStats(drafted_by_position=[4, 4], accepted_by_position=[3, 1]),
    "ReaDy": DecodingStats(drafted_by_position=[4, 4, 2], accepted_by_position=[4, 2, 1]),
}


def test_missing_matplotlib_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"extra `plot`"):
        require_matplotlib()
    with pytest.raises(ImportError, match=r"extra `plot`"):
        plot_acceptance(STATS)


def test_lines_hold_the_shares(tmp_path):
    pytest.importorskip("matplotlib", reason="plots need the extra `plot`")
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    assert plot_acceptance(STATS, axes) is axes
    found = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}
    assert found == {"DSpark": ([1, 2], [0.75, 0.25]), "ReaDy": ([1, 2, 3], [1.0, 0.5, 0.5])}
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["DSpark", "ReaDy"]
    assert list(axes.get_xticks()) == [1, 2, 3]


def test_new_axes_are_made_without_any(monkeypatch):
    matplotlib = pytest.importorskip("matplotlib", reason="plots need the extra `plot`")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    axes = plot_acceptance({})
    assert axes.get_lines() == axes.get_lines()[:0]
    pyplot.close(axes.figure)


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.pdf", b"%PDF")])
def test_the_ending_says_the_format(name, start, tmp_path):
    pytest.importorskip("matplotlib", reason="plots need the extra `plot`")
    save_acceptance(STATS, tmp_path / name, "Accepted drafts")
    assert (tmp_path / name).read_bytes().startswith(start)
