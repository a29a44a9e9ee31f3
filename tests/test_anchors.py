"""Anchors by row: the same for the same row, whatever stands beside it."""

import torch

from ready_hf.anchors import anchors_of_rows, row_seed
from ready_hf.features import legal_anchors


def text_row(ids, length):
    """One padded row, its mask, and where an anchor may stand in it."""
    row = torch.nn.functional.pad(torch.tensor([ids]), (0, length - len(ids)))
    mask = torch.arange(length)[None] < len(ids)
    return row, mask, legal_anchors(mask, 4)


def test_anchors_follow_a_row_wherever_it_stands():
    ids, others = list(range(3, 33)), list(range(40, 60))
    row, mask, legal = text_row(ids, 30)
    alone, _ = anchors_of_rows(legal, row, mask, 6, seed=0, epoch=0)
    longer, padded = text_row(others, 44), text_row(ids, 44)
    rows, masks, places = (torch.cat(pair) for pair in zip(longer, padded, strict=True))
    beside, is_anchor = anchors_of_rows(places, rows, masks, 6, seed=0, epoch=0)
    assert torch.equal(beside[1], alone[0])
    assert is_anchor.all()
    assert alone[0].unique().numel() == 6
    assert not torch.equal(beside[0], beside[1])
    for other in ({"seed": 1, "epoch": 0}, {"seed": 0, "epoch": 1}):
        assert not torch.equal(anchors_of_rows(legal, row, mask, 6, **other)[0], alone)
    assert alone.tolist() == [[2, 5, 12, 15, 22, 25]]  # on every machine


def test_every_legal_place_becomes_an_anchor_as_often():
    row, mask, legal = text_row(list(range(3, 23)), 20)
    counts = torch.zeros(20, dtype=torch.long)
    for epoch in range(2000):
        counts[anchors_of_rows(legal, row, mask, 3, seed=0, epoch=epoch)[0]] += 1
    wanted = 6000 / int(legal.sum())
    assert counts[~legal[0]].sum() == 0
    assert ((counts[legal[0]] - wanted).abs() < 5 * wanted**0.5).all()


def test_rows_with_few_places_and_empty_rows():
    rows, masks, places = (torch.cat(x) for x in zip(text_row([5] * 7, 12), text_row([], 12), strict=True))
    positions, is_anchor = anchors_of_rows(places, rows, masks, 5, seed=0, epoch=0)
    assert positions.tolist() == [[0, 0, 0, 1, 2], [0] * 5]
    assert is_anchor.tolist() == [[False] * 3 + [True] * 2, [False] * 5]
    assert row_seed(rows[0], 0, 1) != row_seed(rows[0], 1, 0)
