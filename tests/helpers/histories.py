"""Random histories of a cache's rows, which hold what lists hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

ACTIONS = ["pass", "pass", "pass", "truncate", "add", "leave", "swap", "copy", "save", "load"]


def play(
    data: st.DataObject,
    cache: Any,
    run: Callable[[int, list[list[int]], list[int]], None],
    read: Callable[[int], Sequence[float]],
    **more: Callable[[], object],
) -> None:
    """Rows join, are fed, rewound, copied, kept for others, exchanged and dropped; after each action they are read.

    run: a pass from a row on, over numbers [B][T] of which each row keeps so many. more: actions that change no row.
    """
    rows: list[list[int]] = [[], [], []]
    saved: list[tuple[Any, list[int]]] = []
    token = 1
    cache.add_rows(len(rows))
    for _ in range(25):
        row, other = (data.draw(st.integers(0, len(rows) - 1)) for _ in "ab")
        match data.draw(st.sampled_from([*ACTIONS, *more])):
            case "pass":
                batch, width = data.draw(st.integers(1, len(rows) - row)), data.draw(st.sampled_from([1, 2, 5, 70]))
                counts = [data.draw(st.integers(0, width) | st.just(width)) for _ in range(batch)]
                values = [[*range(token + i * width, token + (i + 1) * width)] for i in range(batch)]
                token += batch * width
                run(row, values, counts)
                for i, count in enumerate(counts):
                    rows[row + i] += values[i][:count]
            case "truncate":
                lengths = data.draw(st.lists(st.integers(0, 80), max_size=len(rows)))
                cache.truncate(lengths)
                rows[: len(lengths)] = [one[:length] for one, length in zip(rows, lengths, strict=False)]
            case "add":
                cache.add_rows(1)
                rows.append([])
            case "leave" if len(rows) > 1:
                last = len(rows) - 1
                cache.rearrange([(last, row)] if row != last else [], last)
                rows[row] = rows[last]
                rows.pop()
            case "swap" if row != other:
                cache.swap(row, other)
                rows[row], rows[other] = rows[other], rows[row]
            case "copy" if row != other and rows[row]:
                length = data.draw(st.integers(1, len(rows[row])))
                cache.copy_prefix(row, other, length)
                rows[other] = rows[row][:length]
            case "save" if rows[row]:
                saved.append((cache.save_prefix(row, len(rows[row])), rows[row][:]))
            case "load" if saved:
                prefix, kept = data.draw(st.sampled_from(saved))
                length = data.draw(st.integers(1, len(kept)))
                cache.load_prefix(row, prefix, length)
                rows[row] = kept[:length]
            case name if name in more:
                more[name]()
        assert list(cache.lengths) == [len(one) for one in rows]
        assert [list(read(i)) for i in range(len(rows))] == rows
