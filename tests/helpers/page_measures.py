"""Measures of the server's page as scripts that each browser runs on it: contrast, names, sizes, and what sticks out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_COLOURS = """
    const light = (rgb) => rgb.map((c) => c / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
        .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
    const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
    const back = (e) => { for (; e; e = e.parentElement) {
        const c = numbers(getComputedStyle(e).backgroundColor); if (c.length < 4 || c[3] > 0) return c.slice(0, 3); } };
    const ratio = (one, other) => { const [a, b] = [light(numbers(one).slice(0, 3)), light(other)];
        return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05); };"""
CONTRAST = f"""() => {{ {_COLOURS}
    const out = {{}};
    for (const e of document.querySelectorAll("body *")) {{
        const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
        if (!own || !e.checkVisibility() || e.disabled) continue;
        const found = ratio(getComputedStyle(e).color, back(e));
        if (found < 4.5) out[`${{e.localName}}.${{e.className}}: ${{e.textContent.slice(0, 20)}}`] = found;
    }}
    return out; }}"""
"""Texts with less than the 4.5 of WCAG AA, and their contrast."""
EDGES = f"""() => {{ {_COLOURS}
    const out = {{}};
    for (const e of document.querySelectorAll("input:not([type=checkbox]), textarea, select:enabled")) {{
        if (!e.checkVisibility()) continue;
        const found = ratio(getComputedStyle(e).borderTopColor, back(e.parentElement));
        if (found < 3) out[e.id] = found;
    }}
    return out; }}"""
"""Fields whose border has less than the 3 of WCAG AA, and its contrast."""
SMALL = """() => [...document.querySelectorAll("button, select:enabled, input:not([type=checkbox]), label:has([type=checkbox])")]
    .filter((e) => e.checkVisibility()).map((e) => [e, e.getBoundingClientRect()])
    .filter(([, box]) => box.width < 24 || box.height < 24).map(([e]) => e.outerHTML.slice(0, 80))"""
"""Targets of less than 24 pixels, the least of WCAG AA."""
OUTSIDE = """() => [...document.querySelectorAll("header *, form *, .message *, .answer, .actions *, #list *")]
    .filter((e) => e.checkVisibility() && !e.closest(".unseen")).map((e) => [e, e.getBoundingClientRect()])
    .filter(([, box]) => box.left < -0.5 || box.right > innerWidth + 0.5).map(([e]) => e.outerHTML.slice(0, 80))"""
CUT = """() => [...document.querySelectorAll("button, form label, summary")].filter((e) => e.checkVisibility())
    .filter((e) => !e.closest("#examples") && e.getBoundingClientRect().height > 48).map((e) => e.textContent)"""
"""Controls whose text takes more than a line."""
NAMES = """(all) => all.map((e) => e.ariaLabel || e.labels?.[0]?.textContent.trim() || e.textContent.trim())"""
"""Names of controls for screen readers."""


def illegible(evaluate: Callable[[str], Any]) -> dict[str, Any]:
    """Faults by each measure: contrast of texts and borders, parts that stick out or are cut, targets that a finger misses."""
    wide = "() => document.documentElement.scrollWidth > innerWidth"
    found = {measure: evaluate(f"({measure})()") for measure in (wide, OUTSIDE, CUT, SMALL, CONTRAST, EDGES)}
    return {measure: one for measure, one in found.items() if one}
