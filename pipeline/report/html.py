"""Parts of self-contained pages: readable on a phone, in the dark, and on paper."""

import html
from collections.abc import Iterable, Sequence

STYLE = """
:root{color-scheme:light dark;--soft:#f3f4f6;--line:#d5d8dd;--quiet:#5d6570;--mark:#1f77b4}
@media(prefers-color-scheme:dark){
:root{--soft:#1d2026;--line:#3a3f48;--quiet:#9aa3af;--mark:#6db3e8}
body{background:#121418;color:#e4e6ea}}
body{font:16px/1.5 system-ui,sans-serif;max-width:76rem;margin:2rem auto;padding:0 1rem}
h1,h2{line-height:1.2}h1{margin-bottom:.2em}h2{margin-top:2em;font-size:1.25rem}
.asked{font-size:1.1rem}.quiet{color:var(--quiet);font-size:.9rem;margin:.3rem 0}
pre,.scroll{overflow-x:auto}pre{background:var(--soft);padding:1rem;font-size:13px}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:.3rem .5rem;border-bottom:1px solid var(--line);vertical-align:top}
table.figures{font-size:.85rem}.figures th,.figures td{text-align:right;white-space:nowrap}
.figures th:first-child,.figures td:first-child{text-align:left}.figures .main{font-weight:600}
.figures .below td{color:var(--quiet);border-top:0}
svg{max-width:100%;height:auto}svg text{fill:currentColor}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(15rem,1fr));gap:0 1.5rem}
.grid h4{margin:.5rem 0 0;color:var(--quiet);font-weight:500}
.texts{border-top:1px solid var(--line);padding:.6rem 0;overflow-wrap:anywhere}
ol{margin:.2rem 0;padding-left:1.4rem}li.same::marker{color:var(--mark);font-weight:700}
@media(max-width:40rem){section{overflow-x:auto}section svg{min-width:38rem}}
@media print{body{max-width:none;margin:0}pre{white-space:pre-wrap}section{break-inside:avoid}}
"""


def document(title: str, parts: Iterable[str]) -> str:
    """A whole page."""
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style>"
        f"<h1>{html.escape(title)}</h1>{''.join(parts)}</html>\n"
    )


def section(heading: str, body: str) -> str:
    """body: HTML."""
    return f"<section><h2>{html.escape(heading)}</h2>{body}</section>"


def paragraphs(lines: Iterable[str], style: str = "") -> str:
    kind = f' class="{style}"' if style else ""
    return "".join(f"<p{kind}>{html.escape(line)}</p>" for line in lines if line)


def preformatted(text: str) -> str:
    return f"<pre>{html.escape(text)}</pre>"


def figures_table(rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """The first row is the heading; later rows may be shorter.

    Args:
        rows: each with its style: "", main (stands out) or below (belongs to the one above).
    """
    (_, names), *others = rows
    heading = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    body = []
    for style, cells in others:
        texts = [*cells, *[""] * (len(names) - len(cells))]
        row = "".join(f"<td>{html.escape(text.strip())}</td>" for text in texts)
        body.append(f'<tr class="{style}">{row}</tr>')
    table = f'<table class="figures"><thead><tr>{heading}</tr></thead>{"".join(body)}</table>'
    return f'<div class="scroll">{table}</div>'
