"""HTML from small functions. Whatever is not already `Html` is escaped on its way in, so no caller can forget to."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape


class Html(str):
    """Text that is markup already."""


def html(value: object) -> Html:
    return value if isinstance(value, Html) else Html(escape(str(value)))


def join(parts: Iterable[object], between: str = "") -> Html:
    return Html(between.join(html(part) for part in parts))


def tag(name: str, *content: object, **attributes: object) -> Html:
    """`tag("p", "text", class_="note")`; a trailing underscore lets attributes be named like Python keywords."""
    written = "".join(f' {key.rstrip("_")}="{escape(str(value))}"' for key, value in attributes.items())
    return Html(f"<{name}{written}>{join(content)}</{name}>")


def section(heading: str, *content: object) -> Html:
    return tag("section", tag("h2", heading), *content)


def table(head: Sequence[object], rows: Sequence[Sequence[object]], caption: object = "") -> Html:
    """A table whose first column names the row. Cells that are `Html` of a <td> are taken as they are."""
    top = tag("thead", tag("tr", *(tag("th", cell, scope="col") for cell in head)))
    body = tag("tbody", *(tag("tr", tag("th", row[0], scope="row"), *map(cell, row[1:])) for row in rows))
    title = tag("caption", caption) if caption else ""
    return tag("div", tag("table", title, top, body), class_="scroll")


def cell(value: object, **attributes: object) -> Html:
    if isinstance(value, Html) and value.startswith("<td"):
        return value
    return tag("td", value, **attributes)


def image(png: bytes, width: int, description: str) -> Html:
    """An embedded picture on a white card. On a narrow window it keeps a legible size and the card scrolls."""
    source = "data:image/png;base64," + base64.b64encode(png).decode("ascii")
    picture = f'<img src="{source}" alt="{escape(description)}" width="{width}" style="min-width:{min(width, 620)}px">'
    return tag("figure", tag("div", Html(picture), class_="scroll"), class_="card")
